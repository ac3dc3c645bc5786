"""ATen's sums of overlapping windows to pads and additions.

    %y = aten.col2im(%x, ...)     ->    %t = pad(slice(%x, ...), ...)    one for each way in which
                                        %y = add(add(%t, %t_1), ...)     windows meet a pixel

Pixel j * stride + r of an image is the sum of tap r of window j, tap r + stride of window j - 1 and
so on: windows shifted by whole strides. Where windows do not overlap, there is one shift, and the
image is the windows, moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, registrar

aten = torch.ops.aten

FOLDS: dict[OpOverload, Lowering] = {}
_lowers = registrar(FOLDS)

MOST_TERMS = 4
"""That one kernel adds up; more are summed along one axis of the image and then the other."""


@dataclass(frozen=True)
class _Axis:
    """Of an image, along which dimension `dim` of a value counts windows and the next their taps:
    tap t of window w lies at pixel `w * stride + t - padding`."""

    dim: int
    size: int
    padding: int
    stride: int

    def shifts(self, ctx: Context, x: Value) -> list[int]:
        """By how many strides a tap that lies in the image may be away from its window."""
        windows, taps = ctx.shape(x)[self.dim : self.dim + 2]
        strides = -(-self.size // self.stride)
        every = range(-self.padding // self.stride, (taps - 1 - self.padding) // self.stride + 1)
        return [shift for shift in every if -windows < shift < strides]

    def cut(self, ctx: Context, x: Value, shift: int) -> tuple[Value, dict[int, tuple[int, int]]]:
        """The windows and taps of one shift; and how many zeros stand for those that it lacks
        before and behind them, by dimension."""
        lacks = {}
        strides, tap = -(-self.size // self.stride), shift * self.stride + self.padding
        for dim, start, count in ((self.dim, -shift, strides), (self.dim + 1, tap, self.stride)):
            first, last = max(0, start), min(ctx.shape(x)[dim], start + count)
            x = ctx.slice(x, dim, first, last)
            lacks[dim] = (first - start, start + count - last)
        return x, lacks


@_lowers(aten.col2im.default)
def _col2im(
    ctx: Context,
    x: Value,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value | None:
    """Windows [N, C * taps, windows] as an image [N, C, H, W]."""
    dtype, (*batch, depth, _) = ctx.dtype(x), ctx.shape(x)
    if not dtype.is_floating_point:
        return None
    windows = [
        (length + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for length, taps, gap, pad, step in zip(
            size, kernel, dilation, padding, stride, strict=True
        )
    ]
    x = ctx.reshape(x, (math.prod(batch), depth // math.prod(kernel), *kernel, *windows))
    y = ctx.permute(x, (0, 4, 2, 5, 3, 1))  # [N, windows, taps, windows, taps, C]
    axes = [_Axis(1, size[0], padding[0], stride[0]), _Axis(3, size[1], padding[1], stride[1])]
    for axis, gap in zip(axes, dilation, strict=True):
        y = _spread(ctx, y, axis.dim + 1, gap)
    shifts = [len(axis.shifts(ctx, y)) for axis in axes]
    if not all(shifts):
        return None  # all taps lie in the padding
    for part in [axes] if math.prod(shifts) <= MOST_TERMS else [axes[1:], axes[:1]]:
        y = _summed(ctx, y, part)
    y = ctx.permute(ctx.cast(y, dtype), (0, 3, 1, 2))
    return ctx.reshape(y, (*batch, *ctx.shape(y)[1:]))


def _spread(ctx: Context, x: Value, dim: int, gap: int) -> Value:
    """`x` with zeros for the pixels between the taps, which dimension `dim` counts."""
    if gap == 1:
        return x
    shape = ctx.shape(x)
    apart = ctx.reshape(x, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    apart = _padded(ctx, apart, {dim + 1: (0, gap - 1)})
    flat = ctx.reshape(apart, (*shape[:dim], shape[dim] * gap, *shape[dim + 1 :]))
    return ctx.slice(flat, dim, 0, (shape[dim] - 1) * gap + 1)


def _summed(ctx: Context, x: Value, axes: Sequence[_Axis]) -> Value:
    """`x` with windows and taps of each of `axes` summed to pixels, in fp32 or more."""
    terms: list[tuple[Value, dict[int, tuple[int, int]]]] = [(x, {})]
    for axis in axes:
        terms = [
            (part, lacks | more)
            for term, lacks in terms
            for part, more in (axis.cut(ctx, term, shift) for shift in axis.shifts(ctx, x))
        ]
    y, *others = (_padded(ctx, term, lacks) for term, lacks in terms)
    if others:
        y = ctx.cast(y, torch.promote_types(ctx.dtype(x), torch.float32))
    for other in others:
        y = ctx.add("add", y, other)
    for axis in reversed(axes):  # the last first: what lies ahead keeps its place
        shape = ctx.shape(y)
        pixels = math.prod(shape[axis.dim : axis.dim + 2])
        y = ctx.reshape(y, (*shape[: axis.dim], pixels, *shape[axis.dim + 2 :]))
        y = ctx.slice(y, axis.dim, 0, axis.size)
    return y


def _padded(ctx: Context, x: Value, amounts: dict[int, tuple[int, int]]) -> Value:
    """`x` with so many zeros before and behind it, by dimension."""
    if not any(map(any, amounts.values())):
        return x
    sides = [amounts.get(dim, (0, 0)) for dim in range(ctx.rank(x))]
    before, after = zip(*sides, strict=True)
    return ctx.add("pad", x, before=before, after=after)
