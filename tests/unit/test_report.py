"""What a report counts."""

from __future__ import annotations

import torch

from gtco.ir.graph import GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.reporting.report import Refusal, bytes_moved, refusal_kinds, telling_refusals


def test_bytes_moved_counts_what_crosses_a_kernels_edge() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorSpec((4, 8), torch.float16))  # 64 bytes
    h = builder.add("relu", x, hint="h")
    half = builder.add("slice", h, dim=0, start=0, end=2, hint="half")
    y = builder.add("add", half, half, hint="y")  # 32 bytes
    graph = builder.build([y])
    nodes = {node.name: node for node in graph.nodes}
    apart = [[nodes["h"]], [nodes["y"]]]
    assert bytes_moved(graph, apart) == (64 + 64) + (32 + 32)
    assert bytes_moved(graph, [[nodes["h"], nodes["y"]]]) == 64 + 32


def test_refusals_that_differ_in_names_and_numbers_are_of_one_kind() -> None:
    edges = [
        Refusal("a", "b", "%a must be stored first"),
        Refusal("c", "d", "%c must be stored first"),
        Refusal("e", "f", "predicted slower: 3.1 us against 2.5 us"),
        Refusal("g", "h", "predicted slower: 4 us against 1.5 us"),
    ]
    assert refusal_kinds(edges) == [edges[:2], edges[2:]]
    assert telling_refusals(edges, 2) == (edges[0], edges[2])
    assert telling_refusals(edges, 3) == (edges[0], edges[2], edges[1])
    assert telling_refusals(edges[:1]) == (edges[0],)
