"""Faults planted in attention with its projection, each of which the host build must catch."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.attention_projection import AttentionProjection
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import projection_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

KINDS = {"mma": (128, 1), "wgmma": (256, 2)}
"""Columns of the projection, and warps that share 16 queries."""

FAULTS = {
    "a result sent to a block that may not have begun": (
        "mma",
        "  ptx::barrier_cluster_wait();  // every block's inbox can take copies\n",
        "",
    ),
    "a result sent with no fence.proxy.async": (
        "mma",
        "  ptx::fence_proxy_async();  // the copy engine reads them\n",
        "",
    ),
    "a result stored over staged parts that others still read": (
        "mma",
        "  __syncthreads();  // the staged parts are used up\n",
        "",
    ),
    "a result sent to the wrong slot": (
        "mma",
        "const int slot = rank < thread ? rank : rank - 1;",
        "const int slot = rank > 0 ? rank - 1 : 0;",
    ),
    "a wrong expected byte count at the inbox": (
        "mma",
        "(C::HEADS - 1) * RESULT * 2);",
        "C::HEADS * RESULT * 2);",
    ),
    "results multiplied before they have come": (
        "mma",
        "  ptx::mbarrier_wait(inbox_full, 0);\n",
        "",
    ),
    "results multiplied by wgmma before they have come": (
        "wgmma",
        "  ptx::mbarrier_wait(inbox_full, 0);\n",
        "",
    ),
    "weights read before they have landed": (
        "mma",
        "  ptx::mbarrier_wait(weights_full, 0);\n",
        "",
    ),
    "weights read by wgmma before they have landed": (
        "wgmma",
        "  ptx::mbarrier_wait(weights_full, 0);\n",
        "",
    ),
    "a part of K that is left out": (
        "mma",
        "for (int p = 0; p < Share::PARTS; ++p) {",
        "for (int p = 0; p < Share::PARTS - 1; ++p) {",
    ),
    "a head that is left out": (
        "wgmma",
        "for (int head = 0; head < C::HEADS; ++head) {",
        "for (int head = 1; head < C::HEADS; ++head) {",
    ),
    "accumulators read before the last products": (
        "wgmma",
        "    ptx::wgmma_wait_group<0>(acc[i]);\n",
        "",
    ),
    "parts staged over results that others still read": (
        "mma",
        "  __syncthreads();  // nobody reads the peers' results any more\n",
        "",
    ),
    "the epilogue ahead of the parts": (
        "mma",
        "  __syncthreads();\n  constexpr int VECTOR",
        "  constexpr int VECTOR",
    ),
    "the columns of another block": (
        "mma",
        "rank * WIDTH, 0, weights_full",
        "0, 0, weights_full",
    ),
    "a block that ends while what it sent is under way": (
        "wgmma",
        "  ptx::barrier_cluster_wait();  // nobody leaves while a peer takes its result\n",
        "",
    ),
    "a path without the dependent-launch wait": (
        "mma",
        "  ptx::griddepcontrol_wait();\n",
        "",
    ),
}


def group(kind: str) -> Group:
    columns, _ = KINDS[kind]
    return projection_groups.projected(4, 35, 64, columns, torch.float16, residual=True)


def program(kind: str, old: str = "", new: str = "") -> KernelProgram:
    """The kernel with `old` replaced in its template."""
    _, warps_k = KINDS[kind]
    schedule = {"block_q": 32, "block_k": 64, "warps_k": warps_k, "stages": 1}
    made = AttentionProjection(group(kind), TARGETS["sm_90a"]).emit(schedule)
    assert ("WGMMA = true" in made.source) == (kind == "wgmma")
    return planted(made, old, new)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_itself_is_right(kind: str) -> None:
    assert verdicts(program(kind), group(kind)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    kind, old, new = FAULTS[fault]
    check_caught(program(kind, old, new), group(kind))
