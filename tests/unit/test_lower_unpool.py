"""Poolings that say where the largest pixels are, and pixels that are put back there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.check import judge
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.passes.dataflow import drop_dead
from tests.pass_checks import Function, captured, check, ops, random

TIES = random(2, 3, 9, 11).round()
TIES[0, 0], TIES[1, 1, :4] = -math.inf, math.inf

POOLS: dict[str, dict[str, Any]] = {
    "squares": {"kernel_size": 2},
    "windows that are wider than high": {"kernel_size": (2, 4)},
    "rows": {"kernel_size": (1, 5)},
    "windows that overlap": {"kernel_size": (2, 3), "stride": (1, 2)},
    "windows with pixels between them": {"kernel_size": 2, "stride": 3},
    "pixels between taps": {"kernel_size": (2, 3), "stride": 2, "dilation": (3, 2)},
    "one window": {"kernel_size": (2, 3), "stride": 20, "ceil_mode": True},
}


@pytest.mark.parametrize("pool", POOLS)
def test_a_pooling_says_where_its_pixels_are(pool: str) -> None:
    def pooled(m: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, return_indices=True, **POOLS[pool])

    image = TIES[..., :2, :3] if pool == "one window" else TIES
    graph, args = captured(pooled, image.contiguous())
    assert "aten" not in ops(graph)
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    for found, right in zip(interpret(graph, args), pooled(Function(pooled), *args), strict=True):
        assert found.dtype == right.dtype and torch.equal(found, right)


@pytest.mark.parametrize(
    "pool",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3},
        {"kernel_size": 2, "ceil_mode": True},
    ],
)
def test_larger_windows_and_borders_stay_atens(pool: dict[str, Any]) -> None:
    graph, _ = captured(lambda m, x: F.max_pool2d(x, return_indices=True, **pool), TIES)
    assert ops(graph) == {"aten": 1}
    graph, _ = captured(lambda m, x: F.max_pool2d(x, return_indices=True, **pool)[0], TIES)
    assert ops(graph) == {"max_pool": 1}


def test_nan_is_the_largest() -> None:
    x = random(1, 2, 6, 6)
    x[0, 0, 1, 2] = x[0, 1, 3, 3] = math.nan
    graph, args = captured(lambda m, x: F.max_pool2d(x, 2, return_indices=True), x)
    found, right = interpret(graph, args)[0], F.max_pool2d(x, 2)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def put_back(kernel: tuple[int, int]) -> Callable[[Function, Tensor], Tensor]:
    def function(m: Function, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, kernel, return_indices=True)
        return F.max_unpool2d(y.exp() - 3, places, kernel, output_size=x.shape[2:])

    return function


@pytest.mark.parametrize("kernel", [(2, 2), (2, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("image", [TIES, TIES[..., :8, :6].contiguous()])
def test_pixels_are_put_back(kernel: tuple[int, int], image: Tensor) -> None:
    function = put_back(kernel)
    graph, args = captured(function, image)
    assert not {"aten", "gather"} & set(ops(drop_dead(graph)))
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert torch.equal(interpret(graph, args)[0], function(Function(function), image))


def test_only_at_places_of_windows_apart() -> None:
    def overlapping(m: Function, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, 2, 1, return_indices=True)
        return F.max_unpool2d(y, places, 2, 1)

    def of_another_size(m: Function, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y, places, 2, output_size=(9, 10))

    def computed(m: Function, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y, places.flip(1), 2, output_size=x.shape[2:])

    x = random(2, 3, 9, 11)
    for function in (overlapping, of_another_size, computed):
        graph, args = captured(function, x)
        (left,) = (node for node in graph.nodes if node.op == "aten")
        assert "max_unpool2d" in str(left.attrs["target"])
        assert torch.equal(interpret(graph, args)[0], function(Function(function), x))


class Segmenter(nn.Module):
    """An encoder and a decoder, as SegNet has them (Badrinarayanan et al., TPAMI 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x).relu()
        y, places = F.max_pool2d(x, 2, return_indices=True)
        return self.up(F.max_unpool2d(self.deep(y), places, 2, output_size=x.shape[2:]))


@pytest.mark.compiler
@pytest.mark.parametrize("size", [(8, 12), (7, 9)])
def test_a_decoder_is_generated_whole_and_right(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Segmenter().half().eval().requires_grad_(False)
    x = torch.randn(1, 3, *size).half()
    gtco.compile(model, (x,), target="sm_90a", fallback="error")
    compiled = gtco.compile(model.float(), (x.float(),), target="host", fallback="error")
    right = model(x.float()), model.double()(x.double())
    verdict = judge(compiled(x.float()), *right, torch.float32)
    assert verdict.ok, verdict
