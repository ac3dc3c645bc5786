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

pytestmark = pytest.mark.compiler

KINDS: dict[str, Schedule] = {
    "a ring": {"block_q": 128, "block_k": 32, "parts": 1, "stages": 2},
    "two parts": {"block_q": 64, "block_k": 64, "parts": 2, "stages": 2},
}

FAULTS = {
    "no wgmma.fence before products that read registers": (
        "a ring",
        "  ptx::wgmma_fence();\n#pragma unroll\n  for (int i = 0; i < WHOLE; ++i)",
        "#pragma unroll\n  for (int i = 0; i < WHOLE; ++i)",
    ),
    "no wgmma.fence before products whose last results were read": (
        "a ring",
        "    ptx::wgmma_fence();\n#pragma unroll\n    for (int k = 0;",
        "#pragma unroll\n    for (int k = 0;",
    ),
    "keys that nobody waits for": (
        "a ring",
        "ptx::mbarrier_wait(keys_full + 8 * s, from.phase);",
        "",
    ),
    "queries that nobody waits for": (
        "two parts",
        "ptx::mbarrier_wait(queries_full, 0);",
        "",
    ),
    "values that nobody waits for": (
        "two parts",
        "ptx::mbarrier_wait(values_full + 8 * s, from.phase);",
        "",
    ),
    "a tile that comes before the last one was used": (
        "a ring",
        "ptx::mbarrier_wait(empty + 8 * slot, (tile - 1) / STAGES & 1);",
        "",
    ),
    "a warp without queries that gives nothing back": (
        "a ring",
        "if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);",
        "if (lane == 0 && has_queries) ptx::mbarrier_arrive(empty + 8 * s);",
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
        "v_ring + s * VALUE_BYTES + part * KEYS * 128, tile > 0);",
        "v_ring + s * VALUE_BYTES + part * KEYS * 128, false);",
    ),
    "the values of another part": (
        "two parts",
        "v_ring + s * VALUE_BYTES + part * KEYS * 128, tile > 0);",
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

MASK_FAULTS = {
    "the mask of the tile before": (
        "a ring",
        "if (tile + 1 < tiles) load_mask(tile + 1);",
        "",
    ),
    "the mask of another part": (
        "two parts",
        "tile_mask.load(mask, lane, head, query0 + row, tile * TILE + part * KEYS);",
        "tile_mask.load(mask, lane, head, query0 + row, tile * TILE);",
    ),
}


SCALED_LATE = ("MASKED || C::SCALE <= 0.0f", "MASKED")
"""The largest score is then taken for the largest of what the softmax sees."""


def group(mask: torch.dtype | None = None) -> Group:
    return attention_groups.cross((2,), 70, 100, 24, 40, mask=mask)


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


@pytest.mark.parametrize("mask", (torch.bool, torch.float16))
def test_the_kernel_with_a_mask_is_right(mask: torch.dtype) -> None:
    for kind in KINDS:
        assert verdicts(program(kind, mask=mask), group(mask)) == []


@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_a_fault_in_the_mask_is_caught(fault: str) -> None:
    kind, old, new = MASK_FAULTS[fault]
    mask = torch.float16
    check_caught(program(kind, old, new, mask), group(mask))


@pytest.mark.parametrize("scale", (-8.0, 0.0))
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_turns_the_order_of_the_scores(kind: str, scale: float) -> None:
    turned = attention_groups.cross((2,), 20, 100, 24, scale=scale)
    made = AttentionWgmma(turned, TARGETS["sm_90a"]).emit(KINDS[kind])
    assert verdicts(made, turned) == []
    check_caught(planted(made, *SCALED_LATE), turned)
