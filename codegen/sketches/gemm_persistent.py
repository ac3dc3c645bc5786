"""GEMM of many rows on `wgmma`: blocks that stay and walk over the tiles of the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gtco.codegen import timing
from gtco.codegen.emit import Operand
from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import (
    BY_ROWS,
    ROWS_OF_K,
    analyse_wgmma,
    is_promoted,
    pad_to,
)
from gtco.codegen.sketches.operands import MoreMaps, pieces_of
from gtco.codegen.sketches.row_orders import by_width
from gtco.ir.graph import Group
from gtco.ir.references import STATS_CHUNK
from gtco.passes.frames import is_statistic
from gtco.target import Target

ACCUMULATORS = {2: 192, 3: 96}
"""Most that a thread of two or three consumers holds: the epilogue needs the rest of its 240 or 160
registers."""
COPY_BYTES = 48 * 1024
"""Of an image in shared memory, that a block aims at: what is under way to a multiprocessor in a
microsecond or two."""
COPY_PARTS = 8
"""Most of a ring: each has two barriers."""
COPY_COLUMNS = 32
"""Of a box of an image (copied.cuh)."""
BLOCK_N = (64, 96, 128, 160, 192, 224, 256)
LINE_COLUMNS = 128
"""Most that a warp's rows have in shared memory at a time."""
KEPT_STAGES = 4
"""Stages of A that B leaves room for where it stays."""


@dataclass(frozen=True)
class _SharedMemory:
    """How many stages there are, how many parts of the image a ring, and where what lies, in
    bytes; B only where it stays."""

    stages: int
    parts: int
    kept_at: int | None
    image_at: int
    lines_at: int
    row_values_at: int
    barriers_at: int
    nbytes: int


class GemmPersistent(Sketch):
    """A block a multiprocessor; one warpgroup multiplies while the other runs its epilogue.

    With `cooperative`, two or three share every tile instead. The ring has as many stages as fit.
    With `copies`, the epilogue finds an image that it reads, such as a residual, in shared memory.
    With `lines`, it reads and writes whole rows, where a tile has all columns. B stays in shared
    memory where a tile has all columns and there is room.
    """

    name: ClassVar[str] = "gemm_persistent"
    family: ClassVar[str] = "gemm"
    version: ClassVar[int] = 5
    schedule_version: ClassVar[int] = 4
    later_knobs: ClassVar[Mapping[str, int]] = {"copies": 0, "lines": 0}
    ring: ClassVar[frozenset[str]] = frozenset({"atoms"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self.problem = problem = analyse_wgmma(group, target, boxes=True)
        check(not problem.grouped, "convolutions in groups, whose results lie side by side")
        self.block_k = 128 // problem.dtype.itemsize
        self.atoms = problem.atoms(self.block_k)
        smallest = problem.batch * -(-problem.rows // 64) * -(-problem.columns // 64)
        check(
            smallest >= 2 * target.sm_count,
            f"{smallest} tiles of 64 x 64 are not two for each of {target.sm_count} blocks",
        )
        region = problem.region()
        emitter = problem.epilogue(region)
        self.row_fields = len(emitter.row_fields)
        check(problem.a.k_major, "A lies in rows of K")
        self.by_rows = not problem.b.k_major
        self.vector = region.vector
        self.width = problem.width(region.vector)
        self.image: tuple[str, Operand] | None = None  # of those that are read, by name
        if self.width == 8:
            self.image = next(iter(emitter.images.items()), None)

    def knobs(self) -> tuple[Knob, ...]:
        widest = max(64, pad_to(self.problem.columns, 64))
        return (
            Knob("cooperative", (0, 1)),
            Knob("block_m", (64, 128, 192, 256)),
            Knob("block_n", tuple(size for size in BLOCK_N if size <= widest)),
            Knob("atoms", (1, 2)),
            Knob("copies", (0, 1) if self.image else (0,)),
            Knob("lines", (0, 1) if self._line else (0,)),
            Knob("raster", (1, 4, 16), range(1, 17)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """Every tile with one raster, ordered by a small model."""
        found = []
        knobs = [knob for knob in self.knobs() if knob.name != "raster"]
        for values in itertools.product(*(knob.choices for knob in knobs)):
            schedule = dict(zip((knob.name for knob in knobs), values, strict=True), raster=4)
            try:
                self._check(schedule)
            except Illegal:
                continue
            found.append(schedule)
        check(bool(found), "no default tile fits the shared memory")
        return sorted(found, key=self._cost)

    def _cost(self, schedule: Schedule) -> float:
        """Microseconds, roughly: without the epilogue's arithmetic."""
        target = self.target
        block = self._block_work(schedule)
        rate = self.problem.matmul_tflops(target) * target.constants.mma_efficiency[self.name]
        operand_bytes = timing.operand_bytes(self.name, block)
        return timing.chain_us(
            block, self._blocks(schedule), 1, rate, target, operand_bytes=operand_bytes
        )

    @property
    def _line(self) -> int:
        """Columns of what a warp's rows have in shared memory at a time, all or an even part of
        them; 0 where it is not built."""
        columns = self.problem.columns
        parts = -(-columns // LINE_COLUMNS)
        whole = columns % (8 * parts) == 0 and columns <= BLOCK_N[-1] and self.vector >= 4
        return columns // parts if whole and not any(map(is_statistic, self.group.nodes)) else 0

    def _tiles(self, schedule: Schedule) -> int:
        problem = self.problem
        down = -(-problem.rows // schedule["block_m"])
        return problem.batch * down * -(-problem.columns // schedule["block_n"])

    def _blocks(self, schedule: Schedule) -> int:
        """Of the grid: registers leave room for one on a multiprocessor."""
        return min(self._tiles(schedule), self.target.sm_count)

    def _rounds(self, schedule: Schedule) -> int:
        """Tiles of the block that has most."""
        return -(-self._tiles(schedule) // self._blocks(schedule))

    def _steps(self, schedule: Schedule) -> int:
        """Of a tile."""
        return -(-self.atoms // schedule["atoms"])

    def _smem(self, schedule: Schedule) -> _SharedMemory:
        block_m, block_n = schedule["block_m"], schedule["block_n"]
        row_values = pad_to(2 * block_m * 4 * self.row_fields, 16)  # a tile's and the next one's
        atoms, steps = schedule["atoms"], self._rounds(schedule) * self._steps(schedule)
        rings, part = _rings(schedule), self._part(schedule)
        parts = max(2, min(COPY_PARTS, COPY_BYTES // (rings * part))) if rings else 0
        copied, barriers = rings * parts * part, 16 * (rings * parts + 4)
        apart = self._line + 8 * (self._line % 16 == 0)  # of a warp's rows, floats
        lines = schedule["lines"] * _consumers(schedule) * 64 * apart * 4
        beside = copied + lines + row_values + barriers
        b_bytes = self._steps(schedule) * atoms * block_n * 128
        stage, room = atoms * block_m * 128, self.target.smem_per_block - beside
        fits = (room - b_bytes) // (stage + 16)
        keeps = self._has_all_columns(schedule) and fits >= min(steps, KEPT_STAGES)
        if not keeps:
            stage = atoms * (block_m + block_n) * 128
            fits = room // (stage + 16)
        stages = max(2, min(fits, steps))
        kept_at = stages * stage
        image_at = kept_at + b_bytes * keeps
        lines_at = image_at + copied
        row_values_at = lines_at + lines
        barriers_at = row_values_at + row_values
        nbytes = barriers_at + 16 * stages + barriers
        return _SharedMemory(
            stages,
            parts,
            kept_at if keeps else None,
            image_at,
            lines_at,
            row_values_at,
            barriers_at,
            nbytes,
        )

    def _has_all_columns(self, schedule: Schedule) -> bool:
        """Whether each tile has them, of the only product, and a block has several tiles."""
        whole = self.problem.columns <= schedule["block_n"] and self.problem.batch == 1
        return whole and self._rounds(schedule) > 1

    def _part(self, schedule: Schedule) -> int:
        """Bytes of a part of the image: of the columns that the epilogue takes at a time."""
        if self.image is None:
            return 0
        columns = STATS_CHUNK if self.problem.row_stats else COPY_COLUMNS
        return schedule["block_m"] * columns * self.image[1].dtype.itemsize

    def _check(self, schedule: Schedule) -> None:
        block_m, block_n = schedule["block_m"], schedule["block_n"]
        consumers = _consumers(schedule)
        rows = block_m // consumers if schedule["cooperative"] else block_m
        check(rows in (64, 128), f"a warpgroup multiplies 64 or 128 rows, not {rows}")
        promoted = is_promoted(self.problem.dtype, self._steps(schedule), schedule["atoms"])
        accumulators = rows // 64 * block_n // (1 if promoted else 2)
        most = ACCUMULATORS[consumers]
        check(accumulators <= most, f"{accumulators} accumulators a thread, of {most}")
        whole = block_n % ROWS_OF_K == 0 or not self.by_rows
        check(whole, f"{block_n} columns of rows of K, which come in parts of {ROWS_OF_K}")
        if self.problem.atoms_are_apart:
            whole = self.atoms % schedule["atoms"] == 0
            check(whole, f"{self.atoms} atoms of taps in steps of {schedule['atoms']}")
        if schedule["lines"]:
            columns = self.problem.columns
            check(self._line > 0, f"{columns} columns are no whole lines")
            check(columns <= block_n, f"{columns} columns of several tiles are no whole lines")
            check(not schedule["copies"], "an image in shared memory is read by fragments")
        self.problem.check_stats(block_n, "tile")
        self.check_smem(self._smem(schedule).nbytes)

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        """Of the block that has most tiles."""
        block_m, block_n = schedule["block_m"], schedule["block_n"]
        atoms = schedule["atoms"]
        steps = self._rounds(schedule) * self._steps(schedule)
        smem = self._smem(schedule)
        across = self.problem.batch * -(-self.problem.columns // block_n)
        copies_of_b = self._steps(schedule) if smem.kept_at is not None else steps
        filled = (steps * block_m + copies_of_b * block_n) * 128 * atoms
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=steps,
            stages=smem.stages,
            mma_flops=2 * block_m * block_n * steps * atoms * self.block_k,
            tile_p=block_m,
            tile_q=block_n,
            split=1,
            registers=timing.most_registers(_threads(schedule)),
            tiles=self._rounds(schedule),
            consumers=1 if schedule["cooperative"] else 2,
            depth=1,
            writers=timing.WARPGROUP * (_consumers(schedule) if schedule["cooperative"] else 1),
            image=int(self.image is not None and not schedule["copies"]),
            narrow=0 if schedule["lines"] else 8 // self.width - 1,
            parts_of_b=0 if smem.kept_at is not None else across,
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        problem = self.problem
        region = problem.region()
        name, operand = self.image if schedule["copies"] and self.image else ("", None)
        functor = problem.epilogue(region).functor("Epilogue", "acc", copied=name)
        block_m, block_n, atoms = schedule["block_m"], schedule["block_n"], schedule["atoms"]
        smem, blocks, threads = self._smem(schedule), self._blocks(schedule), _threads(schedule)
        width, more_fields = self.width, ""
        if schedule["lines"]:
            sizes = f"LINES = {self._line}, LINES_AT = {smem.lines_at}"
            width, more_fields = 2, f"  static constexpr int {sizes};\n"
        if smem.kept_at is not None:
            more_fields += f"  static constexpr int KEPT_AT = {smem.kept_at};\n"
        down = -(-problem.rows // block_m)
        windows, of = problem.windows
        more = MoreMaps(len(pieces_of(problem.a)) - 1)
        names, declared = ", ".join(region.parameters), more.declarations + region.declarations
        image, image_maps, kind = "", [], C_TYPES[operand.dtype] if operand else ""
        if operand:
            value = region.parameters[operand.parameter][1].value
            image_maps = [self._image_map(value, operand, block_m)]
            declared = f"const __grid_constant__ ptx::TensorMap image_map, {declared}"
            shape = f"{_rings(schedule)}, {smem.parts}, {smem.image_at}"
            image = f"{more.argument or ', {}'}, Image<{kind}, {shape}>{{&image_map}}"
        source = f"""#include "gemm_persistent.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[problem.dtype]};
  static constexpr int BATCH = {problem.batch}, ROWS = {problem.rows};
  static constexpr int COLUMNS = {problem.columns}, K = {problem.k};
  static constexpr int CONSUMERS = {_consumers(schedule)};
  static constexpr bool COOPERATIVE = {str(bool(schedule["cooperative"])).lower()};
  static constexpr int BLOCK_M = {block_m}, BLOCK_N = {block_n};
  static constexpr int STAGES = {smem.stages}, ATOMS = {atoms};
  static constexpr bool A_CONSTANT = {str(problem.a.constant).lower()};
  static constexpr bool B_CONSTANT = {str(problem.b.constant).lower()};
  static constexpr int WIDTH = {width}, GROUP = {min(schedule["raster"], down)};
  static constexpr int BLOCKS = {blocks};
  static constexpr int ROW_VALUES_AT = {smem.row_values_at}, BARRIERS_AT = {smem.barriers_at};
{BY_ROWS if self.by_rows else ""}{more_fields}}};

{windows}{functor}
extern "C" __global__ void __launch_bounds__({threads}, 1)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap a_map,
            const __grid_constant__ ptx::TensorMap b_map, {declared}) {{
  gemm_persistent<Config{of}>(a_map, b_map, Epilogue{{{names}}}{image or more.argument});
}}
"""
        a_map, *more_maps = problem.tensor_maps(problem.rows, block_m)
        b_map = problem.tensor_map(problem.b, problem.columns, block_n)
        return self.program(
            schedule,
            source,
            (blocks, 1, 1),
            threads,
            smem.nbytes,
            (
                a_map,
                by_width(b_map, width),
                *image_maps,
                *more_maps,
                *(argument for _, argument in region.parameters.values()),
            ),
        )

    def _image_map(self, value: str, operand: Operand, rows: int) -> TensorMapArgument:
        """The map of boxes of so many rows of the image that is stored as `value`."""
        problem, itemsize = self.problem, operand.dtype.itemsize
        ((_, stride),), _ = operand.layout.dims
        return TensorMapArgument(
            value,
            operand.layout.offset,
            torch.int32 if itemsize == 4 else operand.dtype,
            (problem.columns, problem.rows, 1),
            (stride, stride * problem.rows),
            (COPY_COLUMNS, rows, 1),
            128 if itemsize == 4 else 0,
        )


def _rings(schedule: Schedule) -> int:
    """Of the image's parts: one for each that takes tiles of its own."""
    return schedule["copies"] * (1 if schedule["cooperative"] else 2)


def _consumers(schedule: Schedule) -> int:
    """Warpgroups that multiply."""
    return 3 if schedule["cooperative"] and schedule["block_m"] == 192 else 2


def _threads(schedule: Schedule) -> int:
    """Of a block: the consumers', and a warpgroup of which a single thread produces."""
    return 128 * (_consumers(schedule) + 1)
