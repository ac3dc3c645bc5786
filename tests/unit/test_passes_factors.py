"""What a linear reads becomes one product of a tensor and factors of its channels, and a kernel
that multiplies there takes it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.ir.graph import Graph, GraphBuilder, Node
from gtco.ir.spec import TensorSpec
from gtco.passes import factors
from gtco.passes.factors import join_factors
from gtco.passes.fold_constants import fold_constants
from gtco.passes.legality import explain
from gtco.passes.rewrite import Log
from gtco.passes.scaled import scale_of
from tests.faults.test_pass_faults import planted
from tests.pass_checks import captured, check, ops, random, reasons

CHANNELS, OUT = 12, 7
F32 = torch.float32
WEIGHTS = {
    "w": random(OUT, CHANNELS, dtype=F32, seed=1),
    "bias": random(OUT, dtype=F32, seed=2),
    "gamma": random(1, 1, 1, CHANNELS, dtype=F32, seed=3),
    "beta": random(CHANNELS, dtype=F32, seed=4),
}
X = random(2, 3, 5, CHANNELS, dtype=F32)
GATE = random(2, 1, 1, CHANNELS, dtype=F32, seed=9)
Operand = Callable[[nn.Module, Tensor, Tensor], Tensor]


def norm(x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return size / (size.mean(dim=-1, keepdim=True) + 1e-6)


OPERANDS: dict[str, Operand] = {
    "response norm of transformers": lambda c, x, g: c.gamma * (x * norm(x)) + c.beta + x,
    "response norm of timm": lambda c, x, g: x + torch.addcmul(c.beta, c.gamma, x * norm(x)),
    "differences": lambda c, x, g: x * g - c.beta - x,
    "a difference first": lambda c, x, g: x - x * g,
    "quotients": lambda c, x, g: (x / (1 + g.exp()) + x) * c.gamma,
    "two factors": lambda c, x, g: x * g * c.gamma,
    "scaled shifts": lambda c, x, g: ((x * g + c.beta) + (x + c.gamma)) * c.gamma,
}  # fmt: skip


@functools.cache
def graph_of(operand: Operand, *, bias: bool = True) -> tuple[Graph, tuple[Tensor, ...]]:
    def run(c: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return F.linear(operand(c, x, g), c.w, c.bias if bias else None)

    return captured(run, X, GATE, **WEIGHTS)


def operand_of(graph: Graph) -> Node:
    (linear,) = (node for node in graph.nodes if node.op == "linear")
    scale = scale_of(graph, linear)
    assert scale is not None and (scale.groups, scale.rows) == (2, 15)
    return scale.product


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPERANDS)
def test_what_a_linear_reads_is_one_product(name: str, bias: bool) -> None:
    graph, args = graph_of(OPERANDS[name], bias=bias)
    log = Log()
    result = check(join_factors, graph, args, log)
    assert log.applied.total() == 1, reasons(log)
    product = operand_of(result)
    wide = [node for node in result.nodes if node.outputs[0].sizes == X.shape]
    read = {result.producers[name].op for name in product.inputs if name in result.producers}
    assert read <= {"mul", "add", "sub", "div"}, "of factors"
    assert product in wide
    assert not {node.op for node in wide} - {"mul", "abs", "pow", "square", "cast"}


def test_a_product_alone_is_left_as_it_is() -> None:
    graph, args = graph_of(lambda c, x, g: x * g)
    assert str(check(join_factors, graph, args)) == str(graph)
    assert operand_of(graph).op == "mul"


LEFT: dict[str, Operand] = {
    "another tensor": lambda c, x, g: x * g + x.flip(1),
    "a product of the tensor with itself": lambda c, x, g: x * g * x + x,
    "factors by pixel": lambda c, x, g: x * x[..., :1] + x,
    "infinities that cancel": lambda c, x, g: x * c.gamma + x,
    "a lossy cast": lambda c, x, g: (x.half() * g.half()).float() + x,
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_look_alikes_stay(name: str) -> None:
    graph, args = graph_of(LEFT[name])
    assert str(check(join_factors, graph, args)) == str(graph)


def test_shifts_that_are_not_constant_stay() -> None:
    graph, args = graph_of(lambda c, x, g: x * g + g)
    log = Log()
    assert str(check(join_factors, graph, args, log)) == str(graph)
    assert "is not constant" in str(reasons(log))


def test_a_product_that_others_read_is_no_operand() -> None:
    def run(c: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        y = x * g + c.beta
        return F.linear(y, c.w) + y.sum()

    graph, args = captured(run, X, GATE, **WEIGHTS)
    assert str(check(join_factors, graph, args)) == str(graph)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('_moved(node.op, left.shift, b), steps)', '_moved("add", left.shift, b), steps)'),
        ("else (node.op, left.shift, b)", "else left.shift"),
        ("(node.op, left.factor, right.factor)", '("add", left.factor, right.factor)'),
        ("moved = moved + edit.constants[inputs[2]].double()", "pass"),
        ("if left.value != right.value:", "if False:"),
    ],
)  # fmt: skip
def test_planted_faults_are_caught(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = planted(factors, before, after)
    failed = 0
    for operand in (*OPERANDS.values(), *LEFT.values()):
        graph, args = graph_of(operand)
        try:
            check(module.join_factors, graph, args)
        except Exception:
            failed += 1
    assert failed


# -- which kernels take it -------------------------------------------------------------------------


def gated(columns: int = OUT, *, before: bool = False, twice: bool = False) -> Graph:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 15, CHANNELS), torch.float16))
    gate = b.input("gate", TensorSpec((2, 1, CHANNELS), torch.float16))
    w = b.constant("w", torch.ones(columns, CHANNELS, dtype=torch.float16))
    y = b.add("mul", b.add("silu", x) if before else x, gate)
    outputs = [b.add("relu", b.add("linear", y, w))]
    return b.build([*outputs, b.add("relu", y)] if twice else outputs)


def refusal(graph: Graph, *names: str) -> str | None:
    return explain(graph, [node for node in graph.nodes if node.op in names])


def test_a_kernel_holds_a_linear_and_what_scales_its_operand() -> None:
    graph = gated()
    assert refusal(graph, "mul", "linear") is None
    assert refusal(graph, "mul", "linear", "relu") is None


@pytest.mark.parametrize("columns", [OUT, CHANNELS])
def test_what_is_scaled_is_stored(columns: int) -> None:
    graph = gated(columns, before=True)
    assert refusal(graph, "mul", "linear") is None
    found = refusal(graph, "silu", "mul", "linear")
    assert found is not None
    assert columns != CHANNELS or "which %mul reads, must be stored" in found, "it seems in place"


def test_a_product_that_others_read_is_stored() -> None:
    graph = gated(twice=True)
    assert "must be stored first" in str(refusal(graph, "mul", "linear"))


def test_a_gate_is_no_launch_of_its_own() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_mean, self.back = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
            self.last = nn.Conv2d(32, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            gate = self.back(F.silu(self.of_mean(x.mean((2, 3), keepdim=True)))).sigmoid()
            return self.last(x * gate)  # type: ignore[no-any-return]

    fused = gtco.fuse(gtco.capture(Gated().half().eval(), (torch.zeros(1, 32, 14, 14).half(),)))
    assert "mul" in {node.op for node in list(fused)[-1].compute}
    assert not any({node.op for node in group.compute} == {"mul"} for group in fused)


def test_constants_are_folded_as_everywhere() -> None:
    graph, args = graph_of(lambda c, x, g: x * c.gamma.abs() + x)
    result = check(join_factors, graph, args)
    assert ops(fold_constants(result))["add"] == 0
