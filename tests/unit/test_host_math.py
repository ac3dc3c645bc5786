"""The device library's own approximations, in fp32 on the host build, against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.codegen.sketches.elementwise import Elementwise
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS

pytestmark = pytest.mark.compiler

INF = math.inf
GRID = torch.linspace(-12, 12, 4097)
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "none": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def computed(name: str, x: Tensor) -> Tensor:
    b = GraphBuilder()
    value = b.input("x", TensorSpec(tuple(x.shape), torch.float32))
    y = (
        b.add(name, value)
        if name in ("silu", "sigmoid", "round")
        else b.add("gelu", value, approximate=name)
    )
    group = Group("math", b.build([y]))
    sketch = Elementwise(group, TARGETS["sm_90a"])
    program = sketch.emit(next(iter(sketch.defaults())))
    (result,) = run_on_host(program, group, {"x": x}, seed=0).values()
    return result


@pytest.mark.parametrize("name", EXACT)
def test_near_fp64_everywhere(name: str) -> None:
    exact = EXACT[name](GRID.double())
    error = (computed(name, GRID).double() - exact).abs()
    assert error.max() < 2e-6
    seen = (GRID > -5.5) & (exact.abs() > 1e-30)
    assert (error[seen] / exact[seen].abs()).max() < 3e-5


@pytest.mark.parametrize("name", EXACT)
def test_what_is_not_finite(name: str) -> None:
    low, high, nan, huge = computed(name, torch.tensor([-INF, INF, math.nan, -3e38])).tolist()
    assert high == (1.0 if name == "sigmoid" else INF)
    assert math.isnan(nan)
    assert low == 0 if name == "sigmoid" else math.isnan(low)  # times zero, as in torch
    assert huge == 0


def test_round_takes_the_even_one_of_two() -> None:
    ties = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1e9, INF, math.nan])
    torch.testing.assert_close(computed("round", ties), ties.round(), equal_nan=True)
