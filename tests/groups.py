"""Fused GEMM groups in the form the passes leave them, for kernel tests and experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.precision import lower_products


def _weights(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def norm_linear(
    rows: int, k: int, columns: int, dtype: torch.dtype, *, gelu: bool = False, batch: int = 1
) -> Group:
    """linear(layer_norm(x)) after the split: the normalisation is in the epilogue."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), dtype))
    stats = b.input("stats", TensorSpec((batch, rows, -(-k // 64), 2), torch.float32))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    column_sums = b.constant("column_sums", b.constants[w].float().sum(1))
    bias = b.constant("bias", _weights(columns, dtype=torch.float32))
    mean, rstd = b.node("merge_stats", [stats], {"columns": k, "eps": 1e-6})
    y = b.add("linear", x, w, out_dtype=torch.float32)
    y = b.add("mul", b.add("sub", y, b.add("mul", mean, column_sums)), rstd)
    y = b.add("add", y, bias)
    if gelu:
        y = b.add("gelu", y, approximate="none")
    return Group("norm_linear", b.build([b.add("cast", y, dtype=dtype)]))


def rms_linear(rows: int, k: int, columns: int, dtype: torch.dtype, *, batch: int = 1) -> Group:
    """linear(root mean square norm of x) after the split, with values of rows made from others."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), dtype))
    stats = b.input("stats", TensorSpec((batch, rows, -(-k // 64), 2), torch.float32))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    mean, rstd = b.node("merge_stats", [stats], {"columns": k, "eps": 1e-6})
    variance = b.add("reciprocal", b.add("mul", rstd, rstd))
    factor = b.add("rsqrt", b.add("add", variance, b.add("mul", mean, mean)))
    y = b.add("mul", b.add("linear", x, w, out_dtype=torch.float32), factor)
    return Group("rms_linear", b.build([b.add("cast", y, dtype=dtype)]))


def residual_linear(
    rows: int, k: int, columns: int, dtype: torch.dtype, *, stats: bool = True, batch: int = 1
) -> Group:
    """A projection, its residual and the statistics that the next norm needs."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), dtype))
    residual = b.input("residual", TensorSpec((batch, rows, columns), dtype))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    bias = b.constant("bias", _weights(columns, dtype=dtype))
    y = b.add("add", b.add("linear", x, w, bias), residual)
    outputs = [y, b.add("row_stats", y)] if stats else [y]
    return Group("residual_linear", b.build(outputs))


def plain_linear(rows: int, k: int, columns: int, dtype: torch.dtype, *, batch: int = 1) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), dtype))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    bias = b.constant("bias", _weights(columns, dtype=dtype))
    return Group("plain_linear", b.build([b.add("linear", x, w, bias)]))


def scaled_linear(
    images: int,
    pixels: int,
    k: int,
    columns: int,
    dtype: torch.dtype,
    *,
    shared: bool = False,
    stats: bool = False,
    permuted: bool = False,
) -> Group:
    """linear(x * gate) + residual, as behind squeeze-and-excitation; the gate is `shared` by all
    images, x lies channels first if it is `permuted`."""
    b = GraphBuilder()
    if permuted:
        x = b.input("x", TensorSpec((images, k, pixels), dtype))
        x = b.add("permute", x, dims=(0, 2, 1))
    else:
        x = b.input("x", TensorSpec((images, pixels, k), dtype))
    gate = b.input("gate", TensorSpec((1 if shared else images, 1, k), dtype))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    bias = b.constant("bias", _weights(columns, dtype=dtype))
    y = b.add("linear", b.add("mul", x, gate), w, bias)
    y = b.add("add", y, b.input("residual", TensorSpec((images, pixels, columns), dtype)))
    return Group("scaled_linear", b.build([y, b.add("row_stats", y)] if stats else [y]))


def fp8_linear(
    rows: int, k: int, columns: int, dtype: torch.dtype, *, norm: bool = False, batch: int = 1
) -> Group:
    """A product of fp8: behind a norm with a GELU, or with a residual and its statistics; the
    result is stored for the next one in fp8 (and, of a residual, as it is)."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), FP8))
    exact = _weights(columns, k, dtype=torch.float32)
    scale = 2.0 ** (448 / exact.abs().amax(1)).log2().floor()
    w = b.constant("w", (exact * scale[:, None]).to(FP8))
    y = b.add("linear", x, w, out_dtype=torch.float32)
    y = b.add("mul", y, b.constant("unscale", 1 / scale))
    bias = b.constant("bias", _weights(columns, dtype=torch.float32))
    outputs = []
    if norm:
        stats = b.input("stats", TensorSpec((batch, rows, -(-k // 64), 2), torch.float32))
        mean, rstd = b.node("merge_stats", [stats], {"columns": k, "eps": 1e-6})
        column_sums = b.constant("column_sums", exact.sum(1))
        y = b.add("mul", b.add("sub", y, b.add("mul", mean, column_sums)), rstd)
        y = b.add("cast", b.add("gelu", b.add("add", y, bias), approximate="none"), dtype=dtype)
    else:
        y = b.add("cast", b.add("add", y, bias), dtype=dtype)
        y = b.add("add", y, b.input("residual", TensorSpec((batch, rows, columns), dtype)))
        outputs = [y, b.add("row_stats", y)]
    quantized = b.add("quantize", y, b.constant("scale", torch.tensor([32.0])))
    return Group("fp8_linear", b.build([*outputs, quantized]))


def patch_embedding(image: int, patch: int, columns: int, dtype: torch.dtype) -> Group:
    """A patch embedding: a GEMM whose A is gathered from the image."""
    b = GraphBuilder()
    side = image // patch
    x = b.input("x", TensorSpec((1, 3, image, image), dtype))
    w = b.constant("w", _weights(columns, 3 * patch * patch, dtype=dtype))
    bias = b.constant("bias", _weights(columns, dtype=dtype))
    y = b.add("reshape", x, shape=(1, 3, side, patch, side, patch))
    y = b.add("permute", y, dims=(0, 2, 4, 1, 3, 5))
    y = b.add("reshape", y, shape=(1, side * side, 3 * patch * patch))
    return Group("patch_embedding", b.build([b.add("linear", y, w, bias)]))


def batched_matmul(
    batch: int,
    rows: int,
    k: int,
    columns: int,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    shared: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Group:
    """matmul(a, b); with `transposed` b is stored as (columns, k), with `shared` there is one b."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, 2, rows, k), dtype))
    products = (1, 1) if shared else (batch, 2)
    shape = (*products, columns, k) if transposed else (*products, k, columns)
    y = b.input("y", TensorSpec(shape, dtype))
    other = b.add("permute", y, dims=(0, 1, 3, 2)) if transposed else y
    wide = {} if out_dtype is None else {"out_dtype": out_dtype}
    return Group("batched_matmul", b.build([b.add("relu", b.add("matmul", x, other, **wide))]))


def transposed_linear(k: int, rows: int, columns: int, dtype: torch.dtype) -> Group:
    """linear of x^T, which lies in rows of K, as a mixer has it; its bias and a GELU."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, k, rows), dtype))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    y = b.add("linear", b.add("permute", x, dims=(0, 2, 1)), w)
    y = b.add("add", y, b.constant("bias", _weights(columns, dtype=dtype)))
    return Group("transposed_linear", b.build([b.add("gelu", y, approximate="none")]))


def window_linear(
    image: tuple[int, int, int, int], window: tuple[int, int], columns: int, dtype: torch.dtype
) -> Group:
    """linear of the pixels of windows that an image is cut into, window by window, and a ReLU."""
    b = GraphBuilder()
    n, height, width, k = image
    (high, wide), w = window, b.constant("w", _weights(columns, k, dtype=dtype))
    y = b.add("reshape", b.input("x", TensorSpec(image, dtype)),
              shape=(n, height // high, high, width // wide, wide, k))  # fmt: skip
    y = b.add("permute", y, dims=(0, 1, 3, 2, 4, 5))
    y = b.add("reshape", y, shape=(n * height * width // (high * wide), high, wide, k))
    return Group("window_linear", b.build([b.add("relu", b.add("linear", y, w))]))


def tf32(group: Group) -> Group:
    """`group`, which is f32, with its products in tf32."""
    return Group(f"tf32 {group.name}", lower_products(group.graph, "tf32"))


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn


def rotary_linear(
    tokens: int,
    k: int,
    parts: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    *,
    norm: bool = False,
    batch: int = 1,
) -> Group:
    """Queries, keys and what else reads one tensor, of which the epilogue rotates all but the last
    part and the first token, stored head by head."""
    b, columns = GraphBuilder(), parts * heads * width
    x = b.input("x", TensorSpec((batch, tokens, k), dtype))
    w = b.constant("w", _weights(columns, k, dtype=dtype))
    if norm:
        stats = b.input("stats", TensorSpec((batch, tokens, -(-k // 64), 2), torch.float32))
        mean, rstd = b.node("merge_stats", [stats], {"columns": k, "eps": 1e-6})
        column_sums = b.constant("column_sums", b.constants[w].float().sum(1))
        y = b.add("linear", x, w, out_dtype=torch.float32)
        y = b.add("mul", b.add("sub", y, b.add("mul", mean, column_sums)), rstd)
        y = b.add("cast", y, dtype=dtype)
    else:
        y = b.add("linear", x, w, b.constant("bias", _weights(columns, dtype=dtype)))
    y = b.add("reshape", y, shape=(batch, tokens, parts, heads, width))
    angle = _weights(tokens, parts, 1, width, dtype=torch.float32)[None] * 30
    turned = torch.ones(1, tokens, parts, 1, width, dtype=torch.bool)
    turned[:, :1] = turned[:, :, -1] = False
    cos = b.constant("cos", torch.where(turned, angle.cos(), 1.0).to(dtype))
    sin = b.constant("sin", torch.where(turned, angle.sin(), 0.0).to(dtype))
    y = b.add("rotate", y, b.add("swap_pairs", y), cos, sin)
    return Group("rotary_linear", b.build([b.add("permute", y, dims=(2, 0, 3, 1, 4))]))


GEMM_CASES: dict[str, Callable[[], Group]] = {
    "qkv": lambda: norm_linear(197, 768, 2304, F16),
    "fc1": lambda: norm_linear(197, 768, 3072, F16, gelu=True),
    "fc1_huge": lambda: norm_linear(257, 1280, 5120, F16, gelu=True),
    "norm_odd": lambda: norm_linear(7, 200, 1000, BF16, gelu=True),
    "projection": lambda: residual_linear(197, 768, 768, F16),
    "fc2": lambda: residual_linear(197, 3072, 768, F16),
    "one_row": lambda: residual_linear(1, 768, 768, BF16),
    "residual_odd": lambda: residual_linear(33, 136, 104, F16),
    "batch": lambda: residual_linear(50, 64, 192, F16, batch=3),
    "head": lambda: plain_linear(1, 768, 1000, F16),
    "narrow": lambda: plain_linear(100, 256, 4, F16),
    "odd_columns": lambda: plain_linear(19, 72, 91, F16),
    "patch_16": lambda: patch_embedding(224, 16, 768, F16),
    "patch_14": lambda: patch_embedding(56, 14, 128, F16),
    "rms": lambda: rms_linear(37, 128, 48, F16),
    "rms_batch": lambda: rms_linear(19, 72, 40, BF16, batch=2),
    "rms_one_row": lambda: rms_linear(1, 200, 24, F16),
    "rotary": lambda: rotary_linear(37, 128, 3, 2, 64, F16, norm=True),
    "rotary_batch": lambda: rotary_linear(19, 72, 2, 3, 32, BF16, batch=2),
    "rotary_odd": lambda: rotary_linear(11, 40, 2, 3, 10, F16),
    "rotary_one_row": lambda: rotary_linear(1, 64, 2, 1, 16, F16),
    "windows": lambda: window_linear((2, 12, 15, 72), (4, 5), 40, F16),
    "windows_in_a_row": lambda: window_linear((1, 3, 35, 200), (3, 7), 104, BF16),
    "pixels_down": lambda: window_linear((1, 3, 35, 64), (3, 1), 24, F16),
    "bmm": lambda: batched_matmul(3, 33, 64, 40, F16),
    "bmm_tails": lambda: batched_matmul(2, 65, 200, 136, BF16),
    "transposed_a": lambda: transposed_linear(200, 72, 104, F16),
    "bmm_odd": lambda: batched_matmul(2, 17, 197, 197, BF16),
    "bmm_transposed": lambda: batched_matmul(2, 65, 64, 72, F16, transposed=True),
    "bmm_wide": lambda: batched_matmul(2, 33, 80, 48, F16, transposed=True, out_dtype=F32),
    "bmm_shared": lambda: batched_matmul(2, 33, 64, 48, F16, transposed=True, shared=True),
    "tf32_fc1": lambda: tf32(norm_linear(197, 768, 3072, F32, gelu=True)),
    "tf32_projection": lambda: tf32(residual_linear(197, 768, 768, F32)),
    "tf32_odd": lambda: tf32(plain_linear(19, 68, 91, F32)),
    "tf32_patch": lambda: tf32(patch_embedding(56, 14, 128, F32)),
    "tf32_bmm": lambda: tf32(batched_matmul(2, 17, 61, 72, F32)),
    "fp8_fc1": lambda: fp8_linear(197, 768, 3072, F16, norm=True),
    "fp8_fc2": lambda: fp8_linear(197, 3072, 768, F16),
    "fp8_one_row": lambda: fp8_linear(1, 272, 136, BF16),
    "fp8_odd": lambda: fp8_linear(33, 144, 104, BF16, norm=True),
    "fp8_odd_columns": lambda: fp8_linear(19, 80, 90, F16),
    "fp8_batch": lambda: fp8_linear(18, 64, 72, F16, batch=3),
    "fp32_fc1": lambda: norm_linear(197, 768, 3072, F32, gelu=True),
    "fp32_odd": lambda: plain_linear(19, 69, 91, F32),
    "fp32_patch": lambda: patch_embedding(56, 14, 128, F32),
    "fp32_bmm": lambda: batched_matmul(2, 17, 61, 72, F32, transposed=True),
}


SCALED_CASES: dict[str, Callable[[], Group]] = {
    "scaled": lambda: scaled_linear(1, 49, 72, 40, F16),
    "scaled_images": lambda: scaled_linear(5, 7, 96, 48, F16),
    "scaled_pixel": lambda: scaled_linear(19, 1, 24, 33, F16),
    "scaled_bf16": lambda: scaled_linear(3, 50, 136, 64, BF16, stats=True),
    "scaled_shared": lambda: scaled_linear(3, 33, 40, 24, BF16, shared=True),
    "scaled_odd": lambda: scaled_linear(2, 13, 37, 5, F16),
    "scaled_fp32": lambda: scaled_linear(3, 11, 69, 24, F32),
    "scaled_tf32": lambda: tf32(scaled_linear(2, 40, 64, 24, F32)),
    "scaled_permuted": lambda: scaled_linear(2, 64, 48, 24, F16, permuted=True),
}


def convolution(
    image: tuple[int, ...],
    columns: int,
    kernel: tuple[int, ...],
    dtype: torch.dtype,
    *,
    stride: tuple[int, ...] = (),
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    residual: bool = True,
    channels: tuple[int, int] | None = None,
    groups: int = 1,
    stats: bool = False,
) -> Group:
    """relu(conv(x) + bias + residual); `channels` are those of a larger image that it reads. With
    `stats` it also has what the next norm needs of its pixels."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, dtype))
    if channels is not None:
        x = b.add("slice", x, dim=len(image) - 1, start=channels[0], end=channels[1])
    depth, ones = b.specs[x].sizes[-1] // groups, (1,) * len(kernel)
    w = b.constant("w", _weights(columns, *kernel, depth, dtype=dtype) / math.prod(kernel))
    op, cut = ("conv", {}) if groups == 1 else ("grouped_conv", {"groups": groups})
    before = before or ones
    y = b.add(op, x, w, stride=stride or ones, before=before, after=after or before,
              dilation=dilation or ones, **cut)  # fmt: skip
    y = b.add("add", y, b.constant("bias", _weights(columns, dtype=dtype)))
    if residual:
        y = b.add("add", y, b.input("residual", b.specs[y]))
    y = b.add("relu", y)
    return Group("convolution", b.build([y, b.add("row_stats", y)] if stats else [y]))


CONV_CASES: dict[str, Callable[[], Group]] = {
    "conv_3x3": lambda: convolution((2, 7, 5, 64), 72, (3, 3), F16),
    "conv_stride": lambda: convolution((2, 9, 8, 64), 64, (3, 3), BF16, stride=(2, 2)),
    "conv_1x1_stride": lambda: convolution(
        (1, 9, 11, 128), 32, (1, 1), F16, stride=(2, 2), before=(0, 0)
    ),
    "conv_dilated": lambda: convolution(
        (1, 9, 10, 72), 40, (3, 2), F16, before=(2, 1), after=(1, 2), dilation=(2, 3)
    ),
    "conv_far_border": lambda: convolution(
        (1, 3, 4, 64), 8, (5, 5), F16, before=(4, 3), after=(2, 4), stride=(3, 2)
    ),
    "conv_wide_channels": lambda: convolution((1, 5, 6, 200), 64, (3, 3), F16, residual=False),
    "conv_of_some_channels": lambda: convolution(
        (2, 5, 6, 192), 64, (2, 2), F16, before=(0, 0), channels=(64, 128)
    ),
    "conv_few_channels": lambda: convolution((1, 8, 9, 3), 16, (3, 3), F16, stride=(2, 2)),
    "conv_rows_of_16": lambda: convolution(
        (2, 7, 9, 16), 64, (4, 4), F16, before=(0, 0), residual=False
    ),
    "conv_rows_of_48": lambda: convolution((1, 5, 6, 48), 40, (2, 2), BF16, before=(0, 0)),
    "conv_rows_as_wide_as_the_image": lambda: convolution(
        (2, 5, 3, 24), 32, (3, 3), F16, before=(1, 0)
    ),
    "conv_odd": lambda: convolution((1, 6, 7, 5), 7, (3, 3), BF16, stride=(1, 2)),
    "conv_tf32": lambda: tf32(convolution((2, 9, 8, 48), 64, (3, 3), F32, stride=(2, 2))),
    "conv_fp32": lambda: convolution((2, 9, 8, 48), 64, (3, 3), F32, stride=(2, 2)),
    "conv_one_pixel": lambda: convolution((1, 1, 1, 64), 64, (3, 3), F16),
    "conv_3x3x3": lambda: convolution((2, 4, 7, 5, 64), 72, (3, 3, 3), F16),
    "conv_3d_stride": lambda: convolution(
        (2, 7, 6, 9, 72), 64, (3, 3, 3), BF16, stride=(2, 2, 1), residual=False
    ),
    "conv_3d_uneven": lambda: convolution(
        (2, 5, 4, 6, 40),
        40,
        (2, 3, 2),
        F16,
        stride=(1, 2, 3),
        before=(1, 2, 0),
        after=(0, 1, 2),
        dilation=(3, 1, 2),
    ),
    "conv_3d_rows_of_16": lambda: convolution(
        (1, 5, 7, 9, 16), 64, (3, 4, 4), F16, stride=(2, 1, 1), before=(1, 0, 0)
    ),
    "conv_3d_odd": lambda: convolution((2, 3, 5, 4, 5), 7, (3, 3, 3), F16, stride=(1, 2, 1)),
    "conv_3d_tf32": lambda: tf32(convolution((1, 3, 5, 6, 36), 24, (3, 3, 3), F32)),
    "conv_3d_one_pixel": lambda: convolution((1, 1, 1, 1, 64), 64, (3, 3, 3), F16),
}

GROUPED_CASES: dict[str, Callable[[], Group]] = {
    "groups_of_4": lambda: convolution((2, 9, 7, 32), 32, (3, 3), F16, groups=8),
    "groups_of_16": lambda: convolution((1, 9, 8, 48), 48, (3, 3), BF16, stride=(2, 2), groups=3),
    "groups_of_1x1": lambda: convolution((1, 7, 9, 60), 120, (1, 1), F16, before=(0, 0), groups=3),
    "groups_dilated": lambda: convolution(
        (1, 9, 10, 80), 48, (3, 2), F16, before=(2, 1), after=(1, 2), dilation=(2, 3), groups=2
    ),
    "groups_of_odd_channels": lambda: convolution(
        (1, 6, 7, 15), 21, (3, 3), F16, stride=(1, 2), groups=3
    ),
    "groups_of_more_columns_than_a_tile": lambda: convolution(
        (1, 5, 6, 32), 600, (3, 3), F16, residual=False, groups=2
    ),
    "groups_that_widen": lambda: convolution((1, 6, 5, 6), 12, (3, 3), F16, groups=6),
    "groups_of_some_channels": lambda: convolution(
        (2, 5, 6, 96), 64, (2, 2), F16, before=(0, 0), channels=(32, 64), groups=4
    ),
    "groups_3d": lambda: convolution(
        (2, 4, 5, 6, 48), 24, (3, 2, 3), F16, stride=(2, 1, 1), residual=False, groups=3
    ),
    "groups_of_64": lambda: convolution((2, 9, 7, 128), 80, (3, 3), F16, stride=(2, 1), groups=2),
    "groups_of_64_1x1": lambda: convolution(
        (1, 5, 4, 192), 792, (1, 1), BF16, before=(0, 0), groups=3
    ),
    "groups_of_64_3d": lambda: convolution((1, 3, 5, 4, 128), 48, (2, 2, 2), F16, groups=2),
    "groups_of_32_tf32": lambda: tf32(convolution((1, 6, 5, 64), 48, (3, 3), F32, groups=2)),
    "groups_tf32": lambda: tf32(convolution((2, 9, 8, 48), 24, (3, 3), F32, groups=2)),
    "groups_fp32": lambda: convolution((2, 9, 8, 48), 24, (3, 3), F32, groups=4),
}


def joined(
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    kernel: tuple[int, ...] = (),
    *,
    shape: tuple[int, ...] = (),
    cut: Mapping[int, tuple[int, int, int]] | None = None,
    constant: int | None = None,
    expanded: int | None = None,
    again: int | None = None,
    stats: bool = False,
    **windows: tuple[int, ...],
) -> Group:
    """relu(product(concat(pieces)) + bias + residual), as a kernel reads it that has no concat.

    Args:
        sizes: of a piece, without its channels.
        widths: channels of each piece.
        columns: of the result.
        dtype: of everything.
        kernel: of a convolution; of none a linear is the product.
        shape: in which the product sees the concat, without the channels.
        cut: pieces that are part of a larger value: of which size along which dimension, and
            where they begin there.
        constant: the piece that is a constant.
        expanded: the piece whose pixels are all one.
        again: the piece that is the first once more.
        stats: whether the next norm's statistics end the group.
        windows: stride, before, after and dilation of the convolution.
    """
    b, pieces = GraphBuilder(), []
    for number, width in enumerate(widths):
        whole = [*sizes, width] if number != expanded else [1] * len(sizes) + [width]
        dim, size, start = (cut or {}).get(number, (0, whole[0], 0))
        end, whole[dim] = start + whole[dim], size
        if number == again:
            pieces.append(pieces[0])
            continue
        if number == constant:
            x = b.constant(f"x{number}", _weights(*whole, dtype=torch.float32).to(dtype))
        else:
            x = b.input(f"x{number}", TensorSpec(tuple(whole), dtype))
        if size > end - start:
            x = b.add("slice", x, dim=dim, start=start, end=end)
        if number == expanded:
            x = b.add("expand", x, shape=(*sizes, width))
        pieces.append(x)
    x, depth = b.add("concat", *pieces, dim=len(sizes)), sum(widths)
    if shape:
        x = b.add("reshape", x, shape=(*shape, depth))
    if kernel:
        ones = (1,) * len(kernel)
        given = {"stride": ones, "before": ones, "dilation": ones, **windows}
        w = b.constant("w", _weights(columns, *kernel, depth, dtype=dtype) / math.prod(kernel))
        y = b.add("conv", x, w, **{"after": given["before"], **given})
    else:
        y = b.add("linear", x, b.constant("w", _weights(columns, depth, dtype=dtype)))
    y = b.add("add", y, b.constant("bias", _weights(columns, dtype=dtype)))
    y = b.add("relu", b.add("add", y, b.input("residual", b.specs[y])))
    return Group("joined", b.build([y, b.add("row_stats", y)] if stats else [y]))


JOINED_CASES: dict[str, Callable[[], Group]] = {
    "joined_2": lambda: joined((2, 35), (64, 128), 72, F16),
    "joined_3": lambda: joined((2, 35), (64, 96, 8), 72, BF16),
    "joined_8": lambda: joined((3, 17), (8, 16, 72, 24, 136, 40, 64, 32), 40, F16),
    "joined_one_row": lambda: joined((1,), (40, 72), 24, F16),
    "joined_odd_columns": lambda: joined((19,), (72, 16), 91, F16),
    "joined_stats": lambda: joined((2, 19), (40, 80), 128, F16, stats=True),
    "joined_channels": lambda: joined((33,), (64, 40), 48, F16, cut={0: (1, 192, 64)}),
    "joined_tokens": lambda: joined((2, 9), (32, 72), 48, F16, cut={1: (1, 10, 1)}),
    "joined_constant": lambda: joined((2, 9), (32, 72, 64), 48, BF16, constant=1),
    "joined_expanded": lambda: joined((2, 9), (32, 72), 48, F16, expanded=1),
    "joined_again": lambda: joined((21,), (32, 72, 32), 48, F16, again=2),
    "joined_reshaped": lambda: joined((1, 5, 7), (64, 24), 48, F16, shape=(35,)),
    "joined_fp32": lambda: joined((2, 20), (36, 20), 24, F32),
    "joined_tf32": lambda: tf32(joined((40,), (36, 20, 64), 24, F32)),
    "joined_conv": lambda: joined((2, 7, 9), (64, 64), 40, F16, (3, 3)),
    "joined_conv_stride": lambda: joined(
        (1, 7, 9), (24, 72, 8), 64, BF16, (3, 3), stride=(2, 1)
    ),
    "joined_conv_dilated": lambda: joined(
        (1, 9, 10), (40, 72), 40, F16, (3, 2), before=(2, 1), after=(1, 2), dilation=(2, 3)
    ),
    "joined_conv_1x1_stride": lambda: joined(
        (1, 9, 11), (128, 72), 32, F16, (1, 1), stride=(2, 2), before=(0, 0)
    ),
    "joined_conv_8": lambda: joined((1, 5, 6), (8, 16, 8, 24, 8, 40, 8, 72), 24, F16, (3, 3)),
    "joined_conv_4x4": lambda: joined((2, 7, 9), (16, 8), 64, F16, (4, 4), before=(0, 0)),
    "joined_conv_channels": lambda: joined(
        (2, 5, 6), (72, 64), 64, BF16, (3, 3), cut={1: (3, 192, 64)}
    ),
    "joined_conv_cropped": lambda: joined(
        (2, 5, 6), (40, 64), 32, F16, (3, 3), cut={1: (1, 9, 2)}
    ),
    "joined_conv_constant": lambda: joined((1, 5, 6), (64, 16), 32, F16, (3, 3), constant=0),
    "joined_conv_again": lambda: joined((1, 5, 6), (24, 40, 24), 32, F16, (3, 3), again=2),
    "joined_conv_reshaped": lambda: joined(
        (2, 42), (64, 24), 32, F16, (3, 3), shape=(2, 7, 6)
    ),
    "joined_conv_stats": lambda: joined((1, 7, 6), (64, 40), 128, F16, (3, 3), stats=True),
    "joined_conv_fp32": lambda: joined((1, 5, 6), (8, 36), 24, F32, (3, 3)),
    "joined_conv_tf32": lambda: tf32(joined((1, 5, 6), (48, 20), 24, F32, (3, 3), stride=(1, 2))),
    "joined_conv_3d": lambda: joined((1, 3, 5, 6), (32, 64, 8), 32, BF16, (3, 3, 3)),
    "joined_conv_3d_uneven": lambda: joined(
        (2, 5, 4, 6), (40, 72), 40, F16, (2, 3, 2),
        stride=(1, 2, 3), before=(1, 2, 0), after=(0, 1, 2), dilation=(3, 1, 2),
    ),
}  # fmt: skip
