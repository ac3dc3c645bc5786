"""Pointwise nodes, concats and pads of one iteration shape: each thread turns loads into stores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.tile_loads import Space
from gtco.codegen.tiles import TileEmitter
from gtco.ir.graph import Group
from gtco.passes.frames import iteration_shape
from gtco.target import Target

MOST_LOADED = 160
"""Values that a thread loads at once."""


class Elementwise(Sketch):
    """One vector of columns a thread and step; no shared memory, no loop over the grid."""

    name: ClassVar[str] = "elementwise"
    family: ClassVar[str] = "elementwise"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self.space, self.vector = _best_space(group)
        self._emitter = lru_cache(1)(self._write)
        self._emitter()

    def _write(self) -> TileEmitter:
        return TileEmitter(self.group, self.space, self.vector, reduces=False)

    def knobs(self) -> tuple[Knob, ...]:
        return (Knob("threads", (128, 256, 512)), Knob("vectors", (1, 2, 4)))

    def defaults(self) -> Iterable[Schedule]:
        """As many vectors a thread as still fill the chip twice; each number of them where blocks
        merge statistics, of which more blocks read more."""
        items = self.space.rows * self.space.columns // self.vector
        merges = self._emitter().moments is not None
        for vectors in (4, 2, 1):
            fills = items >= 2 * vectors * 1024 * self.target.sm_count
            if (vectors == 1 or merges or fills) and self._loaded(vectors) <= MOST_LOADED:
                yield {"threads": 256, "vectors": vectors}
        yield {"threads": 128, "vectors": 1}

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads, vectors = schedule["threads"], schedule["vectors"]
        emitter, values = self._emitter(), self._loaded(vectors)
        check(values <= MOST_LOADED, f"{values} loaded values a thread leave no registers")
        config = f"static constexpr int VECTORS = {vectors}, THREADS = {threads};"
        items = self.space.rows * self.space.columns // self.vector
        shared = emitter.shared_bytes(threads * vectors * self.vector)
        check(shared <= 48 * 1024, f"the statistics of all groups are {shared} bytes")
        return self.program(
            schedule,
            emitter.source("elementwise", config, threads),
            (-(-items // (threads * vectors)), 1, 1),
            threads,
            shared,
            (argument for _, argument in emitter.region.parameters.values()),
        )

    def _loaded(self, vectors: int) -> int:
        """Values of a thread."""
        return self._emitter().loads * vectors * self.vector

    def requests(self, program: KernelProgram) -> int:
        """Of elements that lie apart along columns, a thread asks for each by itself; lanes that
        have the next row's ask for them with it."""
        points = program.schedule["threads"] * program.schedule["vectors"] * self.vector
        lanes = -(-self.space.columns // self.vector)
        asked = 0.0
        for layout, itemsize in self._emitter().reads:
            rows, columns = layout.dims
            if not columns or columns[-1][1] == 1:
                continue
            beside = rows and rows[-1][1] == 1
            down = min(max(1, 32 // lanes), rows[-1][0]) if beside else 1
            asked += points / down * timing.requests(1, down * itemsize, itemsize)
        return int(asked)

    def read_again(self, program: KernelProgram) -> int:
        points = program.schedule["threads"] * program.schedule["vectors"] * self.vector
        return self._emitter().merged_bytes(points)


def _best_space(group: Group) -> tuple[Space, int]:
    """The iteration space with the widest vectors, and their width.

    Columns are the last dimension, or several trailing ones where rows are short or odd; among
    equals the fewest dimensions, since then the index arithmetic is least.

    Raises:
        Illegal: the group has no iteration space.
    """
    check(bool(group.compute), "the group computes nothing")
    shape = iteration_shape(group.compute) or (1,)
    best: tuple[Space, int] | None = None
    reason: Illegal | None = None
    for first in reversed(range(len(shape))):
        space = Space(shape, tuple(range(first, len(shape))))
        if best and math.prod(shape[first + 1 :]) == space.columns:
            continue
        try:
            width = TileEmitter(group, space, 8, reduces=False).widest
        except Illegal as error:
            reason = error
            continue
        if best is None or width > best[1]:
            best = space, width
    if best is None:
        assert reason is not None
        raise reason
    return best
