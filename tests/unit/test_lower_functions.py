"""Functions of numbers, remainders and small matrices, as torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco import compiler
from gtco.frontend.torch_export import CaptureError, capture
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests.pass_checks import random


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def check(function: Callable[..., Any], *args: Tensor) -> None:
    """As torch in the type of the arguments, and in fp32 planned without ATen."""
    graph = capture(Function(function), args).graph
    (found,) = interpret(graph, args)
    right = function(*args)
    assert found.dtype == right.dtype
    tolerance = 1e-10 if found.dtype == torch.float64 else 1e-3
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    (found,) = interpret(run_pipeline(graph), args)
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    narrow = tuple(x.float() if x.dtype == torch.float64 else x for x in args)
    options = gtco.Options.of(target="sm_90a")
    plan, _ = compiler.make_plan(Function(function), narrow, None, options)
    assert not [launch.reason for launch in plan.launches if launch.program is None]


X, Y = random(3, 9), random(3, 9, seed=1)
ODD = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -2.5])
WHOLE = torch.arange(-9, 9)

ONE = {
    "tan": X, "asin": X.sin(), "acos": X.sin(), "atan": X, "sinh": X, "cosh": X, "asinh": X,
    "acosh": X.abs() + 1, "atanh": X.sin(), "log2": X.abs(), "log10": X.abs(), "exp2": X,
    "erfc": X, "isinf": ODD, "logit": X.sigmoid(),
}  # fmt: skip


def test_a_power_of_a_number() -> None:
    for base in (2.0, 10000.0, 0.1, 1, 0):
        check(lambda x, base=base: torch.pow(base, x), ODD if base else X.abs())
    half = X.half()
    (found,) = interpret(capture(Function(lambda x: torch.pow(0.1, x)), (half,)).graph, (half,))
    torch.testing.assert_close(found, torch.pow(0.1, half), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ONE)
def test_of_one_number(name: str) -> None:
    check(getattr(torch, name), ONE[name])


@pytest.mark.parametrize(
    "name", ["atan2", "hypot", "copysign", "fmod", "remainder", "floor_divide", "fmax", "fmin"]
)
def test_of_two_numbers(name: str) -> None:
    function = getattr(torch, name)
    check(function, X, Y)
    check(function, ODD.repeat_interleave(7), ODD.repeat(7))
    check(function, X.half(), Y.half())


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
def test_quotients(mode: str | None) -> None:
    check(lambda x, y: torch.div(x, y, rounding_mode=mode), X, Y)
    check(lambda x: torch.div(x, -0.3, rounding_mode=mode), X)
    # 0.9995 in 16 bits, and not 1, before it is cut.
    check(
        lambda x, y: torch.div(x, y, rounding_mode=mode), *torch.tensor([[2047.0], [2048.0]]).half()
    )


@pytest.mark.parametrize("number", [3, -3])
def test_remainders_of_whole_numbers(number: int) -> None:
    check(lambda x: torch.stack([x % number, torch.fmod(x, number), x // number]), WHOLE)
    check(lambda x: x % number, WHOLE.to(torch.int32))


def test_what_divides_by_a_tensor_of_whole_numbers_stays_torchs() -> None:
    graph = capture(Function(lambda x, y: x % y), (WHOLE, WHOLE * 2 + 1)).graph
    assert [node.op for node in graph.nodes] == ["aten"]


@pytest.mark.parametrize("size", [1, 5, 9])
def test_products_along_a_dimension(size: int) -> None:
    check(lambda x: x.prod(1), random(3, size, 4))
    check(lambda x: x.prod(-2, keepdim=True), random(3, size, 4).half())


def test_a_number_less_a_tensor_and_either_of_two() -> None:
    check(lambda x: torch.sub(2.5, x) if isinstance(x, Tensor) else x, X)
    check(lambda x, y: ((x > 0) ^ (y > 0)).double(), X, Y)


@pytest.mark.parametrize("offset", [0, 2, -1])
def test_diagonals(offset: int) -> None:
    check(lambda x: torch.diagonal(x, offset, 0, 2) * 2, random(4, 3, 5))
    check(lambda x: torch.diagonal(x, offset) + 1, random(4, 3, 5))


def test_vectors_and_matrices() -> None:
    check(lambda x, y: x @ y[0], random(3, 4, 9), Y)
    check(lambda x, y: x[0] @ y, X, random(2, 9, 4))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_inverses(n: int) -> None:
    x, b = random(2, 3, n, n), random(2, 3, n, 2, seed=1)
    check(torch.linalg.inv, x)
    check(torch.linalg.det, x)
    check(torch.linalg.solve, x, b)
    check(torch.linalg.solve, x[0, 0], b[0, 0, :, 0])
    check(torch.linalg.solve, x, b[..., 0])
    check(lambda x, b: torch.linalg.solve(x, b.mT, left=False), x, b)


def test_an_inverse_is_as_close_as_a_factorisation() -> None:
    turn = torch.linalg.qr(random(200, 4, 4))[0]
    x = turn @ torch.diag(torch.tensor([1.0, 0.1, 1e-3, 1e-4]).double()) @ turn.mT.flip(1)
    exact = torch.linalg.inv(x)
    (found,) = interpret(capture(Function(torch.linalg.inv), (x.float(),)).graph, (x.float(),))
    error, of_torch = (
        ((y.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).median()
        for y in (found, torch.linalg.inv(x.float()))
    )
    assert error < 8 * of_torch


def test_determinants_of_larger_matrices_stay_torchs() -> None:
    graph = capture(Function(torch.linalg.det), (random(5, 5),)).graph
    assert [node.op for node in graph.nodes] == ["aten"]


def test_larger_matrices_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"linalg_inv.*matrices of 5 rows.*inv_ex"):
        capture(Function(torch.linalg.inv), (random(5, 5),))
