"""Norms of queries and of keys become one kernel.

    %q = slice(%a, dim=2, start=0, end=64)        %t = permute(reshape(slice(%a, 0, 128)))
    %k = slice(%a, dim=2, start=64, end=128)      %n: [2, ...] = norm(%t), in one more dimension
    attention(norm(%q) * %s, norm(%k), ...)   ->  %m = mul(%n, [%s, 1])
                                                  attention(slice(%m, 0, 1), slice(%m, 1, 2), ...)

What is computed of two neighbouring slices in the same way is computed of both at once, whatever it
is: constants that differ are stacked. Swin V2's cosine attention and learned norms of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.ops import Pattern
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.views import cut


@dataclass(frozen=True)
class _Twins:
    """Two operands of an attention, without the constants that scale them at last."""

    attention: Node
    pair: tuple[str, str]
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    inner: frozenset[str]


def _match(edit: Editor, node: Node) -> _Twins | None:
    q, k = node.inputs[:2]
    for scaled in ((False, False), (True, False), (False, True), (True, True)):
        of_q, of_k = (
            _scaled(edit, x) if yes else (x, None) for x, yes in zip((q, k), scaled, strict=True)
        )
        if of_q is None or of_k is None:
            continue
        (a, scale_a), (b, scale_b) = of_q, of_k
        pairs: set[tuple[str, str]] = set()
        alike = _alike(edit, a, b, pairs)
        inner = {value for pair in pairs for value in pair}
        if alike and any(_reduces(edit, value) for value in inner):
            return _Twins(node, (a, b), (scale_a, scale_b), frozenset({*inner, q, k}))
    return None


def _scaled(edit: Editor, value: str) -> tuple[str, torch.Tensor] | None:
    """(x, c) if `value` is `x * c` with a constant c, and as large as x."""
    node = edit.producer(value, "mul")
    if node is None or len(node.inputs) != 2:
        return None
    for x, c in (node.inputs, node.inputs[::-1]):
        constant = edit.constant(c)
        if constant is not None and edit.specs[x] == edit.specs[value]:
            return (x, constant) if constant.dtype == edit.dtype(x) else None
    return None


def _reduces(edit: Editor, value: str) -> bool:
    node = edit.producer(value)
    return node is not None and node.pattern is Pattern.REDUCTION


def _alike(edit: Editor, a: str, b: str, pairs: set[tuple[str, str]]) -> bool:
    """Whether `a` and `b` are computed alike of neighbouring slices; collects what is between, and
    looks at each pair once."""
    if (a, b) in pairs:
        return True
    if a in edit.constants or b in edit.constants:
        return a in edit.constants and b in edit.constants and edit.specs[a] == edit.specs[b]
    one, other = edit.producer(a), edit.producer(b)
    if one is None or other is None or one.op != other.op or edit.specs[a] != edit.specs[b]:
        return False
    if one.op == "slice":
        return _neighbours(one, other)
    if one.attrs != other.attrs or not _takes_one_more_dimension(one):
        return False
    rank = one.outputs[0].rank
    for x in one.inputs:
        if x not in edit.constants and edit.specs[x].rank != rank and one.op != "reshape":
            return False
    pairs.add((a, b))
    return all(_alike(edit, x, y, pairs) for x, y in zip(one.inputs, other.inputs, strict=True))


def _neighbours(one: Node, other: Node) -> bool:
    taken = cut(one)
    if taken is None or one.inputs != other.inputs:
        return False
    dim, start, end = taken
    return cut(other) == (dim, end, 2 * end - start)


def _takes_one_more_dimension(node: Node) -> bool:
    if node.op in ("reshape", "permute"):
        return True
    if node.pattern is Pattern.REDUCTION:
        return node.attrs.keys() == {"dims", "keepdim"} and bool(node.attrs["keepdim"])
    return node.definition.is_pointwise and len(node.outputs) == 1


def _check(edit: Editor, match: _Twins) -> str | None:
    inside = {*match.inner, match.attention.name}
    for value in match.inner:
        if edit.is_output(value) or not {user.name for user in edit.users(value)} <= inside:
            return f"%{value} is read elsewhere too"
    return None


def _replace(edit: Editor, match: _Twins) -> str:
    made: dict[tuple[str, str], str] = {}
    both = _of_both(edit, *match.pair, edit.specs[match.pair[0]].rank, made)
    shape = edit.shape(match.pair[0])
    if any(scale is not None for scale in match.scales):
        parts = [
            torch.ones((), dtype=edit.dtype(both)) if scale is None else scale.cpu()
            for scale in match.scales
        ]
        wide = torch.broadcast_shapes((1,) * len(shape), *(part.shape for part in parts))  # type: ignore[no-untyped-call]
        parts = [part.expand(wide) for part in parts]
        both = edit.add("mul", both, _stacked(edit, "scales", parts))
    found = []
    for at in range(2):
        part = edit.add("slice", both, dim=0, start=at, end=at + 1)
        found.append(edit.add("reshape", part, shape=shape))
    return edit.add("attention", *found, *match.attention.inputs[2:], **match.attention.attrs)


def _of_both(edit: Editor, a: str, b: str, rank: int, made: dict[tuple[str, str], str]) -> str:
    """[2, ...]: what is computed of both at once, in the place of `a` and `b`."""
    if (a, b) not in made:
        made[a, b] = _computed(edit, a, b, rank, made)
    return made[a, b]


def _computed(edit: Editor, a: str, b: str, rank: int, made: dict[tuple[str, str], str]) -> str:
    if a in edit.constants:
        parts = [edit.constants[x].cpu() for x in (a, b)]
        parts = [part.reshape((1,) * (rank - part.dim()) + part.shape) for part in parts]
        return _stacked(edit, a, parts)
    node = edit.producer(a)
    assert node is not None
    if node.op == "slice":
        return _both_slices(edit, node)
    attrs = dict(node.attrs)
    if node.op == "reshape":
        attrs["shape"] = (2, *attrs["shape"])
    elif "dims" in attrs:
        dims = (dim % rank + 1 for dim in attrs["dims"])
        attrs["dims"] = (0, *dims) if node.op == "permute" else tuple(dims)
    other = edit.producer(b)
    assert other is not None
    inputs = [
        _of_both(edit, x, y, edit.specs[x].rank if node.op == "reshape" else rank, made)
        for x, y in zip(node.inputs, other.inputs, strict=True)
    ]
    return edit.add(node.op, *inputs, **attrs)


def _both_slices(edit: Editor, node: Node) -> str:
    source, dim, start = node.inputs[0], node.attrs["dim"], node.attrs["start"]
    size = node.attrs["end"] - start
    shape = list(edit.shape(source))
    shape[dim : dim + 1] = [2, size]
    y = edit.add("slice", source, dim=dim, start=start, end=start + 2 * size)
    y = edit.add("reshape", y, shape=tuple(shape))
    rest = (each for each in range(len(shape)) if each != dim)
    return edit.add("permute", y, dims=(dim, *rest))


def _stacked(edit: Editor, hint: str, parts: Sequence[torch.Tensor]) -> str:
    """Two constants as one [2, ...], or [1, ...] if they are the same."""
    same = torch.equal(*parts)
    return edit.add_constant(f"{hint}_of_both", torch.stack(list(parts[: 1 if same else 2])))


RULES: tuple[Rule[Any], ...] = (
    Rule("attention(f(x[0]), f(x[1]), v) -> attention(f(x)[0], f(x)[1], v)", ("attention",),
         _match, _replace, _check),
)  # fmt: skip


def compute_twins_once(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
