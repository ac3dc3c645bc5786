"""Elementwise and rowwise groups at common and odd shapes, for kernel tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I64, I32, I8, U8, BOOL = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool


def _group(b: GraphBuilder, *outputs: str) -> Group:
    graph = b.build(outputs)
    graph.verify()
    return Group("case", graph)


def gelu_bias(*shape: int, dtype: torch.dtype = F16, approximate: str = "none") -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    bias = b.input("bias", TensorSpec(shape[-1:], dtype))
    y = b.add("gelu", b.add("add", x, bias), approximate=approximate)
    return _group(b, y, b.add("mul", y, other=0.5))


def class_token(tokens: int, width: int, dtype: torch.dtype = F16, *, stats: bool = False) -> Group:
    """The input of a ViT's first layer."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, tokens - 1, width), dtype))
    token = b.input("token", TensorSpec((1, 1, width), dtype))
    position = b.input("position", TensorSpec((1, tokens, width), dtype))
    y = b.add("add", b.add("concat", token, x, dim=1), position)
    return _group(b, y, b.add("row_stats", y)) if stats else _group(b, y)


def concat_columns(rows: int, *widths: int, dtype: torch.dtype = F32) -> Group:
    b = GraphBuilder()
    parts = [b.input(f"x{i}", TensorSpec((rows, width), dtype)) for i, width in enumerate(widths)]
    return _group(b, b.add("relu", b.add("concat", *parts, dim=-1)))


def concat_nested(last: bool, columns: int = 24, dtype: torch.dtype = F16) -> Group:
    """Frames of a video, token by token, behind one row; or such columns behind one column."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((3, 5, columns), dtype))
    x = b.add("permute", x, dims=(1, 0, 2))
    if last:
        x = b.add("reshape", b.add("permute", x, dims=(2, 0, 1)), shape=(1, columns, 15))
        head = b.input("y", TensorSpec((1, columns, 1), F32))
    else:
        x = b.add("reshape", x, shape=(1, 15, columns))
        head = b.input("y", TensorSpec((1, 1, columns), F32))
    return _group(b, b.add("relu", b.add("concat", head, x, dim=2 if last else 1)))


def concat_views(dtype: torch.dtype = F16) -> Group:
    """Pieces that are a slice and a permuted tensor, with other dtypes between."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((5, 12, 6), dtype))
    y = b.input("y", TensorSpec((6, 5), F32))
    part = b.add("slice", x, dim=1, start=2, end=9)
    other = b.add("expand", b.add("reshape", b.add("permute", y, dims=(1, 0)), shape=(5, 1, 6)),
                  shape=(5, 3, 6))  # fmt: skip
    return _group(b, b.add("concat", part, other, dim=1))


def padded_patches(
    batch: int,
    patch: int,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    dtype: torch.dtype = F16,
    *,
    stats: bool = False,
    to: torch.dtype | None = None,
) -> Group:
    """The patches of images of 2 by 3, with zeros around, converted if `to` says so."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, 3, 2 * patch, 3 * patch), dtype))
    y = b.add("reshape", x, shape=(batch, 3, 2, patch, 3, patch))
    y = b.add("permute", y, dims=(0, 2, 4, 1, 3, 5))
    y = b.add("reshape", y, shape=(batch, 6, 3 * patch**2))
    y = b.add("pad", y, before=before, after=after)
    y = b.add("cast", y, dtype=to) if to else y
    return _group(b, y, b.add("row_stats", y)) if stats else _group(b, y)


def padded(*shape: int, before: int, after: int, dtype: torch.dtype = F16) -> Group:
    """Zeros around the last dimension, and `after` rows of them."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    ends = (*(0 for _ in shape[2:]), after, after)
    y = b.add("pad", x, before=(*(0 for _ in shape[1:]), before), after=ends)
    return _group(b, b.add("cos", y))


def blocks(
    image: tuple[int, int, int, int],
    block: tuple[int, int],
    before: tuple[int, int],
    size: tuple[int, int],
    channels: int,
    dtype: torch.dtype = F16,
    to: torch.dtype | None = None,
) -> Group:
    """The blocks of an image [N, C, H, W] as pixels, converted on the way."""
    b = GraphBuilder()
    x = b.add("permute", b.input("x", TensorSpec(image, dtype)), dims=(0, 2, 3, 1))
    given = {"block": block, "before": before, "size": size, "channels": channels}
    y = b.add("space_to_depth", x, **given)
    return _group(b, y if to is None else b.add("cast", y, dtype=to))


def permuted(dtype: torch.dtype = F16) -> Group:
    """Reads a permuted tensor, stores a permuted view."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 7, 3, 16), dtype))
    y = b.add("silu", b.add("permute", x, dims=(0, 2, 1, 3)))
    return _group(b, b.add("reshape", b.add("permute", y, dims=(0, 2, 1, 3)), shape=(2, 7, 48)))


def integers() -> Group:
    """Wrap-around, promotion, comparisons and conversions."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((3, 35), I64))
    y = b.input("y", TensorSpec((3, 35), I8))
    z = b.input("z", TensorSpec((35,), F16))
    product = b.add("mul", y, y)
    mixed = b.add("add", x, product)
    near = b.add("lt", mixed, z)
    chosen = b.add("where", near, mixed, x)
    half = b.add("div", chosen, other=2)
    outputs = [product, near, chosen, half, b.add("cast", half, dtype=I32)]
    outputs += [b.add("maximum", x, other=3), b.add("pow", x, other=2), b.add("abs", y)]
    outputs += [b.add("cast", y, dtype=BOOL), b.add("mul", near, b.add("eq", x, other=1))]
    return _group(b, *outputs)


def wrapped(dtype: torch.dtype) -> Group:
    """Numbers far beyond a byte, and below 0, as bytes."""
    b = GraphBuilder()
    x = b.add("mul", b.input("x", TensorSpec((3, 35), dtype)), other=2.0**9)
    return _group(b, b.add("cast", x, dtype=torch.uint8))


def nans(dtype: torch.dtype) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 9), dtype))
    y = b.input("y", TensorSpec((4, 9), dtype))
    outputs = [b.add("relu", x), b.add("maximum", x, y), b.add("minimum", x, y)]
    return _group(b, *outputs, b.add("maximum", x, other=0.25), b.add("minimum", x, other=0))


def functions(dtype: torch.dtype) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 33), dtype))
    positive = b.add("add", b.add("abs", x), other=0.1)
    outputs = [b.add(op, x) for op in ("neg", "exp", "erf", "sin", "cos", "tanh", "sigmoid")]
    outputs += [b.add(op, x) for op in ("floor", "ceil", "expm1")]
    outputs += [
        b.add(op, positive) for op in ("log", "log1p", "sqrt", "rsqrt", "reciprocal", "copy")
    ]
    outputs += [b.add("pow", positive, x), b.add("gelu", x, approximate="tanh")]
    outputs += [b.add("gelu", x, approximate="none"), b.add("silu", x), b.add("square", x)]
    return _group(b, *outputs)


def more_functions(dtype: torch.dtype) -> Group:
    """Those of one number that fewer models have."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 33), dtype))
    positive = b.add("add", b.add("abs", x), other=0.1)
    within = b.add("mul", b.add("sin", x), other=0.9)
    outputs = [b.add(op, within) for op in ("asin", "acos", "atanh", "tan")]
    outputs += [b.add(op, x) for op in ("atan", "sinh", "cosh", "asinh", "exp2", "erfc")]
    outputs += [b.add(op, positive) for op in ("log2", "log10")]
    return _group(b, *outputs, b.add("acosh", b.add("add", positive, other=1)))


def divisions(dtype: torch.dtype) -> Group:
    """Functions of two numbers of either sign, whole numbers too."""
    b = GraphBuilder()
    x, y = (b.input(name, TensorSpec((2, 33), dtype)) for name in "xy")
    z = b.input("z", TensorSpec((2, 33), I64))
    outputs = [b.add(op, x, y) for op in ("atan2", "hypot", "copysign")]
    for op in ("fmod", "remainder", "floor_divide"):
        outputs += [b.add(op, x, y), b.add(op, x, other=-0.75)]
        outputs += [b.add(op, z, other=number) for number in (3, -3)]
    return _group(b, *outputs)


def scalar() -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((), F32))
    return _group(b, b.add("exp", x))


def embedding(
    names: int, width: int, *places: int, dtype: torch.dtype = F16, index: torch.dtype = I64
) -> Group:
    """relu(table[index])."""
    b = GraphBuilder()
    table = b.input("table", TensorSpec((names, width), dtype))
    at = b.add("reshape", b.input("index", TensorSpec(places, index)), shape=(math.prod(places), 1))
    at = b.add("expand", at, shape=(math.prod(places), width))
    return _group(b, b.add("relu", b.add("gather", table, at, dim=0)))


def gather(
    shape: tuple[int, ...],
    places: tuple[int, ...],
    dim: int,
    dtype: torch.dtype = F32,
    order: tuple[int, ...] | None = None,
) -> Group:
    """Elements of a permuted tensor, each with an index of its own."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    x = b.add("permute", x, dims=order) if order else x
    return _group(b, b.add("gather", x, b.input("index", TensorSpec(places, I64)), dim=dim))


def rolled(*shape: int, shifts: tuple[int, ...], dtype: torch.dtype = F16) -> Group:
    b = GraphBuilder()
    x = b.add("roll", b.input("x", TensorSpec(shape, dtype)), shifts=shifts)
    return _group(b, b.add("neg", x))


def rotated(*shape: int, half: bool, dtype: torch.dtype = F16, norm: bool = False) -> Group:
    """Rows [..., D] turned by angles of their tokens, all heads alike; with `norm`, their norms."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    if norm:
        affine = (b.input(name, TensorSpec(shape[-1:], dtype)) for name in ("w", "bias"))
        x = b.add("layer_norm", x, *affine, eps=1e-6)
    cos, sin = (b.input(name, TensorSpec(shape[-2:], F32)) for name in ("cos", "sin"))
    shifts = (*(0 for _ in shape[1:]), shape[-1] // 2)
    partner = b.add("roll", x, shifts=shifts) if half else b.add("swap_pairs", x)
    return _group(b, b.add("rotate", x, partner, cos, sin))


def windows(dtype: torch.dtype = F16) -> Group:
    """Overlapping windows of an image [N, C, H, W], every second tap of them."""
    b = GraphBuilder()
    x = b.add("unfold", b.input("x", TensorSpec((2, 3, 9, 8), dtype)), dim=2, size=3, step=2)
    x = b.add("slice", b.add("unfold", x, dim=3, size=5, step=1), dim=5, start=0, end=5, step=2)
    y = b.add("reshape", b.add("permute", x, dims=(0, 1, 4, 5, 2, 3)), shape=(2, 27, 16))
    return _group(b, b.add("exp", y))


def normalize_groups(
    *shape: int, groups: int, chunks: int, dtype: torch.dtype = F16, affine: bool = True
) -> Group:
    """silu(norm(x + y)), of statistics that another kernel made."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    stats = b.input("stats", TensorSpec((shape[0], chunks, groups, 2), F32))
    scales = [b.input(name, TensorSpec(shape[-1:], dtype)) for name in ("w", "b") if affine]
    y = b.add("add", x, b.input("y", TensorSpec(shape, dtype)))
    return _group(b, b.add("silu", b.add("normalize_groups", y, stats, *scales, eps=1e-5)))


ELEMENTWISE: dict[str, Callable[[], Group]] = {
    "gelu_197": lambda: gelu_bias(1, 197, 3072),
    "gelu_tanh": lambda: gelu_bias(3, 7, 40, dtype=BF16, approximate="tanh"),
    "gelu_odd": lambda: gelu_bias(5, 7),
    "gelu_f64": lambda: gelu_bias(5, 6, dtype=F64),
    "class_token_197": lambda: class_token(197, 768),
    "concat_columns": lambda: concat_columns(9, 5, 8, 3),
    "concat_even": lambda: concat_columns(9, 8, 24, 16, dtype=F16),
    "concat_many": lambda: concat_columns(9, *(8,) * 30, dtype=F16),
    "concat_views": concat_views,
    "concat_nested_rows": lambda: concat_nested(False),
    "concat_nested_rows_odd": lambda: concat_nested(False, 7),
    "concat_nested_columns": lambda: concat_nested(True),
    "bytes_of_f32": lambda: wrapped(F32),
    "bytes_of_bf16": lambda: wrapped(BF16),
    "pad_patch_16": lambda: padded_patches(1, 16, (0, 1, 0), (0, 0, 0)),
    "pad_patch_16_below": lambda: padded_patches(3, 16, (0, 0, 0), (0, 1, 0), BF16),
    "pad_patch_14": lambda: padded_patches(1, 14, (0, 1, 0), (0, 0, 4)),
    "pad_patch_14_batch": lambda: padded_patches(3, 14, (0, 2, 0), (0, 1, 4), BF16),
    "pad_patch_7": lambda: padded_patches(3, 7, (0, 2, 0), (0, 0, 1), F32),
    "pad_patch_14_converted": lambda: padded_patches(2, 14, (0, 1, 0), (0, 0, 4), F32, to=F16),
    "pad_all_sides": lambda: padded_patches(2, 4, (1, 2, 8), (1, 0, 16)),
    "pad_odd": lambda: padded(5, 7, before=2, after=1),
    "pad_even": lambda: padded(3, 4, 24, before=8, after=4),
    "pad_shifted": lambda: padded(3, 5, 16, before=2, after=6),
    "blocks_of_a_stem": lambda: blocks((2, 3, 14, 11), (2, 2), (3, 3), (10, 9), 16),
    "blocks_of_4": lambda: blocks((1, 3, 13, 10), (4, 4), (2, 2), (4, 3), 48, F32, BF16),
    "blocks_of_one": lambda: blocks((2, 5, 4, 3), (1, 1), (1, 0), (6, 3), 8, BF16),
    "blocks_that_crop": lambda: blocks((1, 1, 9, 9), (3, 2), (0, 1), (2, 3), 11),
    "groups_320": lambda: normalize_groups(1, 16, 16, 320, groups=32, chunks=8),
    "groups_batch": lambda: normalize_groups(5, 3, 7, 24, groups=3, chunks=7, dtype=BF16),
    "groups_odd": lambda: normalize_groups(3, 35, 9, groups=3, chunks=5, dtype=F32, affine=False),
    "groups_of_one_pixel": lambda: normalize_groups(7, 1, 16, groups=2, chunks=1),
    "groups_of_channels": lambda: normalize_groups(2, 900, 40, groups=40, chunks=90),
    "embedding": lambda: embedding(50, 64, 3, 7),
    "embedding_odd": lambda: embedding(9, 13, 5, dtype=BF16, index=I32),
    "embedding_of_one": lambda: embedding(5, 1, 9, dtype=I64),
    "gather_last": lambda: gather((3, 5, 33), (3, 5, 7), 2),
    "gather_first": lambda: gather((11, 24), (3, 16), 0, F16),
    "gather_middle": lambda: gather((8, 6, 5), (4, 9, 7), 1, I8, (2, 1, 0)),
    "rolled": lambda: rolled(2, 7, 8, 24, shifts=(0, 3, 6, 0)),
    "rolled_columns": lambda: rolled(3, 40, shifts=(1, 8), dtype=BF16),
    "rolled_odd": lambda: rolled(5, 7, shifts=(0, 3), dtype=I64),
    "rotated_halves": lambda: rotated(2, 3, 7, 16, half=True),
    "rotated_halves_odd": lambda: rotated(3, 5, 6, half=True, dtype=F32),
    "rotated_pairs": lambda: rotated(2, 3, 7, 16, half=False, dtype=BF16),
    "rotated_pairs_odd": lambda: rotated(5, 3, 10, half=False),
    "windows": windows,
    "permuted": permuted,
    "integers": integers,
    "nans_f16": lambda: nans(F16),
    "nans_f64": lambda: nans(F64),
    "functions_f32": lambda: functions(F32),
    "functions_f64": lambda: functions(F64),
    "more_functions_f32": lambda: more_functions(F32),
    "more_functions_f64": lambda: more_functions(F64),
    "divisions_f32": lambda: divisions(F32),
    "divisions_bf16": lambda: divisions(torch.bfloat16),
    "scalar": scalar,
}


# -- rows ------------------------------------------------------------------------------------------


def softmax(*shape: int, dtype: torch.dtype = F16, dim: int = -1) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    y = b.add("softmax", b.add("mul", x, other=0.125), dim=dim)
    return _group(b, y)


def layer_norm(*shape: int, dtype: torch.dtype = F16, residual: bool = False) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    w = b.input("w", TensorSpec(shape[-1:], dtype))
    bias = b.input("b", TensorSpec(shape[-1:], dtype))
    outputs = []
    if residual:
        x = b.add("add", x, b.input("y", TensorSpec(shape, dtype)))
        outputs.append(x)
    return _group(b, *outputs, b.add("layer_norm", x, w, bias, eps=1e-6))


def row_stats(*shape: int, dtype: torch.dtype = F16) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    y = b.add("add", x, b.input("y", TensorSpec(shape, dtype)))
    return _group(b, y, b.add("row_stats", y))


def lone_stats(*shape: int) -> Group:
    b = GraphBuilder()
    return _group(b, b.add("row_stats", b.input("x", TensorSpec(shape, F16))))


def merge_stats(rows: int, columns: int) -> Group:
    b = GraphBuilder()
    stats = b.input("stats", TensorSpec((1, rows, -(-columns // 64), 2), F32))
    mean, rstd = b.node("merge_stats", [stats], {"columns": columns, "eps": 1e-5})
    return _group(b, mean, b.add("mul", rstd, other=2.0))


def pool(op: str, *shape: int, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    return _group(b, b.add(op, x, dims=dims, keepdim=keepdim))


def standardize(*shape: int, dims: tuple[int, ...], dtype: torch.dtype = F32) -> Group:
    """Two reductions, row values of them, and both a row and a tile result."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    mean = b.add("mean", x, dims=dims, keepdim=True)
    apart = b.add("sub", x, mean)
    var = b.add("mean", b.add("square", apart), dims=dims, keepdim=True)
    rstd = b.add("rsqrt", b.add("add", var, other=1e-5))
    top = b.add("amax", apart, dims=dims, keepdim=True)
    return _group(b, b.add("mul", apart, rstd), rstd, b.add("sub", top, mean))


def unit_rows(*shape: int, dtype: torch.dtype = F16) -> Group:
    """Rows divided by their lengths, as attention of cosines has them."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    wide = b.add("cast", x, dtype=F32) if dtype != F32 else x
    length = b.add("sqrt", b.add("sum", b.add("square", wide), dims=(-1,), keepdim=True))
    length = b.add("cast", length, dtype=dtype) if dtype != F32 else length
    return _group(b, b.add("div", x, b.add("maximum", length, other=1e-3)))


def gated_sum(*shape: int, dtype: torch.dtype = F16) -> Group:
    """The sum of images, each channel of them by its own factor, and what is made of it."""
    b = GraphBuilder()
    x, gate, y = (
        b.input(name, TensorSpec(size, dtype))
        for name, size in (("x", shape), ("gate", (*shape[:3], 1, 1)), ("y", shape[2:]))
    )
    total = b.add("sum", b.add("mul", x, gate), dims=(1,), keepdim=False)
    return _group(b, b.add("relu", b.add("add", total, y)), total)


def group_norm(
    *shape: int, groups: int, dtype: torch.dtype = F16, first: bool = False, affine: bool = True
) -> Group:
    """silu(group_norm(x)) of images [N, ..., C], stored as [N, C, ...] if `first`."""
    b = GraphBuilder()
    if first:
        x = b.input("x", TensorSpec((shape[0], shape[-1], *shape[1:-1]), dtype))
        x = b.add("permute", x, dims=(0, *range(2, len(shape)), 1))
    else:
        x = b.input("x", TensorSpec(shape, dtype))
    scales = [b.input(name, TensorSpec(shape[-1:], dtype)) for name in ("w", "b") if affine]
    return _group(b, b.add("silu", b.add("group_norm", x, *scales, groups=groups, eps=1e-5)))


def group_stats(*shape: int, groups: int, chunks: int, dtype: torch.dtype = F16) -> Group:
    """Statistics of a sum of images and rows, which is stored too."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    y = b.add(
        "add", x, b.input("y", TensorSpec((shape[0], *(1 for _ in shape[2:]), shape[-1]), dtype))
    )
    return _group(b, y, b.add("group_stats", y, groups=groups, chunks=chunks))


def argmax(*shape: int, dim: int, dtype: torch.dtype = F16, ties: bool = False) -> Group:
    """The largest element and its place; many are equal with `ties`."""
    b = GraphBuilder()
    x = b.add("abs", b.input("x", TensorSpec(shape, dtype)))
    x = b.add("gt", x, other=1.0) if ties else x
    x = b.add("cast", x, dtype=dtype) if ties else x
    place = b.add("argmax", x, dim=dim, keepdim=False)
    return _group(b, b.add("amax", x, dims=(dim,), keepdim=False), place)


def topk(
    *shape: int, k: int, dtype: torch.dtype = F16, largest: bool = True, dims: tuple[int, ...] = ()
) -> Group:
    """The first elements of rows in order and their places; of x permuted by `dims`."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    x = b.add("permute", x, dims=dims) if dims else x
    return _group(b, *b.node("topk", [x], {"k": k, "largest": largest}))


TOPK: dict[str, Callable[[], Group]] = {
    "one_of_1000": lambda: topk(3, 1000, k=1),
    "five_of_1000": lambda: topk(2, 1000, k=5, dtype=F32),
    "of_one": lambda: topk(5, 1, k=1),
    "of_seven": lambda: topk(4, 7, k=3, dtype=BF16, largest=False),
    "half_of_an_odd_row": lambda: topk(3, 197, k=100, dtype=F32, largest=False),
    "of_ties": lambda: topk(2, 3, 777, k=300, dtype=I32),
    "smallest_of_ties": lambda: topk(2, 1300, k=65, dtype=torch.int64, largest=False),
    "most_of_ties": lambda: topk(2, 1500, k=1024, dtype=I32),
    "all_in_order": lambda: topk(2, 130, k=130),
    "of_columns": lambda: topk(3, 50, 4, k=7, dtype=F32, dims=(2, 0, 1)),
    "of_a_detector": lambda: topk(1, 8400, k=300, dtype=F32),
    "read_again": lambda: topk(1, 26_000, k=100),
}


def cumsum(*shape: int, dim: int, dtype: torch.dtype = F16, op: str = "cumsum") -> Group:
    """Running sums, or products, scaled by the largest of each row."""
    b = GraphBuilder()
    x = b.add("abs", b.input("x", TensorSpec(shape, dtype)))
    y = b.add(op, x, dim=dim)
    return _group(b, b.add("div", y, b.add("amax", y, dims=(dim,), keepdim=True)), y)


ROWWISE: dict[str, Callable[[], Group]] = {
    "cumsum": lambda: cumsum(7, 197, dim=-1, dtype=F32),
    "cumsum_middle": lambda: cumsum(3, 25, 40, dim=1),
    "cumsum_long": lambda: cumsum(2, 4099, dim=1, dtype=BF16),
    "cumsum_of_one": lambda: cumsum(5, 1, dim=1),
    "cumprod": lambda: cumsum(7, 197, dim=-1, dtype=F32, op="cumprod"),
    "cumprod_middle": lambda: cumsum(3, 25, 40, dim=1, op="cumprod"),
    "softmax_197": lambda: softmax(12, 197, 197),
    "softmax_1": lambda: softmax(5, 1),
    "softmax_7": lambda: softmax(3, 11, 7, dtype=F32),
    "softmax_middle": lambda: softmax(3, 13, 40, dim=1),
    "softmax_f64": lambda: softmax(4, 65, dtype=F64),
    "softmax_4096": lambda: softmax(3, 4096, dtype=BF16),
    "softmax_12672": lambda: softmax(2, 12672),
    "norm_197_768": lambda: layer_norm(1, 197, 768),
    "norm_residual": lambda: layer_norm(2, 50, 1024, dtype=BF16, residual=True),
    "norm_1000": lambda: layer_norm(3, 1000, dtype=F32),
    "norm_odd": lambda: layer_norm(9, 197),
    "stats_197_768": lambda: row_stats(1, 197, 768),
    "stats_odd": lambda: row_stats(7, 197),
    "stats_short": lambda: row_stats(7, 40, dtype=F32),
    "norm_rotated": lambda: rotated(2, 3, 5, 64, half=False, norm=True),
    "norm_rotated_odd": lambda: rotated(7, 18, half=False, dtype=F32, norm=True),
    "stats_alone": lambda: lone_stats(2, 9, 200),
    "stats_pad_patch_16": lambda: padded_patches(2, 16, (0, 1, 0), (0, 0, 0), stats=True),
    "stats_pad_patch_7": lambda: padded_patches(3, 7, (0, 1, 0), (0, 1, 1), stats=True),
    "stats_class_token": lambda: class_token(197, 768, stats=True),
    "group_norm": lambda: group_norm(1, 8, 8, 320, groups=32),
    "group_norm_odd": lambda: group_norm(3, 7, 5, 9, groups=3, dtype=BF16, affine=False),
    "group_norm_first": lambda: group_norm(2, 5, 8, 24, groups=4, first=True),
    "group_norm_of_channels": lambda: group_norm(2, 9, 9, 40, groups=40, dtype=F32),
    "group_norm_of_rows": lambda: group_norm(5, 40, groups=5),
    "group_stats": lambda: group_stats(1, 16, 16, 320, groups=32, chunks=4),
    "group_stats_odd": lambda: group_stats(3, 7, 5, 9, groups=3, chunks=5, dtype=BF16),
    "group_stats_of_channels": lambda: group_stats(2, 9, 9, 40, groups=40, chunks=1, dtype=F32),
    "argmax": lambda: argmax(7, 197, dim=-1, dtype=F32),
    "argmax_classes": lambda: argmax(2, 21, 40, dim=1),
    "argmax_of_ties": lambda: argmax(5, 300, dim=1, dtype=BF16, ties=True),
    "argmax_of_one": lambda: argmax(5, 1, dim=1),
    "merge": lambda: merge_stats(197, 768),
    "merge_odd": lambda: merge_stats(9, 200),
    "unit_rows_30": lambda: unit_rows(3, 5, 30),
    "unit_rows_9": lambda: unit_rows(7, 9, dtype=BF16),
    "gated_sum_of_2": lambda: gated_sum(2, 2, 3, 5, 7),
    "amax_of_4": lambda: pool("amax", 3, 4, 35, dims=(1,), keepdim=False, dtype=BF16),
    "pool_49": lambda: pool("mean", 1, 64, 7, 7, dims=(2, 3), keepdim=False, dtype=F16),
    "pool_tokens": lambda: pool("mean", 2, 197, 96, dims=(1,), keepdim=False, dtype=F16),
    "sum_all": lambda: pool("sum", 9, 33, dims=(), keepdim=False, dtype=F32),
    "sum_bool": lambda: pool("sum", 9, 33, dims=(-1,), keepdim=True, dtype=BOOL),
    "amax_i8": lambda: pool("amax", 3, 33, dims=(0,), keepdim=False, dtype=I8),
    "amax_f16": lambda: pool("amax", 5, 3, 35, dims=(0, 2), keepdim=True, dtype=F16),
    "sum_one": lambda: pool("sum", 5, 1, dims=(1,), keepdim=True, dtype=F32),
    "standardize": lambda: standardize(6, 197, dims=(-1,)),
    "standardize_groups": lambda: standardize(2, 5, 36, 3, dims=(1, 3), dtype=F16),
    "standardize_columns": lambda: standardize(37, 24, dims=(0,), dtype=F16),
}
