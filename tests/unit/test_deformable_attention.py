"""Attention that samples a few points of images, as DETR's deformable descendants have it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.frontend.torch_export import capture
from gtco.passes import run_pipeline
from tests.pass_checks import check, ops, random

SIZES = ((6, 5), (3, 3))
TOKENS = sum(height * width for height, width in SIZES)


class DeformableAttention(nn.Module):
    """Each query weighs `points` points of each image around a place of its own, head by head."""

    def __init__(self, width: int = 16, heads: int = 2, points: int = 3) -> None:
        super().__init__()
        self.heads, self.points = heads, points
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
        y = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1)
        return y.view(batch, width, queries).transpose(1, 2).contiguous()


def arguments(batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.rand(batch, 7, 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    return random(batch, 7, 16, dtype=dtype), random(batch, TOKENS, 16, dtype=dtype, seed=1), places


@pytest.mark.parametrize("batch", [1, 2])
def test_a_kernel_of_its_own_for_each_image(batch: int) -> None:
    args = arguments(batch, torch.float64)
    graph = capture(DeformableAttention().double().eval(), args).graph
    found = ops(check(lambda g, log: run_pipeline(g, log=log), graph, args))
    assert found["grid_sample"] == len(SIZES) and not found["aten"]


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
