"""What was measured on one card: the numbers of the draft model's formulas, one table a card.

`experiments.refit_constants` fits a table to records and prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Constants:
    """The numbers of `gtco.codegen.timing`, `gtco.cost_model.model` and `gtco.cost_model.plans`.

    Args:
        version: moves whenever a number does.
        card: where they were measured.
        fill: what one multiprocessor draws from L2, in even shares of `Target.l2_gbps`.
        together: what all draw together, in units of `Target.l2_gbps`.
        shared_bytes_per_us: what a multiprocessor's shared memory takes and gives together in a
            microsecond, about 128 bytes a clock. It fits what was measured, and not why: it stands
            for tiles that few blocks read, which L2 gives at half the rate of those that all read
            (experiments/notes/14-shared_reads.md).
        latency_us: from asking for a step's bytes to the first of them: what the stages in flight
            have to hide.
        wave_us: more of it where a block begins on a multiprocessor that another has just left.
        copy_us: from a thread's cp.async of 16 bytes to its next.
        request_us: from a multiprocessor's request for a line, or for a part of it, to its next,
            where loads of its warps bring registers what lies in many places.
        turn_us: a consumer's turn from one stage of the ring to the next, waiting for the products;
            threads that meet at a barrier and go on take as long.
        deep_turn_us: the same where the next stage's products are issued before the last one's are
            awaited.
        scale_us: more of it where an operand is scaled ahead of the products.
        shared_turn_us: more of it where a cluster shares tiles: a slot waits for the slowest of
            its blocks.
        cluster_share: part of the multiprocessors that clusters of so many blocks can fill at a
            time: one lies within a GPC, and GPCs differ in size.
        large_cluster_share: the same of larger clusters.
        largest_clusters: clusters of more than `PORTABLE_CLUSTER` blocks that fit at a time.
        mma_efficiency: the part of `Target.matmul_tflops` that a sketch's main loop reaches with
            its data at hand; of `gemm_skinny` four times that, because `timing.FULL_TILE` is not
            about operands in registers.
        exact_share: what of it is left where products of fp32 are three of tf32, whose operands
            are split in registers, if not all.
        dram_efficiency: the part of `Target.dram_gbps` that a sketch's loads reach, if not all.
        start_boundaries: the fixed chain of release, launch and first bytes, in units of
            `Target.boundary_us`.
        alone_boundaries: the same again where the next kernel cannot be resident beside a block.
        shared_us: more where a cluster shares tiles: its blocks wait for each other.
        handover_us: more for each tile but the last where consumers take tiles in turn: they share
            issue slots.
        epilogue_us: last step, staging and stores of a block, whatever its tile.
        direct_epilogue_us: the same of a block that multiplies nothing: its threads store what
            they have in registers.
        store_per_us: results that a block stages and stores in a microsecond.
        result_us: more for each result that a thread finishes after its others, where
            `BlockWork.writers` says how many share them.
        image_us: more for each of these that waits for a value of an image (`BlockWork.image`).
        narrow_us: more for each of these and each further part of a store (`BlockWork.narrow`).
        hot_us: of each read of a matrix B however small: all blocks want it of the same few parts
            of L2 (`BlockWork.parts_of_b`).
        awaited_us: of each load that the one before is waited for first (`BlockWork.awaited`).
        window_us: of each step of `BlockWork.window_steps`.
        cut_us: of each of `BlockWork.cut_atoms`.
        kept_bytes_per_us: of `BlockWork.kept_bytes`, which threads copy to one multiprocessor.
        exchange_us: the cluster's barriers around an exchange of staged tiles.
        sums_us: the same around an exchange of partial sums, which leave from registers.
        peer_bytes_per_us: what a block takes from its peers in a microsecond.
        crowded_peer_bytes_per_us: the same in a cluster of more than `PORTABLE_CLUSTER` blocks.
        fixed_boundaries: of a roofline, the fixed chain of a kernel in units of
            `Target.boundary_us`.
        matmul_efficiency: of a roofline, the part of the peak matrix rate that a block's main loop
            reaches.
        slow_weights: of the time of all launches: reading the weights takes at least that long
            where fetching them ahead pays.
        l2_share: of L2, which may keep a line twice: the weights of the launches under way must
            fit in it.
    """

    version: int
    card: str
    fill: float
    together: float
    shared_bytes_per_us: float
    latency_us: float
    wave_us: float
    copy_us: float
    request_us: float
    turn_us: float
    deep_turn_us: float
    scale_us: float
    shared_turn_us: float
    cluster_share: Mapping[int, float]
    large_cluster_share: float
    largest_clusters: int
    mma_efficiency: Mapping[str, float]
    exact_share: Mapping[str, float]
    dram_efficiency: Mapping[str, float]
    start_boundaries: float
    alone_boundaries: float
    shared_us: float
    handover_us: float
    epilogue_us: float
    direct_epilogue_us: float
    store_per_us: float
    result_us: float
    image_us: float
    narrow_us: float
    hot_us: float
    awaited_us: float
    window_us: float
    cut_us: float
    kept_bytes_per_us: float
    exchange_us: float
    sums_us: float
    peer_bytes_per_us: float
    crowded_peer_bytes_per_us: float
    fixed_boundaries: float
    matmul_efficiency: float
    slow_weights: float
    l2_share: float


H100 = Constants(
    version=10,
    card="NVIDIA H100 80GB HBM3",
    fill=2.57,  # 107 B/ns
    together=2.1,  # 11.5 TB/s
    shared_bytes_per_us=225_000,
    latency_us=0.7,
    wave_us=0.3,  # of gemm_wgmma: two waves are 12% longer than drafts say, beside others' errors
    copy_us=0.03,  # of attention: 9 in 0.28 us
    # 2 bytes of a pixel each: 298, 74 and 18.6 us of 254k, 64k and 16k; 22.5 and 6.9 of 21k and 5k.
    request_us=0.0011,
    turn_us=0.05,
    deep_turn_us=0.03,
    scale_us=0.16,  # of gemm_mma: 0.15 to 0.18 in the GEMMs of ConvNeXt V2 and EfficientNet
    shared_turn_us=0.05,
    cluster_share={1: 1.0, 2: 1.0, 3: 0.88, 4: 0.91},
    large_cluster_share=0.81,  # of 6 and 8
    largest_clusters=7,  # one a GPC, of 12 and 16
    mma_efficiency={
        "gemm_skinny": 2.0,
        "gemm_wgmma": 1.25,
        "gemm_mma": 0.55,
        "conv_mma": 0.6,
        "conv_wgmma": 0.9,
        "gemm_persistent": 1.35,
        "gemm_back_to_back": 1.0,
        "attention": 0.24,
        "attention_wgmma": 0.9,
        "attention_projection": 0.45,
    },
    # experiments/notes/47-fp32.md: 27 programs of gemm_mma, one of conv_mma.
    exact_share={"gemm_mma": 0.55, "conv_mma": 0.55},
    # Loads into registers took 4.2 to 10 us where copies of the same 8 to 13 MB took 3.6 to 5.4.
    dram_efficiency={"gemm_skinny": 0.75},
    start_boundaries=1.2,
    alone_boundaries=0.75,
    shared_us=0.1,
    handover_us=0.5,
    epilogue_us=0.3,
    # 2048 blocks of elementwise took 2.9 to 3.2 us (13.0 were drafted with 0.3), 4608 of resize
    # 7.7 (21.2), 784 of rowwise 1.7 (3.3). The error over 383 records of such kernels falls from
    # 0.55 to 0.33, and is about the same from 0.02 to 0.07.
    direct_epilogue_us=0.05,
    store_per_us=33_000,
    result_us=0.008,
    image_us=0.01,
    # experiments/notes/27-thin_products.md, all three.
    narrow_us=0.01,
    hot_us=0.012,
    awaited_us=0.19,
    # experiments/notes/30-after-images.md, all three.
    window_us=0.28,
    cut_us=0.11,
    kept_bytes_per_us=16_000,
    exchange_us=0.5,
    sums_us=0.3,
    peer_bytes_per_us=20_000,
    crowded_peer_bytes_per_us=13_000,  # of 12 and 16
    fixed_boundaries=1.7,
    matmul_efficiency=0.6,
    slow_weights=0.15,
    l2_share=0.4,
)
"""Of a card whose rates were measured too; rates and boundary scale them to other targets."""

TABLES: Mapping[str, Constants] = {table.card: table for table in (H100,)}
"""By the name of the card; one that has none plans with those of its architecture's `Target`."""
