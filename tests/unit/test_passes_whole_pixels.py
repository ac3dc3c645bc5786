"""Large convolutions read a copy of an image whose pixels no copy of 16 bytes divides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes.whole_pixels import copy_whole_pixels
from tests.pass_checks import check, ops, random

SIDE, CHANNELS = 48, 99
ONES = {"stride": (1, 1), "before": (1, 1), "after": (1, 1), "dilation": (1, 1)}


def convolutions(channels: int = CHANNELS, side: int = SIDE, count: int = 1) -> Graph:
    """`count` convolutions of one image, added up; of 16 bytes a pixel has two elements."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, side, side, channels), torch.float64))
    made = []
    for at in range(count):
        w = b.constant(f"w{at}", random(CHANNELS, 3, 3, channels, seed=at))
        made.append(b.add("conv", x, w, **ONES))
    total = made[0]
    for other in made[1:]:
        total = b.add("add", total, other)
    return b.build([total])


@pytest.mark.parametrize("count", [1, 2])
def test_one_copy_of_an_image_serves_all(count: int) -> None:
    graph = convolutions(count=count)
    result = check(copy_whole_pixels, graph, [random(1, SIDE, SIDE, CHANNELS)])
    assert ops(result) == {"pad": 1, "conv": count, **({"add": 1} if count == 2 else {})}
    (copy,) = (node for node in result.nodes if node.op == "pad")
    assert copy.outputs[0].sizes == (1, SIDE, SIDE, CHANNELS + 1)


@pytest.mark.parametrize(
    "graph",
    [
        convolutions(channels=CHANNELS - 1),  # whole
        convolutions(side=SIDE // 2),  # small
        convolutions(channels=5, side=300),  # a copy would be a fifth larger
    ],
    ids=["whole pixels", "a small convolution", "few channels"],
)
def test_what_stays(graph: Graph) -> None:
    assert str(copy_whole_pixels(graph)) == str(graph)


class Norms(nn.Module):
    """Convolutions of what norms along channels have made, as between blocks of Swin2SR."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(180), nn.Conv2d(180, 180, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x).permute(0, 3, 1, 2))


@pytest.mark.parametrize(("target", "sketch"), [("sm_90a", "gemm_wgmma"), ("sm_80", "gemm_mma")])
def test_a_plan_multiplies_whole_pixels_where_wgmma_does(target: str, sketch: str) -> None:
    x = torch.randn(1, 48, 48, 180).half()
    plan, _ = make_plan(Norms().half().eval(), (x,), None, Options.of(target=target))
    made = [launch for launch in plan.launches if "conv" in ops(launch.group.graph)]
    assert [launch.program and launch.program.sketch for launch in made] == [sketch]
    copies = sum(ops(launch.group.graph)["pad"] for launch in plan.launches)
    assert copies == (target == "sm_90a")
