"""How long a kernel takes in a chain, from what one block of it does: a formula, nothing measured.

    start + max(weights from device memory, waves * (loop + epilogue))
    loop     = max(fill, L2, latency in flight, matrix multiply) + turns of the ring

Sketches order their default schedules by it, and the draft cost model is the same formula
(`gtco.cost_model.model`). The constants are an H100's (experiments.fill_rate and
experiments/notes/01-gemm_wgmma.md); rates and boundary scale them to other targets.
"""

from __future__ import annotations

from collections.abc import Mapping

from gtco.codegen.sketch import BlockWork
from gtco.target import Target

FILL = 2.57
"""What one multiprocessor draws from L2 (107 B/ns), in even shares of `Target.l2_gbps`."""
TOGETHER = 2.1
"""What all draw together (11.5 TB/s), in units of `Target.l2_gbps`."""
LATENCY_US = 0.7
"""From asking for a step's bytes to their use: what the stages in flight have to hide."""
TURN_US = 0.07
"""A consumer's turn from one stage of the ring to the next."""
TURNS_US: Mapping[str, float] = {"gemm_persistent": 0.0}
"""The same by sketch: where the next stage's products follow without a wait, a turn is free."""
FULL_TILE = 64
"""Side below which a tile's matrix multiply takes as long as if it had this side."""
MMA_EFFICIENCY: Mapping[str, float] = {
    "gemm_wgmma": 1.15,
    "gemm_mma": 0.55,
    "gemm_persistent": 1.15,
    "attention": 0.45,
}
"""The part of `Target.matmul_tflops` that a sketch's main loop reaches with its data at hand."""
START_BOUNDARIES = 1.2
"""The fixed chain of release, launch and first bytes, in units of `Target.boundary_us`."""
ALONE_BOUNDARIES = 0.75
"""The same again where the next kernel cannot be resident beside a block."""
SHARED_US = 0.1
"""More where a cluster shares tiles: its blocks wait for each other."""
EPILOGUE_US = 0.3
"""Last step, staging and stores of a block, whatever its tile."""
STORE_PER_US = 33_000
"""Results that a block stages and stores in a microsecond."""
SPLIT_US = 0.5
"""The cluster's barriers around an exchange of partial sums."""
PEER_BYTES_PER_US = 20_000
"""What a block reads of its peers' partial sums in a microsecond."""


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


def epilogue_us(block: BlockWork) -> float:
    """From the last product of one tile to its stores, but for the arithmetic."""
    return EPILOGUE_US + block.tile_p * block.tile_q / STORE_PER_US


def chain_us(
    block: BlockWork,
    blocks: int,
    resident: int,
    tflops: float,
    target: Target,
    *,
    pointwise_us: float = 0.0,
    dram_us: float = 0.0,
    turn_us: float = TURN_US,
) -> float:
    """Microseconds from a kernel's start to the next one's.

    Args:
        block: what one block does.
        blocks: of the grid.
        resident: blocks that fit one multiprocessor at a time.
        tflops: that the main loop reaches with its data at hand, all multiprocessors together.
        target: the architecture.
        pointwise_us: arithmetic of one block's epilogue.
        dram_us: the weights at the rate of device memory.
        turn_us: of a consumer.
    """
    per_sm = -(-blocks // target.sm_count)
    waves, together = -(-per_sm // resident), min(per_sm, resident)
    busy = min(blocks, together * target.sm_count)
    l2_per_us = target.l2_gbps * 1e3
    waste = FULL_TILE / min(FULL_TILE, block.tile_q)
    waits = block.steps if block.steps > 1 else 0
    loop_us = max(
        together * block.fill_bytes / (FILL * l2_per_us / target.sm_count),
        busy * block.l2_bytes / (TOGETHER * l2_per_us),
        waits * LATENCY_US / max(1, block.stages - 1),
        together * block.mma_flops * waste / (tflops * 1e6 / target.sm_count),
    )
    finish_us = together * (epilogue_us(block) + pointwise_us)
    if block.split > 1:
        exchanged = block.tile_p * block.tile_q * 4 * (block.split - 1) / block.split
        finish_us += SPLIT_US + exchanged / PEER_BYTES_PER_US
    start_us = (START_BOUNDARIES + ALONE_BOUNDARIES * (resident == 1)) * target.boundary_us
    start_us += SHARED_US * (block.l2_bytes < block.fill_bytes)
    return start_us + max(dram_us, waves * (loop_us + waits * turn_us + finish_us))
