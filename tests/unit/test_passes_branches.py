"""Sums of convolutions of one image: which are merged, which are not, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.passes import run_pipeline
from gtco.passes.branches import RULE, merge_branches
from gtco.passes.rewrite import Log
from tests.pass_checks import captured, check, ops, random

Net = Callable[[Any, Tensor], Tensor]
TENSORS = {
    "square": random(6, 6, 3, 3, seed=1),
    "other": random(6, 6, 3, 3, seed=2),
    "point": random(6, 6, 1, 1, seed=3),
    "wide": random(6, 6, 5, 5, seed=4),
    "row": random(6, 6, 1, 3, seed=5),
    "depth": random(6, 1, 3, 3, seed=6),
    "dot": random(6, 1, 1, 1, seed=7),
    "pairs": random(6, 2, 3, 3, seed=8),
    "pairs_dot": random(6, 2, 1, 1, seed=9),
    "more": random(9, 6, 3, 3, seed=10),
    "more_dot": random(9, 6, 1, 1, seed=11),
    "b": random(6, seed=12),
    "gamma": random(6, 1, 1, seed=13),
    "mean": random(6, seed=14),
    "var": random(6, seed=15).abs() + 0.5,
}


def conv(x: Tensor, w: Tensor, b: Tensor | None = None, **attrs: Any) -> Tensor:
    return F.conv2d(x, w, b, **attrs)


def norm(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.mean, m.var, m.b, m.mean)


MERGED: dict[str, Net] = {
    "3x3 and 1x1": lambda m, x: conv(x, m.square, m.b, padding=1) + conv(x, m.point),
    "1x1 and 3x3": lambda m, x: conv(x, m.point) + conv(x, m.square, m.b, padding=1),
    "a block of RepVGG": lambda m, x: (
        norm(m, conv(x, m.square, padding=1)) + norm(m, conv(x, m.point)) + norm(m, x)
    ),
    "steps of two": lambda m, x: (
        conv(x, m.square, padding=1, stride=2) + conv(x, m.point, stride=2)
    ),
    "three of one size": lambda m, x: (
        conv(x, m.square, padding=1)
        + conv(x, m.other, m.b, padding=1)
        + conv(x, m.square, padding=1)
    ),
    "5x5 and dilated 3x3": lambda m, x: (
        conv(x, m.wide, padding=2) + conv(x, m.square, padding=2, dilation=2)
    ),
    "1x3 in 3x3": lambda m, x: conv(x, m.row, padding=(0, 1)) + conv(x, m.square, padding=1),
    "difference": lambda m, x: conv(x, m.square, padding=1) - conv(x, m.point, m.b),
    "depthwise, scaled, and the image": lambda m, x: (
        x
        + m.gamma * (conv(x, m.depth, padding=1, groups=6) + conv(x, m.dot, groups=6) - norm(m, x))
    ),
    "groups of two channels and the image": lambda m, x: (
        conv(x, m.pairs, padding=1, groups=3) + conv(x, m.pairs_dot, groups=3) + x
    ),
    "other channels": lambda m, x: conv(x, m.more, padding=1) + conv(x, m.more_dot),
    "numbers": lambda m, x: 0.5 * (0 + conv(x, m.square, padding=1) - 2 + conv(x, m.point) * 3),
    "of what is computed": lambda m, x: (
        conv(y := torch.relu(x), m.square, padding=1) + conv(y, m.point) + y
    ),
}


@pytest.mark.parametrize("net", MERGED.values(), ids=list(MERGED))
def test_branches_become_one(net: Net) -> None:
    graph, args = captured(net, random(2, 6, 7, 9), **TENSORS)
    log = Log()

    result = check(merge_branches, graph, args, log)

    assert log.applied[RULE] == 1
    assert ops(result)["conv2d"] == 1 and ops(result)["batch_norm"] == 0


def two_blocks(m: Any, x: Tensor) -> Tensor:
    y = conv(x, m.square, padding=1) + conv(x, m.point) + x
    return conv(y, m.square, padding=1) + conv(y, m.point) + norm(m, y)


def test_blocks_behind_one_another_stay_apart() -> None:
    """A sum that several branches read is an image of its own."""
    graph, args = captured(two_blocks, random(1, 6, 5, 4), **TENSORS)

    result = check(merge_branches, graph, args)

    assert ops(result) == {"conv2d": 2, "add": 2, "mul": 1}


def test_volumes() -> None:
    graph, args = captured(
        lambda m, x: F.conv3d(x, m.w, padding=1) + F.conv3d(x, m.v, padding=(1, 0, 0)) + x,
        random(1, 4, 3, 5, 4),
        w=random(4, 4, 3, 3, 3, seed=1),
        v=random(4, 4, 3, 1, 1, seed=2),
    )
    assert ops(check(merge_branches, graph, args)) == {"conv3d": 1, "add": 1}


APART: dict[str, Net] = {
    "two images": lambda m, x: conv(x, m.square, padding=1) + conv(torch.relu(x), m.point),
    "one convolution": lambda m, x: conv(x, m.square, padding=1) + x,
    "one convolution and a batch norm": lambda m, x: conv(x, m.square, padding=1) + norm(m, x),
    "a scaled image alone": lambda m, x: norm(m, x) + x,
    "taps between taps": lambda m, x: (
        conv(x, m.square, padding=2, dilation=2) + conv(x, m.other, padding=1)
    ),
    "taps beyond": lambda m, x: conv(x, m.row, padding=(0, 1)) + conv(x, m.row.mT, padding=(1, 0)),
    "other groups": lambda m, x: (
        conv(x, m.square, padding=1) + conv(x, m.depth, padding=1, groups=6)
    ),
    "weights that are computed": lambda m, x: (
        conv(x, m.square * x.mean(), padding=1) + conv(x, m.point)
    ),
    "product": lambda m, x: conv(x, m.square, padding=1) * conv(x, m.point),
    "a factor of each pixel": lambda m, x: (
        conv(x, m.square, padding=1) * x.mean(1, keepdim=True) + conv(x, m.point)
    ),
    "an infinite factor": lambda m, x: (
        conv(x, m.square, padding=1) * float("inf") + conv(x, m.point)
    ),
    "a factor of rows": lambda m, x: (
        conv(x, m.square, padding=1) * m.square[0, :, 0, :1].repeat(1, 9)[:1].T + conv(x, m.point)
    ),
}


@pytest.mark.parametrize("net", APART.values(), ids=list(APART))
def test_what_is_no_sum_of_one_image_stays(net: Net) -> None:
    graph, args = captured(net, random(2, 6, 9, 9), **TENSORS)
    assert str(check(merge_branches, graph, args)) == str(graph)


def test_a_branch_that_is_read_twice_stays() -> None:
    def net(m: Any, x: Tensor) -> Tensor:
        y = conv(x, m.point)
        return (conv(x, m.square, padding=1) + y) * torch.sigmoid(y)

    graph, args = captured(net, random(1, 6, 5, 5), **TENSORS)
    assert ops(check(merge_branches, graph, args))["conv2d"] == 2


@pytest.mark.parametrize(
    ("size", "factor"), [(4e4, 1.0), (0.3, 1e-7)], ids=["overflow", "underflow"]
)
def test_weights_that_a_type_does_not_hold_stay_apart(size: float, factor: float) -> None:
    w = torch.full((6, 6, 1, 1), size, dtype=torch.float16)
    graph, _ = captured(
        lambda m, x: m.gamma * conv(x, m.w) + m.gamma * conv(x, m.w, m.b),
        random(1, 6, 2, 2, dtype=torch.float16),
        w=w, gamma=torch.full((6, 1, 1), factor, dtype=torch.float16), b=w.flatten()[:6],
    )  # fmt: skip

    assert ops(merge_branches(graph))["conv2d"] == 2


def test_a_sum_is_merged_below_a_factor_that_its_weights_do_not_hold() -> None:
    """Layer scale as it is drawn: 1e-7 of a weight of 0.1 is nothing in fp16."""
    tensors = {name: tensor.half() for name, tensor in TENSORS.items()}
    tensors["gamma"] = torch.full((6, 1, 1), 1e-7, dtype=torch.float16)
    graph, _ = captured(
        lambda m, x: x + m.gamma * (conv(x, m.square, padding=1) + conv(x, m.point)),
        random(1, 6, 4, 4, dtype=torch.float16),
        **tensors,
    )

    assert ops(merge_branches(graph)) == {"conv2d": 1, "mul": 1, "add": 1}


class Block(nn.Module):
    """RepVGG's, as it is trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, k, 1, k // 2, bias=False), self.norm(channels)
            )
            for k in (3, 1)
        )
        self.identity = self.norm(channels)

    @staticmethod
    def norm(channels: int) -> nn.BatchNorm2d:
        norm = nn.BatchNorm2d(channels)
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            nn.init.uniform_(tensor, 0.5, 1.5)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs[0](x) + self.convs[1](x) + self.identity(x))


def test_a_model_in_half_precision_is_as_accurate_as_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4))).eval().half()
    x = torch.randn(1, 16, 13, 11).half()

    graph = run_pipeline(captured(lambda m, x: model(x), x)[0])
    answer, eager = gtco.compile(model, (x,), target="host")(x), model(x)

    assert ops(graph)["conv"] == 4
    exact = model.double()(x.double())
    error, limit = (answer - exact).square().mean(), (eager - exact).square().mean()
    assert error.sqrt() <= 2 * limit.sqrt()
