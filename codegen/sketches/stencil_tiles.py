"""Depthwise convolution of tiles of pixels in shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gtco.codegen import timing
from gtco.codegen.emit import declared
from gtco.codegen.program import KernelProgram, Pointer
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Knob, Schedule, check
from gtco.codegen.sketches.gemm import pad_to
from gtco.codegen.sketches.stencil import Stencil, lanes_of_chunks
from gtco.codegen.tile_loads import SECTOR
from gtco.ir.graph import Group
from gtco.ir.references import STATS_CHUNK
from gtco.target import Target

VECTOR = 2
"""Channels of a thread: what 32 lanes read of a pixel are two or four sectors."""
MOST_SUMS = 64
"""Of a thread; its row of pixels and its addresses take as many registers again."""
MOST_CHANNELS = 128
"""Of a block."""
LOAD_INSTRUCTIONS = 1
"""For each vector of pixels that a thread loads from shared memory and makes fp32."""
COPY_INSTRUCTIONS = 3
"""For each 16 bytes that it copies there."""
STORE_INSTRUCTIONS = 19
"""For each vector that it stores."""
ITEM_INSTRUCTIONS = 160
"""For each strip of a thread."""
SCHEDULERS = 4
"""Of a multiprocessor: so many instructions are issued while shared memory answers one load."""
LOOKED_AT = 256
"""Items of a block whose loads from shared memory are gone through bank by bank."""
STATS_INSTRUCTIONS = 50
"""For each of these, of row statistics."""


@dataclass(frozen=True)
class _Tile:
    """What a block of one schedule does: results down and across, pixels likewise, items of work,
    lines and pixels of each that a thread reads for one, and blocks of the grid."""

    height: int
    width: int
    high: int
    wide: int
    items: int
    lines: int
    span: int
    blocks: int


class StencilTiles(Stencil):
    """A block has a tile of results of some channels; a thread two channels of a few of them."""

    name: ClassVar[str] = "stencil_tiles"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1
    boxes: ClassVar[bool] = True

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        check(len(self.windowed) == 1, f"{len(self.windowed)} ops with windows, of one")
        (self.one,) = self.windowed
        image = self.one.image
        check(self.one.anchor.definition.window is None, f"{self.one.anchor.op} has no weights")
        check(image.axes == 2, "windows of volumes")
        check(
            not any(node.op == "concat" for node in group.compute), "pieces of a concat are copied"
        )
        self.chunk = 16 // self.dtype.itemsize
        run = image.layout.vector(self.chunk, 3)
        whole = run == self.chunk and self.one.columns % run == 0
        check(whole, f"the image {image.layout} is not in runs of 16 bytes")
        check(self.vector >= VECTOR, "the epilogue takes channels one by one")
        self._tile_of = functools.cache(self._make_tile)
        check(any(self._legal()), "no tile fits the shared memory and, of boxes, is whole ones")

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("channels", self._channels),
            Knob("rows", (1, 2, 4)),
            Knob("strip", (4, 5, 7, 8), range(1, 17)),
            Knob("down", (1, 2, 4, 7, 8, 14)),
            Knob("across", (1, 2, 4, 8)),
            Knob("threads", (128, 256)),
        )

    @property
    def _channels(self) -> tuple[int, ...]:
        """Even shares of all, in whole chunks of 16 bytes, and of row statistics."""
        columns, step = self.one.columns, STATS_CHUNK if self.one.stats else self.chunk
        least = min(columns, 2 * SECTOR // self.dtype.itemsize)
        shares = {
            columns // parts
            for parts in range(1, columns // step + 1)
            if columns % parts == 0 and columns // parts % step == 0
        } | {columns}
        return tuple(
            sorted(share for share in shares if least <= share <= max(MOST_CHANNELS, min(shares)))
        )

    def _tile(self, schedule: Schedule) -> _Tile:
        channels, rows, strip = (schedule[name] for name in ("channels", "rows", "strip"))
        return self._tile_of(channels, rows, strip, schedule["down"], schedule["across"])

    def _make_tile(
        self, channels: int, rows: int, strip: int, steps_down: int, steps_across: int
    ) -> _Tile:
        image = self.one.image
        height, width = rows * steps_down, strip * steps_across
        reach = [
            (size - 1) * dilation
            for size, dilation in zip(image.kernel, image.dilation, strict=True)
        ]
        high, wide, lines, span = (
            (count - 1) * image.stride[axis] + reach[axis] + 1
            for count, axis in ((height, 0), (width, 1), (rows, 0), (strip, 1))
        )
        vectors = lanes_of_chunks(channels, VECTOR) if self.one.stats else channels // VECTOR
        down, across = image.out
        tiles = -(-down // height) * -(-across // width) * image.layout.shape[0]
        items = steps_down * steps_across * vectors
        blocks = tiles * (self.one.columns // channels)
        return _Tile(height, width, high, wide, items, lines, span, blocks)

    def _smem(self, schedule: Schedule) -> tuple[int, int, int]:
        """Where the weights begin and, of boxes, the sums of each strip; and bytes in all."""
        tile, channels = self._tile(schedule), schedule["channels"]
        at = tile.high * tile.wide * channels * self.dtype.itemsize
        sums_at = at + self._taps * channels * 4
        strips = schedule["down"] * schedule["across"] if self.one.box is not None else 0
        return at, sums_at, sums_at + strips * channels * 4

    def _registers(self, schedule: Schedule) -> int:
        """Of a thread, about."""
        sums = schedule["rows"] * schedule["strip"]
        return min(255, VECTOR * (sums + self._tile(schedule).span) + 24)

    def _refusal(self, schedule: Schedule) -> str | None:
        sums = schedule["rows"] * schedule["strip"] * VECTOR
        if sums > MOST_SUMS:
            return f"{sums} sums a thread, of {MOST_SUMS}"
        registers = self._registers(schedule)
        if registers > timing.most_registers(schedule["threads"]):
            return f"about {registers} registers a thread"
        tile, (down, across) = self._tile(schedule), self.one.image.out
        if (tile.height >= 2 * down and schedule["down"] > 1) or (
            tile.width >= 2 * across and schedule["across"] > 1
        ):
            return f"a tile of {tile.height} x {tile.width} is twice the {down} x {across} results"
        if self.one.box is not None:
            sides = zip(self.one.box, (tile.height, tile.width), ("rows", "strip"), strict=True)
            for box, side, knob in sides:
                if side % box or box % schedule[knob]:
                    return f"a tile of {tile.height} x {tile.width} is no boxes of {self.one.box}"
        smem, limit = self._smem(schedule)[-1], self.target.smem_per_block
        return None if smem <= limit else f"shared memory {smem} B, of {limit} B a block"

    def _legal(self) -> Iterator[Schedule]:
        return (schedule for schedule in self.schedules() if self._refusal(schedule) is None)

    def defaults(self) -> Iterable[Schedule]:
        """All legal schedules, ordered by the formula of a kernel's time."""
        return sorted(self._legal(), key=self._cost)

    def _cost(self, schedule: Schedule) -> float:
        block, tile, threads = self._work(schedule), self._tile(schedule), schedule["threads"]
        resident = timing.resident_blocks(
            self._smem(schedule)[-1], threads, block.registers, self.target
        )
        together = min(-(-tile.blocks // self.target.sm_count), resident)
        flops_per_us = timing.fp32_per_us(together * threads, self.target)
        return timing.chain_us(
            block,
            tile.blocks,
            resident,
            self.target.fp32_tflops,
            self.target,
            pointwise_us=self._flops(schedule) / flops_per_us,
        )

    def _flops(self, schedule: Schedule) -> float:
        """Of a block, of the products with its weights, and what its instructions besides take."""
        products = self._items(schedule) * self._products(schedule)
        return timing.FLOPS_OF_INSTRUCTION * (products + self._instructions(schedule))

    def _items(self, schedule: Schedule) -> int:
        """Of a block, with those of idle threads of the last round."""
        return pad_to(self._tile(schedule).items, schedule["threads"])

    def _products(self, schedule: Schedule) -> int:
        """Of an item."""
        return schedule["rows"] * schedule["strip"] * VECTOR * self._taps

    def _instructions(self, schedule: Schedule) -> int:
        """Of a block's threads, beside products: loads from shared memory and what makes them
        fp32, copies and stores; or what shared memory takes, where that is longer."""
        tile, rows, strip = self._tile(schedule), schedule["rows"], schedule["strip"]
        products, loads = self._products(schedule), tile.lines * tile.span
        stored = rows * strip * (STORE_INSTRUCTIONS + self.one.stats * STATS_INSTRUCTIONS)
        issued = products + loads * LOAD_INSTRUCTIONS + stored + ITEM_INSTRUCTIONS
        weights = -(-min(32, schedule["channels"] // VECTOR) * VECTOR * 4 // timing.LINE)
        shared = loads * self._conflicts(schedule) + rows * self._taps * weights
        item = max(issued, SCHEDULERS * shared) - products
        copied = tile.high * tile.wide * schedule["channels"] // self.chunk
        return round(self._items(schedule) * item) + copied * COPY_INSTRUCTIONS

    def _conflicts(self, schedule: Schedule) -> float:
        """How often a warp's load of pixels is repeated, since lanes ask one bank of shared memory
        for different words: on average over the first warps."""
        channels, tile = schedule["channels"], self._tile(schedule)
        item = np.arange(min(LOOKED_AT, pad_to(tile.items, 32))).reshape(-1, 32)
        strip, vector = np.divmod(item, channels // VECTOR)
        down, right = np.divmod(strip, schedule["across"])
        stride = self.one.image.stride
        pixel = down * schedule["rows"] * stride[0] * tile.wide
        pixel += right * schedule["strip"] * stride[1]
        word = (pixel * channels + vector * VECTOR) * self.dtype.itemsize // 4
        return float(np.mean([_turns(each) for each in word]))

    @property
    def _taps(self) -> int:
        return self.one.image.kernel[0] * self.one.image.kernel[1]

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._work(program.schedule)

    def _work(self, schedule: Schedule) -> BlockWork:
        """Hardly anybody else reads what a block copies, so L2 gives it at half the rate of what
        all read (experiments/notes/14-shared_reads.md)."""
        tile, channels = self._tile(schedule), schedule["channels"]
        run = channels * self.dtype.itemsize
        apart = math.gcd(run, self.one.columns * self.dtype.itemsize, SECTOR)
        filled = 2 * tile.high * tile.wide * (run + SECTOR - apart)
        filled += self._taps * channels * self.dtype.itemsize
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=1,
            stages=1,
            mma_flops=0,
            tile_p=tile.height * tile.width,
            tile_q=channels,
            split=1,
            registers=self._registers(schedule),
            in_turns=1,
            instructions=self._instructions(schedule),
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        reason = self._refusal(schedule)
        check(reason is None, reason or "")
        parameters: dict[str, tuple[str, Pointer]] = {}
        region, emitter = self._write(self.one, VECTOR, parameters)
        base = region.parameter(self.one.image.base, "in")
        tap, given = self._tap(self.one, region)
        image, threads = self.one.image, schedule["threads"]
        images, height, width, columns = image.layout.shape
        weights_at, sums_at, smem = self._smem(schedule)
        functor = emitter.functor("Epilogue", "acc")
        boxes = ""
        if self.one.box is not None:
            down, across = self.one.box
            boxes = (
                f"  static constexpr int BOX_H = {down}, BOX_W = {across}, SUMS_AT = {sums_at};\n"
            )
        names = ", ".join(parameters)
        source = f"""#include "stencil_tiles.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[self.dtype]};
{image.fields}
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};
  static constexpr int COLUMNS = {columns}, SLICE = {schedule["channels"]}, V = {VECTOR};
  static constexpr int ROWS = {schedule["rows"]}, STRIP = {schedule["strip"]};
  static constexpr int DOWN = {schedule["down"]}, ACROSS = {schedule["across"]};
  static constexpr int THREADS = {threads}, WEIGHTS_AT = {weights_at};
{boxes}}};

{self._image_struct(self.one)}
{tap}
{functor}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declared(parameters)}) {{
  stencil_tiles<Config>(Image{{{base}}}, Tap{{{given}}}, Epilogue{{{names}}});
}}
"""
        tile, parts = self._tile(schedule), columns // schedule["channels"]
        return self.program(
            schedule,
            source,
            (tile.blocks // parts, parts, 1),
            threads,
            smem,
            (argument for _, argument in parameters.values()),
        )


def _turns(words: np.ndarray) -> int:
    """How often a bank of shared memory is asked for one of these words of 4 bytes that it has."""
    return int(np.bincount(np.unique(words) % 32).max())
