"""One task, ready to be measured: its operands, its references and the clock of its device."""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.cost_model.judge import Judge, random_values
from gtco.ir.graph import Group
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.host import HostKernel
from gtco.runtime.library import bind_library
from gtco.runtime.poison import poisoned

COPIES = 12
"""Launches of a chain, each with weights of its own: as a model's layers have."""
FP32 = "fp32"
"""What ATen's calls are timed in where the workload does not say tf32, to which cuDNN would round
fp32 by default."""
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
        call = bind_library(self.group, self.operands.tensors, FP32)
        self._launch = lambda: call(0)
        return self._launch

    def wait(self) -> None:
        pass

    def times_us(self, program: KernelProgram | None, *, final: bool) -> list[float]:
        begin = time.perf_counter()
        self._launch()
        return [(time.perf_counter() - begin) * 1e6]
