"""Faults planted where images are made larger; the twin without one passes."""

from __future__ import annotations

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.resize import Resize
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import stencil_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

FAULTS = {
    "edges of pixels for centres": ("scale * (d + 0.5f) - 0.5f, 0.0f)", "scale * d, 0.0f)"),
    "beyond the left border": ("fmaxf(scale * (d + 0.5f) - 0.5f, 0.0f)", "scale * (d + 0.5f)"),
    "the weights of two pixels exchanged": (
        "from - static_cast<float>(at[0])",
        "1.0f + at[0] - from",
    ),
    "the same pixel twice": ("min_of(at[0] + 1, size - 1)", "at[0]"),
    "rows weighed as columns": ("fmaf(down[y], line[i]", "fmaf(across[y], line[i]"),
    "another image": ("row / (C::P * C::Q) : 0", "0 : 0"),
}
ANY = {
    "a column too few": ("x <= SPAN", "x < SPAN"),
    "of the pixel before": ("at[j][0] == at[0][0] + x", "at[j][0] == at[0][0] + x - 1"),
    "the left column twice": ("right[i] = here ? columns[x + 1]", "right[i] = here ? columns[x]"),
    "weights of the first pixel": ("fmaf(weight[j][1]", "fmaf(weight[0][1]"),
    "upper rows alone": ("fmaf(down[1], lower[i], down[0]", "fmaf(down[1], upper[i], down[0]"),
    "beyond the right border": ("min_of(where.first() + x, C::WIDTH - 1)", "where.first() + x"),
}
EVEN = {
    "from the next column on": ("/ (2 * FACTOR) - 1)", "/ (2 * FACTOR))"),
    "all between the first two": ("const auto &left = columns[behind(j)]",
                                  "const auto &left = columns[0]"),
    "weights of the first pixel": ("2 * (within + j) + 1", "2 * within + 1"),
    "weights as between centres": ("+ 1 + FACTOR) % (2 * FACTOR)", "+ FACTOR) % (2 * FACTOR)"),
    "the first of FACTOR pixels": ("? 0 : dst % FACTOR", "? 0 : 0"),
    "beyond the left border": ("max_of(0, min_of(where", "(min_of(where"),
}  # fmt: skip


def emitted(columns: int, across: int) -> tuple[KernelProgram, Group]:
    group = stencil_groups.resize((2, 5, 7, 24), (11, columns))
    schedule = {"vector": 8, "repeat": 1, "threads": 64, "across": across}
    return Resize(group, TARGETS["sm_90a"]).emit(schedule), group


def judge(fault: str, faults: dict[str, tuple[str, str]], columns: int, across: int) -> None:
    program, group = emitted(columns, across)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *faults[fault]), group)


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults(fault: str) -> None:
    judge(fault, FAULTS, 16, 1)


@pytest.mark.parametrize("fault", ["none", *ANY])
def test_faults_of_several_pixels(fault: str) -> None:
    judge(fault, ANY, 16, 4)


@pytest.mark.parametrize("fault", ["none", *EVEN])
def test_faults_of_even_factors(fault: str) -> None:
    twice = fault in ("all between the first two", "beyond the left border")
    judge(fault, EVEN, 14 if twice else 56, 2 if twice else 4)
