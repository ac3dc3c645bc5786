from __future__ import annotations

import pytest
import torch

from gtco.cost_model.model import roofline_us
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.dataflow import Flow, make_group
from gtco.passes.fusion import fuse
from gtco.target import TARGETS, find_target
from tests.groups import convolution
from tests.unit.vit_graph import vit_graph

H100 = find_target("sm_90a")


def linear(rows: int, columns: int, depth: int) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((rows, depth), torch.float16))
    w = b.constant("w", torch.zeros(columns, depth, dtype=torch.float16))
    return Group("g", b.build([b.add("linear", x, w)]))


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.arch)
def test_more_work_is_never_predicted_faster(target) -> None:
    sizes = (1, 16, 63, 64, 65, 197, 200, 512, 768, 1000, 3072)
    for build in (
        lambda n: linear(n, 768, 768),
        lambda n: linear(197, n, 768),
        lambda n: linear(197, 768, n),
    ):
        times = [roofline_us(build(size), target) for size in sizes]
        assert times == sorted(times)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.arch)
def test_each_fusion_of_a_transformer_pays(target) -> None:
    fused = fuse(
        vit_graph(1, 197, 768, 12, torch.float16), lambda group: roofline_us(group, target)
    )
    flow = Flow(fused.graph)
    for group in fused:
        alone = sum(roofline_us(make_group(flow, [node]), target) for node in group.compute)
        together = roofline_us(group, target)
        assert together == alone if len(group.compute) == 1 else together < alone


def test_a_kernel_costs_its_fixed_chain() -> None:
    assert 1.5 < roofline_us(linear(1, 16, 16), H100) < 2.5


def test_predictions_are_near_the_plan_of_design_section_8() -> None:
    for group, plan_us in (
        (linear(197, 2304, 768), 3.7),
        (linear(197, 768, 768), 3.0),
        (linear(197, 3072, 768), 4.2),
        (linear(197, 768, 3072), 4.2),
    ):
        assert 0.5 < roofline_us(group, H100) / plan_us < 2


def test_a_convolution_in_groups_costs_its_products() -> None:
    """Half of those of one group, whatever of it is windows."""
    image = (8, 56, 56, 256)
    one, two = (
        roofline_us(convolution(image, 256, (3, 3), torch.float16, groups=groups), H100)
        for groups in (1, 2)
    )
    assert 0.5 < two / one < 0.7
