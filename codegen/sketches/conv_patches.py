"""What convolutions of patches have in common: a block copies the pixels of its windows once, with
their border, and reads each tap from shared memory. For few channels, whose windows as rows of a
GEMM would be drawn from L2 again for each tap."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.emit import Region
from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import (
    EXACT,
    GROUPED,
    analyse,
    check_products,
    is_exact,
)
from gtco.codegen.sketches.operands import JoinedOperand, pieces_of
from gtco.codegen.sketches.windows import WindowOperand, windows_of
from gtco.ir.graph import Group
from gtco.passes.box_means import RUN
from gtco.target import Target


@dataclass(frozen=True)
class Shape:
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


@dataclass(frozen=True)
class Kernel:
    """What is a kernel's own in its source.

    Args:
        config: lines of its configuration.
        text: its structs.
        template: arguments of the template behind the configuration, each ahead of a comma.
        parameters: of the entry point ahead of the region's, with a comma behind each.
        operands: what the template is handed.
        maps: the arguments of `parameters`.
        more: what the template is handed behind the epilogue, behind a comma.
    """

    config: str
    text: str
    template: str
    parameters: str
    operands: str
    maps: tuple[TensorMapArgument, ...] = ()
    more: str = ""


class ConvPatches(Sketch):
    """Patch with its border -> taps as offsets -> products; stages are of channels, or of patches
    whose weights stay."""

    family: ClassVar[str] = "gemm"
    patches: ClassVar[tuple[tuple[int, int, int], ...]]
    """Frames, rows and columns of results that defaults have in a patch."""
    ring: ClassVar[frozenset[str]] = frozenset({"stages"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        problem = analyse(group, joins=True, boxes=True)
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
        emitter = self.problem.epilogue(self.problem.region())
        check(not emitter.row_fields, "the epilogue reads values of each row")
        self.image = bool(emitter.images)
        check(all(each.op != "box_means" for each in group.nodes), "this sketch leaves no means")
        self.moments = next((each for each in group.nodes if each.op == "box_moments"), None)
        if self.moments is not None:
            wide = self.windows.out[-1]
            check(wide % RUN == 0, f"lines of {wide} results are no runs of {RUN}")
        stats = self.problem.row_stats
        check(stats <= 1, f"{stats} values with row statistics, of one at most")
        self.problem.check_stats(64, "warp")
        self._check_operands()
        check(any(self._default_schedules()), "no default patch fits the shared memory")

    @abc.abstractmethod
    def _choices(self, rows: int, columns: int) -> Iterator[Schedule]:
        """Knobs that defaults have of tiles of so many rows and columns, besides these."""

    @abc.abstractmethod
    def _shape(self, schedule: Schedule) -> Shape:
        """What it asks for."""

    @abc.abstractmethod
    def _block_work(self, schedule: Schedule) -> BlockWork:
        """Of the block that has most patches."""

    @abc.abstractmethod
    def _kernel(self, schedule: Schedule, shape: Shape, region: Region) -> Kernel:
        """The source."""

    @abc.abstractmethod
    def _check_operands(self) -> None:
        """Refuse what these products do not multiply."""

    @abc.abstractmethod
    def _part(self, schedule: Schedule) -> int:
        """Of a tile's columns, those that go through the epilogue at a time."""

    def defaults(self) -> Iterable[Schedule]:
        """Patches of some shapes with all channels at once or parts of them, ordered by a small
        model, and where products bind by how much border is copied."""
        return sorted(self._default_schedules(), key=self._cost)

    def _default_schedules(self) -> Iterator[Schedule]:
        """The default schedules that are legal."""
        columns = 1 << (self.problem.columns - 1).bit_length()
        columns = max(columns, 64 if self.problem.row_stats else 16)
        for (t, h, w), n in itertools.product(
            self.patches,
            {min(most, columns) for most in ((128, 64) if self.moments is None else (64, 32))},
        ):
            for choice in self._choices(t * h * w, n):
                schedule = {"tile_t": t, "tile_h": h, "tile_w": w, "block_n": n, **choice}
                try:
                    self._check_knobs(schedule)
                    self._check(schedule)
                except Illegal:
                    continue
                yield schedule

    @property
    def _some_chunks(self) -> set[int]:
        """Chunks of a step that defaults have."""
        power = 1 << (self.chunks - 1).bit_length()
        return {min(most, power) for most in (8, 4, 2)}

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

    def _patch(self, schedule: Schedule) -> tuple[int, int, list[int]]:
        """Results of a patch, how many patches there are, and the sides of the pixels that one
        reads, width last."""
        windows = self.windows
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
        return math.prod(tile), patches, sides

    def _check(self, schedule: Schedule) -> None:
        chunks, part = schedule["chunks"], self._part(schedule)
        check(chunks == 1 or chunks < 2 * self.chunks, f"{chunks} chunks of {self.chunks}")
        self.problem.check_stats(part, "part")
        if self.moments is not None:
            wide = schedule["tile_w"]
            check(wide % RUN == 0, f"lines of {wide} results, of a patch, are no runs of {RUN}")
            self._check_moments(part, self.moments.attrs["columns"])
        self.check_smem(self._shape(schedule).smem)

    @staticmethod
    def _check_moments(columns: int, of_box: int) -> None:
        """Refuse moments of `of_box` columns where an epilogue has so many `columns` at a time."""
        check(columns % of_box == 0, f"{columns} columns cut boxes of {of_box}")
        own = of_box // max(1, min(4, of_box // width_of(columns)))  # of what a lane has
        held = columns // 4 // own
        check(held <= 8, f"a lane would have parts of {held} boxes, of eight at most")

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        problem, shape = self.problem, self._shape(schedule)
        region = problem.region()
        kernel = self._kernel(schedule, shape, region)
        functor = problem.epilogue(region).functor("Epilogue", "acc")
        names = ", ".join(region.parameters)
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
{kernel.config}{EXACT if self.exact else ""}{GROUPED if problem.grouped else ""}}};

{kernel.text}
{functor}
extern "C" __global__ void __launch_bounds__({shape.threads})
ENTRY_POINT({kernel.parameters}{region.declarations}) {{
  {self.name}<Config{kernel.template}>({kernel.operands}, Epilogue{{{names}}}{kernel.more});
}}
"""
        return self.program(
            schedule,
            source,
            shape.grid,
            shape.threads,
            shape.smem,
            (*kernel.maps, *(argument for _, argument in region.parameters.values())),
        )


def width_of(columns: int) -> int:
    """How many of so many columns lie side by side in a lane."""
    return 8 if columns % 32 == 0 else 2


def _overlap(windows: WindowOperand) -> bool:
    """Whether a pixel is in two windows."""
    return any(
        size > step // math.gcd(step, apart)
        for size, step, apart in zip(windows.kernel, windows.stride, windows.dilation, strict=True)
    )
