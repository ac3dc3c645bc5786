"""ATen's poolings to gtco's, of images with their channels last, or to reductions.

aten.avg_pool2d(x, [1280, 1280], ceil_mode=True)  -> mean(x, dims=[2, 3]), of 7x7 pixels
aten.max_pool2d(x, [2, 9]), of 4x7 pixels         -> max_pool(x, kernel=[2, 7])

One of volumes pools each frame, and then the frames of each pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, pair, per_axis, registrar
from gtco.frontend.volumes import along_frames, by_frames
from gtco.ir.ops import OPS
from gtco.ir.references import adaptive_window

aten = torch.ops.aten

POOLS: dict[OpOverload, Lowering] = {}
_lowers = registrar(POOLS)
Pooled = Callable[..., Value | None]
"""(context, op, x, sizes, other attributes) to the pooling of x."""


LARGEST_WINDOW = 64
"""Pixels that a thread reads one by one; the mean of more is a reduction, or that of the means of
rows."""
WIDEST_WINDOW = 8
"""Of these, neighbours along the width, which it has in registers all at once."""
LONGEST_WINDOW = 128
"""Likewise, where a window has one column."""


@_lowers(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def _adaptive_avg_pool(ctx: Context, x: Value, size: Sequence[int]) -> Value | None:
    return _adaptive(ctx, "adaptive_avg_pool", "mean", x, size)


@_lowers(aten.adaptive_avg_pool3d.default)
def _adaptive_avg_pool3d(ctx: Context, x: Value, size: Sequence[int]) -> Value | None:
    if ctx.rank(x) != 5 or all(n == 1 for n in size):
        return _adaptive_avg_pool(ctx, x, size)  # type: ignore[return-value]
    y = by_frames(
        ctx, x, lambda image: _adaptive(ctx, "adaptive_avg_pool", "mean", image, size[1:])
    )
    if y is None:
        return None
    lines = (size[0], size[1] * size[2])
    return along_frames(
        ctx, y, lambda image: _adaptive(ctx, "adaptive_avg_pool", "mean", image, lines)
    )


@_lowers(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool(
    ctx: Context, x: Value, size: Sequence[int]
) -> tuple[Value | None, ...] | None:
    """One of whose indices nobody asks for; torch takes the one of rows apart into it."""
    if ctx.used_outputs - {0}:
        return None
    y = _adaptive(ctx, "adaptive_max_pool", "amax", x, size)
    return None if y is None else (y, None)


def _adaptive(ctx: Context, op: str, reduction: str, x: Value, size: Sequence[int]) -> Value | None:
    """`size` windows along the last dimensions of x, which share its elements evenly."""
    shape, rank = ctx.shape(x), ctx.rank(x) - len(size)
    lead, pixels = shape[:rank], shape[rank:]
    if not ctx.dtype(x).is_floating_point or not all(size) or not ctx.spec(x).numel:
        return None
    if all(n == 1 for n in size):
        return ctx.add(reduction, x, dims=tuple(range(rank, ctx.rank(x))), keepdim=True)
    if any(n % of for n, of in zip(pixels, size, strict=True)):
        return _uneven_pool(ctx, op, x, size)
    windows = [n // of for n, of in zip(pixels, size, strict=True)]
    if len(size) == rank == 2 and math.prod(windows) <= LARGEST_WINDOW:
        pool = _avg_pool if reduction == "mean" else _max_pool
        return pool(ctx, x, windows)  # type: ignore[return-value]
    pairs = [n for pair in zip(size, windows, strict=True) for n in pair]
    dims = tuple(range(rank + 1, rank + 2 * len(size), 2))
    return ctx.add(reduction, ctx.reshape(x, (*lead, *pairs)), dims=dims, keepdim=False)


def _uneven_pool(ctx: Context, op: str, x: Value, size: Sequence[int]) -> Value | None:
    """One whose windows are of several sizes. Where they are large, each row is pooled first, and
    then the columns of the results."""
    *lead, channels = ctx.shape(x)[: ctx.rank(x) - len(size)]
    height, width, *_ = (*ctx.shape(x)[-len(size) :], 1)
    out_height, out_width, *_ = (*size, 1)
    images = math.prod(lead)
    image = ctx.permute(ctx.reshape(x, (images, channels, height, width)), (0, 2, 3, 1))
    high, wide = adaptive_window(height, out_height), adaptive_window(width, out_width)
    if max(high, wide) > LONGEST_WINDOW:
        return None
    if wide > 1 and (wide > WIDEST_WINDOW or high * wide > LARGEST_WINDOW):
        rows = ctx.reshape(image, (images * height, width, 1, channels))
        rows = ctx.add(op, rows, out=(out_width, 1))
        image = ctx.reshape(rows, (images, height, 1, out_width * channels))
        y = ctx.add(op, image, out=(out_height, 1))
    else:
        y = ctx.add(op, image, out=(out_height, out_width))
    y = ctx.reshape(y, (images, out_height, out_width, channels))
    return ctx.reshape(ctx.permute(y, (0, 3, 1, 2)), (*lead, channels, *size))


def _max_pools(pooled: Pooled) -> Lowering:
    def lowering(
        ctx: Context,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Value | None:
        sizes = {"kernel": kernel, "stride": stride or kernel}
        sizes |= {"padding": padding, "dilation": dilation}
        return pooled(ctx, "max_pool", x, sizes, ceil_mode=ceil_mode)

    return lowering


def _avg_pools(pooled: Pooled) -> Lowering:
    def lowering(
        ctx: Context,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_padding: bool = True,
        divisor: int | None = None,
    ) -> Value | None:
        sizes = {"kernel": kernel, "stride": stride or kernel, "padding": padding}
        given = {"ceil_mode": ceil_mode, "count_padding": count_padding, "divisor": divisor}
        return pooled(ctx, "avg_pool", x, sizes, **given)

    return lowering


def _pooled_volume(
    ctx: Context, op: str, x: Value, sizes: Mapping[str, Sequence[int]], **given: Any
) -> Value | None:
    """A pooling of a volume [N, C, T, H, W], whose windows are those of a frame in several."""
    if ctx.rank(x) != 5 or given.get("divisor") is not None:
        return None
    whole = {name: per_axis(size, 3) for name, size in sizes.items()}
    none = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
    of_frame = {name: size[1:] for name, size in whole.items()}
    of_frames = {name: (size[0], none[name]) for name, size in whole.items()}
    y: Value | None = x
    for apart, part in ((by_frames, of_frame), (along_frames, of_frames)):
        if y is not None and any(size != (none[name],) * 2 for name, size in part.items()):
            y = apart(ctx, y, partial(_pooled, ctx, op, sizes=part, **given))
    return y


def _pooled(
    ctx: Context, op: str, x: Value, sizes: Mapping[str, Sequence[int]], **given: Any
) -> Value | None:
    """A pooling of an image [N, C, H, W], which the graph's own ops have with channels last; where
    one window has all of an image, a reduction."""
    if ctx.rank(x) != 4 or not ctx.dtype(x).is_floating_point:
        return None
    attrs = {name: pair(size) for name, size in sizes.items()} | given
    image = torch.empty((1, *ctx.shape(x)[2:], 1), device="meta")
    windows = OPS[op].reference(image, **attrs).shape[1:3] if ctx.spec(x).numel else (0, 0)
    x, attrs, whole = _clipped(ctx, x, attrs, windows)
    if whole == {2, 3}:
        return _reduced(ctx, op, x, attrs.get("divisor"))
    y = ctx.add(op, ctx.permute(x, (0, 2, 3, 1)), **attrs)
    return ctx.permute(y, (0, 3, 1, 2))


def _clipped(
    ctx: Context, x: Value, attrs: dict[str, Any], windows: Sequence[int]
) -> tuple[Value, dict[str, Any], set[int]]:
    """x [N, C, H, W] without what no window reads, where there is one along an axis.

    Args:
        x: what is pooled.
        attrs: of its pooling.
        windows: how many there are along the height and the width.

    Returns:
        x, the attributes of the same pooling of it, and the dimensions that one window has all of.
    """
    taps, counts = {}, {}  # pixels of x under the only window; what a mean counts there
    for axis in (axis for axis in (0, 1) if windows[axis] == 1):
        kernel, padding = attrs["kernel"][axis], attrs["padding"][axis]
        size, step = ctx.shape(x)[axis + 2], attrs.get("dilation", (1, 1))[axis]
        places = range(-padding, -padding + kernel * step, step)
        taps[axis] = [at for at in places if 0 <= at < size]
        counts[axis] = min(kernel, size + 2 * padding)
    divides = attrs.get("count_padding", False) and attrs["divisor"] is None
    if divides and len(taps) == 2:
        attrs = attrs | {"divisor": counts[0] * counts[1]}
        divides = False
    clipped = {
        axis: under
        for axis, under in taps.items()
        if under and not (divides and counts[axis] != len(under))
    }
    for axis, under in clipped.items():
        step = attrs.get("dilation", (1, 1))[axis] if len(under) > 1 else 1
        x = ctx.slice(x, axis + 2, under[0], under[-1] + 1, step)
    ones = {"padding": 0, "dilation": 1}
    for name in ("kernel", "stride", "padding", "dilation"):
        if name in attrs:
            sizes = (
                ones.get(name, len(clipped[axis])) if axis in clipped else attrs[name][axis]
                for axis in (0, 1)
            )
            attrs = attrs | {name: tuple(sizes)}
    return x, attrs, {axis + 2 for axis in clipped}


def _reduced(ctx: Context, op: str, x: Value, divisor: int | None) -> Value:
    """The pooling of x [N, C, H, W] whose only window has all of it."""
    if op == "max_pool":
        return ctx.add("amax", x, dims=(2, 3), keepdim=True)
    y, pixels = ctx.add("mean", x, dims=(2, 3), keepdim=True), math.prod(ctx.shape(x)[2:])
    return y if divisor in (None, pixels) else ctx.add("mul", y, other=pixels / divisor)


_max_pool, _avg_pool = _max_pools(_pooled), _avg_pools(_pooled)
_lowers(aten.max_pool2d.default)(_max_pool)
_lowers(aten.avg_pool2d.default)(_avg_pool)
_lowers(aten.max_pool3d.default)(_max_pools(_pooled_volume))
_lowers(aten.avg_pool3d.default)(_avg_pools(_pooled_volume))
