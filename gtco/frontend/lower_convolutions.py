"""ATen's convolutions to `conv2d` and `conv3d`.

    convolution(x[n,c,l], w)               -> reshape(conv2d(x[n,c,1,l], w[o,c,1,k]))
    convolution(x[n,c,t,h,w], w)           -> conv3d(x, w)
    convolution(x[n,c,t,h,w], w)           -> conv2d(x[n*t/k,c*k,h,w], w[o,c*k,i,j])
    convolution(x, w, transposed, stride s) -> slice(interleave(conv2d(x, w')))

The third is of kernels that take k frames each, and no frame or pixel twice: a video's patches.

A transposed convolution of stride s is a convolution of stride 1 that computes, for each pixel, the
s x s pixels of the result that lie at its place: w' has their channels, and each of them takes the
taps of w that are s apart. What reaches beyond the result is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, pair, per_axis, registrar
from gtco.ir.phases import phases

aten = torch.ops.aten

CONVOLUTIONS: dict[OpOverload, Lowering] = {}
_lowers = registrar(CONVOLUTIONS)


@_lowers(aten.conv2d.default)
def _conv2d(
    ctx: Context,
    x: Value,
    w: Value,
    b: Value | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Value | None:
    if ctx.rank(x) != 4 or 0 in ctx.shape(w)[:2]:
        return None  # torch's result of no channels has none, whatever w says
    return ctx.add(
        "conv2d", x, w, b,
        stride=pair(stride), padding=pair(padding), dilation=pair(dilation), groups=groups,
    )  # fmt: skip


def _of_a_volume(
    ctx: Context,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Value | None:
    """A convolution of frames. Where its kernels take no frame or pixel twice, it is one of stacked
    channels."""
    (n, c, depth, height, width), (o, i, k, kh, kw) = ctx.shape(x), ctx.shape(w)
    if 0 in (c, o, k):
        return None
    one_behind_the_other = stride[0] == k and padding[0] == 0 and (dilation[0] == 1 or k == 1)
    if not one_behind_the_other or (k == 1 and (kh * kw == 1 or (kh, kw) != tuple(stride[1:]))):
        return ctx.add(
            "conv3d", x, w, b,
            stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), groups=groups,
        )  # fmt: skip
    steps = depth // k
    if steps * k != depth:
        x = ctx.add("slice", x, dim=2, start=0, end=steps * k)
    x = ctx.reshape(x, (n, c, steps, k, height, width))
    x = ctx.add("permute", x, dims=(0, 2, 1, 3, 4, 5))
    image = _conv2d(
        ctx, ctx.reshape(x, (n * steps, c * k, height, width)),
        _matrix(ctx, w, (o, i * k, kh, kw)), b, stride[1:], padding[1:], dilation[1:], groups,
    )  # fmt: skip
    assert isinstance(image, Value)
    y = ctx.reshape(image, (n, steps, *ctx.shape(image)[1:]))
    return ctx.add("permute", y, dims=(0, 2, 1, 3, 4))


@_lowers(aten.convolution.default)
def _convolution(
    ctx: Context,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value | None:
    rank = ctx.rank(w)
    if transposed and ctx.rank(x) == rank and rank in (4, 5):
        axes = rank - 2
        return _transposed(
            ctx, x, w, b, per_axis(stride, axes), per_axis(padding, axes),
            dilation, per_axis(output_padding, axes), groups,
        )  # fmt: skip
    if rank == 3 and ctx.rank(x) == 3:  # an image of one row
        (n, c, length), (o, i, k) = ctx.shape(x), ctx.shape(w)
        row = _convolution(
            ctx, ctx.reshape(x, (n, c, 1, length)), _matrix(ctx, w, (o, i, 1, k)), b,
            (1, *stride), (0, *padding), (1, *dilation), transposed, (0, *output_padding), groups,
        )  # fmt: skip
        assert row is None or isinstance(row, Value)
        if row is None:
            return None
        n, c, _, length = ctx.shape(row)
        return ctx.reshape(row, (n, c, length))
    if rank == 5 and ctx.rank(x) == 5 and not transposed:
        return _of_a_volume(ctx, x, w, b, stride, padding, dilation, groups)
    if rank != 4 or ctx.rank(x) != 4:
        return None
    result = _conv2d(ctx, x, w, b, stride, padding, dilation, groups)
    assert result is None or isinstance(result, Value)
    return result


def _matrix(ctx: Context, w: Value, shape: tuple[int, ...]) -> Value:
    """`w` in another shape; a constant stays one."""
    constant = ctx.builder.constants.get(w.name)
    return (
        ctx.reshape(w, shape) if constant is None else ctx.constant(w.name, constant.reshape(shape))
    )


def _transposed(
    ctx: Context,
    x: Value,
    w: Value,
    b: Value | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: Sequence[int],
    more: tuple[int, ...],
    groups: int,
) -> Value | None:
    """A transposed convolution of images or volumes, whose result has `more` rows, columns and so
    on than its windows reach."""
    weight = ctx.builder.constants.get(w.name)
    bias = None if b is None else ctx.builder.constants.get(b.name)
    if weight is None or (b is not None and bias is None) or groups != 1 or set(dilation) != {1}:
        return None
    kernel = weight.shape[2:]
    (n, _, *sizes), channels = ctx.shape(x), weight.shape[1]
    result = [
        (size - 1) * s - 2 * p + k + m
        for size, s, p, k, m in zip(sizes, stride, padding, kernel, more, strict=True)
    ]
    # So many taps of each phase that all the result is within what they reach.
    taps = [
        max(-(-max(k, k + m - p) // s), 1)
        for k, m, p, s in zip(kernel, more, padding, stride, strict=True)
    ]
    apart = ctx.constant(w.name, phases(weight, stride, taps))
    shift = (
        None if bias is None or b is None else ctx.constant(b.name, bias.repeat(math.prod(stride)))
    )
    axes, ones = len(sizes), (1,) * len(sizes)
    wide = ctx.add(
        "conv2d" if axes == 2 else "conv3d", x, apart, shift,
        stride=ones, padding=tuple(each - 1 for each in taps), dilation=ones, groups=1,
    )  # fmt: skip
    whole = ctx.shape(wide)[2:]
    first, last = (0, axes + 1, *range(1, axes + 1)), (0, *range(2, axes + 2), 1)
    parts = ctx.reshape(ctx.permute(wide, last), (n, *whole, *stride, channels))
    sides = [each for axis in range(1, axes + 1) for each in (axis, axes + axis)]
    image = ctx.reshape(
        ctx.permute(parts, (0, *sides, 2 * axes + 1)),
        (n, *(size * s for size, s in zip(whole, stride, strict=True)), channels),
    )
    for dim, (size, p) in enumerate(zip(result, padding, strict=True), start=1):
        image = ctx.slice(image, dim, p, p + size)
    return ctx.permute(image, first)
