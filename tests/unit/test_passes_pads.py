"""Zeros joined to a tensor become its border, and borders of one tensor one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
