"""ATen's convolutions to `conv2d` and `conv3d`.

    convolution(x[n,c,l], w)               -> reshape(conv2d(x[n,c,1,l], w[o,c,1,k]))
    convolution(x[n,c,t,h,w], w)           -> conv3d(x, w)
    convolution(x[n,c,t,h,w], w)           -> conv2d(x[n*t/k,c*k,h,w], w[o,c*k,i,j])
    convolution(x, w, transposed, stride s) -> slice(interleave(conv2d(x, w')))

The third is of kernels that take k frames each, and no frame or pixel twice: a video's patches.

A transposed convolution of stride s is a convolution of stride 1 that computes, for each pixel, the
s x s pixels of the result that lie at its place: w' has their channels, and each of them takes the
taps of w that are s apart. What reaches beyond the result is cut off. Of several groups, each has
its phases side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, pair, per_axis, registrar
from gtco.frontend.lower_indices import named
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
    if set(dilation) != {1}:
        return None
    kernel, channels = ctx.shape(w)[2:], ctx.shape(w)[1]  # of each group
    n, _, *sizes = ctx.shape(x)
    result = [
        (size - 1) * s - 2 * p + k + m
        for size, s, p, k, m in zip(sizes, stride, padding, kernel, more, strict=True)
    ]
    # So many taps of each phase that all the result is within what they reach.
    taps = [
        max(-(-max(k, k + m - p) // s), 1)
        for k, m, p, s in zip(kernel, more, padding, stride, strict=True)
    ]
    apart = _phases(ctx, w, stride, taps, groups)
    shift = None if b is None else _for_each_phase(ctx, b, math.prod(stride), groups)
    axes, ones = len(sizes), (1,) * len(sizes)
    wide = ctx.add(
        "conv2d" if axes == 2 else "conv3d", x, apart, shift,
        stride=ones, padding=tuple(each - 1 for each in taps), dilation=ones, groups=groups,
    )  # fmt: skip
    whole = ctx.shape(wide)[2:]
    first, last = (0, axes + 1, *range(1, axes + 1)), (0, *range(2, axes + 2), 1)
    lead = (groups,) if groups > 1 else ()
    parts = ctx.reshape(ctx.permute(wide, last), (n, *whole, *lead, *stride, channels))
    phase = axes + 1 + len(lead)
    sides = [each for axis in range(axes) for each in (axis + 1, axis + phase)]
    image = ctx.reshape(
        ctx.permute(parts, (0, *sides, *range(axes + 1, phase), phase + axes)),
        (n, *(size * s for size, s in zip(whole, stride, strict=True)), groups * channels),
    )
    for dim, (size, p) in enumerate(zip(result, padding, strict=True), start=1):
        image = ctx.slice(image, dim, p, p + size)
    return ctx.permute(image, first)


def _phases(
    ctx: Context, w: Value, stride: tuple[int, ...], taps: Sequence[int], groups: int
) -> Value:
    """The weights [groups * phases * out, in, *taps] of the convolution of stride 1, of those
    [groups * in, out, *kernel] of the transposed one; a constant gives one."""
    constant = ctx.builder.constants.get(w.name)
    if constant is not None:
        apart = [phases(part, stride, taps) for part in constant.chunk(groups)]
        return ctx.constant(w.name, torch.cat(apart) if groups > 1 else apart[0])
    depth, channels, *kernel = ctx.shape(w)
    taken = phases(torch.arange(1, math.prod(kernel) + 1).reshape(1, 1, *kernel), stride, taps)
    taken = taken.to(ctx.device).reshape(-1, *taps)  # which tap each one is; 0 is none
    lines = ctx.reshape(w, (groups, depth // groups, channels, math.prod(kernel)))
    w = named(ctx, lines, 3, ctx.constant("taps", (taken - 1).clamp_min(0)))
    if not taken.all():
        zero = ctx.constant("no_tap", torch.zeros((), dtype=ctx.dtype(w), device=ctx.device))
        w = ctx.add("where", ctx.constant("is_tap", taken > 0), w, zero)
    w = ctx.permute(w, (0, 3, 2, 1, *range(4, 4 + len(taps))))
    return ctx.reshape(w, (groups * len(taken) * channels, depth // groups, *taps))


def _for_each_phase(ctx: Context, b: Value, count: int, groups: int) -> Value:
    """`b` [groups * out] for the channels of `_phases`; a constant gives one."""
    constant = ctx.builder.constants.get(b.name)
    if constant is not None:
        repeated = constant.reshape(groups, 1, -1).repeat(1, count, 1)
        return ctx.constant(b.name, repeated.flatten())
    channels = ctx.spec(b).numel // groups
    apart = ctx.expand(ctx.reshape(b, (groups, 1, channels)), (groups, count, channels))
    return ctx.reshape(apart, (groups * count * channels,))
