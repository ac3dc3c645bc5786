"""Images made larger or smaller: each pixel is a weighted sum of those around its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gtco.codegen.emit import Region, index
from gtco.codegen.scalars import C_TYPES, literal
from gtco.codegen.sketch import Knob, Schedule, check
from gtco.codegen.sketches.pieces import BLOCK
from gtco.codegen.sketches.pixels import EPILOGUE, Pixels
from gtco.codegen.sketches.stencil import THREADS
from gtco.codegen.tile_loads import SECTOR
from gtco.ir.graph import Node

ACROSS = (1, 2, 4)
"""Pixels of a thread, side by side."""


class Resize(Pixels):
    """A thread has some vectors of channels of one pixel of the result, or one of some pixels."""

    name: ClassVar[str] = "resize"
    version: ClassVar[int] = 2
    schedule_version: ClassVar[int] = 2
    later_knobs: ClassVar[Mapping[str, int]] = {"across": 1}
    header: ClassVar[str] = "resize.cuh"

    @staticmethod
    def takes(node: Node) -> bool:
        return "size" in node.attrs

    def knobs(self) -> tuple[Knob, ...]:
        pixels = tuple(each for each in ACROSS if each == 1 or not self._why_not_across(each))
        return (*super().knobs(), Knob("across", pixels, range(1, max(ACROSS) + 1)))

    def _default(self, share: int) -> Schedule:
        """Several pixels a thread where enough threads are left and each stores whole sectors of
        32 bytes, or all that a pixel has."""
        numel, enough = self.anchor.outputs[0].numel, 2 * THREADS * self.target.sm_count
        columns = self.anchor.outputs[0].sizes[-1]
        whole = columns * self.dtype.itemsize % SECTOR == 0 or columns == self.vector
        for across in reversed(ACROSS[1:]) if whole else ():
            threads = numel // (self.vector * across)
            if threads >= enough and not self._why_not_across(across):
                return {"vector": self.vector, "repeat": 1, "threads": 256, "across": across}
        return {**super()._default(share), "across": 1}

    def _why_not_across(self, across: int) -> str:
        """Why a thread has not so many pixels side by side, or ""."""
        _, _, width, _ = self.images[0][1].shape
        _, _, columns, _ = self.anchor.outputs[0].sizes
        if self.anchor.attrs["mode"] != "bilinear":
            return f"across: {self.anchor.attrs['mode']} pixels share no columns"
        if self._steps()[1] >= 1.0:
            return f"across: {width} columns are not made more by {columns}"
        if columns % across:
            return f"across: {across} pixels do not divide {columns}"
        return ""

    def _factor(self, across: int) -> int:
        """By which even number the image is made wider, if all threads with so many pixels have
        them between the same of their columns; else 0."""
        if self.anchor.attrs["align_corners"]:
            return 0
        factor = round(1 / self._steps()[1])
        even = factor * self._steps()[1] == 1.0 and factor % 2 == 0
        same = across % factor == 0 or factor % (2 * across) == 0
        return factor if even and same else 0

    def _steps(self) -> list[float]:
        ((_, layout),) = self.images
        _, height, width, _ = layout.shape
        _, rows, columns, _ = self.anchor.outputs[0].sizes
        return steps((height, width), (rows, columns), self.anchor.attrs)

    def _operands(self, region: Region, schedule: Schedule) -> tuple[str, str]:
        ((base, layout),) = self.images
        images, height, width, columns = layout.shape
        _, rows, across, _ = self.anchor.outputs[0].sizes
        scales = [literal(step) for step in self._steps()]
        pixels = schedule["across"]
        if pixels > 1:
            why = self._why_not_across(pixels)
            check(not why, why)
            check(schedule["repeat"] == 1, f"across: {pixels} pixels have one vector of each")
        factor = self._factor(pixels) if pixels > 1 else 0
        image = region.parameter(base, "in")
        at = index(layout, ("n", "y", "x", "channel"))
        element = C_TYPES[self.dtype]
        structs = f"""struct Config {{
  using Element = {element};
  static constexpr int IMAGES = {images}, HEIGHT = {height}, WIDTH = {width};
  static constexpr int COLUMNS = {columns}, P = {rows}, Q = {across};
  static constexpr int REPEAT = {schedule["repeat"]}, THREADS = {schedule["threads"]};
  static constexpr int ACROSS = {pixels}, FACTOR = {factor};
  static constexpr float SCALE_H = {scales[0]}, SCALE_W = {scales[1]};
}};

struct Image {{
  const {element}* base;
  __device__ __forceinline__ const {element}* at(int n, int y, int x, int channel) const {{
    return base + {at};
  }}
}};
"""
        template = f"resize<Config, {self._axis()}>"
        if pixels > 1:
            where = "EvenColumns<Config>" if factor else f"AnyColumns<Config, {self._axis()}>"
            template = f"resize_across<Config, {where}, {self._axis()}>"
        return structs, f"{template}(Image{{{image}}}, {EPILOGUE}, {BLOCK})"

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
