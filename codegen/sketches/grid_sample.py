"""Images sampled where a grid says: each point is a weighted sum of the pixels around it, and a row
of the result is one point, or the weighed sum of some points of several images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from gtco.codegen.emit import Region, index
from gtco.codegen.program import KernelProgram
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import BlockWork, Illegal, Knob, Schedule, check
from gtco.codegen.sketches.pieces import BLOCK
from gtco.codegen.sketches.pixels import EPILOGUE, Pixels
from gtco.codegen.sketches.stencil import THREADS
from gtco.ir.graph import Group, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import Layout, NotAView
from gtco.target import Target


class GridSample(Pixels):
    """A thread has some vectors of channels of one row; neighbours may share the row's points."""

    name: ClassVar[str] = "grid_sample"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 1
    header: ClassVar[str] = "grid_sample.cuh"

    @staticmethod
    def takes(node: Node) -> bool:
        return node.definition.samples

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        out, inputs = self.anchor.outputs[0], self.anchor.inputs
        self.rows = out.numel // out.sizes[-1]
        for value in inputs:
            dtype = group.graph.specs[value].dtype
            check(dtype in FLOATS, f"this sketch samples no {dtype}")
        for base, _ in self.images:
            dtype = group.graph.specs[base].dtype
            check(dtype == self.dtype, f"%{base} is {dtype}, and another image {self.dtype}")
        self.grids = [self._of_rows(value, 2) for value in inputs[1::2]]
        self.weights = self._of_rows(inputs[-1], 1) if self._is_sum else None

    @property
    def _is_sum(self) -> bool:
        return len(self.anchor.inputs) % 2 == 1  # weights, behind images and their points

    def _images(self) -> Sequence[str]:
        inputs = self.anchor.inputs
        return inputs[:-1:2] if self._is_sum else inputs[::2]

    def _of_rows(self, value: str, width: int) -> tuple[str, Layout]:
        """Where the `width` numbers of each point of each row lie: [rows, points, width]."""
        base, layout = self.stored(value)
        points = self.group.graph.specs[value].numel // (self.rows * width)
        try:
            return base, layout.reshape((self.rows, points, width))
        except NotAView as error:
            raise Illegal(f"the points of %{value} have no strides: {error}") from None

    def _shares(self) -> tuple[int, ...]:
        most = max(points.shape[1] for _, points in self.grids)
        return tuple(size for size in (1, 2, 4, 8) if size <= most)

    def knobs(self) -> tuple[Knob, ...]:
        return (*super().knobs(), Knob("share", self._shares()))

    def defaults(self) -> Iterable[Schedule]:
        """As many threads share the points of a row as it takes to have enough of them; if that is
        not all, vectors are narrower too."""
        vectors, enough = (
            self.anchor.outputs[0].numel // self.vector,
            THREADS * self.target.sm_count,
        )
        shares = self._shares()
        share = next((size for size in shares if vectors * size >= enough), shares[-1])
        yield {**self._default(share), "share": share}

    def block_work(self, program: KernelProgram) -> BlockWork:
        """A thread's points follow each other, the pixels of about two of them under way."""
        vector, repeat, share = (program.schedule[name] for name in ("vector", "repeat", "share"))
        columns = vector * repeat
        pixels = columns * self.dtype.itemsize * self._taps**2
        points = sum(-(-layout.shape[1] // share) for _, layout in self.grids)
        return BlockWork(
            fill_bytes=points * pixels * program.block,
            l2_bytes=points * pixels * program.block,
            steps=points,
            stages=min(2, points),
            mma_flops=0,
            tile_p=1,
            tile_q=columns * program.block // share,
            split=1,
            registers=min(255, 20 + min(2, points) * pixels // 4),
        )

    @property
    def _taps(self) -> int:
        """Pixels of a point along each axis."""
        return 2 if self.anchor.attrs["mode"] == "bilinear" else 1

    def _operands(self, region: Region, schedule: Schedule) -> tuple[str, str]:
        images, _, _, columns = self.images[0][1].shape
        attrs = self.anchor.attrs
        border, align = (str(attrs[name]).lower() for name in ("border", "align_corners"))
        structs = f"""struct Config {{
  static constexpr int ROWS = {self.rows}, IMAGE_ROWS = {self.rows // images};
  static constexpr int COLUMNS = {columns}, TAPS = {self._taps};
  static constexpr bool BORDER = {border}, ALIGN = {align};
  static constexpr int REPEAT = {schedule["repeat"]}, SHARE = {schedule["share"]};
  static constexpr int THREADS = {schedule["threads"]};
}};
"""
        levels, first, weights = [], 0, "NoWeights{}"
        for number, ((image, pixels), (grid, points)) in enumerate(
            zip(self.images, self.grids, strict=True)
        ):
            elements = (self._element(image), self._element(grid))
            structs += self._level(number, first, elements, pixels, points)
            names = (region.parameter(value, "in") for value in (image, grid))
            levels.append(f"Level{number}{{{', '.join(names)}}}")
            first += points.shape[1]
        if self.weights is not None:
            base, layout = self.weights
            element = self._element(base)
            structs += f"""
struct Weights {{
  const {element}* base;
  __device__ __forceinline__ float at(int row, int i, bool active) const {{
    return load<1>(base + {index(layout, ("row", "i", "0"))}, active)[0];
  }}
}};
"""
            weights = f"Weights{{{region.parameter(base, 'in')}}}"
        operands = ", ".join((EPILOGUE, BLOCK, weights, *levels))
        return structs, f"grid_sample<Config>({operands})"

    def _element(self, base: str) -> str:
        return C_TYPES[self.group.graph.specs[base].dtype]

    def _level(
        self, number: int, first: int, elements: tuple[str, str], pixels: Layout, points: Layout
    ) -> str:
        """The struct of the images of one size and their points, the `first` of a row's weights;
        their elements are of two types."""
        element, coordinate = elements
        _, height, width, _ = pixels.shape
        x, y = (index(points, ("row", "i", axis)) for axis in "01")
        point = f"load_packed<2>(grid + {x}, active)"
        if points.vector(2) < 2:
            one = "load_packed<1>(grid + {}, active).data[0]"
            point = f"{{{{{one.format(x)}, {one.format(y)}}}}}"
        return f"""
struct Level{number} {{
  const {element}* image;
  const {coordinate}* grid;
  static constexpr int HEIGHT = {height}, WIDTH = {width};
  static constexpr int POINTS = {points.shape[1]}, FIRST = {first};
  __device__ __forceinline__ const {element}* pixel(int n, int y, int x, int channel) const {{
    return image + {index(pixels, ("n", "y", "x", "channel"))};
  }}
  __device__ __forceinline__ Packed<{coordinate}, 2> point(int row, int i, bool active) const {{
    return {point};
  }}
}};
"""
