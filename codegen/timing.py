"""How long a kernel takes in a chain, from what one block of it does: a formula, nothing measured.

    start + max(weights from device memory, waves * (tiles before + loop + epilogue) + begun)
    begun    = waves but the first * latency, where one block fits a multiprocessor at a time
    loop     = max(fill, L2, refills of the ring, matrix multiply) + turns of the ring, of one tile
    fill     = max(what L2 gives, what shared memory takes and gives)
    refills  = first fill + steps after it * (latency + fill + multiply + turn of a step) / stages
    before   = rounds of the consumers * max(all their loops, a loop and its epilogue)

Sketches order their default schedules by it, and the draft cost model is the same formula
(`gtco.cost_model.model`). The constants are an H100's (experiments.fill_rate and
experiments/notes/01-gemm_wgmma.md, 04-draft_model.md); rates and boundary scale them to other
targets.
"""

from __future__ import annotations

from collections.abc import Mapping

from gtco.codegen.sketch import BlockWork
from gtco.target import PORTABLE_CLUSTER, Target

FILL = 2.57
"""What one multiprocessor draws from L2 (107 B/ns), in even shares of `Target.l2_gbps`."""
TOGETHER = 2.1
"""What all draw together (11.5 TB/s), in units of `Target.l2_gbps`."""
SHARED_BYTES_PER_US = 225_000
"""What a multiprocessor's shared memory takes and gives together in a microsecond, about 128 bytes
a clock. It fits what was measured, and not why: it stands for tiles that few blocks read, which L2
gives at half the rate of those that all read (experiments/notes/14-shared_reads.md)."""
WGMMA_ROWS = 64
"""Rows of P that one warpgroup's product reads, beside all of Q."""
SHARED_OPERANDS = frozenset({"gemm_wgmma", "gemm_persistent"})
"""Sketches whose products read both operands from shared memory, each warpgroup for itself."""
LATENCY_US = 0.7
"""From asking for a step's bytes to the first of them: what the stages in flight have to hide."""
COPY_US = 0.03
"""From a thread's cp.async of 16 bytes to its next: measured of attention, 9 in 0.28 us."""
TURN_US = 0.05
"""A consumer's turn from one stage of the ring to the next, waiting for the products."""
DEEP_TURN_US = 0.03
"""The same where the next stage's products are issued before the last one's are awaited."""
SHARED_TURN_US = 0.05
"""More of it where a cluster shares tiles: a slot waits for the slowest of its blocks."""
CLUSTER_SHARE: Mapping[int, float] = {1: 1.0, 2: 1.0, 3: 0.88, 4: 0.91}
"""Part of the multiprocessors that clusters of so many blocks can fill at a time: one lies within
a GPC, and GPCs differ in size."""
LARGE_CLUSTER_SHARE = 0.81
"""The same of larger clusters: measured of 6 and 8."""
LARGEST_CLUSTERS = 7
"""Clusters of still more blocks that fit at a time, one a GPC: measured of 12 and 16."""
FULL_TILE = 64
"""Side below which a tile's matrix multiply takes as long as if it had this side."""
MMA_EFFICIENCY: Mapping[str, float] = {
    "gemm_skinny": 2.0,
    "gemm_wgmma": 1.15,
    "gemm_mma": 0.55,
    "gemm_persistent": 1.35,
    "attention": 0.24,
    "attention_wgmma": 0.9,
    "attention_projection": 0.45,
}
"""The part of `Target.matmul_tflops` that a sketch's main loop reaches with its data at hand. Of
`gemm_skinny` half, and four times that because `FULL_TILE` is not about operands in registers."""
DRAM_EFFICIENCY: Mapping[str, float] = {"gemm_skinny": 0.75}
"""The part of `Target.dram_gbps` that a sketch's loads reach: those into registers took 4.2 to 10
us where copies of the same 8 to 13 MB took 3.6 to 5.4 (experiments.kernel_table of ViT-L, -H)."""
START_BOUNDARIES = 1.2
"""The fixed chain of release, launch and first bytes, in units of `Target.boundary_us`."""
ALONE_BOUNDARIES = 0.75
"""The same again where the next kernel cannot be resident beside a block."""
SHARED_US = 0.1
"""More where a cluster shares tiles: its blocks wait for each other."""
HANDOVER_US = 0.5
"""More for each tile but the last where consumers take tiles in turn: they share issue slots."""
EPILOGUE_US = 0.3
"""Last step, staging and stores of a block, whatever its tile."""
STORE_PER_US = 33_000
"""Results that a block stages and stores in a microsecond."""
EXCHANGE_US = 0.5
"""The cluster's barriers around an exchange of staged tiles."""
SUMS_US = 0.3
"""The same around an exchange of partial sums, which leave from registers."""
PEER_BYTES_PER_US = 20_000
"""What a block takes from its peers in a microsecond."""
CROWDED_PEER_BYTES_PER_US = 13_000
"""The same in a cluster of more than `PORTABLE_CLUSTER` blocks: measured of 12 and 16."""
TANH_FLOPS = 12
"""FP32 instructions of a GELU, exponential or tanh, as many as of this number of additions."""
BUSY_WARPS = 16
"""Warps on a multiprocessor that reach its fp32 rate."""


def fp32_per_us(threads: int, target: Target) -> float:
    """FP32 instructions that `threads` of one multiprocessor do in a microsecond."""
    return target.fp32_tflops * 1e6 / target.sm_count * min(1.0, threads / 32 / BUSY_WARPS)


def resident_blocks(smem_bytes: int, threads: int, registers: int, target: Target) -> int:
    """Blocks that fit one multiprocessor at a time, at least 1.

    Args:
        smem_bytes: dynamic shared memory of a block.
        threads: of a block.
        registers: of a thread.
        target: whose multiprocessor.
    """
    return max(
        1,
        min(
            target.smem_per_sm // (smem_bytes + 1024),  # a block has 1 KB for the system
            2048 // threads,
            65536 // (threads * max(16, registers)),
            32,
        ),
    )


def most_registers(threads: int) -> int:
    """Of a thread, where `threads` share a multiprocessor: each warp lies in one of four parts."""
    return 65536 // (-(-threads // 128) * 128)


def operand_bytes(sketch: str, block: BlockWork) -> float:
    """What the products of a block read from shared memory; 0 where it is not known."""
    if sketch not in SHARED_OPERANDS:
        return 0.0
    warpgroups = -(-block.tile_p // WGMMA_ROWS)
    share = warpgroups * (WGMMA_ROWS + block.tile_q) / (block.tile_p + block.tile_q)
    return block.fill_bytes * share


def chain_us(
    block: BlockWork,
    blocks: int,
    resident: int,
    tflops: float,
    target: Target,
    *,
    pointwise_us: float = 0.0,
    dram_us: float = 0.0,
    operand_bytes: float = 0.0,
    cluster: int = 1,
) -> float:
    """Microseconds from a kernel's start to the next one's.

    Args:
        block: what one block does.
        blocks: of the grid.
        resident: blocks that fit one multiprocessor at a time.
        tflops: that the main loop reaches with its data at hand, all multiprocessors together.
        target: the architecture.
        pointwise_us: arithmetic of one tile's epilogue.
        dram_us: the weights at the rate of device memory.
        operand_bytes: what one block's products read from shared memory.
        cluster: blocks of a cluster.
    """
    crowded = cluster > PORTABLE_CLUSTER
    share = CLUSTER_SHARE.get(cluster, LARGE_CLUSTER_SHARE)
    fit = LARGEST_CLUSTERS if crowded else int(target.sm_count * share) // cluster
    usable = max(1, fit) * cluster
    per_sm = -(-blocks // usable)
    waves, together = -(-per_sm // resident), min(per_sm, resident)
    busy = min(blocks, together * target.sm_count)
    l2_per_us = target.l2_gbps * 1e3
    waste = FULL_TILE / min(FULL_TILE, block.tile_q)
    waits = block.steps if block.steps > 1 else 0
    fill_us = max(
        together * block.fill_bytes / (FILL * l2_per_us / target.sm_count),
        together * (block.fill_bytes + operand_bytes) / SHARED_BYTES_PER_US,
        block.copies * COPY_US,
    )
    multiply_us = together * block.mma_flops * waste / (tflops * 1e6 / target.sm_count)
    steps, stages = max(1, block.steps), max(1, block.stages - block.depth)
    turn_us = DEEP_TURN_US if block.depth else TURN_US
    round_us = LATENCY_US + turn_us + (fill_us + multiply_us) / steps
    loop_us = max(
        fill_us,
        busy * block.l2_bytes / (TOGETHER * l2_per_us),
        fill_us * min(1.0, stages / steps) + max(0, steps - stages) * round_us / stages,
        multiply_us,
    )
    results = block.tile_p * block.tile_q
    epilogue_us = together * (EPILOGUE_US + results / STORE_PER_US + pointwise_us)
    exchanged = results * 4 * (block.split - 1) / block.split + block.peer_bytes
    epilogue_us += exchanged / (CROWDED_PEER_BYTES_PER_US if crowded else PEER_BYTES_PER_US)
    epilogue_us += SUMS_US * (block.split > 1) + EXCHANGE_US * (block.peer_bytes > 0)
    start_us = (START_BOUNDARIES + ALONE_BOUNDARIES * (resident == 1)) * target.boundary_us
    shares = block.l2_bytes < block.fill_bytes
    start_us += SHARED_US * shares
    turns_us = waits * (turn_us + SHARED_TURN_US * shares)
    tile_us = (loop_us + turns_us) / block.tiles
    rounds, rest = divmod(block.tiles - 1, block.consumers)
    before_us = rounds * max(block.consumers * tile_us, tile_us + epilogue_us) + rest * tile_us
    before_us += HANDOVER_US * (block.tiles - 1) * (block.consumers > 1)
    begun_us = (waves - 1) * LATENCY_US * (resident == 1)  # nothing else is under way
    return start_us + max(dram_us, waves * (before_us + tile_us + epilogue_us) + begun_us)
