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
from gtco.passes.legality import MAX_COLUMNS
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

PART = 4096
"""Elements of a group that a block reads at once."""
PARTS = ((PART, 1024), (MAX_COLUMNS, 4096), (PART, 16384))
"""Most elements of a group in one part and most statistics that a block merges, in the order of
preference: the more of these, the more the second kernel reads."""
NARROW_BYTES = 16
"""Groups of fewer bytes a pixel are read in parts: a block that holds one reads past most of
what memory gives it."""


def _match(edit: Editor, node: Node) -> tuple[Node, int] | None:
    """The norm and the parts of its images, where it is to be two kernels."""
    sizes, groups = node.outputs[0].sizes, node.attrs["groups"]
    depth, pixels = sizes[-1] // groups, math.prod(sizes[1:-1])
    narrow = depth * node.outputs[0].dtype.itemsize < NARROW_BYTES
    if depth * pixels <= (PART if narrow else MAX_COLUMNS):
        return None
    chunks = [n for n in range(2, pixels + 1) if pixels % n == 0]
    for part, most in PARTS:
        for n in chunks:
            if pixels // n * depth <= part and n * groups <= most:
                return node, n
    return None


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
