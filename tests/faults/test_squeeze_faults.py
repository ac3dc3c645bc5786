"""Faults planted in the gates of squeeze-and-excitation; the twin without one passes."""

from __future__ import annotations

import pytest

from gtco.codegen.sketches.squeeze import Squeeze
from gtco.target import TARGETS
from tests import squeeze_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

FAULTS = {
    "pixels beyond the image": ("there[u] = on && pixel < C::PIXELS;", "there[u] = on;"),
    "lanes of a pixel not joined": ("offset = LANES; offset", "offset = 2 * LANES; offset"),
    "the last part left out": ("part < C::PARTS; ++part", "part < C::PARTS - 1; ++part"),
    "means read too early": ("wait<0>();\n  __syncthreads();", "wait<0>();"),
    "channels of another block": ("row, k0 + k) :", "row, k) :"),
    "hidden values read before they are there": ("[0];\n  }\n  __syncthreads();", "[0]; }"),
    "sums of the others taken before they came": ("ptx::mbarrier_wait(sums_full, 0);", ""),
    "sums sent before the others are ready": ("ptx::barrier_cluster_wait();", ""),
    "fewer sums than there are blocks": ("part < C::SPLIT; ++part", "part < C::SPLIT - 1; ++part"),
    "weights beyond the last": ("there = row < count &&", "there ="),
    "results of the block ahead": ("col0 + i, results", "i, results"),
}  # fmt: skip
OF_STAGED_WEIGHTS = {
    "columns of another block": ("(second_weights, second, col0,", "(second_weights, second, 0,"),
    "weights not waited for": ("ptx::cp_async_wait<0>();", ""),
}


@pytest.mark.parametrize(
    ("hidden", "fault"),
    [
        *((5, fault) for fault in ("none", *FAULTS)),  # a row of 10 bytes is not staged
        *((6, fault) for fault in ("none", *FAULTS, *OF_STAGED_WEIGHTS)),
    ],
)
def test_faults(hidden: int, fault: str) -> None:
    group = squeeze_groups.gate((2, 3, 9, 72), hidden, 41)
    program = Squeeze(group, TARGETS["sm_90a"]).emit({"split": 2, "threads": 128})
    assert ("STAGED = true" in program.source) == (hidden == 6)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *(FAULTS | OF_STAGED_WEIGHTS)[fault]), group)
