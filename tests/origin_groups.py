"""Groups that begin to read some of their inputs further on, as parts of something larger."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

HALF = torch.float16


def _row(b: GraphBuilder, long: str, start: int, columns: int) -> str:
    """Some columns of each row of `long`, for every token of that row's image."""
    images = 2
    part = b.add("slice", long, dim=1, start=start, end=start + columns)
    return b.add("reshape", part, shape=(images, 1, columns))


def gated(start: int = 384, columns: int = 96) -> Group:
    """A linear times a gate, of one long row, and a residual."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 24, 64), HALF))
    long = b.input("long", TensorSpec((2, 1000), HALF))
    residual = b.input("residual", TensorSpec((2, 24, columns), HALF))
    w = torch.randn(columns, 64, generator=torch.Generator().manual_seed(2)).to(HALF) / 8
    w = b.constant("w", w)
    y = b.add("mul", _row(b, long, start, columns), b.add("linear", x, w))
    return Group("gated", b.build([b.add("add", residual, y)]))


def modulated(start: int = 192) -> Group:
    """A norm whose scale and shift are neighbours in one long row."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 24, 96), HALF))
    long = b.input("long", TensorSpec((2, 1000), HALF))
    shift, scale = (_row(b, long, at, 96) for at in (start, start + 96))
    y = b.add("mul", b.add("layer_norm", x, eps=1e-6), scale)
    return Group("modulated", b.build([b.add("add", y, shift)]))


def layer_of_keys(start: int = 512) -> Group:
    """Attention to one layer's part of keys and of values that all layers read."""
    b = GraphBuilder()
    heads, width = 4, 32
    q = b.input("q", TensorSpec((2, heads, 40, width), HALF))
    parts = []
    for name in ("keys", "values"):
        all_layers = b.input(name, TensorSpec((2, 72, 1024), HALF))
        part = b.add("slice", all_layers, dim=2, start=start, end=start + heads * width)
        part = b.add("reshape", part, shape=(2, 72, heads, width))
        parts.append(b.add("permute", part, dims=(0, 2, 1, 3)))
    return Group("layer_of_keys", b.build([b.add("attention", q, *parts, scale=0.2, causal=False)]))


def cropped(top: int = 3, left: int = 2) -> Group:
    """The inner part of an image, cut off along both of its sides."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 20, 18, 24), HALF))
    y = b.add("slice", x, dim=1, start=top, end=top + 12)
    y = b.add("slice", y, dim=2, start=left, end=left + 10)
    return Group("cropped", b.build([b.add("gelu", y, approximate="none")]))


CASES: dict[str, Callable[[], Group]] = {
    "gated": gated,
    "gated_odd": lambda: gated(start=389, columns=93),
    "modulated": modulated,
    "modulated_odd": lambda: modulated(start=195),
    "layer_of_keys": layer_of_keys,
    "cropped": cropped,
}
