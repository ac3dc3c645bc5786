"""Poolings: whatever their windows cover of an image, the graph computes what torch does."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.cost_model.knowledge import Knowledge
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.selection import select
from gtco.target import CARDS, TARGETS
from tests.pass_checks import captured, check, ops, random

H100 = TARGETS["sm_90a"]
Pool = Callable[[Tensor], Tensor]


def some_size(draw: python_random.Random, largest: int) -> tuple[int, int]:
    return draw.randint(1, largest), draw.randint(1, largest)


def drawn(draw: python_random.Random) -> tuple[str, Pool, tuple[int, int]]:
    """A pooling, half of them with windows as large as the image or larger, and the image's size;
    torch may refuse it."""
    image = some_size(draw, 9)
    kernel, stride = some_size(draw, draw.choice((4, 12, 30))), some_size(draw, 30)
    padding = draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2)
    padding = draw.choice(((0, 0), padding))
    ceil = draw.random() < 0.6
    if draw.random() < 0.5:
        dilation = draw.choice(((1, 1), some_size(draw, 4)))
        text = f"max {image}: {kernel}, {stride}, {padding}, {dilation}, {ceil}"
        return text, lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil), image
    counted, divisor = draw.random() < 0.5, draw.choice((None, None, 7, 1))
    text = f"mean {image}: {kernel}, {stride}, {padding}, {ceil}, {counted}, {divisor}"
    return text, lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, counted, divisor), image


def graph_of(pool: Pool, x: Tensor) -> Graph:
    return captured(lambda m, x: pool(x), x)[0]


@pytest.mark.parametrize("seed", range(3))
def test_any_pooling_is_what_torch_says(seed: int) -> None:
    draw, pools, images = python_random.Random(seed), {}, []
    while len(pools) < 80:
        text, pool, size = drawn(draw)
        x = random(1, 2, *size, seed=len(pools))
        with suppress(RuntimeError):
            pools[text] = (pool, pool(x))
            images.append(x)

    def all_of_them(m: nn.Module, *images: Tensor) -> tuple[Tensor, ...]:
        return tuple(pool(x) for (pool, _), x in zip(pools.values(), images, strict=True))

    graph, args = captured(all_of_them, *images)
    assert set(ops(graph)) == {"mean", "amax", "max_pool", "avg_pool", "mul"}
    for text, result in zip(pools, interpret(graph, args), strict=True):
        torch.testing.assert_close(
            result, pools[text][1], rtol=1e-12, atol=1e-12, msg=lambda m, text=text: f"{text}: {m}"
        )
    for node in graph.nodes:
        if "kernel" in node.attrs:  # but where an only window has no pixel at all
            sizes = zip(node.outputs[0].sizes[1:3], node.attrs["padding"], strict=True)
            assert any(windows > 1 or padding for windows, padding in sizes), node


def test_a_window_larger_than_the_image_is_its_mean() -> None:
    x = random(2, 8, 7, 7)
    head = nn.AvgPool2d(1280, ceil_mode=True)  # as transformers' EfficientNet has it
    graph = graph_of(head, x)
    assert ops(graph) == {"mean": 1}
    assert ops(graph_of(nn.MaxPool2d(50, ceil_mode=True), x)) == {"amax": 1}
    assert str(graph) == str(graph_of(nn.AdaptiveAvgPool2d(1), x))


def test_one_window_along_an_axis_has_no_more_than_the_image_there() -> None:
    graph = graph_of(nn.MaxPool2d((90, 2), 90, ceil_mode=True), random(1, 3, 5, 180))
    (pool,) = (node for node in graph.nodes if node.op == "max_pool")
    assert pool.attrs["kernel"] == (5, 2)


class Gated(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool, self.conv = pool, nn.Conv2d(8, 16, 1)
        self.down, self.up = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * self.up(self.down(self.pool(x)).relu()).sigmoid()


def test_a_gate_whose_mean_is_a_large_window_is_one_kernel() -> None:
    torch.manual_seed(0)
    model = Gated(nn.AvgPool2d(64, ceil_mode=True)).eval().half()
    args = (torch.randn(2, 8, 7, 7).half(),)
    usual = Gated(nn.AdaptiveAvgPool2d(1)).eval().half()
    names = [group.name for group in gtco.fuse(gtco.capture(model, args))]
    assert any(name.startswith("squeeze") for name in names)
    assert names == [group.name for group in gtco.fuse(gtco.capture(usual, args))]


def test_the_pipeline_keeps_what_clipped_windows_mean() -> None:
    def pools(m: nn.Module, x: Tensor) -> Tensor:
        y = F.max_pool2d(x, (9, 2), (9, 1), (4, 0), (2, 1), True)
        return y + F.avg_pool2d(x, (20, 2), (20, 1), (3, 0), True, False)

    graph, args = captured(pools, random(2, 5, 6, 9))
    check(lambda g, log: run_pipeline(g, log=log), graph, args)


@pytest.mark.parametrize("seed", range(2))
def test_any_adaptive_pooling_is_what_torch_says(seed: int) -> None:
    draw, pools, images = python_random.Random(seed), [], []
    for number in range(60):
        largest = draw.choice((9, 9, 70))
        height, width = some_size(draw, largest)
        size = some_size(draw, draw.choice((3, 12)))
        kind = draw.choice(("avg", "max"))
        shape = (*draw.choice(((3,), (1, 2), (2, 1))), height, width)
        if draw.random() < 0.3:
            shape, size = shape[:-1], size[:1]
        pool = getattr(F, f"adaptive_{kind}_pool{len(size)}d")
        pools.append((pool, size))
        images.append(random(*shape, seed=number))

    def all_of_them(m: nn.Module, *images: Tensor) -> tuple[Tensor, ...]:
        return tuple(pool(x, size) for (pool, size), x in zip(pools, images, strict=True))

    graph, args = captured(all_of_them, *images)
    kinds = {"mean", "amax", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"}
    assert set(ops(graph)) <= kinds
    results = interpret(graph, args), interpret(run_pipeline(graph), args)
    for (pool, size), x, *found in zip(pools, images, *results, strict=True):
        for result in found:
            torch.testing.assert_close(
                result, pool(x, size), rtol=1e-12, atol=1e-12,
                msg=lambda m, at=(pool.__name__, x.shape, size): f"{at}: {m}",
            )  # fmt: skip


class Pyramid(nn.Module):
    """A convolution's image pooled to the sizes of a PSP head (Zhao et al., CVPR 2017)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 1).to(dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.conv(x)
        return tuple(F.adaptive_avg_pool2d(x, n) for n in (1, 2, 3, 6))


@pytest.mark.parametrize("side", (60, 64, 7))
def test_a_pyramid_has_kernels_alone(side: int) -> None:
    torch.manual_seed(0)
    args = (torch.randn(1, 4, side, side).half(),)
    graph = run_pipeline(gtco.capture(Pyramid(torch.float16).eval(), args))
    launches = select(gtco.fuse(graph, target=H100), H100, Knowledge(CARDS["sm_90a"].name))
    assert all(launch.program for launch in launches), [launch.reason for launch in launches]
    assert sum(launch.predicted_us for launch in launches) < 25


def test_indices_of_an_adaptive_maximum_stay_atens() -> None:
    graph = graph_of(lambda x: F.adaptive_max_pool2d(x, 3, True), random(1, 2, 7, 7))
    assert ops(graph) == {"aten": 1}
