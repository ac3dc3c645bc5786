"""Attention and the projection of its merged heads in one kernel: sm_90a, 16-bit types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.emit import PointwiseEmitter, Region
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import BlockWork, Illegal, Schedule, check
from gtco.codegen.sketches.attention import AttentionSketch, chunk_pitch
from gtco.codegen.sketches.gemm import analyse, check_tensor_map, pad_to
from gtco.ir.graph import Group, Node, subgraph
from gtco.ir.spec import HALVES
from gtco.passes.dataflow import trace
from gtco.passes.projection import projected_heads
from gtco.target import Target

ATOM_BYTES = 128
"""Of K: a row of the weights' tiles, as TMA swizzles them."""
MIN_COLUMNS = 32
"""Columns of a warp below which it would read more results than it saves in weights."""


@dataclass(frozen=True)
class _SharedMemory:
    """Where what lies, in bytes (`attention_projection.cuh` says what)."""

    inbox_at: int
    ring_at: int
    shares_at: int
    row_values_at: int
    parts_at: int
    barriers_at: int
    nbytes: int


class AttentionProjection(AttentionSketch):
    """A cluster makes all heads of its queries, a head a block; their results go to every block,
    which then makes its share of the projection's columns from weights that came meanwhile."""

    name: ClassVar[str] = "attention_projection"
    version: ClassVar[int] = 4
    schedule_version: ClassVar[int] = 4

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        check(self.dtype in HALVES, f"its products take no {self.dtype}")
        projections = [node for node in group.nodes if node.definition.is_linear]
        check(bool(projections), "no linear projects the result")
        check(len(projections) == 1, f"{len(projections)} linears, and one projects the result")
        (self.projection,) = projections
        check(target.has_wgmma, f"{target.arch} has no clusters that share their results")
        self.per_item = self._merged_heads()
        rest = [node for node in group.nodes if node is not self.anchor]
        self._rest = Group(group.name, subgraph(group.graph, rest, group.graph.outputs))
        self.problem = problem = analyse(self._rest)
        check(problem.dtype == self.dtype, f"weights of {problem.dtype} for {self.dtype}")
        check_tensor_map("B", problem.b, problem.dtype)
        self.columns = problem.columns // self.per_item
        check(self.columns <= 256, f"{self.columns} columns a block, a box of TMA has 256")
        problem.check_stats(self.columns, "block")
        self.row_fields = len(self._epilogue()[1].row_fields)
        self.check_smem(self._smem(self._schedule(16, 32, 1, 1)).nbytes)

    def _merged_heads(self) -> int:
        """Heads of a batch item, if the projection alone reads the results."""
        graph, (value,) = self.group.graph, self.anchor.values
        heads = projected_heads(graph, self.anchor, self.projection)
        if isinstance(heads, str):
            raise Illegal(heads)
        read = [name for node in self.group.compute for name in node.inputs]
        read.remove(self.projection.inputs[0])
        others = any(trace(graph, name).base == value for name in (*read, *graph.outputs))
        check(not others, f"%{value} is read by others than the projection: it must be stored")
        return heads

    def _epilogue(self) -> tuple[Region, PointwiseEmitter]:
        region = Region(self.group, (self.problem.rows, self.problem.columns))
        nodes: tuple[Node, ...] = self._rest.nodes
        return region, PointwiseEmitter(region, {self.projection.values[0]: "acc"}, nodes)

    def defaults(self) -> Iterable[Schedule]:
        """Those of attention that leave room for the weights, ordered by a small model."""
        return sorted(super().defaults(), key=self._cost)

    def _cost(self, schedule: Schedule) -> float:
        """Microseconds, roughly: the softmax is all the arithmetic besides products."""
        block, target = self._block_work(schedule), self.target
        threads = self._threads(schedule)
        resident = timing.resident_blocks(
            self._smem(schedule).nbytes, threads, block.registers, target
        )
        scores = schedule["block_q"] * self.keys
        softmax_us = timing.TANH_FLOPS * scores / timing.fp32_per_us(threads, target)
        rate = target.matmul_tflops * target.constants.mma_efficiency[self.name]
        blocks = self.heads * -(-self.queries // schedule["block_q"])
        return timing.chain_us(
            block, blocks, resident, rate, target, pointwise_us=softmax_us, cluster=self.per_item
        )

    def _uses_wgmma(self, schedule: Schedule) -> bool:
        """Whether results and weights lie in rows of 128 bytes, as wgmma wants both."""
        fits = self.value_width == 64 and self.columns % 64 == 0
        return fits and self._warps(schedule) >= 4

    @staticmethod
    def _row_tiles(schedule: Schedule) -> int:
        """Tiles of 16 rows of a warp on mma.sync."""
        return 2 if schedule["block_q"] % 32 == 0 else 1

    def _column_warps(self, schedule: Schedule) -> int:
        """Warps that share the columns of a block on mma.sync; the others share K."""
        warps, count = self._row_tiles(schedule) * schedule["warps_k"], 1
        while warps % (2 * count) == 0 and self.columns % (2 * count * MIN_COLUMNS) == 0:
            count *= 2
        return count

    def _registers(self, schedule: Schedule) -> int:
        if self._uses_wgmma(schedule):
            groups = self._warps(schedule) // 4
            accumulators = -(-self.columns // (64 * groups)) * schedule["block_q"] // 2
        else:
            columns = self.columns // self._column_warps(schedule)
            accumulators = self._row_tiles(schedule) * columns // 2
        return max(super()._registers(schedule), accumulators + 56)

    def _part_bytes(self, schedule: Schedule) -> int:
        """Of the parts of a block's share of the results, each of a part of K."""
        parts, pad = 1, 4
        if not self._uses_wgmma(schedule):
            shared = self._row_tiles(schedule) * schedule["warps_k"]
            parts, pad = shared // self._column_warps(schedule), 8
        return parts * schedule["block_q"] * (self.columns + pad) * 4

    def _smem(self, schedule: Schedule) -> _SharedMemory:
        block_q, warps_k = schedule["block_q"], schedule["warps_k"]
        atoms = -(-self.problem.k * self.dtype.itemsize // ATOM_BYTES)
        inbox_at = atoms * self.columns * ATOM_BYTES
        result = block_q * chunk_pitch(2 * -(-self.value_width // 16)) * 16
        inbox = (self.per_item - 1) * result
        ring_at = inbox_at + inbox
        part_bytes = self._part_bytes(schedule)
        parts_at = inbox_at if part_bytes <= inbox else ring_at + result
        shares_at = max(
            ring_at + max(self._ring_bytes(schedule), self._staged_bytes(warps_k, block_q)),
            parts_at + part_bytes,
        )
        row_values_at = shares_at + 2 * warps_k * block_q * 4
        barriers_at = pad_to(row_values_at + block_q * 4 * self.row_fields, 16)
        return _SharedMemory(
            inbox_at, ring_at, shares_at, row_values_at, parts_at, barriers_at, barriers_at + 16
        )

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        block_q, columns, k = schedule["block_q"], self.columns, self.problem.k
        loop = self._loop_work(schedule)
        weights = columns * k * self.dtype.itemsize
        return replace(
            loop,
            fill_bytes=loop.fill_bytes + weights,
            l2_bytes=loop.l2_bytes + weights,
            mma_flops=loop.mma_flops + 2 * block_q * columns * k,
            tile_q=columns,
            peer_bytes=(self.per_item - 1) * block_q * self.value_width * self.dtype.itemsize,
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads = self._threads(schedule)
        smem = self._smem(schedule)
        self.check_smem(smem.nbytes)
        problem = self.problem
        region, emitter = self._epilogue()
        structs, arguments = self._operand_texts(region)
        functor = emitter.functor("Epilogue", "acc")
        names = ", ".join(region.parameters)
        source = f"""#include "attention_projection.cuh"
using namespace gtco;

struct Config {{
{self._config(schedule)}
  static constexpr int HEADS = {self.per_item}, COLUMNS = {problem.columns};
  static constexpr bool WGMMA = {str(self._uses_wgmma(schedule)).lower()};
  static constexpr int COLUMN_WARPS = {self._column_warps(schedule)};
  static constexpr bool W_CONSTANT = {str(problem.b.constant).lower()};
  static constexpr int INBOX_AT = {smem.inbox_at}, RING_AT = {smem.ring_at};
  static constexpr int SHARES_AT = {smem.shares_at}, ROW_VALUES_AT = {smem.row_values_at};
  static constexpr int PARTS_AT = {smem.parts_at}, BARRIERS_AT = {smem.barriers_at};
}};

{structs}
{functor}
extern "C" __global__ void __launch_bounds__({threads})
ENTRY_POINT(const __grid_constant__ ptx::TensorMap weights, {region.declarations}) {{
  attention_projection<Config>({arguments}, weights, Epilogue{{{names}}});
}}
"""
        return self.program(
            schedule,
            source,
            (self.per_item, -(-self.queries // schedule["block_q"]), self.heads // self.per_item),
            threads,
            smem.nbytes,
            (
                problem.tensor_map(problem.b, problem.columns, self.columns),
                *(argument for _, argument in region.parameters.values()),
            ),
            (self.per_item, 1, 1),
        )
