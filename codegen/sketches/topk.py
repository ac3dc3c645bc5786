"""The largest or smallest elements of rows, in order: a block a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from gtco.codegen.emit import Region, index
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import c_type
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.ir.graph import Group
from gtco.ir.spec import FLOATS
from gtco.ir.views import NotAView, resolve, store_layout, through_views
from gtco.target import Target

ORDERED = FLOATS | {torch.int32, torch.int64}
"""Types whose elements are compared by a number of as many bits."""
MOST_KEPT = 4096
"""A row of which more are asked for is sorted, which the library does by radix."""
SORTED_TWICE = 512
"""Of so many, twice as many are sorted: all elements are looked at for a digit that this saves."""
EACH = 255
"""Elements that a thread counts in 8 bits."""
HELD = 24
"""Registers with keys of a thread, which else reads its part of the row again for each digit."""
DIGIT = 4
"""Bits, of topk.cuh."""
COUNTED = 21
"""Instructions for an element and a digit, as disassembled."""


class TopK(Sketch):
    """A block finds the last element that is asked for digit by digit, puts what is ahead of it
    into shared memory and sorts it there."""

    name: ClassVar[str] = "topk"
    family: ClassVar[str] = "topk"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        (self.node,) = group.compute
        spec = group.graph.specs[self.node.inputs[0]]
        self.k, self.dtype = self.node.attrs["k"], spec.dtype
        check(self.dtype in ORDERED, f"this sketch orders no {self.dtype}")
        self.columns = spec.sizes[-1] if spec.rank else 1
        self.rows = spec.numel // self.columns
        check(self.k <= MOST_KEPT, f"{self.k} elements of a row, at most {MOST_KEPT} are sorted")
        most = EACH * 1024
        check(self.columns <= most, f"a row of {self.columns} elements, a block has {most}")
        room = min(self.columns, 2 * self.k if self.k <= SORTED_TWICE else self.k)
        self.listed = 32
        while self.listed < room:
            self.listed *= 2

    def knobs(self) -> tuple[Knob, ...]:
        return (Knob("threads", (32, 64, 128, 256, 512, 1024)),)

    def defaults(self) -> Iterable[Schedule]:
        """About 16 elements a thread, since the counts of many threads take long to add up; and at
        least one for each pair that the sort compares."""
        threads = 32
        while threads < min(1024, max(self.columns // 16, self.listed // 2)):
            threads *= 2
        while threads <= 1024:
            yield {"threads": threads}
            threads *= 2

    def _smem(self, threads: int) -> int:
        entry = 16 if self.dtype.itemsize == 8 else 8
        return self.listed * entry + 2 * threads // 32 * 16 * 4

    def block_work(self, program: KernelProgram) -> BlockWork:
        """A step for each digit, a quarter of one for each pass of the sort."""
        threads, each = program.block, -(-self.columns // program.block)
        levels = 0 if self.columns <= self.listed else 8 * self.dtype.itemsize // DIGIT
        held = each * max(1, self.dtype.itemsize // 4) <= HELD
        row_bytes = self.columns * self.dtype.itemsize
        filled = row_bytes * (1 if held else levels + 2)
        size = self.listed.bit_length() - 1
        sorts = size + max(0, size - 5) * max(0, size - 4) // 2
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=row_bytes,
            steps=1 + levels + sorts * -(-self.listed // threads) // 4,
            stages=2,
            mma_flops=0,
            tile_p=1,
            tile_q=self.k,
            split=1,
            registers=40 + (each if held else 8),
            instructions=levels * each * threads * COUNTED,
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads = schedule["threads"]
        check(
            self.columns <= EACH * threads,
            f"{self.columns} elements of a row for {threads} threads, at most {EACH} each",
        )
        smem = self._smem(threads)
        self.check_smem(smem)
        graph, region = self.group.graph, Region(self.group, (self.rows, self.k))
        try:
            base, layout = resolve(graph, self.node.inputs[0])
            layout = layout.reshape((self.rows, self.columns))
        except NotAView as error:
            raise Illegal(f"%{self.node.name} reads no strided rows: {error}") from None
        element = c_type(self.dtype)
        row = f"""struct Row {{  // {layout}
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int row, int col) const {{
    return base + {index(layout, ("row", "col"))};
  }}
}};
"""
        of_row = region.parameter(base, "in")
        stores, places = self._stores(region)
        declarations, fields = region.declarations, "".join(f"  {each};\n" for each in places)
        newline = "\n"
        source = f"""#include "topk.cuh"
using namespace gtco;

struct Config {{
  using Element = {element};
  static constexpr int COLUMNS = {self.columns}, K = {self.k}, LISTED = {self.listed};
  static constexpr int THREADS = {threads};
  static constexpr bool LARGEST = {str(bool(self.node.attrs["largest"])).lower()};
}};

{row}
struct Result {{
{fields}{newline.join(stores)}
}};

extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declarations}) {{
  topk<Config>(Row{{{of_row}}}, Result{{{", ".join(list(region.parameters)[1:])}}});
}}
"""
        arguments = (argument for _, argument in region.parameters.values())
        return self.program(schedule, source, (self.rows, 1, 1), threads, smem, arguments)

    def _stores(self, region: Region) -> tuple[list[str], list[str]]:
        """The functions that store an element and its place in all outputs, and their fields."""
        graph = self.group.graph
        lines: list[list[str]] = [[], []]
        fields = []
        for output in graph.outputs:
            value, _ = through_views(graph.producers.get, output)
            try:
                layout = store_layout(graph, value, output).reshape((self.rows, self.k))
            except NotAView as error:
                raise Illegal(f"%{output} has no strides for its rows: {error}") from None
            name = region.parameter(output, "out")
            fields.append(region.parameters[name][0].replace("__restrict__ ", ""))
            at = index(layout, ("row", "i"))
            kind = self.node.values.index(value)
            lines[kind].append(f"    {name}[{at}] = {'place' if kind else 'value'};")
        heads = (f"store_value(int row, int i, {c_type(self.dtype)} value)",
                 "store_place(int row, int i, i64 place)")  # fmt: skip
        return [
            "\n".join([f"  __device__ __forceinline__ void {head} const {{", *body, "  }"])
            for head, body in zip(heads, lines, strict=True)
        ], fields
