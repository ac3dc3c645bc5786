"""How long a kernel takes in a chain, from what one block of it does: a formula, nothing measured.

    start + max(weights from device memory, waves * (tiles before + loop + epilogue) + begun)
    waves    = turns that a multiprocessor takes for its blocks: whole ones, where one fits it at a
               time, else blocks of the next turn begin as others end
    begun    = waves but the first * (latency + a block's start), where one block fits a
               multiprocessor at a time
    loop     = max(fill, L2, reads of B, refills of the ring, matrix multiply) + turns of the ring,
               of one tile;
               where threads copy a step whole ahead of its products, at least the first step's
               fill (of one stage, all) + matrix multiply, and the latency of each step besides;
               of one stage, blocks of later turns hide the shorter of copies and the rest
    fill     = max(what L2 gives, what shared memory takes and gives, requests of loads)
    refills  = first fill + steps after it * (latency + fill + multiply + turn of a step) / stages
    before   = rounds of the consumers * max(all their loops, a loop and its epilogue)

Sketches order their default schedules by it, and the draft cost model is the same formula
(`gtco.cost_model.model`). What was measured stands in the target's `gtco.constants` (of an H100:
experiments.studies.fill_rate and experiments/notes/01-gemm_wgmma.md, 04-draft_model.md).
"""

from __future__ import annotations

import math

from gtco.codegen.sketch import BlockWork
from gtco.target import PORTABLE_CLUSTER, Target

WARPGROUP = 128
"""Threads of one."""
WGMMA_ROWS = 64
"""Rows of P that one warpgroup's product reads, beside all of Q."""
SHARED_OPERANDS = frozenset({"gemm_wgmma", "gemm_persistent"})
"""Sketches whose products read both operands from shared memory, each warpgroup for itself."""
FULL_TILE = 64
"""Side below which a tile's matrix multiply takes as long as if it had this side."""
TANH_FLOPS = 12
"""FP32 instructions of a GELU, exponential or tanh, as many as of this number of additions."""
MULTIPLYING_WARPS = 9
"""Warps of `mma.sync` that keep a multiprocessor's tensor cores busy: one by itself issued a
product every 15 clocks (experiments/notes/24-breadth.md)."""
FLOPS_OF_INSTRUCTION = 2
"""What a thread could have done in the time of any one instruction: a product and its addition."""
BUSY_WARPS = 16
"""Warps on a multiprocessor that reach its fp32 rate."""
LINE = 128
"""Bytes that one request of a warp's load brings at most."""
THREADS_OF_SM = 2048
"""That run on a multiprocessor at a time, at most."""


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
            THREADS_OF_SM // threads,
            65536 // (threads * max(16, registers)),
            32,
        ),
    )


def multiprocessors_for(cluster: int, target: Target) -> int:
    """Multiprocessors that clusters of so many blocks can have at a time."""
    c = target.constants
    if cluster > PORTABLE_CLUSTER:
        return c.largest_clusters * cluster
    share = c.cluster_share.get(cluster, c.large_cluster_share)
    return max(1, int(target.sm_count * share) // cluster) * cluster


def in_waves(blocks: int, resident: int, target: Target) -> bool:
    """Whether some of so many blocks begin where others have ended, whose results nothing hides."""
    return blocks > resident * target.sm_count


def most_registers(threads: int) -> int:
    """Of a thread, where `threads` share a multiprocessor: each warp lies in one of four parts."""
    return 65536 // (-(-threads // 128) * 128)


def requests(pieces: int, nbytes: int, grain: int = LINE) -> float:
    """What a load asks for: lines that `pieces` of so many bytes touch, which start at multiples of
    `grain` bytes."""
    grain = math.gcd(grain, nbytes, LINE)
    return pieces * (1 + (nbytes - grain) / LINE)


def operand_bytes(sketch: str, block: BlockWork) -> float:
    """What the products of a block read from shared memory; 0 where it is not known."""
    if sketch not in SHARED_OPERANDS:
        return block.operand_bytes
    warpgroups = -(-block.tile_p // WGMMA_ROWS)
    share = warpgroups * (WGMMA_ROWS + block.tile_q) / (block.tile_p + block.tile_q)
    return block.fill_bytes * share


def mma_efficiency(sketch: str, target: Target, *, exact: bool) -> float:
    """The part of the dense rate that a sketch's main loop reaches with its data at hand, of fp32
    as three products of tf32 where `exact`."""
    c = target.constants
    share = c.exact_share.get(sketch, 1.0) if exact else 1.0
    return share * c.mma_efficiency.get(sketch, 1.0)


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
    c = target.constants
    crowded = cluster > PORTABLE_CLUSTER
    usable = multiprocessors_for(cluster, target)
    per_sm = -(-blocks // usable)
    together = min(per_sm, resident)
    waves = per_sm / together if resident > 1 else per_sm
    busy = min(blocks, together * target.sm_count)
    l2_per_us = target.l2_gbps * 1e3
    waste = FULL_TILE / min(FULL_TILE, block.tile_q)
    waits = block.steps if block.steps > 1 else 0
    fill_us = max(
        together * block.fill_bytes / (c.fill * l2_per_us / target.sm_count),
        together * (block.fill_bytes + operand_bytes) / c.shared_bytes_per_us,
        block.copies * c.copy_us,
        together * block.requests * c.request_us,
    )
    multiply_us = together * block.mma_flops * waste / (tflops * 1e6 / target.sm_count)
    if block.warps:
        multiply_us /= min(1.0, together * block.warps / MULTIPLYING_WARPS)
    steps, stages = max(1, block.steps), max(1, block.stages)
    turn_us = c.deep_turn_us if block.depth else c.turn_us
    round_us = c.latency_us + turn_us + (fill_us + multiply_us) / steps
    loop_us = max(
        fill_us,
        busy * block.l2_bytes / (c.together * l2_per_us),
        busy * block.tiles * c.hot_us / block.parts_of_b if block.parts_of_b else 0.0,
        fill_us * min(1.0, stages / steps) + max(0, steps - stages) * round_us / stages,
        multiply_us,
    )
    if block.in_turns:  # a step begins when all of it is there and the products before are done
        first_us = fill_us if block.stages == 1 else fill_us / steps
        loop_us = max(loop_us, first_us + multiply_us)
        loop_us += steps * c.latency_us / (1 if block.mma_flops else waves)
    results = block.tile_p * block.tile_q
    block_us = c.epilogue_us if block.mma_flops else c.direct_epilogue_us
    epilogue_us = together * (block_us + results / c.store_per_us + pointwise_us)
    epilogue_us += block.meetings * c.turn_us + block.awaited * c.awaited_us
    epilogue_us += block.window_steps * c.window_us + block.cut_atoms * c.cut_us
    if block.writers:
        result_us = c.result_us + block.image * c.image_us + block.narrow * c.narrow_us
        epilogue_us += results / block.writers * result_us
    exchanged = results * 4 * (block.split - 1) / block.split + block.peer_bytes
    peer_bytes_per_us = c.crowded_peer_bytes_per_us if crowded else c.peer_bytes_per_us
    epilogue_us += together * exchanged / peer_bytes_per_us
    epilogue_us += c.sums_us * (block.split > 1) + c.exchange_us * (block.peer_bytes > 0)
    start_us = (c.start_boundaries + c.alone_boundaries * (resident == 1)) * target.boundary_us
    shares = block.l2_bytes < block.fill_bytes
    start_us += c.shared_us * shares
    start_us += together * block.kept_bytes / c.kept_bytes_per_us
    turns_us = waits * (turn_us + c.shared_turn_us * shares + c.scale_us * block.scales)
    tile_us = (loop_us + turns_us) / block.tiles
    rounds, rest = divmod(block.tiles - 1, block.consumers)
    before_us = rounds * max(block.consumers * tile_us, tile_us + epilogue_us) + rest * tile_us
    before_us += c.handover_us * (block.tiles - 1) * (block.consumers > 1)
    begun_us = (waves - 1) * (c.latency_us + c.wave_us) * (resident == 1)  # nothing else runs
    if block.in_turns and not block.mma_flops:
        epilogue_us -= min(fill_us, epilogue_us) * (1 - 1 / together) * (1 - together / per_sm)
    return start_us + max(dram_us, waves * (before_us + tile_us + epilogue_us) + begun_us)
