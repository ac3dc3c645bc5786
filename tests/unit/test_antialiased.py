"""Antialiased resizes: products along each axis give what torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gtco
from gtco.check import judge
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests.pass_checks import Function, captured, check, ops, random

Resize = Callable[[Tensor], Tensor]


def resize(mode: str, size: tuple[int, int] | None, align: bool, factor: float | None) -> Resize:
    def of(x: Tensor) -> Tensor:
        return F.interpolate(
            x, size, factor, mode=mode, align_corners=align, antialias=True,
            recompute_scale_factor=False if factor else None,
        )  # fmt: skip

    return of


@pytest.mark.parametrize("mode", ("bilinear", "bicubic"))
@pytest.mark.parametrize("align", (False, True))
@pytest.mark.parametrize(
    "image, size, factor, products",
    [
        ((64, 47), (24, 31), None, 2),
        ((7, 9), (13, 4), None, 2),
        ((9, 7), (9, 3), None, 1),
        ((1, 5), (3, 1), None, 2),
        ((5, 6), (5, 6), None, 0),
        ((31, 10), None, 0.37, 2),
        ((10, 1), None, 1.05, None),  # as many pixels, but not the same ones
    ],
)
def test_a_resize_is_products(
    mode: str,
    align: bool,
    image: tuple[int, int],
    size: tuple[int, int] | None,
    factor: float | None,
    products: int | None,
) -> None:
    x, function = random(2, 3, *image), resize(mode, size, align, factor)
    graph, args = captured(lambda m, x: function(x), x)
    assert set(ops(graph)) <= {"linear"}
    assert products is None or ops(graph)["linear"] == products
    check(lambda g, log: run_pipeline(g, log=log), graph, args)
    torch.testing.assert_close(interpret(graph, args)[0], function(x), rtol=1e-12, atol=1e-12)


def test_the_axis_that_shrinks_most_comes_first() -> None:
    function = resize("bilinear", (32, 8), False, None)
    graph, _ = captured(lambda m, x: function(x), random(1, 3, 64, 64))
    sizes = [node.outputs[0].sizes for node in graph.nodes if node.op == "linear"]
    assert sizes == [(1, 3, 64, 8), (1, 3, 8, 32)]


def test_bytes_stay_atens() -> None:
    x = random(1, 3, 9, 9).abs().mul(50).to(torch.uint8)
    graph, _ = captured(lambda m, x: resize("bilinear", (5, 4), False, None)(x), x)
    assert ops(graph) == {"aten": 1}


@pytest.mark.compiler
@pytest.mark.parametrize("mode", ("bilinear", "bicubic"))
def test_is_generated_and_right(mode: str) -> None:
    model = Function(lambda m, x: resize(mode, (13, 20), False, None)(x - 0.5))
    x = random(1, 3, 33, 47, dtype=torch.float32)
    gtco.compile(model.half().eval(), (x.half(),), target="sm_90a", fallback="error")
    compiled = gtco.compile(model.float(), (x,), target="host", fallback="error")
    verdict = judge(compiled(x), model(x), model(x.double()), torch.float32)
    assert verdict.ok, verdict
