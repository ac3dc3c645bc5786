"""ATen ops that pick elements by index, or put them there, to gtco's ops.

    %y = aten.index_put(%x, [%i], %v)     ->      %t = gather(%v, [which of %v comes to each place])
                                                  %y = where([what comes to a place], %t, %x)

That is of places that are known while a model is captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Number, Value, registrar
from gtco.ir.graph import Node

aten = torch.ops.aten

INDICES: dict[OpOverload, Lowering] = {}
_lowers = registrar(INDICES)


def named(ctx: Context, x: Value, dim: int, index: Value) -> Value:
    """What `index`, of any shape, names along dimension `dim` of x; that shape stands there."""
    shape, places = ctx.shape(x), ctx.shape(index)
    before, after = shape[:dim], shape[dim + 1 :]
    count = math.prod(places)
    flat = ctx.reshape(index, (*(1 for _ in before), count, *(1 for _ in after)))
    whole = ctx.expand(flat, (*before, count, *after))
    return ctx.reshape(ctx.add("gather", x, whole, dim=dim), (*before, *places, *after))


@_lowers(aten._local_scalar_dense.default)
def _number(ctx: Context, x: Value) -> Number:
    return Number(ctx.reshape(x, ()))


@_lowers(aten.embedding.default)
def _embedding(
    ctx: Context,
    table: Value,
    index: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return named(ctx, table, 0, index)


@_lowers(aten.index_select.default)
def _index_select(ctx: Context, x: Value, dim: int, index: Value) -> Value | None:
    return named(ctx, x, dim % ctx.rank(x), index) if ctx.rank(x) and ctx.rank(index) else None


@_lowers(aten.flip.default)
def _flip(ctx: Context, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims if ctx.rank(x) else ():
        order = torch.arange(ctx.shape(x)[dim]).flip(0)
        x = named(ctx, x, dim % ctx.rank(x), ctx.constant("flipped", order.to(ctx.device)))
    return x


@_lowers(aten.gather.default)
def _gather(
    ctx: Context, x: Value, dim: int, index: Value, *, sparse_grad: bool = False
) -> Value | None:
    if not ctx.rank(x) or not ctx.rank(index):
        return None
    return ctx.add("gather", x, index, dim=dim % ctx.rank(x))


@_lowers(aten.scatter.value)
def _scatter(ctx: Context, x: Value, dim: int, index: Value, value: float) -> Value | None:
    """A number at one place of each line along `dim`, such as a one in what becomes one-hot."""
    rank, shape = ctx.rank(x), ctx.shape(x)
    if not rank or ctx.rank(index) != rank or ctx.dtype(index) != torch.int64:
        return None
    dim %= rank
    if ctx.shape(index) != (*shape[:dim], 1, *shape[dim + 1 :]):
        return None
    line = tuple(size if at == dim else 1 for at, size in enumerate(shape))
    places = ctx.constant("places", torch.arange(shape[dim]).reshape(line))
    number = ctx.constant("scattered", torch.full((), value, dtype=ctx.dtype(x)))
    return ctx.add("where", ctx.add("eq", index, places), number, x)


@_lowers(aten.topk.default)
def _topk(
    ctx: Context, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, ...] | None:
    """In order, which unsorted ones may have too."""
    if not ctx.rank(x) or not k or not ctx.spec(x).numel or ctx.dtype(x) == torch.bool:
        return None
    dims = range(ctx.rank(x))
    order = [each for each in dims if each != dim % len(dims)] + [dim % len(dims)]
    found = ctx.add_all("topk", ctx.permute(x, order), k=k, largest=largest)
    return tuple(ctx.permute(each, [order.index(at) for at in dims]) for each in found)


@_lowers(aten.sort.default, aten.sort.stable)
def _sort(
    ctx: Context, x: Value, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Value, ...] | None:
    """All elements of a row are its first ones; equal ones are in the order of their places."""
    if not ctx.rank(x):
        return None
    size = ctx.shape(x)[dim % ctx.rank(x)]
    return _topk(ctx, x, size, dim, descending)  # type: ignore[return-value]


@_lowers(aten.index.Tensor)
def _index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value | None:
    """`x[:, i, j]` for tensors of integers that stand side by side: one index into both."""
    given = [index for index in indices if index is not None]
    first = next(at for at, index in enumerate(indices) if index is not None)
    adjacent = all(index is not None for index in indices[first : first + len(given)])
    if not adjacent or any(ctx.dtype(x) not in (torch.int64, torch.int32) for x in given):
        return None
    shape, end = ctx.shape(x), first + len(given)
    whole = given[0] if len(given) == 1 else _counted(ctx, given[0], shape[first])
    for size, index in zip(shape[first + 1 : end], given[1:], strict=True):
        whole = ctx.add("add", ctx.add("mul", whole, other=size), _counted(ctx, index, size))
    x = ctx.reshape(x, (*shape[:first], math.prod(shape[first:end]), *shape[end:]))
    return named(ctx, x, first, whole)


def _counted(ctx: Context, index: Value, size: int) -> Value:
    """`index` counted from the front: what is negative counts from the end."""
    from_end = ctx.add("add", index, other=size)
    return ctx.add("where", ctx.add("lt", index, other=0), from_end, index)


# -- places that are known -----------------------------------------------------------------------

MOST_ADDED = 4
"""Elements that come to one place; the sum of more is left to ATen."""

MOST_KNOWN = 1 << 22
"""Elements of an index that is computed now."""


@_lowers(aten.index_put.default)
def _index_put(
    ctx: Context,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value | None:
    """`x[:, i, j] = values` for constants that stand side by side, `x[:, mask] = number`."""
    if not accumulate and (masked := _masked(ctx, x, indices, values)) is not None:
        return masked
    first = next(at for at, index in enumerate(indices) if index is not None)
    given = [_known(ctx, index) for index in indices[first:] if index is not None]
    adjacent = all(index is not None for index in indices[first : first + len(given)])
    if not adjacent or any(index is None for index in given):
        return None
    along: list[Tensor] = []
    for index in given:
        assert index is not None
        along += index.nonzero().unbind(1) if index.dtype == torch.bool else [index.long()]
    shape, end = ctx.shape(x), first + len(along)
    before, counted, after = shape[:first], shape[first:end], shape[end:]
    places = torch.zeros((), dtype=torch.int64)
    for size, index in zip(counted, along, strict=True):
        if bool(((index < -size) | (index >= size)).any()):
            return None
        places = places * size + index % size
    whole = (*before, *places.shape, *after)
    if ctx.rank(values) > len(whole):
        return None
    values = ctx.reshape(ctx.expand(values, whole), (*before, places.numel(), *after))
    y = ctx.reshape(x, (*before, math.prod(counted), *after))
    filled = placed(ctx, y, first, places.flatten(), values, accumulate)
    return None if filled is None else ctx.reshape(filled, shape)


def _masked(ctx: Context, x: Value, indices: Sequence[Value | None], number: Value) -> Value | None:
    """`x` with one number wherever a mask of neighbouring dimensions says so."""
    (first, mask), *more = ((at, each) for at, each in enumerate(indices) if each is not None)
    if more or ctx.dtype(mask) != torch.bool or ctx.spec(number).numel != 1:
        return None
    rank = ctx.rank(mask)
    if ctx.shape(mask) != ctx.shape(x)[first : first + rank]:
        return None
    mask = ctx.reshape(mask, (*ctx.shape(mask), *(1,) * (ctx.rank(x) - first - rank)))
    return ctx.add("where", mask, ctx.reshape(number, ()), x)


def _scatters(accumulate: bool) -> Lowering:
    def lowering(ctx: Context, x: Value, dim: int, index: Value, values: Value) -> Value | None:
        """To the same places of all lines along `dim`."""
        rank, shape = ctx.rank(x), ctx.shape(index)
        if not rank or len(shape) != rank:
            return None
        dim %= rank
        if (*shape[:dim], *shape[dim + 1 :]) != (*ctx.shape(x)[:dim], *ctx.shape(x)[dim + 1 :]):
            return None
        places = _known(ctx, index)
        if places is None or not places.numel():
            return None
        lines = places.movedim(dim, 0).flatten(1) if rank > 1 else places[:, None]
        if not torch.equal(lines, lines[:, :1].expand_as(lines)) or bool((lines < 0).any()):
            return None
        for each, size in enumerate(shape):
            values = ctx.slice(values, each, 0, size)
        return placed(ctx, x, dim, lines[:, 0], values, accumulate)

    return lowering


_lowers(aten.scatter.src)(_scatters(accumulate=False))
_lowers(aten.scatter_add.default)(_scatters(accumulate=True))


def placed(
    ctx: Context, x: Value, dim: int, places: Tensor, values: Value, accumulate: bool
) -> Value | None:
    """`x` with `values` at `places` along dimension `dim`, or with their sums there: each place
    takes what comes to it."""
    size, count = ctx.shape(x)[dim], len(places)
    if ctx.dtype(values) != ctx.dtype(x) or not ctx.spec(values).numel:
        return None
    most = int(places.bincount(minlength=size).max())
    if most > (MOST_ADDED if accumulate else 1) or (accumulate and ctx.dtype(x) == torch.bool):
        return None
    ordered, order = places.sort(stable=True)
    turn = torch.arange(count) - torch.searchsorted(ordered, ordered)  # of those to one place
    for number in range(most):
        taken = torch.full((size,), -1)
        taken[ordered[turn == number]] = order[turn == number]
        sources = ctx.constant("sources", taken.clamp_min(0).to(ctx.device))
        there = (taken >= 0).reshape(-1, *(1 for _ in ctx.shape(x)[dim + 1 :]))
        new = named(ctx, values, dim, sources)
        if accumulate:
            new = ctx.add("add", x, new)
        if not there.all():
            new = ctx.add("where", ctx.constant("is_placed", there.to(ctx.device)), new, x)
        x = new
    return x


def _known(ctx: Context, x: Value) -> Tensor | None:
    """The values of what is computed of constants alone, by operators of the graph."""
    known = dict(ctx.builder.constants)
    missing, made = {x.name} - known.keys(), list[Node]()
    for node in reversed(ctx.builder.nodes) if missing else ():
        small = all(spec.numel <= MOST_KNOWN for spec in node.outputs)
        if node.name in missing and node.op != "aten" and small:
            made.append(node)
            missing.remove(node.name)
            missing |= set(node.inputs) - known.keys()
    if missing:
        return None
    for node in reversed(made):
        operands = (known[name] for name in node.inputs)
        known[node.name] = node.definition.reference(*operands, **node.attrs)
    return known[x.name].cpu()
