"""Products of 8-bit integers with epilogues, and what rounds to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def _weights(b: GraphBuilder, *sizes: int) -> tuple[str, str]:
    """Integers of both signs, extremes among them, and what takes each row of products back."""
    generator = torch.Generator().manual_seed(2)
    w = torch.randint(-128, 128, sizes, generator=generator).to(torch.int8)
    scales = 0.01 * torch.rand(sizes[0], generator=generator) / w[0].numel() ** 0.5
    return b.constant("w", w), b.constant("unscale", scales + 1e-4)


def _epilogue(
    b: GraphBuilder, y: str, unscale: str, dtype: torch.dtype, residual: bool | torch.dtype
) -> Group:
    y = b.add("mul", y, unscale)
    shift = torch.randn(b.specs[y].sizes[-1], generator=torch.Generator().manual_seed(4))
    y = b.add("add", y, b.constant("shift", shift))
    if residual:
        y = b.add("cast", y, dtype=dtype)
        x = b.input("residual", replace(b.specs[y], dtype=dtype if residual is True else residual))
        if residual is torch.int8:
            x = b.add("mul", b.add("cast", x, dtype=F32), other=0.04)
            x = b.add("cast", x, dtype=dtype)
        y = b.add("add", y, x)
    y = b.add("relu", y) if residual else b.add("gelu", y, approximate="none")
    scale, zero = (
        b.constant(name, torch.tensor([number])) for name, number in (("s", 0.033), ("z", -7.0))
    )
    if residual is torch.int8:  # of a calibration
        factor = b.constant("f", torch.linspace(10, 40, b.specs[y].sizes[-1]))
        return Group("int8", b.build([b.add("quantize_affine", y, factor, zero)]))
    rounded = b.add("quantize_int8", y, scale, zero, low=-127 if residual else -128, high=127)
    return Group("int8", b.build([y, rounded] if residual is True else [rounded]))


def linear(
    rows: int,
    k: int,
    columns: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    residual: bool | torch.dtype = True,
) -> Group:
    """What a linear of int8 makes, rounded to int8 for the next; behind a residual, which may be of
    int8, it is stored in `dtype` too, else it goes through a GELU."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), torch.int8))
    w, unscale = _weights(b, columns, k)
    return _epilogue(b, b.add("linear", x, w, out_dtype=F32), unscale, dtype, residual)


def convolution(
    image: tuple[int, ...],
    columns: int,
    kernel: tuple[int, ...],
    dtype: torch.dtype,
    *,
    stride: tuple[int, ...] = (1, 1),
    before: tuple[int, ...] = (1, 1),
    after: tuple[int, ...] = (1, 1),
    dilation: tuple[int, ...] = (1, 1),
    residual: bool = True,
) -> Group:
    """The same of a convolution."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, torch.int8))
    w, unscale = _weights(b, columns, *kernel, image[-1])
    y = b.add("conv", x, w, stride=stride, before=before, after=after, dilation=dilation)
    return _epilogue(b, y, unscale, dtype, residual)


LINEARS: dict[str, Callable[[], Group]] = {
    "int8_fc1": lambda: linear(197, 768, 3072, F16, residual=False),
    "int8_fc2": lambda: linear(197, 3072, 768, F16),
    "int8_one_row": lambda: linear(1, 272, 136, BF16),
    "int8_odd": lambda: linear(33, 144, 104, BF16, residual=False),
    "int8_odd_columns": lambda: linear(19, 80, 90, F16),
    "int8_residual": lambda: linear(75, 128, 96, F16, residual=torch.int8),
    "int8_batch": lambda: linear(18, 64, 72, F32, batch=3),
}
CONVOLUTIONS: dict[str, Callable[[], Group]] = {
    "int8_conv_3x3": lambda: convolution((2, 7, 5, 64), 72, (3, 3), F16),
    "int8_conv_stride": lambda: convolution((2, 9, 8, 128), 64, (3, 3), BF16, stride=(2, 2)),
    "int8_conv_dilated": lambda: convolution(
        (1, 9, 10, 80), 40, (3, 2), F16, before=(2, 1), after=(1, 2), dilation=(2, 3)
    ),
    "int8_conv_1x1_stride": lambda: convolution(
        (1, 9, 11, 256), 32, (1, 1), F16, stride=(2, 2), before=(0, 0), after=(0, 0)
    ),
    "int8_conv_rows_of_16": lambda: convolution(
        (2, 7, 9, 16), 64, (3, 3), F16, before=(0, 0), after=(0, 0), residual=False
    ),
    "int8_conv_wide": lambda: convolution((1, 5, 6, 400), 64, (3, 3), F32, residual=False),
}
