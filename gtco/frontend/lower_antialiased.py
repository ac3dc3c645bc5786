"""ATen's antialiased resizes to products with constants.

    _upsample_bilinear2d_aa(x[n,c,h,w], [i, j])  -> permute(linear(permute(linear(x, W)), H))

A pixel is a weighted sum of those beneath it, more of them the more an image shrinks: W [j, w] has
the weights along a row, and H [i, h] those along a column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, registrar

aten = torch.ops.aten

ANTIALIASED: dict[OpOverload, Lowering] = {}
_lowers = registrar(ANTIALIASED)


def _weights(
    resize: OpOverload, size: int, result: int, align_corners: bool, scale: float | None
) -> Tensor:
    """[result, size] in fp64: what `resize` makes of lines that have a one at one place each."""
    lines = torch.eye(size, dtype=torch.float64).reshape(size, 1, 1, size)
    resized: Tensor = resize(lines, (1, result), align_corners, None, scale)
    return resized.reshape(size, result).mT


def _resized(
    ctx: Context,
    x: Value,
    resize: OpOverload,
    size: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
) -> Value | None:
    """The axis that shrinks most first: it leaves the other one least to do.

    Of a result with one column torch 2.13 makes all rows alike on a CPU, which these are not.
    """
    dtype = ctx.dtype(x)
    if not dtype.is_floating_point or not ctx.spec(x).numel:
        return None
    axes = zip((2, 3), ctx.shape(x)[2:], size, scales, strict=True)
    for dim, old, new, scale in sorted(axes, key=lambda axis: axis[2] / axis[1]):
        weights = _weights(resize, old, new, align_corners, scale)
        if old == new and torch.equal(weights, torch.eye(old, dtype=weights.dtype)):
            continue
        order = (0, 1, 3, 2) if dim == 2 else (0, 1, 2, 3)
        weights = weights.to(ctx.device, dtype).contiguous()
        along = ctx.add("linear", ctx.permute(x, order), ctx.constant("antialiased", weights))
        x = ctx.permute(along, order)
    return x


def _resizes(resize: OpOverload) -> tuple[Lowering, Lowering]:
    def plain(ctx: Context, x: Value, size: Sequence[int], align: bool,
              *scales: float | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, resize, size, align, scales or (None, None))

    def vec(ctx: Context, x: Value, size: Sequence[int] | None, align: bool,
            scales: Sequence[float] | None) -> Value | None:  # fmt: skip
        if size is None:  # then every factor is given
            pixels = zip(ctx.shape(x)[2:], scales or (), strict=True)
            size = [math.floor(old * factor) for old, factor in pixels]
        return _resized(ctx, x, resize, size, align, scales or (None, None))

    return plain, vec


for _op in (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
    for _overload, _lowering in zip(("default", "vec"), _resizes(_op.default), strict=True):
        _lowers(getattr(_op, _overload))(_lowering)
