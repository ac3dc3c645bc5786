"""Faults planted in two linears back to back, each of which the host build must catch; twins
pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.ir.graph import Group
from tests.back_to_back_groups import F16, FEW, bottleneck, perceptron, quotient
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

GROUPS: dict[str, Callable[[], Group]] = {
    "bottleneck": lambda: bottleneck(394, (72, 136, 64), F16),
    "with room": lambda: bottleneck(650, (72, 136, 64), F16),
    "in pairs": lambda: bottleneck(394, (72, 136, 40), F16),
    "few between": lambda: bottleneck(300, (64, 72, 64), F16),
    "two residuals": lambda: bottleneck(261, (64, 72, 64), F16, residuals=2),
    "no residual": lambda: bottleneck(394, (64, 136, 64), F16, residuals=0),
    "perceptron": lambda: perceptron(650, (40, 168, 40), F16),
    "quotient": lambda: quotient(261, (64, 72, 64), F16),
}
"""Of two to three tiles a block, the last of which has few rows."""
LITTLE = replace(FEW, smem_per_block=113 * 1024)
"""A bottleneck has room for one tile of A and two squares of each warpgroup."""
TARGETS = {"bottleneck": LITTLE}
STAGES = {"few between": 4}
"""Else two, of more parts than that."""

FAULTS = {
    "first weights not waited for": (
        "bottleneck",
        "      ptx::mbarrier_wait(b_full + 8 * from.slot, from.phase);\n",
        "",
    ),
    "second weights not waited for": (
        "bottleneck",
        "      ptx::mbarrier_wait(d_full + 8 * last, from.phase);\n",
        "",
    ),
    "activations not waited for": (
        "bottleneck",
        "    ptx::mbarrier_wait(a_full + 8 * from_a.slot, from_a.phase);\n",
        "",
    ),
    "first weights awaited by the other parity": (
        "bottleneck",
        "b_full + 8 * from.slot, from.phase)",
        "b_full + 8 * from.slot, from.phase ^ 1)",
    ),
    "a parity that forgets the tiles before": (
        "bottleneck",
        "d_full + 8 * last, from.phase)",
        "d_full + 8 * last, part / C::STAGES & 1)",
    ),
    "a parity of the second tile of two": (
        "with room",
        "a_full + 8 * from_a.slot, from_a.phase)",
        "a_full + 8 * from_a.slot, round & 1)",
    ),
    "first weights replaced while they are multiplied": (
        "bottleneck",
        "        ptx::mbarrier_wait(b_empty + 8 * to.slot, to.phase ^ 1);\n",
        "",
    ),
    "second weights replaced while they are multiplied": (
        "bottleneck",
        "        ptx::mbarrier_wait(d_empty + 8 * to.slot, to.phase ^ 1);\n",
        "",
    ),
    "activations replaced while they are multiplied": (
        "bottleneck",
        "      ptx::mbarrier_wait(a_empty + 8 * to_a.slot, to_a.phase ^ 1);\n",
        "",
    ),
    "first weights handed back before their product is done": (
        "bottleneck",
        "      ptx::wgmma_wait_group<0>(y);\n      release(b_empty + 8 * from.slot);\n",
        "      release(b_empty + 8 * from.slot);\n      ptx::wgmma_wait_group<0>(y);\n",
    ),
    "second weights handed back before their product is done": (
        "bottleneck",
        """      ptx::wgmma_wait_group<0>(y);
      release(b_empty + 8 * from.slot);
      if (part > 0) release(d_empty + 8 * last);
""",
        """      if (part > 0) release(d_empty + 8 * last);
      ptx::wgmma_wait_group<0>(y);
      release(b_empty + 8 * from.slot);
""",
    ),
    "the last weights of a tile handed back before their product is done": (
        "bottleneck",
        "    ptx::wgmma_wait_group<0>(sums);\n    release(d_empty + 8 * last);\n",
        "    release(d_empty + 8 * last);\n    ptx::wgmma_wait_group<0>(sums);\n",
    ),
    "the last weights of a tile never handed back": (
        "bottleneck",
        "    release(d_empty + 8 * last);\n#pragma unroll",
        "#pragma unroll",
    ),
    "activations handed back with parts to come": (
        "bottleneck",
        "if (part == PARTS - 1) release(a_empty",
        "if (part == 0) release(a_empty",
    ),
    "a slot that one warpgroup hands back": (
        "bottleneck",
        "ptx::mbarrier_init(d_empty + 8 * s, GROUPS * 4);",
        "ptx::mbarrier_init(d_empty + 8 * s, 4);",
    ),
    "results read before their product is done": (
        "bottleneck",
        "ptx::wgmma_wait_group<0>(sums);",
        "ptx::wgmma_wait_group<1>(sums);",
    ),
    "the value between read before its product is done": (
        "bottleneck",
        "ptx::wgmma_wait_group<0>(y);",
        "ptx::wgmma_wait_group<1>(y);",
    ),
    "operands written while no fence is ahead of their product": (
        "bottleneck",
        "from.phase);\n      ptx::wgmma_fence();\n#pragma unroll\n      for (int k",
        "from.phase);\n#pragma unroll\n      for (int k",
    ),
    "sums that each part begins": ("bottleneck", ", part + k > 0);", ", k > 0);"),
    "sums that begin with the tile before": (
        "bottleneck",
        ", part + k > 0);",
        ", round + part + k > 0);",
    ),
    "operand registers of rows and columns exchanged": (
        "bottleneck",
        "operand[i / 2][i % 2 * 2 + half]",
        "operand[i / 2][i % 2 + half * 2]",
    ),
    "operands of other columns": ("bottleneck", "sums, operand[k], ", "sums, operand[3 - k], "),
    "activations of the other warpgroup": ("bottleneck", "+ group * GROUP_M * 128;", ";"),
    "first weights of another part": (
        "bottleneck",
        "b_map, atom * ATOM_K, part * PART, 0,",
        "b_map, atom * ATOM_K, s * PART, 0,",
    ),
    "second weights of another part": (
        "bottleneck",
        "d_map, part * PART, 0, 0, 0, 0,",
        "d_map, s * PART, 0, 0, 0, 0,",
    ),
    "second weights of another part, in pairs": (
        "in pairs",
        "d_map, part * PART, 0, 0, d_full",
        "d_map, s * PART, 0, 0, d_full",
    ),
    "activations of another tile": (
        "with room",
        "if constexpr (C::A_TILES == 2) copy_a(tile + C::BLOCKS);",
        "if constexpr (C::A_TILES == 2) copy_a(tile + 1);",
    ),
    "activations of the next tile awaited ahead of the weights of this": (
        "bottleneck",
        "if constexpr (C::A_TILES == 2) copy_a(tile + C::BLOCKS);",
        "copy_a(tile + C::BLOCKS);",
    ),
    "more weights ahead than there are": (
        "few between",
        "AHEAD = min_of(C::STAGES, PARTS);",
        "AHEAD = C::STAGES;",
    ),
    "a ring that begins anew behind the weights ahead": (
        "few between",
        "RingPlace<C::STAGES> to{AHEAD % C::STAGES, AHEAD == C::STAGES};",
        "RingPlace<C::STAGES> to{0, AHEAD == C::STAGES};",
    ),
    "later tiles without their first weights": ("bottleneck", "      begin = 0;\n", ""),
    "activations copied before the kernel ahead has ended": (
        "bottleneck",
        "        copy_weights(part, part);\n        copy_more",
        "        if (part == 0) copy_a(blockIdx.x);\n        copy_weights(part, part);\n"
        "        copy_more",
    ),
    "an image copied before the kernel ahead has ended": (
        "bottleneck",
        "      ptx::griddepcontrol_wait();\n      if (warp < GATHERER) {",
        "      if (warp < GATHERER) {",
    ),
    "results stored before the kernel ahead has ended": (
        "bottleneck",
        "CONSUMER_REGISTERS>();\n  ptx::griddepcontrol_wait();",
        "CONSUMER_REGISTERS>();",
    ),
    "a square not waited for": (
        "bottleneck",
        "      if constexpr (COPIED) ptx::mbarrier_wait(square_full + 8 * slot, square.phase);\n",
        "",
    ),
    "a square replaced while it is read": (
        "bottleneck",
        "              ptx::mbarrier_wait(square_empty + 8 * slot, to.phase ^ 1);\n",
        "",
    ),
    "a square handed back before it is read": (
        "bottleneck",
        "if constexpr (COPIED) ptx::mbarrier_wait(square_full + 8 * slot, square.phase);",
        "if constexpr (COPIED) ptx::mbarrier_wait(square_full + 8 * slot, square.phase);\n"
        "      if constexpr (COPIED) release(square_empty + 8 * slot);",
    ),
    "a square that is never handed back": (
        "bottleneck",
        "        release(square_empty + 8 * slot);\n",
        "",
    ),
    "two warpgroups with the squares of one": (
        "bottleneck",
        "const int slot = group * C::SQUARES + square.slot;",
        "const int slot = square.slot;",
    ),
    "the residual of the other warpgroup's rows": (
        "bottleneck",
        "first_row(tile) + group * GROUP_M, 0, square_full",
        "first_row(tile), 0, square_full",
    ),
    "the residual of another part": ("bottleneck", "image, part * PART,", "image, 0,"),
    "a square read as if it were not swizzled": ("bottleneck", "(c / 8 ^ r % 8)", "(c / 8)"),
    "a copy over what lanes have stored, without a fence": (
        "bottleneck",
        "      if constexpr (COPIED && STORES) ptx::fence_proxy_async();",
        "      ",
    ),
    "a square handed back while other lanes read it": (
        "bottleneck",
        "      if constexpr (COPIED || STORES) __syncwarp(); ",
        "      ",
    ),
    "a square written while other lanes read it": (
        "no residual",
        "      if constexpr (COPIED || STORES) __syncwarp(); ",
        "      ",
    ),
    "a square read before other lanes have written it": (
        "no residual",
        "        __syncwarp();  // a warp has 16 rows of its own\n",
        "",
    ),
    "the value between stored beyond the last row": (
        "bottleneck",
        "r < C::ROWS && c < C::MIDDLE, {},",
        "c < C::MIDDLE, {},",
    ),
    "the value between stored beyond the last column": (
        "bottleneck",
        "r < C::ROWS && c < C::MIDDLE, {},",
        "r < C::ROWS, {},",
    ),
    "the value between stored in rows of the other warpgroup": (
        "bottleneck",
        "const int r = row0 + lane / 8 + 4 * i,",
        "const int r = tile_row + in_group + lane / 8 + 4 * i,",
    ),
    "results in rows of the other warpgroup": (
        "bottleneck",
        "RowRange{row0, C::ROWS}",
        "RowRange{tile_row + in_group, C::ROWS}",
    ),
    "results beyond the last column": (
        "in pairs",
        "C::COLUMNS % C::BLOCK_N == 0, Second>",
        "true, Second>",
    ),
    "inputs of another part of the results": (
        "bottleneck",
        "next = part_at(part + 1).fetch();",
        "next = part_at(part).fetch();",
    ),
    "columns beyond the last multiplied": (
        "quotient",
        "= on ? ptx::cvt_pack<Element>(made[0], made[1]) : 0u;",
        "= ptx::cvt_pack<Element>(made[0], made[1]);",
    ),
    "inputs beyond the last column": (
        "bottleneck",
        "return C::MIDDLE % PART == 0 || col + 8 * i < C::MIDDLE;",
        "return true;",
    ),
    "inputs beyond the last row": (
        "two residuals",
        "min_of(row + 8 * half, C::ROWS - 1)",
        "row + 8 * half",
    ),
    "inputs of the upper half's rows": (
        "two residuals",
        "inputs[half % INPUT_ROWS][i];",
        "inputs[0][i];",
    ),
    "row values read before they are there": (
        "perceptron",
        "      ptx::mbarrier_wait(rows_full + 8 * (round % 2), round / 2 % 2);\n",
        "      (void)rows_full;\n",
    ),
    "row values replaced while they are read": (
        "perceptron",
        "          ptx::mbarrier_wait(rows_empty + 8 * (round % 2), round / 2 % 2 ^ 1);\n",
        "",
    ),
    "row values that one warpgroup hands back": (
        "perceptron",
        "ptx::mbarrier_init(rows_empty + 8 * i, GROUPS * 128);",
        "ptx::mbarrier_init(rows_empty + 8 * i, 128);",
    ),
    "row values that are never handed back": (
        "perceptron",
        "if constexpr (First::ROW_VALUES > 0) ptx::mbarrier_arrive(rows_empty",
        "if (false) ptx::mbarrier_arrive(rows_empty",
    ),
    "row values of the other round": (
        "perceptron",
        "row_values + round % 2 * BLOCK_M + in_tile",
        "row_values + (round + 1) % 2 * BLOCK_M + in_tile",
    ),
    "row values of the other warpgroup": (
        "perceptron",
        "* BLOCK_M + in_tile + lane / 4;",
        "* BLOCK_M + in_group + lane / 4;",
    ),
    "row values of the upper half": ("perceptron", "values = rows[8 * half];", "values = rows[0];"),
    "row values beyond the last row": (
        "perceptron",
        "            if (row0 + r < C::ROWS)\n",
        "",
    ),
}


def program(case: str, old: str = "", new: str = "") -> KernelProgram:
    """The kernel with `old` replaced in its template."""
    sketch = GemmBackToBack(GROUPS[case](), TARGETS.get(case, FEW))
    return planted(sketch.emit({"stages": STAGES.get(case, 2)}), old, new)


def test_groups_have_what_faults_are_planted_in() -> None:
    little, room = program("bottleneck").source, program("with room").source
    assert "A_TILES = 1" in little and "SQUARES = 2" in little and "WIDTH = 8" in little
    assert "A_TILES = 2" in room and "WIDTH = 2" in program("in pairs").source
    assert "INPUTS_BY_ROW = true" in program("two residuals").source


@pytest.mark.parametrize("case", GROUPS)
def test_the_kernel_itself_is_right(case: str) -> None:
    assert verdicts(program(case), GROUPS[case]()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    case, old, new = FAULTS[fault]
    check_caught(program(case, old, new), GROUPS[case]())
