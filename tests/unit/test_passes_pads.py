"""Zeros joined to a tensor become its border, borders of one tensor one; what is added to a part of
a tensor is added to all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.ir.interpreter import interpret
from gtco.passes.canonicalize import canonicalize
from gtco.passes.pads import join_borders
from tests.pass_checks import captured, check, ops, random

X = random(2, 5, 7, 3)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda c, x: F.pad(x, (0, 0, 1, 2, 0, 3)), {"pad": 1}),
        (lambda c, x: F.pad(F.pad(x, (0, 1)).exp(), (0, 0, 2, 0)), {"pad": 2, "exp": 1}),
        (lambda c, x: torch.cat((x, torch.zeros(2, 1, 7, 3, dtype=x.dtype)), 1), {"pad": 1}),
        (lambda c, x: torch.cat((c.zeros, x.exp()), 1), {"exp": 1, "pad": 1}),
        (lambda c, x: F.pad(x, (0, 0, 1, 2), value=1.0), {"concat": 1}),
        (lambda c, x: torch.cat((x, torch.zeros(2, 1, 7, 3, dtype=x.dtype), x), 1), {"concat": 1}),
        (lambda c, x: F.pad(y := F.pad(x, (0, 1)), (1, 0)) + F.pad(y, (0, 1)),
         {"pad": 3, "add": 1}),
    ],
    ids=["of two dimensions", "of two tensors", "behind", "before", "of ones", "between",
         "read twice"],
)  # fmt: skip
def test_borders(function: Callable[[nn.Module, Tensor], Tensor], expected: dict[str, int]) -> None:
    graph, args = captured(function, X, zeros=torch.zeros(2, 4, 7, 3, dtype=X.dtype))
    result = check(join_borders, canonicalize(graph), args)
    found = ops(result)
    assert {op: found[op] for op in ("pad", "concat", "exp", "add") if found[op]} == expected


def part_of(x: Tensor, y: Tensor, start: int, end: int) -> Tensor:
    """`x` with y added to some of its rows."""
    z = x.exp()
    z[:, start:end] += y
    return z


PART = random(2, 3, 7, 3, seed=1)
OTHER = random(2, 5, 7, 3, seed=2)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda c, x: part_of(x, c.part, 2, 5), {"pad": 1, "add": 1}),
        (lambda c, x: part_of(x, c.part, 1, 4), {"pad": 1, "add": 1}),
        (lambda c, x: part_of(x, x[:, 2:].tanh(), 2, 5), {"pad": 1, "add": 1}),
        (lambda c, x: part_of(x, c.other[:, 2:], 2, 5), {"where": 1, "add": 1}),
        (lambda c, x: part_of(x, c.other[:, 1:4], 1, 4), {"where": 1, "add": 1}),
        (lambda c, x: part_of(x, c.other[:, 1:4], 2, 5), {"pad": 1, "add": 1}),
        (lambda c, x: part_of(x, c.part[:, :1], 2, 5), {"concat": 1, "add": 1}),
        (lambda c, x: part_of(part_of(x, c.part, 2, 5).tanh(), c.part, 0, 3), {"add": 2, "pad": 2}),
        (lambda c, x: torch.cat((x[:, :2] + 1, x[:, 2:] + c.part), 1), {"concat": 1, "add": 2}),
        (lambda c, x: torch.cat((x[:, 2:] + c.part, x[:, :2]), 1), {"concat": 1, "add": 1}),
        (lambda c, x: torch.cat((c.other[:, :2], x[:, 2:] + c.part), 1), {"concat": 1, "add": 1}),
        (lambda c, x: torch.cat((x[:, :1], x[:, 2:] + c.part), 1), {"concat": 1, "add": 1}),
        (lambda c, x: torch.cat((x[:, :2], y := x[:, 2:] + c.part), 1) + y.sum(),
         {"concat": 1, "add": 2}),
    ],
    ids=["last rows", "rows between", "of what it is added to", "the same rows of another",
         "the same rows between", "other rows of another", "one row to all", "twice",
         "numbers too", "the other way round", "of two tensors", "with a gap", "read elsewhere"],
)  # fmt: skip
def test_sums_with_a_part(
    function: Callable[[nn.Module, Tensor], Tensor], expected: dict[str, int]
) -> None:
    graph, args = captured(function, X, part=PART, other=OTHER)
    result = check(join_borders, canonicalize(graph), args)
    found = ops(result)
    assert {op: found[op] for op in ("pad", "concat", "where", "add") if found[op]} == expected


def test_a_part_of_infinities_and_nan() -> None:
    """Zeros are added elsewhere, not what is left out times zero."""
    other = OTHER.clone()
    other[:, 0], other[:, 1] = torch.inf, torch.nan
    graph, args = captured(lambda c, x: part_of(x, c.other[:, 2:], 2, 5), X, other=other)
    (result,) = interpret(join_borders(canonicalize(graph)), args)
    assert result.isfinite().all()
