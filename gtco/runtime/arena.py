"""Where each value lies in the one buffer that a compiled model works in.

Greedy by size: the largest value is placed first, each next one into the tightest gap between
values that are alive at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes: a multiple of a TMA tile's row and of what torch itself aligns views for."""


@dataclass(frozen=True)
class Lifetime:
    """A value that needs memory.

    Args:
        name: of the value.
        nbytes: its size.
        first: the launch that stores it; -1 for one that is there before the first launch.
        last: the last launch that reads it, inclusive.
    """

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both are alive during one launch."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Byte offsets by value name, and the size of the whole."""

    offsets: Mapping[str, int]
    nbytes: int


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_arena(lifetimes: Sequence[Lifetime]) -> Arena:
    """Place every value so that no two that are alive together overlap."""
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end, value: sorted by begin
    offsets: dict[str, int] = {}
    for value in sorted(lifetimes, key=lambda each: (-each.nbytes, each.first, each.name)):
        size = align(value.nbytes)
        busy = [(begin, end) for begin, end, other in placed if value.meets(other)]
        offset = _tightest_gap(busy, size)
        offsets[value.name] = offset
        placed.append((offset, offset + size, value))
        placed.sort(key=lambda each: each[0])
    return Arena(offsets, max((end for _, end, _ in placed), default=0))


def _tightest_gap(busy: Sequence[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap between the `busy` ranges (sorted) that holds `size` bytes."""
    best: tuple[int, int] | None = None  # length, start
    cursor = 0
    for begin, end in busy:
        gap = begin - cursor
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, cursor)
        cursor = max(cursor, end)
    return cursor if best is None else best[1]
