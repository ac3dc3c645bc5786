"""Faults planted in attention with its projection, each of which the host build must catch."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.attention_projection import AttentionProjection
from gtco.graph import Group
from gtco.target import TARGETS
from tests import projection_groups
from tests.faults.templates import SEEDS, planted, verdicts

pytestmark = pytest.mark.compiler

FAULTS = {
    "a result sent to a block that may not have begun": (
        "  ptx::barrier_cluster_wait();  // every block's inbox can take copies\n",
        "",
    ),
    "a result sent with no fence.proxy.async": (
        "  ptx::fence_proxy_async();  // the copy engine reads them\n",
        "",
    ),
    "a result stored over staged parts that others still read": (
        "  __syncthreads();  // the staged parts are used up\n",
        "",
    ),
    "a result sent to the wrong slot": (
        "const int slot = rank < thread ? rank : rank - 1;",
        "const int slot = rank > 0 ? rank - 1 : 0;",
    ),
    "a wrong expected byte count at the inbox": (
        "(C::HEADS - 1) * RESULT * 2);",
        "C::HEADS * RESULT * 2);",
    ),
    "results multiplied before they have come": (
        "  ptx::mbarrier_wait(inbox_full, 0);\n",
        "",
    ),
    "weights read before they have landed": (
        "  ptx::mbarrier_wait(weights_full, 0);\n",
        "",
    ),
    "a part of K that is left out": (
        "for (int p = 0; p < PARTS; ++p) {",
        "for (int p = 0; p < PARTS - 1; ++p) {",
    ),
    "parts staged over results that others still read": (
        "  __syncthreads();  // the results become the staging buffer",
        "  //",
    ),
    "the columns of another block": (
        "atom * ATOM_K, rank * WIDTH, 0,",
        "atom * ATOM_K, 0, 0,",
    ),
    "a block that ends while what it sent is under way": (
        "  ptx::barrier_cluster_wait();  // nobody leaves while a peer takes its result\n",
        "",
    ),
    "a path without the dependent-launch wait": (
        "  ptx::griddepcontrol_wait();\n",
        "",
    ),
}


def group() -> Group:
    return projection_groups.projected(4, 35, 64, 128, torch.float16, residual=True)


def program(old: str = "", new: str = "") -> KernelProgram:
    """The kernel with `old` replaced in its template."""
    schedule = {"block_q": 32, "block_k": 48, "warps_k": 1, "stages": 1}
    return planted(AttentionProjection(group(), TARGETS["sm_90a"]).emit(schedule), old, new)


def test_the_kernel_itself_is_right() -> None:
    assert verdicts(program(), group()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    found = verdicts(program(*FAULTS[fault]), group())
    assert len(found) == len(SEEDS), found
    assert all("kernel gtco_attention" in each or "with {" in each for each in found)
