"""Convolution of patches on `mma.sync`, on all targets and of all types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.emit import Region
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import BlockWork, Knob, Schedule, check
from gtco.codegen.sketches.conv_patches import ConvPatches, Kernel, Shape, width_of
from gtco.codegen.sketches.gemm import pad_to
from gtco.codegen.sketches.operands import operand_text, pointers


class ConvMma(ConvPatches):
    """Patch with its border in planes of 16 bytes -> ldmatrix -> m16n8k16 (fp8 k32, floats k8);
    threads copy stages of channels, or of patches whose weights stay."""

    name: ClassVar[str] = "conv_mma"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 1
    patches = ((1, 8, 8), (1, 8, 16), (1, 16, 8), (1, 16, 16), (1, 32, 8), (1, 16, 32), (2, 4, 8),
               (2, 8, 8), (4, 4, 8), (4, 8, 8), (2, 8, 16), (8, 8, 8))  # fmt: skip

    def knobs(self) -> tuple[Knob, ...]:
        volume = self.windows.axes == 3
        return (
            Knob("tile_t", (1, 2, 4, 8) if volume else (1,)),
            Knob("tile_h", (4, 8, 16, 32)),
            Knob("tile_w", (8, 16, 32)),
            Knob("block_n", (16, 32, 64, 128)),
            Knob("chunks", (1, 2, 4, 8)),
            Knob("warps_m", (1, 2, 4, 8)),
            Knob("warps_n", (1, 2)),
            Knob("stages", (1, 2, 3)),
        )

    def _check_operands(self) -> None:
        """All that the base takes."""

    def _part(self, schedule: Schedule) -> int:
        _, columns = self._warp(schedule)
        return columns

    def _choices(self, rows: int, columns: int) -> Iterator[Schedule]:
        wide = max(1, columns // 64)
        for chunks, stages, tall in itertools.product(self._some_chunks, (1, 2), (16, 32, 64)):
            yield {"chunks": chunks, "warps_m": rows // tall, "warps_n": wide, "stages": stages}

    def _shape(self, schedule: Schedule) -> Shape:
        windows, target = self.windows, self.target
        rows, patches, sides = self._patch(schedule)
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
        return Shape(
            rows,
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
        check(rows >= 16 and rows % 16 == 0, f"{rows} rows a warp are no multiple of 16")
        check(columns >= 16, f"{columns} columns a warp are less than a pair of mma tiles")
        accumulators = (1 + self.exact) * rows * columns // 32
        threads = schedule["warps_m"] * schedule["warps_n"] * 32
        most = min(128, timing.most_registers(threads) // 2)
        check(accumulators <= most, f"{accumulators} accumulators a thread leave no registers")
        super()._check(schedule)
        alone = schedule["stages"] == 1 and self._shape(schedule).resident == 1
        check(not alone, "one block a multiprocessor, which copies nothing while it multiplies")

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        shape = self._shape(schedule)
        rounds = -(-shape.patches // shape.grid[0])
        weights = shape.weights * (1 if shape.keeps_weights else rounds * shape.steps)
        filled = rounds * shape.steps * shape.image + weights
        chunks = rounds * shape.steps * math.prod(self.windows.kernel) * schedule["chunks"]
        rows, columns = self._warp(schedule)
        warps = schedule["warps_m"] * schedule["warps_n"]
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
            warps=warps,
            operand_bytes=warps * chunks * (rows + columns) * 16,
        )

    def _kernel(self, schedule: Schedule, shape: Shape, region: Region) -> Kernel:
        problem, texts, given = self.problem, [], []
        for label, operand in (("A", problem.a), ("B", problem.b)):
            parameters = pointers(operand, region)
            texts.append(operand_text(label, operand, problem.dtype, parameters))
            given.append(f"{label}{{{parameters}}}")
        config = f"""  static constexpr int WARPS_M = {schedule["warps_m"]};
  static constexpr int WARPS_N = {schedule["warps_n"]};
  static constexpr int WIDTH = {width_of(self._part(schedule))};
"""
        return Kernel(config, "\n".join(texts), "", "", ", ".join(given))
