"""Convolution of patches on `wgmma`, whose pixels and weights the copy engine brings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.emit import Region
from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.sketch import BlockWork, Knob, Schedule, check
from gtco.codegen.sketches.conv_patches import ConvPatches, Kernel, Shape, width_of
from gtco.codegen.sketches.gemm import check_tensor_map, pad_to
from gtco.codegen.sketches.operands import MoreMaps, pieces_of
from gtco.codegen.sketches.windows import WindowOperand, single_stride
from gtco.codegen.timing import WGMMA_ROWS
from gtco.ir.spec import HALVES

BUFFERS = 2
"""Of pixels in a thread's registers."""
LOOP_REGISTERS = 56
"""A thread's besides these and its sums, about."""
MOST_REGISTERS = {1: 224, 2: 192, 3: 144}
"""Of a thread, by consumers: with more, the assembler lets no products overlap, or spills."""
BUSY_COLUMNS = 64
"""Columns of all tiles of all consumers together, whose products keep the tensor cores busy."""
ROW_REQUESTS, BYTES_OF_REQUEST = 0.3, 57
"""Of the copy engine's rows (experiments/notes/31-patches.md)."""
LARGEST_BOX = 256
"""Pixels of a copy along each side."""


class ConvWgmma(ConvPatches):
    """TMA -> rows of a step's channels, swizzled -> ldmatrix of pixels, descriptors of weights ->
    m64nNk16. A consumer warpgroup has patches of its own."""

    name: ClassVar[str] = "conv_wgmma"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 2
    patches = ((1, 4, 16), (1, 8, 16), (1, 16, 16), (2, 4, 16), (2, 8, 16), (4, 4, 16))

    def knobs(self) -> tuple[Knob, ...]:
        volume = self.windows.axes == 3
        return (
            Knob("tile_t", (1, 2, 4) if volume else (1,)),
            Knob("tile_h", (4, 8, 16)),
            Knob("tile_w", (16,)),
            Knob("block_n", (16, 32, 64, 96, 128)),
            Knob("chunks", (2, 4, 8)),
            Knob("consumers", (1, 2, 3)),
            Knob("stages", (2, 3, 4, 5, 6)),
        )

    def _check_operands(self) -> None:
        check(self.target.has_wgmma, f"{self.target.arch} has no wgmma")
        dtype, batch = self.problem.dtype, self.problem.batch
        check(dtype in HALVES, f"{dtype} in rows that are swizzled by 16 bits")
        check(self.chunks > 1, "one chunk of channels, and wgmma takes two")
        check_tensor_map("B", self.problem.b, dtype)
        of_groups, row, _ = (single_stride(axis) for axis in self.problem.b.layout.dims)
        together = of_groups == self.problem.columns * (row or 0)
        check(batch == 1 or together, "weights of groups that lie apart")
        for piece in self._pieces:
            strides = [single_stride(axis) for axis in piece.layout.dims]
            known = all(stride is not None for stride in strides)
            check(known, f"the image {piece.layout} has no single stride for each dimension")
            whole = all((stride or 0) % self.chunk == 0 for stride in strides[:-1])
            aligned = whole and piece.layout.offset % self.chunk == 0
            check(aligned, f"the image {piece.layout} has pixels that are not 16-byte aligned")

    @property
    def _pieces(self) -> list[WindowOperand]:
        return [each for each in pieces_of(self.problem.a) if isinstance(each, WindowOperand)]

    def _part(self, schedule: Schedule) -> int:
        part, columns = 64 if self.problem.row_stats else 32, schedule["block_n"]
        return part if columns % part == 0 else columns

    def _choices(self, rows: int, columns: int) -> Iterator[Schedule]:
        """Rings as long as there is room and use for."""
        for chunks, consumers in itertools.product(self._some_chunks, (1, 2, 3)):
            for stages in (6, 4, 3, 2):
                yield {"chunks": chunks, "consumers": consumers, "stages": stages}

    def _check(self, schedule: Schedule) -> None:
        consumers = schedule["consumers"]
        check(schedule["chunks"] > 1, "one chunk of channels, and wgmma takes two")
        registers, most = self._registers(schedule), MOST_REGISTERS[consumers]
        check(registers <= most, f"about {registers} registers a thread, of {most}")
        *_, sides = self._patch(schedule)
        check(max(sides) <= LARGEST_BOX, f"copies of {sides} pixels")
        super()._check(schedule)
        shape = self._shape(schedule)
        patches = -(-shape.patches // shape.grid[0])
        idle = shape.keeps_weights and consumers > patches
        check(not idle, f"{consumers} consumers of {patches} patches a block")
        steps = shape.steps * (-(-patches // consumers) if shape.keeps_weights else patches)
        check(schedule["stages"] <= max(2, steps), f"{schedule['stages']} stages of {steps} steps")

    def _registers(self, schedule: Schedule) -> int:
        """Of a thread, about."""
        tiles, runs, held = self._lines(schedule)
        return tiles * schedule["block_n"] // 2 + BUFFERS * runs * held * 4 + LOOP_REGISTERS

    def _lines(self, schedule: Schedule) -> tuple[int, int, int]:
        """A warp's fragments, the runs of lines that they are, and the lines of a run's pixels
        that it has in registers."""
        tiles = schedule["tile_t"] * schedule["tile_h"] * schedule["tile_w"] // WGMMA_ROWS
        run = min(tiles, schedule["tile_h"] // 4)
        return tiles, tiles // run, run + self._together - 1

    @property
    def _together(self) -> int:
        """Rows of taps that share a warp's pixels."""
        windows = self.windows
        shares = windows.stride[-2] == 1 and windows.dilation[-2] == 1
        return windows.kernel[-2] if shares else 1

    def _width(self, schedule: Schedule) -> int:
        """How many columns lie side by side in a lane."""
        return width_of(self._part(schedule)) if self.problem.columns % 8 == 0 else 2

    def _shape(self, schedule: Schedule) -> Shape:
        rows, patches, sides = self._patch(schedule)
        chunks, stages, block_n = schedule["chunks"], schedule["stages"], schedule["block_n"]
        consumers = schedule["consumers"]
        taps, image = math.prod(self.windows.kernel), math.prod(sides) * chunks * 16
        weights = pad_to(taps * chunks * block_n * 16, 1024)
        images = consumers * stages * pad_to(image, 1024)
        steps, atoms, of_atom = self._steps(schedule)
        all_weights = atoms * pad_to(taps * of_atom * block_n * 16, 1024)
        kept = all_weights + images + _barriers(schedule, atoms, keeps=True)
        # A product's channels lie in one atom.
        starts = itertools.accumulate(piece.channels for piece in self._pieces[:-1])
        keeps = kept <= self.target.smem_per_block and not any(start % 16 for start in starts)
        units = patches if keeps else -(-patches // consumers)
        streamed = stages * weights + images + _barriers(schedule, 0, keeps=False)
        smem = kept if keeps else streamed
        across = -(-self.problem.columns // block_n)
        room = max(1, self.target.sm_count // (across * self.problem.batch))
        return Shape(
            rows,
            patches,
            image,
            all_weights if keeps else weights,
            keeps,
            steps,
            smem,
            128 * (consumers + 1),
            self._registers(schedule),
            1,
            (-(-units // -(-units // room)), across, self.problem.batch),
        )

    def _steps(self, schedule: Schedule) -> tuple[int, int, int]:
        """Steps of a patch, atoms of weights that stay, and chunks of each."""
        of_step = schedule["chunks"] * self.chunk
        steps, start, end = 0, 0, 0
        for piece in self._pieces:
            parts = -(-piece.channels // of_step)
            end = max(end, start + parts * of_step)
            steps, start = steps + parts, start + piece.channels
        chunks = min(8, max(schedule["chunks"], 1 << (self.chunks - 1).bit_length()))
        return steps, -(-end // (chunks * self.chunk)), chunks

    def _atom_chunks(self, schedule: Schedule, shape: Shape) -> int:
        """Of a row of weights."""
        *_, of_atom = self._steps(schedule)
        return of_atom if shape.keeps_weights else schedule["chunks"]

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        shape, consumers = self._shape(schedule), schedule["consumers"]
        sharers = 1 if shape.keeps_weights else consumers
        rounds = -(-shape.patches // (sharers * shape.grid[0]))
        steps = rounds * shape.steps
        weights = shape.weights * (1 if shape.keeps_weights else steps)
        filled = steps * sharers * shape.image + weights
        chunks = steps * sharers * math.prod(self.windows.kernel) * schedule["chunks"]
        tiles, runs, held = self._lines(schedule)
        asked = _requests(steps * sharers * shape.image, schedule["chunks"])
        asked += _requests(weights, self._atom_chunks(schedule, shape))
        read = runs * held * WGMMA_ROWS / self._together + tiles * schedule["block_n"]
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=steps,
            stages=schedule["stages"] * (consumers if shape.keeps_weights else 1),
            mma_flops=2 * shape.rows * schedule["block_n"] * chunks * self.chunk,
            tile_p=schedule["block_n"],
            tile_q=shape.rows * sharers,
            split=1,
            registers=shape.registers,
            tiles=rounds,
            consumers=consumers if shape.keeps_weights else 1,
            warps=max(
                1,
                timing.MULTIPLYING_WARPS * consumers * tiles * schedule["block_n"] // BUSY_COLUMNS,
            ),
            operand_bytes=int(chunks * read * 16),
            requests=int(asked),
            writers=timing.WARPGROUP * sharers,
            image=int(self.image),
            narrow=8 // self._width(schedule) - 1,
        )

    def _kernel(self, schedule: Schedule, shape: Shape, region: Region) -> Kernel:
        struct, template = self.problem.windows
        more = MoreMaps(len(self._pieces) - 1)
        first = "const __grid_constant__ ptx::TensorMap"
        _, atoms, _ = self._steps(schedule) if shape.keeps_weights else (0, 0, 0)
        of_atom = self._atom_chunks(schedule, shape)
        barriers = _barriers(schedule, atoms, keeps=shape.keeps_weights)
        config = f"""  static constexpr int WEIGHT_CHUNKS = {of_atom}, ATOMS = {atoms};
  static constexpr int CONSUMERS = {schedule["consumers"]};
  static constexpr int WIDTH = {self._width(schedule)}, BARRIERS_AT = {shape.smem - barriers};
  static constexpr bool B_CONSTANT = {str(self.problem.b.constant).lower()};
"""
        image, *others = (self._image_map(piece, schedule) for piece in self._pieces)
        return Kernel(
            config,
            struct,
            template,
            f"{first} image_map,\n            {first} weights_map, {more.declarations}",
            "image_map, weights_map",
            (image, self._weights_map(schedule, of_atom), *others),
            more.argument,
        )

    def _image_map(self, piece: WindowOperand, schedule: Schedule) -> TensorMapArgument:
        """Of a patch's pixels of a step's channels."""
        *_, sides = self._patch(schedule)
        sizes, box = [piece.layout.shape[-1]], [schedule["chunks"] * self.chunk]
        strides, whole = [], sizes[0]
        dims = list(zip(piece.layout.dims[:-1], piece.layout.shape[:-1], (1, *sides), strict=True))
        if piece.axes == 2:  # an image is a volume of one frame
            dims.insert(1, ((), 1, 1))
        for axis, size, side in reversed(dims):
            strides.append(single_stride(axis) or whole)
            whole = strides[-1] * size
            sizes.append(size)
            box.append(side)
        return TensorMapArgument(
            piece.base,
            piece.layout.offset,
            self.problem.dtype,
            tuple(sizes),
            tuple(strides),
            tuple(box),
            swizzle_bytes=schedule["chunks"] * 16,
        )

    def _weights_map(self, schedule: Schedule, chunks: int) -> TensorMapArgument:
        """Of so many chunks of channels of columns and taps; of 32 columns, where a lane has eight
        side by side: 8 t + 2 j + e comes as 8 j + 2 t + e."""
        problem, taps = self.problem, math.prod(self.windows.kernel)
        channels, columns, block_n = self.chunks * self.chunk, problem.columns, schedule["block_n"]
        row = single_stride(problem.b.layout.dims[1]) or problem.k
        columns *= problem.batch
        sizes: tuple[int, ...] = (columns,)
        strides: tuple[int, ...] = (row,)
        box: tuple[int, ...] = (block_n,)
        if self._width(schedule) == 8:
            sizes, strides, box = (2, columns // 8, 4), (row, 8 * row, 2 * row), (2, 4, 4)
        return TensorMapArgument(
            problem.b.base,
            problem.b.layout.offset,
            problem.dtype,
            (channels, *sizes, taps),
            (*strides, channels),
            (chunks * self.chunk, *box, taps if math.prod(box) == block_n else 1),
            swizzle_bytes=chunks * 16,
        )


def _barriers(schedule: Schedule, atoms: int, *, keeps: bool) -> int:
    """Bytes of them: two a stage of each ring, and one for each of so many atoms that stay."""
    rings = schedule["consumers"] if keeps else 1
    return 16 * schedule["stages"] * rings + 8 * atoms


def _requests(nbytes: int, chunks: int) -> float:
    """What the copy engine asks for in rows of so many chunks, in requests of a warp's loads: of
    each row a third of one, and the row at half of what L2 gives to one multiprocessor."""
    return nbytes / (16 * chunks) * (ROW_REQUESTS + 16 * chunks / BYTES_OF_REQUEST)
