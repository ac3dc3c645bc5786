"""Draft prices before anything is measured: of a group, and of one program.

A group's price is a roofline with the shape of real kernels:

    price = fixed + max(device memory, L2 to shared memory, arithmetic) + one boundary if library

`fixed` is the chain that every kernel pays from start to start: release of the launch, first
bytes, epilogue (DESIGN section 8: about 1.9 us on an H100). Weights come from device memory;
activations were just written, so they come from L2. A contraction is priced at its best tile: its
blocks run in waves over the multiprocessors, and a wave takes as long as one block's fill or its
matrix multiplies. Every term grows with the work, so a larger group is never predicted faster.
Attention with its projection, linears back to back, the gates of squeeze-and-excitation and topk
have no such tile: each is priced as the program that it would run, and so are copies, whose time is
how their elements lie.
"""

from __future__ import annotations

import functools
import math

from gtco.codegen import timing
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal
from gtco.cost_model.work import (
    Work,
    fp32_instructions,
    gathered_bytes,
    halved_nodes,
    node_flops,
    read_bytes,
    weight_bytes,
    work_of,
)
from gtco.ir.graph import Graph, Group, Node
from gtco.passes.dataflow import Flow, make_group
from gtco.passes.joined import joined_by
from gtco.passes.legality import family
from gtco.passes.scaled import scale_of
from gtco.target import Target

TILES = tuple((tall, wide) for tall in (64, 128, 192, 256) for wide in range(16, 257, 8))
"""Sides of a block's tile; either may be the rows."""
SPLITS = (1, 2, 4, 8)
"""Blocks that share the K loop of one tile."""

PROGRAMMED = ("squeeze", "back_to_back", "topk")
"""Families whose blocks have no tile of a contraction."""
NEVER_US = 1e6
"""Of a group that no plan is to have: more than any other, and a number that adds up."""


def roofline_us(group: Group, target: Target) -> float:
    """Predicted microseconds of `group` from its start to the next kernel's."""
    families = {node.definition.family for node in group.compute}
    kind = family(group)
    if not {"attention", "gemm"} & families and any(
        node.definition.never_alone for node in group.compute
    ):
        return NEVER_US
    prepared = any(
        scale_of(group.graph, node) is not None or joined_by(group.graph, node) is not None
        for node in group.compute
    )
    turned = kind in ("elementwise", "rowwise", "stencil") and any(
        node.definition.lays_out for node in group.compute
    )
    if {"attention", "gemm"} <= families or kind in PROGRAMMED or prepared or turned:
        of_program_us = programmed_us(group, target)
        if of_program_us is not None:
            return of_program_us
    boxed = len(group.compute) > 1 and any("box" in node.attrs for node in group.compute)
    if boxed and not derive(group, kind, target).sketches:
        return _apart_us(Flow(group.graph), target)
    graph = group.graph
    weights = weight_bytes(graph)
    moved = weights + read_bytes(graph) + sum(graph.specs[name].nbytes for name in graph.outputs)
    beyond = _beyond_l2(moved, target)
    memory_us = _per_us(beyond, target.dram_gbps) + _per_us(moved - beyond, target.l2_gbps)
    gathered_us = _per_us(gathered_bytes(graph), target.l2_gbps)
    times = [_per_us(weights, target.dram_gbps), gathered_us, memory_us]
    arithmetic_us, halved = 0.0, halved_nodes(graph)
    for node in group.compute:
        if node.definition.family == "gemm":
            arithmetic_us += _gemm_us(graph, node, target)
        elif node.definition.family == "attention":
            arithmetic_us += _attention_us(graph, node, target)
        else:
            arithmetic_us += fp32_instructions(graph, node, halved) / (target.fp32_tflops * 1e6)
    fixed_us = target.constants.fixed_boundaries * target.boundary_us
    if kind in ("library", *PROGRAMMED):
        fixed_us += target.boundary_us
    return fixed_us + max(*times, arithmetic_us)


def _per_us(nbytes: float, gbps: float) -> float:
    return nbytes / (gbps * 1e3)


def _beyond_l2(nbytes: int, target: Target) -> float:
    """Of so many bytes that a kernel reads and writes, those that no L2 keeps for the next."""
    return max(0.0, nbytes - target.kept_bytes)


def _gemm_us(graph: Graph, node: Node, target: Target) -> float:
    """Fill or multiply time of the contraction at the best tile and split."""
    operand = graph.specs[node.inputs[0]]
    out = node.outputs[0]
    if not out.numel:
        return 0.0
    depth = node_flops(graph, node) // (2 * out.numel)
    batch = node.attrs.get("groups", 1)
    columns = out.sizes[-1] // batch if out.rank else 1
    rows = out.numel // (batch * columns)
    if not node.definition.convolves and graph.specs[node.inputs[1]].rank > 2:
        batch, rows = rows // out.sizes[-2], out.sizes[-2]
    rate = target.products_tflops(operand.dtype, node.attrs.get("products"))
    return _best_tile_us(batch, rows, columns, depth, operand.dtype.itemsize, rate, target)


@functools.lru_cache(maxsize=4096)
def _best_tile_us(
    batch: int, rows: int, columns: int, depth: int, itemsize: int, tflops: float, target: Target
) -> float:
    rate = tflops * target.constants.matmul_efficiency
    return min(
        _waves_us(
            batch * -(-rows // tall) * -(-columns // wide) * split,
            2.0 * tall * wide * -(-depth // split),
            (tall + wide) * -(-depth // split) * itemsize + (split > 1) * tall * wide * 4,
            rate,
            target,
        )
        for tile in TILES
        for tall, wide in (tile, tile[::-1])
        for split in SPLITS
    )


def _attention_us(graph: Graph, node: Node, target: Target) -> float:
    """A block has 64 queries of one head and reads all keys and values of it."""
    q, k, v = (graph.specs[name] for name in node.inputs[:3])
    queries, keys = q.sizes[-2], k.sizes[-2]
    width = q.sizes[-1] + v.sizes[-1]
    heads = math.prod(q.sizes[:-2])
    blocks = heads * -(-queries // 64)
    flops = 2.0 * 64 * keys * width + timing.TANH_FLOPS * 64 * keys
    rate = target.products_tflops(q.dtype, node.attrs.get("products"))
    rate *= target.constants.matmul_efficiency
    return _waves_us(blocks, flops, (keys + 64) * width * q.dtype.itemsize, rate, target)


def programmed_us(group: Group, target: Target) -> float | None:
    """The program that runs by default; without any the nodes in ATen, or None of a lone one."""
    times = []
    for sketch in derive(group, family(group), target).sketches:
        for schedule in sketch.defaults():
            try:
                program = sketch.emit(schedule)
            except Illegal:
                continue
            times.append(draft_us(work_of(Candidate(sketch, program)), target))
            break
    if times:
        return min(times)
    flow = Flow(group.graph)
    return None if len(flow.compute) == 1 else _apart_us(flow, target)


def _apart_us(flow: Flow, target: Target) -> float:
    """Each node of a group in a kernel of its own, since none holds them all."""
    return sum(
        roofline_us(make_group(flow, [node]), target) + target.boundary_us for node in flow.compute
    )


def _waves_us(blocks: int, flops: float, nbytes: float, tflops: float, target: Target) -> float:
    """`blocks` blocks of `flops` and `nbytes` each, one on a multiprocessor at a time."""
    waves = -(-blocks // target.sm_count)
    share = target.sm_count
    compute_us = flops * share / (tflops * 1e6)
    return waves * max(compute_us, _per_us(nbytes * share, target.l2_gbps))


def draft_us(work: Work, target: Target) -> float:
    """Predicted microseconds of one program from its start to the next kernel's.

    It orders programs of one task (`gtco.codegen.timing` has the formula); `roofline_us` prices
    what has no program yet. Of the time that device memory takes, the rest hides a part, and the
    less the more there is (experiments/notes/25-epilogue_copies.md).
    """
    resident = resident_blocks(work, target)
    together = min(-(-work.blocks // target.sm_count), resident)
    rate = work.group.peak_tflops(target)
    beside = timing.WARPGROUP * (work.block.consumers - 1) + work.block.copy_threads
    threads = work.threads - beside  # of an epilogue
    fp32_per_us = timing.fp32_per_us(together * threads, target)
    tiles = work.blocks * work.block.tiles
    dram_gbps = target.dram_gbps * target.constants.dram_efficiency.get(work.sketch, 1.0)
    chain_us = timing.chain_us(
        work.block,
        work.blocks,
        resident,
        rate * timing.mma_efficiency(work.sketch, target, exact=work.group.exact),
        target,
        pointwise_us=(
            work.group.pointwise_flops / tiles
            + timing.FLOPS_OF_INSTRUCTION * work.block.instructions
        )
        / fp32_per_us,
        dram_us=_per_us(work.group.weight_bytes, dram_gbps),
        operand_bytes=timing.operand_bytes(work.sketch, work.block),
        cluster=work.cluster,
    )
    beyond = _beyond_l2(work.group.read_bytes + work.group.written_bytes, target)
    return math.hypot(chain_us, _per_us(beyond, target.dram_gbps))


def resident_blocks(work: Work, target: Target) -> int:
    """Blocks of the program that fit one multiprocessor at a time, at least 1."""
    return timing.resident_blocks(work.smem_bytes, work.threads, work.block.registers, target)
