"""Groups around windows of images whose channels do not mix, for kernel tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def depthwise(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    dtype: torch.dtype = F16,
    *,
    stride: tuple[int, ...] = (),
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    row_values: bool = False,
    stats: bool = False,
    box: tuple[int, ...] = (),
    repeat: int = 1,
) -> Group:
    """silu(depthwise_conv(x) + bias), scaled by a value of each pixel if `row_values`.

    Of `repeat` channels side by side, x has one. With `stats`, depthwise_conv(x) + bias + residual,
    as rows, and their row statistics. They have a large mean: rounded to 16 bits, values have
    another spread. With `box`, the means of such boxes beside the result.
    """
    b = GraphBuilder()
    x = repeated(b, image, repeat, dtype)
    generator = torch.Generator().manual_seed(1)
    channels, ones = image[-1], (1,) * len(kernel)
    w = torch.randn(*kernel, channels, generator=generator) / math.prod(kernel) ** 0.5
    before = before or ones
    y = b.add("depthwise_conv", x, b.constant("w", w.to(dtype)), stride=stride or ones,
              before=before, after=after or before, dilation=dilation or ones)  # fmt: skip
    bias = torch.randn(channels, generator=generator).to(dtype)
    if stats:
        y = b.add("add", y, b.constant("bias", bias + 300))
        y = b.add("add", b.input("residual", b.specs[y]), y)
        rows = b.add("reshape", y, shape=(b.specs[y].numel // channels, channels))
        return Group("depthwise", b.build([y, b.add("row_stats", rows)]))
    y = b.add("silu", b.add("add", y, b.constant("bias", bias)))
    if row_values:
        pixels = b.input("pixels", TensorSpec((*b.specs[y].sizes[:-1], 1), dtype))
        y = b.add("mul", y, b.add("sigmoid", pixels))
    means = [b.add("box_means", y, box=box)] if box else []
    return Group("depthwise", b.build([y, *means]))


def repeated(b: GraphBuilder, image: tuple[int, ...], times: int, dtype: torch.dtype) -> str:
    """An image with each channel of an input `times` side by side."""
    *pixels, channels = image
    if times == 1:
        return b.input("x", TensorSpec(image, dtype))
    x = b.input("x", TensorSpec((*pixels, channels // times), dtype))
    apart = b.add("reshape", x, shape=(*pixels, channels // times, 1))
    many = b.add("expand", apart, shape=(*pixels, channels // times, times))
    return b.add("reshape", many, shape=image)


def _image(
    b: GraphBuilder, size: tuple[int, int, int, int], dtype: torch.dtype, *, channels_first: bool
) -> str:
    """An input [N, H, W, C]; with `channels_first` one that is stored as [N, C, H, W]."""
    n, h, w, c = size
    x = b.input("x", TensorSpec((n, c, h, w) if channels_first else size, dtype))
    return b.add("permute", x, dims=(0, 2, 3, 1)) if channels_first else x


def pool(
    op: str,
    image: tuple[int, int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] = (0, 0),
    dtype: torch.dtype = F16,
    *,
    channels_first: bool = False,
    **given: Any,
) -> Group:
    """A pooling; with `channels_first` of an image that is stored as [N, C, H, W]."""
    b = GraphBuilder()
    x = _image(b, image, dtype, channels_first=channels_first)
    attrs: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
    attrs |= {"ceil_mode": False}
    attrs |= {"dilation": (1, 1)} if op == "max_pool" else {"count_padding": True, "divisor": None}
    return Group(op, b.build([b.add(op, x, **(attrs | given))]))


def adaptive(
    op: str,
    image: tuple[int, int, int, int],
    out: tuple[int, int],
    dtype: torch.dtype = F16,
    *,
    channels_first: bool = False,
) -> Group:
    """relu(pooling + skip), of windows that share the image evenly."""
    b = GraphBuilder()
    x = _image(b, image, dtype, channels_first=channels_first)
    y = b.add(op, x, out=out)
    skip = b.input("skip", TensorSpec(b.specs[y].sizes, dtype))
    return Group(op, b.build([b.add("relu", b.add("add", y, skip))]))


def resize(
    image: tuple[int, int, int, int],
    size: tuple[int, int],
    mode: str = "bilinear",
    dtype: torch.dtype = F16,
    *,
    repeat: int = 1,
    align: bool = False,
    scales: tuple[float | None, float | None] = (None, None),
) -> Group:
    """relu(resize(x) + skip); of `repeat` channels side by side, x has one."""
    b = GraphBuilder()
    x = repeated(b, image, repeat, dtype)
    given = {"mode": mode, "align_corners": align, "scales": scales}
    y = b.add("resize", x, size=size, **given)
    skip = b.input("skip", TensorSpec(b.specs[y].sizes, dtype))
    return Group("resize", b.build([b.add("relu", b.add("add", y, skip))]))


RESIZES: dict[str, Callable[[], Group]] = {
    "bilinear_up": lambda: resize((2, 5, 7, 24), (11, 14)),
    "bilinear_down_odd": lambda: resize((1, 9, 8, 7), (4, 3), dtype=BF16),
    "bilinear_of_two": lambda: resize((1, 5, 7, 24), (11, 14), repeat=2),
    "bilinear_of_one": lambda: resize((1, 5, 7, 24), (11, 14), repeat=24),
    "bilinear_align": lambda: resize((1, 5, 4, 8), (9, 1), dtype=F32, align=True),
    "bilinear_scales": lambda: resize((1, 5, 4, 16), (8, 6), scales=(1.7, 1.6)),
    "bilinear_one": lambda: resize((1, 1, 1, 1), (3, 2)),
    "bicubic_up": lambda: resize((1, 5, 6, 16), (11, 9), "bicubic"),
    "bicubic_align": lambda: resize((2, 6, 3, 5), (4, 7), "bicubic", F32, align=True),
    "nearest_up": lambda: resize((2, 3, 5, 24), (6, 10), "nearest"),
    "nearest_down": lambda: resize((1, 9, 8, 12), (4, 6), "nearest", BF16),
    "nearest_exact": lambda: resize((1, 5, 8, 3), (8, 6), "nearest-exact", F32),
}
CASES: dict[str, Callable[[], Group]] = {
    "depthwise_3x3": lambda: depthwise((2, 9, 7, 40), (3, 3)),
    "depthwise_5x5_stride": lambda: depthwise(
        (1, 11, 8, 24), (5, 5), BF16, stride=(2, 2), before=(2, 2)
    ),
    "depthwise_7x7": lambda: depthwise((1, 8, 9, 16), (7, 7), F32, before=(3, 3)),
    "depthwise_dilated": lambda: depthwise(
        (1, 9, 10, 8), (3, 2), before=(2, 1), after=(1, 2), dilation=(2, 3), row_values=True
    ),
    "depthwise_odd": lambda: depthwise((3, 5, 5, 7), (3, 3), stride=(1, 3), before=(0, 2)),
    "depthwise_one": lambda: depthwise((1, 1, 1, 1), (3, 3)),
    "depthwise_3x3x3": lambda: depthwise((2, 4, 9, 7, 40), (3, 3, 3)),
    "depthwise_3d_uneven": lambda: depthwise(
        (2, 5, 6, 9, 16),
        (2, 3, 5),
        BF16,
        stride=(2, 1, 2),
        before=(1, 2, 0),
        after=(0, 1, 3),
        dilation=(2, 1, 1),
        row_values=True,
    ),
    "depthwise_3d_one": lambda: depthwise((1, 1, 1, 1, 1), (3, 3, 3)),
    "depthwise_of_two": lambda: depthwise((2, 9, 7, 48), (3, 3), stride=(2, 2), repeat=2),
    "depthwise_of_three": lambda: depthwise((1, 6, 7, 24), (3, 3), BF16, repeat=3),
    "depthwise_of_four": lambda: depthwise((1, 6, 7, 96), (5, 5), F32, before=(2, 2), repeat=4),
    "max_3x3": lambda: pool("max_pool", (2, 9, 8, 24), (3, 3), (2, 2), (1, 1)),
    "max_dilated": lambda: pool(
        "max_pool", (1, 9, 8, 5), (2, 3), (1, 2), (1, 1), BF16, dilation=(3, 2)
    ),
    "max_ceil": lambda: pool("max_pool", (1, 6, 6, 8), (3, 3), (2, 2), dtype=F32, ceil_mode=True),
    "max_channels_first": lambda: pool(
        "max_pool", (2, 7, 7, 16), (2, 2), (2, 2), channels_first=True
    ),
    "avg_3x3": lambda: pool("avg_pool", (2, 9, 8, 24), (3, 3), (2, 2), (1, 1)),
    "avg_of_the_image": lambda: pool(
        "avg_pool", (1, 7, 9, 16), (3, 4), (2, 3), (1, 2), BF16, count_padding=False
    ),
    "avg_ceil": lambda: pool("avg_pool", (1, 6, 6, 8), (3, 3), (2, 2), (1, 1), F32, ceil_mode=True),
    "avg_ceil_of_the_image": lambda: pool(
        "avg_pool", (1, 6, 8, 8), (3, 3), (2, 3), (1, 1), ceil_mode=True, count_padding=False
    ),
    "adaptive_max": lambda: adaptive("adaptive_max_pool", (2, 7, 9, 24), (3, 4)),
    "adaptive_max_wider": lambda: adaptive("adaptive_max_pool", (2, 2, 5, 3), (3, 7), BF16),
    "adaptive_avg": lambda: adaptive("adaptive_avg_pool", (2, 7, 7, 16), (2, 3)),
    "adaptive_avg_column": lambda: adaptive("adaptive_avg_pool", (3, 64, 1, 8), (3, 1), F32),
    "adaptive_avg_wider": lambda: adaptive("adaptive_avg_pool", (1, 2, 3, 5), (5, 4), F32),
    "adaptive_avg_channels_first": lambda: adaptive(
        "adaptive_avg_pool", (2, 5, 4, 6), (3, 3), BF16, channels_first=True
    ),
    "avg_divisor": lambda: pool("avg_pool", (1, 6, 5, 3), (2, 2), (1, 1), divisor=7),
}


def projections(
    tokens: int,
    image: tuple[int, int, int],
    strides: tuple[int, ...] = (2, 1, 2),
    dtype: torch.dtype = F16,
    *,
    last: bool = False,
    permuted: bool = False,
    stats: bool = False,
) -> Group:
    """Depthwise convolutions of the pixels of x [1, tokens + H W, C], each behind the first tokens.

    The tokens come after the pixels with `last`; with `permuted` the results are stored as their
    reader, attention's heads of 8 channels, asks for them; with `stats` each has row statistics of
    its pixels.
    """
    b = GraphBuilder()
    height, width, c = image
    rows = tokens + height * width
    pixels = x = b.input("x", TensorSpec((1, rows, c), dtype))
    if tokens:
        first = b.add("slice", x, dim=1, start=0, end=tokens)
        pixels = b.add("slice", x, dim=1, start=tokens, end=rows)
    pixels = b.add("reshape", pixels, shape=(1, height, width, c))
    generator = torch.Generator().manual_seed(1)
    results = []
    for number, stride in enumerate(strides):
        weight = torch.randn(3, 3, c, generator=generator) / 3
        border = {"before": (1, 1), "after": (1, 1), "dilation": (1, 1)}
        w = b.constant(f"w{number}", weight.to(dtype))
        y = b.add("depthwise_conv", pixels, w, stride=(stride, stride), **border)
        bias = torch.randn(c, generator=generator).to(dtype)
        y = b.add("add", y, b.constant(f"bias{number}", bias))
        rows = b.specs[y].numel // c
        y = b.add("reshape", y, shape=(1, rows, c))
        if stats:
            results.append(b.add("row_stats", y))
        if tokens:
            y = b.add("concat", *((y, first) if last else (first, y)), dim=1)
        if permuted:
            y = b.add("reshape", y, shape=(tokens + rows, c // 8, 8))
            y = b.add("permute", y, dims=(1, 0, 2))
        results.append(y)
    return Group("projections", b.build(results))


def skipped(
    image: tuple[int, int, int, int],
    channels: tuple[int, ...],
    dtype: torch.dtype = F16,
    op: str = "resize",
) -> Group:
    """concat(skip, ..., image made larger or averaged, skip) of so many channels each."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, dtype))
    n, h, w, _ = image
    if op == "resize":
        given = {"mode": "bilinear", "align_corners": False, "scales": (None, None)}
        y = b.add("resize", x, size=(2 * h + 1, 2 * w), **given)
    else:
        attrs = {"kernel": (2, 2), "stride": (1, 1), "padding": (0, 0), "ceil_mode": False}
        y = b.add("avg_pool", x, count_padding=True, divisor=None, **attrs)
    _, rows, across, _ = b.specs[y].sizes
    skips = [
        b.input(f"skip{at}", TensorSpec((n, rows, across, c), dtype))
        for at, c in enumerate(channels)
    ]
    return Group("skipped", b.build([b.add("concat", *skips[1:], y, skips[0], dim=3)]))


CASES |= {
    "three_of_one_image": lambda: projections(0, (9, 7, 24)),
    "three_behind_a_token": lambda: projections(1, (7, 6, 40)),
    "two_ahead_of_tokens": lambda: projections(3, (5, 4, 9), (1, 3), BF16, last=True),
    "three_permuted": lambda: projections(1, (4, 5, 32), permuted=True),
    "mean_beside_skips": lambda: skipped((2, 4, 5, 12), (8, 4), F32, "avg_pool"),
}
RESIZES |= {
    "resize_beside_a_skip": lambda: skipped((1, 3, 4, 16), (24,)),
    "resize_between_skips": lambda: skipped((2, 3, 2, 7), (5, 3), BF16),
}


def pooled_statistics(image: tuple[int, int, int, int], dtype: torch.dtype) -> Group:
    """The mean, its relu and the largest of x's windows, and row statistics of each."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, dtype))
    given = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": False}
    mean = b.add("avg_pool", x, count_padding=False, divisor=None, **given)
    largest = b.add("max_pool", x, dilation=(1, 1), **given)
    positive = b.add("relu", mean)
    made = [mean, positive, largest]
    return Group("pooled", b.build([*made, *(b.add("row_stats", y) for y in made)]))


STATISTICS: dict[str, Callable[[], Group]] = {
    "stats_96": lambda: depthwise((1, 5, 6, 96), (7, 7), before=(3, 3), stats=True),
    "stats_40": lambda: depthwise((2, 5, 7, 40), (3, 3), BF16, stats=True),
    "stats_24": lambda: depthwise((1, 9, 4, 24), (3, 3), F32, stride=(2, 1), stats=True),
    "stats_130": lambda: depthwise((1, 4, 5, 130), (3, 3), stats=True),
    "stats_128": lambda: depthwise((1, 3, 5, 128), (5, 5), F32, before=(2, 2), stats=True),
    "stats_232": lambda: depthwise((3, 3, 3, 232), (3, 3), stats=True),
    "stats_3d": lambda: depthwise((2, 3, 5, 4, 72), (3, 3, 3), stats=True),
    "stats_2": lambda: depthwise((1, 7, 5, 2), (3, 3), stats=True),
    "stats_of_three": lambda: projections(0, (5, 4, 48), (1, 1, 1), BF16, stats=True),
    "stats_of_a_pooling": lambda: pooled_statistics((2, 5, 6, 88), F16),
}
"""Row statistics of what is stored."""


TILES: dict[str, Callable[[], Group]] = {
    "3x3": lambda: depthwise((2, 13, 17, 40), (3, 3)),
    "5x5 by twos": lambda: depthwise((1, 19, 16, 24), (5, 5), BF16, stride=(2, 2), before=(2, 2)),
    "7x7": lambda: depthwise((1, 12, 15, 16), (7, 7), F32, before=(3, 3)),
    "dilated": lambda: depthwise(
        (1, 11, 12, 64), (3, 2), before=(2, 1), after=(1, 2), dilation=(2, 3), row_values=True
    ),
    "uneven strides": lambda: depthwise((2, 10, 9, 144), (2, 4), stride=(1, 3), before=(0, 2)),
    "few pixels": lambda: depthwise((3, 2, 1, 128), (5, 3), BF16, before=(2, 1)),
    "statistics of 96": lambda: depthwise((1, 9, 10, 96), (7, 7), before=(3, 3), stats=True),
    "statistics of 40": lambda: depthwise((2, 5, 7, 40), (3, 3), BF16, stats=True),
    "statistics of 128": lambda: depthwise((1, 6, 9, 128), (5, 5), before=(2, 2), stats=True),
    "statistics of fp32": lambda: depthwise((1, 9, 4, 24), (3, 3), F32, stride=(2, 1), stats=True),
    "boxes of 7 x 7": lambda: depthwise((2, 14, 21, 40), (5, 5), before=(2, 2), box=(7, 7)),
    "boxes by twos": lambda: depthwise(
        (1, 32, 25, 144), (3, 3), BF16, stride=(2, 1), before=(0, 1), after=(1, 0), box=(8, 8)
    ),
    "boxes of fp32": lambda: depthwise((3, 4, 15, 24), (7, 7), F32, before=(3, 3), box=(2, 5)),
}
"""Depthwise convolutions whose pixels lie in runs of 16 bytes."""


def sampled(
    image: tuple[int, int, int, int],
    points: tuple[int, int],
    mode: str = "bilinear",
    dtype: torch.dtype = F16,
    *,
    border: bool = False,
    align: bool = False,
    heads: bool = False,
    pixels: torch.dtype | None = None,
) -> Group:
    """relu(grid_sample(x, grid) * weight of each point + skip), the image of `pixels` if given.

    With `heads` image and points are those of heads, as deformable attention has them: of one batch
    the images' pixels and channels lie in [pixels, images, channels], and the points in [rows,
    images, 3, across, 2], of which this reads the second third.
    """
    b = GraphBuilder()
    n, h, w, c = image
    rows, across = points
    if heads:
        x = b.input("x", TensorSpec((h * w, n, c), pixels or dtype))
        x = b.add("reshape", b.add("permute", x, dims=(1, 0, 2)), shape=image)
        grid = b.input("grid", TensorSpec((rows, n, 3, across, 2), dtype))
        grid = b.add("slice", grid, dim=2, start=1, end=2)
        grid = b.add("reshape", grid, shape=(rows, n, across, 2))
        grid = b.add("permute", grid, dims=(1, 0, 2, 3))
    else:
        x = b.input("x", TensorSpec(image, pixels or dtype))
        grid = b.input("grid", TensorSpec((n, *points, 2), dtype))
    y = b.add("grid_sample", x, grid, mode=mode, border=border, align_corners=align)
    weight = b.input("weight", TensorSpec((n, *points, 1), dtype))
    skip = b.input("skip", TensorSpec((n, *points, c), dtype))
    return Group("sampled", b.build([b.add("relu", b.add("add", b.add("mul", y, weight), skip))]))


SAMPLES: dict[str, Callable[[], Group]] = {
    "bilinear": lambda: sampled((2, 5, 7, 24), (9, 3)),
    "bilinear_border": lambda: sampled((1, 4, 3, 8), (5, 11), dtype=BF16, border=True),
    "bilinear_align": lambda: sampled((3, 6, 5, 3), (7, 5), dtype=F32, align=True),
    "bilinear_align_border": lambda: sampled((1, 3, 9, 32), (4, 9), border=True, align=True),
    "bilinear_heads": lambda: sampled((8, 5, 6, 32), (7, 4), heads=True),
    "bilinear_heads_of_one": lambda: sampled((3, 4, 5, 1), (5, 4), dtype=F32, heads=True),
    "bilinear_one": lambda: sampled((1, 1, 1, 1), (3, 7), align=True),
    "nearest": lambda: sampled((2, 5, 7, 8), (9, 3), "nearest", BF16),
    "nearest_border": lambda: sampled((1, 6, 4, 3), (7, 5), "nearest", border=True),
    "nearest_align": lambda: sampled((2, 5, 3, 40), (3, 8), "nearest", F32, align=True),
    "bilinear_of_halves": lambda: sampled((2, 5, 7, 24), (9, 3), dtype=F32, pixels=F16),
    "nearest_of_halves": lambda: sampled((1, 4, 3, 5), (5, 7), "nearest", F32, pixels=BF16),
}


def summed(
    n: int,
    channels: int,
    rows: int,
    levels: tuple[tuple[int, int, int], ...],
    mode: str = "bilinear",
    dtype: torch.dtype = F16,
    *,
    border: bool = False,
    align: bool = False,
    heads: bool = False,
    pixels: torch.dtype | None = None,
) -> Group:
    """relu(sample_sum of images of so many rows and columns, at so many points each, + skip), the
    images of `pixels` if given.

    With `heads` all images lie in one [pixels, n, channels], the points in [rows, n, points, 2],
    the weights in [rows, n, points], and the result goes into [rows, n * channels].
    """
    b = GraphBuilder()
    operands: list[str] = []
    points = sum(each for *_, each in levels)
    turn = {"dims": (1, 0, 2)}
    shares = (rows, n, points) if heads else (n, rows, points)
    weights = b.input("weights", TensorSpec(shares, dtype))
    if heads:
        places = sum(h * w for h, w, _ in levels)
        x = b.add(
            "permute", b.input("x", TensorSpec((places, n, channels), pixels or dtype)), **turn
        )
        grid = b.input("grid", TensorSpec((rows, n, points, 2), dtype))
        grid = b.add("permute", grid, dims=(1, 0, 2, 3))
        weights = b.add("permute", weights, **turn)
    place = point = 0
    for level, (h, w, count) in enumerate(levels):
        image = (n, h, w, channels)
        if heads:
            part = b.add("slice", x, dim=1, start=place, end=place + h * w)
            operands.append(b.add("reshape", part, shape=image))
            operands.append(b.add("slice", grid, dim=2, start=point, end=point + count))
            place, point = place + h * w, point + count
        else:
            operands.append(b.input(f"x{level}", TensorSpec(image, pixels or dtype)))
            operands.append(b.input(f"grid{level}", TensorSpec((n, rows, count, 2), dtype)))
    given = {"mode": mode, "border": border, "align_corners": align}
    y = b.add("sample_sum", *operands, weights, **given)
    y = b.add("relu", b.add("add", y, b.input("skip", TensorSpec((n, rows, channels), dtype))))
    if heads:
        y = b.add("reshape", b.add("permute", y, **turn), shape=(rows, n * channels))
    return Group("summed", b.build([y]))


SAMPLES |= {
    "sum": lambda: summed(2, 24, 7, ((5, 4, 3),)),
    "sum_of_levels": lambda: summed(2, 16, 9, ((7, 5, 4), (3, 4, 4), (1, 2, 4)), dtype=BF16),
    "sum_of_heads": lambda: summed(8, 32, 11, ((6, 5, 4), (3, 3, 5)), heads=True),
    "sum_border": lambda: summed(1, 3, 5, ((4, 4, 2), (2, 3, 1)), dtype=F32, border=True),
    "sum_nearest_align": lambda: summed(3, 8, 4, ((5, 6, 2), (4, 2, 7)), "nearest", align=True),
    "sum_of_halves": lambda: summed(2, 16, 9, ((7, 5, 4), (3, 4, 4)), dtype=F32, pixels=F16),
    "sum_of_one": lambda: summed(1, 1, 1, ((1, 1, 1),), heads=True),
}
KINDS = [
    (mode, border, align)
    for mode in ("bilinear", "nearest")
    for border in (False, True)
    for align in (False, True)
]
"""Ways to sample: mode, border, align_corners."""


def hard_points(height: int, width: int, align: bool) -> Tensor:
    """Points on centres of pixels, halfway, on the border and beyond it, and no numbers at all."""

    def along(size: int) -> list[float]:
        places = [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, size - 1.5, size - 1.0, size - 0.5, size]
        span = max(size - 1, 1)
        back = [2 * p / span - 1 if align else (2 * p + 1) / size - 1 for p in places]
        return [*back, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e9, -1e9]

    ys, xs = along(height), along(width)
    return torch.tensor([[[(x, y) for x in xs] for y in ys]])
