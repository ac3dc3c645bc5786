"""Zeros that are joined to a tensor are its border, and the borders of one tensor are one.

    %c = concat(%x, 0, dim=1)    %d = concat(%c, 0, dim=2)
                  ->    %d = pad(%x, before=[0, 0, 0, 0], after=[0, 6, 6, 0])

A captured F.pad joins one dimension after another. Each would be a kernel that copies the image.
What is added to a part of a tensor, as `scores[:, 1:] += bias` is captured, is added to all of it:

    %c = concat(%x[:, :1], add(%x[:, 1:], %y), dim=1)    ->    %c = add(%x, pad(%y, before=[0, 1]))

A sum is part of an attention or an epilogue; a concat would store what it joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite
from gtco.passes.views import whole_of


@dataclass(frozen=True)
class _Border:
    """What stands inside of zeros, and how many before and after it along each dimension."""

    inner: str
    before: tuple[int, ...]
    after: tuple[int, ...]


def _joined_zeros(edit: Editor, node: Node) -> _Border | None:
    dim = node.attrs["dim"] % node.outputs[0].rank
    inner = [at for at, value in enumerate(node.inputs) if not edit.is_zero(value)]
    if len(inner) != 1 or len(node.inputs) == 1:
        return None
    (at,) = inner
    x = node.inputs[at]
    if edit.dtype(x) != node.outputs[0].dtype:
        return None
    sizes = [edit.shape(value)[dim] for value in node.inputs]
    return _along(edit, x, dim, sum(sizes[:at]), sum(sizes[at + 1 :]))


def _along(edit: Editor, inner: str, dim: int, before: int, after: int) -> _Border:
    """So many zeros before and after `inner` along one dimension."""

    def side(count: int) -> tuple[int, ...]:
        return tuple(count if each == dim else 0 for each in range(edit.specs[inner].rank))

    return _Border(inner, side(before), side(after))


def _padded_pad(edit: Editor, node: Node) -> _Border | None:
    value = node.inputs[0]
    pad = edit.producer(value, "pad")
    if pad is None or not edit.read_once(value):
        return None
    before, after = (
        tuple(a + b for a, b in zip(pad.attrs[side], node.attrs[side], strict=True))
        for side in ("before", "after")
    )
    return _Border(pad.inputs[0], before, after)


def _pad(edit: Editor, border: _Border) -> str:
    return edit.add("pad", border.inner, before=border.before, after=border.after)


@dataclass(frozen=True)
class _PartOfSum:
    """`added` is added to the elements from `start` on of `whole` along a dimension."""

    whole: str
    added: str
    dim: int
    start: int


def _sum_with_part(edit: Editor, node: Node) -> _PartOfSum | None:
    """What is joined are all parts of one tensor in order, to one of which something is added."""
    spec, dim = node.outputs[0], node.attrs["dim"] % node.outputs[0].rank
    wholes: set[str] = set()
    found: list[tuple[str, int]] = []
    start = 0
    for value in node.inputs:
        end = start + edit.shape(value)[dim]
        part = whole_of(edit, value, dim, start, end)
        if part is None:
            part, added = _added_to(edit, value, dim, start, end) or (None, "")
            found.append((added, start))
        if part is None:
            return None
        wholes.add(part)
        start = end
    if len(wholes) != 1 or len(found) != 1:
        return None
    (whole,), ((added, start),) = wholes, found
    if edit.specs[whole] != spec or edit.dtype(added) != spec.dtype:
        return None
    return _PartOfSum(whole, added, dim, start)


def _added_to(edit: Editor, value: str, dim: int, start: int, end: int) -> tuple[str, str] | None:
    """(whole, y) if `value` is a part of `whole` plus a y of its shape."""
    node = edit.producer(value, "add")
    if node is None or len(node.inputs) != 2 or not edit.read_once(value):
        return None
    for part, other in (node.inputs, node.inputs[::-1]):
        whole = whole_of(edit, part, dim, start, end)
        if whole is not None and edit.shape(other) == edit.shape(value):
            return whole, other
    return None


def _sum_of_all(edit: Editor, match: _PartOfSum) -> str:
    sizes, dim, start = edit.shape(match.whole), match.dim, match.start
    end = start + edit.shape(match.added)[dim]
    other = whole_of(edit, match.added, dim, start, end)
    if other is not None and edit.shape(other) == sizes:  # a choice is part of any epilogue
        at = torch.arange(sizes[dim]).reshape(-1, *(1,) * (len(sizes) - dim - 1))
        inside = edit.add_constant("inside", (at >= start) & (at < end))
        zero = edit.add_constant("zero", torch.zeros((), dtype=edit.dtype(other)))
        return edit.add("add", match.whole, edit.add("where", inside, other, zero))
    padded = _pad(edit, _along(edit, match.added, dim, start, sizes[dim] - end))
    return edit.add("add", match.whole, padded)


RULES: tuple[Rule[Any], ...] = (
    Rule("concat(x[:n], x[n:] + y) -> x + pad(y)", ("concat",), _sum_with_part, _sum_of_all,
         never_refused),
    Rule("concat(0, x, 0) -> pad(x)", ("concat",), _joined_zeros, _pad, never_refused),
    Rule("pad(pad(x)) -> pad(x)", ("pad",), _padded_pad, _pad, never_refused),
)  # fmt: skip


def join_borders(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
