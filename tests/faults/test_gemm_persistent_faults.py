"""Faults planted in the persistent GEMM, each of which the host build must catch; twins pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.graph import Group
from gtco.target import TARGETS
from tests import groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

FEW = replace(TARGETS["sm_90a"], sm_count=2, smem_per_block=100 * 1024)
"""Several tiles a block, and fewer stages than these have steps."""
SCHEDULES = {
    "in turn": {"cooperative": 0, "block_m": 64, "block_n": 64},
    "together": {"cooperative": 1, "block_m": 128, "block_n": 64},
}

FAULTS = {
    "accumulators read before the last wait": (
        "in turn",
        "ptx::wgmma_wait_group<0>(acc[m]);",
        "ptx::wgmma_wait_group<1>(acc[m]);",
    ),
    "a slot handed back while a product still reads it": (
        "in turn",
        "if (step > 0) release((used - 1) % C::STAGES);",
        "release(s);",
    ),
    "the last slot of a tile handed back before its products are done": (
        "in turn",
        """    for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(acc[m]);
    release((used - 1) % C::STAGES);
""",
        """    release((used - 1) % C::STAGES);
    for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(acc[m]);
""",
    ),
    "the last slot of a tile never handed back": (
        "in turn",
        "    release((used - 1) % C::STAGES);\n",
        "",
    ),
    "a warpgroup that begins a tile at the other's slot": (
        "in turn",
        "int used = round * STEPS;",
        "int used = round / 2 * STEPS;",
    ),
    "a warpgroup that begins a shared tile one slot late": (
        "together",
        "int used = round * STEPS;",
        "int used = round * STEPS + (round > 0 && group > 0);",
    ),
    "a parity that forgets the tiles before": (
        "in turn",
        "ptx::mbarrier_wait(full + 8 * s, used / C::STAGES & 1);",
        "ptx::mbarrier_wait(full + 8 * s, step / C::STAGES & 1);",
    ),
    "no wait for an empty slot": (
        "in turn",
        "        ptx::mbarrier_wait(empty + 8 * s, (filled / C::STAGES & 1) ^ 1);\n",
        "",
    ),
    "a wait for an empty slot's other phase": (
        "in turn",
        "(filled / C::STAGES & 1) ^ 1);",
        "filled / C::STAGES & 1);",
    ),
    "a ring that begins anew with each tile": (
        "in turn",
        "        const int s = filled % C::STAGES;\n",
        "        const int s = step % C::STAGES;\n",
    ),
    "a wrong expected byte count": (
        "in turn",
        "ptx::mbarrier_arrive_expect_tx(full + 8 * s, STAGE_BYTES);",
        "ptx::mbarrier_arrive_expect_tx(full + 8 * s, A_BYTES);",
    ),
    "a slot that half of its readers hand back": (
        "together",
        "ptx::mbarrier_init(empty + 8 * s, C::COOPERATIVE ? 8 : 4);",
        "ptx::mbarrier_init(empty + 8 * s, 4);",
    ),
    "a turn that is never handed over": (
        "in turn",
        "      ptx::mbarrier_arrive(turn + 8 * (1 - group));\n",
        "      (void)turn;\n",
    ),
    "a turn handed to oneself": (
        "in turn",
        "turn + 8 * (1 - group)",
        "turn + 8 * group",
    ),
    "a tile begun before its turn": (
        "in turn",
        "if (!C::COOPERATIVE && round > 0)",
        "if (!C::COOPERATIVE && round > 1)",
    ),
    "tiles begun without turns": (
        "in turn",
        "if (!C::COOPERATIVE && round > 0)",
        "if (C::COOPERATIVE && round > 0)",
    ),
    "a turn that waits for a phase too many": (
        "in turn",
        "(round - 1) / 2 & 1);",
        "round / 2 & 1);",
    ),
    "activations copied before the kernel ahead has ended": (
        "in turn",
        "if constexpr (C::B_CONSTANT) copy_b(step, first, step);",
        "if constexpr (C::B_CONSTANT) copy_a(step, first, step);",
    ),
    "a piece staged over one that is being read": (
        "in turn",
        "        __syncwarp();  // the piece before has been read\n",
        "",
    ),
    "a piece read before it is staged": (
        "in turn",
        "        __syncwarp();\n        constexpr int V",
        "        constexpr int V",
    ),
    "row values replaced while they are read": (
        "in turn",
        "    __syncwarp();  // the last tile's row values have been read\n",
        "",
    ),
    "two warps that stage in one place": (
        "in turn",
        "+ warp * 16 * C::STAGE_LD;",
        "+ warp / 2 * 16 * C::STAGE_LD;",
    ),
    "two warpgroups with one place for row values": (
        "in turn",
        "+ warp * WARP_ROWS;",
        "+ warp % 4 * WARP_ROWS;",
    ),
    "sums that begin with the tile before": (
        "in turn",
        "acc[m][i] = 0.0f;",
        "acc[m][i] = round > 1 ? 1.0f : 0.0f;",
    ),
    "a last, lower group of tiles that is walked as a full one": (
        "in turn",
        "LAST != 0 && group == DOWN / C::GROUP ? max_of(1, LAST) : C::GROUP;",
        "C::GROUP;",
    ),
    "a path without the dependent-launch wait": (
        "in turn",
        "  ptx::griddepcontrol_wait();\n  const int group",
        "  const int group",
    ),
    "an idle warp without the dependent-launch wait": (
        "in turn",
        "      ptx::griddepcontrol_wait();\n      return;\n",
        "      return;\n",
    ),
    "a producer without the dependent-launch wait": (
        "in turn",
        "    ptx::griddepcontrol_wait();\n    if (lane > 0) return;\n",
        "    if (lane > 0) return;\n",
    ),
    "an mbarrier that is never initialised": (
        "in turn",
        "    for (int group = 0; group < 2; ++group) ptx::mbarrier_init(turn + 8 * group, 4);\n",
        "",
    ),
}


def group() -> Group:
    return groups.norm_linear(310, 328, 184, torch.float16)


def program(schedule: str, old: str = "", new: str = "") -> KernelProgram:
    """The GEMM with `old` replaced in its template."""
    knobs = {**SCHEDULES[schedule], "atoms": 1, "piece": 32, "raster": 2}
    return planted(GemmPersistent(group(), FEW).emit(knobs), old, new)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_itself_is_right(schedule: str) -> None:
    assert verdicts(program(schedule), group()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    schedule, old, new = FAULTS[fault]
    check_caught(program(schedule, old, new), group())
