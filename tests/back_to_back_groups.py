"""Groups of two linears back to back, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.target import TARGETS

F16, BF16 = torch.float16, torch.bfloat16
FEW = replace(TARGETS["sm_90a"], sm_count=2)
"""So few multiprocessors that a block has several tiles."""


def _constant(b: GraphBuilder, name: str, *sizes: int, dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(sum(sizes))
    scale = sizes[-1] ** -0.5 if len(sizes) > 1 else 1.0
    return b.constant(name, (torch.randn(sizes, generator=generator) * scale).to(dtype))


def bottleneck(
    rows: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    residuals: int = 1,
    shifted: bool = False,
    stored: bool = True,
    of_images: bool = False,
) -> Group:
    """relu(linear(y)) and y = relu(linear(x) + r), of `sizes` columns of x, y and the result.

    With several `residuals` each is added; where they are `shifted`, they begin four columns behind
    the first of their rows. With `of_images` rows are pixels of two images.
    """
    k, middle, columns = sizes
    b = GraphBuilder()
    x = b.input("x", TensorSpec((rows, k), dtype))
    bias = _constant(b, "bias", middle, dtype=dtype)
    y = b.add("linear", x, _constant(b, "w", middle, k, dtype=dtype), bias)
    for i in range(residuals):
        r = b.input(f"r{i}", TensorSpec((rows, middle + 4 * shifted), dtype))
        if shifted:
            r = b.add("slice", r, dim=1, start=4, end=middle + 4)
        y = b.add("add", y, r)
    y = read = b.add("relu", y)
    if of_images:
        read = b.add("reshape", y, shape=(2, rows // 2, middle))
    second = _constant(b, "second_bias", columns, dtype=dtype)
    z = b.add("linear", read, _constant(b, "v", columns, middle, dtype=dtype), second)
    z = b.add("relu", z)
    return Group("bottleneck", b.build([y, z] if stored else [z]))


def perceptron(
    rows: int, sizes: tuple[int, int, int], dtype: torch.dtype, *, stats: bool = True
) -> Group:
    """x + linear(gelu(linear(layer_norm(x)))), with the norm split, and its row statistics."""
    k, middle, columns = sizes
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, rows, k), dtype))
    given = b.input("stats", TensorSpec((1, rows, -(-k // 64), 2), torch.float32))
    residual = b.input("r", TensorSpec((1, rows, columns), dtype))
    w = _constant(b, "w", middle, k, dtype=dtype)
    column_sums = b.constant("column_sums", b.constants[w].float().sum(1))
    mean, rstd = b.node("merge_stats", [given], {"columns": k, "eps": 1e-6})
    y = b.add("linear", x, w, out_dtype=torch.float32)
    y = b.add("mul", b.add("sub", y, b.add("mul", mean, column_sums)), rstd)
    y = b.add("add", y, _constant(b, "bias", middle, dtype=torch.float32))
    y = b.add("cast", b.add("gelu", y, approximate="none"), dtype=dtype)
    z = b.add("linear", y, _constant(b, "v", columns, middle, dtype=dtype))
    z = b.add("add", b.add("mul", z, _constant(b, "scale", columns, dtype=dtype)), residual)
    return Group("perceptron", b.build([z, b.add("row_stats", z)] if stats else [z]))


def quotient(rows: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> Group:
    """linear(linear(x) / d), with a divisor of each column: beyond the last, it is no number."""
    k, middle, columns = sizes
    b = GraphBuilder()
    x = b.input("x", TensorSpec((rows, k), dtype))
    y = b.add("linear", x, _constant(b, "w", middle, k, dtype=dtype))
    divisors = torch.linspace(1, 4, middle).to(dtype)
    y = b.add("div", y, b.constant("divisors", divisors))
    z = b.add("linear", y, _constant(b, "v", columns, middle, dtype=dtype))
    return Group("quotient", b.build([z]))


CASES: dict[str, Callable[[], Group]] = {
    "bottleneck": lambda: bottleneck(650, (64, 256, 64), F16),
    "wider": lambda: bottleneck(300, (128, 512, 128), BF16),
    "of images": lambda: bottleneck(394, (64, 256, 128), F16, of_images=True),
    "odd sizes": lambda: bottleneck(261, (72, 200, 40), F16),
    "few between": lambda: bottleneck(300, (144, 24, 144), BF16),
    "no residual": lambda: bottleneck(300, (64, 136, 64), F16, residuals=0),
    "two residuals": lambda: bottleneck(261, (64, 72, 64), F16, residuals=2),
    "shifted residual": lambda: bottleneck(261, (64, 72, 64), F16, shifted=True),
    "not stored": lambda: bottleneck(300, (64, 128, 96), F16, stored=False),
    "neither": lambda: bottleneck(200, (200, 72, 256), BF16, residuals=0, stored=False),
    "perceptron": lambda: perceptron(520, (96, 384, 96), F16),
    "perceptron of 192": lambda: perceptron(261, (192, 256, 192), BF16),
    "perceptron without statistics": lambda: perceptron(140, (40, 168, 40), F16, stats=False),
    "one part between": lambda: perceptron(130, (40, 24, 40), F16, stats=False),
    "quotient": lambda: quotient(261, (64, 72, 64), BF16),
}
