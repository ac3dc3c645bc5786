"""Faults planted where `mma.sync` scales the operand of a GEMM, and where it gathers single
elements; the twins without one pass."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.target import TARGETS
from tests import groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

SCHEDULE = {"block_m": 32, "block_n": 32, "block_k": 32, "warps_m": 2, "warps_n": 1, "stages": 3}
FAULTS = {
    "factors of the first image alone": ("row / C::GROUP_ROWS - m0", "m0 / C::GROUP_ROWS - m0"),
    "counted from the first tile on": ("- m0 / C::GROUP_ROWS, C::SCALE_ROWS", ", C::SCALE_ROWS"),
    "of the upper eight rows": ("of[j & 1]", "of[0]"),
    "of the lower half of k": ("k + (j >> 1) * E + lane % 4", "k + lane % 4"),
    "of another stage": ("r, scale_ring + step % C::STAGES", "r, scale_ring + 0"),
    "of the first step": ("m0 / C::GROUP_ROWS, step * C::BLOCK_K", "m0 / C::GROUP_ROWS, 0"),
    "beyond the last image": ("C::GROUPS, thread", "C::GROUPS - 1, thread"),
    "none": ("r[j] = ptx::multiply<Element>", "ptx::multiply<Element>"),
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_faults(fault: str) -> None:
    group = groups.scaled_linear(5, 9, 72, 24, torch.float16)
    program = GemmMma(group, TARGETS["sm_80"]).emit(SCHEDULE)
    if not fault:
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)


GATHERED = {
    "one element along k": ("k_of(item) + (Operand::K_MAJOR ? e : 0)", "k_of(item)"),
    "one row": ("row_of(item) + (Operand::K_MAJOR ? 0 : e)", "row_of(item)"),
    "what lies beyond k": ("valid ? element : Element{0}", "element"),
    "the first chunks alone": ("step < STEPS; step += AHEAD", "step < 1; step += AHEAD"),
    "the last chunk again": ("if (item < ITEMS) *reinterpret", "*reinterpret"),
    "another chunk": ("= read[i];", "= read[0];"),
}


@pytest.mark.parametrize("fault", ["", *GATHERED])
def test_faults_of_gathers(fault: str) -> None:
    """A has odd rows along K, B odd columns across it."""
    group = groups.batched_matmul(1, 37, 45, 67, torch.float16)
    schedule = {"block_m": 128, "block_n": 64, "block_k": 32, "warps_m": 1, "warps_n": 2}
    program = GemmMma(group, TARGETS["sm_80"]).emit({**schedule, "stages": 3})
    if not fault:
        assert not verdicts(program, group)
    elif fault == "the last chunk again":  # all threads have chunks here, so make that too many
        few = {"block_m": 16, "block_n": 64, "block_k": 32, "warps_m": 1, "warps_n": 4, "stages": 2}
        check_caught(planted(GemmMma(group, TARGETS["sm_80"]).emit(few), *GATHERED[fault]), group)
    else:
        check_caught(planted(program, *GATHERED[fault]), group)
