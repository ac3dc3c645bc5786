"""The mean of each image and the two linears of its gate (squeeze-and-excitation) in one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from gtco.codegen import timing
from gtco.codegen.emit import PointwiseEmitter, Region, declared, index
from gtco.codegen.program import KernelProgram, Pointer
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.gemm import pad_to
from gtco.codegen.tile_loads import SECTOR
from gtco.ir.graph import Group, Node
from gtco.ir.views import Layout, NotAView, resolve
from gtco.passes.dataflow import Flow
from gtco.passes.squeeze import Gates
from gtco.target import Target

AT_ONCE = 8
"""Vectors of pixels that a thread asks for at a time, as the template has it."""
ROWS_AT_ONCE = 4
"""Rows of weights that a thread multiplies at a time, likewise."""
REGISTERS = 64
"""Of a thread, about."""
COPIED = 4
"""Fewest bytes that `cp.async` copies."""
BARRIER_BYTES = 8


class Squeeze(Sketch):
    """An image is a block's, or its channels are shared by the `split` blocks of a cluster."""

    name: ClassVar[str] = "squeeze"
    family: ClassVar[str] = "squeeze"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        gates, graph = Gates(Flow(group.graph)), group.graph
        found = {gate.names: gate for node in group.compute if (gate := gates.of(node))}
        check(len(found) == 1, f"{len(found)} means of images with two linears, of one")
        (gate,) = found.values()
        self.gate = gate
        self.after = [node for node in group.compute if node.name not in gate.names]
        self.images, self.channels = gate.images, gate.mean.outputs[0].sizes[-1]
        self.hidden, self.columns = (
            node.outputs[0].sizes[-1] for node in (gate.squeeze, gate.excite)
        )
        (value,) = gate.mean.inputs
        self.pixels = graph.specs[value].numel // (self.images * self.channels)
        try:
            self.image, layout = resolve(graph, value)
            self.layout = layout.reshape((self.images, self.pixels, self.channels))
            self.weights = [resolve(graph, node.inputs[1]) for node in (gate.squeeze, gate.excite)]
        except NotAView as error:
            raise Illegal(f"an operand of %{gate.mean.name} is not strided: {error}") from None
        check(self.image in (*graph.inputs, *graph.constants), f"%{self.image} is made here")
        self.itemsize = graph.specs[self.image].dtype.itemsize
        self.vector = self.layout.vector(16 // self.itemsize)
        self.weight_bytes = [graph.specs[base].dtype.itemsize for base, _ in self.weights]
        self.weight_vectors = [
            layout.vector(16 // itemsize)
            for itemsize, (_, layout) in zip(self.weight_bytes, self.weights, strict=True)
        ]
        self._stages()

    def _stages(self) -> tuple[dict[str, tuple[str, Pointer]], list[str]]:
        """The parameters, and the text of what is computed of means, hidden values and results."""
        gate = self.gate
        parameters: dict[str, tuple[str, Pointer]] = {}
        stages: list[tuple[str, Node, tuple[Node, ...], int]] = [
            ("OfMean", gate.mean, gate.before, self.channels),
            ("OfHidden", gate.squeeze, gate.between, self.hidden),
            ("OfResult", gate.excite, tuple(self.after), self.columns),
        ]
        written: list[tuple[str, PointwiseEmitter, str]] = []
        for name, anchor, nodes, width in stages:
            region = Region(self.group, (self.images, width), 1, parameters)
            emitter = PointwiseEmitter(region, {anchor.values[0]: "acc"}, (anchor, *nodes))
            check(not emitter.row_fields, f"%{anchor.name} meets one value of each image")
            handed = "" if name == "OfResult" else (anchor, *nodes)[-1].values[0]
            written.append((name, emitter, handed))
            for base in (self.image, *(base for base, _ in self.weights)):
                region.parameter(base, "in")
        return parameters, [emitter.functor(name, "acc", last) for name, emitter, last in written]

    def knobs(self) -> tuple[Knob, ...]:
        return (Knob("split", (1, 2, 4, 8)), Knob("threads", (128, 256, 512)))

    def defaults(self) -> Iterable[Schedule]:
        """All legal schedules, ordered by the formula of a kernel's time."""
        legal: list[Schedule] = []
        for schedule in self.schedules():
            try:
                self._check(schedule)
            except Illegal:
                continue
            legal.append(schedule)
        return sorted(legal, key=self._cost)

    def _cost(self, schedule: Schedule) -> float:
        block, split = self._block_work(schedule), schedule["split"]
        resident = timing.resident_blocks(
            self._places(schedule)["BARRIER_AT"], schedule["threads"], REGISTERS, self.target
        )
        rate = self.target.fp32_tflops
        return timing.chain_us(
            block, self.images * split, resident, rate, self.target, cluster=split
        )

    def _check(self, schedule: Schedule) -> None:
        split, slice_ = schedule["split"], self._slice(schedule)
        check(split == 1 or self.target.has_wgmma, f"{self.target.arch} has no clusters")
        check(
            split == 1 or slice_ * self.itemsize >= SECTOR,
            f"{slice_} channels of a block are less than the {SECTOR} B that come together",
        )
        check(
            (split - 1) * slice_ < self.channels
            and (split - 1) * self._results(schedule) < self.columns,
            f"one of {split} blocks has none of {self.channels} channels or {self.columns} columns",
        )
        self.check_smem(self._places(schedule)["BARRIER_AT"] + BARRIER_BYTES)

    def _slice(self, schedule: Schedule) -> int:
        """Channels of a block."""
        return pad_to(-(-self.channels // schedule["split"]), self.vector)

    def _results(self, schedule: Schedule) -> int:
        """Columns of a block."""
        return -(-self.columns // schedule["split"])

    def _lanes(self, schedule: Schedule) -> int:
        """Threads that share a pixel."""
        vectors = self._slice(schedule) // self.vector
        return _lanes(vectors) if vectors <= 32 else min(schedule["threads"], pad_to(vectors, 32))

    def _vectors(self, schedule: Schedule) -> tuple[int, int]:
        """Neighbours along K of one load of each of the weights."""
        first, second = self.weight_vectors
        while self._slice(schedule) % first:
            first //= 2
        return first, second

    def _staged_bytes(self, schedule: Schedule, room: int) -> tuple[int, int]:
        """Of both weights in `room` bytes of shared memory; zeros where they stay where they are.

        They are staged where nothing in the launch chain writes them, where `cp.async` can copy
        them, and where no other block of the grid waits for the room that they take.
        """
        constants, vectors = self.group.graph.constants, self._vectors(schedule)
        first = self.hidden * self._slice(schedule) * self.weight_bytes[0]
        second = self._results(schedule) * self.hidden * self.weight_bytes[1]
        staged = (
            all(base in constants for base, _ in self.weights)
            and all(v * size >= COPIED for v, size in zip(vectors, self.weight_bytes, strict=True))
            and self.images * schedule["split"] <= self.target.sm_count
            and pad_to(first, 16) + pad_to(second, 16) <= room
        )
        return (pad_to(first, 16), pad_to(second, 16)) if staged else (0, 0)

    def _places(self, schedule: Schedule) -> Mapping[str, int]:
        """What the template calls sizes of shared memory, and where in it things are."""
        threads, lanes, slice_ = schedule["threads"], self._lanes(schedule), self._slice(schedule)
        parts = threads // 32 if lanes < 32 else threads // lanes
        hidden_ld = pad_to(self.hidden, 2)
        sums_at = pad_to(slice_ * 4, 16)
        hidden_at = sums_at + pad_to(schedule["split"] * hidden_ld * 4, 16)
        parts_at = hidden_at + pad_to(hidden_ld * 4, 16)
        first_at = parts_at + pad_to(max(parts * slice_, self._results(schedule)) * 4, 16)
        room = self.target.smem_per_block - first_at - BARRIER_BYTES
        first, second = self._staged_bytes(schedule, room)
        return {
            "PARTS": parts,
            "HIDDEN_LD": hidden_ld,
            "SUMS_AT": sums_at,
            "HIDDEN_AT": hidden_at,
            "PARTS_AT": parts_at,
            "FIRST_AT": first_at,
            "SECOND_AT": first_at + first,
            "BARRIER_AT": first_at + first + second,
        }

    def block_work(self, program: KernelProgram) -> BlockWork:
        return self._block_work(program.schedule)

    def _block_work(self, schedule: Schedule) -> BlockWork:
        """Loads of pixels wait for each other by turns, and so do those of weights that are not
        staged. Nobody else reads what a block stages, so L2 gives it at half the rate of what all
        read (experiments/notes/14-shared_reads.md)."""
        slice_, results, threads = (
            self._slice(schedule),
            self._results(schedule),
            schedule["threads"],
        )
        places = self._places(schedule)
        filled = self.pixels * slice_ * self.itemsize
        turns = -(-self.pixels // (threads // self._lanes(schedule) * AT_ONCE))
        staged = places["BARRIER_AT"] - places["FIRST_AT"]
        filled += 2 * staged
        if not staged:
            first, second = self.weight_bytes
            filled += self.hidden * (slice_ * first + results * second)
            for rows, k, vector in zip(
                (self.hidden, results),
                (slice_, self.hidden),
                self._vectors(schedule),
                strict=True,
            ):
                loads = -(-k // vector)
                lanes = _lanes(loads)
                turns += -(-rows // (threads // lanes * ROWS_AT_ONCE)) * -(-loads // lanes)
        return BlockWork(
            fill_bytes=filled,
            l2_bytes=filled,
            steps=turns + 2,
            stages=1,
            mma_flops=2 * self.hidden * (slice_ + results),
            tile_p=1,
            tile_q=results,
            split=schedule["split"],
            registers=REGISTERS,
            copies=-(-filled // (16 * threads)),
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        self._check(schedule)
        threads, split, slice_ = schedule["threads"], schedule["split"], self._slice(schedule)
        parameters, functors = self._stages()
        names = {argument.value: name for name, (_, argument) in parameters.items()}
        operands = [self._struct("Image", self.image, self.layout, ("image", "pixel", "channel"))]
        lanes = []
        for name, (base, layout), vector, k in zip(
            ("First", "Second"),
            self.weights,
            self._vectors(schedule),
            (slice_, self.hidden),
            strict=True,
        ):
            operands.append(self._struct(name, base, layout, ("column", "k"), vector))
            lanes.append(_lanes(-(-k // vector)))
        given = [f"Image{{{names[self.image]}}}"]
        given += [
            f"{name}{{{names[base]}}}"
            for name, (base, _) in zip(("First", "Second"), self.weights, strict=True)
        ]
        every = ", ".join(parameters)
        given += [f"{name}{{{every}}}" for name in ("OfMean", "OfHidden", "OfResult")]
        places = self._places(schedule)
        sizes = ", ".join(f"{name} = {value}" for name, value in places.items())
        declarations = declared(parameters)
        newline = "\n"
        source = f"""#include "squeeze.cuh"
using namespace gtco;

struct Config {{
  static constexpr int PIXELS = {self.pixels}, CHANNELS = {self.channels};
  static constexpr int HIDDEN = {self.hidden}, COLUMNS = {self.columns}, V = {self.vector};
  static constexpr int THREADS = {threads}, SPLIT = {split};
  static constexpr int SLICE = {slice_}, RESULTS = {self._results(schedule)};
  static constexpr int LANES = {self._lanes(schedule)};
  static constexpr bool STAGED = {str(places["BARRIER_AT"] > places["FIRST_AT"]).lower()};
  static constexpr int FIRST_LANES = {lanes[0]}, SECOND_LANES = {lanes[1]};
  static constexpr int {sizes};
}};

{newline.join(operands)}
{newline.join(functors)}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declarations}) {{
  squeeze<Config>({", ".join(given)});
}}
"""
        return self.program(
            schedule,
            source,
            (self.images * split, 1, 1),
            threads,
            places["BARRIER_AT"] + BARRIER_BYTES,
            (argument for _, argument in parameters.values()),
            (split, 1, 1),
        )

    def _struct(
        self, name: str, base: str, layout: Layout, variables: tuple[str, ...], vector: int = 0
    ) -> str:
        element = C_TYPES[self.group.graph.specs[base].dtype]
        given = ", ".join(f"int {variable}" for variable in variables)
        width = ""
        if vector:
            width = f"\n  using Element = {element};\n  static constexpr int VECTOR = {vector};"
        return f"""struct {name} {{  // {layout}{width}
  const {element}* base;
  __device__ __forceinline__ const {element}* at({given}) const {{
    return base + {index(layout, variables)};
  }}
}};
"""


def _lanes(vectors: int) -> int:
    """The smallest power of two of a warp's lanes that take so many vectors at once, if any do."""
    lanes = 1
    while lanes < min(vectors, 32):
        lanes *= 2
    return lanes
