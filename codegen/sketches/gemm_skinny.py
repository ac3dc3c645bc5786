"""GEMM of 1 to 8 rows on `mma.sync` with operands in registers: any architecture, 16-bit types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import analyse, pad_to
from gtco.codegen.sketches.operands import operand_text
from gtco.ir.graph import Group
from gtco.ir.spec import HALVES
from gtco.target import Target

MOST_ROWS = 8
"""Of all products together: mma's N side."""
CHUNK = 32
"""Elements of K that a warp takes at a time."""
WEIGHT_REGISTERS = 128
"""Most registers of a thread that hold weights."""
OTHER_REGISTERS = 16
"""A thread's registers besides its operands and sums, about."""
RING_REGISTERS = 12
"""More of them where chunks are asked for between products."""
VECTOR = 2
"""Most columns of one call of the epilogue: there are so few results that more threads share it."""
PRODUCT_US = 0.01
"""A warp's product after the tokens have come."""
PART_US = 0.003
"""Adding one warp's sums."""


class GemmSkinny(Sketch):
    """The weights go straight to registers, ahead of the dependent-launch wait.

    The warps of a block share K, and so do the `split` blocks of a cluster; `ahead` of a warp's
    chunks are on their way at a time.
    """

    name: ClassVar[str] = "gemm_skinny"
    family: ClassVar[str] = "gemm"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self.problem = problem = analyse(group)
        dtype = problem.dtype
        check(dtype in HALVES, f"mma.sync m16n8k16 takes no {dtype}")
        rows = problem.batch * problem.rows
        check(rows <= MOST_ROWS, f"{rows} rows, of {MOST_ROWS} at most")
        check(problem.batch == 1, f"{problem.batch} products, each of other weights")
        for label, operand in (("A", problem.plain_a), ("B", problem.b)):
            check(
                operand.layout.vector(8, 2) == 8,
                f"operand {label} {operand.layout} is not read by 16 bytes along K",
            )
        self.row_fields = len(problem.epilogue(problem.region(VECTOR)).row_fields)

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("columns", (16, 32, 64, 128)),
            Knob("warps", (1, 2, 3, 4, 6, 8, 12, 15)),
            Knob("split", (1, 2, 3, 4, 6, 8)),
            Knob("ahead", (1, 2, 3, 4, 6)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """All schedules, ordered by a small model."""
        return sorted(self._candidates(), key=self._cost)

    def _candidates(self) -> Iterator[Schedule]:
        for schedule in self.schedules():
            try:
                self._check(schedule)
            except Illegal:
                continue
            yield schedule

    def _cost(self, schedule: Schedule) -> float:
        """Microseconds, roughly; the epilogue's arithmetic is the same for all."""
        columns, split, target = schedule["columns"], schedule["split"], self.target
        block = self._block_work(schedule)
        threads = _threads(schedule)
        resident = timing.resident_blocks(
            self._barrier_at(schedule), threads, block.registers, target
        )
        rate = target.matmul_tflops * target.constants.mma_efficiency[self.name]
        blocks = -(-self.problem.columns // columns) * split
        products = columns // 16 * 2 * schedule["ahead"]
        tail_us = PRODUCT_US * products + PART_US * schedule["warps"]
        return timing.chain_us(block, blocks, resident, rate, target, cluster=split) + tail_us

    def _steps(self, schedule: Schedule) -> int:
        """Chunks of a warp."""
        return -(-self.problem.k // (CHUNK * schedule["warps"] * schedule["split"]))

    def _row_values_at(self, schedule: Schedule) -> int:
        """Bytes of the sums of the block's warps and of the cluster's other blocks."""
        parts = schedule["warps"] + schedule["split"] - 1
        return pad_to(parts * self.problem.rows * _stage_ld(schedule) * 4, 16)

    def _barrier_at(self, schedule: Schedule) -> int:
        return self._row_values_at(schedule) + pad_to(self.problem.rows * 4 * self.row_fields, 16)

    def _check(self, schedule: Schedule) -> None:
        columns, warps, split = schedule["columns"], schedule["warps"], schedule["split"]
        check(split == 1 or self.target.has_wgmma, f"{self.target.arch} has no clusters")
        self.problem.check_stats(columns, "block")
        chunks = -(-self.problem.k // CHUNK)
        check(
            warps * split <= chunks,
            f"{warps * split} warps share the {chunks} chunks of K",
        )
        ahead, steps = schedule["ahead"], self._steps(schedule)
        check(ahead <= steps, f"{ahead} chunks ahead, a warp has {steps}")
        weights = _weight_registers(schedule)
        check(
            weights <= WEIGHT_REGISTERS,
            f"{weights} registers of weights a thread, of {WEIGHT_REGISTERS}",
        )
        registers = self._block_work(schedule).registers
        most = min(240, _most_registers(_threads(schedule)))
        check(registers <= most, f"about {registers} registers a thread, of {most}")
        self.check_smem(self._barrier_at(schedule) + 8)

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        columns, rows = schedule["columns"], self.problem.rows
        ahead, steps = schedule["ahead"], self._steps(schedule)
        whole = ahead == steps
        k = steps * schedule["warps"] * CHUNK
        filled = (columns + rows) * k * self.problem.dtype.itemsize
        operands = _weight_registers(schedule) + 4 * ahead
        more = 0 if whole else operands // 4 + RING_REGISTERS
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=1 if whole else steps,
            stages=1 if whole else ahead,
            mma_flops=2 * MOST_ROWS * columns * k,
            tile_p=rows,
            tile_q=columns,
            split=schedule["split"],
            registers=operands + columns // 4 + OTHER_REGISTERS + more,
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        problem = self.problem
        columns, split = schedule["columns"], schedule["split"]
        region = problem.region(VECTOR)
        emitter = problem.epilogue(region)
        operands = {"A": problem.plain_a, "B": problem.b}
        inputs = {label: region.parameter(each.base, "in") for label, each in operands.items()}
        dtype = problem.dtype
        texts = [
            operand_text(label, each, dtype, inputs[label]) for label, each in operands.items()
        ]
        functor = emitter.functor("Epilogue", "acc")
        threads, barrier_at = _threads(schedule), self._barrier_at(schedule)
        # Where two fit, the next kernel's weights come beside this one's end.
        registers = self._block_work(schedule).registers
        blocks_per_sm = 2 if registers <= _most_registers(2 * threads) else 1
        names = ", ".join(region.parameters)
        source = f"""#include "gemm_skinny.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[problem.dtype]};
  static constexpr int ROWS = {problem.rows}, COLUMNS = {problem.columns}, K = {problem.k};
  static constexpr int BLOCK_COLUMNS = {columns}, WARPS = {schedule["warps"]}, SPLIT = {split};
  static constexpr int AHEAD = {schedule["ahead"]}, STAGE_LD = {_stage_ld(schedule)};
  static constexpr int ROW_VALUES_AT = {self._row_values_at(schedule)};
  static constexpr int BARRIER_AT = {barrier_at};
}};

{texts[0]}
{texts[1]}
{functor}
extern "C" __global__ void __launch_bounds__({threads}, {blocks_per_sm})
ENTRY_POINT({region.declarations}) {{
  gemm_skinny<Config>(A{{{inputs["A"]}}}, B{{{inputs["B"]}}}, Epilogue{{{names}}});
}}
"""
        return self.program(
            schedule,
            source,
            (-(-problem.columns // columns) * split, 1, 1),
            threads,
            barrier_at + 8,
            (argument for _, argument in region.parameters.values()),
            (split, 1, 1),
        )


def _threads(schedule: Schedule) -> int:
    """Of a block: one warp more opens the inbox and gathers row values."""
    return 32 * (schedule["warps"] + 1)


def _most_registers(threads: int) -> int:
    """Of a thread, where so many share a multiprocessor; they are given out by eights."""
    return timing.most_registers(threads) // 8 * 8


def _stage_ld(schedule: Schedule) -> int:
    """Row pitch of a warp's sums in floats: what its lanes store meets no bank twice."""
    return schedule["columns"] + 4


def _weight_registers(schedule: Schedule) -> int:
    """Of a thread."""
    return schedule["columns"] // 16 * 8 * schedule["ahead"]
