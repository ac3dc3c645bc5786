"""Rotary positions become an epilogue of the linear that makes queries and keys.

%n = neg(slice(%q, dim=3, start=32, end=64))        %y = linear(%x, %w')
%h = concat(%n, slice(%q, dim=3, end=32))     ->    %z = reshape(%y, shape=[1, 197, 3, 12, 64])
%r = add(mul(%q, %cos), mul(%h, %sin))              %r = rotate(%z, swap_pairs(%z), %cos', %sin')
%a = attention(%r, ...)                             %a = attention(permute(slice(%r)), ...)

What rotates is found by what it computes, not by how it is spelled: each element of the operand is
a sum of elements of one value times constants, and those are the element itself and a partner in
its row. Halves, neighbours, rows that stay as they are (a class token ahead of the patches) and
columns that stay are all of this kind.

Scores do not change when queries and keys reorder the columns of a head alike. So the rows of both
weights are put in an order in which partners are neighbours, which every epilogue has in one
vector, and Q, K and V are one linear. Where each row of a head goes through a norm ahead of its
rotation, Q and K keep linears of their own, in that order, and the kernel of the norm rotates.
Where they come from no linear with constant weights, the partner is read from memory. Windows that
are cut out behind the rotation leave it in the epilogue of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.passes.columns import linear_of
from gtco.passes.headwise import Heads, Headwise, heads_of, headwise, read_elsewhere
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.views import without_repeats
from gtco.passes.weighted_sums import (
    Unlike,
    WeightedSums,
    behind,
    first_items,
    is_computed,
    joins_pieces,
    numbered,
    possible_sources,
    seen,
    spelled,
)
from gtco.passes.windows import whole_of_windows

MAX_ELEMENTS = 1 << 24
"""Elements of the largest operand, or of an item of it, that are named one by one."""


# -- rotations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rotation:
    """`operand` is `x * cos + x[..., partner] * sin` of x, which is `source` seen through `views`.

    Args:
        partner: for each column another one, whose partner it is; itself where no row has one.
        cos, sin: float64, of the rank of x; 1 along dimensions where all are the same.
        inside: values between the source and the operand.
    """

    operand: str
    source: str
    views: tuple[Node, ...]
    partner: Tensor
    cos: Tensor
    sin: Tensor
    inside: frozenset[str]

    @property
    def order(self) -> Tensor:
        """The columns, partners side by side."""
        columns = torch.arange(len(self.partner))
        first = columns[columns < self.partner]
        alone = columns[columns == self.partner]
        return torch.cat([torch.stack([first, self.partner[first]], 1).flatten(), alone])


class _Rotations:
    """The rotations of a graph; layers that are spelled alike are looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[list[str], _Rotation | None]] = {}

    def of(self, edit: Editor, operand: str) -> _Rotation | None:
        """How `operand` rotates a value, if it does."""
        if not joins_pieces(edit, operand):
            return None
        spelling, names = spelled(edit, operand)
        if spelling not in self._known:
            self._known[spelling] = names, _rotation(edit, operand)
        first, rotation = self._known[spelling]
        if rotation is None:
            return None
        here = dict(zip(first, names, strict=True))
        views = (edit.producer(here[view.name]) for view in rotation.views)
        return replace(
            rotation,
            operand=operand,
            source=here[rotation.source],
            views=tuple(view for view in views if view is not None),
            inside=frozenset(here[name] for name in rotation.inside),
        )


def _rotation(edit: Editor, operand: str) -> _Rotation | None:
    """How `operand`, which joins pieces, rotates a value, if it does."""
    spec = edit.specs[operand]
    result, views = operand, []
    while (node := edit.producer(result)) is not None and node.op in ("reshape", "permute"):
        views.append(node)
        result = node.inputs[0]
    views.reverse()
    if not is_computed(edit, result) or spec.dtype not in FLOATS:
        return None
    if not spec.numel or spec.rank < 2 or spec.sizes[-1] % 2:
        return None
    for first, count in ((True, spec.numel // spec.sizes[0]), (False, spec.numel)):
        try:
            if count <= MAX_ELEMENTS:
                sums = _sums(edit, result, first)
                seen_as = first_items(views, edit.shape(result)) if first else views
                return _of_sums(operand, sums, views, seen_as)
        except Unlike:
            pass
    return None


def _of_sums(
    operand: str, sums: WeightedSums, views: Sequence[Node], seen_as: Sequence[Node]
) -> _Rotation | None:
    """The rotation that `sums` are, seen through `views`, which are `seen_as` of its elements."""
    place = numbered(sums.sum.index[0].shape)
    cos = torch.zeros(place.shape, dtype=torch.float64)
    sin = torch.zeros_like(cos)
    partner = place.clone()
    for index, factor in zip(sums.sum.index, sums.sum.factor, strict=True):
        other = (index != place) & (factor != 0)
        cos += torch.where(index == place, factor, 0.0)
        if bool((other & (partner != place) & (partner != index)).any()):
            return None  # two partners of one element
        partner = torch.where(other, index, partner)
        sin += torch.where(other, factor, 0.0)
    if not bool((sin != 0).any()) or not bool((cos.isfinite() & sin.isfinite()).all()):
        return None
    cos, sin, partner, place = (seen(x, seen_as) for x in (cos, sin, partner, place))
    at = torch.empty(place.numel(), dtype=torch.int64)  # of each element of the result
    at[place.flatten()] = torch.arange(place.numel())
    columns = _columns(at[partner].reshape(-1, place.shape[-1]))
    if columns is None:
        return None
    return _Rotation(
        operand, sums.source, tuple(views), columns,
        without_repeats(cos, kept=1), without_repeats(sin, kept=1),
        frozenset({*sums.inside, *(view.name for view in views)}),
    )  # fmt: skip


def _sums(edit: Editor, result: str, first: bool) -> WeightedSums:
    """The sums that make `result`: of what no arithmetic makes; else of what is read twice, as
    norms are, or through several views, the nearest first.

    Raises:
        Unlike: there are none.
    """
    for source in (None, *possible_sources(edit, result)):
        try:
            return WeightedSums(edit, result, source, first)
        except Unlike:
            pass
    raise Unlike


def _columns(partner: Tensor) -> Tensor | None:
    """The partner of each column, if all rows that have one have the same.

    `partner` is [rows, columns], the places of the partners in row-major order.
    """
    own = torch.arange(partner.shape[1])
    moved = partner - torch.arange(partner.numel()).reshape(partner.shape) + own
    if not bool(((moved >= 0) & (moved < len(own))).all()):
        return None  # in another row
    found = torch.where(moved != own, moved, -1).amax(0)
    found = torch.where(found < 0, own, found)
    if bool(((moved != own) & (moved != found)).any()):
        return None
    return found if torch.equal(found[found], own) else None


# -- attention whose queries and keys come from linears -------------------------------------------


@dataclass(frozen=True)
class _Match:
    attention: Node
    rotations: tuple[_Rotation | None, _Rotation | None]
    """Of queries and of keys."""
    parts: tuple[Heads, Heads, Heads | None] | None
    """Queries, keys and, where their linear makes them too, values; None if linears of others."""
    normed: tuple[Headwise, Headwise, Headwise | None] | None
    """The same where they are made of the heads of linears."""


def _match(known: _Rotations, edit: Editor, node: Node) -> _Match | None:
    q, k = (known.of(edit, name) for name in node.inputs[:2])
    if q is None and k is None:
        return None
    parts = _parts(edit, node.inputs[2], (node,), q, k)
    return _Match(node, (q, k), parts, None if parts else _normed(edit, node, q, k))


def _replace(edit: Editor, match: _Match) -> str:
    node = match.attention
    if match.parts is not None:
        q, k, v = _from_linears(edit, match, match.parts)
    elif match.normed is not None:
        q, k, v = _from_normed(edit, match, match.normed)
    else:
        q, k = (
            _from_memory(edit, rotation) if rotation else name
            for rotation, name in zip(match.rotations, node.inputs[:2], strict=True)
        )
        v = node.inputs[2]
    return edit.add("attention", q, k, v, *node.inputs[3:], **node.attrs)


def _check(edit: Editor, match: _Match) -> str | None:
    """Why no way is open."""
    if match.parts is not None or match.normed is not None:
        return None
    for rotation in match.rotations:
        if rotation is not None and _shift(rotation) is None and not _of_neighbours(rotation):
            return (
                f"the columns that %{rotation.operand} turns into one another are neither "
                "neighbours nor halves, and come from no linear with constant weights"
            )
    return None


def _parts(
    edit: Editor,
    value: str,
    readers: Iterable[Node],
    q: _Rotation | None,
    k: _Rotation | None,
) -> tuple[Heads, Heads, Heads | None] | None:
    """What `_Match.parts` is, of attention nodes that read `value`."""
    if q is None or k is None or not torch.equal(q.partner, k.partner):
        return None
    of_q, of_k = (
        heads_of(edit, each.source, each.views, edit.shape(each.operand)) for each in (q, k)
    )
    if of_q is None or of_k is None or not of_q.like(of_k):
        return None
    of_v = heads_of(edit, value, (), edit.shape(value))
    if of_v is not None and not of_q.like(of_v):
        of_v = None
    inside = {*q.inside, *k.inside, *(node.name for node in readers)}
    linears = [each.linear.name for each in (of_q, of_k, of_v) if each is not None]
    return None if read_elsewhere(edit, linears, inside) else (of_q, of_k, of_v)


def _normed(
    edit: Editor, attention: Node, q: _Rotation | None, k: _Rotation | None
) -> tuple[Headwise, Headwise, Headwise | None] | None:
    """What `_Match.normed` is; neighbours need no other order."""
    if q is None or k is None or not torch.equal(q.partner, k.partner) or _of_neighbours(q):
        return None
    of_q, of_k = (
        headwise(edit, each.source, each.views, edit.shape(each.operand)) for each in (q, k)
    )
    if of_q is None or of_k is None:
        return None
    of_v = headwise(edit, attention.inputs[2], (), edit.shape(attention.inputs[2]))
    if of_v is not None and of_v.heads.linear not in (of_q.heads.linear, of_k.heads.linear):
        of_v = None  # a linear of its own stays
    made = {name for each in (of_q, of_k, of_v) if each is not None for name in each.inside}
    inside = {*made, *q.inside, *k.inside, attention.name}
    return None if read_elsewhere(edit, sorted(made), inside) else (of_q, of_k, of_v)


def _from_linears(
    edit: Editor, match: _Match, parts: tuple[Heads, Heads, Heads | None]
) -> tuple[str, str, str]:
    """Queries, keys and values of one linear, whose epilogue rotates."""
    q, k = match.rotations
    assert q is not None and k is not None
    of_q, of_k, of_v = parts
    made = [(of_q, q.order), (of_k, k.order)]
    if of_v is not None:
        made.append((of_v, torch.arange(of_v.columns.shape[1])))
    batch, heads, tokens, width = edit.shape(q.operand)
    columns = [(each.linear, each.columns[:, order].flatten()) for each, order in made]
    y = linear_of(edit, columns, "paired")
    shape = (batch, tokens, len(made), heads, width)
    y = edit.add("reshape", y, shape=shape)
    tables = [_table(edit, match, made, name, shape) for name in ("cos", "sin")]
    y = edit.add("rotate", y, edit.add("swap_pairs", y), *tables)
    y = edit.add("permute", y, dims=(2, 0, 3, 1, 4))
    found = []
    for at in range(len(made)):
        part = edit.add("slice", y, dim=0, start=at, end=at + 1)
        found.append(edit.add("reshape", part, shape=(batch, heads, tokens, width)))
    values = found[2] if of_v is not None else match.attention.inputs[2]
    return found[0], found[1], values


def _from_normed(
    edit: Editor, match: _Match, normed: tuple[Headwise, Headwise, Headwise | None]
) -> tuple[str, str, str]:
    """Queries, keys and values of linears of their own; the kernel that norms a row rotates it."""
    found = []
    for rotation, each in zip(match.rotations, normed[:2], strict=True):
        assert rotation is not None
        dtype = edit.dtype(rotation.operand)
        y = each.with_order(edit, rotation.order, dtype)
        tables = [
            _constant(edit, name, _in_order(getattr(rotation, name), rotation.order), dtype)
            for name in ("cos", "sin")
        ]
        found.append(edit.add("rotate", y, edit.add("swap_pairs", y), *tables))
    v, of_v = match.attention.inputs[2], normed[2]
    if of_v is not None:
        v = of_v.with_order(edit, torch.arange(of_v.shape[-1]), edit.dtype(v))
    return found[0], found[1], v


def _in_order(table: Tensor, order: Tensor) -> Tensor:
    return table.expand(*table.shape[:-1], len(order))[..., order]


def _table(
    edit: Editor,
    match: _Match,
    made: Sequence[tuple[Heads, Tensor]],
    name: str,
    shape: tuple[int, ...],
) -> str:
    """The factors of all parts, [batch, tokens, parts, heads, width] or 1 where all are the same;
    values, which nothing rotates, have 1 and 0."""
    batch, tokens, _, heads, width = shape
    tables = []
    for (_, order), rotation in zip(made, (*match.rotations, None), strict=False):
        if rotation is None:
            whole = torch.full((batch, heads, tokens, width), float(name == "cos"))
            tables.append(whole.double())
        else:
            own: Tensor = getattr(rotation, name)
            tables.append(_in_order(own, order).expand(batch, heads, tokens, width))
    table = without_repeats(torch.stack(tables, 1).permute(0, 3, 1, 2, 4), kept=1)
    return _constant(edit, name, table, edit.dtype(match.attention.inputs[0]))


def _constant(edit: Editor, hint: str, table: Tensor, dtype: torch.dtype) -> str:
    """`table` as a constant: in `dtype` where that loses nothing, else in fp32. Layers that rotate
    alike read the same."""
    kept = table.to(dtype) if torch.equal(table.to(dtype).double(), table) else table.float()
    for name, known in edit.constants.items():
        alike = name.startswith(f"rotary_{hint}") and known.dtype == kept.dtype
        if alike and known.shape == kept.shape and torch.equal(known.cpu(), kept):
            return name
    return edit.add_constant(f"rotary_{hint}", kept.contiguous())


# -- windows that are cut out behind the rotation -------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    """Attention nodes of slices of the same queries, keys and values, which turn as a whole."""

    match: _Match
    """Of one of the nodes, with what turns as a whole."""
    whole: tuple[str, str, str]


def _match_windows(known: _Rotations, edit: Editor, node: Node) -> _Windows | None:
    whole = _ahead_of_slices(edit, node)
    if whole is None or len(set(whole)) < len(whole):
        return None
    nodes = [_readers(edit, name) for name in whole[:2]]
    if nodes[0] != nodes[1] or any(_ahead_of_slices(edit, each) != whole for each in nodes[0]):
        return None
    q, k = (known.of(edit, name) for name in whole[:2])
    parts = _parts(edit, whole[2], nodes[0], q, k)
    return None if parts is None else _Windows(_Match(node, (q, k), parts, None), whole)


def _ahead_of_slices(edit: Editor, node: Node) -> tuple[str, str, str] | None:
    """[batch, heads, tokens, width] of which `node`, if it is attention, reads some tokens each."""
    operands = node.inputs[:3] if node.op == "attention" else ()
    found = [whole_of_windows(edit, name) for name in operands]
    known = [name for name in found if name is not None]
    return (known[0], known[1], known[2]) if known and len(known) == len(found) else None


def _readers(edit: Editor, value: str) -> list[Node]:
    """Who computes with `value`, through views or not, by name."""
    pending, found = [value], {}
    while pending:
        for user in edit.users(pending.pop()):
            if user.definition.is_view:
                pending.append(user.name)
            else:
                found[user.name] = user
    return [found[name] for name in sorted(found)]


def _replace_windows(edit: Editor, match: _Windows) -> tuple[str, ...]:
    """All of them at once: queries and keys in another order do not meet those in the old one."""
    parts = match.match.parts
    assert parts is not None
    made = _from_linears(edit, match.match, parts)
    count = 2 if parts[2] is None else 3
    edit.replace_all(zip(match.whole[:count], made[:count], strict=True))
    return match.match.attention.values


# -- others ---------------------------------------------------------------------------------------


def _of_neighbours(rotation: _Rotation) -> bool:
    columns = torch.arange(len(rotation.partner))
    return torch.equal(rotation.partner, columns ^ 1)


def _shift(rotation: _Rotation) -> int | None:
    """How far every partner is, if they are halves of a row."""
    half = len(rotation.partner) // 2
    columns = torch.arange(2 * half)
    return half if torch.equal(rotation.partner, (columns + half) % (2 * half)) else None


def _from_memory(edit: Editor, rotation: _Rotation) -> str:
    """The rotation by itself; what it reads is stored."""
    dtype = edit.dtype(rotation.operand)
    x, views = (
        behind(edit, rotation.source)
        if edit.dtype(rotation.source) != dtype
        else (rotation.source, [])
    )
    x = edit.add_views(x, (*views, *rotation.views))
    tables = [_constant(edit, name, getattr(rotation, name), dtype) for name in ("cos", "sin")]
    if _of_neighbours(rotation):
        return edit.add("rotate", x, edit.add("swap_pairs", x), *tables)
    shifts = (*(0 for _ in edit.shape(x)[1:]), _shift(rotation))
    return edit.add("rotate", x, edit.add("roll", x, shifts=shifts), *tables)


def fuse_rotary(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    known = _Rotations()
    rules: tuple[Rule[Any], ...] = (
        Rule("attention(slice(x * cos + x[partner] * sin)) -> attention(slice(rotate(x)))",
             ("attention",), partial(_match_windows, known), _replace_windows),
        Rule("attention(x * cos + x[partner] * sin, ...) -> attention(rotate(x), ...)",
             ("attention",), partial(_match, known), _replace, _check),
    )  # fmt: skip
    return rewrite(graph, rules, log)
