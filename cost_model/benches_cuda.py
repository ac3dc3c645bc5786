"""How the worker loads, checks and times on a CUDA device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.cost_model.benches import COPIES, FP32, Bench, Launch
from gtco.ir.graph import Group
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.driver import BoundLaunch, LoadedKernel
from gtco.runtime.library import bind_library
from gtco.runtime.run import Chain

SEARCH_TIMES, SEARCH_REPLAYS = 5, 8
"""While searching: how many times are taken, and replays of the chain in each: about 2 ms."""
FINAL_TIMES, FINAL_REPLAYS = 11, 20
"""Of the best programs at the end."""
HOPELESS = 1.5
"""Times the task's best so far: a program that takes longer is timed once."""


class CudaBench(Bench):
    """A task on one GPU. Copies of its weights are made when first needed."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._device = device
        self._copies: list[dict[str, Tensor]] = []
        self._best_us = math.inf

    def load(self, program: KernelProgram, kernel: CompiledKernel) -> Launch:
        self._kernel = LoadedKernel(kernel, self._device.index)
        bound = BoundLaunch(self._kernel, program, self.operands.tensors, dependent=False)
        return lambda: bound(torch.cuda.current_stream().cuda_stream)

    def library(self) -> Launch:
        call = bind_library(self.group, self.operands.tensors, FP32)
        return lambda: call(torch.cuda.current_stream().cuda_stream)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def times_us(self, program: KernelProgram | None, *, final: bool) -> list[float]:
        launches: Sequence[Callable[[int], None]]
        if program is None:
            launches = [bind_library(self.group, each, FP32) for each in self._chain_operands()]
        else:
            launches = [
                BoundLaunch(self._kernel, program, each, dependent=index > 0)
                for index, each in enumerate(self._chain_operands())
            ]
        chain = Chain(launches)
        if final:
            return chain.times_us(FINAL_TIMES, FINAL_REPLAYS)
        times = chain.times_us(SEARCH_TIMES, SEARCH_REPLAYS, HOPELESS * self._best_us)
        self._best_us = min(self._best_us, statistics.median(times))
        return times

    def _chain_operands(self) -> list[dict[str, Tensor]]:
        """Everything shared but the constants."""
        if not self._copies:
            names = tuple(self.group.graph.constants)
            base = self.operands.tensors
            self._copies = [
                {**base, **{name: base[name].clone() for name in names}} for _ in range(COPIES)
            ]
        return self._copies
