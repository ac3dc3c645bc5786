"""Rolls of an image go into the kernels of the norm ahead of them and of the sum behind them.

    %n = layer_norm(%x)   %r = roll(reshape(%n))    ->   %r = layer_norm(roll(reshape(%x)))
    %y = add(%a, reshape(roll(%w)))                 ->   %y = reshape(add(reshape(%a), roll(%w)))
    %n = layer_norm(reshape(roll(%w)))              ->   %n = reshape(layer_norm(roll(%w)))
    %s = row_stats(reshape(%y))                     ->   %s = reshape(row_stats(%y))

Swin's shifted windows (Liu et al., ICCV 2021). A kernel that walks rows reads a rolled image by its
index, so nobody stores it, where both have one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite


@dataclass(frozen=True)
class _RolledNorm:
    """`roll` of the result of `norm`, perhaps in another shape."""

    roll: Node
    norm: Node


def _norm(edit: Editor, node: Node) -> _RolledNorm | None:
    value = node.inputs[0]
    reshape = edit.producer(value, "reshape")
    if reshape is not None:
        if not edit.read_once(value):
            return None
        value = reshape.inputs[0]
    norm = edit.producer(value, "layer_norm")
    if norm is None or not edit.read_once(value) or any(node.attrs["shifts"][-1:]):
        return None
    if edit.shape(value)[-1:] != edit.shape(node.inputs[0])[-1:]:
        return None
    return _RolledNorm(node, norm)


def _norm_of_rolled(edit: Editor, match: _RolledNorm) -> str:
    x, *affine = match.norm.inputs
    if edit.shape(x) != edit.shape(match.roll.inputs[0]):
        x = edit.add("reshape", x, shape=edit.shape(match.roll.inputs[0]))
    rolled = edit.add("roll", x, **match.roll.attrs)
    return edit.add("layer_norm", rolled, *affine, **match.norm.attrs)


def _is_rolled(edit: Editor, value: str) -> bool:
    """Whether it is a roll, or its norm."""
    node = edit.producer(value, "roll", "layer_norm")
    if node is not None and node.op == "layer_norm":
        node = edit.producer(node.inputs[0], "roll")
    return node is not None


@dataclass(frozen=True)
class _RolledAddend:
    """One of the two addends of `add` is `rolled` in another shape."""

    add: Node
    other: str
    rolled: str


def _addend(edit: Editor, node: Node) -> _RolledAddend | None:
    if len(node.inputs) != 2:
        return None
    for other, value in (node.inputs, node.inputs[::-1]):
        reshape = edit.producer(value, "reshape")
        if reshape is None or not _is_rolled(edit, reshape.inputs[0]):
            continue
        alone = edit.read_once(value) and edit.read_once(reshape.inputs[0])
        same = edit.specs[other] == edit.specs[value] == node.outputs[0]
        if alone and same:
            return _RolledAddend(node, other, reshape.inputs[0])
    return None


def _sum_of_rolled(edit: Editor, match: _RolledAddend) -> str:
    other = edit.add("reshape", match.other, shape=edit.shape(match.rolled))
    total = edit.add("add", other, match.rolled)
    return edit.add("reshape", total, shape=match.add.outputs[0].sizes)


def _of_rows(edit: Editor, node: Node) -> Node | None:
    """A norm or row statistics of rolled rows in another shape."""
    reshape = edit.producer(node.inputs[0], "reshape")
    if reshape is None or edit.shape(reshape.inputs[0])[-1:] != edit.shape(node.inputs[0])[-1:]:
        return None
    rolled = edit.producer(reshape.inputs[0], "roll", "add")
    if rolled is not None and rolled.op == "add":
        found = any(_is_rolled(edit, x) for x in rolled.inputs)
        return node if found and node.op == "row_stats" else None
    alone = rolled is not None and edit.read_once(node.inputs[0])
    return node if alone and edit.read_once(reshape.inputs[0]) else None


def _of_rolled_rows(edit: Editor, node: Node) -> str:
    reshape = edit.producer(node.inputs[0])
    assert reshape is not None
    found = edit.add(node.op, reshape.inputs[0], *node.inputs[1:], **node.attrs)
    return edit.add("reshape", found, shape=node.outputs[0].sizes)


RULES: tuple[Rule[Any], ...] = (
    Rule("roll(layer_norm(x)) -> layer_norm(roll(x))", ("roll",),
         _norm, _norm_of_rolled, never_refused),
    Rule("a + reshape(roll(x)) -> reshape(reshape(a) + roll(x))", ("add",),
         _addend, _sum_of_rolled, never_refused),
    Rule("row_stats(reshape(roll(x))) -> reshape(row_stats(roll(x)))", ("row_stats", "layer_norm"),
         _of_rows, _of_rolled_rows, never_refused),
)  # fmt: skip


def move_rolls(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
