"""Images sampled where a grid says: each point is a weighted sum of the pixels around it."""

from __future__ import annotations

from typing import ClassVar

from gtco.codegen.emit import Region, index
from gtco.codegen.scalars import C_TYPES
from gtco.codegen.sketch import Illegal, check
from gtco.codegen.sketches.pixels import Pixels
from gtco.ir.graph import Group
from gtco.ir.views import NotAView
from gtco.target import Target


class GridSample(Pixels):
    """A thread has some vectors of channels of one point, and reads its coordinates once."""

    name: ClassVar[str] = "grid_sample"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1
    header: ClassVar[str] = "grid_sample.cuh"

    def __init__(self, group: Group, target: Target) -> None:
        super().__init__(group, target)
        self.grid, points = self.stored(self.anchor.inputs[1])
        grid_dtype = group.graph.specs[self.grid].dtype
        check(grid_dtype == self.dtype, f"the image is {self.dtype} and its grid {grid_dtype}")
        images, rows, across, _ = self.anchor.outputs[0].sizes
        self.points = rows * across
        try:
            self.points_layout = points.reshape((images * self.points, 2))
        except NotAView as error:
            raise Illegal(f"the points of %{self.anchor.name} have no strides: {error}") from None

    def _operands(self, region: Region, config: str) -> tuple[str, str, str]:
        images, height, width, columns = self.layout.shape
        attrs = self.anchor.attrs
        taps = 2 if attrs["mode"] == "bilinear" else 1
        border, align = (str(attrs[name]).lower() for name in ("border", "align_corners"))
        image, grid = region.parameter(self.base, "in"), region.parameter(self.grid, "in")
        at = index(self.layout, ("n", "y", "x", "channel"))
        element = C_TYPES[self.dtype]
        structs = f"""struct Config {{
  using Element = {element};
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};
  static constexpr int COLUMNS = {columns}, POINTS = {self.points}, TAPS = {taps};
  static constexpr bool BORDER = {border}, ALIGN = {align};
  static constexpr int {config};
}};

struct Image {{
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int n, int y, int x, int channel) const {{
    return base + {at};
  }}
}};

struct Grid {{
  const {element}* base;
  __device__ __forceinline__ Packed<{element}, 2> point(int row, bool active) const {{
    return {self._point()};
  }}
}};
"""
        return structs, "grid_sample<Config>", f"Image{{{image}}}, Grid{{{grid}}}"

    def _point(self) -> str:
        """Both coordinates of the point at `row`, in one access where they lie so."""
        x, y = (index(self.points_layout, ("row", axis)) for axis in "01")
        if self.points_layout.vector(2) == 2:
            return f"load_packed<2>(base + {x}, active)"
        one = "load_packed<1>(base + {}, active).data[0]"
        return f"{{{{{one.format(x)}, {one.format(y)}}}}}"
