"""What is computed alike of all parts of a tensor and joined again is computed of the tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.passes.canonicalize import canonicalize
from gtco.passes.rejoined import rejoin_parts
from tests.pass_checks import captured, check, ops, random

X = random(3, 4, 5)


def normalized(c: nn.Module, x: Tensor) -> Tensor:
    """Coordinates as RAFT's, each by its own extent."""
    a, b = x.split([1, 3], 1)
    return torch.cat((2 * a / 127 - 1, 2 * b / 54 - 1), 1)


@pytest.mark.parametrize(
    "function, expected",
    [
        (normalized, {"mul": 1, "div": 1, "sub": 1}),
        (lambda c, x: torch.cat([p.exp() for p in x.split([2, 1, 1], 1)], 1), {"exp": 1}),
        (lambda c, x: torch.cat([p * (i + 2) for i, p in enumerate(x.split([2, 3], -1))], -1),
         {"mul": 1}),
        (lambda c, x: torch.cat((x[:, :2] * 0.1, x[:, 2:] * 0.3), 1), {"mul": 1}),
        (lambda c, x: torch.cat((x[:, :2].exp(), x[:, 2:].tanh()), 1),
         {"concat": 1, "exp": 1, "tanh": 1}),
        (lambda c, x: torch.cat((x[:, :2] * 2, x[:, 2:]), 1), {"concat": 1, "mul": 1}),
        (lambda c, x: torch.cat((x[:, 2:] * 2, x[:, :2] * 3), 1), {"concat": 1, "mul": 2}),
        (lambda c, x: torch.cat((x[:, :2] * 2, x[:, 3:] * 3), 1), {"concat": 1, "mul": 2}),
        (lambda c, x: torch.cat((x[:, :2] * 2, x.exp()[:, 2:] * 3), 1),
         {"concat": 1, "mul": 2, "exp": 1}),
        (lambda c, x: torch.cat((y := x[:, :2] * 2, x[:, 2:] * 3), 1) + y.sum(),
         {"concat": 1, "mul": 2, "sum": 1, "add": 1}),
        (lambda c, x: torch.cat((x[:, :2] * x[:, :1], x[:, 2:] * x[:, :1]), 1),
         {"concat": 1, "mul": 2}),
        (lambda c, x: torch.cat((x[:, :2].clamp(min=0.1), x[:, 2:].clamp(min=0.2)), 1),
         {"maximum": 1}),
        (lambda c, x: torch.cat((F.gelu(x[:, :2]), F.gelu(x[:, 2:], approximate="tanh")), 1),
         {"concat": 1, "gelu": 2}),
        (lambda c, x: torch.cat((x[:, :2] * 2, x[:, 2:] * 3), 0), {"concat": 1, "mul": 2}),
        (lambda c, x: torch.cat((x[:, :1], x[:, 1:]), 1).exp(), {"exp": 1}),
    ],
    ids=["coordinates", "three", "along the last", "tenths", "two functions", "one part as it is",
         "the other way round", "with a gap", "of two tensors", "read elsewhere",
         "of two values", "bounds", "other attributes", "along another dimension",
         "as they are"],
)  # fmt: skip
def test_parts(function: Callable[[nn.Module, Tensor], Tensor], expected: dict[str, int]) -> None:
    graph, args = captured(function, X)
    assert ops(check(rejoin_parts, canonicalize(graph), args)) == expected


@pytest.mark.parametrize("to", range(-3, 3))
@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_parts_that_are_joined_along_another_dimension(
    join: Callable[[tuple[Tensor, ...], int], Tensor], dim: int, to: int
) -> None:
    to = max(to, -2) if join is torch.cat else to
    to = min(to, 1) if join is torch.cat else to
    graph, args = captured(lambda c, x: join(x.unbind(dim), to).exp(), X)
    found = check(rejoin_parts, canonicalize(graph), args)
    assert ops(found) == {"exp": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: torch.stack((x[..., 1], x[..., 0]), 1),
        lambda c, x: torch.stack((x[..., 0], x[..., 1], x[..., 2]), 1),
        lambda c, x: torch.stack((x[..., :2].sum(-1), x[..., 1]), 1),
        lambda c, x: torch.stack((x[..., 0], x[:, :, :, 0]), 1),
        lambda c, x: torch.stack((x[..., 0], x.exp()[..., 1]), 1),
        lambda c, x: torch.cat((x[..., 0].reshape(2, 15), x[..., 1].reshape(2, 15)), 1),
    ],
    ids=["the other way round", "of four", "a sum", "one part twice", "of two tensors", "reshaped"],
)
def test_other_parts_stay(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    graph, args = captured(function, random(3, 2, 5, 4))
    assert ops(check(rejoin_parts, canonicalize(graph), args))["concat"] == 1


def test_a_number_that_halves_do_not_have_stays() -> None:
    """0.1 of a half is another number, and one of an attribute is not rounded."""
    graph, args = captured(lambda c, x: torch.cat((x[:, :2] * 0.1, x[:, 2:] * 0.5), 1), X.half())
    assert ops(rejoin_parts(canonicalize(graph))) == {"concat": 1, "mul": 2}
    graph, args = captured(lambda c, x: torch.cat((x[:, :2] * 0.25, x[:, 2:] * 3), 1), X.half())
    assert ops(check(rejoin_parts, canonicalize(graph), args)) == {"mul": 1}


def test_whole_numbers_stay() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    graph, _ = captured(lambda c, x: torch.cat((x[:, :2] * 2, x[:, 2:] * 3), 1), x)
    assert ops(rejoin_parts(canonicalize(graph))) == {"concat": 1, "mul": 2}
