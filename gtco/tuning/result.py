"""What tuning shows while it works, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gtco.cost_model.work import group_work
from gtco.passes.tasks import Task
from gtco.runtime.module import CompiledModule
from gtco.target import Target


@dataclass
class TaskRow:
    """How a task stands.

    Args:
        name: its first group's.
        ops: its operators.
        flops: of one run.
        weight: runs in one call of the model; 0 if only other plans than the best have it.
        best_us: of its fastest program, or None.
        best: where that comes from: a sketch's name or "library".
        library_us: of its ATen calls, or None.
        peak: share of the target's peak arithmetic rate that the fastest program reaches.
        trials: programs measured in this run.
        failures: how many of them failed.
    """

    name: str
    ops: str
    flops: int
    weight: int
    best_us: float | None = None
    best: str = ""
    library_us: float | None = None
    peak: float | None = None
    trials: int = 0
    failures: int = 0


@dataclass(frozen=True)
class TuneStatus:
    """What `tune` shows while it works: the phase, the time and trials used, a row a task."""

    phase: str
    seconds: float
    trials: int
    rows: tuple[TaskRow, ...]


@dataclass(frozen=True)
class TuneResult:
    """What `tune` found.

    Args:
        compiled: the model with the best plan known now.
        rows: one a task.
        before_us: predicted latency with what was known before.
        after_us: the same of `compiled`.
        replayed_us: latency of the whole graph as it was before and as `compiled`, in interleaved
            runs: the same twice if it is as it was, since nothing was faster. None on the host,
            after Ctrl-C, or if a kernel of before was never judged.
        plans_us: latency of each plan that was replayed whole, cheapest predicted first.
        trials: programs measured.
        failures: how many of them failed.
        seconds: of the search, from when the model is captured.
        finish_seconds: of the final timing and of replaying plans, after the search.
        phases: seconds of the measuring processes by phase: start, task, load, check, time.
        stopped: why it ended: "seconds", "trials", "no more programs" or "interrupted".
    """

    compiled: CompiledModule
    rows: tuple[TaskRow, ...]
    before_us: float
    after_us: float
    replayed_us: tuple[float, float] | None
    plans_us: tuple[float, ...]
    trials: int
    failures: int
    seconds: float
    finish_seconds: float
    phases: Mapping[str, float]
    stopped: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; without the module."""
        own = {name: value for name, value in vars(self).items() if name != "compiled"}
        return {**own, "rows": [asdict(row) for row in self.rows], "phases": dict(self.phases)}


def row_of(task: Task) -> TaskRow:
    """The row of a task of which nothing is known."""
    work = group_work(task.group)
    ops = " -> ".join(node.op for node in task.group.compute)
    return TaskRow(task.group.name, ops, work.matmul_flops + work.pointwise_flops, 0)


def peak_us(task: Task, target: Target) -> float:
    """What the task's arithmetic takes at the target's peak rates."""
    work = group_work(task.group)
    rate = work.peak_tflops(target)
    return (work.matmul_flops / rate + work.pointwise_flops / target.fp32_tflops) / 1e6
