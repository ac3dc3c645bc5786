"""What convolutions of patches have in common: a block copies the pixels of its windows once, with
their border, and reads each tap from shared memory. For few channels, whose windows as rows of a
GEMM would be drawn from L2 again for each tap."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypedDict

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import (
    EXACT,
    GROUPED,
    analyse,
    check_products,
    is_exact,
    pad_to,
)
from gtco.codegen.sketches.operands import JoinedOperand, operand_text, pieces_of, pointers
from gtco.codegen.sketches.windows import WindowOperand, windows_of
from gtco.ir.graph import Group
from gtco.passes.box_means import LINES
from gtco.target import Target


class Operands(TypedDict):
    """Fields of `BlockWork`."""

    warps: int
    operand_bytes: int


class ConvPatches(Sketch):
    """Patch with its border in planes of 16 bytes -> taps as offsets -> products; stages are of
    channels, or of patches whose weights stay."""

    family: ClassVar[str] = "gemm"
    patches: ClassVar[tuple[tuple[int, int, int], ...]]
    """Frames, rows and columns of results that defaults have in a patch."""
    ring: ClassVar[frozenset[str]] = frozenset({"stages"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        problem = analyse(group, joins=True, lines=True)
        check(problem.anchor.definition.convolves, "rows of a matrix are no patch of an image")
        check_products(problem.anchor, problem.dtype, target, exact=True)
        if not isinstance(problem.a, JoinedOperand):  # a row of the kernel may be one tap of it
            problem = replace(problem, a=windows_of(group.graph, problem.anchor))
        self.problem = problem
        pieces = [each for each in pieces_of(problem.a) if isinstance(each, WindowOperand)]
        self.windows = pieces[0]
        self.exact = is_exact(problem.anchor, problem.dtype)
        self.chunk = 16 // problem.dtype.itemsize
        check(_overlap(self.windows), "no pixel is in two windows")
        for piece in pieces:
            run = piece.layout.vector(self.chunk, piece.axes + 1)
            whole = run == self.chunk and piece.channels % run == 0
            check(whole, f"the image {piece.layout} is not in runs of 16 bytes")
        whole = problem.b.layout.vector(self.chunk, 2) == self.chunk
        check(whole, f"the weights {problem.b.layout} are not in runs of 16 bytes")
        self.chunks = sum(piece.channels for piece in pieces) // self.chunk  # of a group
        fields = self.problem.epilogue(self.problem.region()).row_fields
        check(not fields, "the epilogue reads values of each row")
        self.moments = next((each for each in group.nodes if each.op == "box_moments"), None)
        if self.moments is not None:
            *_, high, wide = self.windows.out
            whole = high % LINES[0] == 0 and wide % LINES[1] == 0
            check(whole, f"{high} x {wide} results are no boxes of {LINES}")
        stats = self.problem.row_stats
        check(stats <= 1, f"{stats} values with row statistics, of one at most")
        self.problem.check_stats(64, "warp")
        self._check_operands()
        check(any(self._default_schedules()), "no default patch fits the shared memory")

    @abc.abstractmethod
    def _operands(self, schedule: Schedule, chunks: int) -> Operands:
        """What a block's products of so many chunks of K read from shared memory, and by whom."""

    @abc.abstractmethod
    def _check_operands(self) -> None:
        """Refuse what these products do not multiply."""

    @abc.abstractmethod
    def _part(self, columns: int) -> int:
        """Of a warp's columns, those that go through the epilogue at a time."""

    @abc.abstractmethod
    def _warps(self, rows: int, columns: int) -> Iterable[tuple[int, int]]:
        """Warps along rows and along columns that defaults have of a tile."""

    def defaults(self) -> Iterable[Schedule]:
        """Patches of some shapes with all channels at once or parts of them, ordered by a small
        model, and where products bind by how much border is copied."""
        return sorted(self._default_schedules(), key=self._cost)

    def _default_schedules(self) -> Iterator[Schedule]:
        """The default schedules that are legal."""
        power = 1 << (self.chunks - 1).bit_length()
        columns = 1 << (self.problem.columns - 1).bit_length()
        columns = max(columns, 64 if self.problem.row_stats else 16)
        for (t, h, w), n, chunks, stages in itertools.product(
            self.patches,
            {min(most, columns) for most in ((128, 64) if self.moments is None else (64, 32))},
            {min(8, power), min(4, power), min(2, power)},
            (1, 2),
        ):
            for warps_m, warps_n in self._warps(t * h * w, n):
                schedule = {
                    "tile_t": t,
                    "tile_h": h,
                    "tile_w": w,
                    "block_n": n,
                    "chunks": chunks,
                    "warps_m": warps_m,
                    "warps_n": warps_n,
                    "stages": stages,
                }
                try:
                    self._check_knobs(schedule)
                    self._check(schedule)
                except Illegal:
                    continue
                yield schedule

    def _cost(self, schedule: Schedule) -> tuple[float, int]:
        """Microseconds, roughly: without the epilogue's arithmetic; and what is copied."""
        target, shape = self.target, self._shape(schedule)
        block = self._block_work(schedule)
        rate = self.problem.matmul_tflops(target)
        rate *= target.constants.mma_efficiency[self.name]
        us = timing.chain_us(
            block,
            math.prod(shape.grid),
            shape.resident,
            rate,
            target,
            operand_bytes=block.operand_bytes,
        )
        return us, block.fill_bytes

    def _shape(self, schedule: Schedule) -> _Shape:
        windows, target = self.windows, self.target
        tile = (schedule["tile_t"], schedule["tile_h"], schedule["tile_w"])[-windows.axes :]
        patches = windows.layout.shape[0] * math.prod(
            -(-size // part) for size, part in zip(windows.out, tile, strict=True)
        )
        sides = [
            (part - 1) * step + (size - 1) * apart + 1
            for part, step, size, apart in zip(
                tile, windows.stride, windows.kernel, windows.dilation, strict=True
            )
        ]
        chunks, stages, block_n = schedule["chunks"], schedule["stages"], schedule["block_n"]
        pitch = pad_to(sides[-1], windows.stride[-1])
        banks = 8 // chunks
        plane = pad_to(math.prod(sides[:-1]) * pitch - banks, 8) + banks
        steps = -(-self.chunks // chunks)
        taps, image = math.prod(windows.kernel), chunks * plane * 16
        kept = steps * taps * chunks * block_n * 16
        # One block of one stage would copy nothing while it multiplies: two of several steps have
        # no room for all weights.
        keeps = steps == 1 or (stages > 1 and kept + stages * image + 16 <= target.smem_per_block)
        weights = kept if keeps else taps * chunks * block_n * 16
        smem = weights * (1 if keeps else stages) + stages * image + 16
        threads = schedule["warps_m"] * schedule["warps_n"] * 32
        registers = self._registers(schedule)
        resident = timing.resident_blocks(smem, threads, registers, target)
        across = -(-self.problem.columns // block_n)
        blocks = patches
        if stages > 1 or steps > 1:  # a block goes from patch to patch
            room = max(1, resident * target.sm_count // (across * self.problem.batch))
            blocks = -(-patches // -(-patches // room))
        return _Shape(
            math.prod(tile),
            patches,
            math.prod(sides) * chunks * 16,
            weights,
            keeps,
            steps,
            smem,
            threads,
            registers,
            resident,
            (blocks, across, self.problem.batch),
        )

    def _registers(self, schedule: Schedule) -> int:
        """Of a thread, about."""
        rows, columns = self._warp(schedule)
        parts = 1 + self.exact
        return min(255, parts * (rows * columns // 32 + (rows + columns) // 4) + 48)

    @staticmethod
    def _warp(schedule: Schedule) -> tuple[int, int]:
        """Rows and columns of a warp's results."""
        rows = schedule["tile_t"] * schedule["tile_h"] * schedule["tile_w"]
        return rows // schedule["warps_m"], schedule["block_n"] // schedule["warps_n"]

    def _check(self, schedule: Schedule) -> None:
        rows, columns = self._warp(schedule)
        chunks = schedule["chunks"]
        check(rows >= 16 and rows % 16 == 0, f"{rows} rows a warp are no multiple of 16")
        check(columns >= 16, f"{columns} columns a warp are less than a pair of mma tiles")
        check(chunks == 1 or chunks < 2 * self.chunks, f"{chunks} chunks of {self.chunks}")
        accumulators = (1 + self.exact) * rows * columns // 32
        threads = schedule["warps_m"] * schedule["warps_n"] * 32
        most = min(128, timing.most_registers(threads) // 2)
        check(accumulators <= most, f"{accumulators} accumulators a thread leave no registers")
        self.problem.check_stats(columns, "warp")
        if self.moments is not None:
            self._check_moments(self._part(columns), self.moments.attrs["columns"])
        shape = self._shape(schedule)
        self.check_smem(shape.smem)
        alone = schedule["stages"] == 1 and shape.resident == 1
        check(not alone, "one block a multiprocessor, which copies nothing while it multiplies")

    @staticmethod
    def _check_moments(columns: int, of_box: int) -> None:
        """Refuse moments of `of_box` columns where an epilogue has so many `columns` at a time."""
        check(columns % of_box == 0, f"{columns} columns cut boxes of {of_box}")
        own = of_box // max(1, min(4, of_box // _width(columns)))  # of what a lane has
        held = columns // 4 // own
        check(held <= 8, f"a lane would have parts of {held} boxes, of eight at most")

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        """Of the block that has most patches."""
        shape = self._shape(schedule)
        rounds = -(-shape.patches // shape.grid[0])
        weights = shape.weights * (1 if shape.keeps_weights else rounds * shape.steps)
        filled = rounds * shape.steps * shape.image + weights
        chunks = rounds * shape.steps * math.prod(self.windows.kernel) * schedule["chunks"]
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=rounds * shape.steps,
            stages=schedule["stages"],
            mma_flops=2 * shape.rows * schedule["block_n"] * chunks * self.chunk,
            tile_p=schedule["block_n"],
            tile_q=shape.rows,
            split=1,
            registers=shape.registers,
            tiles=rounds,
            copies=filled // (16 * shape.threads),
            in_turns=1,
            kept_bytes=shape.weights * (1 if shape.keeps_weights or rounds > 1 else shape.steps),
            **self._operands(schedule, chunks),
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        problem, shape = self.problem, self._shape(schedule)
        region = problem.region()
        emitter = problem.epilogue(region)
        texts = []
        for label, operand in (("A", problem.a), ("B", problem.b)):
            texts.append(operand_text(label, operand, problem.dtype, pointers(operand, region)))
        functor = emitter.functor("Epilogue", "acc")
        width = _width(self._warp(schedule)[1])
        names, newline = ", ".join(region.parameters), "\n"
        source = f"""#include "{self.name}.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[problem.dtype]};
  static constexpr int N = {problem.columns}, BLOCK_N = {schedule["block_n"]};
  static constexpr int TILE_T = {schedule["tile_t"]}, TILE_H = {schedule["tile_h"]};
  static constexpr int TILE_W = {schedule["tile_w"]}, PATCHES = {shape.patches};
  static constexpr int BLOCKS = {shape.grid[0]};
  static constexpr bool KEEPS_WEIGHTS = {str(shape.keeps_weights).lower()};
  static constexpr int CHUNKS = {schedule["chunks"]}, STAGES = {schedule["stages"]};
  static constexpr int WARPS_M = {schedule["warps_m"]}, WARPS_N = {schedule["warps_n"]};
  static constexpr int WIDTH = {width};
{EXACT if self.exact else ""}{GROUPED if problem.grouped else ""}}};

{newline.join(texts)}
{functor}
extern "C" __global__ void __launch_bounds__({shape.threads})
ENTRY_POINT({region.declarations}) {{
  {self.name}<Config>(A{{{pointers(problem.a, region)}}},
{" " * len(self.name)}           B{{{pointers(problem.b, region)}}}, Epilogue{{{names}}});
}}
"""
        return self.program(
            schedule,
            source,
            shape.grid,
            shape.threads,
            shape.smem,
            (argument for _, argument in region.parameters.values()),
        )


def _width(columns: int) -> int:
    """How many of so many columns lie side by side in a lane."""
    return 8 if columns % 32 == 0 else 2


def _overlap(windows: WindowOperand) -> bool:
    """Whether a pixel is in two windows."""
    return any(
        size > step // math.gcd(step, apart)
        for size, step, apart in zip(windows.kernel, windows.stride, windows.dilation, strict=True)
    )


@dataclass(frozen=True)
class _Shape:
    """What a schedule asks for.

    Args:
        rows: results of a patch.
        patches: of all images.
        image, weights: bytes of a stage; weights that stay, all of them.
        keeps_weights: they stay.
        steps: of a patch.
        smem: bytes of a block.
        threads, registers: of a block, of a thread.
        resident: blocks that fit a multiprocessor.
        grid: of blocks, by patches, columns and groups.
    """

    rows: int
    patches: int
    image: int
    weights: int
    keeps_weights: bool
    steps: int
    smem: int
    threads: int
    registers: int
    resident: int
    grid: tuple[int, int, int]
