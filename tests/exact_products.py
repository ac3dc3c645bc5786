"""Products of floats and inputs that are hard to multiply, for tests of their accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from tests import groups

F32 = torch.float32


def _with_outliers(x: Tensor) -> Tensor:
    """Every eleventh value of a row a thousand times as large."""
    large = torch.arange(x.shape[-1], device=x.device) % 11 == 3
    return torch.where(large, 1000 * x, x)


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
