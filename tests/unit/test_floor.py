"""What no plan of a model is below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gtco.compiler import capture_for, fuse_with, plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.plans import floor_us, group_floor_us
from gtco.ir.graph import Group, subgraph
from gtco.options import Options
from gtco.passes import run_pipeline
from tests.perceptron import ARGS, DEVICE, H100, Mlp

ROWS, NARROW, WIDE = 32, 64, 256
BYTES = 2 * (2 * NARROW * WIDE + WIDE + NARROW + 2 * ROWS * NARROW)
FLOPS = 2 * 2 * ROWS * NARROW * WIDE


@pytest.mark.parametrize(
    ("precision", "dram_gbps", "expected"),
    [
        (None, 1.0, BYTES / 1e3),
        (None, 1e6, FLOPS / H100.matmul_tflops / 1e6),
        ("tf32", 1e6, FLOPS / (H100.matmul_tflops / 2) / 1e6),
        ("fp32", 1e6, FLOPS / (H100.matmul_tflops / 6) / 1e6),
    ],
)
def test_the_floor_is_of_the_model_and_of_no_plan(
    precision: str | None, dram_gbps: float, expected: float
) -> None:
    model, (x,) = Mlp(), ARGS
    if precision is not None:
        model, x = model.float(), x.float()
    target = replace(H100, dram_gbps=dram_gbps)
    options = Options.of(precision=precision)
    graph = run_pipeline(capture_for(model, (x,), None, options).graph)
    for fused in fuse_with(Knowledge(DEVICE), graph, target, 4):
        plan = plan_with(Knowledge(DEVICE), fused, target, options)
        assert floor_us(plan) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dram_gbps", "l2_gbps", "expected"),
    [
        (1.0, 1e6, 2 * (2 * NARROW * WIDE + WIDE + NARROW) / 1e3),
        (1e6, 1.0, BYTES / 1e3),
        (1e6, 1e6, FLOPS / H100.matmul_tflops / 1e6),
    ],
)
def test_the_floor_of_a_group(dram_gbps: float, l2_gbps: float, expected: float) -> None:
    target = replace(H100, dram_gbps=dram_gbps, l2_gbps=l2_gbps)
    graph = run_pipeline(capture_for(Mlp(), ARGS, None, Options()).graph)
    whole = Group("whole", subgraph(graph, graph.nodes, graph.outputs))
    assert group_floor_us(whole, target) == pytest.approx(expected)
