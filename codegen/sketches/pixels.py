"""What the sketches have in common whose threads have channels of one pixel of the result each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from gtco.codegen.emit import PointwiseEmitter, Region
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.pieces import Part, copies, dispatch
from gtco.codegen.sketches.stencil import THREADS
from gtco.ir.graph import Group, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import Layout, NotAView, resolve
from gtco.target import Target

EPILOGUE = "$epilogue"

WIDE = 12
"""Most channels of a thread by default: a bicubic resize keeps 16 pixels of each."""


class Pixels(Sketch):
    """A thread has some vectors of channels of one pixel of the result; where there is a knob
    `share`, so many threads have them together.

    Class attributes:
        header: of the device library, with the template.
    """

    family: ClassVar[str] = "stencil"
    header: ClassVar[str]

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        anchors = [node for node in group.compute if node.definition.family == self.family]
        check(len(anchors) == 1, f"a {self.name} has one windowed op, not {len(anchors)}")
        (self.anchor,) = anchors
        check(self.takes(self.anchor), f"{self.anchor.op} is no {self.name}")
        self.images = [self.stored(value) for value in self._images()]
        self.dtype = group.graph.specs[self.images[0][0]].dtype
        check(self.dtype in FLOATS, f"this sketch sums no {self.dtype}")
        self.vector = self._write(16 // self.dtype.itemsize)[0].vector

    @staticmethod
    @abstractmethod
    def takes(node: Node) -> bool:
        """Whether the kernel is one of `node`, a windowed op."""

    def _images(self) -> Sequence[str]:
        """The operands of the windowed op that are images [N, H, W, C]."""
        return self.anchor.inputs[:1]

    def stored(self, value: str) -> tuple[str, Layout]:
        """Where an operand of the windowed op lies.

        Raises:
            Illegal: it is no strided view of what is stored.
        """
        graph = self.group.graph
        try:
            base, layout = resolve(graph, value)
        except NotAView as error:
            raise Illegal(f"%{self.anchor.name} reads no strided %{value}: {error}") from None
        stored = base in graph.inputs or base in graph.constants
        check(stored, f"operand %{base} is made in the same kernel")
        return base, layout

    def _write(self, vector: int) -> tuple[Region, PointwiseEmitter]:
        """The epilogue of so many channels a thread, or of as many as fit it and the images."""
        *_, columns = self.anchor.outputs[0].sizes
        region = Region(self.group, (self.anchor.outputs[0].numel // columns, columns), vector)
        for _, layout in self.images:
            region.vector = min(region.vector, layout.vector(region.vector))
        emitter = PointwiseEmitter(region, {self.anchor.values[0]: "acc"}, self.group.nodes)
        return region, emitter

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("vector", tuple(size for size in (1, 2, 4, 8) if size <= self.vector)),
            Knob("repeat", (1, 2, 3, 4, 5)),
            Knob("threads", (64, 128, 256)),
        )

    def defaults(self) -> Iterable[Schedule]:
        yield self._default(1)

    def _default(self, share: int) -> Schedule:
        """The widest vector that leaves enough threads, else narrower ones; where an image allows
        only narrow ones, as many of them as do. `share` threads have the same channels."""
        numel, enough = self.anchor.outputs[0].numel * share, THREADS * self.target.sm_count
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
        repeat = next(repeats, 1)
        # Of many blocks, fewer and larger ones: an image of 152 channels was enlarged in 22.9 us
        # instead of 27.3 so, of 24 channels in 3.5 instead of 4.9.
        many = numel // (vector * repeat) >= 4 * enough
        return {"vector": vector, "repeat": repeat, "threads": 256 if many else 128}

    def _repeats(self, vector: int, repeat: int) -> bool:
        """Whether a pixel's channels are so many vectors for each of some threads."""
        return self.anchor.outputs[0].sizes[-1] % (vector * repeat) == 0

    def _emit(self, schedule: Schedule) -> KernelProgram:
        threads, repeat = schedule["threads"], schedule["repeat"]
        region, emitter = self._write(schedule["vector"])
        whole = self._repeats(region.vector, repeat)
        check(whole, f"{repeat} vectors of {region.vector} do not divide a pixel's channels")
        structs, call = self._operands(region, schedule)
        copied = list(copies(self.group, region, threads))
        functor = emitter.functor("Epilogue", "acc")  # has all parameters by now
        declarations = ", ".join(text for text, _ in region.parameters.values())
        names = ", ".join(region.parameters)
        items = region.rows * region.columns // (region.vector * repeat) * schedule.get("share", 1)
        items //= schedule.get("across", 1)
        call = call.replace(EPILOGUE, f"Epilogue{{{names}}}")
        parts = [Part(f"{structs}\n{functor}", f"{call};", -(-items // threads)), *copied]
        source = f"""#include "{self.header}"
using namespace gtco;

{"".join(part.text for part in parts)}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declarations}) {{
{dispatch(parts)}
}}
"""
        blocks = sum(part.blocks for part in parts)
        arguments = (argument for _, argument in region.parameters.values())
        return self.program(schedule, source, (blocks, 1, 1), threads, 0, arguments)

    @abstractmethod
    def _operands(self, region: Region, schedule: Schedule) -> tuple[str, str]:
        """The structs of the kernel's source and the call of its template, in which `EPILOGUE` and
        `BLOCK` stand for these."""
