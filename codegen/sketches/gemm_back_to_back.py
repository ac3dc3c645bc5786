"""Two linears back to back in one kernel, on `wgmma`: many rows, few columns; 16-bit types."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.emit import Operand, PointwiseEmitter, Region, declared
from gtco.codegen.program import KernelProgram, Pointer, TensorMapArgument
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import (
    GemmProblem,
    analyse,
    check_tensor_map,
    pad_to,
)
from gtco.codegen.sketches.row_orders import by_width
from gtco.ir.graph import Group, Node, subgraph
from gtco.ir.references import STATS_CHUNK
from gtco.ir.spec import HALVES
from gtco.passes.back_to_back import BackToBacks
from gtco.passes.dataflow import Flow, trace
from gtco.target import Target

WARPGROUPS = 2
"""Each with 64 rows of a tile."""
BLOCK_M = 64 * WARPGROUPS
PART = 64
"""Columns of the first result that are made and multiplied at a time; a side of a square."""
SQUARE_BYTES = PART * PART * 2
THREADS = 128 * (WARPGROUPS + 1)
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Columns of the second result, as wgmma multiplies registers and an epilogue takes them."""
STAGES = (2, 3, 4)
"""Of the ring of weights."""


@dataclass(frozen=True)
class _SharedMemory:
    """How many tiles of A and squares of a warpgroup there are, and where what lies, in bytes."""

    a_tiles: int
    squares: int
    ring_at: int
    squares_at: int
    row_values_at: int
    barriers_at: int
    nbytes: int


class GemmBackToBack(Sketch):
    """A block a multiprocessor walks over tiles of 128 rows; a part of the first result's columns
    at a time becomes the second product's operand in registers. Weights of both come in a ring."""

    name: ClassVar[str] = "gemm_back_to_back"
    family: ClassVar[str] = "back_to_back"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1
    ring: ClassVar[frozenset[str]] = frozenset({"stages"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        check(target.has_wgmma, f"{target.arch} has no wgmma")
        pairs = BackToBacks(Flow(group.graph))
        found = [pair for node in group.compute if (pair := pairs.of(node))]
        check(len(found) == 1, f"{len(found)} pairs of linears, of one")
        (self.pair,) = found
        parts = pairs.parts(group.compute)
        if isinstance(parts, str):
            raise Illegal(parts)
        (ahead, _), (behind, _) = parts
        self._outputs = {
            between: tuple(
                name
                for name in group.graph.outputs
                if (trace(group.graph, name).base == self.pair.middle) == between
            )
            for between in (True, False)
        }
        views = [node for node in group.nodes if node.definition.is_view]
        self.first = self._problem([*views, *ahead], ())
        check(
            self.first.columns % 8 == 0, f"{self.first.columns} columns between, no multiple of 8"
        )
        self.second = self._problem([*views, *behind], self._outputs[False])
        check_tensor_map("A", self.first.plain_a, self.first.dtype)
        check(self.first.plain_a.k_major, "A lies in rows of K")
        stats = self.second.row_stats
        check(stats <= 1, f"{stats} values with row statistics, of one at most")
        step = STATS_CHUNK if stats else 1
        widths = [n for n in WIDTHS if n >= self.second.columns and n % step == 0]
        check(bool(widths), f"{self.second.columns} columns, whose sums two warpgroups keep")
        self.block_n = widths[0]
        self.tiles = -(-self.first.rows // BLOCK_M)
        check(
            2 * self.tiles >= target.sm_count,
            f"{self.tiles} tiles of {BLOCK_M} rows leave half of {target.sm_count} "
            "multiprocessors idle",
        )
        _, emitters = self._epilogues()
        self.row_fields = len(emitters["First"].row_fields)
        check(not emitters["Second"].row_fields, "the second epilogue reads values of each row")
        vectors = {name: emitter.region.vector for name, emitter in emitters.items()}
        check(vectors["First"] == 2, "the first epilogue takes columns one by one")
        check(vectors.get("Store", 8) == 8, "the value between is stored in no runs of 16 bytes")
        self.width = self.second.width(vectors["Second"])
        self.image = next(
            (
                (name, operand)
                for name, operand in emitters["First"].images.items()
                if self._is_copied(operand)
            ),
            None,
        )
        self._smem({"stages": STAGES[0]})

    def _problem(self, nodes: Iterable[Node], outputs: Iterable[str]) -> GemmProblem:
        part = Group(self.group.name, subgraph(self.group.graph, nodes, outputs))
        problem = analyse(part)
        check(problem.dtype in HALVES, f"registers of {problem.dtype} are no operand of wgmma")
        check_tensor_map("B", problem.b, problem.dtype)
        check(problem.b.k_major and problem.b.constant, "weights are no constants, K-major")
        return problem

    def _is_copied(self, operand: Operand) -> bool:
        """Whether the copy engine brings squares of an image that the first epilogue reads, which
        the value between may take the place of."""
        ((_, stride),), _ = operand.layout.dims
        aligned = stride % 8 == 0 and operand.layout.offset % 8 == 0
        return operand.dtype == self.first.dtype and aligned

    def _epilogues(
        self,
    ) -> tuple[dict[str, tuple[str, Pointer]], dict[str, PointwiseEmitter]]:
        """The parameters, and what writes the first epilogue, the store of the value between, if
        anybody else reads it, and the second."""
        parameters: dict[str, tuple[str, Pointer]] = {}
        first, second = self.first, self.second
        region = Region(first.group, (first.rows, first.columns), 2, parameters)
        given = {first.anchor.values[0]: "acc"}
        written = {"First": PointwiseEmitter(region, given, first.group.nodes)}
        if stored := self._outputs[True]:
            graph = subgraph(self.group.graph, first.group.nodes, stored)
            region = Region(Group(first.group.name, graph), region.shape, 8, parameters)
            written["Store"] = PointwiseEmitter(region, {self.pair.middle: "acc"}, ())
        region = Region(second.group, (second.rows, second.columns), 8, parameters)
        given = {second.anchor.values[0]: "acc"}
        written["Second"] = PointwiseEmitter(region, given, second.group.nodes)
        return parameters, written

    def knobs(self) -> tuple[Knob, ...]:
        return (Knob("stages", STAGES),)

    def defaults(self) -> Iterable[Schedule]:
        """All that fit the shared memory, the deepest ring that leaves A two tiles first."""
        found = []
        for stages in reversed(STAGES):
            with suppress(Illegal):
                found.append(({"stages": stages}, self._smem({"stages": stages})))
        found.sort(key=lambda each: (-each[1].a_tiles, -min(3, each[1].squares)))
        return [schedule for schedule, _ in found]

    @property
    def _atoms(self) -> int:
        """Of 128 bytes of A's K."""
        return -(-self.first.k // PART)

    @property
    def _parts(self) -> int:
        """Of the columns of the value between."""
        return -(-self.first.columns // PART)

    @property
    def _stage_bytes(self) -> int:
        return (self._atoms * PART + self.block_n) * 128

    @property
    def _blocks(self) -> int:
        return min(self.tiles, self.target.sm_count)

    @property
    def _rounds(self) -> int:
        """Tiles of the block that has most."""
        return -(-self.tiles // self._blocks)

    def _smem(self, schedule: Schedule) -> _SharedMemory:
        """The second tile of A comes ahead of a third square, and that of a fourth.

        Raises:
            Illegal: not even the least fits.
        """
        a_bytes, weights = self._atoms * BLOCK_M * 128, schedule["stages"] * self._stage_bytes
        rows = pad_to(2 * BLOCK_M * 4 * self.row_fields, 16)
        least = 2 if self.image else min(1, len(self._outputs[True]))
        choices = [(2, least + more) for more in (2, 1, 0)] + [(1, least + 1), (1, least)]
        if self.image is None:
            choices = [(2, least), (1, least)]
        for a_tiles, squares in choices:
            ring_at = a_tiles * a_bytes
            squares_at = ring_at + weights
            row_values_at = squares_at + WARPGROUPS * squares * SQUARE_BYTES
            barriers_at = row_values_at + rows
            barriers = 2 * a_tiles + 4 * schedule["stages"] + 4 + 2 * WARPGROUPS * squares
            nbytes = barriers_at + 8 * barriers
            if nbytes <= self.target.smem_per_block:
                break
        self.check_smem(nbytes)
        return _SharedMemory(
            a_tiles, squares, ring_at, squares_at, row_values_at, barriers_at, nbytes
        )

    def block_work(self, program: KernelProgram) -> BlockWork:
        """Of the block that has most tiles; both warpgroups share each of them."""
        parts, depth = self._parts, self._atoms * PART
        image = PART * BLOCK_M * 2 if self.image else 0
        tile = parts * (self._stage_bytes + image) + BLOCK_M * depth * 2
        read = parts * WARPGROUPS * ((PART + PART) * depth * 2 + self.block_n * 128)
        flops = 2 * BLOCK_M * PART * parts * (depth + self.block_n)
        made = self.block_n + parts * PART
        return BlockWork(
            fill_bytes=self._rounds * tile,
            l2_bytes=self._rounds * tile,
            steps=self._rounds * parts,
            stages=program.schedule["stages"],
            mma_flops=self._rounds * flops,
            tile_p=BLOCK_M,
            tile_q=made,
            split=1,
            registers=timing.most_registers(THREADS),
            tiles=self._rounds,
            writers=128 * WARPGROUPS,
            operand_bytes=self._rounds * read,
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        smem, first, second = self._smem(schedule), self.first, self.second
        parameters, emitters = self._epilogues()
        copied, operand = self.image or ("", None)
        texts = [
            emitter.functor(name, "acc", self.pair.middle, copied)
            if name == "First"
            else emitter.functor(name, "acc")
            for name, emitter in emitters.items()
        ]
        every, declarations = ", ".join(parameters), declared(parameters)
        given = [
            f"{name}{{{every}}}" if name in emitters else "NotStored{}"
            for name in ("First", "Store", "Second")
        ]
        maps = [
            first.tensor_map(first.plain_a, first.rows, BLOCK_M),
            first.tensor_map(first.b, first.columns, PART),
            second.tensor_map(second.b, second.columns, self.block_n),
        ]
        maps[2] = by_width(maps[2], self.width)
        if operand is not None:
            maps.append(self._image_map(parameters[operand.parameter][1].value, operand))
            declarations = f"const __grid_constant__ ptx::TensorMap image_map, {declarations}"
            given.append("image_map")
        newline = "\n"
        source = f"""#include "gemm_back_to_back.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[first.dtype]};
  static constexpr int ROWS = {first.rows}, K = {first.k};
  static constexpr int MIDDLE = {first.columns}, COLUMNS = {second.columns};
  static constexpr int BLOCK_N = {self.block_n}, BLOCKS = {self._blocks};
  static constexpr int A_TILES = {smem.a_tiles}, STAGES = {schedule["stages"]};
  static constexpr int SQUARES = {smem.squares}, WIDTH = {self.width};
  static constexpr int RING_AT = {smem.ring_at}, SQUARES_AT = {smem.squares_at};
  static constexpr int ROW_VALUES_AT = {smem.row_values_at}, BARRIERS_AT = {smem.barriers_at};
}};

{newline.join(texts)}
extern "C" __global__ void __launch_bounds__({THREADS}, 1)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap a_map,
            const __grid_constant__ ptx::TensorMap b_map,
            const __grid_constant__ ptx::TensorMap d_map, {declarations}) {{
  gemm_back_to_back<Config>(a_map, b_map, d_map, {", ".join(given)});
}}
"""
        return self.program(
            schedule,
            source,
            (self._blocks, 1, 1),
            THREADS,
            smem.nbytes,
            (*maps, *(argument for _, argument in parameters.values())),
        )

    def _image_map(self, value: str, operand: Operand) -> TensorMapArgument:
        """The map of squares of the image that is stored as `value`."""
        ((_, stride),), _ = operand.layout.dims
        rows, columns = self.first.rows, self.first.columns
        return TensorMapArgument(
            value,
            operand.layout.offset,
            operand.dtype,
            (columns, rows, 1),
            (stride, stride * rows),
            (PART, PART, 1),
        )
