"""Gated linear units: what is computed of two halves ends in the kernel that makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.cost_model.model import roofline_us
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.passes.canonicalize import canonicalize
from gtco.passes.dataflow import Flow
from gtco.passes.fold_constants import fold_constants
from gtco.passes.fusion import fuse
from gtco.passes.gated import pair_gates
from gtco.passes.horizontal import join_siblings
from gtco.passes.legality import explain, family
from gtco.passes.quantize import quantizable, quantize, scales_of_fp8
from gtco.passes.rewrite import Log
from gtco.passes.slices import push_slices
from gtco.target import TARGETS
from tests.pass_checks import Golden, captured, check, ops, random, reasons, rmse

WIDTH, COLUMNS = 8, 12
F16 = torch.float16
Gate = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = {
    "both": random(2 * COLUMNS, WIDTH, seed=1), "a": random(COLUMNS, WIDTH, seed=2),
    "b": random(COLUMNS, WIDTH, seed=3), "out": random(4, COLUMNS, seed=4),
    "bias": random(2 * COLUMNS, seed=5), "ba": random(COLUMNS, seed=6),
    "factors": random(2 * COLUMNS, seed=7), "of_gate": random(COLUMNS, seed=8),
    "uneven": random(2 * COLUMNS + 4, WIDTH, seed=9), "odd": random(2 * 6, WIDTH, seed=10),
    "of_six": random(4, 6, seed=11),
}  # fmt: skip
X = random(2, 5, WIDTH).float()


def prepared(function: Callable[..., Tensor], *args: Tensor) -> tuple[Graph, tuple[Tensor, ...]]:
    graph, args = captured(function, *args, **{k: t.float() for k, t in WEIGHTS.items()})
    for step in (canonicalize, fold_constants, join_siblings, push_slices):
        graph = step(graph)
    return graph, args


GATES: dict[str, Gate] = {
    "geglu": lambda v, g: v * F.gelu(g),
    "swiglu": lambda v, g: F.silu(v) * g,
    "of_both": lambda v, g: torch.tanh(v) * torch.sigmoid(g),
    "quick_gelu": lambda v, g: g * torch.sigmoid(1.702 * g) * v,
    "scaled": lambda v, g: (0.5 * (v * g)).relu(),
    "shifted": lambda v, g: (v + 1) * (0.5 * g),
}


def of_one_linear(gate: Gate) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(c: nn.Module, x: Tensor) -> Tensor:
        return F.linear(gate(*F.linear(x, c.both, c.bias).chunk(2, -1)), c.out)

    return run


def of_two_linears(gate: Gate) -> Callable[[nn.Module, Tensor], Tensor]:
    """One has a bias."""

    def run(c: nn.Module, x: Tensor) -> Tensor:
        return F.linear(gate(F.linear(x, c.a, c.ba), F.linear(x, c.b)), c.out)

    return run


def is_paired(graph: Graph) -> bool:
    (view,) = (node for node in graph.nodes if node.definition.is_view)
    found = view.op == "slice" and view.attrs["step"] == 2
    return found and ops(graph)["linear"] == 2 and ops(graph)["swap_pairs"] == 1


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("linears", [of_one_linear, of_two_linears])
def test_halves_become_neighbours(
    gate: str, linears: Callable[[Gate], Callable[..., Tensor]]
) -> None:
    graph, args = prepared(linears(GATES[gate]), X)
    assert is_paired(check(pair_gates, graph, args))


def halves_swapped(c: nn.Module, x: Tensor) -> Tensor:
    gate, value = F.linear(x, c.both).chunk(2, -1)
    return F.linear(value * F.gelu(gate), c.out)


def numbers_of_columns(c: nn.Module, x: Tensor) -> Tensor:
    y = F.linear(x, c.both).relu() * c.factors + c.bias
    value, gate = y.chunk(2, -1)
    return F.linear(value * (gate * c.of_gate), c.out)


def number_of_rows(c: nn.Module, x: Tensor) -> Tensor:
    value, gate = F.linear(x, c.both).chunk(2, -1)
    return F.linear(value * (gate * x.mean(-1, keepdim=True)), c.out)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (halves_swapped, (5, WIDTH)),
        (numbers_of_columns, (2, 3, 4, WIDTH)),
        (number_of_rows, (2, 5, WIDTH)),
    ],
)
def test_in_any_rank(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    graph, args = prepared(function, random(*shape).float())
    assert is_paired(check(pair_gates, graph, args))


def test_the_printed_form(golden: Golden) -> None:
    graph, args = prepared(of_one_linear(GATES["geglu"]), X)
    golden("passes/pair_gates.txt", check(pair_gates, graph, args))


def uneven(c: nn.Module, x: Tensor) -> Tensor:
    y = F.linear(x, c.uneven)
    return F.linear(y[..., :COLUMNS] * y[..., COLUMNS : 2 * COLUMNS], c.out)


def half_read_again(c: nn.Module, x: Tensor) -> Tensor:
    value, gate = F.linear(x, c.both).chunk(2, -1)
    return F.linear(value * F.gelu(gate), c.out) + F.linear(gate, c.out)


def whole_read_again(c: nn.Module, x: Tensor) -> Tensor:
    y = F.linear(x, c.both)
    value, gate = y.chunk(2, -1)
    return F.linear(value * F.gelu(gate), c.out) + y.mean(-1, keepdim=True)


def of_two_tensors(c: nn.Module, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, c.a) * F.gelu(F.linear(x.relu(), c.b)), c.out)


def of_another_tensor(c: nn.Module, x: Tensor) -> Tensor:
    value, gate = F.linear(x, c.both).chunk(2, -1)
    return F.linear(value * (gate + F.linear(x.relu(), c.a)), c.out)


def of_rows(c: nn.Module, x: Tensor) -> Tensor:
    first, last = F.linear(x, c.a).chunk(2, 0)
    return F.linear(first * F.gelu(last), c.out)


@pytest.mark.parametrize(
    "function",
    [uneven, half_read_again, whole_read_again, of_two_tensors, of_another_tensor, of_rows],
)
def test_look_alikes_stay_as_they_are(function: Callable[..., Tensor]) -> None:
    graph, args = prepared(function, X)
    assert check(pair_gates, graph, args).nodes == graph.nodes


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda c, x: torch.mul(*F.linear(x, c.both).chunk(2, -1)), "the model returns it"),
        (
            lambda c, x: F.linear(torch.mul(*F.linear(x, c.odd).chunk(2, -1)), c.of_six),
            "6 columns are no multiple of 4",
        ),
    ],
)
def test_says_why_not(function: Callable[..., Tensor], reason: str) -> None:
    graph, args = prepared(function, X)
    log = Log()
    assert check(pair_gates, graph, args, log).nodes == graph.nodes
    assert reason in reasons(log)


# -- with the passes and the kernels behind it -----------------------------------------------------


class Block(nn.Module):
    """The feed-forward of a vision transformer."""

    def __init__(self, width: int, columns: int, *, packed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        count = 1 if packed else 2
        self.parts = nn.ModuleList(nn.Linear(width, 2 * columns // count) for _ in range(count))
        self.out = nn.Linear(columns, width)

    def forward(self, x: Tensor) -> Tensor:
        made = [part(self.norm(x)) for part in self.parts]
        value, gate = made if len(made) == 2 else made[0].chunk(2, -1)
        return x + self.out(F.silu(value) * gate)


def block(*, packed: bool, width: int = 64, columns: int = 96) -> tuple[Graph, Graph, Tensor]:
    """As captured, behind the passes, and an input."""
    torch.manual_seed(0)
    model = Block(width, columns, packed=packed).half().eval()
    x = torch.randn(1, 37, width).half()
    graph = gtco.capture(model, (x,))
    return graph, run_pipeline(graph), x


@pytest.mark.parametrize("packed", [True, False])
def test_one_kernel_makes_a_gate_behind_a_folded_norm(packed: bool) -> None:
    graph, passed, x = block(packed=packed)
    (exact,) = interpret(graph, [x], dtype=torch.float64)
    (found,), (eager,) = interpret(passed, [x]), interpret(graph, [x])
    assert rmse(found, exact) < 1.2 * rmse(eager, exact)
    fused = fuse(passed, lambda group: roofline_us(group, TARGETS["sm_90a"]))
    groups = [group for group in fused if family(group) == "gemm"]
    assert len(groups) == 2 and len(fused.groups) == 3
    (stored,) = groups[0].graph.outputs
    assert groups[0].graph.specs[stored].sizes == (1, 37, 96)
    assert {"merge_stats", "linear", "swap_pairs", "silu"} <= set(ops(groups[0].graph))


def test_fp8_rounds_in_the_kernel_of_the_gate() -> None:
    _, passed, x = block(packed=True)
    largest = {node.name: 8.0 for node in quantizable(passed)}
    assert len(largest) == 2
    graph = quantize(passed, scales_of_fp8(passed, largest))
    graph.verify()
    (before,), (after,) = interpret(passed, [x]), interpret(graph, [x])
    assert rmse(after, before.double()) < 0.05 * float(before.double().square().mean().sqrt())
    fused = fuse(graph, lambda group: roofline_us(group, TARGETS["sm_90a"]))
    (gate,) = (group for group in fused if "swap_pairs" in ops(group.graph))
    (stored,) = gate.graph.outputs
    assert str(gate.graph.specs[stored]) == "f8_e4m3[1,37,96]" and "linear" in ops(gate.graph)


def test_what_else_is_read_of_the_pairs_keeps_them_whole() -> None:
    _, graph, _ = block(packed=True)
    flow = Flow(graph)
    (view,) = (node for node in graph.nodes if node.op == "slice")
    assert flow.stored[view.inputs[0]] == view.name
    outputs = (*graph.outputs, view.inputs[0])
    returned = Graph(graph.inputs, graph.constants, graph.nodes, outputs)
    assert Flow(returned).stored[view.inputs[0]] == view.inputs[0]


def test_what_goes_on_from_the_slice_is_in_another_kernel() -> None:
    def summed(c: nn.Module, x: Tensor) -> Tensor:
        product = torch.mul(*F.linear(x, c.both).chunk(2, -1))
        return product.exp() + product.sum(-1, keepdim=True)

    graph, args = prepared(summed, X)
    graph = check(pair_gates, graph, args)
    linear, swap, product, *readers = (n for n in graph.nodes if not n.definition.is_view)
    assert explain(graph, [linear, swap, product]) is None
    for reader in readers[:2]:
        assert "another thread holds the element" in str(explain(graph, [product, reader]))
