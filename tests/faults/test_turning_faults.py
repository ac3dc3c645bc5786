"""Faults planted in the order in which kernels take their tiles; each sketch meets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gtco.codegen import DEVICE_HEADERS
from gtco.codegen.program import KernelProgram
from tests import turned
from tests.faults.templates import check_caught, verdicts

pytestmark = pytest.mark.compiler

RIGHT = "return count - static_cast<T>(TOGETHER) - (i - rank) + rank;"
OFF_BY_ONE = "return count - (i - rank) + rank;"
WHOLE_CLUSTERS = "return count - 1 - i;"


def ordered(program: KernelProgram, order: str) -> KernelProgram:
    """`program` backward, by another `in_order` than order.cuh's."""
    header = (DEVICE_HEADERS / "order.cuh").read_text().replace("#pragma once\n", "")
    assert RIGHT in header, "the fault's place has moved"
    other = header.replace(RIGHT, order).replace("namespace gtco", "namespace gtco::other")
    source = f'#include "order.cuh"\n{other}#define in_order other::in_order\n{program.source}'
    return replace(program, source=source, backward=True)


@pytest.mark.parametrize("case", turned.CASES)
def test_an_order_that_is_off_by_one(case: str) -> None:
    group, program = turned.made(case)
    check_caught(ordered(program, OFF_BY_ONE), group)


def test_blocks_of_a_cluster_in_another_order() -> None:
    group, program = turned.made("gemm_wgmma, parts of K")
    assert not verdicts(ordered(program, RIGHT), group)
    check_caught(ordered(program, WHOLE_CLUSTERS), group)
