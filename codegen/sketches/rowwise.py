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


class Rowwise(Sketch):
    """A row lives in the registers of its threads, from its load to its last store.

    Reduced dimensions that are not the last are a permuted iteration space; where then rows, not
    columns, are contiguous in memory, neighbouring lanes take neighbouring rows.
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
        vectors = -(-self.space.columns // self.vector)
        schedules = []
        rows_first = [
            self._schedule(lanes, warps, 1, 1)
            for few in ((1, 4), (2, 8, 16))  # of a row; long ones do not fit fewer
            for warps in (8, 4, 16)
            for lanes in few
        ]
        if self.emitter.strided and not self.stats:
            schedules += rows_first
        lanes = self._lanes(vectors)
        few_values = (32, 16) if self._fills(self.space.rows) else (16, 32)
        for values in (*few_values, MAX_ROW_VALUES, 8):
            warps = 1
            while warps < 16 and -(-vectors // (lanes * warps)) * self.vector > values:
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

    def _lanes(self, vectors: int) -> int:
        """Threads of a warp that share a row of so many vectors: one for each, or fewer where there
        are many rows and each still reads whole lines."""
        lanes = 1
        while lanes < 32 and lanes < vectors:
            lanes *= 2
        least = STATS_CHUNK // self.vector if self.stats else 1
        lanes = max(lanes, least)
        itemsize = min((size for _, size in self.emitter.reads), default=4)
        least = max(least, timing.LINE // (self.vector * itemsize))
        while lanes >= 2 * least and self._fills(self.space.rows * lanes // 64):
            if -(-vectors // (lanes // 2)) * self.vector > 32:
                break
            lanes //= 2
        return lanes

    def _fills(self, warps: int) -> bool:
        """Whether so many warps keep all multiprocessors busy."""
        return warps > 8 * self.target.sm_count

    def _row_warps(self, lanes: int, warps: int) -> tuple[int, ...]:
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
        values = -(-self.space.columns // (lanes * warps * self.vector)) * self.vector
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
        pieces = -(-wide // run) * -(-down // joined)
        return timing.requests(pieces, run * joined * itemsize)

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
