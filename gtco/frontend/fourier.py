"""Fourier transforms as products with constants.

    %f: c64[b, 14, 8, c] = _fft_r2c(%x: f32[b, 14, 14, c], dim=[1, 2])
    ->
    %y: f32[b, 224, c] = matmul(%w: f32[224, 196], %x: f32[b, 196, c])

An image of 14 x 14 is 196 points, for which one product on the tensor cores is faster than any
sequence of butterflies that reads and writes it several times. Transforms of more points go one
axis after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

MOST_TOGETHER = 256
"""Points of neighbouring axes that are transformed in one product. On an H200 one of 1024 takes
longer than two of 32 (experiments/notes/45-operators.md)."""
MOST_POINTS = 4096
"""Of an axis: its matrix has as many rows and columns."""


class TooLong(ValueError):
    """An axis with too many points for a product with its matrix."""


@dataclass(frozen=True)
class Transform:
    """What one product does: one of ATen's transforms of neighbouring axes.

    Args:
        op: `_fft_r2c`, `_fft_c2c` or `_fft_c2r`.
        sizes: of the axes before.
        dims: the axes in the operator's order, counted from 1.
        norm: ATen's number for how the result is scaled.
        last: ATen's last argument: one-sided, forward, or the size of the last axis.
    """

    op: OpOverload
    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    norm: int
    last: int | bool

    @property
    def gives_complex(self) -> bool:
        """Whether the result has an imaginary part."""
        return self.op is not aten._fft_c2r.default

    @cached_property
    def out(self) -> tuple[int, ...]:
        """The axes' sizes afterwards."""
        return tuple(self._of(torch.zeros(1, *self.sizes, dtype=self._dtype)).shape[1:])

    def matrix(self, *, imaginary: bool, read_after: bool, made_after: bool) -> Tensor:
        """[outputs, points] in fp64.

        Args:
            imaginary: whether an imaginary part is read too: then each point is two.
            read_after: where they are side by side, and not a half of the points each.
            made_after: likewise of the outputs, where they are complex.
        """
        points = math.prod(self.sizes)
        units = torch.eye(points, dtype=self._dtype).reshape(points, *self.sizes)
        columns = [_rows(self._of(units))]
        if imaginary:
            columns.append(_rows(self._of(units * 1j)))
        matrix = torch.stack(columns, 2 if read_after else 1).flatten(1)
        if self.gives_complex and made_after:
            matrix = matrix.reshape(2, -1, matrix.shape[1]).transpose(0, 1).flatten(0, 1)
        return matrix.contiguous()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.op is aten._fft_r2c.default else torch.complex128

    def _of(self, units: Tensor) -> Tensor:
        """What the operator makes of unit vectors is its matrix."""
        made: Tensor = self.op(units, list(self.dims), self.norm, self.last)
        return made


def transforms(
    op: OpOverload, shape: Sequence[int], dims: Sequence[int], norm: int, last: int | bool
) -> Iterator[tuple[int, Transform]]:
    """The products, in order, of one of ATen's transforms, each with the first of its axes.

    Args:
        op, norm, last: as `Transform` has them.
        shape: of what is transformed.
        dims: the axes, of which the last one has half of the numbers where they are those of real
            values.

    Raises:
        TooLong: an axis has more than `MOST_POINTS` points.
    """
    dims = [dim % len(shape) for dim in dims]
    sizes = list(shape)
    if op is aten._fft_c2r.default:
        sizes[dims[-1]] = int(last)
    if (longest := max(sizes[dim] for dim in dims)) > MOST_POINTS:
        raise TooLong(
            f"transforms {longest} points, and an axis may have {MOST_POINTS}; use several of fewer"
        )
    runs = _runs(sizes, dims)
    if op is aten._fft_c2r.default:
        runs.reverse()  # the axis of half of the numbers comes last
    for run in runs:
        halved = dims[-1] in run and op is not aten._fft_c2c.default
        # Of real values, what is not halved has become complex, or still is.
        forward = op is aten._fft_r2c.default or (op is aten._fft_c2c.default and bool(last))
        own = op if halved else aten._fft_c2c.default
        inside = tuple(run.index(dim) + 1 for dim in dims if dim in run)
        of_run = tuple(shape[dim] for dim in run)
        yield run[0], Transform(own, of_run, inside, norm, last if halved else forward)


def _runs(sizes: Sequence[int], dims: Sequence[int]) -> list[list[int]]:
    """`dims` as runs of neighbours of few points, each in order; that of the last one first."""
    left, runs = set(dims), []
    for start in (dims[-1], *sorted(dims[:-1], reverse=True)):
        if start not in left:
            continue
        run = [start]
        left.discard(start)
        grown = True
        while grown:
            grown = False
            for dim in (run[0] - 1, run[-1] + 1):
                points = math.prod(sizes[each] for each in (*run, dim)) if dim in left else 0
                if 0 < points <= MOST_TOGETHER:
                    run = sorted((*run, dim))
                    left.discard(dim)
                    grown = True
        runs.append(run)
    return runs


def _rows(found: Tensor) -> Tensor:
    """[points, *out] -> [outputs, points]; the rows of a real part come first."""
    if found.is_complex():
        found = torch.cat([found.real.flatten(1), found.imag.flatten(1)], 1)
    return found.flatten(1).t().contiguous()
