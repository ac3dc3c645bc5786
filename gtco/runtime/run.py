"""Run or time one generated kernel on tensors: for tests and for measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.ir.graph import Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.captured import capture
from gtco.runtime.driver import BoundLaunch, LoadedKernel
from gtco.runtime.nvrtc import compile_kernel
from gtco.runtime.poison import poisoned

REPLAYS = 20
"""Replays of a chain between two events."""


def load_program(program: KernelProgram, device: int) -> LoadedKernel:
    """Compile `program` (or take it from the cache) and load it.

    Raises:
        CompileError: NVRTC refuses the source.
        DriverError: the driver refuses the cubin.
    """
    return LoadedKernel(compile_kernel(program.code, program.name, program.arch), device)


def run_group(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Launch `program` once on the current stream and wait for it.

    Args:
        program: made from `group`.
        group: its inputs and outputs.
        values: each input (and constant; missing ones are taken from the group) by name, on
            one CUDA device and of the group's shapes.

    Returns:
        Each output of the group by name; what the kernel did not write is NaN.
    """
    device = _device(values)
    tensors = _operands(group, values, device)
    with torch.cuda.device(device):
        assert device.index is not None
        kernel = load_program(program, device.index)
        launch = BoundLaunch(kernel, program, tensors, dependent=False)
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    return {name: tensors[name] for name in group.graph.outputs}


class Chain:
    """Launches one after another, captured as one CUDA graph on the current device.

    Args:
        launches: each enqueues on the stream with the given handle. What they use must stay alive.
    """

    def __init__(self, launches: Sequence[Callable[[int], None]]) -> None:
        self._count = len(launches)

        def enqueue() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for launch in launches:
                launch(stream)

        enqueue()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        capture(self._graph, torch.cuda.Stream(), enqueue)  # type: ignore[no-untyped-call]

    def times_us(
        self, repeat: int, replays: int = REPLAYS, enough_us: float = math.inf
    ) -> list[float]:
        """Microseconds from one launch's start to the next one's.

        Args:
            repeat: how many times to take.
            replays: of the chain in each.
            enough_us: a time above this one is the last: more of them would be in vain.
        """
        times: list[float] = []
        for _ in range(repeat + 1):  # the first replay uploads the graph
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._graph.replay()  # while it runs the host goes ahead: submitting must not count
            begin.record()
            for _ in range(replays):
                self._graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1000 / (self._count * replays))
            if len(times) > 1 and times[-1] > enough_us:
                break
        return times[1:]


def _device(values: Mapping[str, Tensor]) -> torch.device:
    for tensor in values.values():
        if tensor.is_cuda:
            return tensor.device
    raise ValueError("run_group needs its values on a CUDA device")


def _operands(
    group: Group, values: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Every stored value of the group, contiguous; outputs are poisoned."""
    graph = group.graph
    tensors: dict[str, Tensor] = {}
    for name in (*graph.inputs, *graph.constants):
        tensor = values[name] if name in values else graph.constants[name]
        spec = graph.specs[name]
        if tuple(tensor.shape) != spec.sizes or tensor.dtype != spec.dtype:
            raise ValueError(f"%{name} is {spec}, but {TensorSpec.of(tensor)} was given")
        tensors[name] = tensor.to(device).contiguous()
    for name in graph.outputs:
        tensors[name] = poisoned(graph.specs[name], device)
    return tensors
