"""Fusion of attention with its projection: what is priced, what is chosen, and a whole model."""

from __future__ import annotations

import pytest
import torch

from gtco.check import judge
from gtco.codegen.rules import derive
from gtco.compiler import capture_for, plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.model import roofline_us
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.dataflow import Flow, make_group
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.runtime.module import CompiledModule
from gtco.target import TARGETS, Target
from tests import models, projection_groups
from tests.unit.vit_graph import vit_graph

H100, A100 = TARGETS["sm_90a"], TARGETS["sm_80"]
FUSED = ["attention", "linear", "add", "row_stats"]


def ops(group: Group) -> list[str]:
    return [node.op for node in group.compute]


def apart_us(group: Group, target: Target) -> float:
    """The price of attention and of what follows it as two kernels."""
    flow = Flow(group.graph)
    first = [node for node in flow.compute if node.op == "attention"]
    rest = [node for node in flow.compute if node.op != "attention"]
    return sum(roofline_us(make_group(flow, nodes), target) for nodes in (first, rest))


@pytest.mark.parametrize("target", (H100, A100))
def test_both_ways_are_priced(target: Target) -> None:
    seen: list[list[str]] = []

    def price(group: Group) -> float:
        seen.append(ops(group))
        return roofline_us(group, target)

    fused = fuse(vit_graph(2, 13, 256, 4, torch.float16), price)
    for each in (FUSED, FUSED[:3], FUSED[:2], FUSED[:1], FUSED[1:], FUSED[1:3]):
        assert each in seen
    found = [ops(group) for group in fused if family(group) == "attention"]
    assert found == ([FUSED if target is H100 else FUSED[:1]] * 2)
    if target is A100:
        reasons = [reason for _, user, reason in fused.refusals if user.startswith("linear")]
        assert any("legal, but predicted slower" in reason for reason in reasons)


MEASURED_US = {"vit_b": (8.54, 6.82), "vit_l": (12.24, 7.58)}
"""On an H100, as one kernel and apart (experiments/results/h100-attention_projection-*.json)."""


@pytest.mark.parametrize("case", MEASURED_US)
def test_the_price_is_near_what_was_measured(case: str) -> None:
    group = projection_groups.LARGE[case]()
    joined_us, sum_us = MEASURED_US[case]
    assert 0.85 * joined_us < roofline_us(group, H100) < 1.15 * joined_us
    assert 0.85 * sum_us < apart_us(group, H100) < 1.15 * sum_us


def test_what_no_sketch_takes_costs_its_operators_in_aten() -> None:
    group = projection_groups.projected(16, 257, 80, 1280)
    assert not derive(group, "attention", H100).sketches
    assert roofline_us(group, H100) > apart_us(group, H100) + H100.boundary_us


@pytest.mark.compiler
def test_a_vit_of_two_layers_is_right() -> None:
    torch.manual_seed(0)
    model = models.vit(image=16, patch=4, width=128, depth=2, heads=2).half()
    image = torch.randn(1, 3, 16, 16).half()
    options = Options(target="host")
    captured = capture_for(model, (image,), None, options)

    def price(group: Group) -> float:
        return 0.0 if ops(group)[:2] == FUSED[:2] else roofline_us(group, H100)

    graph = run_pipeline(captured.graph)
    plan = plan_with(Knowledge("none"), fuse(graph, price), H100, options)
    sketches = [each.program.sketch for each in plan.launches if each.program is not None]
    assert sketches.count("attention_projection") == 2 and len(sketches) == len(plan.launches)
    compiled = CompiledModule(plan, captured)
    (exact,) = interpret(captured.graph, [image], dtype=torch.float64)
    with torch.no_grad():
        verdict = judge(compiled(image), model(image), exact, torch.float16)
    assert verdict.ok, str(verdict)
