"""Faults planted where images are sampled at points; the twin without one passes."""

from __future__ import annotations

import pytest

from gtco.codegen.sketches.grid_sample import GridSample
from gtco.target import TARGETS
from tests import stencil_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

FAULTS = {
    "a pixel outside is read": ("is_point(p) && ys.inside[y] && xs.inside[x]", "is_point(p)"),
    "rows outside are read": ("&& ys.inside[y]", ""),
    "the pixel at the left border left out": ("at[i] >= 0", "at[i] > 0"),
    "the pixel at the right border left out": ("at[i] < size;", "at[i] < size - 1;"),
    "a band around the image left out": ("from >= -1.0f", "from >= 0.0f"),
    "the weights of two neighbours exchanged": ("low + 1.0f - from", "from - low"),
    "towards zero": ("floorf(from)", "truncf(from)"),
    "centres of pixels for edges": ("(from_one * n - 1.0f)", "(from_one * n)"),
    "x for y": ("ys(sample.point[1]", "ys(sample.point[0]"),
    "another image": ("const int n = row / C::IMAGE_ROWS", "const int n = 0"),
    "rows beyond the last": ("row < C::ROWS", "true"),
}
BORDER = {
    "no border": ("fminf(fmaxf(from, 0.0f), n - 1.0f)", "from"),
    "a border of one side": ("fminf(fmaxf(from, 0.0f), n - 1.0f)", "fmaxf(from, 0.0f)"),
}
SUMS = {
    "weights of another image": ("Level::FIRST + p", "p"),
    "the points beyond those of all lanes": ("ceil_div(Level::POINTS, C::SHARE)", "1"),
    "the next level's points": ("|| p < Level::POINTS)", "|| true)"),
    "every lane has the first point": ("i * C::SHARE + lane", "i * C::SHARE"),
    "lanes that do not add up": ("lanes_sum<C::SHARE>", "lanes_sum<C::SHARE / 2>"),
    "samples not weighed": ("sample.share * (ys.weight[y]", "1.0f * (ys.weight[y]"),
}


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults(fault: str) -> None:
    group = stencil_groups.SAMPLES["bilinear"]()
    program = GridSample(group, TARGETS["sm_90a"]).emit(
        {"vector": 8, "repeat": 1, "threads": 64, "share": 1}
    )
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)


@pytest.mark.parametrize("fault", ["none", *BORDER])
def test_faults_of_borders(fault: str) -> None:
    group = stencil_groups.SAMPLES["bilinear_border"]()
    program = GridSample(group, TARGETS["sm_90a"]).emit(
        {"vector": 8, "repeat": 1, "threads": 64, "share": 1}
    )
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *BORDER[fault]), group)


@pytest.mark.parametrize("fault", ["none", *SUMS])
def test_faults_of_sums(fault: str) -> None:
    group = stencil_groups.SAMPLES["sum_of_heads"]()
    program = GridSample(group, TARGETS["sm_90a"]).emit(
        {"vector": 8, "repeat": 2, "threads": 64, "share": 4}
    )
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *SUMS[fault]), group)
