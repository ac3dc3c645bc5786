"""Groups that read an image whose channels lie apart, at common and odd shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Shape = tuple[int, ...]


def _pixels(b: GraphBuilder, shape: Shape, dtype: torch.dtype) -> str:
    """The pixels of an image (N, C, ...), channels last."""
    x = b.input("x", TensorSpec(shape, dtype))
    return b.add("permute", x, dims=(0, *range(2, len(shape)), 1))


def copied(shape: Shape, dtype: torch.dtype) -> Group:
    b = GraphBuilder()
    return Group("copied", b.build([b.add("copy", _pixels(b, shape, dtype))]))


def converted(shape: Shape, before: torch.dtype, after: torch.dtype) -> Group:
    b = GraphBuilder()
    return Group("converted", b.build([b.add("cast", _pixels(b, shape, before), dtype=after)]))


def normalized(shape: Shape, dtype: torch.dtype) -> Group:
    """By a value of each channel and one of each pixel, beside an image with its channels last,
    stored twice."""
    b = GraphBuilder()
    x = _pixels(b, shape, dtype)
    n, channels, *sides = shape
    scale = b.input("scale", TensorSpec((channels,), F32))
    weight = b.input("weight", TensorSpec((n, *sides, 1), F32))
    beside = b.input("beside", TensorSpec((n, *sides, channels), dtype))
    y = b.add("mul", b.add("mul", b.add("cast", x, dtype=F32), scale), weight)
    y = b.add("cast", y, dtype=dtype)
    return Group("normalized", b.build([b.add("relu", y), b.add("add", y, beside)]))


def sliced(shape: Shape, dtype: torch.dtype) -> Group:
    """Of some of the channels, as rows of pixels."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    n, channels, *sides = shape
    part = b.add("slice", x, dim=1, start=3, end=channels - 2, step=1)
    rows = b.add("reshape", part, shape=(n, channels - 5, math.prod(sides)))
    return Group("sliced", b.build([b.add("exp", b.add("permute", rows, dims=(0, 2, 1)))]))


def channels_first(shape: Shape, dtype: torch.dtype) -> Group:
    """An image with its channels last, as one that has them first."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    last = len(shape) - 1
    y = b.add("permute", x, dims=(0, last, *range(1, last)))
    bias = b.input("bias", TensorSpec((shape[-1], *(1,) * (last - 1)), dtype))
    return Group("channels_first", b.build([b.add("sigmoid", b.add("add", y, bias))]))


def cropped(shape: Shape, dtype: torch.dtype) -> Group:
    """Of some of the rows and columns."""
    b = GraphBuilder()
    x = _pixels(b, shape, dtype)
    for dim, size in ((1, shape[2]), (2, shape[3])):
        x = b.add("slice", x, dim=dim, start=1, end=size - 2, step=1)
    return Group("cropped", b.build([b.add("neg", x)]))


CASES: dict[str, Callable[[], Group]] = {
    "copied_256": partial(copied, (1, 256, 8, 24), F16),
    "copied_odd_pixels": partial(copied, (2, 72, 7, 7), BF16),
    "copied_odd_channels": partial(copied, (3, 33, 9, 8), F16),
    "copied_3": partial(copied, (2, 3, 12, 10), F16),
    "copied_f32": partial(copied, (2, 40, 9, 4), F32),
    "copied_volume": partial(copied, (2, 24, 3, 5, 8), F16),
    "converted_f16": partial(converted, (1, 100, 10, 14), F32, F16),
    "converted_f32": partial(converted, (2, 20, 9, 9), BF16, F32),
    "normalized": partial(normalized, (2, 72, 9, 8), F16),
    "normalized_odd": partial(normalized, (3, 21, 5, 13), BF16),
    "channels_first": partial(channels_first, (2, 9, 16, 40), F16),
    "channels_first_odd": partial(channels_first, (1, 7, 7, 33), BF16),
    "cropped": partial(cropped, (2, 24, 9, 15), F16),
    "sliced": partial(sliced, (2, 85, 6, 12), F16),
}
