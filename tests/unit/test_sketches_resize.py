"""Resizes: right at every border, captured as torch computes them, without ATen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gtco
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.resize import Resize
from gtco.passes import run_pipeline
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import stencil_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs
from tests.pass_checks import captured, check, ops, random


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
        program = sketch.emit({"vector": 2, "repeat": repeat, "threads": 64})
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)
    with pytest.raises(Illegal, match="4 vectors of 2 do not divide a pixel's channels"):
        sketch.emit({"vector": 2, "repeat": 4, "threads": 64})
    narrow = Resize(stencil_groups.resize((1, 192, 192, 150), (384, 384), mode), sketch.target)
    wide = Resize(stencil_groups.resize((1, 192, 192, 256), (384, 384), mode), sketch.target)
    assert [next(iter(each.defaults()))["repeat"] for each in (narrow, wide)] == [5, 1]


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
