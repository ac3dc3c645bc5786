"""Faults planted in where a kernel reads, and what outside of an image; the twin without passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gtco.codegen.rules import derive
from gtco.codegen.sketches.stencil import Stencil
from gtco.passes.legality import family
from gtco.target import TARGETS
from tests import origin_groups, stencil_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

H100 = TARGETS["sm_90a"]
THERE = "pixel_at<C>(image, n, z, y, x, col), there,"
OUTSIDE = {
    "none": ("", ""),
    "pixels outside are read": (THERE, THERE.replace("there", "on")),
    "ones outside": ("there, tap.outside()", "there, 1.0f"),
    "columns outside are read": ("x >= 0 && x < right", "true"),
    "frames outside are read": ("z >= 0 && z < C::FRAMES", "true"),
}


@pytest.mark.parametrize("fault", OUTSIDE)
def test_faults_of_pixels_outside(fault: str) -> None:
    group = stencil_groups.depthwise((2, 4, 5, 6, 16), (3, 3, 3))
    program = Stencil(group, H100).emit({"strip": 2, "vector": 8, "threads": 64})
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *OUTSIDE[fault]), group)


@pytest.mark.parametrize("further", [0, -16, 16])
@pytest.mark.parametrize("case", origin_groups.CASES)
def test_faults_of_origins(case: str, further: int) -> None:
    group = origin_groups.CASES[case]()
    sketch = derive(group, family(group), H100).sketches[0]
    program = sketch.emit(next(iter(sketch.defaults())))
    moved = tuple(
        replace(each, origin=each.origin + further) if each.origin else each
        for each in program.arguments
    )
    assert any(each.origin for each in program.arguments)
    if further:
        check_caught(replace(program, arguments=moved), group)
    else:
        assert not verdicts(program, group)
