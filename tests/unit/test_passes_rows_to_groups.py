"""Instance norms of reshaped images, as ONNX has group norms, become group norms."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.compiler import make_plan
from gtco.ir.graph import GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes.canonicalize import canonicalize
from gtco.passes.rows_to_groups import rows_to_groups
from tests.faults.test_pass_faults import planted
from tests.pass_checks import captured, check, ops, random

Function = Callable[..., Tensor]


def spelled(groups: int, scale: bool = True, shift: bool = True) -> Function:
    """A group norm as exporters write it, with ones and zeros of a constant for each group."""

    def norm(c: torch.nn.Module, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], groups, -1)
        y = F.layer_norm(rows, rows.shape[-1:], eps=1e-3)
        y = y * c.ones if scale else y
        y = y + c.zeros if shift else y
        return y.reshape(x.shape) * c.g + c.b

    return norm


@pytest.mark.parametrize("shape", [(2, 8, 5, 3), (1, 8, 2, 3, 4)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("scale", "shift"), [(True, True), (False, True), (False, False)])
def test_found(shape: tuple[int, ...], groups: int, scale: bool, shift: bool) -> None:
    per_channel = (8, *(1 for _ in shape[2:]))
    given = {"g": random(*per_channel), "b": random(*per_channel, seed=1)}
    given |= {"ones": torch.ones(groups, 1), "zeros": torch.zeros(groups, 1)}
    graph, args = captured(spelled(groups, scale, shift), random(*shape), **given)
    result = check(rows_to_groups, canonicalize(graph), args)
    assert ops(result)["group_norm"] == 1 and not ops(result)["layer_norm"]
    (norm,) = (node for node in result.nodes if node.op == "group_norm")
    assert norm.attrs["groups"] == groups and norm.attrs["eps"] == 1e-3


def test_only_neutral_constants_are_left_out() -> None:
    def function(c: torch.nn.Module, x: Tensor) -> Tensor:
        y = (x * c.ones + c.zeros) * 1.0 + 0.0
        return (y * c.zeros + c.ones) * 2.0 + 1.0 + c.small * c.ones

    given = {"ones": torch.ones(4), "zeros": torch.zeros(4), "small": random(2, 1)}
    graph, args = captured(function, random(3, 2, 4), **given)
    assert ops(check(rows_to_groups, graph, args)) == {"mul": 3, "add": 5}


def test_a_zero_keeps_its_sign_unless_a_norm_made_it() -> None:
    graph, args = captured(lambda c, x: x + c.zeros + 0.0, random(3, 4), zeros=torch.zeros(4))
    assert ops(check(rows_to_groups, graph, args)) == {"add": 2}
    graph, args = captured(
        lambda c, x: F.layer_norm(x, (4,)) + c.zeros, random(3, 4), zeros=torch.zeros(4)
    )
    assert ops(check(rows_to_groups, graph, args)) == {"layer_norm": 1}


def test_nor_where_they_change_the_type_or_the_shape() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((3,), torch.int64))
    ones = b.constant("ones", torch.ones(2, 3, dtype=torch.int64))
    graph = b.build([b.add("mul", x, other=1.0), b.add("add", x, other=0.0), b.add("mul", x, ones)])
    assert ops(rows_to_groups(graph)) == {"mul": 2, "add": 1}


def rows(x: Tensor, *shape: int) -> Tensor:
    y = x.reshape(shape)
    return F.layer_norm(y, y.shape[-1:])


OTHERS: dict[str, Function] = {
    "parts of a channel": lambda c, x: rows(x, 2, 16, -1).reshape(x.shape),
    "a row a channel, or a token": lambda c, x: rows(x, 2, 8, -1).reshape(x.shape),
    "images cut": lambda c, x: rows(x, 8, 2, -1).reshape(x.shape),
    "rows of rows": lambda c, x: rows(x, 2, 4, 2, -1).reshape(x.shape),
    "scaled along rows": lambda c, x: F.layer_norm(x.reshape(2, 4, -1), (60,), c.g),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_others_stay(function: Function) -> None:
    graph, args = captured(function, random(2, 8, 6, 5), g=random(60))
    assert "group_norm" not in ops(check(rows_to_groups, canonicalize(graph), args))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sizes[0] != shape[0]", "False"),
        ("len(norm.inputs) != 1", "False"),
        ("sizes[1] < shape[1] and", ""),
        ("groups=sizes[1]", "groups=1"),
        ('eps=norm.attrs["eps"]', "eps=0.5"),
        ("dims=(0, rank - 1, *range(1, rank - 1))", "dims=(0, 3, 2, 1)"),
        ("1 if node.op == ", "0 if node.op == "),
    ],
)
def test_planted_faults_are_caught(before: str, after: str) -> None:
    module = planted(sys.modules[rows_to_groups.__module__], before, after)
    functions: list[Function] = [
        lambda c, x: rows(x, 2, 4, -1).reshape(x.shape),
        lambda c, x: rows(x, 2, 4, -1).exp() * 0.0,
        *OTHERS.values(),
    ]
    caught = 0
    for function in functions:
        graph, args = captured(function, random(2, 8, 6, 5), g=random(60))
        try:
            result = check(module.rows_to_groups, canonicalize(graph), args)
            caught += function in OTHERS.values() and "group_norm" in ops(result)
        except Exception:
            caught += 1
    assert caught


def test_of_large_images_nothing_is_left_to_aten() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(rows(x, 1, 2, -1).reshape(x.shape))

    image = torch.randn(1, 64, 128, 128).half()
    plan, _ = make_plan(Model(), (image,), None, Options.of(target="sm_90a"))
    assert all(launch.program is not None for launch in plan.launches)
