"""The process that runs untrusted kernels: it may hang, crash or lose its GPU, and is replaced.

It speaks JSON lines (`gtco.runtime.child`); `gtco.cost_model.measure` is the other end. All that a
task needs (inputs, references, output buffers, twelve copies of its weights) is made once, so that
a program costs its module's load, one checked launch and two milliseconds of timing.

    {"do": "start"}  -> {}
    {"do": "task", "task": key, "graph": ..., "constants": file}  -> {}
    {"do": "measure", "task": key, "program": ..., "final": ...}  -> {"run_us": 4.1, "error": ""}
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.cost_model.judge import Judge, random_values
from gtco.ir.graph import Group
from gtco.runtime.child import serve as serve_child
from gtco.runtime.compile_pool import decode_kernel
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.encoding import decode_graph, decode_program
from gtco.runtime.host import HostKernel
from gtco.runtime.library import bind_library
from gtco.runtime.poison import poisoned
from gtco.target import HOST

HELD_BYTES = 4 << 30
"""Of the tasks that a worker keeps ready; the one used longest ago makes room."""
COPIES = 12
"""Launches of a chain, each with weights of its own: as a model's layers have."""
GUARD_BYTES = 4096
"""Between any two tensors, so that a store past an end hits what is checked."""
_ALIGNMENT = 256
_GUARD = 0x5A

Launch = Callable[[], None]


class Operands:
    """What one task's kernels read and write, in one piece of memory with guards between.

    Args:
        group: the task's.
        values: its inputs and constants.
        device: where they are to be.

    Attributes:
        tensors: every stored value by name; outputs are poisoned by `poison`.
        nbytes: of all of them.
    """

    def __init__(self, group: Group, values: Mapping[str, Tensor], device: torch.device) -> None:
        graph = group.graph
        self.outputs = tuple(graph.outputs)
        self._specs = {name: graph.specs[name] for name in self.outputs}
        read = (*graph.inputs, *graph.constants)
        offsets: dict[str, int] = {}
        end = GUARD_BYTES
        kept: list[tuple[int, int]] = []
        begin = 0
        for name in (*read, *self.outputs):
            offsets[name] = end
            if name in self.outputs:
                kept.append((begin, end))
                begin = end + -(-graph.specs[name].nbytes // 8) * 8
            end += -(-graph.specs[name].nbytes // _ALIGNMENT) * _ALIGNMENT + GUARD_BYTES
        kept.append((begin, end))
        memory = torch.full((end + _ALIGNMENT,), _GUARD, dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % _ALIGNMENT :]
        self.tensors: dict[str, Tensor] = {}
        for name, offset in offsets.items():
            spec = graph.specs[name]
            flat = memory[offset : offset + spec.nbytes]
            self.tensors[name] = flat.view(spec.dtype).view(spec.sizes)
            if name in read:
                self.tensors[name].copy_(values[name])
        self.nbytes = end
        self._kept = [memory[start:stop].view(torch.int64) for start, stop in kept]
        self.poison()
        self._sums = self._sum().tolist()

    def poison(self) -> None:
        """Fill the outputs with what no kernel may leave."""
        for name, spec in self._specs.items():
            self.tensors[name].copy_(poisoned(spec, self.tensors[name].device))

    def damaged(self) -> bool:
        """Whether anything but the outputs has changed."""
        return bool(self._sum().tolist() != self._sums)

    def _sum(self) -> Tensor:
        return torch.stack([each.sum() for each in self._kept])


class Bench(ABC):
    """One task, ready to be measured on one device.

    Args:
        group: the task's.
        device: torch's.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        values = random_values(group, device, seed=len(group.nodes))
        self.operands = Operands(group, values, device)
        self.judge = Judge(group, {name: self.operands.tensors[name] for name in values})

    @abstractmethod
    def load(self, program: KernelProgram, kernel: CompiledKernel) -> Launch:
        """A launch of `program` on the operands."""

    @abstractmethod
    def library(self) -> Launch:
        """The group's ATen calls on the operands."""

    @abstractmethod
    def wait(self) -> None:
        """Until the device is idle."""

    @abstractmethod
    def times_us(self, program: KernelProgram | None, *, final: bool) -> list[float]:
        """Times from start to start in a chain of `COPIES` launches, in microseconds.

        Args:
            program: the one loaded last; None for the ATen calls.
            final: take more of them: the best programs are told apart by little.
        """

    def check(self, launch: Launch) -> str:
        """What is wrong with the launch's results, or ""."""
        self.operands.poison()
        launch()
        self.wait()
        return self.judge(self.operands.tensors)


class HostBench(Bench):
    """The host build in place of a device; its times are the host's clock's and say little."""

    def load(self, program: KernelProgram, kernel: CompiledKernel) -> Launch:
        handle, path = tempfile.mkstemp(suffix=".so")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(kernel.cubin)
            loaded = HostKernel(program, Path(path))
        finally:
            os.unlink(path)
        graph = self.group.graph
        self._launch: Launch = lambda: loaded(
            program, self.operands.tensors, constants=graph.constants, outputs=graph.outputs
        )
        return self._launch

    def library(self) -> Launch:
        call = bind_library(self.group, self.operands.tensors)
        self._launch = lambda: call(0)
        return self._launch

    def wait(self) -> None:
        pass

    def times_us(self, program: KernelProgram | None, *, final: bool) -> list[float]:
        begin = time.perf_counter()
        self._launch()
        return [(time.perf_counter() - begin) * 1e6]


class Worker:
    """Answers the messages of `gtco.cost_model.measure`.

    Args:
        device: "host", or a CUDA device such as "cuda:0".
        start_s: seconds that the process took to make the device ready.
    """

    def __init__(self, device: str, start_s: float) -> None:
        self._device = device
        self._start = {"start": start_s}  # told with the first task
        self._benches: OrderedDict[str, Bench] = OrderedDict()

    def answer(self, message: dict[str, Any]) -> Mapping[str, Any]:
        """The answer to one message.

        "fatal" in it says that this process can measure no more; "unknown" that it has to be
        told of the task first.
        """
        try:
            if message["do"] == "start":
                return self._load_libraries()
            if message["do"] == "task":
                return self._take(message)
            return self._measure(message)
        except Exception as error:  # whatever a bad program provokes is that program's failure
            text = f"{type(error).__name__}: {error}".strip()
            return {"error": text, "fatal": self._is_lost()}

    def _load_libraries(self) -> Mapping[str, Any]:
        """What the first task would wait seconds for: cuBLAS, and torch's kernels in fp64."""
        if self._device != HOST:
            for dtype in (torch.float16, torch.float32, torch.float64):
                some = torch.ones(8, 8, dtype=dtype, device=self._device)
                (some @ some + some).square().mean().item()
        return {}

    def _take(self, message: dict[str, Any]) -> Mapping[str, Any]:
        begin = time.perf_counter()
        parts = load_tensors(Path(message["constants"]).read_bytes())
        group = Group("task", decode_graph(message["graph"], parts))
        self._benches[message["task"]] = self._make(group)
        while len(self._benches) > 1 and sum(map(_held_bytes, self._benches.values())) > HELD_BYTES:
            self._benches.popitem(last=False)
        start, self._start = self._start, {}
        return {"seconds": {**start, "task": time.perf_counter() - begin}}

    def _make(self, group: Group) -> Bench:
        if self._device == HOST:
            return HostBench(group, torch.device("cpu"))
        from gtco.cost_model.worker_cuda import CudaBench  # needs the driver

        return CudaBench(group, torch.device(self._device))

    def _measure(self, message: dict[str, Any]) -> Mapping[str, Any]:
        bench = self._benches.get(message["task"])
        if bench is None:
            return {"unknown": True}
        self._benches.move_to_end(message["task"])
        seconds: dict[str, float] = {}
        program: KernelProgram | None = None
        with _timed(seconds, "load"):
            if message["program"] is None:
                launch = bench.library()
            else:
                data = message["program"]
                sources = {data["kernel"]: message["source"]}
                program = decode_program(data, sources, data["arch"])
                launch = bench.load(program, decode_kernel(message["binary"]))
        with _timed(seconds, "check"):
            error = bench.check(launch)
            if bench.operands.damaged():
                outside = "it wrote outside its outputs"
                return {"error": error or outside, "fatal": True, "seconds": seconds}
        if error:
            return {"error": error, "seconds": seconds}
        with _timed(seconds, "time"):
            bench.operands.poison()
            times = bench.times_us(program, final=message["final"])
            # Launched again and again, it must still be right: a semaphore may not be reset.
            error = bench.judge(bench.operands.tensors)
        if error:
            return {"error": f"launched again: {error}", "seconds": seconds}
        return {"run_us": statistics.median(times), "spread_us": _spread(times), "seconds": seconds}

    def _is_lost(self) -> bool:
        """Whether the CUDA context is lost; such errors never go away."""
        if self._device == HOST:
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def _held_bytes(bench: Bench) -> int:
    """About: the operands, the references in fp64, and the weights once a launch of a chain."""
    return bench.operands.nbytes * (COPIES + 4)


def _spread(times: list[float]) -> float:
    """The distance of the quartiles."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begin


def serve(device: str) -> None:
    """A worker's loop; see `Worker`."""
    begin = time.perf_counter()
    torch.set_grad_enabled(False)
    if device == HOST:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(torch.device(device))
        torch.cuda.synchronize()
    serve_child(Worker(device, time.perf_counter() - begin).answer)
