"""Faults planted in the persistent GEMM, each of which the host build must catch; twins pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import box_groups, groups, int8_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

FEW = replace(TARGETS["sm_90a"], sm_count=2, smem_per_block=100 * 1024)
"""Several tiles a block, and fewer stages than these have steps."""
SCHEDULES = {
    "in turn": {"cooperative": 0, "block_m": 64, "block_n": 64},
    "together": {"cooperative": 1, "block_m": 128, "block_n": 64},
    "in eights": {"cooperative": 0, "block_m": 64, "block_n": 64},
    "in fours": {"cooperative": 0, "block_m": 64, "block_n": 64},
    "residual in turn": {"cooperative": 0, "block_m": 64, "block_n": 64, "copies": 1},
    "residual together": {"cooperative": 1, "block_m": 128, "block_n": 64, "copies": 1},
    "int8 together": {"cooperative": 1, "block_m": 128, "block_n": 64, "copies": 1},
    "in lines": {"cooperative": 0, "block_m": 128, "block_n": 64, "lines": 1},
    "B stays": {"cooperative": 0, "block_m": 64, "block_n": 64},
    "means": {"cooperative": 1, "block_m": 128, "block_n": 64},
    "moments": {"cooperative": 1, "block_m": 128, "block_n": 64},
}
COLUMNS = {
    "in turn": 184, "together": 184, "in eights": 192, "in fours": 208, "in lines": 56,
    "B stays": 64,
}  # fmt: skip
"""Of which 32 are a whole part, or 16, or neither: a thread has eight side by side, four or two."""

FAULTS = {
    "integers packed in another order": (
        "int8 together",
        "ptx::pack_s8(values[i].count, values[i + 1].count, upper)",
        "ptx::pack_s8(values[i + 1].count, values[i].count, upper)",
    ),
    "integers of a residual read from the byte beside them": (
        "int8 together",
        "ptx::signed_byte(packed.data[i / 4], i % 4)",
        "ptx::signed_byte(packed.data[i / 4], (i + 1) % 4)",
    ),
    "a residual of int8 read from the first columns of its box": (
        "int8 together",
        "load_packed<V>(line + c % BOX)",
        "load_packed<V>(line)",
    ),
    "accumulators read before the last wait": (
        "in turn",
        "ptx::wgmma_wait_group<0>(acc[m]);",
        "ptx::wgmma_wait_group<1>(acc[m]);",
    ),
    "a slot handed back while a product still reads it": (
        "in turn",
        "if (step > begin) release(last);",
        "release(s);",
    ),
    "the last slot of a tile handed back before its products are done": (
        "in turn",
        """    for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(acc[m]);
    release(last);
""",
        """    release(last);
    for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(acc[m]);
""",
    ),
    "the last slot of a tile never handed back": (
        "in turn",
        "    release(last);\n\n",
        "\n",
    ),
    "a warpgroup that begins a tile at the other's slot": (
        "in turn",
        "if constexpr (!C::COOPERATIVE) from.template skip<STEPS>();",
        "",
    ),
    "a warpgroup that begins a shared tile one slot late": (
        "together",
        "RingPlace<C::STAGES> from{0, 0};",
        "RingPlace<C::STAGES> from{group, 0};",
    ),
    "a parity that forgets the tiles before": (
        "in turn",
        "ptx::mbarrier_wait(full + 8 * s, from.phase);",
        "ptx::mbarrier_wait(full + 8 * s, step / C::STAGES & 1);",
    ),
    "no wait for an empty slot": (
        "in turn",
        "        ptx::mbarrier_wait(empty + 8 * to.slot, to.phase ^ 1);\n",
        "",
    ),
    "a wait for an empty slot's other phase": (
        "in turn",
        "to.phase ^ 1);",
        "to.phase);",
    ),
    "a ring that begins anew with each tile": (
        "in turn",
        "      begin = 0;\n",
        "      begin = 0;\n      to = {0, 0};\n",
    ),
    "a wrong expected byte count": (
        "in turn",
        "ptx::mbarrier_arrive_expect_tx(full + 8 * to.slot, STAGE_BYTES);",
        "ptx::mbarrier_arrive_expect_tx(full + 8 * to.slot, A_BYTES);",
    ),
    "a slot that half of its readers hand back": (
        "together",
        "ptx::mbarrier_init(empty + 8 * s, READERS);",
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
        "if constexpr (C::B_CONSTANT && !KEEPS_B) copy_b(step, first, step);",
        "if constexpr (C::B_CONSTANT && !KEEPS_B) copy_a(step, first, step);",
    ),
    "columns of another tile of weights": (
        "in eights",
        "at.col0 / (4 * C::WIDTH), counts);",
        "at.col0 / (8 * C::WIDTH), counts);",
    ),
    "columns of another tile of weights in fours": (
        "in fours",
        "at.col0 / (4 * C::WIDTH), counts);",
        "at.col0 / 32, counts);",
    ),
    "weights copied as if their rows came in order": (
        "in eights",
        "if constexpr (C::WIDTH > 2) {",
        "if constexpr (C::WIDTH > 8) {",
    ),
    "weights in fours copied as if their rows came in order": (
        "in fours",
        "if constexpr (C::WIDTH > 2) {",
        "if constexpr (C::WIDTH == 8) {",
    ),
    "results of weights in fours stored where wgmma has columns": (
        "in fours",
        "col_(col0 + threadIdx.x % 4 * WIDTH)",
        "col_(col0 + threadIdx.x % 4 * 2)",
    ),
    "the second half of four results stored twice": (
        "in fours",
        "acc[(first + j) / 2 * 4 + half * 2",
        "acc[(first + 2) / 2 * 4 + half * 2",
    ),
    "row values replaced while they are read": (
        "in turn",
        "          ptx::mbarrier_wait(rows_empty + 8 * (round % 2), round / 2 % 2 ^ 1);\n",
        "",
    ),
    "row values read before they are there": (
        "in turn",
        "      ptx::mbarrier_wait(rows_full + 8 * (round % 2), round / 2 % 2);\n",
        "      (void)rows_full;\n",
    ),
    "row values that are never handed back": (
        "in turn",
        "if constexpr (Functor::ROW_VALUES > 0) ptx::mbarrier_arrive(rows_empty",
        "if (false) ptx::mbarrier_arrive(rows_empty",
    ),
    "row values handed back before they are read": (
        "in turn",
        "      ptx::mbarrier_wait(rows_full + 8 * (round % 2), round / 2 % 2);\n",
        "      ptx::mbarrier_wait(rows_full + 8 * (round % 2), round / 2 % 2);\n"
        "    ptx::mbarrier_arrive(rows_empty + 8 * (round % 2));\n",
    ),
    "two tiles with one place for row values": (
        "in turn",
        "row_values[round % 2 * C::BLOCK_M + r] =",
        "row_values[r] =",
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
        "      ptx::griddepcontrol_wait();\n      if constexpr (COPIES) {",
        "      if constexpr (COPIES) {",
    ),
    "a producer without the dependent-launch wait": (
        "in turn",
        "    ptx::griddepcontrol_wait();\n    if (lane > 0) return;\n",
        "    if (lane > 0) return;\n",
    ),
    "a part of the residual read before it has come": (
        "residual in turn",
        "if (part % PRODUCTS == 0) ptx::mbarrier_wait(image_full",
        "if (false) ptx::mbarrier_wait(image_full",
    ),
    "a part of the residual that is never handed back": (
        "residual in turn",
        "if (lane == 0) ptx::mbarrier_arrive(image_empty",
        "if (false) ptx::mbarrier_arrive(image_empty",
    ),
    "a part of the residual handed back before it is read": (
        "residual together",
        "if (part % PRODUCTS == 0) ptx::mbarrier_wait(image_full + 8 * slot, part_of_image.phase);",
        "if (part % PRODUCTS == 0) ptx::mbarrier_wait(image_full + 8 * slot, part_of_image.phase);"
        "if (lane == 0) ptx::mbarrier_arrive(image_empty + 8 * slot);",
    ),
    "a part of the residual replaced while it is read": (
        "residual together",
        "      ptx::mbarrier_wait(empty + 8 * slot, to.phase ^ 1);\n      Part",
        "      Part",
    ),
    "two warpgroups that read one ring of the residual": (
        "residual in turn",
        "group * OfImage::SLOTS) + part_of",
        "0 * OfImage::SLOTS) + part_of",
    ),
    "the other warpgroup's tiles of the residual": (
        "residual in turn",
        "blockIdx.x + ring * C::BLOCKS; tile < TILES",
        "blockIdx.x + (1 - ring) * C::BLOCKS; tile < TILES",
    ),
    "a residual that comes as if boxes of columns were one": (
        "residual together",
        "map, col + i * BOX, row",
        "map, col, row",
    ),
    "a residual's columns read without their boxes": (
        "residual together",
        "part + c / BOX * BOX_BYTES",
        "part",
    ),
    "a residual copied before the kernel ahead has ended": (
        "residual in turn",
        "      ptx::griddepcontrol_wait();\n      if constexpr (COPIES) {",
        "      if constexpr (COPIES) {",
    ),
    "a residual that waits for operands nobody asks for": (
        "residual in turn",
        "if constexpr (COPIES) ptx::mbarrier_arrive(begun);",
        "",
    ),
    "lines read before all lanes have put their results there": (
        "in lines",
        "* LINE / 2);\n        __syncwarp();\n",
        "* LINE / 2);\n",
    ),
    "lines overwritten before all lanes have read": (
        "in lines",
        "        __syncwarp();  // all lanes have read\n      };",
        "      };",
    ),
    "a warpgroup's second 64 rows stored as its first": (
        "in lines",
        "row0 + line % PRODUCTS * 64, line / PRODUCTS",
        "row0, line / PRODUCTS",
    ),
    "two warps with one place for their lines": (
        "in lines",
        "warp * 16 * WarpLines<LINE>::LD",
        "warp / 2 * 16 * WarpLines<LINE>::LD",
    ),
    "means of a neighbour's columns": (
        "means",
        "first += upper ? left : 0;",
        "first += upper ? 0 : left;",
    ),
    "sums of fewer rows": (
        "means",
        "apart = 16, left = N / 2; apart >= 4;",
        "apart = 16, left = N / 2; apart >= 8;",
    ),
    "means of the run ahead": (
        "means",
        "means[rows_.box() * column_end_ + col]",
        "means[max_of(0, rows_.box() - 1) * column_end_ + col]",
    ),
    "means of rows beyond the last": (
        "means",
        "if (active_row(0) && (INSIDE || col < column_end_))\n        means",
        "if (INSIDE || col < column_end_)\n        means",
    ),
    "means of columns beyond the last": (
        "means",
        "if (active_row(0) && (INSIDE || col < column_end_))\n        means",
        "if (active_row(0))\n        means",
    ),
    "means of the upper rows alone": (
        "means",
        "call(SumsOfBox{sums + first, means});",
        "float none[V] = {};\n          call(SumsOfBox{half == 0 ? sums + first : none, means});",
    ),
    "moments of a neighbour's columns": (
        "moments",
        "begin += upper ? left : 0;",
        "begin += upper ? 0 : left;",
    ),
    "moments of lanes that know two origins": (
        "moments",
        "values[0][i * OWN], lane ^ leader)",
        "values[0][i * OWN], 0)",
    ),
    "moments of the upper rows alone": (
        "moments",
        "for (int j = 0; j < 2 * OWN; ++j) {",
        "for (int j = 0; j < OWN; ++j) {",
    ),
    "moments of one of the lanes of a box": (
        "moments",
        "for (int apart = 1; apart < LANES; apart *= 2)",
        "for (int apart = LANES; apart < LANES; apart *= 2)",
    ),
    "moments of fewer rows": (
        "moments",
        "    if (left == 1) {\n      sums[0].add(sums[0].from(apart));",
        "    if (left == 1) {\n      if (apart > 4) sums[0].add(sums[0].from(apart));",
    ),
    "moments of the run ahead": (
        "moments",
        "(moments, rows_.box() *",
        "(moments, max_of(0, rows_.box() - 1) *",
    ),
    "moments of columns beyond the last": (
        "moments",
        "lane % LANES == 0 && active_row(0) && (INSIDE || col < column_end_))",
        "lane % LANES == 0 && active_row(0))",
    ),
    "squares around the origin": (
        "moments",
        "squares - total * mean, 0.0f",
        "squares, 0.0f",
    ),
    "weights that stay, multiplied before they are there": (
        "B stays",
        "if constexpr (KEEPS_B) ptx::mbarrier_wait(kept_full, 0);",
        "",
    ),
    "weights that stay, of which each step reads the first": (
        "B stays",
        "KEEPS_B ? kept + step * C::ATOMS * B_BYTES\n                    : ring",
        "KEEPS_B ? kept\n                    : ring",
    ),
    "weights that stay, all expected at once and copied in part": (
        "B stays",
        "for (int step = 0; step < STEPS; ++step) copy_b(0, first, step);",
        "for (int step = 1; step < STEPS; ++step) copy_b(0, first, step);",
    ),
    "weights that stay on no mbarrier": (
        "B stays",
        "    if constexpr (KEEPS_B) ptx::mbarrier_init(kept_full, 1);\n",
        "",
    ),
    "an mbarrier that is never initialised": (
        "in turn",
        "      ptx::mbarrier_init(turn + 8 * i, 4);\n",
        "",
    ),
}


def group(schedule: str) -> Group:
    if schedule.startswith("residual"):
        return groups.residual_linear(310, 328, 192, torch.float16)
    if schedule.startswith("int8"):
        return int8_groups.linear(310, 272, 192, torch.float16, residual=torch.int8)
    if schedule == "means":
        return box_groups.of_runs(groups.plain_linear(304, 328, 200, torch.float16))
    if schedule == "moments":
        return box_groups.of_runs(groups.plain_linear(304, 328, 200, torch.float16), columns=8)
    return groups.norm_linear(310, 328, COLUMNS[schedule], torch.float16)


def program(schedule: str, old: str = "", new: str = "") -> KernelProgram:
    """The GEMM with `old` replaced in its template."""
    knobs = {"copies": 0, "lines": 0, **SCHEDULES[schedule], "atoms": 1, "raster": 2}
    return planted(GemmPersistent(group(schedule), FEW).emit(knobs), old, new)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_itself_is_right(schedule: str) -> None:
    assert verdicts(program(schedule), group(schedule)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    schedule, old, new = FAULTS[fault]
    check_caught(program(schedule, old, new), group(schedule))


@pytest.mark.parametrize("schedule", ["in eights", "in fours"])
def test_weights_whose_rows_come_as_they_lie_are_caught(schedule: str) -> None:
    """Their order is in no template: the strides of a tensor map say it."""
    made = program(schedule)
    a_map, b_map, *rest = made.arguments
    assert isinstance(b_map, TensorMapArgument)
    row, _, _, several = b_map.strides
    in_order = replace(b_map, strides=(row, 2 * row, 8 * row, several))
    check_caught(replace(made, arguments=(a_map, in_order, *rest)), group(schedule))
