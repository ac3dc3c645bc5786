"""The graph's rules and how it prints."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import gtco
from gtco.ir.graph import Graph, GraphBuilder, subgraph
from gtco.ir.interpreter import ArgumentError, interpret
from gtco.ir.ops import OPS
from gtco.ir.spec import Dim, GraphError, TensorSpec


def small() -> Graph:
    builder = GraphBuilder()
    x = builder.input("x", TensorSpec((2, 3), torch.float32))
    w = builder.constant("w", torch.ones(4, 3))
    y = builder.add("linear", x, w)
    return builder.build([builder.add("relu", y)])


def test_prints_one_line_a_node() -> None:
    assert str(small()) == (
        "graph(%x: f32[2,3]):\n"
        "  const %w: f32[4,3]\n"
        "  %linear: f32[2,4] = linear(%x, %w)\n"
        "  %relu: f32[2,4] = relu(%linear)\n"
        "  return %relu"
    )


def test_verify_names_the_broken_node() -> None:
    graph = small()
    graph.verify()
    swapped = replace(graph, nodes=graph.nodes[::-1])
    with pytest.raises(GraphError, match="%relu reads %linear before it is made"):
        swapped.verify()
    wrong = replace(graph.nodes[0], outputs=(TensorSpec((2, 5), torch.float32),))
    with pytest.raises(GraphError, match="%linear: linear gives"):
        replace(graph, nodes=(wrong, graph.nodes[1])).verify()
    with pytest.raises(GraphError, match="made twice"):
        replace(graph, nodes=(graph.nodes[0], graph.nodes[0])).verify()


def test_names_are_unique() -> None:
    builder = GraphBuilder()
    names = {builder.fresh("a") for _ in range(50)} | {builder.fresh("a_1") for _ in range(5)}
    assert len(names) == 55


def test_subgraph_reads_from_outside() -> None:
    graph = small()
    part = subgraph(graph, [graph.nodes[1]], ["relu"])
    assert list(part.inputs) == ["linear"]
    assert not part.constants
    part.verify()


def test_interpret_checks_arguments() -> None:
    graph = small()
    with pytest.raises(ArgumentError, match="1 inputs, but 0"):
        interpret(graph, [])
    with pytest.raises(ArgumentError, match="input %x"):
        interpret(graph, [torch.ones(2, 4)])
    (result,) = interpret(graph, [torch.ones(2, 3)], dtype=torch.float64)
    assert result.dtype == torch.float64
    assert torch.equal(result, torch.full((2, 4), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("fused", [False, True])
def test_interpret_keeps_what_is_read_again_alone(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = GraphBuilder()
    value = first = b.add("exp", b.input("x", TensorSpec((4, 4), torch.float32)))
    for _ in range(20):
        value = b.add("linear", b.add("relu", value), b.constant("w", torch.randn(4, 4)))
    graph = b.build([b.add("add", value, first)])
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def noted(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: torch.Tensor, **attrs: Any) -> torch.Tensor:
            nonlocal most
            result = reference(*args, **attrs)
            made.append(weakref.ref(result))
            most = max(most, sum(each() is not None for each in made))
            return result

        return run

    for op in ("exp", "relu", "linear", "add"):
        known = OPS[op]
        monkeypatch.setitem(OPS, op, replace(known, reference=noted(known.reference)))
    x = torch.randn(4, 4)
    (result,) = interpret(gtco.fuse(graph, target="sm_90a") if fused else graph, (x,))
    expected = x.exp()
    for w in graph.constants.values():
        expected = expected.relu() @ w.T
    torch.testing.assert_close(result, expected + x.exp())
    assert most <= 4


def test_interpret_computes_with_whole_numbers_in_the_type_that_is_asked_for() -> None:
    b = GraphBuilder()
    x = b.add("div", b.input("x", TensorSpec((5,), torch.uint8)), other=255.0)
    graph = b.build([b.add("linear", b.add("sqrt", x), b.constant("w", torch.randn(3, 5)))])
    x = torch.arange(5, dtype=torch.uint8)
    (result,) = interpret(graph, (x,), dtype=torch.float64)
    expected = (x.double() / 255).sqrt() @ graph.constants["w"].double().T
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=0)


def test_symbolic_sizes_are_refused_where_a_number_is_needed() -> None:
    spec = TensorSpec((Dim("batch"), 3), torch.float32)
    assert str(spec) == "f32[batch,3]"
    with pytest.raises(GraphError, match="dynamic dimension batch"):
        _ = spec.sizes
