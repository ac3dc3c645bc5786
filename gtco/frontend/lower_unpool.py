"""ATen's poolings that say where the largest pixels are, and what puts pixels there again.

    %y, %i = max_pool2d_with_indices(%x, 2)   ->   %t = gt(%x[1, ::2, 1::2], %x[1, ::2, ::2])
                                                   %y = where(%t, ...), %k = where(%t, 1, 0) ...
    max_unpool2d(%z, %i, [H, W])              ->   where(eq(%k, [[0, 1], [2, 3]]), %z, 0)

k numbers the taps of a window, and i the pixels of an image. Windows that share no pixel are put
back side by side; pixels at places that nobody has seen made stay ATen's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, pair, registrar
from gtco.frontend.lower_indices import named
from gtco.frontend.lower_pools import POOLS

aten = torch.ops.aten

UNPOOLS: dict[OpOverload, Lowering] = {}
_lowers = registrar(UNPOOLS)

MOST_TAPS = 8
"""Of a window, whose comparisons one by one are one kernel."""


@dataclass(frozen=True)
class _Windows:
    """Which pixel of each window is the largest, as indices of pixels say.

    Args:
        tap: numbers of taps [N, windows high, windows wide, C], in the image's own type.
        kernel: height and width of a window; none shares a pixel with another one.
        size: height and width of the image.
    """

    tap: Value
    kernel: tuple[int, int]
    size: tuple[int, int]


@_lowers(aten.max_pool2d_with_indices.default)
def _max_pool(
    ctx: Context,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value | None, ...] | None:
    """The first of equal pixels is the largest. A window with a NaN gives NaN, at a place of its
    own that need not be torch's."""
    if not ctx.used_outputs - {0}:
        pooled = POOLS[aten.max_pool2d.default]
        y = pooled(ctx, x, kernel, stride, padding, dilation, ceil_mode)
        return (y, None) if isinstance(y, Value) else None
    taps, steps, gaps = pair(kernel), pair(stride or kernel), pair(dilation)
    if ctx.rank(x) != 4 or not ctx.dtype(x).is_floating_point or any(padding):
        return None
    size = ctx.shape(x)[2:]
    rest = [n - gap * (k - 1) - 1 for n, k, gap in zip(size, taps, gaps, strict=True)]
    beyond = ceil_mode and any(n % step for n, step in zip(rest, steps, strict=True))
    if taps[0] * taps[1] > MOST_TAPS or beyond:
        return None
    counts = [n // step + 1 for n, step in zip(rest, steps, strict=True)]
    image = ctx.permute(x, (0, 2, 3, 1))
    largest = tap = None
    for number, at in enumerate(product(*map(range, taps))):
        pixel = image
        for dim, (place, gap, step, count) in enumerate(zip(at, gaps, steps, counts, strict=True)):
            start = place * gap
            pixel = ctx.slice(pixel, dim + 1, start, start + (count - 1) * step + 1, step)
        here = ctx.constant("tap", torch.full((), number, dtype=ctx.dtype(x), device=ctx.device))
        if largest is None or tap is None:
            largest, tap = pixel, ctx.expand(here, ctx.shape(pixel))
            continue
        tap = ctx.add("where", ctx.add("gt", pixel, largest), here, tap)
        largest = ctx.add("maximum", largest, pixel)
    assert largest is not None and tap is not None
    numbers = torch.arange(size[0] * size[1], device=ctx.device).reshape(*size)
    first = numbers[:: steps[0], :: steps[1]][: counts[0], : counts[1], None]
    later = numbers[:: gaps[0], :: gaps[1]][: taps[0], : taps[1]].flatten()
    after_first = named(ctx, ctx.constant("later", later), 0, ctx.cast(tap, torch.int64))
    indices = ctx.add("add", after_first, ctx.constant("first", first.contiguous()))
    y, indices = (ctx.permute(each, (0, 3, 1, 2)) for each in (largest, indices))
    if gaps == (1, 1) and steps == taps:
        ctx.notes[indices.name] = _Windows(tap, (taps[0], taps[1]), (size[0], size[1]))
    return y, indices


@_lowers(aten.max_unpool2d.default)
def _max_unpool(ctx: Context, x: Value, indices: Value, size: Sequence[int]) -> Value | None:
    windows = ctx.notes.get(indices.name)
    if not isinstance(windows, _Windows) or tuple(size) != windows.size:
        return None
    if ctx.shape(x) != ctx.shape(indices):
        return None
    (high, wide), (n, channels, rows, columns) = windows.kernel, ctx.shape(x)
    apart = (n, rows, 1, columns, 1, channels)
    pixel = ctx.reshape(ctx.permute(x, (0, 2, 3, 1)), apart)
    numbers = torch.arange(high * wide, device=ctx.device).reshape(high, 1, wide, 1)
    taps = ctx.constant("taps", numbers.to(ctx.dtype(windows.tap)))
    zero = ctx.constant("no_pixel", torch.zeros((), dtype=ctx.dtype(x), device=ctx.device))
    largest = ctx.add("eq", ctx.reshape(windows.tap, apart), taps)
    image = ctx.add("where", largest, pixel, zero)
    image = ctx.reshape(image, (n, rows * high, columns * wide, channels))
    beyond = (size[0] - rows * high, size[1] - columns * wide)
    if any(beyond):
        image = ctx.add("pad", image, before=(0, 0, 0, 0), after=(0, *beyond, 0))
    return ctx.permute(image, (0, 3, 1, 2))
