"""Faults planted where a stencil's kernel has several parts; the twin without one passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gtco.codegen.sketches.stencil import Stencil
from gtco.target import TARGETS
from tests import stencil_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

FAULTS = {
    "rows beyond the piece": ("if (row >= C::ROWS) return;", ""),
    "a piece's columns left out": ("item % VECTORS * C::V;", "0;"),
    "the work of the first block of a part": ("in_order(block, blocks) *", "0 *"),
}  # fmt: skip
WRONG = {
    "blocks of another part": ("block - ", "block + 0 * "),
    "a piece not copied": ("copy_piece<Piece0", "if (false) copy_piece<Piece0"),
}
"""In what is generated."""


@pytest.mark.parametrize("fault", ["none", *FAULTS, *WRONG])
def test_faults(fault: str) -> None:
    group = stencil_groups.projections(30, (9, 11, 24))
    program = Stencil(group, TARGETS["sm_90a"]).emit({"strip": 2, "vector": 8, "threads": 64})
    if fault == "none":
        assert not verdicts(program, group)
    elif fault in WRONG:
        old, new = WRONG[fault]
        assert old in program.source
        check_caught(replace(program, source=program.source.replace(old, new)), group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)
