"""A number added to some columns of a linear goes into its bias, where nobody else reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.passes import run_pipeline
from gtco.passes.canonicalize import canonicalize
from tests.pass_checks import captured, check, ops, random

X, TOKENS = random(2, 6), random(2, 5, 4, seed=1)
TENSORS = {"w": random(12, 6, seed=2), "b": random(12, seed=3)}


def modulated(c: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    """As DiT shifts and scales."""
    shift, scale, gate = F.linear(x, c.w, c.b).chunk(3, -1)
    return gate[:, None] * (tokens * (1 + scale[:, None]) + shift[:, None])


def whole(c: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, c.w)


def columns(c: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return whole(c, x).split((3, 5, 4), -1)


@pytest.mark.parametrize(
    "function, adds",
    [
        (modulated, 1),
        (lambda c, x, t: columns(c, x)[1] + 2 + columns(c, x)[0][:, :1], 1),
        (lambda c, x, t: (columns(c, x)[1].reshape(10, 1).mT + 2).exp(), 0),
        (lambda c, x, t: (s := columns(c, x))[0] + 1 + s[2][:, 1:] * (s[1][:, :3] + 3), 1),
        (lambda c, x, t: (s := columns(c, x)[1]) + 2 + s.exp(), 2),
        (lambda c, x, t: (y := whole(c, x))[:, 3:8] + 2 + y[:, 4:9], 2),
        (lambda c, x, t: (y := whole(c, x))[:, 3:8] + 2 + y.sum(), 2),
        (lambda c, x, t: whole(c, x)[:1] + 2, 1),
        (lambda c, x, t: columns(c, x)[1] + torch.inf, 1),
        (lambda c, x, t: columns(c, x)[1][:, ::2] + 2, 0),
    ],
    ids=["a modulation", "beside others", "through views", "two of three", "read elsewhere",
         "columns in common", "the whole read", "rows", "infinity", "every other"],
)  # fmt: skip
def test_a_number_added_to_columns(function: Callable[..., Tensor], adds: int) -> None:
    graph, args = captured(function, X, TOKENS, **TENSORS)
    assert ops(check(canonicalize, graph, args))["add"] == adds


def test_the_whole_pipeline_adds_nothing_but_the_shift() -> None:
    graph, args = captured(modulated, X, TOKENS, **TENSORS)
    found = ops(check(run_pipeline, graph, args))
    assert found == {"linear": 1, "mul": 2, "add": 1}
