"""Masks that are known and come again with each image of a batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import gtco
from gtco.check import judge
from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.passes import known_masks, run_pipeline
from gtco.passes.known_masks import sum_of_known
from tests.pass_checks import captured, check, ops, random

HEADS, TOKENS, WINDOWS, WIDTH = 4, 6, 4, 32
SHAPES = [(6, 2, 3, 5), (2, 3, 2, 3, 5), (2, 3, 1, 2, 3, 5), (12, 3, 5), (3, 4, 3, 5), (6, 2, 5, 3)]
"""Shapes of as many scores."""


@pytest.mark.parametrize("scores", SHAPES[:5])
@pytest.mark.parametrize("shapes", list(itertools.combinations_with_replacement(SHAPES, 2)))
def test_the_sum_of_what_is_known(scores: tuple[int, ...], shapes: tuple[tuple[int, ...]]) -> None:
    for kept in range(4):
        masks = []
        for number, shape in enumerate(shapes):
            own = [1 if dim < kept + number else size for dim, size in enumerate(shape)]
            masks.append((random(*own, seed=number), shape))
        total, times = sum_of_known(masks, scores)
        assert math.prod(scores) == times * total.numel()
        whole = sum(mask.expand(shape).reshape(scores) for mask, shape in masks)
        assert_close(total.repeat(times, 1, 1).reshape(scores), whole)


class Windows(nn.Module):
    """Attention of windows with a bias of heads and a mask of windows, as Swin has it."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(random(HEADS, TOKENS, TOKENS, dtype=torch.float32))
        apart = torch.rand(WINDOWS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
        self.register_buffer("mask", torch.where(apart < 0.4, -100.0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x, WINDOWS)

    def attended(self, x: Tensor, windows: int) -> Tensor:
        images = len(x) // windows
        q, k, v = self.qkv(x).reshape(len(x), TOKENS, 3, HEADS, 8).permute(2, 0, 3, 1, 4)
        if self.fused:
            mask = self.mask.reshape(1, windows, 1, TOKENS, TOKENS)
            mask = mask.expand(images, -1, HEADS, -1, -1).reshape(-1, HEADS, TOKENS, TOKENS)
            y = F.scaled_dot_product_attention(q, k, v, self.bias.unsqueeze(0) + mask)
            return y.transpose(1, 2).reshape(x.shape)
        scores = (q * 8**-0.5) @ k.transpose(-2, -1) + self.bias
        scores = scores.reshape(images, windows, HEADS, TOKENS, TOKENS)
        scores = (scores + self.mask.unsqueeze(1)).reshape(-1, HEADS, TOKENS, TOKENS)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


def masks_of(graph: Graph) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for name, each in graph.constants.items() if "mask" in name]


@pytest.mark.parametrize("images", [1, 3])
def test_windows_keep_what_one_image_has(images: int) -> None:
    model = Windows(fused=False).double().eval()
    args = (random(images * WINDOWS, TOKENS, WIDTH),)
    graph = capture(model, args).graph
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert ops(result)["attention"] == 1 and "softmax" not in ops(result)
    (node,) = (node for node in result.nodes if node.op == "attention")
    assert result.specs[node.inputs[3]].sizes == (images * WINDOWS, HEADS, TOKENS, TOKENS)
    kept = (WINDOWS, HEADS, TOKENS, TOKENS)
    assert masks_of(result) == [kept if images == 1 else (1, *kept)]


@pytest.mark.compiler
@pytest.mark.parametrize("fused", [False, True])
def test_windows_of_images_on_the_host_build(fused: bool) -> None:
    torch.manual_seed(0)
    model, x = Windows(fused).eval(), random(3 * WINDOWS, TOKENS, WIDTH, dtype=torch.float32)
    with torch.no_grad():
        exact, eager = model.double()(x.double()), model.half()(x.half())
    found = gtco.compile(model, (x.half(),), target="host", fallback="error")(x.half())
    verdict = judge(found, eager, exact, torch.float16)
    assert verdict.ok, verdict


def test_the_sum_of_many_windows_is_left_to_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_masks, "MOST_SUMMED", 100)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (Windows(fused=False) for _ in range(2))
            for layer in (self.first, self.second):
                layer.mask = layer.mask.repeat(8, 1, 1)
            self.second.bias = nn.Parameter(self.second.bias.detach() * 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first.attended(x, 8 * WINDOWS) + x
            return self.second.attended(y, 8 * WINDOWS)

    args = (random(16 * WINDOWS, TOKENS, WIDTH),)
    graph = capture(Layers().double().eval(), args).graph
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    attentions = [node for node in result.nodes if node.op == "attention"]
    assert [len(node.inputs) for node in attentions] == [5, 5]
    shapes = [(1, 8 * WINDOWS, 1, TOKENS, TOKENS), *[(1, HEADS, TOKENS, TOKENS)] * 2]
    assert sorted(masks_of(result)) == sorted(shapes)


QKV = [random(3, HEADS, TOKENS, 8, seed=seed) for seed in range(3)]
KEYS = torch.tensor([0.0, 0.0, -1.0, 0.5, 0.0, -2.0])


def test_a_mask_that_is_expanded_stays_small() -> None:
    graph, args = captured(
        lambda m, q, k, v: F.scaled_dot_product_attention(
            q, k, v, m.keys.expand(3, HEADS, TOKENS, TOKENS)
        ),
        *QKV,
        keys=KEYS.double(),
    )
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert ops(result) == {"attention": 1}
    assert max(each.numel() for each in result.constants.values()) <= TOKENS


def test_what_others_read_is_folded() -> None:
    def function(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = m.keys.expand(3, HEADS, TOKENS, TOKENS)
        return F.scaled_dot_product_attention(q, k, v, mask).sum(-1, keepdim=True) + mask.cumsum(-1)

    graph, args = captured(function, *QKV, keys=KEYS.double())
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert ops(result)["attention"] == 1 and not ops(result)["cumsum"]


@pytest.mark.parametrize("fill", [0.0, True])
def test_a_mask_that_forbids_nothing_goes_however_it_is_seen(fill: float) -> None:
    graph, args = captured(
        lambda m, q, k, v: F.scaled_dot_product_attention(
            q, k, v, m.keys.expand(3, HEADS, TOKENS, TOKENS)
        ),
        *QKV,
        keys=torch.full((TOKENS,), fill, dtype=torch.bool if fill is True else torch.float64),
    )
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    (node,) = (node for node in result.nodes if node.op == "attention")
    assert len(node.inputs) == 3 and not result.constants


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_a_mask_that_was_made_for_each_image_is_kept_once(dtype: torch.dtype) -> None:
    mask = random(HEADS, TOKENS, TOKENS, seed=5).clamp(min=0).to(dtype)
    mask[..., 0] = 1  # forbids no query every key
    graph, args = captured(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask), *QKV,
        mask=mask.repeat(3, 1, 1, 1),
    )  # fmt: skip
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    (node,) = (node for node in result.nodes if node.op == "attention")
    assert result.specs[node.inputs[3]].sizes == (1, HEADS, TOKENS, TOKENS)
