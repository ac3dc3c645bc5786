"""fp32 as three products of tf32: as accurate as torch's fp32, and right where it is no number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from gtco.check import BOUNDS
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import attention_groups, groups
from tests.kernel_checks import defaults, inputs_of

pytestmark = pytest.mark.compiler

F32 = torch.float32
LARGEST = torch.finfo(F32).max


def sketch_of(group: Group) -> Sketch:
    attends = any(node.op == "attention" for node in group.nodes)
    return (Attention if attends else GemmMma)(group, TARGETS["sm_80"])


def output(group: Group, values: Mapping[str, Tensor]) -> Tensor:
    """Of the sketch's first default."""
    return next(iter(run_on_host(next(defaults(sketch_of(group))), group, values).values()))


def errors(group: Group, values: Mapping[str, Tensor]) -> tuple[float, float]:
    """RMSE against fp64, of the kernel and of torch's fp32."""
    args = [values[name] for name in group.graph.inputs]
    (exact,) = interpret(group.graph, args, dtype=torch.float64)
    (eager,) = interpret(group.graph, args)
    return tuple(
        float((each.double() - exact).square().mean().sqrt())
        for each in (output(group, values), eager)
    )  # type: ignore[return-value]


def with_outliers(x: Tensor) -> Tensor:
    """Every eleventh value of a row a thousand times as large."""
    large = torch.arange(x.shape[-1]) % 11 == 3
    return torch.where(large, 1000 * x, x)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_drawn": lambda x: x,
    "large_mean": lambda x: x + 100,
    "outliers": with_outliers,
    "large": lambda x: x * 1e15,
    "small": lambda x: x * 1e-15,
}
CASES: dict[str, Callable[[], Group]] = {
    "linear": lambda: groups.plain_linear(19, 200, 40, F32),
    "long_sums": lambda: groups.plain_linear(16, 3072, 16, F32),
    "matmul": lambda: groups.batched_matmul(1, 17, 61, 40, F32),
    "convolution": lambda: groups.convolution((1, 6, 5, 40), 24, (3, 3), F32, residual=False),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("case", CASES)
def test_products_are_as_accurate_as_torch(case: str, inputs: str) -> None:
    group = CASES[case]()
    values = inputs_of(group)
    values["x"] = INPUTS[inputs](values["x"])
    ours, eager = errors(group, values)
    assert ours <= BOUNDS[F32].multiple * eager


@pytest.mark.parametrize("inputs", ["as_drawn", "large_mean", "outliers"])
def test_attention_is_as_accurate_as_torch(inputs: str) -> None:
    group = attention_groups.cross((2,), 21, 150, 64, dtype=F32)
    values = inputs_of(group)
    for name in "kv":
        values[name] = INPUTS[inputs](values[name])
    ours, eager = errors(group, values)
    assert ours <= BOUNDS[F32].multiple * eager


@pytest.mark.parametrize(
    "group",
    [
        groups.tf32(groups.plain_linear(19, 200, 40, F32)),
        groups.tf32(attention_groups.cross((2,), 21, 150, 64, dtype=F32)),
    ],
    ids=["linear", "attention"],
)
def test_one_product_of_tf32_is_not_as_accurate(group: Group) -> None:
    plain = Group(group.name, groups.without_products(group.graph))
    values = inputs_of(group)
    args = [values[name] for name in group.graph.inputs]
    (exact,) = interpret(plain.graph, args, dtype=torch.float64)
    off = float((output(group, values).double() - exact).square().mean().sqrt())
    assert off > 50 * errors(plain, values)[1]


def test_what_is_no_number_is_torchs() -> None:
    """Infinities, NaN, and the largest floats, which are nearer to infinity than to a tf32."""
    group = groups.plain_linear(8, 72, 40, F32)
    values = inputs_of(group)
    x, w = values["x"], values["w"]
    x[0, 0, 5] = torch.inf
    x[0, 1, 6] = -torch.inf
    x[0, 2, 7] = torch.nan
    x[0, 3, 8], x[0, 3, 9] = torch.inf, -torch.inf
    x[0, 4, 10], x[0, 5, 11] = LARGEST, -LARGEST
    w[:, 10:12] = 0.25
    w[3, 5], w[4, 10] = 0.0, 0.0
    (expected,) = interpret(group.graph, [values[name] for name in group.graph.inputs])
    torch.testing.assert_close(output(group, values), expected, equal_nan=True)
    assert not expected[0, :4].isfinite().any() and expected[0, 4:6].isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-42])
def test_small_values_are_multiplied(size: float) -> None:
    """Of numbers below 1e-34 the low part has fewer bits than it needs."""
    group = groups.plain_linear(8, 72, 40, F32)
    values = inputs_of(group)
    values["x"] *= size
    values["w"] *= 1e30
    values["bias"].zero_()
    (expected,) = interpret(group.graph, [values[name] for name in group.graph.inputs])
    off = (output(group, values) - expected).abs().max() / expected.abs().max()
    assert off < max(1e-6, 2**-136 / size)


def test_attention_gives_torchs_infinities() -> None:
    group = attention_groups.cross((1,), 9, 40, 32, dtype=F32, mask=F32)
    values = inputs_of(group)
    values["v"][0, 3, 2], values["v"][0, 4, 5] = torch.inf, torch.nan
    values["v"][0, 5, 7] = LARGEST
    values["mask"][:, 20:] = torch.finfo(F32).min
    (expected,) = interpret(group.graph, [values[name] for name in group.graph.inputs])
    torch.testing.assert_close(output(group, values), expected, equal_nan=True)
