"""Tuning tasks: groups that are the same work are tuned once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gtco.ir.graph import FusedGraph, Group
from gtco.passes.workload import describe
from gtco.target import Target


@dataclass(frozen=True)
class Task:
    """One workload to tune.

    Args:
        key: `workload_key` of each of the groups.
        group: the first of them, which stands for all.
        groups: all groups with this key, in launch order.
    """

    key: str
    group: Group
    groups: tuple[Group, ...]

    @property
    def weight(self) -> int:
        """How often the workload runs in one run of the model."""
        return len(self.groups)


def workload_key(group: Group, target: Target) -> str:
    """Canonical JSON text of the work of `group` on `target`.

    Equal texts mean equal operators, attributes, edges, shapes, dtypes, operand and result layouts
    and positions of constants; names and the values of constants do not count.
    """
    return describe(group.graph).text(arch=target.arch)


def workload_digest(key: str) -> str:
    """A short name of a `workload_key`, for lists of many."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def tasks(fused: FusedGraph, target: Target) -> tuple[Task, ...]:
    """The distinct workloads of `fused`, in the order of their first launch."""
    alike: dict[str, list[Group]] = {}
    for group in fused:
        alike.setdefault(workload_key(group, target), []).append(group)
    return tuple(Task(key, groups[0], tuple(groups)) for key, groups in alike.items())
