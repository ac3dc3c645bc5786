"""ATen ops that move, view, copy or cast elements to gtco's ops."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import (
    Context,
    Lowering,
    Number,
    Scalar,
    Value,
    all_dims,
    registrar,
    resolve_shape,
)
from gtco.frontend.lower_indices import named, placed

aten = torch.ops.aten

SHAPES: dict[OpOverload, Lowering] = {}
_lowers = registrar(SHAPES)


# -- casts and copies ----------------------------------------------------------------------------


@_lowers(aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(ctx: Context, x: Value) -> Value:
    return x


@_lowers(aten.clone.default, aten.contiguous.default)
def _same_values(ctx: Context, x: Value, memory_format: torch.memory_format | None = None) -> Value:
    return x


@_lowers(aten.dropout.default)
def _dropout(ctx: Context, x: Value, p: float, train: bool) -> Value | None:
    return None if train and p > 0 else x


@_lowers(aten._to_copy.default)
def _to_copy(
    ctx: Context,
    x: Value,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    return ctx.cast(x, dtype)


@_lowers(aten.to.dtype)
def _to_dtype(
    ctx: Context,
    x: Value,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    return ctx.cast(x, dtype)


# -- views ---------------------------------------------------------------------------------------


@_lowers(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(ctx: Context, x: Value, shape: Sequence[int]) -> Value:
    return ctx.reshape(x, shape)


@_lowers(aten.unsqueeze.default)
def _unsqueeze(ctx: Context, x: Value, dim: int) -> Value:
    shape = list(ctx.shape(x))
    shape.insert(dim % (len(shape) + 1), 1)
    return ctx.reshape(x, shape)


@_lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(ctx: Context, x: Value, dims: Sequence[int] | int | None = None) -> Value:
    rank = ctx.rank(x)
    chosen = () if dims == [] else all_dims(dims, rank)  # over no dimensions it changes nothing
    shape = ctx.shape(x)
    return ctx.reshape(x, (n for i, n in enumerate(shape) if not (i in chosen and n == 1)))


@_lowers(aten.flatten.using_ints)
def _flatten(ctx: Context, x: Value, start: int = 0, end: int = -1) -> Value:
    shape, rank = ctx.shape(x), max(ctx.rank(x), 1)
    first, last = start % rank, end % rank
    return ctx.reshape(x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@_lowers(aten.unflatten.int)
def _unflatten(ctx: Context, x: Value, dim: int, sizes: Sequence[int]) -> Value:
    shape, dim = ctx.shape(x), dim % ctx.rank(x)
    return ctx.reshape(
        x, (*shape[:dim], *resolve_shape(tuple(sizes), shape[dim]), *shape[dim + 1 :])
    )


@_lowers(aten.permute.default)
def _permute(ctx: Context, x: Value, dims: Sequence[int]) -> Value:
    return ctx.permute(x, dims)


@_lowers(aten.transpose.int)
def _transpose(ctx: Context, x: Value, a: int, b: int) -> Value:
    order = list(range(ctx.rank(x)))
    if not order:
        return x
    order[a], order[b] = order[b], order[a]
    return ctx.permute(x, order)


@_lowers(aten.t.default)
def _t(ctx: Context, x: Value) -> Value:
    return ctx.permute(x, reversed(range(ctx.rank(x))))


@_lowers(aten.expand.default)
def _expand(ctx: Context, x: Value, shape: Sequence[int], implicit: bool = False) -> Value:
    return ctx.expand(x, shape)


@_lowers(aten.copy.default)
def _copy(ctx: Context, x: Value, source: Value, non_blocking: bool = False) -> Value:
    """What x holds after `x.copy_(source)`."""
    return ctx.cast(ctx.expand(source, ctx.shape(x)), ctx.dtype(x))


@_lowers(aten.slice_scatter.default)
def _slice_scatter(
    ctx: Context,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value | None:
    """What x holds after `x[start:end:step] = source`."""
    dim %= ctx.rank(x)
    size = ctx.shape(x)[dim]
    first, last, _ = slice(start, end).indices(size)
    if first >= last:
        return x
    source = ctx.cast(source, ctx.dtype(x))
    if step != 1:
        places = torch.arange(first, last, step)
        return placed(ctx, x, dim, places, source, accumulate=False)
    before, after = ctx.slice(x, dim, 0, first), ctx.slice(x, dim, last, size)
    parts = (before, source, after)
    return _join(ctx, [part for part in parts if ctx.shape(part)[dim]], dim)


@_lowers(aten.slice.Tensor)
def _slice(
    ctx: Context,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    first, last, step = slice(start, end, step).indices(ctx.shape(x)[dim])
    return ctx.slice(x, dim, first, max(first, last), step)


def _select_index(ctx: Context, x: Value, dim: int, index: int) -> Value:
    shape, dim = ctx.shape(x), dim % ctx.rank(x)
    index %= shape[dim]
    row = ctx.slice(x, dim, index, index + 1)
    return ctx.reshape(row, (*shape[:dim], *shape[dim + 1 :]))


@_lowers(aten.select.int)
def _select(ctx: Context, x: Value, dim: int, index: int | Number) -> Value:
    if isinstance(index, Number):
        return named(ctx, x, dim % ctx.rank(x), ctx.cast(index.value, torch.int64))
    return _select_index(ctx, x, dim, index)


def _matrix_last(rank: int, dim1: int, dim2: int) -> list[int]:
    """The order of dimensions in which a matrix is the last two."""
    matrix = [dim1 % rank, dim2 % rank]
    return [*(dim for dim in range(rank) if dim not in matrix), *matrix]


def _on_diagonal(height: int, width: int, offset: int) -> range:
    """Of the elements of a matrix in one line: every one but one row further than the last."""
    start = offset if offset >= 0 else -offset * width
    count = min(height + min(offset, 0), width - max(offset, 0))
    return range(start, start + (count - 1) * (width + 1) + 1 if count > 0 else start, width + 1)


@_lowers(aten.diagonal.default)
def _diagonal(
    ctx: Context, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value | None:
    x = ctx.permute(x, _matrix_last(ctx.rank(x), dim1, dim2))
    *lead, height, width = ctx.shape(x)
    places = _on_diagonal(height, width, offset)
    if not places:
        return None
    line = ctx.reshape(x, (*lead, height * width))
    return ctx.slice(line, -1, places.start, places.stop, places.step)


@_lowers(aten.diagonal_scatter.default)
def _diagonal_scatter(
    ctx: Context, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value | None:
    """What x holds after `x.diagonal(offset, dim1, dim2).copy_(source)`."""
    order = _matrix_last(ctx.rank(x), dim1, dim2)
    matrix = ctx.permute(x, order)
    *lead, height, width = ctx.shape(matrix)
    places = _on_diagonal(height, width, offset)
    if not places:
        return x
    line = ctx.reshape(matrix, (*lead, height * width))
    filled = placed(ctx, line, len(lead), torch.tensor(places), source, accumulate=False)
    if filled is None:
        return None
    filled = ctx.reshape(filled, (*lead, height, width))
    return ctx.permute(filled, [order.index(dim) for dim in range(len(order))])


@_lowers(aten.unbind.int)
def _unbind(ctx: Context, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select_index(ctx, x, dim, i) for i in range(ctx.shape(x)[dim]))


def _pieces(ctx: Context, x: Value, sizes: Iterable[int], dim: int) -> tuple[Value, ...]:
    parts, start = [], 0
    for size in sizes:
        parts.append(ctx.slice(x, dim, start, start + size))
        start += size
    return tuple(parts)


@_lowers(aten.split.Tensor)
def _split(ctx: Context, x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    whole = ctx.shape(x)[dim]
    sizes = [min(size, whole - i) for i in range(0, whole, size)] if whole else [0]
    return _pieces(ctx, x, sizes, dim)


@_lowers(aten.split_with_sizes.default)
def _split_sizes(ctx: Context, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    return _pieces(ctx, x, sizes, dim)


@_lowers(aten.chunk.default)
def _chunk(ctx: Context, x: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    size = ctx.shape(x)[dim]
    if size == 0:
        return _pieces(ctx, x, (0,) * chunks, dim)
    return _split(ctx, x, -(-size // chunks), dim)  # type: ignore[return-value]


@_lowers(aten.repeat.default)
def _repeat(ctx: Context, x: Value, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - ctx.rank(x)) + ctx.shape(x)
    pairs = tuple(zip(repeats, shape, strict=True))
    apart = ctx.reshape(x, (n for _, size in pairs for n in (1, size)))
    whole = ctx.expand(apart, [n for pair in pairs for n in pair])
    return ctx.reshape(whole, (times * size for times, size in pairs))


# -- moves ---------------------------------------------------------------------------------------


def _join(ctx: Context, parts: Sequence[Value], dim: int) -> Value:
    # torch still accepts the empty 1-d tensor that once meant "nothing yet"
    real = [x for x in parts if ctx.shape(x) != (0,)] or list(parts[:1])
    return real[0] if len(real) == 1 else ctx.add("concat", *real, dim=dim % ctx.rank(real[0]))


@_lowers(aten.cat.default)
def _cat(ctx: Context, parts: Sequence[Value], dim: int = 0) -> Value:
    dtype = functools.reduce(torch.promote_types, map(ctx.dtype, parts))  # of empty parts too
    return ctx.cast(_join(ctx, parts, dim), dtype)


@_lowers(aten.stack.default)
def _stack(ctx: Context, parts: Sequence[Value], dim: int = 0) -> Value:
    dim %= ctx.rank(parts[0]) + 1
    return _join(ctx, [_unsqueeze(ctx, x, dim) for x in parts], dim)  # type: ignore[misc]


@_lowers(aten.roll.default)
def _roll(ctx: Context, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    shape = ctx.shape(x)
    if not dims:
        flat = _roll(ctx, ctx.reshape(x, (ctx.spec(x).numel,)), shifts, (0,))
        return ctx.reshape(flat, shape)  # type: ignore[arg-type]
    total = [0] * len(shape)
    for shift, dim in zip(shifts, dims, strict=True):
        total[dim] += shift
    turns = tuple(shift % size if size else 0 for shift, size in zip(total, shape, strict=True))
    return ctx.add("roll", x, shifts=turns) if any(turns) else x


@_lowers(aten.unfold.default)
def _windows(ctx: Context, x: Value, dim: int, size: int, step: int) -> Value | None:
    if not ctx.rank(x):
        return None
    return ctx.add("unfold", x, dim=dim % ctx.rank(x), size=size, step=step)


@_lowers(aten.im2col.default)
def _im2col(
    ctx: Context,
    x: Value,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value | None:
    """Windows of an image [N, C, H, W] as [N, C * taps, windows]."""
    if ctx.rank(x) != 4:
        return None
    if any(padding):
        amounts = (0, 0, *padding)
        x = ctx.add("pad", x, before=amounts, after=amounts)
    for dim, size, gap, step in zip((2, 3), kernel, dilation, stride, strict=True):
        x = ctx.add("unfold", x, dim=dim, size=(size - 1) * gap + 1, step=step)
        x = ctx.slice(x, dim + 2, 0, (size - 1) * gap + 1, gap)
    n, channels, *windows = ctx.shape(x)[:4]
    x = ctx.permute(x, (0, 1, 4, 5, 2, 3))
    return ctx.reshape(x, (n, channels * math.prod(kernel), math.prod(windows)))


@_lowers(aten.constant_pad_nd.default)
def _pad(ctx: Context, x: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    for index in range(0, len(pad), 2):
        dim = ctx.rank(x) - 1 - index // 2
        size = ctx.shape(x)[dim]
        before, after = pad[index], pad[index + 1]
        x = ctx.slice(x, dim, max(0, -before), size - max(0, -after))
        parts = [_filled(ctx, x, dim, before, value), x, _filled(ctx, x, dim, after, value)]
        x = _join(ctx, [part for part in parts if part is not None], dim)
    return x


def _extended(mode: str) -> Lowering:
    def lowering(ctx: Context, x: Value, padding: Sequence[int]) -> Value | None:
        if min(padding) < 0:
            return None
        if not any(padding):  # as convolutions of one pixel have it, whose borders are reflected
            return x
        rank = ctx.rank(x)
        before, after = [0] * rank, [0] * rank
        for index in range(0, len(padding), 2):
            dim = rank - 1 - index // 2
            before[dim], after[dim] = padding[index], padding[index + 1]
        return ctx.add("extend", x, before=tuple(before), after=tuple(after), mode=mode)

    return lowering


for _dims in (1, 2, 3):
    _lowers(getattr(aten, f"reflection_pad{_dims}d").default)(_extended("reflect"))
    _lowers(getattr(aten, f"replication_pad{_dims}d").default)(_extended("replicate"))


def _filled(ctx: Context, like: Value, dim: int, size: int, value: Scalar) -> Value | None:
    if size <= 0:
        return None
    shape = list(ctx.shape(like))
    shape[dim] = size
    return ctx.constant("pad", torch.full(shape, value, dtype=ctx.dtype(like), device=ctx.device))


@_lowers(aten.full_like.default)
def _full_like(
    ctx: Context,
    x: Value,
    value: Scalar,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Value:
    scalar = torch.full((), value, dtype=dtype or ctx.dtype(x), device=ctx.device)
    return ctx.expand(ctx.constant("full", scalar), ctx.shape(x))
