"""Images made larger or smaller: each pixel is a weighted sum of those around its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from gtco.codegen.emit import PointwiseEmitter, Region, index
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES, literal
from gtco.codegen.sketch import Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.pieces import BLOCK, Part, copies, dispatch
from gtco.codegen.sketches.stencil import DTYPES, THREADS
from gtco.ir.graph import Group
from gtco.ir.views import NotAView, resolve
from gtco.target import Target

WIDE = 12
"""Most channels of a thread by default: a bicubic resize keeps 16 pixels of each."""


class Resize(Sketch):
    """A thread has some vectors of channels of one pixel of the result."""

    name: ClassVar[str] = "resize"
    family: ClassVar[str] = "stencil"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 2

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        anchors = [node for node in group.compute if node.definition.family == self.family]
        check(len(anchors) == 1, f"a resize has one windowed op, not {len(anchors)}")
        (self.anchor,) = anchors
        check("size" in self.anchor.attrs, f"{self.anchor.op} is no resize")
        graph = group.graph
        try:
            self.base, self.layout = resolve(graph, self.anchor.inputs[0])
        except NotAView as error:
            raise Illegal(f"%{self.anchor.name} reads no strided image: {error}") from None
        stored = self.base in graph.inputs or self.base in graph.constants
        check(stored, f"operand %{self.base} is made in the same kernel")
        self.dtype = graph.specs[self.base].dtype
        check(self.dtype in DTYPES, f"this sketch sums no {self.dtype}")
        self.vector = self._write(16 // self.dtype.itemsize)[0].vector

    def _write(self, vector: int) -> tuple[Region, PointwiseEmitter]:
        """The epilogue of so many channels a thread, or of as many as fit it and the image."""
        *_, columns = self.anchor.outputs[0].sizes
        region = Region(self.group, (self.anchor.outputs[0].numel // columns, columns), vector)
        region.fit_vector(self.layout)
        emitter = PointwiseEmitter(region, {self.anchor.values[0]: "acc"}, self.group.nodes)
        return region, emitter

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("vector", tuple(size for size in (1, 2, 4, 8) if size <= self.vector)),
            Knob("repeat", (1, 2, 3, 4, 5)),
            Knob("threads", (64, 128, 256)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """The widest vector that leaves enough threads, else narrower ones; where an image allows
        only narrow ones, as many of them as do."""
        numel, enough = self.anchor.outputs[0].numel, THREADS * self.target.sm_count
        vector = self.vector
        while vector > 1 and numel // vector < enough:
            vector //= 2
        repeats = (
            repeat
            for repeat in (5, 4, 3, 2)
            if vector * repeat <= WIDE
            and self._repeats(vector, repeat)
            and numel // (vector * repeat) >= enough
        )
        yield {"vector": vector, "repeat": next(repeats, 1), "threads": 128}

    def _repeats(self, vector: int, repeat: int) -> bool:
        """Whether a pixel's channels are so many vectors for each of some threads."""
        return self.anchor.outputs[0].sizes[-1] % (vector * repeat) == 0

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads, repeat = schedule["threads"], schedule["repeat"]
        region, emitter = self._write(schedule["vector"])
        whole = self._repeats(region.vector, repeat)
        check(whole, f"{repeat} vectors of {region.vector} do not divide a pixel's channels")
        images, height, width, columns = self.layout.shape
        _, rows, across, _ = self.anchor.outputs[0].sizes
        scales = [
            literal(step) for step in steps((height, width), (rows, across), self.anchor.attrs)
        ]
        image = region.parameter(self.base, "in")
        copied = list(copies(self.group, region, threads))
        functor = emitter.functor("Epilogue", "acc")  # has all parameters by now
        at = index(self.layout, ("n", "y", "x", "channel"))
        names = ", ".join(region.parameters)
        element = C_TYPES[self.dtype]
        items = region.rows * columns // (region.vector * repeat)
        text = f"""struct Config {{
  using Element = {element};
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};
  static constexpr int COLUMNS = {columns}, P = {rows}, Q = {across};
  static constexpr int REPEAT = {repeat}, THREADS = {threads};
  static constexpr float SCALE_H = {scales[0]}, SCALE_W = {scales[1]};
}};

struct Image {{
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int n, int y, int x, int channel) const {{
    return base + {at};
  }}
}};

{functor}"""
        call = f"resize<Config, {self._axis()}>(Image{{{image}}}, Epilogue{{{names}}}, {BLOCK});"
        parts = [Part(text, call, -(-items // threads)), *copied]
        source = f"""#include "resize.cuh"
using namespace gtco;

{"".join(part.text for part in parts)}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({region.declarations}) {{
{dispatch(parts)}
}}
"""
        blocks = sum(part.blocks for part in parts)
        arguments = (argument for _, argument in region.parameters.values())
        return self.program(schedule, source, (blocks, 1, 1), threads, 0, arguments)

    def _axis(self) -> str:
        mode, align = self.anchor.attrs["mode"], str(self.anchor.attrs["align_corners"]).lower()
        return {
            "nearest": "Nearest<false>",
            "nearest-exact": "Nearest<true>",
            "bilinear": f"Linear<{align}>",
            "bicubic": f"Cubic<{align}>",
        }[mode]


def steps(image: tuple[int, int], size: tuple[int, int], attrs: Mapping[str, Any]) -> list[float]:
    """Pixels of the image for one of the result, along height and width, by torch's rules."""
    found = []
    for old, new, factor in zip(image, size, attrs["scales"], strict=True):
        if attrs["align_corners"]:
            found.append((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            found.append(1 / factor if factor else old / new)
    return found
