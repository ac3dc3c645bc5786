"""Faults in attention on wgmma, each of which the host build must catch."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Schedule
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import attention_groups
from tests.faults.templates import check_caught, planted, verdicts
from tests.groups import tf32

pytestmark = pytest.mark.compiler


def schedule(block_q: int, block_k: int, parts: int, split: int = 1, rest: int = 0) -> Schedule:
    knobs = {"block_q": block_q, "block_k": block_k, "parts": parts, "stages": 2}
    return {**knobs, "split": split, "rest": rest}


KINDS = {"a ring": schedule(128, 32, 1), "two parts": schedule(64, 64, 2)}

TF32_KINDS = {
    "a ring": schedule(128, 32, 1),
    "two parts": schedule(64, 96, 2),  # of a square and a half
}

CUT_KINDS = {"shared keys": schedule(64, 32, 1, split=2), "a rest": schedule(64, 64, 2, rest=16)}

FAULTS = {
    "no wgmma.fence before products that read registers": (
        "a ring",
        "  ptx::wgmma_fence();\n#pragma unroll\n  for (int i = 0; i < WHOLE; ++i)",
        "#pragma unroll\n  for (int i = 0; i < WHOLE; ++i)",
    ),
    "no wgmma.fence before products whose last results were read": (
        "a ring",
        "      ptx::wgmma_fence();\n#pragma unroll\n      for (int k = 0;",
        "#pragma unroll\n      for (int k = 0;",
    ),
    "keys that nobody waits for": (
        "a ring",
        "ptx::mbarrier_wait(keys_full + 8 * s, from.phase);\n      ptx::wgmma_fence();",
        "ptx::wgmma_fence();",
    ),
    "queries that nobody waits for": (
        "two parts",
        "load_mask(0);\n    ptx::mbarrier_wait(queries_full, 0);",
        "load_mask(0);",
    ),
    "values that nobody waits for": (
        "two parts",
        "ptx::mbarrier_wait((TRANSPOSERS > 0 ? transposed : values_full) + 8 * s, from.phase);",
        "",
    ),
    "a tile that comes before the last one was used": (
        "a ring",
        "ptx::mbarrier_wait(empty + 8 * slot, (tile - 1) / STAGES & 1);",
        "",
    ),
    "a warp without queries that gives nothing back": (
        "a ring",
        "lane == 0) ptx::mbarrier_arrive(empty + 8 * s);\n      }\n      if (tile",
        "lane == 0 && has_queries) ptx::mbarrier_arrive(empty + 8 * s);\n      }\n      if (tile",
    ),
    "a barrier that expects too few bytes": (
        "a ring",
        "expect_tx(values_full + 8 * slot, VALUE_BYTES)",
        "expect_tx(values_full + 8 * slot, VALUE_BYTES / 2)",
    ),
    "results read before they are there": (
        "a ring",
        "ptx::wgmma_wait_group<0>(reinterpret_cast<float (&)[ceil_div(DV, 16) * 8]>(out));",
        "",
    ),
    "the first tile's results added to": (
        "two parts",
        "v_ring + s * VALUE_BYTES + Values::part(part), tile > 0);",
        "v_ring + s * VALUE_BYTES + Values::part(part), false);",
    ),
    "the values of another part": (
        "two parts",
        "v_ring + s * VALUE_BYTES + Values::part(part), tile > 0);",
        "v_ring + s * VALUE_BYTES, tile > 0);",
    ),
    "keys behind the last": (
        "a ring",
        "constexpr int FREE = Mask::PRESENT || C::CAUSAL ? 0 : max_of(0, LAST);",
        "constexpr int FREE = KEYS;",
    ),
    "results staged over a tile in use": (
        "two parts",
        "__syncthreads();  // the ring becomes the staging buffer",
        "",
    ),
    "parts that nobody brings together": (
        "two parts",
        "total += shares_[p * ROWS + r] * weights[p];",
        "total += shares_[p * ROWS + r];",
    ),
}

CUT_FAULTS = {
    "parts that nobody waits for": ("shared keys", "ptx::mbarrier_wait(parts_full, 0);", ""),
    "parts sent over a ring in use": (
        "shared keys",
        "ptx::barrier_cluster_arrive();  // done with its ring, which becomes the staging buffer\n"
        "    ptx::barrier_cluster_wait();",
        "",
    ),
    "the first block's keys for all": ("shared keys", "tile0 = rank * SPLIT_TILES", "tile0 = 0"),
    "a barrier that expects less than comes": (
        "shared keys",
        "expect_tx(parts_full, Parts::BYTES)",
        "expect_tx(parts_full, Parts::BYTES / 2)",
    ),
    "rows sent to another block": (
        "shared keys",
        "const int owner = (row + half * 8) / ROWS,",
        "const int owner = SPLIT - 1 - (row + half * 8) / ROWS,",
    ),
    "sums that nobody reads": ("shared keys", "shares_[i] = of_row[0];", "shares_[i] = 1.0f;"),
    "keys that the rest does not wait for": (
        "a rest",
        "ptx::mbarrier_wait(keys_full + 8 * s, from.phase);\n      __syncwarp();",
        "__syncwarp();",
    ),
    "values that the rest does not wait for": (
        "a rest",
        "ptx::mbarrier_wait(values_full + 8 * s, from.phase);\n      __syncwarp();",
        "__syncwarp();",
    ),
    "queries that the rest does not wait for": (
        "a rest",
        "ptx::mbarrier_wait(queries_full, 0);\n    __syncwarp();",
        "__syncwarp();",
    ),
    "a rest that gives nothing back": (
        "a rest",
        "__syncwarp();\n      if constexpr (!ALL_IN_FLIGHT) {\n"
        "        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);",
        "__syncwarp();\n      if constexpr (!ALL_IN_FLIGHT) {\n",
    ),
    "the first warp's keys for the whole rest": (
        "a rest",
        "in_tile = (warp - WARPS) * Rest::KEYS;",
        "in_tile = 0;",
    ),
    "a rest staged over the others": (
        "a rest",
        "staged + PARTS * BLOCK_Q * Parts::LD",
        "staged",
    ),
    "the rest's sums over the others'": (
        "a rest",
        "shares + 2 * PARTS * BLOCK_Q)",
        "shares)",
    ),
}
"""Of queries cut otherwise than into whole warpgroups of one block."""

MASK_FAULTS = {
    "the mask of the tile before": (
        "a ring",
        "if (tile + 1 < tiles) load_mask(tile + 1);",
        "",
    ),
    "the mask of another part": (
        "two parts",
        "const int key = (tile0 + tile) * TILE + part * KEYS;",
        "const int key = (tile0 + tile) * TILE;",
    ),
}

SUM_FAULTS = {
    "a mask taken for the same in all tiles": ("C::BLOCK_K % Mask::PERIOD == 0", "true"),
    "a mask loaded for the first tile alone": ("if (SAME_IN_ALL && !first)", "if (!first)"),
    "the first mask alone": (
        "return firsts.at(n, j) + seconds.at(n, j);",
        "return firsts.at(n, j);",
    ),
    "one element of a mask for all keys": ("Mask::RUN % KEYS == 0 ? KEYS", "true ? KEYS"),
    "one element of a mask for eight keys": ("Mask::RUN % 8 == 0 ? 8", "true ? 8"),
    "a pair of one key": ("mask_bits(both.data[1]) << 16", "mask_bits(both.data[0]) << 16"),
}
"""Of masks that are alike in keys that are neighbours, or a row apart."""

TF32_FAULTS = {
    "values multiplied before they are transposed": (
        "a ring",
        "(TRANSPOSERS > 0 ? transposed : values_full)",
        "values_full",
    ),
    "values transposed before they are there": (
        "a ring",
        "      ptx::mbarrier_wait(values_full + 8 * s, from.phase);\n      Values",
        "      Values",
    ),
    "no fence.proxy.async behind the columns": (
        "two parts",
        "ptx::fence_proxy_async();  // the tensor cores read it",
        "",
    ),
    "columns said to be there before all lanes have stored theirs": (
        "a ring",
        "__syncwarp();\n      if (lane == 0) ptx::mbarrier_arrive(transposed",
        "if (lane == 0) ptx::mbarrier_arrive(transposed",
    ),
    "columns stored over rows that a lane has not read": (
        "two parts",
        "__syncwarp();  // rows are overwritten by columns",
        "",
    ),
    "a square that no warp transposes": (
        "a ring",
        "for (int i = warp; i < SQUARES; i += TRANSPOSERS)",
        "for (int i = warp; i < SQUARES - 1; i += TRANSPOSERS)",
    ),
    "keys in another order than their weights": (
        "two parts",
        "const int key = chunk / 2 * 8 + chunk % 2;",
        "const int key = chunk / 2 * 8 + 1 - chunk % 2;",
    ),
    "rows read as if no swizzle changed their chunks": (
        "a ring",
        "(lane / 4 ^ r % 8) * 4",
        "lane / 4 * 4",
    ),
    "columns stored as if no swizzle changed their chunks": (
        "a ring",
        "(chunk ^ lane % 8) * 4",
        "chunk * 4",
    ),
    "the keys of another square": (
        "two parts",
        "return k / 4 * ACROSS * SQUARE + k % 4 * 32;",
        "return k / 4 * SQUARE + k % 4 * 32;",
    ),
    "the columns of another square": (
        "a ring",
        "return i * 2 * SQUARE;",
        "return i * SQUARE;",
    ),
    "values of another part's keys": (
        "two parts",
        "key + down / DOWN * KEYS + down % DOWN * SIDE",
        "key + down * SIDE",
    ),
    "weights in the order of 16 bits": (
        "a ring",
        "cvt_tf32(weights[k][i % 2 * 2 + i / 2])",
        "cvt_tf32(weights[k][i])",
    ),
}


SCALED_LATE = ("Masks::ADDED || C::SCALE <= 0.0f", "Masks::ADDED")
"""The largest score is then taken for the largest of what the softmax sees."""


def group(mask: torch.dtype | None = None) -> Group:
    return attention_groups.cross((2,), 70, 100, 24, 40, mask=mask)


def tf32_group() -> Group:
    """Values of more columns than one product takes."""
    return tf32(attention_groups.cross((2,), 70, 100, 24, 72, torch.float32))


def tf32_program(kind: str, old: str = "", new: str = "") -> KernelProgram:
    """The kernel of tf32 with `old` replaced in its template."""
    knobs = TF32_KINDS[kind]
    return planted(AttentionWgmma(tf32_group(), TARGETS["sm_90a"]).emit(knobs), old, new)


def program(
    kind: str, old: str = "", new: str = "", mask: torch.dtype | None = None
) -> KernelProgram:
    """The kernel with `old` replaced in its template."""
    return planted(AttentionWgmma(group(mask), TARGETS["sm_90a"]).emit(KINDS[kind]), old, new)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_itself_is_right(kind: str) -> None:
    assert verdicts(program(kind), group()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    kind, old, new = FAULTS[fault]
    check_caught(program(kind, old, new), group())


def cut_program(kind: str, old: str = "", new: str = "") -> tuple[KernelProgram, Group]:
    """The kernel over three tiles of keys or more, with `old` replaced in its template."""
    cut = attention_groups.cross((2,), 70, 150, 24, 40)
    return planted(AttentionWgmma(cut, TARGETS["sm_90a"]).emit(CUT_KINDS[kind]), old, new), cut


@pytest.mark.parametrize("kind", CUT_KINDS)
def test_the_kernel_of_other_cuts_is_right(kind: str) -> None:
    assert verdicts(*cut_program(kind)) == []


@pytest.mark.parametrize("fault", CUT_FAULTS)
def test_a_fault_in_other_cuts_is_caught(fault: str) -> None:
    check_caught(*cut_program(*CUT_FAULTS[fault]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_of_tf32_is_right(kind: str) -> None:
    assert verdicts(tf32_program(kind), tf32_group()) == []


@pytest.mark.parametrize("fault", (*TF32_FAULTS, *FAULTS))
def test_a_fault_in_tf32_is_caught(fault: str) -> None:
    check_caught(tf32_program(*{**FAULTS, **TF32_FAULTS}[fault]), tf32_group())


@pytest.mark.parametrize("mask", (torch.bool, torch.float16))
def test_the_kernel_with_a_mask_is_right(mask: torch.dtype) -> None:
    for kind in KINDS:
        assert verdicts(program(kind, mask=mask), group(mask)) == []


@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_a_fault_in_the_mask_is_caught(fault: str) -> None:
    kind, old, new = MASK_FAULTS[fault]
    mask = torch.float16
    check_caught(program(kind, old, new, mask), group(mask))


def sum_program(block_k: int, old: str = "", new: str = "") -> tuple[KernelProgram, Group]:
    """The kernel of two masks over 8 rows of 12 keys with `old` replaced in its template."""
    summed = attention_groups.decomposed(2, (5, 13), (8, 12), 24)
    made = AttentionWgmma(summed, TARGETS["sm_90a"]).emit(schedule(64, block_k, 1))
    return planted(made, old, new), summed


@pytest.mark.parametrize("block_k", (32, 48))
def test_the_kernel_with_two_masks_is_right(block_k: int) -> None:
    assert verdicts(*sum_program(block_k)) == []


@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_a_fault_in_the_sum_of_masks_is_caught(fault: str) -> None:
    check_caught(*sum_program(32, *SUM_FAULTS[fault]))


@pytest.mark.parametrize("scale", (-8.0, 0.0))
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_turns_the_order_of_the_scores(kind: str, scale: float) -> None:
    turned = attention_groups.cross((2,), 20, 100, 24, scale=scale)
    made = AttentionWgmma(turned, TARGETS["sm_90a"]).emit(KINDS[kind])
    assert verdicts(made, turned) == []
    check_caught(planted(made, *SCALED_LATE), turned)
