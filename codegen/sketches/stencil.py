"""Windows of images, each channel by itself: depthwise convolution, maximum and mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from gtco.codegen.emit import C_TYPES, PointwiseEmitter, Region, index
from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Illegal, Knob, Schedule, Sketch, check
from gtco.codegen.sketches.windows import WindowOperand, windows_of
from gtco.ir.graph import Group, Node
from gtco.ir.ops import Window
from gtco.ir.views import Layout, NotAView, resolve
from gtco.target import Target

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_VALUES = 160
"""Sums and pixels that a thread holds."""
THREADS = 512
"""Of a multiprocessor, that hide each other's loads."""


class Stencil(Sketch):
    """A thread has a vector of channels of a strip of windows, and reads what they share once."""

    name: ClassVar[str] = "stencil"
    family: ClassVar[str] = "stencil"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        anchors = [node for node in group.nodes if node.definition.family == self.family]
        check(len(anchors) == 1, f"a stencil has one windowed op, not {len(anchors)}")
        (self.anchor,) = anchors
        check("stride" in self.anchor.attrs, f"{self.anchor.op} has no windows of one size")
        try:
            self.image = windows_of(group.graph, self.anchor)
        except NotAView as error:
            raise Illegal(f"%{self.anchor.name} reads no strided image: {error}") from None
        for value in self.anchor.inputs:
            base, _ = resolve(group.graph, value)
            stored = base in group.graph.inputs or base in group.graph.constants
            check(stored, f"operand %{base} is made in the same kernel")
        dtype = group.graph.specs[self.anchor.inputs[0]].dtype
        check(dtype in DTYPES, f"this sketch sums no {dtype}")
        self.dtype = dtype
        self.vector = self._write(16 // dtype.itemsize)[0].vector

    def _write(self, vector: int) -> tuple[Region, PointwiseEmitter]:
        """The epilogue of so many channels a thread, or of as many as fit it and the image."""
        *_, columns = self.anchor.outputs[0].sizes
        rows = self.anchor.outputs[0].numel // columns
        region = Region(self.group, (rows, columns), vector)
        region.fit_vector(self.image.layout)
        emitter = PointwiseEmitter(region, {self.anchor.values[0]: "acc"}, self.group.nodes)
        return region, emitter

    def knobs(self) -> tuple[Knob, ...]:
        return (
            Knob("strip", (1, 2, 4, 7, 8)),
            Knob("vector", tuple(size for size in (1, 2, 4, 8) if size <= self.vector)),
            Knob("threads", (64, 128, 256)),
        )

    def defaults(self) -> Iterable[Schedule]:
        """As much a thread as still leaves enough of them to hide what loads wait for."""
        narrow = max(1, self.vector // 2)
        tiles = ((4, self.vector), (2, self.vector), (1, self.vector), (1, narrow))
        fitting = [tile for tile in tiles if self._values(*tile) <= MOST_VALUES]
        filling = [tile for tile in fitting if self._items(*tile) >= THREADS * self.target.sm_count]
        for strip, vector in dict.fromkeys((*filling, (1, narrow))):
            yield {"strip": strip, "vector": vector, "threads": 128}

    def _items(self, strip: int, vector: int) -> int:
        """Threads that have something to do."""
        images, _, _, columns = self.image.layout.shape
        return -(-self.image.out[1] // strip) * self.image.out[0] * images * columns // vector

    def _values(self, strip: int, vector: int) -> int:
        span = (strip - 1) * self.image.stride[1] + self.image.kernel[1]
        return (strip + span) * vector

    def _emit(self, schedule: Schedule) -> KernelProgram:
        strip, threads = schedule["strip"], schedule["threads"]
        region, emitter = self._write(schedule["vector"])
        values = self._values(strip, region.vector)
        check(strip == 1 or values <= MOST_VALUES, f"{values} values a thread leave no registers")
        images, height, width, columns = self.image.layout.shape
        image = region.parameter(self.image.base, "in")
        tap, given = self._tap(region)
        functor = emitter.functor("Epilogue", "acc")  # has all parameters by now
        at = index(self.image.layout, ("n", "y", "x", "channel"))
        declarations = ", ".join(text for text, _ in region.parameters.values())
        names = ", ".join(region.parameters)
        items = self._items(strip, region.vector)
        source = f"""#include "stencil.cuh"
using namespace gtco;

struct Config {{
  using Element = {C_TYPES[self.dtype]};
{self.image.fields}
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};
  static constexpr int COLUMNS = {columns}, STRIP = {strip}, THREADS = {threads};
}};

struct Image {{
  const {C_TYPES[self.dtype]}* base;
  __device__ __forceinline__ const {C_TYPES[self.dtype]}* at(int n, int y, int x,
                                                             int channel) const {{
    return base + {at};
  }}
}};

{tap}
{functor}
extern "C" __global__ void __launch_bounds__({threads}) ENTRY_POINT({declarations}) {{
  stencil<Config>(Image{{{image}}}, Tap{{{given}}}, Epilogue{{{names}}});
}}
"""
        return self.program(
            schedule,
            source,
            (-(-items // threads), 1, 1),
            threads,
            0,
            (argument for _, argument in region.parameters.values()),
        )

    def _tap(self, region: Region) -> tuple[str, str]:
        """The struct of what a window does with its pixels, and what it is made of."""
        window = self.anchor.definition.window
        if window is not None:
            return _pooled(window, _count(self.anchor, self.image) if window.mean else ""), ""
        weights, layout = resolve(self.group.graph, self.anchor.inputs[1])
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
    top, left = node.attrs["padding"]
    kernel_h, kernel_w = image.kernel
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
    """Products with the weights [KH, KW, C] of each tap."""
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
