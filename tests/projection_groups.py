"""Attention and the projection of its merged heads in one group, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16, BF16, BOOL = torch.float16, torch.bfloat16, torch.bool


def projected(
    heads: int, queries: int, width: int, columns: int, dtype: torch.dtype = F16, *,
    batch: int = 1, keys: int = 0, value_width: int = 0, mask: torch.dtype | None = None,
    causal: bool = False, bias: bool = True, gelu: bool = False, residual: bool = False,
    stats: bool = False, constant: bool = True,
) -> Group:  # fmt: skip
    """q, k and v are views of one tensor, or of three where `keys` or `value_width` are given; the
    result is [batch, queries, columns]."""
    b = GraphBuilder()
    parts = []
    sizes = ((queries, width), (keys or queries, width), (keys or queries, value_width or width))
    if keys or value_width:
        wholes = [
            b.input(name, TensorSpec((batch, tokens, heads * wide), dtype))
            for name, (tokens, wide) in zip("qkv", sizes, strict=True)
        ]
    else:
        qkv = b.input("qkv", TensorSpec((batch, queries, 3 * heads * width), dtype))
        ends = [i * heads * width for i in range(4)]
        wholes = [b.add("slice", qkv, dim=2, start=ends[i], end=ends[i + 1]) for i in range(3)]
    for whole, (tokens, wide) in zip(wholes, sizes, strict=True):
        part = b.add("reshape", whole, shape=(batch, tokens, heads, wide))
        parts.append(b.add("permute", part, dims=(0, 2, 1, 3)))
    if mask is not None:
        parts.append(b.input("mask", TensorSpec((queries, keys or queries), mask)))
    y = b.add("attention", *parts, scale=width**-0.5, causal=causal)
    y = b.add("permute", y, dims=(0, 2, 1, 3))
    depth = heads * (value_width or width)
    y = b.add("reshape", y, shape=(batch, queries, depth))
    generator = torch.Generator().manual_seed(depth + columns)
    weights = (torch.randn((columns, depth), generator=generator) * depth**-0.5).to(dtype)
    inputs = [y]
    if constant:
        inputs.append(b.constant("w", weights))
    else:
        inputs.append(b.input("w", TensorSpec((columns, depth), dtype)))
    if bias:
        inputs.append(b.constant("bias", torch.randn(columns, generator=generator).to(dtype)))
    y = b.add("linear", *inputs)
    if gelu:
        y = b.add("gelu", y, approximate="none")
    if residual:
        y = b.add("add", y, b.input("residual", TensorSpec((batch, queries, columns), dtype)))
    return Group("projected", b.build([y, b.add("row_stats", y)] if stats else [y]))


SMALL: dict[str, Callable[[], Group]] = {
    "two_heads": lambda: projected(2, 19, 16, 32),
    "three_heads": lambda: projected(3, 33, 32, 96, BF16, residual=True),
    "four_heads": lambda: projected(4, 33, 64, 256, residual=True, stats=True),
    "batch": lambda: projected(2, 19, 64, 128, batch=2, stats=True),
    "cross": lambda: projected(3, 19, 16, 48, keys=70, gelu=True),
    "few_queries": lambda: projected(2, 3, 32, 64, BF16, keys=33, bias=False),
    "wide_values": lambda: projected(2, 33, 24, 96, value_width=48, residual=True, gelu=True),
    "bool_mask": lambda: projected(2, 37, 16, 64, mask=BOOL),
    "causal": lambda: projected(2, 70, 32, 64, causal=True),
    "made_weights": lambda: projected(2, 19, 32, 64, constant=False),
}
LARGE: dict[str, Callable[[], Group]] = {
    "vit_b": lambda: projected(12, 197, 64, 768, residual=True, stats=True),
    "vit_b_bf16": lambda: projected(12, 197, 64, 768, BF16, residual=True, stats=True),
    "vit_l": lambda: projected(16, 197, 64, 1024, residual=True, stats=True),
    "vit_s": lambda: projected(6, 197, 64, 384, batch=2, residual=True, stats=True),
    "detr_cross": lambda: projected(8, 100, 32, 256, keys=1050, residual=True),
}
