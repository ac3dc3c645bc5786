"""Attention groups at the shapes of vision models and at odd ones, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from tests.groups import tf32
from tests.kernel_checks import inputs_of

F16, BF16, F32, BOOL = torch.float16, torch.bfloat16, torch.float32, torch.bool


def packed(tokens: int, heads: int, width: int, dtype: torch.dtype = F16, *, batch: int = 1,
           epilogue: bool = False) -> Group:  # fmt: skip
    """q, k and v are views of one [batch, tokens, 3 heads width] tensor; the result is
    [batch, tokens, heads width]."""
    b = GraphBuilder()
    total = heads * width
    qkv = b.input("qkv", TensorSpec((batch, tokens, 3 * total), dtype))
    parts = []
    for i in range(3):
        part = b.add("slice", qkv, dim=2, start=i * total, end=(i + 1) * total)
        part = b.add("reshape", part, shape=(batch, tokens, heads, width))
        parts.append(b.add("permute", part, dims=(0, 2, 1, 3)))
    y = b.add("attention", *parts, scale=width**-0.5)
    if epilogue:
        y = b.add("add", b.add("gelu", y, approximate="none"), parts[0])
    y = b.add("permute", y, dims=(0, 2, 1, 3))
    return Group("packed", b.build([b.add("reshape", y, shape=(batch, tokens, total))]))


def cross(lead: tuple[int, ...], queries: int, keys: int, width: int, value_width: int = 0,
          dtype: torch.dtype = F16, *, mask: torch.dtype | None = None,
          mask_lead: tuple[int, ...] = (), causal: bool = False,
          scale: float | None = None) -> Group:  # fmt: skip
    b = GraphBuilder()
    q = b.input("q", TensorSpec((*lead, queries, width), dtype))
    k = b.input("k", TensorSpec((*lead, keys, width), dtype))
    v = b.input("v", TensorSpec((*lead, keys, value_width or width), dtype))
    inputs = [q, k, v]
    if mask is not None:
        inputs.append(b.input("mask", TensorSpec((*mask_lead, queries, keys), mask)))
    scale = width**-0.5 if scale is None else scale
    y = b.add("attention", *inputs, scale=scale, causal=causal)
    return Group("cross", b.build([y]))


def shared_keys(batch: int, pairs: int, each: int, queries: int, keys: int, width: int,
                dtype: torch.dtype = F16) -> Group:  # fmt: skip
    """`pairs` heads of keys and of values, each for `each` heads of queries."""
    b = GraphBuilder()
    lead = (batch, pairs, each)
    q = b.input("q", TensorSpec((batch, pairs * each, queries, width), dtype))
    others = []
    for name in "kv":
        x = b.input(name, TensorSpec((batch, pairs, keys, width), dtype))
        x = b.add("reshape", x, shape=(batch, pairs, 1, keys, width))
        x = b.add("expand", x, shape=(*lead, keys, width))
        others.append(b.add("reshape", x, shape=(batch, pairs * each, keys, width)))
    y = b.add("attention", q, *others, scale=width**-0.5)
    return Group("shared_keys", b.build([y]))


def repeated_keys(heads: int, queries: int, keys: int, width: int) -> Group:
    """All keys of a head are one row."""
    b = GraphBuilder()
    q = b.input("q", TensorSpec((heads, queries, width), F16))
    k = b.input("k", TensorSpec((heads, 1, width), F16))
    v = b.input("v", TensorSpec((heads, keys, width), F16))
    k = b.add("expand", k, shape=(heads, keys, width))
    return Group("repeated_keys", b.build([b.add("attention", q, k, v, scale=width**-0.5)]))


def decomposed(heads: int, queries: tuple[int, int], keys: tuple[int, int], width: int,
               dtype: torch.dtype = F16) -> Group:  # fmt: skip
    """Biases of a key's row and of its column, each its own for every query: SAM's relative
    positions. They lie as products by rows and by columns leave them."""
    b = GraphBuilder()
    sizes = (heads, *queries, *keys)
    shape = (heads, queries[0] * queries[1], keys[0] * keys[1])
    q = b.input("q", TensorSpec((heads, shape[1], width), dtype))
    k, v = (b.input(name, TensorSpec((heads, shape[2], width), dtype)) for name in "kv")
    rows = b.input("rows", TensorSpec((queries[0], heads, queries[1], keys[0]), dtype))
    columns = b.input("columns", TensorSpec((queries[1], heads, queries[0], keys[1]), dtype))
    masks = (
        b.add("reshape", b.add("permute", rows, dims=(1, 0, 2, 3)), shape=(*sizes[:4], 1)),
        b.add(
            "reshape", b.add("permute", columns, dims=(1, 2, 0, 3)), shape=(*sizes[:3], 1, keys[1])
        ),
    )
    masks = tuple(
        b.add("reshape", b.add("expand", each, shape=sizes), shape=shape) for each in masks
    )
    return Group("decomposed", b.build([b.add("attention", q, k, v, *masks, scale=width**-0.5)]))


def with_masks(lead: tuple[int, ...], queries: int, keys: int, width: int,
               *masks: tuple[int, ...], dtype: torch.dtype = F16) -> Group:  # fmt: skip
    """Up to two masks of these shapes."""
    b = GraphBuilder()
    sizes = ((*lead, queries, width), (*lead, keys, width), (*lead, keys, width), *masks)
    inputs = [b.input(f"x{i}", TensorSpec(shape, dtype)) for i, shape in enumerate(sizes)]
    y = b.add("attention", *inputs, scale=width**-0.5)
    return Group("with_masks", b.build([y]))


def masked(kind: torch.dtype, dtype: torch.dtype = F16) -> tuple[Group, dict[str, torch.Tensor]]:
    """A mask, and inputs: query 3 sees no key, query 5 none of the first 64, query 7 has the least
    finite mask. Products of floats are in tf32."""
    group = cross((2,), 20, 70, 24, dtype=dtype, mask=kind)
    if dtype == F32:
        group = tf32(group)
    values = inputs_of(group)
    keep = torch.rand(20, 70, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[3] = False
    keep[5] = torch.arange(70) >= 64
    values["mask"] = keep
    if kind != torch.bool:
        values["mask"] = torch.zeros(20, 70, dtype=kind).masked_fill(~keep, float("-inf"))
        values["mask"][7] = torch.finfo(kind).min
    return group, values


CASES: dict[str, Callable[[], Group]] = {
    "vit_b": lambda: packed(197, 12, 64),
    "vit_h": lambda: packed(257, 16, 80),
    "vit_384": lambda: packed(577, 12, 64, BF16),
    "epilogue": lambda: packed(50, 3, 32, BF16, batch=2, epilogue=True),
    "detr_self": lambda: cross((1, 8), 1050, 1050, 32),
    "detr_cross": lambda: cross((1, 8), 100, 1050, 32),
    "cvt": lambda: cross((1, 1), 3136, 784, 64),
    "window": lambda: cross((16, 3), 49, 49, 32, mask=F16, mask_lead=(1, 3)),
    "bool_mask": lambda: cross((2, 2), 37, 70, 24, mask=BOOL, mask_lead=(2, 1)),
    "f32_mask": lambda: cross((2,), 17, 33, 40, 72, BF16, mask=F32),
    "causal": lambda: cross((1, 2), 70, 130, 64, causal=True),
    "causal_tall": lambda: cross((1, 2), 130, 33, 16, causal=True),
    "one_key_head": lambda: shared_keys(2, 1, 3, 37, 70, 64),
    "key_heads": lambda: shared_keys(2, 2, 3, 20, 33, 40, BF16),
    "sam": lambda: decomposed(2, (8, 16), (8, 16), 64),
    "sam_window": lambda: decomposed(3, (7, 7), (7, 7), 32),
    "sam_even": lambda: decomposed(2, (5, 14), (6, 14), 40, BF16),
    "key_mask": lambda: with_masks((2,), 33, 50, 24, (1, 50), (33, 1)),
    "one_query": lambda: cross((1, 4), 1, 197, 64),
    "one_key": lambda: cross((3,), 5, 1, 8),
    "wide": lambda: cross((1, 2), 65, 129, 128, 96),
    "negative_scale": lambda: cross((2,), 20, 70, 24, scale=-8.0),
    "no_scale": lambda: cross((2,), 20, 70, 24, scale=0.0),
}
NARROW_CASES: dict[str, Callable[[], Group]] = {
    "heads_of_36": lambda: packed(65, 4, 36),
    "heads_of_60": lambda: packed(17, 2, 60, BF16, batch=3, epilogue=True),
    "heads_of_30": lambda: cross((4, 3), 49, 49, 30, mask=F16, mask_lead=(1, 3)),
    "heads_of_2": lambda: cross((3,), 33, 17, 2, 10),
    "heads_of_160": lambda: packed(65, 2, 160, epilogue=True),
    "heads_of_192": lambda: cross((2,), 37, 77, 192, 136, BF16, mask=F32),
    "tf32_of_160": lambda: tf32(cross((1, 2), 33, 65, 160, dtype=F32)),
}
"""Heads that are no multiple of 16 bytes, or wide, for `Attention` alone."""
TF32_CASES: dict[str, Callable[[], Group]] = {
    "tf32_vit_b": lambda: tf32(packed(197, 12, 64, F32)),
    "tf32_epilogue": lambda: tf32(packed(37, 3, 36, F32, batch=2, epilogue=True)),
    "tf32_mask": lambda: tf32(cross((2, 2), 37, 70, 24, 44, F32, mask=BOOL, mask_lead=(2, 1))),
    "tf32_causal": lambda: tf32(cross((1, 2), 70, 130, 64, dtype=F32, causal=True)),
    "tf32_wide": lambda: tf32(cross((1, 2), 33, 65, 128, 96, F32)),
    "tf32_narrow": lambda: tf32(cross((3,), 5, 17, 4, 12, F32)),
}
FLOAT_CASES: dict[str, Callable[[], Group]] = {
    **TF32_CASES,
    "fp32_vit_b": lambda: packed(197, 12, 64, F32),
    "fp32_epilogue": lambda: packed(37, 3, 36, F32, batch=2, epilogue=True),
    "fp32_mask": lambda: cross((2, 2), 37, 70, 24, 44, F32, mask=F32, mask_lead=(2, 1)),
    "fp32_causal": lambda: cross((1, 2), 70, 130, 64, dtype=F32, causal=True),
    "fp32_wide": lambda: cross((1, 2), 33, 65, 128, 128, F32),
}
"""tf32, and for `Attention` alone fp32 as three products of it."""
TF32_SIZES = (
    *zip((1, 2, 5, 50, 197, 257), (32, 40, 64, 80, 96, 128), strict=True),
    *zip((1, 2, 5, 50, 197, 257), (128, 96, 80, 64, 40, 32), strict=True),
)
"""Keys, and the width of heads, for `tf32_of`."""


def tf32_of(keys: int, width: int) -> Group:
    """Of more queries than a warpgroup takes, and none a multiple of anything."""
    return tf32(cross((2,), 67, keys, width, dtype=F32))
