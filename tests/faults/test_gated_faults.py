"""Faults in kernels that store one of each pair of columns, which the host build catches."""

from __future__ import annotations

import pytest

from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.target import TARGETS
from tests.faults.templates import check_caught, planted, verdicts
from tests.gated_groups import CASES
from tests.kernel_checks import defaults

pytestmark = pytest.mark.compiler

FAULTS = {
    "odd columns": (GemmWgmma, "[2 * i]", "[2 * i + 1]"),
    "results that lie apart": (GemmMma, "(col / 2)", "col"),
}


@pytest.mark.parametrize("kind", [GemmMma, GemmWgmma])
def test_the_kernel_itself_is_right(kind: type[Sketch]) -> None:
    group = CASES["factors"]()
    assert not verdicts(next(defaults(kind(group, TARGETS["sm_90a"]))), group)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    kind, old, new = FAULTS[fault]
    group = CASES["factors"]()
    check_caught(planted(next(defaults(kind(group, TARGETS["sm_90a"]))), old, new), group)
