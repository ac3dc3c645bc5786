"""Pointwise nodes of an image whose channels lie apart: tiles are transposed in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from gtco.codegen.emit import PointwiseEmitter, Region, index
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.ir.graph import Group
from gtco.ir.spec import FLOATS
from gtco.ir.views import Layout, resolve, through_views
from gtco.target import Target

LANES = 8
"""Threads that have the channels of a pixel in a tile."""
ROW_BYTES = 128
"""Of each channel in a tile."""
LOAD_INSTRUCTIONS, STORE_INSTRUCTIONS = 14, 20
"""Of a thread for a load and a store, beside what each element takes."""


class Transpose(Sketch):
    """Loads along pixels -> shared memory, swizzled -> the group's nodes along channels."""

    name: ClassVar[str] = "transpose"
    family: ClassVar[str] = "elementwise"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        for node in group.compute:
            check(node.definition.is_pointwise, f"%{node.name}: {node.op} is not pointwise")
        value, layout = _apart(group)
        self.value, self.layout = value, layout
        self.base, _ = resolve(group.graph, value)
        self.dtype = group.graph.specs[self.base].dtype
        check(self.dtype in FLOATS, f"%{self.base} of {self.dtype} is no image of floats")
        (rows, columns) = layout.dims
        self.images = math.prod(size for size, _ in rows[:-1])
        self.pixels, self.columns = rows[-1][0], columns[0][0]
        self.vector = self._emitter(self._region()).region.vector

    def knobs(self) -> tuple[Knob, ...]:
        return (Knob("threads", (128, 256, 512)),)

    def defaults(self) -> Iterable[Schedule]:
        """Of 256 threads each has 32 bytes of a whole tile of 16 bits."""
        for threads in (256, 128):
            yield {"threads": threads}

    def _region(self) -> Region:
        return Region(self.group, (self.images * self.pixels, self.columns), 8)

    def _emitter(self, region: Region) -> PointwiseEmitter:
        return PointwiseEmitter(region, {self.value: "image"}, self.group.nodes)

    @property
    def _side(self) -> int:
        """Pixels of a tile."""
        return ROW_BYTES // self.dtype.itemsize

    @property
    def _width(self) -> int:
        """Pixels of a load."""
        return self.layout.vector(16 // self.dtype.itemsize, 0)

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads = schedule["threads"]
        region = self._region()
        emitter = self._emitter(region)
        image = region.parameter(self.base, "in")
        functor = emitter.functor("Body", "image")
        names = ", ".join(region.parameters)
        rows, columns = self.layout.dims
        apart = Layout((rows[:-1], columns, rows[-1:]), self.layout.offset)
        at = index(apart, ("n", "channel", "pixel"))
        element = C_TYPES[self.dtype]
        source = f"""#include "transpose.cuh"
using namespace gtco;

struct Config {{
  using Element = {element};
  static constexpr int IMAGES = {self.images}, PIXELS = {self.pixels}, COLUMNS = {self.columns};
  static constexpr int WIDTH = {self._width}, THREADS = {threads};
}};

struct Image {{
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int n, int channel, int pixel) const {{
    return base + {at};
  }}
}};

{functor}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({region.declarations}) {{
  transpose<Config>(Image{{{image}}}, Body{{{names}}});
}}
"""
        across = -(-self.columns // (LANES * self.vector))
        down = -(-self.pixels // self._side)
        return self.program(
            schedule,
            source,
            (self.images * across * down, 1, 1),
            threads,
            LANES * self.vector * ROW_BYTES,
            (argument for _, argument in region.parameters.values()),
        )

    def block_work(self, program: KernelProgram) -> BlockWork:
        threads, filled = program.schedule["threads"], program.smem_bytes
        loads = -(-filled // (self._width * self.dtype.itemsize * threads))
        stores = -(-self._side * LANES // threads)
        instructions = loads * LOAD_INSTRUCTIONS
        instructions += stores * (STORE_INSTRUCTIONS + 3 * self.vector)
        return BlockWork(
            fill_bytes=2 * filled,
            l2_bytes=filled,
            steps=1,
            stages=1,
            mma_flops=0,
            tile_p=LANES * self.vector,
            tile_q=self._side,
            split=1,
            registers=32 + 4 * loads,
            instructions=instructions * threads,
        )


def _apart(group: Group) -> tuple[str, Layout]:
    """The one value read from outside whose columns lie apart and whose rows do not, over (rows,
    columns): the last dimension of what is computed, or as many as lie so.

    Raises:
        Illegal: there is none, or several.
    """
    shape = group.compute[0].outputs[0].sizes
    check(len(shape) > 1, "the nodes have no rows of columns")
    reason: Illegal | None = None
    for first in reversed(range(1, len(shape))):
        try:
            return _apart_from(
                group, Region(group, (math.prod(shape[:first]), math.prod(shape[first:])))
            )
        except Illegal as error:
            reason = reason or error
    assert reason is not None
    raise reason


def _apart_from(group: Group, region: Region) -> tuple[str, Layout]:
    """The same over the rows and columns of `region`."""
    graph = group.graph
    found: dict[str, Layout] = {}
    for node in group.compute:
        own = node.outputs[0].sizes
        whole = node.outputs[0].numel == region.rows * region.columns
        check(whole, f"%{node.name} has other elements than %{group.compute[0].name}")
        for value in node.inputs:
            base, _ = through_views(graph.producers.get, value)
            if base in graph.producers:
                continue
            layout = region.operand(value, own).layout
            rows, columns = layout.dims
            if len(columns) == 1 and columns[0][1] > 1 and rows and rows[-1][1] == 1:
                found[value] = layout
    check(len(found) == 1, f"{len(found)} operands have their columns apart and their rows not")
    return next(iter(found.items()))
