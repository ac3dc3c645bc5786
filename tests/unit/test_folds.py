"""`F.fold`: sums of windows where they overlap, and windows moved where they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.check import judge
from gtco.compiler import capture_for, plan_captured
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes.canonicalize import canonicalize
from gtco.runtime.module import CompiledModule
from tests.pass_checks import Function, captured, ops, random

Pair = tuple[int, int]
GEOMETRIES: dict[str, tuple[Pair, Pair, Pair, Pair, Pair]] = {
    # size, kernel, dilation, padding, stride
    "windows of 3 at every second pixel": ((7, 10), (3, 3), (1, 1), (1, 1), (2, 2)),
    "windows side by side": ((6, 9), (2, 3), (1, 1), (0, 0), (2, 3)),
    "side by side, from a pixel of the padding": ((6, 6), (2, 2), (1, 1), (1, 1), (2, 2)),
    "pixels that no window reaches": ((9, 7), (2, 1), (1, 1), (0, 0), (3, 2)),
    "windows beyond the last": ((8, 9), (3, 3), (1, 1), (0, 0), (3, 4)),
    "each pixel in 12 windows": ((6, 5), (4, 3), (1, 1), (2, 1), (1, 1)),
    "taps apart": ((9, 8), (3, 2), (2, 3), (1, 2), (2, 1)),
    "padding wider than a stride": ((5, 4), (5, 3), (1, 1), (4, 3), (2, 1)),
    "one window": ((3, 4), (3, 4), (1, 1), (0, 0), (5, 5)),
    "taps in the padding alone": ((6, 4), (1, 1), (1, 1), (2, 0), (3, 1)),
}


def windows(
    size: Sequence[int], kernel: Pair, dilation: Pair, padding: Pair, stride: Pair, channels: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """[2, C * taps, windows]."""
    counts = [
        (length + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for length, taps, gap, pad, step in zip(
            size, kernel, dilation, padding, stride, strict=True
        )
    ]
    return random(2, channels * math.prod(kernel), math.prod(counts), dtype=dtype)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("batched", [True, False])
def test_it_means_the_same(name: str, batched: bool) -> None:
    geometry = GEOMETRIES[name]
    x = windows(*geometry, channels=3)
    x = x if batched else x[0]
    graph, args = captured(lambda c, x: F.fold(x, *geometry), x)
    assert "aten" not in ops(graph)
    (out,) = interpret(graph, args)
    torch.testing.assert_close(out, F.fold(x, *geometry))


def test_windows_side_by_side_are_moved() -> None:
    geometry = GEOMETRIES["windows side by side"]
    graph, _ = captured(lambda c, x: F.fold(x, *geometry), windows(*geometry, channels=3))
    assert not ops(canonicalize(graph))


def test_halves_are_summed_as_floats() -> None:
    """Of 2048 and three times 1 half floats make 2048."""
    x = torch.ones(1, 4, 4, dtype=torch.float16)
    x[0, 0] = 2048
    graph, args = captured(lambda c, x: F.fold(x, (3, 3), 2), x)
    (out,) = interpret(graph, args)
    assert out[0, 0, 1, 1] == 2052  # 2051, which is no half


def test_what_is_not_finite_stays_in_its_window() -> None:
    geometry = GEOMETRIES["windows of 3 at every second pixel"]
    x = windows(*geometry, channels=1)
    x[0, 4, 0], x[1, 2, 3] = torch.inf, torch.nan
    graph, args = captured(lambda c, x: F.fold(x, *geometry), x)
    (out,) = interpret(graph, args)
    torch.testing.assert_close(out, F.fold(x, *geometry), equal_nan=True)


def test_windows_that_miss_the_image_are_left_to_aten() -> None:
    graph, args = captured(lambda c, x: F.fold(x, 1, 1, 1, 1, 3), random(1, 3, 1))
    (out,) = interpret(graph, args)
    assert ops(graph) == {"aten": 1} and not out.any()


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*GEOMETRIES][:-1])
def test_all_kernels_are_generated_and_right(name: str, dtype: torch.dtype) -> None:
    """Of windows that a product makes, as outlook attention does, and a convolution that reads the
    image."""
    geometry = GEOMETRIES[name]
    x = windows(*geometry, channels=8, dtype=dtype).mT.contiguous()
    depth = x.shape[-1]
    made, read = random(depth, depth, dtype=dtype) / depth**0.5, random(16, 8, 1, 1, dtype=dtype)

    def model(c: Function, x: Tensor) -> Tensor:
        return F.conv2d(F.fold(F.linear(x, c.made).mT, *geometry), c.read)

    module, options = Function(model, made=made, read=read).eval(), Options(target="host")
    whole = capture_for(module, (x,), None, options)
    plan = plan_captured(whole, options)
    assert all(launch.program for launch in plan.launches)
    (exact,) = interpret(whole.graph, (x,), dtype=torch.float64)
    verdict = judge(CompiledModule(plan, whole)(x), module(x), exact, dtype)
    assert verdict.ok, str(verdict)
