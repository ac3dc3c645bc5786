"""A CUDA that only takes notes, and CUDA graphs that run on the CPU, for tests of the runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from gtco.runtime import executable
from gtco.runtime.executable import Executable
from gtco.runtime.plan import Plan
from gtco.target import TARGETS, Device

SUCCESS = driver.CUresult.CUDA_SUCCESS
FUNCTION = 42
MEMORY_BITS = 5120


class Notes:
    """What was asked of CUDA, and the stream that is current."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.current = Stream(self, 0)

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Stream:
    def __init__(self, notes: Notes, stream_id: int) -> None:
        self.notes = notes
        self.stream_id = self.cuda_stream = stream_id

    def wait_stream(self, other: Stream) -> None:
        self.notes.lines.append(f"{self.stream_id} waits for stream {other.stream_id}")

    def wait_event(self, event: object) -> None:
        self.notes.lines.append(f"{self.stream_id} waits for the event")

    def synchronize(self) -> None: ...


def take_notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    """Put stand-ins where the runtime calls torch.cuda, for the length of a test."""
    notes = Notes()

    class Event:
        def record(self, stream: Stream) -> None:
            notes.lines.append(f"event on {stream.stream_id}")

    @contextmanager
    def entered(what: Any) -> Iterator[None]:
        yield

    default = notes.current
    stand_ins = {
        "Event": Event,
        "Stream": lambda device: Stream(notes, 99),
        "default_stream": lambda device: default,
        "current_stream": lambda device=None: notes.current,
        "current_device": lambda: 0,
        "device": entered,
        "stream": entered,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: notes.current)
    workspaces = "_cuda_clearCublasWorkspaces"  # torch's CPU build has none
    monkeypatch.setattr(
        torch._C, workspaces, lambda: notes.lines.append("workspaces dropped"), raising=False
    )
    return notes


Work = list[int] | Callable[[], object]
"""What a node of a graph does: negate from the first of two addresses to the second, or a call."""


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`: a template, and a copy of it that runs."""

    def __init__(self, cuda: CpuGraphs, keep_graph: bool) -> None:
        assert keep_graph, "the driver needs to know the nodes"
        self.template: list[Work] = []
        self.nodes: list[Work] = []
        cuda.graphs.append(self)
        self.number = len(cuda.graphs)
        self.cuda = cuda

    def capture_begin(self, capture_error_mode: str) -> None:
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None

    def instantiate(self) -> None:
        self.nodes = list(self.template)

    def raw_cuda_graph_exec(self) -> int:
        return self.number

    def replay(self) -> None:
        for work in self.nodes:
            self.cuda.run(work)


class CpuGraphs:
    """CUDA graphs of `negate_program` and ATen calls, in the CPU's memory.

    What the runtime asks of the driver is done with the bindings' own structures, and arguments are
    read where the driver would read them.

    Args:
        monkeypatch: for the length of a test.
        numel: floats that each kernel negates.

    Attributes:
        graphs: all that were made.
        updates: (graph, node) of every kernel that got new arguments, from 1.
        refuse: ATen calls cannot be captured.
        failures: updates that are going to fail.
        capturing: the graph that takes what is enqueued.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
        self.numel = numel
        self.graphs: list[Graph] = []
        self.updates: list[tuple[int, int]] = []
        self.refuse = False
        self.failures = 0
        self.capturing: Graph | None = None
        for name in (
            "cuLaunchKernelEx",
            "cuStreamGetCaptureInfo",
            "cuGraphKernelNodeGetParams",
            "cuGraphExecKernelNodeSetParams",
            "cuCtxGetCurrent",
            "cuGetErrorString",
        ):
            monkeypatch.setattr(driver, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: Graph(self, keep_graph))
        monkeypatch.setattr(executable, "LoadedKernel", Kernel)
        for name in ("bind_library", "_copy_step"):
            monkeypatch.setattr(executable, name, self._recorded(getattr(executable, name)))

    def _recorded(self, make: Callable[..., Callable[[int], None]]) -> Callable[..., Any]:
        def made(*args: Any) -> Callable[[int], None]:
            step = make(*args)

            def run(stream: int) -> None:
                if self.capturing is None:
                    step(stream)
                elif self.refuse:
                    raise RuntimeError("not while a stream is capturing")
                else:
                    self.capturing.template.append(lambda: step(stream))

            return run

        return made

    def run(self, work: Work) -> None:
        if callable(work):
            work()
            return
        source, result = ((ctypes.c_float * self.numel).from_address(at) for at in work)
        result[:] = [-value for value in source]

    # -- the driver -------------------------------------------------------------------------------

    def cuLaunchKernelEx(self, config: Any, function: Any, address: int, extra: int) -> Any:
        work = two_pointers(address)
        if self.capturing is None:
            self.run(work)
        else:
            self.capturing.template.append(work)
        return (SUCCESS,)

    def cuStreamGetCaptureInfo(self, stream: Any) -> Any:
        assert self.capturing is not None
        active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        node = driver.CUgraphNode(len(self.capturing.template))
        return (SUCCESS, active, driver.cuuint64_t(1), driver.CUgraph(1), [node], [None], 1)

    def cuGraphKernelNodeGetParams(self, node: Any) -> Any:
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = driver.CUfunction(FUNCTION)
        params.gridDimX, params.blockDimX, params.sharedMemBytes = 128, 256, 64
        return (SUCCESS, params)

    def cuGraphExecKernelNodeSetParams(self, graph_exec: Any, node: Any, params: Any) -> Any:
        if self.failures:
            self.failures -= 1
            return (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
        kept = (int(params.func), params.gridDimX, params.blockDimX, params.sharedMemBytes)
        assert kept == (FUNCTION, 128, 256, 64)
        self.updates.append((int(graph_exec), int(node)))
        self.graphs[int(graph_exec) - 1].nodes[int(node) - 1] = two_pointers(params.kernelParams)
        return (SUCCESS,)

    def cuCtxGetCurrent(self) -> Any:
        return (SUCCESS, driver.CUcontext(1))

    def cuGetErrorString(self, error: Any) -> Any:
        return (SUCCESS, b"invalid argument")


class Kernel:
    """Stands in for `LoadedKernel`."""

    handle = driver.CUfunction(FUNCTION)

    def __init__(self, compiled: object, device: int) -> None: ...

    def allow(self, smem_bytes: int, cluster_size: int) -> None: ...


def two_pointers(table: int) -> list[int]:
    """The values of two kernel parameters, as the driver reads them."""
    parameters = (ctypes.c_void_p * 2).from_address(table)
    return [ctypes.c_uint64.from_address(int(each or 0)).value for each in parameters]


def pretend(monkeypatch: pytest.MonkeyPatch, card: Device) -> None:
    """Let torch and the driver say that `card` is the GPU that is here; nothing can run on it."""
    attributes = {
        "MULTIPROCESSOR_COUNT": card.sm_count,
        "L2_CACHE_SIZE": card.l2_bytes,
        "MEMORY_CLOCK_RATE": round(card.dram_gbps * 8e6 / 2 / MEMORY_BITS),
        "GLOBAL_MEMORY_BUS_WIDTH": MEMORY_BITS,
    }
    values = {
        getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{n}"): v
        for n, v in attributes.items()
    }
    capability = TARGETS[card.arch].capability
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: card.name)
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (SUCCESS, driver.CUdevice(index)))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda name, at: (SUCCESS, values[name]))


def on_cpu(plan: Plan) -> Executable:
    """`plan` made ready on the stand-in."""
    kernels: Any = {each.program.name: None for each in plan.launches if each.program}
    return Executable(plan, torch.device("cpu", 0), kernels)
