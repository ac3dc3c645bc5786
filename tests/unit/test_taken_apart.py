"""Operators that are taken apart: each means what torch's own does, and is computed by kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gtco
from gtco import compiler
from gtco.frontend import sampled
from gtco.frontend.taken_apart import MOST_BOUNDARIES, MOST_SORTED, TAKEN_APART, taken_apart
from gtco.ir.interpreter import interpret
from gtco.options import Options
from tests.pass_checks import Function, captured, random

ODD = random(3, 5, 33, seed=1)
ODD[0, 1, 4], ODD[1, 2, 7], ODD[1, 2, 9] = math.nan, math.inf, -math.inf
TIES = random(4, 6, 8).round()
EDGES = torch.tensor([-1.5, -0.5, 0.0, 0.0, 0.25, 2.0], dtype=torch.float64)
VOLUME, POINTS = random(2, 3, 4, 5, 7), 1.2 * random(2, 3, 4, 5, 3, seed=1)
IMAGE, PLACES = random(2, 3, 5, 7), 2 * random(2, 4, 5, 2, seed=1)


def kinds_of_volumes() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    kinds = itertools.product(
        ("bilinear", "nearest"), ("zeros", "border", "reflection"), (True, False)
    )
    return {
        f"volumes, {mode}, {padding}, {align}": (
            lambda m, x, grid, given=(mode, padding, align): F.grid_sample(x, grid, *given),
            (VOLUME, POINTS),
        )
        for mode, padding, align in kinds
    }


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "bilinear": (
        lambda m, x, y, w, b: F.bilinear(x, y, w, b),
        (random(2, 7, 5), random(2, 7, 6), random(4, 5, 6), random(4)),
    ),
    "bucketize": (lambda m, x, b: torch.bucketize(x, b), (ODD, EDGES)),
    "bucketize, on an edge": (
        lambda m, x, b: torch.bucketize(x, b, out_int32=True),
        (torch.cat([EDGES, EDGES + 0.5]), EDGES),
    ),
    "bucketize, right": (lambda m, x, b: torch.bucketize(x, b, right=True), (EDGES, EDGES)),
    "searchsorted": (lambda m, x, b: torch.searchsorted(b, x), (ODD, EDGES)),
    "searchsorted, right": (lambda m, x, b: torch.searchsorted(b, x, side="right"), (EDGES, EDGES)),
    "median, odd": (lambda m, x: x.median(-1)[0], (ODD,)),
    "median, even": (lambda m, x: x.median(1, keepdim=True)[0], (TIES,)),
    "median, of integers": (lambda m, x: x.median(0)[0], (TIES.int(),)),
    "median, its place": (lambda m, x: x.median(1), (random(3, 6, 5, seed=2),)),
    "median, of all": (lambda m, x: x.median() + x, (TIES,)),
    "median, of all with NaN": (lambda m, x: x.median() + x, (ODD,)),
    "kthvalue": (lambda m, x: x.kthvalue(3, 1), (random(3, 7, 5),)),
    "kthvalue, near the end": (lambda m, x: x.kthvalue(31, keepdim=True)[0], (ODD,)),
    "images, reflection": (
        lambda m, x, grid: F.grid_sample(x, grid, "bilinear", "reflection", False),
        (IMAGE, PLACES),
    ),
    "images, reflection of corners": (
        lambda m, x, grid: F.grid_sample(x, grid, "nearest", "reflection", True),
        (IMAGE, PLACES),
    ),
    **kinds_of_volumes(),
}


def results(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def in_dtype(args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_means_what_torchs_own_does(case: str, dtype: torch.dtype) -> None:
    function, args = CASES[case]
    args = in_dtype(args, dtype)
    graph, _ = captured(function, *args)
    assert "aten" not in {node.op for node in graph.nodes}
    for found, right in zip(interpret(graph, args), results(function(None, *args)), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_is_computed_by_kernels(case: str) -> None:
    function, args = CASES[case]
    halves = in_dtype(args, torch.float16)
    plan, _ = compiler.make_plan(
        Function(function).eval(), halves, None, Options.of(target="sm_90a")
    )
    assert all(launch.program is not None for launch in plan.launches)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "case", ["bilinear", "bucketize", "median, odd", "volumes, bilinear, zeros, False"]
)
def test_right_on_the_host_build(case: str) -> None:
    function, args = CASES[case]
    args = in_dtype(args, torch.float32)
    compiled = gtco.compile(Function(function).eval(), args, target="host", fallback="error")
    for found, right in zip(results(compiled(*args)), results(function(None, *args)), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)


LEFT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "bucketize": (
        lambda m, x, b: torch.bucketize(x, b),
        (ODD, torch.arange(MOST_BOUNDARIES + 1, dtype=torch.float64)),
    ),
    "median": (lambda m, x: x.median(1)[0], (random(2, MOST_SORTED + 1),)),
    "kthvalue": (lambda m, x: x.kthvalue(MOST_SORTED + 1)[0], (random(2, 3 * MOST_SORTED),)),
    "grid_sampler": (
        lambda m, x, grid: F.grid_sample(x, grid, "bicubic", "zeros", False),
        (IMAGE, PLACES),
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_other_forms_stay_torchs(case: str) -> None:
    function, args = LEFT[case]
    graph, _ = captured(function, *args)
    (target,) = (node.attrs["target"] for node in graph.nodes if node.op == "aten")
    assert target.startswith(f"aten.{case}")


def test_the_table_has_what_torch_has() -> None:
    names = {str(overload) for overload in taken_apart()}
    assert names <= set(TAKEN_APART)
    assert {name for name in TAKEN_APART if name.startswith("aten")} <= names


# -- torchvision's operators, without torchvision ------------------------------------------------


def pixel(x: Tensor, row: int, column: int) -> Tensor:
    """Channels of x [C, H, W] at a pixel, zeros outside."""
    inside = 0 <= row < x.shape[1] and 0 <= column < x.shape[2]
    return x[:, row, column] if inside else torch.zeros_like(x[:, 0, 0])


def between(x: Tensor, row: float, column: float) -> Tensor:
    """The bilinear mean of four pixels."""
    top, left = math.floor(row), math.floor(column)
    total = torch.zeros_like(x[:, 0, 0])
    for down, right in itertools.product((0, 1), repeat=2):
        weight = (1 - abs(row - top - down)) * (1 - abs(column - left - right))
        total = total + weight * pixel(x, top + down, left + right)
    return total


def plain_deform_conv(
    x: Tensor, weight: Tensor, offsets: Tensor, mask: Tensor | None, bias: Tensor, *,
    stride: tuple[int, int], pad: tuple[int, int], dilation: tuple[int, int],
    groups: int, offset_groups: int,
) -> Tensor:  # fmt: skip
    """Place by place and tap by tap."""
    outputs, depth, height, width = weight.shape
    part, taps = x.shape[1] // offset_groups, height * width
    y = torch.zeros(len(x), outputs, *offsets.shape[2:], dtype=x.dtype)
    for n, row, column in itertools.product(*map(range, (len(x), *offsets.shape[2:]))):
        columns = torch.zeros(x.shape[1], taps, dtype=x.dtype)
        for g, i, j in itertools.product(range(offset_groups), range(height), range(width)):
            tap = i * width + j
            first = 2 * (g * taps + tap)
            at_row = row * stride[0] - pad[0] + i * dilation[0] + offsets[n, first, row, column]
            at_column = column * stride[1] - pad[1] + j * dilation[1]
            at_column = at_column + offsets[n, first + 1, row, column]
            found = between(x[n, g * part : (g + 1) * part], float(at_row), float(at_column))
            if mask is not None:
                found = found * mask[n, g * taps + tap, row, column]
            columns[g * part : (g + 1) * part, tap] = found
        for o in range(outputs):
            start = o // (outputs // groups) * depth
            y[n, o, row, column] = (weight[o].flatten(1) * columns[start : start + depth]).sum()
    return y + bias[:, None, None]


DEFORMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "strides": {"stride": (2, 1), "pad": (0, 2), "dilation": (1, 2)},
    "groups": {"groups": 2, "stride": (2, 2)},
    "offset groups": {"offset_groups": 4, "masked": False},
    "both": {"groups": 2, "offset_groups": 4},
    "as many": {"groups": 4, "offset_groups": 4, "dilation": (2, 1)},
}


def deformed(
    masked: bool = True, **given: Any
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor], dict[str, Any]]:
    """Operands and the rest of a call; some points lie far outside, or exactly at an edge."""
    plain = {"stride": (1, 1), "pad": (1, 1), "dilation": (1, 1), "groups": 1, "offset_groups": 1}
    given = {**plain, **given}
    weight = random(8, 4 // given["groups"], 3, 2, seed=1)
    sizes = [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, pad, dilation in zip(
            (5, 6), (3, 2), given["stride"], given["pad"], given["dilation"], strict=True
        )
    ]
    taps = 6 * given["offset_groups"]
    offsets = 2 * random(2, 2 * taps, *sizes, seed=2)
    offsets[0, 0, 0], offsets[0, 1, 1] = 1e5, -1e5
    offsets[1, :4] = offsets[1, :4].round()
    mask = random(2, taps, *sizes, seed=3).sigmoid() if masked else None
    return (random(2, 4, 5, 6), weight, offsets, mask, random(8, seed=4)), given


@pytest.mark.parametrize("form", DEFORMED)
def test_deformed_convolutions(form: str) -> None:
    operands, given = deformed(**DEFORMED[form])
    right = plain_deform_conv(*operands, **given)
    found = sampled.deform_conv(*operands, **given)
    torch.testing.assert_close(found, right)
    single = [None if each is None else each.float() for each in operands]
    torch.testing.assert_close(
        sampled.deform_conv(*single, **given).double(), right, rtol=1e-4, atol=1e-4
    )


def test_offsets_of_16_bits_lose_no_pixels() -> None:
    """Positions beyond 1024 have no fractions in fp16."""
    x = torch.arange(2048.0).remainder(7).reshape(1, 1, 1, 2048).half()
    offsets = torch.zeros(1, 2, 1, 2048).half()
    offsets[:, 1] = 0.25
    weight, none = torch.ones(1, 1, 1, 1).half(), {"pad": (0, 0), "dilation": (1, 1)}
    given = {"stride": (1, 1), "groups": 1, "offset_groups": 1, **none}
    found = sampled.deform_conv(x, weight, offsets, None, None, **given)
    ahead = F.pad(x.float()[..., 1:], (0, 1))
    torch.testing.assert_close(found.float(), torch.lerp(x.float(), ahead, 0.25), rtol=0, atol=2e-3)


def plain_roi_align(
    x: Tensor, regions: Tensor, images: Tensor, *,
    scale: float, size: tuple[int, int], samples: int, aligned: bool,
) -> Tensor:  # fmt: skip
    y = torch.zeros(len(regions), x.shape[1], *size, dtype=x.dtype)
    limits = x.shape[2:]
    for r, row, column in itertools.product(range(len(regions)), *map(range, size)):
        left, top, right, bottom = (regions[r] * scale - 0.5 * aligned).tolist()
        height, width = bottom - top, right - left
        if not aligned:
            height, width = max(height, 1), max(width, 1)
        for i, j in itertools.product(range(samples), repeat=2):
            at = (
                top + (row + (i + 0.5) / samples) * height / size[0],
                left + (column + (j + 0.5) / samples) * width / size[1],
            )
            if all(-1 <= place <= limit for place, limit in zip(at, limits, strict=True)):
                moved = [
                    min(max(place, 0), limit - 1) for place, limit in zip(at, limits, strict=True)
                ]
                y[r, :, row, column] += between(x[int(images[r])], *moved) / samples**2
    return y


REGIONS = torch.tensor(
    [[1.0, 2, 9, 8], [-3, -3, 20, 14], [4, 4, 4, 4], [10, 1, 5, 6], [0, 0, 12, 10]]
).double()


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("batch", "samples"), [(1, 1), (1, 2), (3, 3)])
def test_regions(batch: int, samples: int, aligned: bool) -> None:
    x, images = random(batch, 3, 5, 6), torch.arange(5) % batch
    given = {"scale": 0.5, "size": (2, 3), "samples": samples, "aligned": aligned}
    right = plain_roi_align(x, REGIONS, images, **given)
    torch.testing.assert_close(sampled.roi_align(x, REGIONS, images, **given), right)
    single = sampled.roi_align(x.float(), REGIONS.float(), images, **given)
    torch.testing.assert_close(single.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aligned", [True, False])
def test_regions_of_images_that_are_too_many_to_stack(
    aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, images = random(3, 3, 5, 6), torch.arange(5) % 3
    given = {"scale": 0.5, "size": (2, 3), "samples": 2, "aligned": aligned}
    monkeypatch.setattr(sampled, "FINE_ROWS", 0)
    right = plain_roi_align(x, REGIONS, images, **given)
    torch.testing.assert_close(sampled.roi_align(x, REGIONS, images, **given), right)


def test_images_that_are_stacked_stay_apart() -> None:
    x, images = random(3, 2, 5, 6), torch.arange(5) % 3
    given = {"scale": 0.5, "size": (2, 3), "samples": 2, "aligned": True}
    expected = sampled.roi_align(x, REGIONS, images, **given)
    x[1] = math.nan
    found = sampled.roi_align(x, REGIONS, images, **given)
    assert torch.equal(found[images != 1], expected[images != 1])


def test_with_torchvision() -> None:
    vision = pytest.importorskip("torchvision.ops")

    weight = random(8, 2, 3, 3, seed=4)

    def function(m: Any, x: Tensor, offsets: Tensor, mask: Tensor, regions: Tensor) -> Tensor:
        y = vision.deform_conv2d(x, offsets, m.weight, padding=1, mask=mask.sigmoid())
        return vision.roi_align(y, regions, 3, 0.5, 2, True)

    regions = torch.cat([torch.arange(5).remainder(2)[:, None].double(), REGIONS], 1)
    args = (random(2, 4, 6, 7), random(2, 36, 6, 7, seed=1), random(2, 18, 6, 7, seed=2), regions)
    graph, _ = captured(function, *args, weight=weight)
    assert "aten" not in {node.op for node in graph.nodes}
    (found,) = interpret(graph, args)
    torch.testing.assert_close(found, function(Function(function, weight=weight), *args))


def test_regions_of_as_many_samples_as_they_are_large_stay_torchvisions() -> None:
    vision = pytest.importorskip("torchvision.ops")
    graph, _ = captured(
        lambda m, x, regions: vision.roi_align(x, [regions], 3, 0.5), random(1, 4, 6, 7), REGIONS
    )
    targets = [node.attrs["target"] for node in graph.nodes if node.op == "aten"]
    assert targets == ["torchvision.roi_align.default"]
