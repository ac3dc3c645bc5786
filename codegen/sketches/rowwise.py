"""Reductions of whole rows (softmax, norms, sums, row statistics) with pointwise nodes around."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Knob, Schedule, Sketch, check
from gtco.codegen.tile_loads import Space
from gtco.codegen.tiles import TileEmitter
from gtco.ir.graph import Group, Node
from gtco.ir.ops import Pattern
from gtco.ir.references import STATS_CHUNK
from gtco.ir.views import Layout
from gtco.passes.frames import reduced
from gtco.target import Target

MAX_ROW_VALUES = 64
"""Elements of one row value that a thread keeps in registers."""
FEW_VALUES = 16
"""The same where there are threads enough."""


class Rowwise(Sketch):
    """A row lives in the registers of its threads, from its load to its last store.

    Reduced dimensions that are not the last are a permuted iteration space; where then rows, not
    columns, are contiguous in memory, neighbouring lanes take neighbouring rows. Short rows share a
    warp, and where rows are contiguous a thread takes all of a few elements: loads of two bytes a
    lane reach L2's rate too (experiments/notes/24-breadth.md).
    """

    name: ClassVar[str] = "rowwise"
    family: ClassVar[str] = "rowwise"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        reductions = [node for node in group.compute if node.pattern is Pattern.REDUCTION]
        check(bool(reductions), "nothing in the group reduces rows")
        self.merges = any(node.op == "merge_stats" for node in reductions)
        self.stats = any(node.op == "row_stats" for node in reductions)
        self.space = _merge_space(reductions) if self.merges else _space(group, reductions)
        draft = TileEmitter(group, self.space, 8, reduces=not self.merges)
        self.vector = max(2, draft.widest) if self.stats else draft.widest
        self.emitter = TileEmitter(group, self.space, self.vector, reduces=not self.merges)

    def knobs(self) -> tuple[Knob, ...]:
        if self.merges:
            return (Knob("threads", (32, 64, 128)),)
        return (
            Knob("lanes", (1, 2, 4, 8, 16, 32)),
            Knob("warps_per_row", (1, 2, 4, 8, 16, 32)),
            Knob("row_warps", (1, 2, 4, 8)),
            Knob("rows_first", (0, 1)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """Few values a thread; blocks of one row's warps unless there are many rows."""
        if self.merges:
            yield {"threads": 64}
            return
        schedules = []
        rows_first = [
            self._rows_first(lanes, warps)
            for few in ((1, 4), (2, 8, 16))  # of a row; long ones do not fit fewer
            for warps in (8, 4, 16)
            for lanes in few
        ]
        if self.emitter.strided and not self.stats:
            schedules += rows_first
        lanes = self._lanes()
        few = (32, FEW_VALUES) if self._fills(self.space.rows) else (FEW_VALUES, 32)
        # Of more warps a multiprocessor has one block at a time, which nothing runs beside while it
        # waits.
        most = 8 if self.space.rows > self.target.sm_count else 16
        for values, limit in (*((each, most) for each in (*few, MAX_ROW_VALUES, 8)), (32, 16)):
            warps = 1
            while warps < limit and self._values(lanes * warps) > values:
                warps *= 2
            for rows in self._row_warps(lanes, warps):
                schedules.append(self._schedule(lanes, warps, rows, 0))
        if self.emitter.few and not self.stats:
            schedules = sorted([*schedules, *rows_first], key=self._requests_in_turn)
        seen: list[Schedule] = []
        for schedule in schedules:
            if schedule not in seen and self._refusal(schedule) is None:
                seen.append(schedule)
                yield schedule

    @property
    def _vectors(self) -> int:
        """Of a row."""
        return -(-self.space.columns // self.vector)

    def _values(self, parts: int) -> int:
        """Elements of a row in each of `parts` threads."""
        return -(-self._vectors // parts) * self.vector

    @property
    def _short(self) -> bool:
        """Whether a row has no vector for each lane of a warp."""
        return self._vectors < 32

    def _lanes(self) -> int:
        """Threads of a warp that share a row: one for each vector of it. Of short rows one for each
        two where more of them would be than run at a time; of others, where there are many, fewer
        that still read whole lines."""
        lanes = 1
        while lanes < min(32, self._vectors):
            lanes *= 2
        least = STATS_CHUNK // self.vector if self.stats else 1
        lanes = max(lanes, least)
        if self._short and not self.stats:
            while lanes > 1 and self._crowded(lanes, 2 * self.vector):
                lanes //= 2
            return lanes
        itemsize = min((size for _, size in self.emitter.reads), default=4)
        least = max(least, timing.LINE // (self.vector * itemsize))
        while lanes >= 2 * least and self._fills(self.space.rows * lanes // 64):
            if self._values(lanes // 2) > 32:
                break
            lanes //= 2
        return lanes

    def _fills(self, warps: int) -> bool:
        """Whether so many warps keep all multiprocessors busy."""
        return warps > 8 * self.target.sm_count

    def _crowded(self, parts: int, values: int) -> bool:
        """Whether `parts` threads a row are more than run at a time, and half of them would still
        have at most so many values each."""
        most = timing.THREADS_OF_SM * self.target.sm_count
        return self.space.rows * parts > most and self._values(parts // 2) <= values

    def _rows_first(self, lanes: int, warps: int) -> Schedule:
        """At most `warps` warps a row: each has a vector of it, and all of them run at a time."""
        while warps > 1 and (
            lanes * warps > self._vectors or self._crowded(lanes * warps, FEW_VALUES)
        ):
            warps //= 2
        return self._schedule(lanes, warps, self._filled(lanes, warps), 1)

    def _filled(self, lanes: int, warps: int) -> int:
        """Sets of `warps` warps that fill a block, as far as there are two blocks a
        multiprocessor."""
        blocks, rows = self.space.rows * lanes // 32, 1
        while rows * warps < 8 and blocks >= 4 * rows * self.target.sm_count:
            rows *= 2
        return rows

    def _row_warps(self, lanes: int, warps: int) -> tuple[int, ...]:
        if self._short and not self.stats:
            return (self._filled(lanes, warps), 2)
        together = self.space.rows * lanes // 32 * warps
        most = 8 if self._fills(together // 4) else 4 if self._fills(together) else 1
        return (max(1, most // warps), 2)

    @staticmethod
    def _schedule(lanes: int, warps_per_row: int, row_warps: int, rows_first: int) -> Schedule:
        return {
            "lanes": lanes,
            "warps_per_row": warps_per_row,
            "row_warps": row_warps,
            "rows_first": rows_first,
        }

    @staticmethod
    def _block_rows(schedule: Schedule) -> int:
        return schedule["row_warps"] * 32 // schedule["lanes"]

    def _refusal(self, schedule: Schedule) -> str | None:
        lanes, warps = schedule["lanes"], schedule["warps_per_row"]
        threads = warps * schedule["row_warps"] * 32
        if threads > 1024:
            return f"{threads} threads, a block has at most 1024"
        values = self._values(lanes * warps)
        if values > MAX_ROW_VALUES:
            return (
                f"{values} elements of a row a thread, at most {MAX_ROW_VALUES} stay in registers"
            )
        live = values * (1 + min(2, self.emitter.loads))
        limit = min(224, 65536 // threads - 24)
        if live > limit:
            return f"about {live} registers hold the row, of {limit}"
        if self.stats and (schedule["rows_first"] or lanes * self.vector < STATS_CHUNK):
            return f"{STATS_CHUNK} columns of statistics lie in neighbouring lanes of one warp"
        if lanes == 32 and schedule["rows_first"]:
            return "a warp with one row has no order of rows"
        least = STATS_CHUNK // self.vector if self.stats else 1
        wide = lanes * warps * self.vector >= 2 * max(32, self.space.columns)
        if wide and lanes * warps > least:
            return "half of the threads have no element"
        return None

    def requests(self, program: KernelProgram) -> int:
        return 0 if self.merges else self._requests(program.schedule)

    def _requests_in_turn(self, schedule: Schedule) -> int:
        """Of all blocks of one multiprocessor."""
        blocks = -(-self.space.rows // self._block_rows(schedule))
        return -(-blocks // self.target.sm_count) * self._requests(schedule)

    def _requests(self, schedule: Schedule) -> int:
        lanes = schedule["lanes"]
        loads = -(-self.space.columns // (lanes * self.vector)) * schedule["row_warps"]
        each = sum(self._requests_of_load(*read, lanes) for read in self.emitter.reads)
        return math.ceil(loads * each)

    def _requests_of_load(self, layout: Layout, itemsize: int, lanes: int) -> float:
        """Of one load of a warp, in which `lanes` threads share a row."""
        rows, columns = (axis[-1] if axis else (1, 1) for axis in layout.dims)
        down, wide = 32 // lanes, min(lanes * self.vector, self.space.columns)
        if columns[1] == 1:
            run = min(wide, columns[0])
            joined = min(down, rows[0]) if rows[1] == run else 1
        else:
            run, joined = 1, min(down, rows[0]) if rows[1] == 1 else 1
        places, apart = -(-wide // run), -(-down // joined)
        asked = timing.requests(apart, run * joined * itemsize)
        if down <= rows[0]:  # rows of less than a line share lines
            asked = min(
                asked, timing.requests(1, ((down - 1) * rows[1] + run) * itemsize, itemsize)
            )
        return places * asked

    def _emit(self, schedule: Schedule) -> KernelProgram:
        emitter, rows = self.emitter, self.space.rows
        if self.merges:
            threads = schedule["threads"]
            config = f"static constexpr int VECTORS = 1, THREADS = {threads};"
            source = emitter.source("elementwise", config, threads)
            blocks, smem = -(-rows // threads), 0
        else:
            reason = self._refusal(schedule)
            check(reason is None, reason or "")
            warps, lanes = schedule["warps_per_row"], schedule["lanes"]
            threads = warps * schedule["row_warps"] * 32
            block_rows = self._block_rows(schedule)
            config = (
                f"static constexpr int LANES = {lanes}, WARPS_PER_ROW = {warps};\n"
                f"  static constexpr int ROW_WARPS = {schedule['row_warps']};\n"
                f"  static constexpr bool ROWS_FIRST = {str(bool(schedule['rows_first'])).lower()};"
            )
            source = emitter.source("rowwise", config, threads)
            blocks = -(-rows // block_rows)
            smem = 0 if warps == 1 else 2 * 8 * warps * block_rows
        return self.program(
            schedule,
            source,
            (blocks, 1, 1),
            threads,
            smem,
            (argument for _, argument in emitter.region.parameters.values()),
        )


def _merge_space(reductions: list[Node]) -> Space:
    check(
        all(node.op == "merge_stats" for node in reductions),
        "merge_stats and a reduction of whole rows are two kernels",
    )
    return Space((reductions[0].outputs[0].numel, 1), (1,))


def _space(group: Group, reductions: list[Node]) -> Space:
    """Rows are the kept dimensions in order, columns the reduced ones.

    Columns run in the order of the dimensions, or in the reverse if memory does.
    """
    walked = {reduced(node, group.graph.specs[node.inputs[0]].sizes) for node in reductions}
    check(len(walked) == 1, "the reductions do not reduce the same dimensions of one shape")
    ((full, dims),) = walked
    spaces = [Space(full, dims), Space(full, dims[::-1])]
    return max(spaces, key=lambda space: TileEmitter(group, space, 8, reduces=True).neighbours)
