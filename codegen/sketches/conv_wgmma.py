"""Convolution of patches on `wgmma`, which reads planes of pixels and weights as they lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from gtco.codegen.sketch import Knob, Schedule, check
from gtco.codegen.sketches.conv_patches import ConvPatches, Operands
from gtco.codegen.timing import WGMMA_ROWS
from gtco.ir.spec import HALVES


class ConvWgmma(ConvPatches):
    """Planes -> descriptors without a swizzle -> m64nNk16: a square of 8 x 8 pixels is M."""

    name: ClassVar[str] = "conv_wgmma"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1
    patches = ((1, 8, 8), (1, 8, 16), (1, 16, 8), (1, 16, 16), (1, 16, 32), (1, 32, 16), (2, 8, 8),
               (4, 8, 8), (2, 8, 16), (8, 8, 8))  # fmt: skip

    def knobs(self) -> tuple[Knob, ...]:
        volume = self.windows.axes == 3
        return (
            Knob("tile_t", (1, 2, 4, 8) if volume else (1,)),
            Knob("tile_h", (8, 16, 32)),
            Knob("tile_w", (8, 16, 32)),
            Knob("block_n", (16, 32, 64, 96, 128)),
            Knob("chunks", (2, 4, 8)),
            Knob("warps_m", (4, 8, 16)),
            Knob("warps_n", (1,)),
            Knob("stages", (1, 2, 3)),
        )

    def _check_operands(self) -> None:
        check(self.target.has_wgmma, f"{self.target.arch} has no wgmma")
        dtype = self.problem.dtype
        check(dtype in HALVES, f"{dtype} in planes, which threads copied: 16 bits alone")
        check(self.chunks > 1, "one chunk of channels, and wgmma takes two")

    def _part(self, columns: int) -> int:
        part = 64 if self.problem.row_stats else 32
        return part if columns % part == 0 else columns

    def _warps(self, rows: int, columns: int) -> Iterable[tuple[int, int]]:
        squares = rows // WGMMA_ROWS
        return [(4 * squares // each, 1) for each in (1, 2, 4) if squares % each == 0]

    def _operands(self, schedule: Schedule, chunks: int) -> Operands:
        rows = schedule["tile_t"] * schedule["tile_h"] * schedule["tile_w"]
        share = rows // WGMMA_ROWS * (WGMMA_ROWS + schedule["block_n"])
        return {"warps": 0, "operand_bytes": chunks * share * 16}
