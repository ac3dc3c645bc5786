"""Rolls of an image go into the kernels of the norm ahead of them and of the sum behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.passes import rolls
from gtco.passes.canonicalize import canonicalize
from gtco.passes.legality import explain
from gtco.passes.rewrite import Log
from gtco.passes.rolls import move_rolls
from tests.faults.test_pass_faults import planted
from tests.pass_checks import captured, check, ops, random

H, W, C = 6, 4, 8
F32 = torch.float32
WEIGHTS = {"g": random(C, dtype=F32, seed=1), "b": random(C, dtype=F32, seed=2)}
X, Y = random(2, H * W, C, dtype=F32), random(2, H * W, C, dtype=F32, seed=3)
Function = Callable[[nn.Module, Tensor, Tensor], Tensor]


def image(x: Tensor) -> Tensor:
    return x.reshape(2, H, W, C)


def norm(c: nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, (C,), c.g, c.b)


def ahead(c: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return image(norm(c, x)).roll((-1, -2), (1, 2)).exp() + image(y)


def behind(c: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return norm(c, x + image(y.exp()).roll((1, 2), (1, 2)).reshape(x.shape))


def norm_behind(c: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return x + norm(c, image(y.exp()).roll((1, 2), (1, 2)).reshape(x.shape))


def compute_order(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if not node.definition.is_view]


def test_a_norm_follows_its_roll() -> None:
    graph, args = captured(ahead, X, Y, **WEIGHTS)
    result = check(move_rolls, graph, args)
    assert compute_order(graph)[:2] == ["layer_norm", "roll"]
    order = compute_order(result)
    assert order.index("roll") + 1 == order.index("layer_norm")
    pair = [node for node in result.nodes if node.op in ("roll", "layer_norm")]
    assert explain(result, pair) is None


@pytest.mark.parametrize("function", [behind, norm_behind])
def test_a_sum_takes_the_shape_of_the_roll(function: Function) -> None:
    graph, args = captured(function, X, Y, **WEIGHTS)
    result = check(move_rolls, graph, args)
    (total,) = (node for node in result.nodes if node.op == "add")
    assert total.outputs[0].sizes == (2, H, W, C)
    names = ("roll", "add") if function is behind else ("roll", "layer_norm", "add")
    assert explain(result, [node for node in result.nodes if node.op in names]) is None


def test_statistics_of_the_sum_take_it_too() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, H * W, C), torch.float32))
    y = b.input("y", TensorSpec((2, H, W, C), torch.float32))
    rolled = b.add("reshape", b.add("roll", y, shifts=(0, 1, 2, 0)), shape=(2, H * W, C))
    total = b.add("add", x, rolled)
    graph = b.build([total, b.add("row_stats", total)])
    result = check(move_rolls, graph, (X, image(Y)))
    computed = [node for node in result.nodes if not node.definition.is_view]
    assert explain(graph, [node for node in graph.nodes if not node.definition.is_view])
    assert explain(result, computed) is None and len(computed) == 3


LEFT: dict[str, Function] = {
    "channels roll": lambda c, x, y: image(norm(c, x)).roll((1, 1), (1, 3)) + image(y),
    "the norm is read elsewhere": lambda c, x, y: image(n := norm(c, x)).roll(1, 1) * image(n),
    "the roll is read elsewhere": lambda c, x, y: (
        (r := image(y.exp()).roll(1, 1)).reshape(x.shape) + x
    ).reshape(r.shape) * r,
    "a norm of other rows": lambda c, x, y: F.layer_norm(
        image(y.exp()).roll(1, 1).reshape(2, -1, C // 2), (C // 2,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    graph, args = captured(LEFT[name], X, Y, **WEIGHTS)
    assert str(check(move_rolls, graph, args)) == str(graph)
    assert ops(graph)["roll"] == 1


def test_it_ends() -> None:
    log = Log()
    graph, args = captured(
        lambda c, x, y: behind(c, ahead(c, x, y).reshape(x.shape), norm_behind(c, x, y)),
        X, Y, **WEIGHTS,
    )  # fmt: skip
    result = check(move_rolls, graph, args, log)
    assert str(check(move_rolls, result, args)) == str(result)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('any(node.attrs["shifts"][-1:])', "False"),
        ("or not edit.read_once(value) or", "or"),
        ("alone = edit.read_once(value) and edit.read_once(reshape.inputs[0])", "alone = True"),
        ("edit.shape(reshape.inputs[0])[-1:] != edit.shape(node.inputs[0])[-1:]", "False"),
    ],
)
def test_planted_faults_are_caught(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = planted(rolls, before, after)
    caught = 0
    for function in (ahead, behind, norm_behind, *LEFT.values()):
        graph, args = captured(function, X, Y, **WEIGHTS)
        try:
            result = check(module.move_rolls, graph, args)
            caught += function in LEFT.values() and str(result) != str(graph)
        except Exception:
            caught += 1
    assert caught


def test_the_norm_of_a_number_stays() -> None:
    def model(m: nn.Module, x: Tensor) -> Tensor:
        number = x.amin()[..., None]
        return F.linear(F.layer_norm(number, number.shape[-1:]), m.w)

    graph, args = captured(model, random(3, 4), w=random(2, 1, seed=1))
    log = Log()
    check(move_rolls, graph, args, log)
    assert not log.refusals


def turned(x: Tensor, dim: int, at: int) -> Tensor:
    """A roll as ONNX writes it."""
    behind, ahead = x.narrow(dim, at, x.shape[dim] - at), x.narrow(dim, 0, at)
    return torch.cat([behind, ahead], dim)


@pytest.mark.parametrize(
    ("function", "shifts"),
    [
        (lambda x: turned(x, 1, 2), (0, 4, 0, 0)),
        (lambda x: turned(turned(x, 1, 2), 2, 3), (0, 4, 1, 0)),
        (lambda x: turned(turned(x, 1, 2), 1, 3), (0, 1, 0, 0)),
        (lambda x: turned(turned(x, 1, 2), 1, 4), None),
        (lambda x: x.roll((1, -1), (1, 2)).roll(-1, 1), (0, 0, 3, 0)),
    ],
)
def test_spelled_out(function: Callable[[Tensor], Tensor], shifts: tuple[int, ...] | None) -> None:
    graph, args = captured(lambda _, x: function(x.exp()), random(2, H, W, C))
    result = check(canonicalize, graph, args)
    assert ops(result) == ({"exp": 1} if shifts is None else {"exp": 1, "roll": 1})
    assert [node.attrs["shifts"] for node in result.nodes if node.op == "roll"] == (
        [] if shifts is None else [shifts]
    )


NO_ROLLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of another": lambda x, y: torch.cat([x[:, 2:], y[:, :2]], 1),
    "less": lambda x, y: torch.cat([x[:, 2:], x[:, :1]], 1),
    "a gap": lambda x, y: torch.cat([x[:, 3:], x[:, :2]], 1),
    "more": lambda x, y: torch.cat([x[:, 2:], x[:, :2], y], 1),
    "not to the end": lambda x, y: torch.cat([x[:, 2:4], x[:, :2]], 1),
    "along another": lambda x, y: torch.cat([x[:, 3:], x[:, :3]], 0),
    "columns": lambda x, y: torch.cat([x[..., 2:], x[..., :2]], -1),
}


def no_roll(name: str) -> tuple[Graph, tuple[Tensor, ...]]:
    function = NO_ROLLS[name]
    inputs = random(2, H, H, C), random(2, H, H, C)
    return captured(lambda _, x, y: function(x.exp(), y), *inputs)


@pytest.mark.parametrize("name", NO_ROLLS)
def test_what_is_no_roll_stays(name: str) -> None:
    graph, args = no_roll(name)
    assert "roll" not in ops(check(canonicalize, graph, args))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dim == spec.rank - 1", "False"),
        ("if x is None or x != views.whole_of(edit, node.inputs[1], dim, 0, second):", "if not x:"),
        ("first if at == dim", "second if at == dim"),
        ("(a + b) % max(1, size)", "max(a, b)"),
    ],
)
def test_faults_of_what_is_spelled_out_are_caught(before: str, after: str) -> None:
    module = planted(sys.modules[canonicalize.__module__], before, after)
    twice = captured(lambda _, x: turned(turned(x.exp(), 1, 2), 1, 3), random(2, H, W, C))
    caught = 0
    for graph, args in (twice, *map(no_roll, NO_ROLLS)):
        try:
            result = check(module.canonicalize, graph, args)
            caught += "roll" in ops(result) and graph is not twice[0]
        except Exception:
            caught += 1
    assert caught
