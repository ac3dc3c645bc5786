"""Convolution of patches on `mma.sync`, on all targets and of all types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from gtco.codegen.sketch import Knob, Schedule
from gtco.codegen.sketches.conv_patches import ConvPatches, Operands


class ConvMma(ConvPatches):
    """Planes -> ldmatrix -> m16n8k16 (fp8 k32, floats k8)."""

    name: ClassVar[str] = "conv_mma"
    version: ClassVar[int] = 1
    schedule_version: ClassVar[int] = 1
    patches = ((1, 8, 8), (1, 8, 16), (1, 16, 8), (1, 16, 16), (1, 32, 8), (1, 16, 32), (2, 4, 8),
               (2, 8, 8), (4, 4, 8), (4, 8, 8), (2, 8, 16), (8, 8, 8))  # fmt: skip

    def knobs(self) -> tuple[Knob, ...]:
        volume = self.windows.axes == 3
        return (
            Knob("tile_t", (1, 2, 4, 8) if volume else (1,)),
            Knob("tile_h", (4, 8, 16, 32)),
            Knob("tile_w", (8, 16, 32)),
            Knob("block_n", (16, 32, 64, 128)),
            Knob("chunks", (1, 2, 4, 8)),
            Knob("warps_m", (1, 2, 4, 8)),
            Knob("warps_n", (1, 2)),
            Knob("stages", (1, 2, 3)),
        )

    def _check_operands(self) -> None:
        """All that the base takes."""

    def _part(self, columns: int) -> int:
        return columns

    def _warps(self, rows: int, columns: int) -> Iterable[tuple[int, int]]:
        return [(rows // tall, max(1, columns // 64)) for tall in (16, 32, 64)]

    def _operands(self, schedule: Schedule, chunks: int) -> Operands:
        rows, columns = self._warp(schedule)
        warps = schedule["warps_m"] * schedule["warps_n"]
        return {"warps": warps, "operand_bytes": warps * chunks * (rows + columns) * 16}
