"""What a report counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gtco
from gtco.compiler import fuse_with, plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.graph import GraphBuilder, TensorSpec
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.report import Refusal, bytes_moved, floor_us, refusal_kinds, telling_refusals
from tests.perceptron import ARGS, DEVICE, H100, Mlp


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


def test_no_plan_is_below_the_floor() -> None:
    known = Knowledge(DEVICE)
    rows, narrow, wide = 32, 64, 256
    nbytes = 2 * (2 * narrow * wide + wide + narrow + 2 * rows * narrow)
    flops = 2 * 2 * rows * narrow * wide
    bytes_us, products_us = nbytes / H100.dram_gbps / 1e3, flops / H100.matmul_tflops / 1e6
    assert bytes_us > products_us
    for model, precision, times, expected in (
        (Mlp(), None, 1, bytes_us),
        (Mlp(), None, 1e4, products_us),
        (Mlp().float(), "tf32", 1e4, 2 * products_us),
        (Mlp().float(), "fp32", 1e4, flops / H100.fp32_tflops / 1e6),
    ):
        args = tuple(each.to(next(model.parameters()).dtype) for each in ARGS)
        target = replace(H100, dram_gbps=times * H100.dram_gbps)
        graph = run_pipeline(gtco.capture(model, args))
        for fused in fuse_with(known, graph, target, 4):  # whatever was fused
            plan = plan_with(known, fused, target, Options.of(precision=precision))
            assert floor_us(plan) == pytest.approx(expected)
