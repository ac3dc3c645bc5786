"""Gated linear units whose value and gate are neighbouring columns, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from tests.groups import tf32

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * (0.05 if len(shape) == 2 else 1.0)


def gated(
    rows: int, k: int, columns: int, dtype: torch.dtype, *, batch: int = 1, act: str = "silu",
    norm: bool = False, bias: bool = True, factors: bool = False, heads: int = 0, fp8: bool = False,
) -> Group:  # fmt: skip
    """The result is [batch, rows, columns]; with `heads` it is stored head by head, with `fp8`
    operands and result are, and `factors` are of each column of the gate."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, rows, k), FP8 if fp8 else dtype))
    weights = _random(2 * columns, k)
    w = b.constant("w", (64 * weights).to(FP8) if fp8 else weights.to(dtype))
    if fp8:
        y = b.add("linear", x, w, out_dtype=F32)
        y = b.add("cast", b.add("mul", y, other=1 / 64), dtype=dtype)
    elif norm:
        stats = b.input("stats", TensorSpec((batch, rows, -(-k // 64), 2), F32))
        mean, rstd = b.node("merge_stats", [stats], {"columns": k, "eps": 1e-6})
        sums = b.constant("sums", b.constants[w].float().sum(1))
        y = b.add("linear", x, w, out_dtype=F32)
        y = b.add("mul", b.add("sub", y, b.add("mul", mean, sums)), rstd)
        y = b.add("cast", y, dtype=dtype)
    else:
        y = b.add("linear", x, w, *([b.constant("bias", _random(2 * columns).to(dtype))] * bias))
    gate = b.add("swap_pairs", y)
    if factors:
        gate = b.add("mul", gate, b.constant("factors", _random(2 * columns).to(dtype)))
    gate = b.add(act, gate, **({"approximate": "none"} if act == "gelu" else {}))
    result = b.add("mul", y, gate)
    if fp8:
        result = b.add("quantize", result, b.constant("scale", torch.tensor([32.0])))
    result = b.add("slice", result, dim=2, start=0, end=2 * columns, step=2)
    if heads:
        shape = (batch, rows, heads, columns // heads)
        result = b.add("permute", b.add("reshape", result, shape=shape), dims=(0, 2, 1, 3))
    return Group("gated", b.build([result]))


CASES: dict[str, Callable[[], Group]] = {
    "norm": lambda: gated(70, 136, 96, F16, act="gelu", norm=True),
    "bf16": lambda: gated(19, 72, 20, BF16, batch=2, bias=False),
    "factors": lambda: gated(21, 64, 52, F16, factors=True),
    "heads": lambda: gated(19, 72, 96, BF16, batch=2, heads=6),
    "one_row": lambda: gated(1, 200, 60, F16, act="relu"),
    "few_rows": lambda: gated(7, 136, 32, BF16, norm=True),
    "tf32": lambda: tf32(gated(37, 68, 48, F32, act="gelu")),
    "fp32": lambda: gated(19, 36, 80, F32),
    "fp8": lambda: gated(37, 144, 48, F16, fp8=True),
}
"""Of sketches on all architectures, at sizes that no tile divides."""
