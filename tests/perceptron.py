"""A perceptron, its tasks and records of them: what tests of the tuner begin with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gtco
from gtco.compiler import fuse_with
from gtco.cost_model.knowledge import VERSIONS, Knowledge
from gtco.cost_model.record import TuningRecord
from gtco.ir.graph import Graph
from gtco.passes import run_pipeline
from gtco.passes.tasks import Task, tasks
from gtco.target import CARDS, TARGETS

H100 = TARGETS["sm_90a"]
CARD = CARDS["sm_90a"]
DEVICE = CARD.name
ARGS = (torch.linspace(-1, 1, 32 * 64).view(32, 64).half(),)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.half().eval()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


RECORD = TuningRecord("w", DEVICE, "gemm_mma", VERSIONS["gemm_mma"], {"a": 1}, 5.0)


def record(run_us: float | None = 5.0, **fields: object) -> TuningRecord:
    return TuningRecord(**{**vars(RECORD), "run_us": run_us, **fields})


def mlp() -> tuple[Graph, Task]:
    """The rewritten graph, and the task of its fused `linear -> gelu`."""
    graph = run_pipeline(gtco.capture(Mlp(), ARGS))
    (fused,) = fuse_with(Knowledge(DEVICE), graph, H100)
    (joined,) = [task for task in tasks(fused, H100) if len(task.group.compute) == 2]
    return graph, joined
