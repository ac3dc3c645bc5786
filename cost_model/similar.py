"""Which workloads are alike: schedules that were good for one are worth trying on the other."""

from __future__ import annotations


def likeness(first: str, second: str) -> float:
    """How alike two workloads (`gtco.passes.tasks.workload_key`) are: 0 nothing, 1 the same."""
    raise NotImplementedError
