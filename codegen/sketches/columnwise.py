"""Reductions of columns that lie side by side in memory, with pointwise nodes around."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.columns import ColumnEmitter, Columns, column_spaces
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.tile_loads import SECTOR
from gtco.ir.graph import Group
from gtco.ir.ops import Pattern
from gtco.passes.frames import reduced
from gtco.target import Target

MAX_VALUES = 64
"""Elements under way that a thread keeps in registers."""
MOST_LANES = 64
"""Threads side by side."""
FLOPS = 4
"""Of an element: its distance from the first one of its column, added, squared and added."""


class Columnwise(Sketch):
    """Neighbouring threads have neighbouring vectors of columns and walk down the rows, a few of
    them at a time; threads below each other meet at the end.

    Pixels of images with channels last are such rows: what `rowwise` would read two bytes at a time
    is read as wide as the channels allow. Only what is reduced stays in registers, so that the
    points of a row are read once, and rows may be of any length.
    """

    name: ClassVar[str] = "columnwise"
    family: ClassVar[str] = "rowwise"
    version: ClassVar[int] = 3
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        reductions = [node for node in group.compute if node.pattern is Pattern.REDUCTION]
        check(len(reductions) == 1, f"{len(reductions)} reductions do not walk the columns once")
        (node,) = reductions
        row = node.definition.row
        self.moments = node.op in ("group_stats", "box_moments", "merge_moments")
        in_parts = self.moments or (row is not None and row.in_parts)
        check(in_parts, f"{node.op} takes whole rows, or none")
        full, dims = reduced(node, group.graph.specs[node.inputs[0]].sizes)
        self.space, self.vector = _best_space(group, column_spaces(full, dims))
        self.emitter = ColumnEmitter(group, self.space, self.vector)
        self.itemsize = max((itemsize for _, itemsize in self.emitter.reads), default=4)
        specs = (group.graph.specs[name] for name in group.graph.outputs)
        self.stored_bytes = sum(spec.nbytes for spec in specs if spec.numel == math.prod(full))

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("lanes", self._lanes),
            Knob("threads", (64, 128, 256, 512)),
            Knob("vectors", (1, 2, 4, 8, 16)),
        )

    @functools.cached_property
    def _lanes(self) -> tuple[int, ...]:
        """Threads side by side: a few powers of two, and even parts of a row. They have whole
        results, and as much as comes from memory together if a row has it."""
        vectors = self.space.columns // self.vector
        step = self.space.depth // math.gcd(self.space.depth, self.vector)
        least = min(vectors, -(-SECTOR // (self.vector * self.itemsize)))
        parts = {-(-vectors // parts) for parts in range(1, 9)} | {1, 2, 4, 8, 16, 32}
        found = {-(-max(part, least) // step) * step for part in parts}
        fitting = (lanes for lanes in found if lanes <= min(vectors, MOST_LANES))
        return tuple(sorted(fitting)) or (min(found),)

    def defaults(self) -> Iterable[Schedule]:
        """All legal schedules, ordered by the formula of a kernel's time."""
        legal = (each for each in self.schedules() if self._refusal(each) is None)
        return sorted(legal, key=self._cost)

    def _cost(self, schedule: Schedule) -> tuple[float, int]:
        block, blocks, threads = self._work(schedule), self._blocks(schedule), schedule["threads"]
        resident = timing.resident_blocks(
            self._smem(schedule), threads, block.registers, self.target
        )
        together = min(-(-blocks // self.target.sm_count), resident)
        flops = FLOPS * self.space.length * self._span(schedule)
        us = timing.chain_us(
            block,
            blocks,
            resident,
            self.target.fp32_tflops,
            self.target,
            pointwise_us=flops / timing.fp32_per_us(together * threads, self.target),
        )
        return us, -blocks * threads

    def _down(self, schedule: Schedule) -> int:
        """Threads below each other."""
        return schedule["threads"] // schedule["lanes"]

    def _span(self, schedule: Schedule) -> int:
        """Columns of a block."""
        return schedule["lanes"] * self.vector

    def _blocks(self, schedule: Schedule) -> int:
        return self.space.pieces * -(-self.space.columns // self._span(schedule))

    def _smem(self, schedule: Schedule) -> int:
        """Numbers of at most 8 bytes of each column of each thread, and the rows it has had."""
        return schedule["threads"] * (8 * self.vector + 4)

    def _registers(self, schedule: Schedule) -> int:
        """Of a thread, about: the next rows as they are in memory, those that are added, sums."""
        values = schedule["vectors"] * self.vector * self.emitter.loads
        raw = -(-values * self.itemsize // 4)
        return min(255, 32 + 3 * self.vector + raw + (values if self.moments else raw))

    def _refusal(self, schedule: Schedule) -> str | None:
        down, span, threads = self._down(schedule), self._span(schedule), schedule["threads"]
        if not down:
            return f"{schedule['lanes']} threads side by side of {threads}"
        if span % self.space.depth:
            return f"{span} columns of a block are no whole results of {self.space.depth}"
        if span // self.space.depth > threads:
            return f"{span // self.space.depth} results for {threads} threads"
        values = schedule["vectors"] * self.vector
        if values * self.emitter.loads > MAX_VALUES:
            return f"{values} elements of {self.emitter.loads} operands under way a thread"
        registers, most = self._registers(schedule), timing.most_registers(threads)
        if registers > most:
            return f"about {registers} registers a thread, of {most}"
        if schedule["vectors"] > 1 and schedule["vectors"] * down >= 2 * self.space.length:
            return f"a column has {self.space.length} rows, and twice as many are under way"
        if down >= 2 * self.space.length and threads > 64:
            return "half of the threads have no row"
        return None

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._work(program.schedule)

    def _work(self, schedule: Schedule) -> BlockWork:
        """A step for the rows under way of each thread, which asks for the next ones first."""
        space, lanes, span = self.space, schedule["lanes"], self._span(schedule)
        down, under_way = self._down(schedule), schedule["vectors"]
        length, width = space.length, min(span, space.columns)
        filled, asked = 0, 0.0
        for layout, itemsize in self.emitter.reads:
            run = width * itemsize
            loads = -(-length * lanes // 32)  # of a warp, and of one vector of each lane
            strides = [stride * itemsize for _, stride in layout.dims[0]]
            if width == space.columns and strides[-1] == run:  # rows lie side by side
                asked += loads * timing.requests(1, min(32 * self.vector * itemsize, length * run))
                filled += length * run
            else:
                grain = math.gcd(*strides, run)
                asked += max(length * timing.requests(1, run, grain), loads)
                filled += length * (run + SECTOR - math.gcd(grain, SECTOR))
        results = span // space.depth + self.stored_bytes // (2 * self._blocks(schedule))
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=-(-length // (down * under_way)),
            stages=2,
            mma_flops=0,
            tile_p=1,
            tile_q=results,
            split=1,
            registers=self._registers(schedule),
            requests=math.ceil(asked),
            meetings=math.ceil(math.log(down, 4)),  # of four each
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        reason = self._refusal(schedule)
        check(reason is None, reason or "")
        lanes, threads, vectors = (schedule[name] for name in ("lanes", "threads", "vectors"))
        config = (
            f"static constexpr int LENGTH = {self.space.length}, DEPTH = {self.space.depth};\n"
            f"  static constexpr int LANES = {lanes}, VECTORS = {vectors}, THREADS = {threads};"
        )
        source = self.emitter.source("columnwise", config, threads)
        smem = self._smem(schedule)
        self.check_smem(smem)
        parameters = self.emitter.region.parameters.values()
        arguments = (argument for _, argument in parameters)
        return self.program(
            schedule, source, (self._blocks(schedule), 1, 1), threads, smem, arguments
        )


def _best_space(group: Group, spaces: Sequence[Columns]) -> tuple[Columns, int]:
    """That in which the most loads have their columns side by side, and how wide these are.

    Raises:
        Illegal: there is none.
    """
    reason = Illegal("rows and columns are reduced by turns, or no columns are left")
    best: ColumnEmitter | None = None
    for space in spaces:
        try:
            draft = ColumnEmitter(group, space, 8)
        except Illegal as error:
            reason = error
            continue
        if best is None or (draft.neighbours, draft.widest) > (best.neighbours, best.widest):
            best = draft
    if best is None:
        raise reason
    check(best.neighbours > 0, "columns do not lie side by side in memory")
    return best.space, best.widest
