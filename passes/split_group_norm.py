"""Group norm whose groups no block holds becomes two kernels.

%y = group_norm(%x, %g, %b, groups=32, eps=1e-05)
                              ->    %s = group_stats(%x, groups=32, chunks=16)
                                    %y = normalize_groups(%x, %s, %g, %b, eps=1e-05)

The first reads the image once, in parts that fill the chip, and stores few numbers; each block of
the second merges them again, in the same order everywhere, and is pointwise but for that: it
takes what stands before and behind it.
"""

from __future__ import annotations

import math
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.ir.views import NotAView
from gtco.passes.box_means import RUN
from gtco.passes.legality import MAX_COLUMNS
from gtco.passes.long_reductions import CHANNELS, layout_of, parts_that_fill
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

PART = 4096
"""Elements of a group that a block reads at once."""
MOST_STATS = 16384
"""Statistics that a block of the second kernel merges: the more, the more it reads."""
NARROW_PART = 1024
"""Likewise, of narrow groups: few blocks have them all, and each reads past most of what memory
gives it. An H100 took 10.9 us for 256 groups of 4096 pixels and 6.3 for 2048, and 4.7 in two
kernels."""
FEW_GROUPS = 256
"""Of all images: a block for each leaves multiprocessors idle. An H100 took 8.6 us for 64 groups of
10240 elements."""
LINE = 128
"""Bytes."""
MANY_GROUPS, SHORT_PART = 512, 2048
"""Of all images, and elements of one of them: blocks come in turns, and where a group has less than
a line of a pixel, memory gives each of them the lines of several. In BiT-50 at batch 32 an H200
took 71.7 us for 1024 groups of 784 pixels x 16 channels, whose bytes it moves in 16."""
PARTS = ((PART, 1024), (MAX_COLUMNS, 4096), (PART, MOST_STATS))
"""Most elements of a group in one part and most statistics, in the order of preference."""
NARROW_BYTES = 16
"""Groups of fewer bytes a pixel are read several at once: a block that has one reads past most of
what memory gives it. There are as many parts as fill the chip then."""
WIDE = 32
"""Channels that such a block reads of a pixel that has twice as many, where the image is too large
for L2: of 16 at a time an H100 read 67 MB in 52 us, which memory gives in 20."""
LARGE_BYTES = 2**25
"""Of all images: of less, L2 still has what was just written."""


def _match(edit: Editor, node: Node) -> tuple[Node, int] | None:
    """The norm and the parts of its images, where it is to be two kernels."""
    sizes, groups = node.outputs[0].sizes, node.attrs["groups"]
    depth, pixels = sizes[-1] // groups, math.prod(sizes[1:-1])
    width = depth * node.outputs[0].dtype.itemsize
    last = _has_channels_last(edit, node.inputs[0])
    if depth * pixels <= _most_at_once(sizes[0] * groups, width, last=last):
        return None
    if width < NARROW_BYTES and last:
        large = node.outputs[0].nbytes > LARGE_BYTES and sizes[-1] >= 2 * WIDE
        together = WIDE if large else CHANNELS
        filling = next(parts_that_fill(sizes[0], pixels, sizes[-1], together), pixels)
        if filling * groups <= MOST_STATS:
            return node, filling
    chunks = [n for n in range(2, pixels + 1) if pixels % n == 0]
    for part, most in PARTS:
        able = [n for n in chunks if pixels // n * depth <= part and n * groups <= most]
        if able:  # whole runs, of which the kernel of the pixels may leave moments (box_moments)
            return node, next((n for n in able if pixels // n % RUN == 0), able[0])
    return None


def _most_at_once(groups: int, width: int, *, last: bool) -> int:
    """Elements of each of so many groups, with `width` bytes of a pixel, that one kernel takes as a
    row; `last`: where the channels of a pixel lie side by side."""
    if width < NARROW_BYTES:
        return NARROW_PART
    if last and width < LINE and groups >= MANY_GROUPS:
        return SHORT_PART
    return MAX_COLUMNS if groups >= FEW_GROUPS else PART


def _has_channels_last(edit: Editor, value: str) -> bool:
    """Whether the channels of a pixel lie side by side in memory."""
    try:
        channels = layout_of(edit, value).dims[-1]
    except NotAView:
        return False
    return bool(channels) and channels[-1][1] == 1


def _split(edit: Editor, match: tuple[Node, int]) -> str:
    norm, chunks = match
    x, *affine = norm.inputs
    stats = edit.add("group_stats", x, groups=norm.attrs["groups"], chunks=chunks)
    return edit.add("normalize_groups", x, stats, *affine, eps=norm.attrs["eps"])


RULES: tuple[Rule[Any], ...] = (
    Rule("group_norm(x, g, b) -> normalize_groups(x, group_stats(x), g, b)", ("group_norm",),
         _match, _split),
)  # fmt: skip


def split_group_norm(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
