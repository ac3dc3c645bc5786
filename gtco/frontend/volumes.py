"""What is separable of volumes [N, C, T, H, W] is done frame by frame and then along the frames.

Each part is an operator of images, which have kernels.
"""

from __future__ import annotations

from collections.abc import Callable

from gtco.frontend.context import Context, Value

OfImage = Callable[[Value], Value | None]


def by_frames(ctx: Context, x: Value, each: OfImage) -> Value | None:
    """`each` of all frames, which it gets as images [N T, C, H, W]."""
    n, channels, frames, height, width = ctx.shape(x)
    images = ctx.reshape(ctx.permute(x, (0, 2, 1, 3, 4)), (n * frames, channels, height, width))
    y = each(images)
    if y is None:
        return None
    return ctx.permute(ctx.reshape(y, (n, frames, *ctx.shape(y)[1:])), (0, 2, 1, 3, 4))


def along_frames(ctx: Context, x: Value, each: OfImage) -> Value | None:
    """`each` of images [N, C, T, H W], whose columns it leaves as many."""
    n, channels, frames, height, width = ctx.shape(x)
    y = each(ctx.reshape(x, (n, channels, frames, height * width)))
    return None if y is None else ctx.reshape(y, (*ctx.shape(y)[:3], height, width))
