"""ATen's poolings, resizes and samplings to gtco's ops of images with their channels last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, pair, registrar

aten = torch.ops.aten

IMAGES: dict[OpOverload, Lowering] = {}
_lowers = registrar(IMAGES)


@_lowers(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def _global_pool(ctx: Context, x: Value, size: Sequence[int]) -> Value | None:
    rank = ctx.rank(x)
    if any(n != 1 for n in size):
        return _even_pool(ctx, x, size)
    return ctx.add("mean", x, dims=tuple(range(rank - len(size), rank)), keepdim=True)


LARGEST_WINDOW = 64
"""Pixels that a thread reads one by one; the mean of more is a reduction."""


def _even_pool(ctx: Context, x: Value, size: Sequence[int]) -> Value | None:
    """An adaptive pooling whose windows are of one size and leave none out."""
    shape = ctx.shape(x)
    lead, pixels = shape[: len(shape) - len(size)], shape[len(shape) - len(size) :]
    if any(n % of or not of for n, of in zip(pixels, size, strict=True)):
        return None
    windows = [n // of for n, of in zip(pixels, size, strict=True)]
    if len(size) == 2 and ctx.rank(x) == 4 and math.prod(windows) <= LARGEST_WINDOW:
        return _avg_pool(ctx, x, windows)  # type: ignore[return-value]
    pairs = [n for pair in zip(size, windows, strict=True) for n in pair]
    dims = tuple(range(len(lead) + 1, len(lead) + 2 * len(size), 2))
    return ctx.add("mean", ctx.reshape(x, (*lead, *pairs)), dims=dims, keepdim=False)


@_lowers(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool(
    ctx: Context, x: Value, size: Sequence[int]
) -> tuple[Value | None, ...] | None:
    """One whose windows are of one size, where nobody asks for their indices."""
    pixels = ctx.shape(x)[-2:]
    if ctx.used_outputs - {0} or any(n % of or not of for n, of in zip(pixels, size, strict=True)):
        return None
    windows = [n // of for n, of in zip(pixels, size, strict=True)]
    if math.prod(windows) > LARGEST_WINDOW:
        return None
    y = _max_pool(ctx, x, windows)
    return None if y is None else (y, None)  # type: ignore[return-value]


@_lowers(aten.max_pool2d.default)
def _max_pool(
    ctx: Context,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Value | None:
    sizes = {"kernel": kernel, "stride": stride or kernel, "padding": padding, "dilation": dilation}
    return _pooled(ctx, "max_pool", x, sizes, ceil_mode=ceil_mode)


@_lowers(aten.avg_pool2d.default)
def _avg_pool(
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
    return _pooled(ctx, "avg_pool", x, sizes, **given)


def _pooled(
    ctx: Context, op: str, x: Value, sizes: Mapping[str, Sequence[int]], **given: Any
) -> Value | None:
    """A pooling of an image [N, C, H, W], which the graph's own ops have with channels last."""
    if ctx.rank(x) != 4 or not ctx.dtype(x).is_floating_point:
        return None
    pairs = {name: pair(size) for name, size in sizes.items()}
    y = ctx.add(op, ctx.permute(x, (0, 2, 3, 1)), **pairs, **given)
    return ctx.permute(y, (0, 3, 1, 2))


def _resized(
    ctx: Context,
    x: Value,
    mode: str,
    size: Sequence[int] | None,
    scales: Sequence[float | None],
    align_corners: bool = False,
) -> Value | None:
    if ctx.rank(x) != 4 or not ctx.dtype(x).is_floating_point:
        return None
    if size is None:  # then every factor is given
        pixels = zip(ctx.shape(x)[2:], scales, strict=True)
        size = [math.floor(old * factor) for old, factor in pixels if factor is not None]
    given = {"mode": mode, "align_corners": align_corners, "scales": tuple(scales)}
    y = ctx.add("resize", ctx.permute(x, (0, 2, 3, 1)), size=tuple(size), **given)
    return ctx.permute(y, (0, 3, 1, 2))


def _smooth_resizes(mode: str) -> tuple[Lowering, Lowering]:
    def plain(ctx: Context, x: Value, size: Sequence[int], align: bool,
              high: float | None = None, wide: float | None = None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, (high, wide), align)

    def vec(ctx: Context, x: Value, size: Sequence[int] | None, align: bool,
            scales: Sequence[float] | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, scales or (None, None), align)

    return plain, vec


def _nearest_resizes(mode: str) -> tuple[Lowering, Lowering]:
    def plain(ctx: Context, x: Value, size: Sequence[int],
              high: float | None = None, wide: float | None = None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, (high, wide))

    def vec(ctx: Context, x: Value, size: Sequence[int] | None,
            scales: Sequence[float] | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, scales or (None, None))

    return plain, vec


for _op, _made in {
    "upsample_bilinear2d": _smooth_resizes("bilinear"),
    "upsample_bicubic2d": _smooth_resizes("bicubic"),
    "upsample_nearest2d": _nearest_resizes("nearest"),
    "_upsample_nearest_exact2d": _nearest_resizes("nearest-exact"),
}.items():
    for _overload, _lowering in zip(("default", "vec"), _made, strict=True):
        _lowers(getattr(getattr(aten, _op), _overload))(_lowering)


_SAMPLINGS = ("bilinear", "nearest")
"""By the number that ATen has for them; the next one is bicubic."""
_BORDERS = (False, True)
"""Likewise of paddings: zeros and the border's pixels; the next one is reflection."""


@_lowers(aten.grid_sampler.default, aten.grid_sampler_2d.default)
def _grid_sample(
    ctx: Context, x: Value, grid: Value, mode: int, padding: int, align: bool
) -> Value | None:
    if ctx.rank(x) != 4 or mode >= len(_SAMPLINGS) or padding >= len(_BORDERS):
        return None
    given = {"mode": _SAMPLINGS[mode], "border": _BORDERS[padding], "align_corners": align}
    y = ctx.add("grid_sample", ctx.permute(x, (0, 2, 3, 1)), grid, **given)
    return ctx.permute(y, (0, 3, 1, 2))
