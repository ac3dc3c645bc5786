"""Attention that samples a few points of images, as DETR's deformable descendants have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import gtco
from gtco.check import judge
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.passes.rewrite import Log
from tests.pass_checks import captured, check, ops, random, reasons

SIZES = ((6, 5), (3, 3))
TOKENS = sum(height * width for height, width in SIZES)


class DeformableAttention(nn.Module):
    """Each query weighs `points` points of each image around a place of its own, head by head."""

    def __init__(
        self, width: int = 16, heads: int = 2, points: int = 3, stacked: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.points, self.stacked = heads, points, stacked
        self.value = nn.Linear(width, width)
        self.offsets = nn.Linear(width, heads * len(SIZES) * points * 2)
        self.weights = nn.Linear(width, heads * len(SIZES) * points)

    def forward(self, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        batch, queries, width = x.shape
        heads, levels, points = self.heads, len(SIZES), self.points
        value = self.value(tokens).view(batch, TOKENS, heads, width // heads)
        offsets = self.offsets(x).view(batch, queries, heads, levels, points, 2)
        weights = self.weights(x).view(batch, queries, heads, levels * points).softmax(-1)
        grids = 2 * (places[:, :, None, None, None] + 0.1 * offsets) - 1
        sampled = []
        for level, part in enumerate(value.split([h * w for h, w in SIZES], 1)):
            image = part.flatten(2).transpose(1, 2)
            image = image.reshape(batch * heads, width // heads, *SIZES[level])
            grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
            sampled.append(F.grid_sample(image, grid, align_corners=False))
        weights = weights.transpose(1, 2).reshape(batch * heads, 1, queries, levels * points)
        joined = torch.stack(sampled, -2).flatten(-2) if self.stacked else torch.cat(sampled, -1)
        y = (joined * weights).sum(-1)
        return y.view(batch, width, queries).transpose(1, 2).contiguous()


def arguments(batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.rand(batch, 7, 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    return random(batch, 7, 16, dtype=dtype), random(batch, TOKENS, 16, dtype=dtype, seed=1), places


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_all_images_are_sampled_and_summed_by_one_node(batch: int, stacked: bool) -> None:
    args = arguments(batch, torch.float64)
    graph = capture(DeformableAttention(stacked=stacked).double().eval(), args).graph
    found = ops(check(lambda g, log: run_pipeline(g, log=log), graph, args))
    assert found["sample_sum"] == 1
    assert not found.keys() & {"aten", "grid_sample", "concat", "sum"}


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_right_on_the_host_build(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = DeformableAttention().eval()
    args = arguments(2, dtype)
    compiled = gtco.compile(model.to(dtype), args, target="host", fallback="error")
    exact = model.double()(*(arg.double() for arg in args))
    error = (compiled(*args).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < {torch.float16: 5e-3, torch.float32: 1e-5}[dtype]


SAMPLES = random(2, 3, 6, 5), random(2, 7, 4, 2, seed=1), random(2, 1, 7, 4, seed=2)
"""An image, points of it, and a weight for each point."""


def _sampled(x: Tensor, grid: Tensor, **given: Any) -> Tensor:
    return F.grid_sample(x, grid, align_corners=False, **given)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, g, w: (_sampled(x, g) * w).sum(-1),
        lambda m, x, g, w: (w[:1, :, :1] * _sampled(x, g, mode="nearest")).sum(3, keepdim=True),
        lambda m, x, g, w: (torch.cat([_sampled(x, g)] * 2, 3) * w.repeat(1, 1, 1, 2)).sum(-1),
        lambda m, x, g, w: (_sampled(x, g, padding_mode="border") * w[..., :1]).sum(-1) * 2,
    ],
)
def test_weighed_sums_of_samples(function: Callable[..., Tensor]) -> None:
    graph, args = captured(function, *SAMPLES)
    found = ops(check(lambda g, log: run_pipeline(g, log=log), graph, args))
    assert found["sample_sum"] == 1 and not found["sum"]


OTHERS: dict[str, Callable[..., Any]] = {
    "a sum over rows": lambda m, x, g, w: (_sampled(x, g) * w).sum(2),
    "a sum over channels": lambda m, x, g, w: (_sampled(x, g) * w).sum(1),
    "a sum of all points": lambda m, x, g, w: (_sampled(x, g) * w).sum((2, 3)),
    "a weight for each channel": lambda m, x, g, w: (_sampled(x, g) * w.repeat(1, 3, 1, 1)).sum(-1),
    "samples that others read": lambda m, x, g, w: (_sampled(x, g), (_sampled(x, g) * w).sum(-1)),
    "products that others read": lambda m, x, g, w: [
        f(_sampled(x, g) * w) for f in (torch.relu, lambda y: y.sum(-1))
    ],
    "rows joined": lambda m, x, g, w: (
        torch.cat([_sampled(x, g), _sampled(x, g + 1)], 2) * w.repeat(1, 1, 2, 1)
    ).sum(-1),
    "samples and others joined": lambda m, x, g, w: (
        torch.cat([_sampled(x, g), _sampled(x, g).relu() + 1], 3) * w.repeat(1, 1, 1, 2)
    ).sum(-1),
    "images sampled in two ways": lambda m, x, g, w: (
        torch.cat([_sampled(x, g), _sampled(x, g, mode="nearest")], 3) * w.repeat(1, 1, 1, 2)
    ).sum(-1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_sums_stay(case: str) -> None:
    graph, args = captured(OTHERS[case], *SAMPLES)
    log = Log()
    found = ops(check(lambda g, _: run_pipeline(g, log=log), graph, args))
    assert not found["sample_sum"] and found["grid_sample"]
    ways = "sampled in different ways" in reasons(log)
    assert ways == (case == "images sampled in two ways")


# -- images of fewer bits than their points ------------------------------------------------------


HALVES = (
    random(2, 8, 6, 5, dtype=torch.float16),
    random(2, 7, 4, 2, seed=1, dtype=torch.float32),
    random(2, 1, 7, 4, seed=2, dtype=torch.float32),
)
"""The same of an image of fp16."""


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda m, x, g, w: _sampled(x.float(), g) * w, "grid_sample"),
        (lambda m, x, g, w: _sampled(x.float().transpose(2, 3), g, mode="nearest"), "grid_sample"),
        (lambda m, x, g, w: (_sampled(x.float(), g) * w).sum(-1), "sample_sum"),
        (lambda m, x, g, w: (_sampled(x.relu().float(), g) * w).sum(-1).half(), "sample_sum"),
    ],
)
def test_an_image_is_read_as_it_was_before_it_was_widened(
    function: Callable[..., Tensor], op: str
) -> None:
    graph, args = captured(function, *HALVES)
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    (sampler,) = (node for node in result.nodes if node.op == op)
    dtypes = [result.specs[value].dtype for value in (*sampler.inputs[:2], *sampler.values)]
    assert dtypes == [torch.float16, torch.float32, torch.float32]
    casts = [node.outputs[0].dtype for node in result.nodes if node.op == "cast"]
    assert torch.float32 not in casts


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, g, w: _sampled(x.half().float(), g.half().float().half().float()),
        lambda m, x, g, w: _sampled(x.double(), g.double()),
    ],
)
def test_rounding_of_points_stays(function: Callable[..., Tensor]) -> None:
    graph, args = captured(function, HALVES[0].float(), *HALVES[1:])
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    (exact,) = interpret(graph, args, rounded=True)
    (found,) = interpret(result, args, rounded=True)
    assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_images_of_two_types_are_not_summed_together() -> None:
    def function(m: Any, x: Tensor, y: Tensor, g: Tensor, w: Tensor) -> Tensor:
        joined = torch.cat([_sampled(x.float(), g), _sampled(y, g)], 3)
        return (joined * torch.cat([w, w], 3)).sum(-1)

    graph, args = captured(function, HALVES[0], HALVES[0].float() + 1, *HALVES[1:])
    log = Log()
    found = ops(check(lambda g, _: run_pipeline(g, log=log), graph, args))
    assert found["grid_sample"] == 2 and "images are of several dtypes" in reasons(log)


@pytest.mark.compiler
def test_an_image_of_halves_on_the_host_build() -> None:
    class Samples(nn.Module):
        def forward(self, x: Tensor, grid: Tensor, weights: Tensor) -> Tensor:
            return (_sampled(x.relu().float(), grid) * weights).sum(-1).half()

    compiled = gtco.compile(Samples().eval(), HALVES, target="host", fallback="error")
    verdict = judge(
        compiled(*HALVES),
        Samples()(*HALVES),
        Samples()(HALVES[0].float(), *HALVES[1:]).double(),
        torch.float16,
    )
    assert verdict.ok, verdict
