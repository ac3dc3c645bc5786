"""Launches that run with ATen for want of a kernel, by reason, in the user's words.

12 launches of linear, 4 of matmul: fp32 products ...; precision="tf32" ... generates them
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gtco.ir.graph import Group, Node
from gtco.options import Options
from gtco.runtime.plan import Launch


@dataclass(frozen=True)
class FallbackKind:
    """Launches that run with ATen for one reason.

    Args:
        launches: their names, in order.
        ops: what they compute, with how many of them do.
        reason: why there is no kernel.
        remedy: what the user can do; empty if nothing.
    """

    launches: tuple[str, ...]
    ops: str
    reason: str
    remedy: str

    @property
    def explanation(self) -> str:
        """The reason and the remedy."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

    def __str__(self) -> str:
        return f"{self.ops}: {self.explanation}"


def fallback_kinds(launches: Iterable[Launch], options: Options) -> tuple[FallbackKind, ...]:
    """The launches without a kernel, those of one reason together, the most first.

    Reasons that differ in names and numbers of values alone are one.
    """
    kinds: dict[tuple[str, str], list[tuple[Launch, str, str]]] = {}
    for launch in launches:
        if launch.source == "fallback":
            reason, remedy = _why(launch, options)
            key = re.sub(r"%\w+|(?<![\w.])\d[\d.]*", "_", reason)
            kinds.setdefault((key, remedy), []).append((launch, reason, remedy))
    return tuple(
        FallbackKind(
            tuple(launch.group.name for launch, _, _ in found),
            _counted(Counter(group_ops(launch.group) for launch, _, _ in found)),
            found[0][1],
            found[0][2],
        )
        for found in sorted(kinds.values(), key=len, reverse=True)
    )


def group_ops(group: Group) -> str:
    """What a group computes: its operators in order."""
    names = []
    for node in group.compute:
        target = node.attrs.get("target")
        names.append(node.op if target is None else str(target))
    return " -> ".join(names)


def _counted(ops: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in ops.most_common())


def _why(launch: Launch, options: Options) -> tuple[str, str]:
    dtypes = [_multiplied(launch.group, node) for node in launch.group.nodes]
    if torch.float32 in dtypes and options.precision in (None, "fp32"):
        remedy = (
            'precision="tf32" or "fp16" generates them, precision="fp32" says that they are meant '
            "so"
        )
        reason = "gtco has no kernels for products in fp32"
        return reason, remedy if options.precision is None else ""
    if torch.float64 in dtypes:
        return "gtco has no kernels for products in fp64", "cast the model: model.float()"
    return launch.reason, ""


def _multiplied(group: Group, node: Node) -> torch.dtype | None:
    """The type of what `node` multiplies, if it is a product."""
    return group.graph.specs[node.inputs[0]].dtype if node.definition.multiplies else None
