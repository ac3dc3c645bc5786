"""Images made larger or smaller: each pixel is a weighted sum of those around its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gtco.codegen.emit import Region, index
from gtco.codegen.scalars import C_TYPES, literal
from gtco.codegen.sketch import Schedule
from gtco.codegen.sketches.pieces import BLOCK
from gtco.codegen.sketches.pixels import EPILOGUE, Pixels
from gtco.ir.graph import Node


class Resize(Pixels):
    """A thread has some vectors of channels of one pixel of the result."""

    name: ClassVar[str] = "resize"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 2
    header: ClassVar[str] = "resize.cuh"

    @staticmethod
    def takes(node: Node) -> bool:
        return "size" in node.attrs

    def _operands(self, region: Region, schedule: Schedule) -> tuple[str, str]:
        ((base, layout),) = self.images
        images, height, width, columns = layout.shape
        _, rows, across, _ = self.anchor.outputs[0].sizes
        scales = [
            literal(step) for step in steps((height, width), (rows, across), self.anchor.attrs)
        ]
        image = region.parameter(base, "in")
        at = index(layout, ("n", "y", "x", "channel"))
        element = C_TYPES[self.dtype]
        structs = f"""struct Config {{
  using Element = {element};
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};
  static constexpr int COLUMNS = {columns}, P = {rows}, Q = {across};
  static constexpr int REPEAT = {schedule["repeat"]}, THREADS = {schedule["threads"]};
  static constexpr float SCALE_H = {scales[0]}, SCALE_W = {scales[1]};
}};

struct Image {{
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int n, int y, int x, int channel) const {{
    return base + {at};
  }}
}};
"""
        call = f"resize<Config, {self._axis()}>(Image{{{image}}}, {EPILOGUE}, {BLOCK})"
        return structs, call

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
