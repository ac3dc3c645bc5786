"""GEMM on `mma.sync` fed by `cp.async`: any architecture and strided operand; fp8, 16 bits, tf32
and fp32, which is three products of tf32."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Knob, Schedule, Sketch, check, launched
from gtco.codegen.sketches.gemm import (
    EXACT,
    GROUPED,
    analyse,
    check_products,
    is_exact,
    pad_to,
)
from gtco.codegen.sketches.operands import Operand, operand_text, pointers
from gtco.codegen.sketches.windows import WindowOperand
from gtco.ir.graph import Group
from gtco.target import Target

FEW_BLOCKS = 4
"""Of a multiprocessor, which hide little of each other."""
NARROW_COPY = 4
"""Bytes of the narrowest copy; a tile is so few of wider ones that what computes their places does
not count."""
COPY_INSTRUCTIONS = 40
"""Of one of these, of a row of a matrix."""
TAP_INSTRUCTIONS = 100
"""Of one of a window, whose tap and channel are told apart: 4 bytes each, the stems of RAFT and
ResNet-50 in tf32 took 180 and 17 us."""
GATHER_INSTRUCTIONS = 20
"""Of an element of two bytes that no copy takes."""
GATHERED_LOADS = 4
"""Whose time it takes to wait for the elements of a step that come through registers."""


class GemmMma(Sketch):
    """CTA tile -> warp tile -> m16n8k16 (fp8 k32, floats k8), a cp.async ring, staged stores."""

    name: ClassVar[str] = "gemm_mma"
    family: ClassVar[str] = "gemm"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1
    ring: ClassVar[frozenset[str]] = frozenset({"stages"})

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self.problem = analyse(group, scales=True, joins=True)
        if self.problem.scale is not None:
            check(self.problem.scale.operand.k_major, "the factors of a row lie apart")
        check_products(self.problem.anchor, self.problem.dtype, target, exact=True)
        self.exact = is_exact(self.problem.anchor, self.problem.dtype)
        self.problem.epilogue(self.problem.region())

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("block_m", (16, 32, 64, 128)),
            Knob("block_n", (32, 64, 128, 256)),
            Knob("block_k", (64, 128) if self.problem.dtype.itemsize == 1 else (32, 64)),
            Knob("warps_m", (1, 2, 4)),
            Knob("warps_n", (1, 2, 4)),
            Knob("stages", (2, 3, 4)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """Larger tiles where they fill the chip, smaller ones where they would not."""
        problem = self.problem
        largest = (128, 128, 2, 4 if self.exact else 2)  # whose sums have two parts
        shapes = [largest, (64, 128, 2, 2), (64, 64, 2, 2), (32, 64, 2, 2), (16, 64, 1, 4)]
        if problem.columns <= 32:  # as of a convolution in groups
            shapes[:0] = [(128, 32, 4, 1), (64, 32, 2, 2), (32, 32, 2, 2)]
        sides = (problem.a.k_major, problem.b.k_major)  # else transposed, 64 at a time
        shapes = [
            shape
            for shape in shapes
            if all(major or side % 64 == 0 for major, side in zip(sides, shape[:2], strict=True))
        ]

        def waste(shape: tuple[int, int, int, int]) -> float:
            m, n, *_ = shape
            tiles = problem.batch * -(-problem.rows // m) * -(-problem.columns // n)
            waves = -(-tiles // self.target.sm_count)
            return float(waves * (m * n / min(1.0, (m * n) ** 0.5 / 90) + 1000))

        for m, n, warps_m, warps_n in sorted(shapes, key=waste):
            narrow, unit = problem.dtype.itemsize <= 2, 64 if problem.dtype.itemsize == 1 else 32
            wide = narrow and problem.k >= 2 * unit and m * n <= 64 * 128
            block_k = 2 * unit if wide else unit
            stages = 4 if m * n < 128 * 128 or (narrow and not wide) else 3
            yield {
                "block_m": m,
                "block_n": n,
                "block_k": block_k,
                "warps_m": warps_m,
                "warps_n": warps_n,
                "stages": stages,
            }

    def block_work(self, program: KernelProgram) -> BlockWork:
        schedule = program.schedule
        m, n, k = schedule["block_m"], schedule["block_n"], schedule["block_k"]
        warps, parts = schedule["warps_m"] * schedule["warps_n"], 1 + self.exact
        steps = -(-self.problem.k // k)
        scale = self.problem.scale
        rows = m + n + (0 if scale is None else scale.most(m))
        filled = steps * rows * k * self.problem.dtype.itemsize
        registers = min(255, parts * (m * n // (warps * 32) + (m + n) * k // (warps * 64)) + 40)
        threads = warps * 32
        resident = timing.resident_blocks(program.smem_bytes, threads, registers, self.target)
        blocks = math.prod(program.grid)
        waves = timing.in_waves(blocks, resident, self.target)
        few = self.problem.taps > 1 and blocks <= FEW_BLOCKS * self.target.sm_count
        narrow = self._narrow(self.problem.a, m * k), self._narrow(self.problem.b, n * k)
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=steps,
            stages=schedule["stages"],
            mma_flops=2 * m * n * k * steps,
            tile_p=m,
            tile_q=n,
            split=1,
            registers=registers,
            scales=int(scale is not None),
            writers=threads if waves else 0,
            window_steps=steps if few else 0,
            instructions=steps * sum(count for count, _ in narrow),
            awaited=steps * GATHERED_LOADS * any(gathered for _, gathered in narrow),
        )

    def _narrow(self, operand: Operand, elements: int) -> tuple[int, bool]:
        """(instructions, whether they come through registers) for so many elements of a tile where
        no wide copy takes them."""
        dtype = self.problem.dtype
        vector = operand.copied(dtype)
        nbytes = vector * dtype.itemsize
        if nbytes > NARROW_COPY:
            return 0, False
        if nbytes < NARROW_COPY:
            return GATHER_INSTRUCTIONS * elements, True
        windows = isinstance(operand, WindowOperand)
        each = TAP_INSTRUCTIONS if windows else COPY_INSTRUCTIONS
        return each * elements // vector, False

    def _emit(self, schedule: Schedule) -> KernelProgram:
        problem = self.problem
        m, n, k = schedule["block_m"], schedule["block_n"], schedule["block_k"]
        warps_m, warps_n = schedule["warps_m"], schedule["warps_n"]
        stages = schedule["stages"]
        check(m % (16 * warps_m) == 0, f"{m} rows over {warps_m} warps is no multiple of 16")
        check(n % (16 * warps_n) == 0, f"{n} columns over {warps_n} warps is no multiple of 16")
        accumulators = (1 + self.exact) * m * n // (warps_m * warps_n * 32)
        check(accumulators <= 128, f"{accumulators} accumulators a thread leave no registers")
        check(m * n >= 256 * warps_m * warps_n, "a warp has less than one pair of mma tiles")
        problem.check_stats(n, "tile")
        region = problem.region()
        emitter = problem.epilogue(region)
        operands = {
            "A": (problem.a, m, "block_m"),
            "B": (problem.b, n, "block_n"),
        }
        texts = []
        for label, (operand, extent, knob) in operands.items():
            major = operand.k_major
            check(
                major or extent % 64 == 0, f"{knob} {extent}: a transposed tile spans 64 elements"
            )
            check(major or problem.dtype.itemsize > 1, "no instruction transposes tiles of 8 bits")
            texts.append(operand_text(label, operand, problem.dtype, pointers(operand, region)))
        scaling, scale_rows, handed = "", 0, ""
        if (scale := problem.scale) is not None:
            scale_rows = scale.most(m)
            parameter = region.parameter(scale.operand.base, "in")
            texts.append(operand_text("Scale", scale.operand, problem.dtype, parameter))
            scaling = (
                f"  static constexpr int GROUPS = {scale.operand.layout.shape[1]}, "
                f"GROUP_ROWS = {scale.rows}, SCALE_ROWS = {scale_rows};\n"
            )
            handed = f", Scale{{{parameter}}}"
        functor = emitter.functor("Epilogue", "acc")
        stage_ld = n + 8
        slots = min(stages, -(-problem.k // k))
        ring = slots * (m + n + scale_rows) * k * problem.dtype.itemsize
        row_values_at = pad_to(max(ring, m * stage_ld * 4), 16)
        smem = row_values_at + m * 4 * len(emitter.row_fields)
        self.check_smem(smem)
        names, newline = ", ".join(region.parameters), "\n"
        blocks = (-(-problem.columns // n), -(-problem.rows // m), problem.batch)
        grid, axis = launched(blocks)
        source = f"""#include "gemm_mma.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[problem.dtype]};
  static constexpr int M = {problem.rows}, N = {problem.columns}, K = {problem.k};
  static constexpr int BLOCK_M = {m}, BLOCK_N = {n}, BLOCK_K = {k};
  static constexpr int WARPS_M = {warps_m}, WARPS_N = {warps_n}, STAGES = {stages};
  static constexpr int STAGE_LD = {stage_ld}, ROW_VALUES_AT = {row_values_at};
{EXACT if self.exact else ""}{GROUPED if problem.grouped else ""}{scaling}{axis}}};

{newline.join(texts)}
{functor}
extern "C" __global__ void __launch_bounds__({warps_m * warps_n * 32})
ENTRY_POINT({region.declarations}) {{
  gemm_mma<Config>(A{{{pointers(problem.a, region)}}},
                   B{{{pointers(problem.b, region)}}}, Epilogue{{{names}}}{handed});
}}
"""
        return self.program(
            schedule,
            source,
            grid,
            warps_m * warps_n * 32,
            smem,
            (argument for _, argument in region.parameters.values()),
        )
