"""Zeros that are joined to a tensor are its border, and the borders of one tensor are one.

    %c = concat(%x, 0, dim=1)    %d = concat(%c, 0, dim=2)
                  ->    %d = pad(%x, before=[0, 0, 0, 0], after=[0, 6, 6, 0])

A captured F.pad joins one dimension after another. Each would be a kernel that copies the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite


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
    before, after = [0] * edit.specs[x].rank, [0] * edit.specs[x].rank
    before[dim], after[dim] = sum(sizes[:at]), sum(sizes[at + 1 :])
    return _Border(x, tuple(before), tuple(after))


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


RULES: tuple[Rule[Any], ...] = (
    Rule("concat(0, x, 0) -> pad(x)", ("concat",), _joined_zeros, _pad, never_refused),
    Rule("pad(pad(x)) -> pad(x)", ("pad",), _padded_pad, _pad, never_refused),
)  # fmt: skip


def join_borders(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
