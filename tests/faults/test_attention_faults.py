"""Faults in attention with a mask and warps that only copy, each of which the host build must
catch."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Schedule
from gtco.codegen.sketches.attention import Attention
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import attention_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

KINDS: dict[str, Schedule] = {
    "one part": {"block_q": 48, "block_k": 32, "warps_k": 1, "stages": 2, "copy_warps": 2},
    "two parts": {"block_q": 16, "block_k": 64, "warps_k": 2, "stages": 1, "copy_warps": 4},
}

HAS_QUERIES = "thread_ < C::BLOCK_Q / 16 * C::WARPS_K * 32"
"""Of a warp that does not copy alone, in `Tiles`."""
FAULTS = {
    "a copy warp that skips the barrier": (
        "one part",
        "__syncthreads();  // this tile's keys are there",
        f"if ({HAS_QUERIES}) __syncthreads();  // this tile's keys are there",
    ),
    "a copy warp that does not wait for its keys": (
        "one part",
        "ptx::cp_async_wait<2 * AHEAD - 1>();",
        f"if ({HAS_QUERIES}) ptx::cp_async_wait<2 * AHEAD - 1>();",
    ),
    "a copy warp that does not wait for its values": (
        "two parts",
        "ptx::cp_async_wait<C::STAGES == 1 ? 0 : 2 * AHEAD>();",
        f"if ({HAS_QUERIES}) ptx::cp_async_wait<C::STAGES == 1 ? 0 : 2 * AHEAD>();",
    ),
    "a copy warp that copies nothing": (
        "two parts",
        "if (tile < tiles_)\n      copy_rows",
        f"if ({HAS_QUERIES} && tile < tiles_)\n      copy_rows",
    ),
    "a copy warp that copies over keys in use": (
        "two parts",
        "if constexpr (C::STAGES == 1) {\n      __syncthreads();",
        "if constexpr (C::STAGES == 1) {",
    ),
    "a copy warp that stages results": (
        "two parts",
        "if (has_queries_) parts_.stage(state, part_, row_);",
        "parts_.stage(state, part_, row_);",
    ),
    "one part that is read before it is staged": (
        "one part",
        "    __syncthreads();\n    if constexpr (PARTS > 1) {",
        "    if constexpr (PARTS > 1) {\n      __syncthreads();",
    ),
    "one part that is not divided": (
        "one part",
        "PARTS == 1 ? Softmax::inverse(lanes_sum<4>(state.total[half])) : 1.0f",
        "1.0f",
    ),
    "a mask that is read beyond its last key": (
        "one part",
        "key < C::LK ? mask_bits(*mask.at(head, query, key)) : 0",
        "mask_bits(*mask.at(head, query, key))",
    ),
    "the mask of an even key for the next": ("one part", "key += j % 2;", "key += 0;"),
    "a mask that is read beyond its last query": (
        "one part",
        "min_of(query0 + lane / 4 + half * 8, C::LQ - 1)",
        "query0 + lane / 4 + half * 8",
    ),
    "rows of a mask that are those of the first half": (
        "two parts",
        "query0 + lane / 4 + half * 8",
        "query0 + lane / 4",
    ),
    "elements of a mask that share a word": (
        "two parts",
        "words[i] |= bits << j % IN_WORD * BITS",
        "words[i] |= bits",
    ),
    "a part that takes the mask of another": (
        "two parts",
        "query0_ + row_, key0, tile == 0);",
        "query0_ + row_, tile * C::BLOCK_K, tile == 0);",
    ),
}


SCALED_LATE = ("Masks::ADDED || C::SCALE <= 0.0f", "Masks::ADDED")
"""The largest score is then taken for the largest of what the softmax sees."""


def group() -> Group:
    return attention_groups.cross((2,), 50, 100, 24, mask=torch.bool)


def program(kind: str, old: str = "", new: str = "") -> KernelProgram:
    """The kernel with `old` replaced in its template."""
    return planted(made(kind, group()), old, new)


def made(kind: str, of: Group) -> KernelProgram:
    return Attention(of, TARGETS["sm_90a"]).emit({**KINDS[kind], "tma": 0})


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_itself_is_right(kind: str) -> None:
    assert verdicts(program(kind), group()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    kind, old, new = FAULTS[fault]
    check_caught(program(kind, old, new), group())


@pytest.mark.parametrize("scale", (-8.0, 0.0))
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_turns_the_order_of_the_scores(kind: str, scale: float) -> None:
    turned = attention_groups.cross((2,), 20, 100, 24, scale=scale)
    assert verdicts(made(kind, turned), turned) == []
    check_caught(planted(made(kind, turned), *SCALED_LATE), turned)
