"""A ViT encoder as the rewrite passes leave it, for tests of fusion."""

from __future__ import annotations

import torch

from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec


class _Weights:
    def __init__(self, builder: GraphBuilder, dtype: torch.dtype) -> None:
        self.builder = builder
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> str:
        tensor = torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5
        return self.builder.constant("w", tensor.to(dtype or self.dtype))


def normed_linear(
    b: GraphBuilder, weight: _Weights, x: str, stats: str, features: int, dtype: torch.dtype
) -> str:
    """`linear(layer_norm(x))`, the norm applied to the product: (x W' - mean colsum) rstd + b."""
    columns = int(b.specs[x].sizes[-1])
    mean, rstd = b.node("merge_stats", (stats,), {"columns": columns, "eps": 1e-6}, hint="stats")
    product = b.add("linear", x, weight(features, columns), out_dtype=torch.float32)
    centre = b.add("mul", mean, weight(features, dtype=torch.float32))
    scaled = b.add("mul", b.add("sub", product, centre), rstd)
    shifted = b.add("add", scaled, weight(features, dtype=torch.float32))
    return b.add("cast", shifted, dtype=dtype)


def vit_graph(
    layers: int = 2,
    tokens: int = 13,
    width: int = 128,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Graph:
    """`layers` encoder layers over [1, tokens, width] and a classifier."""
    b = GraphBuilder()
    weight = _Weights(b, dtype)
    head_width = width // heads
    x = b.input("x", TensorSpec((1, tokens, width), dtype))
    h = b.add("add", x, weight(1, tokens, width))
    stats = b.add("row_stats", h)
    for _ in range(layers):
        qkv = normed_linear(b, weight, h, stats, 3 * width, dtype)
        parts = []
        for index in range(3):
            part = b.add("slice", qkv, dim=2, start=index * width, end=(index + 1) * width)
            part = b.add("reshape", part, shape=(1, tokens, heads, head_width))
            parts.append(b.add("permute", part, dims=(0, 2, 1, 3)))
        mixed = b.add("attention", *parts, scale=head_width**-0.5)
        mixed = b.add("permute", mixed, dims=(0, 2, 1, 3))
        mixed = b.add("reshape", mixed, shape=(1, tokens, width))
        h = b.add("add", b.add("linear", mixed, weight(width, width), weight(width)), h)
        stats = b.add("row_stats", h)
        wide = b.add(
            "gelu", normed_linear(b, weight, h, stats, 4 * width, dtype), approximate="none"
        )
        h = b.add("add", b.add("linear", wide, weight(width, 4 * width), weight(width)), h)
        stats = b.add("row_stats", h)
    token = b.add("slice", h, dim=1, start=0, end=1)
    token = b.add("reshape", token, shape=(1, width))
    token = b.add("layer_norm", token, weight(width), weight(width), eps=1e-6)
    logits = b.add("linear", token, weight(10, width), weight(10))
    return b.build([logits])
