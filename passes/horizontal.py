"""Linears that read the same tensor become one.

    %q = linear(%x, %wq, %bq)             %a: f16[1,197,2304] = linear(%x, %wqkv, %bqkv)
    %k = linear(%x, %wk)            ->    %q = slice(%a, dim=2, start=0, end=768)
    %v = linear(%x, %wv, %bv)             %k = slice(%a, dim=2, start=768, end=1536)
                                          %v = slice(%a, dim=2, start=1536, end=2304)

Q, K and V of a transformer, and the keys of all decoder layers, which read one encoder memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.ir.ops import Pattern
from gtco.passes.columns import ALL, linear_of
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

ALIGNMENT = 8
"""Columns; what starts elsewhere cannot be read 16 bytes at a time."""


@dataclass(frozen=True)
class _Siblings:
    linears: tuple[Node, ...]
    alone: tuple[tuple[Node, str], ...]
    """Siblings that stay as they are, and why."""


def _match(edit: Editor, node: Node) -> _Siblings | None:
    """The siblings of `node`, if it is the first of them."""
    linears: list[Node] = []
    alone: list[tuple[Node, str]] = []
    for user in edit.users(node.inputs[0]):
        if (
            user.op != "linear"
            or user.inputs[0] != node.inputs[0]
            or not _same_kind(edit, user, node)
        ):
            continue
        reason = _why_alone(edit, user)
        if reason:
            alone.append((user, reason))
        else:
            linears.append(user)
    widest = max(map(_alignment, linears), default=0)
    alone += [
        (user, f"%{user.name} has a number of columns that is no multiple of {widest}")
        for user in linears
        if _alignment(user) < widest
    ]
    linears = [user for user in linears if _alignment(user) == widest]
    candidates = [*linears, *(user for user, _ in alone)]
    if len(candidates) < 2 or node.name not in {user.name for user in candidates}:
        return None
    first = linears[0] if linears else candidates[0]
    return _Siblings(tuple(linears), tuple(alone)) if first.name == node.name else None


def _same_kind(edit: Editor, a: Node, b: Node) -> bool:
    constant = all(name in edit.constants for node in (a, b) for name in node.inputs[1:])
    wa, wb = (edit.specs[node.inputs[1]] for node in (a, b))
    return constant and wa.dtype == wb.dtype and dict(a.attrs) == dict(b.attrs)


def _why_alone(edit: Editor, linear: Node) -> str | None:
    if edit.is_output(linear.name):
        return f"the model returns %{linear.name}"
    for reader in _readers(edit, linear.name):
        if reader.definition.is_pointwise and not _is_reduced(edit, linear):
            return f"the epilogue {reader.op} would apply to its sibling's columns too"
    return None


def _alignment(linear: Node) -> int:
    """What columns the rows of `linear` begin at multiples of. Beside others of the same its slice
    begins no worse."""
    return math.gcd(linear.outputs[0].sizes[-1], ALIGNMENT)


def _is_reduced(edit: Editor, linear: Node) -> bool:
    """Whether pointwise ops lead from `linear` to a reduction of a part of its columns, such as a
    head's: then it is stored, and they belong to the kernel that reduces."""
    columns = linear.outputs[0].sizes[-1]
    pending, seen = [linear.name], {linear.name}
    while pending:
        for reader in _readers(edit, pending.pop()):
            if reader.pattern is Pattern.REDUCTION and reader.name not in seen:
                if edit.shape(reader.inputs[0])[-1:] != (columns,):
                    return True
            elif reader.definition.is_pointwise and reader.name not in seen:
                pending.append(reader.name)
            seen.add(reader.name)
    return False


def _readers(edit: Editor, value: str) -> list[Node]:
    """The nodes that read `value`, looked at through views."""
    readers = []
    pending = [value]
    while pending:
        for user in edit.users(pending.pop()):
            if user.definition.is_view:
                pending.append(user.name)
            else:
                readers.append(user)
    return readers


def _check(edit: Editor, match: _Siblings) -> str | None:
    if len(match.linears) < 2:
        user, reason = match.alone[0]
        return f"%{user.name} stays alone: {reason}"
    return None


def _replace(edit: Editor, match: _Siblings) -> str:
    linears = match.linears
    joined = linear_of(edit, [(node, ALL) for node in linears], "joined")
    dim, start = edit.specs[joined].rank - 1, 0
    parts = []
    for node in linears:
        end = start + node.outputs[0].sizes[-1]
        parts.append(edit.add("slice", joined, dim=dim, start=start, end=end))
        start = end
    for node, part in zip(linears[1:], parts[1:], strict=True):
        edit.replace(node.name, part)
    return parts[0]


RULES: tuple[Rule[Any], ...] = (
    Rule("linear(x, v), linear(x, w) -> slices of linear(x, concat(v, w))", ("linear",),
         _match, _replace, _check),
)  # fmt: skip


def join_siblings(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
