"""How a worker loads, checks and times on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.cost_model.worker import Bench, Launch
from gtco.graph import Group
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.driver import BoundLaunch, LoadedKernel
from gtco.runtime.library import bind_library
from gtco.runtime.run import Chain, elapsed_us

COPIES = 12
"""Launches of a chain, each with weights of its own: as a model's layers have."""
REPEAT = 5


class CudaBench(Bench):
    """A task on one GPU. Copies of its weights and what flushes L2 are made when first needed."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._device = device
        self._copies: list[dict[str, Tensor]] = []
        self._flush: Tensor | None = None

    def load(self, program: KernelProgram, kernel: CompiledKernel) -> Launch:
        self._kernel = LoadedKernel(kernel, self._device.index)
        bound = BoundLaunch(self._kernel, program, self.operands.tensors, dependent=False)
        return lambda: bound(torch.cuda.current_stream().cuda_stream)

    def library(self) -> Launch:
        call = bind_library(self.group, self.operands.tensors)
        return lambda: call(torch.cuda.current_stream().cuda_stream)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def isolated(self, launch: Launch) -> list[float]:
        flush = self._flush_buffer()
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            for _ in range(REPEAT + 1)
        ]
        for begin, end in events:
            flush.sum()  # reads: lines that were written would have to be stored again
            self.operands.warm()
            begin.record()  # the GPU is behind by now: the host's time to launch does not count
            launch()
            end.record()
        torch.cuda.synchronize()
        return [elapsed_us(begin, end) for begin, end in events[1:]]

    def chained(self, program: KernelProgram | None) -> list[float]:
        launches: Sequence[Callable[[int], None]]
        if program is None:
            launches = [bind_library(self.group, each) for each in self._chain_operands()]
        else:
            launches = [
                BoundLaunch(self._kernel, program, each, dependent=index > 0)
                for index, each in enumerate(self._chain_operands())
            ]
        return Chain(launches).times_us(REPEAT)

    def _chain_operands(self) -> list[dict[str, Tensor]]:
        """Everything shared but the constants."""
        if not self._copies:
            names = tuple(self.group.graph.constants)
            base = self.operands.tensors
            self._copies = [
                {**base, **{name: base[name].clone() for name in names}} for _ in range(COPIES)
            ]
        return self._copies

    def _flush_buffer(self) -> Tensor:
        """Twice as large as L2."""
        if self._flush is None:
            nbytes = 2 * torch.cuda.get_device_properties(self._device).L2_cache_size
            self._flush = torch.zeros(nbytes // 4, dtype=torch.float32, device=self._device)
        return self._flush
