"""ATen ops that pick elements by index to gtco's ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Number, Value, registrar

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
