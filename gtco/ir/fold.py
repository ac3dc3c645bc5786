"""Repeated layers of a list: `a b c b c b c d` is `a`, three times `b c`, and `d`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

OUTSIDE = -1
"""In place of an item's position: the value is an input of the whole list."""

Source = tuple[int, int | str]
"""Who makes a value, as a position, and which of its values it is; or `OUTSIDE` and the name."""


@dataclass(frozen=True)
class Item:
    """One entry of the list.

    Args:
        form: what it is without names; equal forms do the same work.
        reads: where each of its operands comes from, in order.
    """

    form: Hashable
    reads: tuple[Source, ...]


@dataclass(frozen=True)
class Repeat:
    """The items from `start` on are `count` times a block of `period` items."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + self.period * self.count


def find_repeats(items: Sequence[Item]) -> tuple[Repeat, ...]:
    """Repeats that together hide the most items, in order; they do not overlap.

    A repeat counts as an item itself, so that one which hides but one item is none.

    All blocks of a repeat are one loop's body: their items have equal forms, each operand comes
    from the same place of its block, or of the block before, or is one and the same value from
    ahead of the loop. What the first block reads in place of a block before it comes from ahead of
    the loop too.
    """
    count = len(items)
    fixed: dict[int, list[int | None]] = {}
    hidden = [0] * (count + 1)
    chosen: list[Repeat | None] = [None] * count
    for start in reversed(range(count)):
        tried: list[Repeat] = []
        for period in range(1, (count - start) // 2 + 1):
            # Blocks of whole blocks of a repeat hide less than it does.
            if any(period % r.period == 0 and start + 2 * period <= r.end for r in tried):
                continue
            if first_reads(items, start, period) is None:
                continue
            if period not in fixed:
                pairs = zip(items, items[period:], strict=False)
                fixed[period] = [_shifted(item, later, period) for item, later in pairs]
            times = 2
            while start + (times + 1) * period <= count and all(
                last is not None and last < start
                for last in fixed[period][start + (times - 1) * period :][:period]
            ):
                times += 1
            repeat = Repeat(start, period, times)
            tried.append(repeat)
            saved = (times - 1) * period - 1 + hidden[repeat.end]
            if saved > max(hidden[start], hidden[repeat.end]):
                hidden[start], chosen[start] = saved, repeat
        if hidden[start + 1] > hidden[start]:
            hidden[start], chosen[start] = hidden[start + 1], None
    found: list[Repeat] = []
    at = 0
    while at < count:
        step = chosen[at]
        if step is not None:
            found.append(step)
        at = at + 1 if step is None else step.end
    return tuple(found)


def _shifted(item: Item, later: Item, by: int) -> int | None:
    """The last maker of an operand that both read from the same place; None if they differ."""
    if item.form != later.form or len(item.reads) != len(later.reads):
        return None
    last = OUTSIDE
    for (maker, value), other in zip(item.reads, later.reads, strict=True):
        if maker != OUTSIDE and other == (maker + by, value):
            continue
        if other != (maker, value):
            return None
        last = max(last, maker)
    return last


def first_reads(items: Sequence[Item], start: int, period: int) -> dict[Source, Source] | None:
    """What the first block reads in place of values of a block before it; None if the second block
    is not the same loop's.

    Returns:
        Each value of the first block that the second reads to what the first reads there.
    """
    first: dict[Source, Source] = {}
    for position in range(start, start + period):
        item, later = items[position], items[position + period]
        if item.form != later.form or len(item.reads) != len(later.reads):
            return None
        for read, other in zip(item.reads, later.reads, strict=True):
            if read[0] >= start:
                if other != (read[0] + period, read[1]):
                    return None
            elif start <= other[0] < start + period:
                if first.setdefault(other, read) != read:
                    return None
            elif other != read:
                return None
    return first
