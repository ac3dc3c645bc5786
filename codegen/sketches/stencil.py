"""Windows of an image, each channel by itself: depthwise convolution, maximum and mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gtco.codegen.emit import PointwiseEmitter, Region, declared, index
from gtco.codegen.program import KernelProgram, Pointer
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.pieces import BLOCK, Part, copies, dispatch
from gtco.codegen.sketches.windows import WindowOperand, windows_of
from gtco.ir.graph import Group, Node
from gtco.ir.ops import Window
from gtco.ir.references import STATS_CHUNK
from gtco.ir.spec import FLOATS
from gtco.ir.views import Layout, NotAView, resolve
from gtco.passes.dataflow import Flow, bits
from gtco.target import Target

MOST_VALUES = 160
"""Sums and pixels that a thread holds."""
THREADS = 512
"""Of a multiprocessor, that hide each other's loads."""
PIXEL_REGISTERS = 96
"""For pixels under way, and as many for weights (stencil.cuh)."""
LOAD_INSTRUCTIONS = 9
"""For each load of pixels: its address, and whether it lies inside."""
WEIGHT_INSTRUCTIONS = 5
"""For each load of weights."""
FEWEST_THREADS = THREADS // 2
"""Of a multiprocessor: a stencil of fewer was faster in smaller strips and vectors
(experiments/notes/17-convolutions.md)."""


def lanes_of_chunks(columns: int, vector: int) -> int:
    """Threads that have a row's `columns` in the order of chunks (`ChunkPlace` of stats.cuh)."""
    chunks, rest = divmod(columns, STATS_CHUNK)
    last = 1 << (rest // vector - 1).bit_length() if rest else 0
    return chunks * STATS_CHUNK // vector + last


@dataclass(frozen=True)
class Windowed:
    """One windowed op of a kernel.

    Args:
        anchor: the op.
        nodes: it, and what is computed from it.
        image: its operand.
    """

    anchor: Node
    nodes: tuple[Node, ...]
    image: WindowOperand

    @property
    def columns(self) -> int:
        return self.image.layout.shape[-1]

    @property
    def repeat(self) -> int:
        """How many channels side by side are one of memory."""
        channels = self.image.layout.dims[-1]
        return channels[-1][0] if len(channels) > 1 and channels[-1][1] == 0 else 1

    def vector(self, most: int) -> int:
        """Channels that one load brings, of at most so many."""
        layout, repeat = self.image.layout, self.repeat
        if repeat == 1:
            return layout.vector(most)
        stored = Layout((*layout.dims[:-1], layout.dims[-1][:-1]), layout.offset)
        return repeat * stored.vector(most // repeat) if most % repeat == 0 else 1

    @property
    def stats(self) -> bool:
        """Whether it makes row statistics."""
        return any(node.op == "row_stats" for node in self.nodes)

    @property
    def box(self) -> tuple[int, ...] | None:
        """Pixels of a box down and across, of which it leaves the means, if it does."""
        found = (node.attrs["box"] for node in self.nodes if node.op == "box_means")
        return next(found, None)

    def items(self, strip: int, vector: int) -> int:
        """Threads that have something to do."""
        return self._strips(strip) * self.columns // vector

    def threads(self, strip: int, vector: int) -> int:
        """These and, in the order of chunks, some that are idle."""
        if not self.stats:
            return self.items(strip, vector)
        return self._strips(strip) * lanes_of_chunks(self.columns, vector)

    def _strips(self, strip: int) -> int:
        *lines, windows = self.image.out
        return -(-windows // strip) * math.prod(lines) * self.image.layout.shape[0]

    @property
    def shared(self) -> bool:
        """Whether the windows share the image evenly, so that they are not of one size."""
        return not any(self.image.stride)

    def values(self, strip: int, vector: int) -> int:
        """Sums and pixels that a thread holds."""
        return (strip + self._span(strip)) * vector

    def _span(self, strip: int) -> int:
        """Pixels of a row that a thread reads."""
        return (strip - 1) * self.image.stride[-1] + self.image.kernel[-1]

    @property
    def _tap_rows(self) -> int:
        return math.prod(self.image.kernel[:-1])

    def registers(self, strip: int, vector: int, itemsize: int) -> int:
        """Of a thread, about: sums and the rows of pixels that are under way."""
        row = -(-self._span(strip) * vector * itemsize // 4)
        rows = max(1, min(self._tap_rows, PIXEL_REGISTERS // row))
        return 56 + strip * vector + rows * row

    def instructions(self, strip: int, vector: int) -> int:
        """Of a thread, beside what is done with the values of each tap: loads, and what makes 16
        bits fp32, where it takes one instruction and half another."""
        made = vector + vector // 2
        loads = self._tap_rows * self._span(strip) * (LOAD_INSTRUCTIONS + made)
        weights = self.anchor.definition.window is None
        taps = self._tap_rows * self.image.kernel[-1]
        return loads + weights * taps * (WEIGHT_INSTRUCTIONS + made)


class Stencil(Sketch):
    """A thread has a vector of channels of a strip of windows, and reads what they share once.

    Several ops with windows of one image are parts of one kernel, each of blocks of its own.
    """

    name: ClassVar[str] = "stencil"
    family: ClassVar[str] = "stencil"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 1
    boxes: ClassVar[bool] = False
    """Whether it leaves means of boxes."""

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        means = any(node.op == "box_means" for node in group.nodes)
        check(self.boxes or not means, "this sketch leaves no means of boxes")
        flow = Flow(group.graph)
        anchors = [node for node in group.compute if node.definition.family == self.family]
        self.windowed = tuple(self._windowed(flow, anchor) for anchor in anchors)
        dtype = group.graph.specs[anchors[0].inputs[0]].dtype
        check(dtype in FLOATS, f"this sketch sums no {dtype}")
        self.dtype = dtype
        self.vector = min(
            self._write(each, 16 // dtype.itemsize, {})[0].vector for each in self.windowed
        )

    def _windowed(self, flow: Flow, anchor: Node) -> Windowed:
        graph = self.group.graph
        windows = "stride" in anchor.attrs or anchor.definition.window is not None
        check(windows, f"{anchor.op} has no windows")
        try:
            image = windows_of(graph, anchor)
        except NotAView as error:
            raise Illegal(f"%{anchor.name} reads no strided image: {error}") from None
        for value in anchor.inputs:
            base, _ = resolve(graph, value)
            stored = base in graph.inputs or base in graph.constants
            check(stored, f"operand %{base} is made in the same kernel")
        part = flow.connected((1 << len(flow.compute)) - 1, 1 << flow.index[anchor.name])
        return Windowed(anchor, tuple(flow.compute[at] for at in bits(part)), image)

    def _write(
        self, windowed: Windowed, vector: int, parameters: dict[str, tuple[str, Pointer]]
    ) -> tuple[Region, PointwiseEmitter]:
        """The epilogue of so many channels a thread, or of as many as fit it and the image."""
        (spec,) = windowed.anchor.outputs
        shape = (spec.numel // windowed.columns, windowed.columns)
        region = Region(self.group, shape, vector, parameters)
        region.vector = min(region.vector, windowed.vector(region.vector))
        return region, PointwiseEmitter(region, {windowed.anchor.values[0]: "acc"}, windowed.nodes)

    def knobs(self) -> tuple[Knob, ...]:
        least = self._least_vector
        return (
            Knob("strip", self._strips),
            Knob("vector", tuple(size for size in (1, 2, 4, 8) if least <= size <= self.vector)),
            Knob("threads", (64, 128, 256)),
        )

    @property
    def _strips(self) -> tuple[int, ...]:
        """Neighbours along the width have pixels in common, at places that are known."""
        return (1,) if any(each.shared for each in self.windowed) else (1, 2, 4, 7, 8)

    def defaults(self) -> Iterable[Schedule]:
        """As much a thread as still leaves enough of them to hide what loads wait for."""
        vectors = [max(self._least_vector, self.vector // cut) for cut in (1, 2, 4)]
        tiles = [(4, vectors[0]), *((strip, each) for each in vectors for strip in (2, 1))]
        fitting = [
            tile for tile in tiles if tile[0] in self._strips and self._values(*tile) <= MOST_VALUES
        ]
        enough = FEWEST_THREADS * self.target.sm_count
        filling = [
            tile for tile in fitting if sum(each.items(*tile) for each in self.windowed) >= enough
        ]
        for strip, vector in dict.fromkeys((*filling, (1, vectors[-1]))):
            yield {"strip": strip, "vector": vector, "threads": 128}

    @property
    def _least_vector(self) -> int:
        """A warp has 32 lanes for the 64 columns that row statistics are of."""
        return 2 if any(each.stats for each in self.windowed) else 1

    def _values(self, strip: int, vector: int) -> int:
        return max(each.values(strip, vector) for each in self.windowed)

    def block_work(self, program: KernelProgram) -> BlockWork:
        """An even share of the bytes, of the instructions of all blocks, and of elements that are
        stored one by one, as channels are where an image goes back to channels first."""
        strip, vector = program.schedule["strip"], program.schedule["vector"]
        blocks, itemsize = program.grid[0], self.dtype.itemsize
        instructions = sum(
            each.items(strip, vector) * each.instructions(strip, vector) for each in self.windowed
        )
        apart = sum(self._write(each, vector, {})[1].stored_apart for each in self.windowed)
        specs = self.group.graph.specs
        read = sum(specs[name].nbytes for name in self.group.graph.inputs)
        written = sum(specs[name].numel for name in self.group.graph.outputs)
        return BlockWork(
            fill_bytes=-(-read // blocks),
            l2_bytes=-(-read // blocks),
            steps=1,
            stages=1,
            mma_flops=0,
            tile_p=1,
            tile_q=-(-written // blocks),
            split=1,
            registers=max(each.registers(strip, vector, itemsize) for each in self.windowed),
            instructions=-(-instructions // blocks),
            requests=-(-apart // blocks),
        )

    def _emit(self, schedule: Schedule) -> KernelProgram:
        strip, threads = schedule["strip"], schedule["threads"]
        parameters: dict[str, tuple[str, Pointer]] = {}
        written = [self._write(each, schedule["vector"], parameters) for each in self.windowed]
        values = max(
            each.values(strip, region.vector)
            for each, (region, _) in zip(self.windowed, written, strict=True)
        )
        check(strip == 1 or values <= MOST_VALUES, f"{values} values a thread leave no registers")
        operands = [
            (region.parameter(each.image.base, "in"), *self._tap(each, region))
            for each, (region, _) in zip(self.windowed, written, strict=True)
        ]
        copied = list(copies(self.group, written[0][0], threads))
        parts: list[Part] = []  # the functors have all parameters by now
        for number, (each, (region, emitter)) in enumerate(
            zip(self.windowed, written, strict=True)
        ):
            suffix = str(number) if number else ""
            image, tap, given = operands[number]
            text = self._structs(each, schedule, suffix)
            text += f"\n{tap.replace('struct Tap ', f'struct Tap{suffix} ')}"
            text += f"\n{emitter.functor(f'Epilogue{suffix}', 'acc')}"
            operators = f"Image{suffix}{{{image}}}, Tap{suffix}{{{given}}}"
            call = f"stencil<Config{suffix}>({operators}, "
            call += f"Epilogue{suffix}{{{', '.join(parameters)}}}, {BLOCK});"
            parts.append(Part(text, call, -(-each.threads(strip, region.vector) // threads)))
        parts += copied
        declarations = declared(parameters)
        texts = "".join(part.text for part in parts)
        source = f"""#include "stencil.cuh"
using namespace gtco;

{texts}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declarations}) {{
{dispatch(parts)}
}}
"""
        return self.program(
            schedule,
            source,
            (sum(part.blocks for part in parts), 1, 1),
            threads,
            0,
            (argument for _, argument in parameters.values()),
        )

    def _structs(self, windowed: Windowed, schedule: Schedule, suffix: str) -> str:
        image = windowed.image
        images, *frames, height, width, columns = image.layout.shape
        strip, threads = schedule["strip"], schedule["threads"]
        more = "".join(f"\n  static constexpr int FRAMES = {count};" for count in frames)
        if windowed.repeat > 1:
            more += f"\n  static constexpr int REPEAT = {windowed.repeat};"
        return f"""struct Config{suffix} {{
  using Element = {C_TYPES[self.dtype]};
{image.fields}
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};{more}
  static constexpr int COLUMNS = {columns}, STRIP = {strip}, THREADS = {threads};
}};

{self._image_struct(windowed, suffix)}"""

    def _image_struct(self, windowed: Windowed, suffix: str = "") -> str:
        """Of where a pixel of the image lies."""
        layout, element = windowed.image.layout, C_TYPES[self.dtype]
        places = ("n", *("z" for _ in layout.shape[1:-3]), "y", "x", "channel")
        at = index(layout, places)
        pixel = ", ".join(f"int {place}" for place in places[:-1])
        return f"""struct Image{suffix} {{
  const {element}* base;
  __device__ __forceinline__ const {element}* at({pixel},
                                                             int channel) const {{
    return base + {at};
  }}
}};
"""

    def _tap(self, windowed: Windowed, region: Region) -> tuple[str, str]:
        """The struct of what a window does with its pixels, and what it is made of."""
        anchor = windowed.anchor
        window = anchor.definition.window
        if window is not None:
            return _pooled(window, _count(anchor, windowed.image) if window.mean else ""), ""
        weights, layout = resolve(self.group.graph, anchor.inputs[1])
        *rows, width, columns = layout.shape
        layout = layout.reshape((math.prod(rows), width, columns))
        parameter = region.parameter(weights, "in")
        dtype = self.group.graph.specs[weights].dtype
        constant = weights in self.group.graph.constants
        return _products(C_TYPES[dtype], layout, region.vector, constant), parameter


def _pooled(window: Window, count: str) -> str:
    """What a pooling does; `count` declares the number of pixels that a mean is of."""
    finish = f"{count}\n    return sum / static_cast<float>(count);" if count else "return sum;"
    return f"""struct Tap {{
  static constexpr bool CONSTANT = false;
  __device__ __forceinline__ float start() const {{ return {window.start}; }}
  __device__ __forceinline__ float outside() const {{ return {window.start}; }}
  template <int V>
  __device__ __forceinline__ NoWeights weights(int, int, int) const {{
    return {{}};
  }}
  __device__ __forceinline__ float add(float sum, float pixel, float) const {{
    return {window.add};
  }}
  __device__ __forceinline__ float finish(float sum, int y, int x) const {{
    {finish}
  }}
}};
"""


def _count(node: Node, image: WindowOperand) -> str:
    """Declares `count`: the pixels of the image in a window, or with the zeros around it."""
    _, height, width, _ = image.layout.shape
    top, left = image.before
    kernel_h, kernel_w = image.kernel
    if "out" in node.attrs:
        high, wide = image.out
        return f"""const int rows = ceil_div((y + 1) * {height}, {high}) - y * {height} / {high};
    const int columns = ceil_div((x + 1) * {width}, {wide}) - x * {width} / {wide};
    const int count = rows * columns;"""
    if node.attrs["divisor"] is not None:
        return f"const int count = {node.attrs['divisor']};"
    if node.attrs["count_padding"]:  # a window may run beyond the padding, which never counts
        return f"""const int bottom = min_of(y + {kernel_h}, {height + top});
    const int right = min_of(x + {kernel_w}, {width + left});
    const int count = (bottom - y) * (right - x);"""
    return f"""const int bottom = min_of(y + {kernel_h}, {height});
    const int right = min_of(x + {kernel_w}, {width});
    const int count = (bottom - max_of(y, 0)) * (right - max_of(x, 0));"""


def _products(element: str, layout: Layout, vector: int, constant: bool) -> str:
    """Products with the weights [rows of taps, KW, C] of each tap."""
    at = index(layout, ("kh", "kw", "channel"))
    load = f"return load_packed<V>(base + {at});"
    if layout.vector(vector, 2) < vector:
        one = index(layout, ("kh", "kw", "(channel + i)"))
        load = f"""Packed<{element}, V> r;
#pragma unroll
    for (int i = 0; i < V; ++i) r.data[i] = base[{one}];
    return r;"""
    return f"""struct Tap {{  // {layout}
  const {element}* base;
  static constexpr bool CONSTANT = {str(constant).lower()};
  __device__ __forceinline__ float start() const {{ return 0.0f; }}
  __device__ __forceinline__ float outside() const {{ return 0.0f; }}
  template <int V>
  __device__ __forceinline__ Packed<{element}, V> weights(int kh, int kw, int channel) const {{
    {load}
  }}
  __device__ __forceinline__ float add(float sum, float pixel, float weight) const {{
    return fmaf(pixel, weight, sum);
  }}
  __device__ __forceinline__ float finish(float sum, int, int) const {{ return sum; }}
}};
"""
