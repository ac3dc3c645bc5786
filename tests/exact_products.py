"""Products of floats and inputs that are hard to multiply, for tests of their accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from tests import groups

F32 = torch.float32


def _with_outliers(x: Tensor) -> Tensor:
    """Every eleventh value of a row a thousand times as large."""
    large = torch.arange(x.shape[-1], device=x.device) % 11 == 3
    return torch.where(large, 1000 * x, x)


def transform(
    batch: int, rows: int, k: int, columns: int, dtype: torch.dtype = F32, *, left: bool = False
) -> Group:
    """Products of one matrix with images (k, columns), or, `left`, of these turned with one each:
    operands that lie in rows of K."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((batch, k, columns), dtype))
    if left:
        w = b.input("w", TensorSpec((batch, rows, k), dtype))
        turned = (b.add("permute", each, dims=(0, 2, 1)) for each in (x, w))
        return Group("transform", b.build([b.add("relu", b.add("matmul", *turned))]))
    w = b.input("w", TensorSpec((rows, k), dtype))
    return Group("transform", b.build([b.add("relu", b.add("matmul", w, x))]))


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_drawn": lambda x: x,
    "large_mean": lambda x: x + 100,
    "outliers": _with_outliers,
    "large": lambda x: x * 1e15,
    "small": lambda x: x * 1e-15,
}
CASES: dict[str, Callable[[], Group]] = {
    "linear": lambda: groups.plain_linear(19, 200, 40, F32),
    "long_sums": lambda: groups.plain_linear(16, 3072, 16, F32),
    "matmul": lambda: groups.batched_matmul(1, 17, 60, 40, F32, transposed=True),
    "transform": lambda: transform(3, 70, 52, 132),
    "transform_of_pairs": lambda: transform(2, 17, 200, 48),
    "turned_images": lambda: transform(2, 20, 36, 44, left=True),
    "convolution": lambda: groups.convolution((1, 6, 5, 40), 24, (3, 3), F32, residual=False),
}
"""Each reads `x`, and gives one output."""


def error(group: Group, values: Mapping[str, Tensor], output: Tensor | None = None) -> float:
    """RMSE against fp64, of torch's fp32 if no output is given."""
    args = [values[name] for name in group.graph.inputs]
    (exact,) = interpret(group.graph, args, dtype=torch.float64)
    if output is None:
        (output,) = interpret(group.graph, args)
    return float((output.double() - exact).square().mean().sqrt())
