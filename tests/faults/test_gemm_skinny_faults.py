"""Faults planted in the GEMM of few rows, each of which the host build must catch; twins pass."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

SCHEDULES = {
    "alone": {"columns": 64, "warps": 2, "split": 1, "ahead": 2},
    "cluster": {"columns": 64, "warps": 3, "split": 2, "ahead": 1},
}
"""Of 11 chunks of K, the last of them short: both go round their ring."""

FAULTS = {
    "sums added before all warps have stored theirs": (
        "alone",
        "    fill_row_values<C::ROWS, 32>(functor, row_values, lane, 0, row_count);\n  }\n"
        "  __syncthreads();\n",
        "    fill_row_values<C::ROWS, 32>(functor, row_values, lane, 0, row_count);\n  }\n",
    ),
    "a warp's sums left out": (
        "alone",
        "add_parts<V, C::WARPS + C::SPLIT - 1, PART>",
        "add_parts<V, C::WARPS + C::SPLIT - 2, PART>",
    ),
    "a block's sums left out": (
        "cluster",
        "add_parts<V, C::WARPS + C::SPLIT - 1, PART>",
        "add_parts<V, C::WARPS + C::SPLIT - 2, PART>",
    ),
    "a warp's sums left out by the sender": (
        "cluster",
        "add_parts<2, C::WARPS, PART>",
        "add_parts<2, C::WARPS - 1, PART>",
    ),
    "two warps that store in one place": (
        "alone",
        "parts[warp * PART + row",
        "parts[warp / 2 * PART + row",
    ),
    "the inbox read before it is full": (
        "cluster",
        "    ptx::mbarrier_wait(inbox_full, 0);\n",
        "",
    ),
    "sums sent before the inbox can take them": (
        "cluster",
        "    ptx::barrier_cluster_wait();  // the inbox can take sums\n",
        "",
    ),
    "sums sent to oneself": (
        "cluster",
        "inbox + (rank - 1) * PART), 0)",
        "inbox + (rank - 1) * PART), 1)",
    ),
    "a wrong expected byte count": (
        "cluster",
        "(C::SPLIT - 1) * C::ROWS * C::BLOCK_COLUMNS * 4",
        "(C::SPLIT - 1) * C::ROWS * C::STAGE_LD * 4",
    ),
    "fewer bytes expected than come": (
        "cluster",
        "(C::SPLIT - 1) * C::ROWS * C::BLOCK_COLUMNS * 4",
        "(C::SPLIT - 1) * C::BLOCK_COLUMNS * 4",
    ),
    "a ring that is not filled again": (
        "alone",
        "          load_weights(s, step + C::AHEAD + s);\n",
        "",
    ),
    "tokens of the step before": (
        "alone",
        "load_tokens(s, step + C::AHEAD + s);",
        "load_tokens(s, step + s);",
    ),
    "a K tail that is read": (
        "alone",
        "(step + 1) * TURN <= C::K || k0 + step * TURN < C::K;",
        "true;",
    ),
    "columns beyond the last that are read": (
        "alone",
        "(C::COLUMNS % C::BLOCK_COLUMNS == 0 || col < C::COLUMNS)",
        "(C::COLUMNS % C::BLOCK_COLUMNS == 0 || col <= C::COLUMNS + 8)",
    ),
    "rows beyond the last that are read": (
        "alone",
        "inside(step) && lane / 4 < C::ROWS",
        "inside(step)",
    ),
    "rows beyond the last that are stored": (
        "alone",
        "if (row < C::ROWS) parts",
        "parts",
    ),
    "tokens read before the kernel ahead has ended": (
        "alone",
        "for (int s = 0; s < C::AHEAD; ++s) load_weights(s, s);",
        "for (int s = 0; s < C::AHEAD; ++s) load_weights(s, s), load_tokens(s, s);",
    ),
    "no dependent-launch wait": ("alone", "  ptx::griddepcontrol_wait();\n", ""),
    "operands whose orders of K differ": (
        "alone",
        "tokens[s][half * 2], tokens[s][half * 2 + 1]",
        "tokens[s][half], tokens[s][half + 2]",
    ),
    "row values that nobody gathers": (
        "alone",
        "    fill_row_values<C::ROWS, 32>(functor, row_values, lane, 0, row_count);\n",
        "",
    ),
    "an inbox that is never opened": (
        "cluster",
        "thread == C::WARPS * 32 && rank == 0",
        "thread == C::WARPS * 32 && rank == 1",
    ),
}


def group() -> Group:
    return groups.norm_linear(5, 328, 184, torch.float16)


def program(schedule: str, old: str = "", new: str = "") -> KernelProgram:
    """The GEMM with `old` replaced in its template."""
    return planted(GemmSkinny(group(), TARGETS["sm_90a"]).emit(SCHEDULES[schedule]), old, new)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_itself_is_right(schedule: str) -> None:
    assert verdicts(program(schedule), group()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    schedule, old, new = FAULTS[fault]
    check_caught(program(schedule, old, new), group())
