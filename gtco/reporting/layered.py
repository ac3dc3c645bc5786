"""A layered drawing of a small graph: rows from top to bottom, edges that bend around boxes.

The usual steps (Sugiyama, Tagawa and Toda, 1981): rows by the longest path, long edges through a
place in each row that they pass, an order within rows that crosses few edges, then coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]

GAP_X, GAP_Y = 22.0, 30.0
"""Between boxes of a row, and between rows."""
_PASSING = 10.0
"""Width of an edge that passes a row."""
_SWEEPS = 12


@dataclass(frozen=True)
class Drawing:
    """Where everything is.

    Args:
        corners: of each box, top left.
        paths: of each edge, from the bottom of its producer to the top of its reader; points at
            odd places are the ends of curves, the lines between are straight down.
        width, height: of the whole.
    """

    corners: tuple[Point, ...]
    paths: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def draw(sizes: Sequence[Point], edges: Sequence[tuple[int, int]]) -> Drawing:
    """Place boxes of these `sizes` (width, height).

    Args:
        sizes: of the boxes, in topological order.
        edges: (producer, reader), each from a lower position to a higher one.
    """
    row_of = _rows(len(sizes), edges)
    widths = [width for width, _ in sizes]
    rows: list[list[int]] = [[] for _ in range(max(row_of, default=-1) + 1)]
    for box, row in enumerate(row_of):
        rows[row].append(box)
    above: list[list[int]] = [[] for _ in sizes]
    below: list[list[int]] = [[] for _ in sizes]
    chains = []
    for start, end in edges:
        chain = [start]
        for row in range(row_of[start] + 1, row_of[end]):
            rows[row].append(len(widths))
            chain.append(len(widths))
            widths.append(_PASSING)
            above.append([])
            below.append([])
        chain.append(end)
        chains.append(chain)
        for upper, lower in pairwise(chain):
            below[upper].append(lower)
            above[lower].append(upper)
    _order(rows, above, below)
    centers = _centers(rows, widths, above, below)

    heights = [max((sizes[i][1] for i in row if i < len(sizes)), default=0.0) for row in rows]
    tops = [sum(heights[:i]) + GAP_Y * i for i in range(len(rows))]
    left = min((centers[i] - widths[i] / 2 for i in range(len(widths))), default=0.0)
    right = max((centers[i] + widths[i] / 2 for i in range(len(widths))), default=0.0)
    xs = [center - left for center in centers]
    corners = tuple(
        (xs[i] - sizes[i][0] / 2, tops[row_of[i]] + (heights[row_of[i]] - sizes[i][1]) / 2)
        for i in range(len(sizes))
    )
    paths = []
    for chain in chains:
        start, *passed, end = chain
        points = [(xs[start], corners[start][1] + sizes[start][1])]
        for row, place in enumerate(passed, row_of[start] + 1):
            points += [(xs[place], tops[row]), (xs[place], tops[row] + heights[row])]
        paths.append((*points, (xs[end], corners[end][1])))
    height = tops[-1] + heights[-1] if rows else 0.0
    return Drawing(corners, tuple(paths), right - left, height)


def _rows(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The row of each box: behind all that it reads, sources right ahead of who reads them."""
    row = [0] * count
    made = {end for _, end in edges}
    for start, end in sorted(edges, key=lambda edge: edge[1]):
        row[end] = max(row[end], row[start] + 1)
    for box in range(count):
        readers = [row[end] for start, end in edges if start == box]
        if box not in made and readers:
            row[box] = min(readers) - 1
    return row


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each row by the mean place of its neighbours, from above and from below in turn."""
    place: dict[int, float] = {}

    def number(row: list[int]) -> None:
        place.update({box: at - (len(row) - 1) / 2 for at, box in enumerate(row)})

    for row in rows:
        number(row)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = above if down else below
            row.sort(
                key=lambda box: (
                    sum(place[each] for each in near[box]) / len(near[box])
                    if near[box]
                    else place[box]
                )
            )
            number(row)


def _centers(
    rows: list[list[int]], widths: list[float], above: list[list[int]], below: list[list[int]]
) -> list[float]:
    """Each near its neighbours' mean, in the order of its row, without overlap."""
    centers = [0.0] * len(widths)
    for sweep in range(_SWEEPS + 1):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = []
            for box in row:
                near = above[box] if down else below[box]
                wanted.append(
                    sum(centers[each] for each in near) / len(near) if near else centers[box]
                )
            offsets = [0.0]
            for one, other in pairwise(row):
                offsets.append(offsets[-1] + (widths[one] + widths[other]) / 2 + GAP_X)
            fitted = _monotone(
                [want - offset for want, offset in zip(wanted, offsets, strict=True)]
            )
            for box, base, offset in zip(row, fitted, offsets, strict=True):
                centers[box] = base + offset
    return centers


def _monotone(values: list[float]) -> list[float]:
    """The non-decreasing sequence that is nearest to `values` in squares."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, few), (other, more) = pools[-2:]
            pools[-2:] = [((one * few + other * more) / (few + more), few + more)]
    return [value for value, count in pools for _ in range(count)]
