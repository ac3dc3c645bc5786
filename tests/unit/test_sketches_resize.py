"""Resizes: right at every border, captured as torch computes them, without ATen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gtco
from gtco.codegen.sketch import Illegal, Schedule
from gtco.codegen.sketches.resize import Resize
from gtco.passes import run_pipeline
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import stencil_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs
from tests.pass_checks import captured, check, ops, random


def schedule(vector: int, repeat: int = 1, across: int = 1) -> Schedule:
    return {"vector": vector, "repeat": repeat, "threads": 64, "across": across}


@pytest.mark.compiler
@pytest.mark.parametrize("case", stencil_groups.RESIZES)
def test_right_on_the_host_build(case: str) -> None:
    group = stencil_groups.RESIZES[case]()
    for program in sample(Resize(group, TARGETS["sm_90a"]), 1):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("align", [False, True])
def test_a_pixel_that_does_not_count_may_be_nan(mode: str, align: bool) -> None:
    if align and mode == "nearest":
        pytest.skip("torch refuses it")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x, (5, 3), mode=mode, align_corners=align or None)

    image = random(1, 2, 5, 7)
    image[0, 0, 3, 2] = image[0, 1, 0, 5] = float("nan")
    compiled = gtco.compile(Model().eval(), (image,), target="host")
    torch.testing.assert_close(compiled(image), Model()(image), equal_nan=True)


@pytest.mark.compiler
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_a_thread_may_have_several_vectors_of_a_pixel(mode: str) -> None:
    group = stencil_groups.resize((2, 4, 5, 30), (7, 9), mode)
    sketch = Resize(group, TARGETS["sm_90a"])
    for repeat in (1, 3, 5):
        program = sketch.emit(schedule(2, repeat))
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)
    with pytest.raises(Illegal, match="4 vectors of 2 do not divide a pixel's channels"):
        sketch.emit(schedule(2, 4))
    narrow = Resize(stencil_groups.resize((1, 192, 192, 150), (384, 384), mode), sketch.target)
    wide = Resize(stencil_groups.resize((1, 192, 192, 256), (384, 384), mode), sketch.target)
    assert [next(iter(each.defaults()))["repeat"] for each in (narrow, wide)] == [5, 1]


@pytest.mark.compiler
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("columns", [12, 14, 16, 28, 56, 84, 112])
def test_a_thread_may_have_several_pixels_of_a_row(columns: int, align: bool) -> None:
    group = stencil_groups.resize((2, 5, 7, 24), (11, columns), align=align)
    sketch = Resize(group, TARGETS["sm_90a"])
    for across in (2, 4) if columns % 4 == 0 else (2,):
        program = sketch.emit(schedule(8, across=across))
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("align", [False, True])
def test_several_pixels_of_an_image_of_one_column(align: bool) -> None:
    group = stencil_groups.resize((2, 5, 1, 8), (11, 8), align=align)
    program = Resize(group, TARGETS["sm_90a"]).emit(schedule(8, across=4))
    assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


def test_pixels_that_a_thread_cannot_have_together() -> None:
    def emit(shape: tuple[int, ...], size: tuple[int, int], mode: str, repeat: int = 1) -> None:
        sketch = Resize(stencil_groups.resize(shape, size, mode), TARGETS["sm_90a"])
        sketch.emit(schedule(8, repeat, across=2))

    image = (1, 5, 7, 16)
    for size, mode, why in (
        ((9, 8), "bicubic", "bicubic pixels share no columns"),
        ((9, 6), "bilinear", "7 columns are not made more by 6"),
        ((9, 9), "bilinear", "2 pixels do not divide 9"),
    ):
        with pytest.raises(Illegal, match=why):
            emit(image, size, mode)
    with pytest.raises(Illegal, match="one vector of each"):
        emit(image, (9, 8), "bilinear", repeat=2)


@pytest.mark.compiler
def test_a_column_that_no_pixel_of_a_thread_lies_at_may_be_nan() -> None:
    group = stencil_groups.resize((1, 3, 6, 8), (6, 20))
    values = inputs_of(group, seed=1)
    sketch = Resize(group, TARGETS["sm_90a"])
    values[sketch.images[0][0]][:, :, 2] = float("nan")
    (found,), (wanted,) = (
        run_on_host(sketch.emit(schedule(8, across=across)), group, values).values()
        for across in (4, 1)
    )
    assert torch.equal(found.isnan(), wanted.isnan()) and not found.isnan().all()


def test_kernels_compile_without_spills() -> None:
    for case in ("bilinear_up", "bicubic_up", "nearest_up"):
        group = stencil_groups.RESIZES[case]()
        assert not list(compile_for_all(lambda target, group=group: Resize(group, target)))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("how", [{"size": (9, 5)}, {"scale_factor": 1.7}])
def test_resizes_are_captured(mode: str, how: dict[str, Any]) -> None:
    graph, args = captured(
        lambda m, x: F.interpolate(x, mode=mode, **how), random(2, 3, 6, 7, dtype=torch.float64)
    )
    assert ops(check(lambda g, log: run_pipeline(g, log=log), graph, args)) == {"resize": 1}
