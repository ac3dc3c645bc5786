"""ATen's resizes and samplings to gtco's ops of images with their channels last."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, registrar
from gtco.frontend.volumes import along_frames, by_frames

aten = torch.ops.aten

IMAGES: dict[OpOverload, Lowering] = {}
_lowers = registrar(IMAGES)


def _resized(
    ctx: Context,
    x: Value,
    mode: str,
    size: Sequence[int] | None,
    scales: Sequence[float | None],
    align_corners: bool = False,
) -> Value | None:
    if not ctx.dtype(x).is_floating_point:
        return None
    if size is None:  # then every factor is given
        pixels = zip(ctx.shape(x)[2:], scales, strict=True)
        size = [math.floor(old * factor) for old, factor in pixels if factor is not None]
    if ctx.rank(x) == 5:
        return _resized_volume(ctx, x, mode, size, scales, align_corners)
    if ctx.rank(x) != 4:
        return None
    given = {"mode": mode, "align_corners": align_corners, "scales": tuple(scales)}
    y = ctx.add("resize", ctx.permute(x, (0, 2, 3, 1)), size=tuple(size), **given)
    return ctx.permute(y, (0, 3, 1, 2))


def _resized_volume(
    ctx: Context,
    x: Value,
    mode: str,
    size: Sequence[int],
    scales: Sequence[float | None],
    align_corners: bool,
) -> Value | None:
    """Of a volume [N, C, T, H, W]: each frame, and then the frames."""
    frames, *pixels = ctx.shape(x)[2:]
    y: Value | None = x
    if list(size[1:]) != pixels:
        y = by_frames(
            ctx, x, lambda each: _resized(ctx, each, mode, size[1:], scales[1:], align_corners)
        )
    if y is None or size[0] == frames:
        return y
    lines = (size[0], size[1] * size[2])
    return along_frames(
        ctx, y, lambda each: _resized(ctx, each, mode, lines, (scales[0], None), align_corners)
    )


def _smooth_resizes(mode: str) -> tuple[Lowering, Lowering]:
    def plain(ctx: Context, x: Value, size: Sequence[int], align: bool,
              *scales: float | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, scales or (None,) * len(size), align)

    def vec(ctx: Context, x: Value, size: Sequence[int] | None, align: bool,
            scales: Sequence[float] | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, scales or (None,) * len(size or ()), align)

    return plain, vec


def _nearest_resizes(mode: str) -> tuple[Lowering, Lowering]:
    def plain(ctx: Context, x: Value, size: Sequence[int],
              *scales: float | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, scales or (None,) * len(size))

    def vec(ctx: Context, x: Value, size: Sequence[int] | None,
            scales: Sequence[float] | None) -> Value | None:  # fmt: skip
        return _resized(ctx, x, mode, size, scales or (None,) * len(size or ()))

    return plain, vec


for _op, _made in {
    "upsample_bilinear2d": _smooth_resizes("bilinear"),
    "upsample_trilinear3d": _smooth_resizes("bilinear"),
    "upsample_bicubic2d": _smooth_resizes("bicubic"),
    "upsample_nearest2d": _nearest_resizes("nearest"),
    "upsample_nearest3d": _nearest_resizes("nearest"),
    "_upsample_nearest_exact2d": _nearest_resizes("nearest-exact"),
    "_upsample_nearest_exact3d": _nearest_resizes("nearest-exact"),
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
