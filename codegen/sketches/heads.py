"""Operands of attention as (head, row, column), and the tensor maps by which TMA brings them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gtco.codegen.emit import index
from gtco.codegen.program import TensorMapArgument
from gtco.codegen.sketch import check
from gtco.codegen.sketches.gemm import pad_to
from gtco.ir.views import Layout

MOST_BOX_ROWS = 256
"""That one copy brings."""


@dataclass(frozen=True)
class Heads:
    """An operand as (head, row, column), heads counted over all batch dimensions; of a row, `run`
    columns are copied at once."""

    base: str
    layout: Layout
    run: int = 0

    @property
    def apart(self) -> tuple[int, ...]:
        """Which parts of its head lead elsewhere: several heads may share keys and values."""
        return tuple(at for at, (_, stride) in enumerate(self.layout.dims[0]) if stride != 0)


def check_tensor_map(label: str, operand: Heads) -> None:
    """Refuse an operand, called `label`, of which no tensor map describes boxes.

    Raises:
        Illegal: naming its layout.
    """
    _, row, column = operand.layout.dims
    check(
        len(operand.apart) <= 3 and len(row) <= 1 and len(column) == 1,
        f"operand {label} {operand.layout} has more dimensions than a tensor map",
    )
    once = all(stride != 0 for _, stride in row)
    check(once, f"operand {label} {operand.layout} repeats a row, which no tensor map describes")


def tensor_map(
    operand: Heads, dtype: torch.dtype, rows: int, box: int, atom_bytes: int = 128
) -> TensorMapArgument:
    """The map of boxes of `box` rows and `atom_bytes` of columns, of one head each; zeros beyond
    the last of a head's `rows`."""
    head, row, column = operand.layout.dims
    width = column[0][0]
    row_stride = row[0][1] if row else pad_to(width, 8)
    apart = [head[at] for at in reversed(operand.apart)]
    outer = [*apart, *[(1, row_stride)] * (3 - len(apart))]
    return TensorMapArgument(
        operand.base,
        operand.layout.offset,
        dtype,
        (width, rows, *(extent for extent, _ in outer)),
        (row_stride, *(stride for _, stride in outer)),
        (atom_bytes // dtype.itemsize, box, 1, 1, 1),
        atom_bytes,
    )


def box_rows(rows: int) -> int:
    """Rows that a copy brings of a tile of so many: even parts of it, each a multiple of 8."""
    return max(box for box in range(8, MOST_BOX_ROWS + 1, 8) if rows % box == 0)


def map_text(label: str, operand: Heads) -> str:
    """The struct through which a template copies boxes of `operand`."""
    head = operand.layout.dims[0]
    apart = (*reversed(operand.apart), None, None, None)[:3]
    at = []
    for own in apart:  # of the head, in each of the map's dimensions, innermost first
        one = [(extent, int(i == own)) for i, (extent, _) in enumerate(head)]
        at.append(index(Layout((tuple(one),)), ("head",)))
    return f"""struct {label} {{  // {operand.layout}
  const ptx::TensorMap& map;
  __device__ __forceinline__ void prefetch() const {{ ptx::prefetch_tensormap(map); }}
  __device__ __forceinline__ void copy(u32 to, int column, int row, int head, u32 barrier) const {{
    ptx::cp_async_bulk_tensor(to, map, column, row, {", ".join(at)}, barrier);
  }}
}};
"""
