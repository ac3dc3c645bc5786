"""Launches that run with ATen for want of a kernel, by reason, in the user's words.

12 x linear, 4 x matmul: gtco has no kernels for products in fp64; cast the model: ...
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gtco.ir.graph import Group, Node
from gtco.passes.precision import fp32_products
from gtco.runtime.plan import Launch, Plan


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


def fallback_kinds(launches: Iterable[Launch]) -> tuple[FallbackKind, ...]:
    """The launches without a kernel, those of one reason together, the most first.

    Reasons that differ in names and numbers of values alone are one.
    """
    kinds: dict[tuple[str, str], list[tuple[Launch, str, str]]] = {}
    for launch in launches:
        if launch.source == "fallback":
            reason, remedy = _why(launch)
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


def precision_hint(plan: Plan) -> str:
    """What a user who did not say `precision` can do about products in fp32; empty if nothing."""
    count = sum(
        any(fp32_products(node, launch.group.graph) for node in launch.group.nodes)
        for launch in plan.launches
    )
    if count == 0 or plan.options.precision is not None:
        return ""
    rate = plan.target.products_tflops
    tf32, fp16 = rate(torch.float32, "tf32"), rate(torch.float16, None)
    fp32 = rate(torch.float32, None)
    launches = f"{count} launch{'es' if count > 1 else ''}"
    return (
        f"the products of {launches} are fp32, as the model has them: on {plan.target.arch} "
        f'precision="tf32" multiplies about {tf32 / fp32:.0f} times as fast, "fp16" '
        f'{fp16 / fp32:.0f} times; pass precision="fp32" to keep them without this warning'
    )


def _why(launch: Launch) -> tuple[str, str]:
    """The reason, and what the user can do."""
    if any(_multiplied(launch.group, node) == torch.float64 for node in launch.group.nodes):
        return "gtco has no kernels for products in fp64", "cast the model: model.float()"
    if launch.family == "library":
        return (
            "gtco has no kernel that computes this",
            "leave it to ATen, or write it with operators that have kernels",
        )
    return launch.reason, ""


def _multiplied(group: Group, node: Node) -> torch.dtype | None:
    """The type of what `node` multiplies, if it is a product."""
    return group.graph.specs[node.inputs[0]].dtype if node.definition.multiplies else None
