"""Convolutions read a copy of an image whose channels lie apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gtco.compiler import make_plan
from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.channels_together import gather_channels
from gtco.passes.rewrite import Log
from tests.pass_checks import captured, check, ops, random

SIDE, CHANNELS = 48, 32
IMAGE = (CHANNELS, SIDE, SIDE)


def lowered(module: nn.Module, *shape: int) -> tuple[Graph, list[torch.Tensor]]:
    """The graph as convolutions are made, and its inputs."""
    x = random(*shape)
    return run_pipeline(capture(module.double().eval(), (x,)).graph), [x]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.beside = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(self.first(x).relu()) + self.beside(x)
        return y


@pytest.mark.parametrize(
    ("module", "shape", "op"),
    [
        (nn.Conv2d(CHANNELS, 8, 3, stride=2, padding=2, dilation=2), (1, CHANNELS, 99, 99), "conv"),
        (nn.Conv2d(CHANNELS, 64, 3, groups=4), (2, CHANNELS, SIDE, SIDE), "grouped_conv"),
        (nn.Conv3d(16, 8, 3, padding=1), (1, 16, 6, 30, 20), "conv"),
        (nn.Conv2d(20, 8, 3, padding=1), (1, 20, 60, 60), "conv"),  # no whole 16 bytes
        (nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(64, 8, 3)), (1, 16, 64, 64), "conv"),
    ],
    ids=["strided", "in groups", "of a volume", "of odd pixels", "of blocks"],
)
def test_a_convolution_reads_a_copy(module: nn.Module, shape: tuple[int, ...], op: str) -> None:
    graph, args = lowered(module, *shape)
    log = Log()
    result = check(gather_channels, graph, args, log)
    assert ops(result)["copy"] == 1
    assert sum(log.applied.values()) == 1
    (conv,) = (node for node in result.nodes if node.op == op)
    assert result.producers[conv.inputs[0]].op == "copy"


def test_all_that_reads_the_pixels_reads_one_copy() -> None:
    graph, args = lowered(Residual(), 1, CHANNELS, SIDE, SIDE)
    result = check(gather_channels, graph, args)
    assert ops(result)["copy"] == 1
    (copy,) = (node for node in result.nodes if node.op == "copy")
    assert [node.name for node in result.users[copy.inputs[0]]] == [copy.name]
    assert ops(result)["conv"] == 3
    assert len(result.users[copy.name]) == 3


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(CHANNELS, CHANNELS, 3), (1, CHANNELS, 7, 7)),
        (nn.Conv2d(CHANNELS, CHANNELS, 1), (1, CHANNELS, 99, 99)),
        (nn.Conv2d(3, CHANNELS, 7, stride=2, padding=3), (1, 3, 224, 224)),
        (nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS), (1, CHANNELS, 30, 30)),
        (nn.MaxPool2d(3), (1, 3, 300, 300)),
        (nn.Conv2d(3, CHANNELS, 4, stride=4), (1, 3, 256, 256)),
    ],
    ids=["small", "a linear of pixels", "packed", "small depthwise", "few channels", "patches"],
)
def test_what_stays(module: nn.Module, shape: tuple[int, ...]) -> None:
    graph, _ = lowered(module, *shape)
    assert str(gather_channels(graph)) == str(graph)


@pytest.mark.parametrize(
    ("module", "shape", "reader"),
    [
        (nn.Conv2d(CHANNELS, 64, 1), (2, *IMAGE), "linear"),
        (nn.Conv2d(CHANNELS, CHANNELS, 7, groups=CHANNELS), (1, *IMAGE), "depthwise_conv"),
        (nn.Sequential(nn.MaxPool2d(3, 2), nn.Conv2d(CHANNELS, 8, 1)), (1, *IMAGE), "max_pool"),
        (nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(CHANNELS, 8, 3)), (1, *IMAGE), "extend"),
        (nn.Sequential(nn.Upsample(None, 2), nn.Conv2d(CHANNELS, 8, 1)), (1, *IMAGE), "resize"),
    ],
    ids=["a linear of two images", "depthwise", "pooled", "bordered", "enlarged"],
)  # fmt: skip
def test_others_read_a_copy(module: nn.Module, shape: tuple[int, ...], reader: str) -> None:
    graph, args = lowered(module, *shape)
    result = check(gather_channels, graph, args)
    assert ops(result)["copy"] == 1
    (node,) = (node for node in result.nodes if node.op == reader)
    base = node.inputs[0]
    while (made := result.producers[base]).definition.is_view:
        base = made.inputs[0]
    assert made.op == "copy"


@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_what_is_made_of_inputs_has_its_channels_last(computed: bool) -> None:
    """The kernels that compute the pieces turn them; pieces as they are given are copied."""

    def joined(c: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if computed:
            x, y = x.relu(), y + c.get_buffer("bias")
        return F.conv2d(torch.cat([x, y], 1), c.get_buffer("w"))

    graph, args = captured(
        joined, random(1, *IMAGE), random(1, *IMAGE),
        w=random(8, 2 * CHANNELS, 3, 3), bias=random(CHANNELS, 1, 1),
    )  # fmt: skip
    result = check(gather_channels, run_pipeline(graph), args)
    made = {"relu": 1, "add": 1} if computed else {"copy": 2}
    assert ops(result) == {**made, "concat": 1, "conv": 1}
    assert all(
        node.outputs[0].sizes[1:3] == (SIDE, SIDE)
        for node in result.nodes
        if node.op in ("relu", "copy", "concat")
    )


@pytest.mark.parametrize(("side", "copies"), [(SIDE, 0), (3 * SIDE, 2)])
def test_a_sum_of_two_large_images_reads_copies(side: int, copies: int) -> None:
    def added(c: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x + y, c.get_buffer("w"))

    shape = (1, CHANNELS, side, side)
    graph, args = captured(added, random(*shape), random(*shape), w=random(8, CHANNELS, 3, 3))
    assert ops(check(gather_channels, run_pipeline(graph), args))["copy"] == copies


def test_what_a_kernel_makes_has_its_channels_together() -> None:
    module = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 3))
    graph, _ = lowered(module, 1, CHANNELS, SIDE, SIDE)
    assert str(gather_channels(graph)) == str(graph)


@pytest.mark.parametrize(("target", "sketch"), [("sm_90a", "gemm_wgmma"), ("sm_80", "gemm_mma")])
def test_a_plan_copies_once(target: str, sketch: str) -> None:
    x = torch.randn(1, 128, 64, 64).half()
    module = nn.Conv2d(128, 128, 3, padding=1).half().eval()
    plan, _ = make_plan(module, (x,), None, Options.of(target=target))
    found = [launch.program and launch.program.sketch for launch in plan.launches]
    assert found == ["transpose", sketch]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(128, 64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(x + y)
        return result


def test_a_plan_turns_one_image_as_it_adds_the_other() -> None:
    """One kernel that read both element by element would be drafted at five times as long."""
    args = tuple(torch.randn(8, 128, 64, 64).half() for _ in range(2))
    plan, _ = make_plan(Sum().half().eval(), args, None, Options.of(target="sm_90a"))
    found = [launch.program and launch.program.sketch for launch in plan.launches]
    assert found[:2] == ["transpose", "transpose"]
    assert [ops(launch.group.graph) for launch in plan.launches[:2]] == [
        {"copy": 1},
        {"copy": 1, "add": 1},
    ]
