"""Faults planted in the wgmma GEMM, each of which the host build must catch; the twin must pass."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import exact_products, groups, int8_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

PLAIN = {"split": 1, "multicast": 1, "cluster_q": 1}
CLUSTERS = {
    "plain": PLAIN,
    "deep": {**PLAIN, "depth": 1},
    "split": {**PLAIN, "split": 2},
    "multicast": {**PLAIN, "multicast": 2},
    "deep multicast": {**PLAIN, "multicast": 2, "depth": 1},
    "statistics": {**PLAIN, "split": 2},
    "neighbours": {**PLAIN, "split": 2, "cluster_q": 2, "block_q": 24},
    "over the ring": {**PLAIN, "block_p": 128, "block_q": 256, "stages": 4, "split": 3, "depth": 1},
    "neighbours over the ring": {
        **PLAIN,
        "swap": 0,
        "block_p": 128,
        "block_q": 128,
        "stages": 7,
        "split": 2,
        "cluster_q": 2,
    },
    "fp8": PLAIN,
    "deep fp8": {**PLAIN, "depth": 1},
    "int8": {**PLAIN, "block_q": 48},
    "deep int8": {**PLAIN, "block_q": 48, "depth": 1},
    "rows of K": {**PLAIN, "swap": 0, "block_q": 128},
    "groups": {**PLAIN, "swap": 0, "block_q": 32},
    "fours": {**PLAIN, "swap": 0, "block_q": 48},
    "fp32 rows of K": PLAIN,
}

FAULTS = {
    "channels of the first group alone": (
        "groups",
        "group_ * W::CHANNELS + at.channel",
        "at.channel",
    ),
    "results of the first group alone": (
        "groups",
        "left = GROUPED ? batch * C::COLUMNS : 0",
        "left = 0",
    ),
    "groups one below the other": ("groups", "top = GROUPED ? 0", "top = GROUPED ? batch * 4"),
    "columns of the next group": (
        "groups",
        "column_end = left + C::COLUMNS",
        "column_end = left + C::COLUMNS + 8",
    ),
    "no wgmma.fence after the accumulators are set": (
        "plain",
        "      ptx::wgmma_fence();\n",
        "",
    ),
    "accumulators read before the last wait": (
        "plain",
        "        ptx::wgmma_wait_group<0>(sums);\n",
        "        if (step + 1 < steps) ptx::wgmma_wait_group<0>(sums);\n",
    ),
    "accumulators read before the last of several products": (
        "deep",
        "    if constexpr (C::DEPTH > 0) ptx::wgmma_wait_group<0>(acc);\n",
        "",
    ),
    "a slot handed back while a product still reads it": (
        "plain",
        "          ptx::wgmma_wait_group<0>(sums);\n          release(s);\n",
        "          release(s);\n          ptx::wgmma_wait_group<0>(sums);\n",
    ),
    "a slot handed back while the products before the last still read it": (
        "deep",
        "        ptx::wgmma_wait_group<1>();\n",
        "",
    ),
    "a wrong expected byte count": (
        "plain",
        "ptx::mbarrier_arrive_expect_tx(full + 8 * to.slot, STAGE_BYTES);",
        "ptx::mbarrier_arrive_expect_tx(full + 8 * to.slot, P_BYTES);",
    ),
    "a wrong expected byte count at the inbox": (
        "split",
        "(C::SPLIT - 1) * parts * PART_BYTES);",
        "C::SPLIT * parts * PART_BYTES);",
    ),
    "a reused parity": (
        "plain",
        "ptx::mbarrier_wait(full + 8 * s, from.phase);",
        "ptx::mbarrier_wait(full + 8 * s, 0);",
    ),
    "no wait for an empty slot": (
        "plain",
        "        ptx::mbarrier_wait(empty + 8 * to.slot, to.phase);\n        ptx::mbarrier_arrive",
        "        ptx::mbarrier_arrive",
    ),
    "row values read before they are there": (
        "plain",
        "  if constexpr (Functor::ROW_VALUES > 0) __syncthreads();",
        "",
    ),
    "statistics merged before all warps have brought theirs": (
        "statistics",
        "    __syncthreads();  // of all warps\n",
        "",
    ),
    "partial sums sent to a block that may not have begun": (
        "split",
        "  if constexpr (C::SPLIT > 1) ptx::barrier_cluster_wait();",
        "",
    ),
    "partial sums sent to a block that never says that it is done": (
        "over the ring",
        "  if constexpr (INBOX_OVER_RING) ptx::barrier_cluster_arrive();",
        "",
    ),
    "partial sums sent over tiles that are still multiplied": (
        "over the ring",
        "INBOX_OVER_RING = C::SPLIT > 1 && C::INBOX_AT < C::ROW_VALUES_AT;",
        "INBOX_OVER_RING = false;",
    ),
    "partial sums sent over tiles that a neighbour's blocks still multiply": (
        "neighbours over the ring",
        "INBOX_OVER_RING = C::SPLIT > 1 && C::INBOX_AT < C::ROW_VALUES_AT;",
        "INBOX_OVER_RING = false;",
    ),
    "partial sums added before they have come": (
        "split",
        "      ptx::mbarrier_wait(inbox_full, 0);\n",
        "",
    ),
    "a block that ends while a peer counts on its barriers": (
        "multicast",
        "          ptx::mbarrier_wait(empty + 8 * to.slot, to.phase);\n      }",
        "          ;\n      }",
    ),
    "a block that waits for all but a peer's last slot": (
        "multicast",
        "i < ahead; ++i, to.advance()",
        "i < ahead - 1; ++i, to.advance()",
    ),
    "a last slot that is not given back to peers": (
        "deep multicast",
        "C::DEPTH > 0 && !APART) release(last);",
        "C::DEPTH > 0 && APART) release(last);",
    ),
    "a slot handed back to its own block only": (
        "multicast",
        "if (lane < C::MULTICAST) ptx::mbarrier_arrive_cluster(ptx::mapa(empty + 8 * s, lane));",
        "if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);",
    ),
    "a copy that one block of the cluster does not get": (
        "multicast",
        "(1 << C::MULTICAST) - 1);",
        "1);",
    ),
    "partial sums sent to a neighbour's blocks": (
        "neighbours",
        "const int peer = neighbour * C::SPLIT + owner;",
        "const int peer = owner;",
    ),
    "neighbours that compute one tile": (
        "neighbours",
        " + neighbour * C::BLOCK_Q;",
        ";",
    ),
    "fp8 sums of 512 that are not added in fp32": (
        "fp8",
        "acc[i] += static_cast<float>(of_interval[i]);",
        "acc[i] = static_cast<float>(of_interval[i]);",
    ),
    "sums of int8 that are taken for floats": (
        "int8",
        "static_cast<float>(of_interval[i])",
        "__uint_as_float(of_interval[i])",
    ),
    "sums of int8 that are not awaited": (
        "deep int8",
        "ptx::wgmma_wait_group<0>(of_interval);",
        "",
    ),
    "fp8 sums that begin with those of the 512 before": (
        "deep fp8",
        "!PROMOTED || atom + k > 0 || step > begin",
        "true",
    ),
    "fp8 sums that begin anew with each step": (
        "fp8",
        "|| step > begin",
        "",
    ),
    "a slot of the last of 512 that is not given back": (
        "deep fp8",
        "if (end < steps || C::MULTICAST > 1) release(last);",
        "",
    ),
    "rows of K of the products before": (
        "rows of K",
        "atom * N * 128 + k / 32 * 16 * 128",
        "atom * N * 128",
    ),
    "columns of the first square alone": (
        "rows of K",
        "first + i * SIDE, k,",
        "first, k,",
    ),
    "a square that is copied over the first": (
        "rows of K",
        "to + i * SIDE * 128",
        "to",
    ),
    "a matrix of each product where there is one": (
        "fp32 rows of K",
        "batch_of_a = IsShared<C>::value ? 0 : batch",
        "batch_of_a = batch",
    ),
    "one image for all products": (
        "fp32 rows of K",
        "p_batch = C::SWAP ? batch : batch_of_a",
        "p_batch = batch_of_a",
    ),
    "channels in the order of wgmma where they are read in pairs": (
        "fp32 rows of K",
        "row_(row + lane / 4 * (PAIRED ? 2 : 1))",
        "row_(row + lane / 4)",
    ),
    "rows of K that are not turned": (
        "fp32 rows of K",
        "const int chunk = row % 32 / 4 ^ (half * 4 + k_);",
        "const int chunk = row % 32 / 4;",
    ),
    "channels of the first square alone": (
        "fp32 rows of K",
        "from + row / 32 * 32 * 128 + chunk * 16",
        "from + chunk * 16",
    ),
    "low parts without the high ones": (
        "fp32 rows of K",
        "Product::mma(high, p[k][0], ptx::wgmma_descriptor(q, k * 32), k > 0);",
        "Product::mma(high, p[k][1], ptx::wgmma_descriptor(q, k * 32), k > 0);",
    ),
    "low parts of P left out": (
        "fp32 rows of K",
        "Product::mma(low, p[k][1], ptx::wgmma_descriptor(q, k * 32), 1);",
        ";",
    ),
    "low parts that are read before they are written": (
        "fp32 rows of K",
        "    ptx::mbarrier_wait(ready, step & 1);\n",
        "",
    ),
    "low parts that the tensor core may not see": (
        "fp32 rows of K",
        "    ptx::fence_proxy_async();  // the tensor cores read it\n",
        "",
    ),
    "a stage of floats that is not handed back": (
        "fp32 rows of K",
        "    ptx::wgmma_wait_group<0>(high);\n    release(s);\n",
        "    ptx::wgmma_wait_group<0>(high);\n",
    ),
    "columns of another tile of weights in fours": (
        "fours",
        "q0 / (4 * C::WIDTH), full + 8 * s);",
        "q0 / 32, full + 8 * s);",
    ),
    "weights in fours copied as if their rows came in order": (
        "fours",
        "else if constexpr (!C::SWAP && C::WIDTH > 2) {",
        "else if constexpr (!C::SWAP && C::WIDTH > 4) {",
    ),
    "an mbarrier that is never initialised": (
        "plain",
        "      ptx::mbarrier_init(full + 8 * s, 1);\n",
        "",
    ),
}


def group(cluster: str) -> Group:
    if cluster == "fp32 rows of K":
        return exact_products.transform(2, 37, 76, 144)
    if cluster == "statistics":
        return groups.residual_linear(37, 128, 336, torch.float16)
    if cluster.endswith("fp8"):
        return groups.fp8_linear(37, 1168, 128, torch.float16)
    if cluster.endswith("int8"):
        return int8_groups.linear(37, 1168, 128, torch.float16, residual=False)
    if cluster == "groups":
        return groups.GROUPED_CASES["groups_of_64"]()
    if cluster == "rows of K":
        return groups.batched_matmul(1, 37, 136, 128, torch.float16)
    if cluster == "over the ring":
        return groups.norm_linear(261, 712, 136, torch.float16)
    if cluster == "neighbours over the ring":
        return groups.residual_linear(133, 712, 200, torch.float16, stats=False)
    columns = 144 if cluster == "fours" else 128
    return groups.norm_linear(37, 328, columns, torch.float16)


def program(cluster: str, old: str = "", new: str = "") -> KernelProgram:
    """The GEMM with `old` replaced in its template."""
    schedule = {"swap": 1, "block_p": 64, "block_q": 40, "stages": 2, "atoms": 1, "depth": 0}
    made = GemmWgmma(group(cluster), TARGETS["sm_90a"]).emit({**schedule, **CLUSTERS[cluster]})
    return planted(made, old, new)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_kernel_itself_is_right(cluster: str) -> None:
    assert verdicts(program(cluster), group(cluster)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    cluster, old, new = FAULTS[fault]
    check_caught(program(cluster, old, new), group(cluster))
