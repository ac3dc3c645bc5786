"""The statistics of an image's groups are merged of those that the kernel of its pixels leaves.

    %s = group_stats(%x[n, h, w, c], groups=32, chunks=64)
      ->  %b[2, n, runs, parts] = box_moments(%x[n, h * w, c], box=[16], columns=4)
          %s = merge_moments(%b[0], %b[1], groups=32, chunks=64, count=64)

Whoever computes the pixels has them in registers: nobody reads the image once more for them. See
`box_means`, which does the same for means. Where groups have few channels, it has to be a block
with a patch of the image, whose runs lie in lines.
"""

from __future__ import annotations

import math

from gtco.ir.graph import Graph, Node
from gtco.passes.box_means import RUN, maker_of
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite
from gtco.passes.split_group_norm import LARGE_BYTES as BEYOND_L2

MOST_COLUMNS = 32
"""Channels of a box: a product's epilogue has as many at a time."""
LEAST_COLUMNS = 4
"""The moments of fewer are an eighth of the image's bytes: runs have no fewer."""
LARGE_BYTES = 2**23
"""Of an image that is worth it: one that lies in L2 is read faster than moments are merged."""


def _match(edit: Editor, stats: Node) -> tuple[Node, int] | None:
    """The statistics, and how many channels a box has."""
    value = stats.inputs[0]
    _, *sides, channels = edit.shape(value)
    whole = math.prod(sides) % (RUN * stats.attrs["chunks"]) == 0
    columns = math.gcd(channels // stats.attrs["groups"], MOST_COLUMNS)
    if not whole or edit.specs[value].nbytes < LARGE_BYTES:
        return None
    maker = maker_of(edit, value)
    if maker is None or maker.op == "depthwise_conv":
        return None
    if columns < LEAST_COLUMNS and not _has_lines(edit, value, maker):
        return None
    return stats, columns


def _has_lines(edit: Editor, value: str, maker: Node) -> bool:
    """Whether a convolution makes the image as it is, in lines of whole runs, and so large that L2
    has lost it when it is read again."""
    shape = edit.shape(value)
    if len(shape) < 4 or shape[-2] % RUN:
        return False
    made = maker.op == "conv" and maker.outputs[0].sizes == shape
    return made and edit.specs[value].nbytes > BEYOND_L2


def _replace(edit: Editor, match: tuple[Node, int]) -> str:
    stats, columns = match
    (value,) = stats.inputs
    images, *sides, channels = edit.shape(value)
    pixels, parts = math.prod(sides), channels // columns
    if sides != [pixels]:
        value = edit.add("reshape", value, shape=(images, pixels, channels))
    both = edit.add("box_moments", value, box=(RUN,), columns=columns)
    planes = [
        edit.add(
            "reshape",
            edit.add("slice", both, dim=0, start=at, end=at + 1),
            shape=(images, pixels // RUN, parts),
        )
        for at in (0, 1)
    ]
    return edit.add("merge_moments", *planes, **stats.attrs, count=RUN * columns)


RULES: tuple[Rule[tuple[Node, int]], ...] = (
    Rule("group_stats(x) -> merge_moments(box_moments(x))", ("group_stats",), _match, _replace,
         never_refused),
)  # fmt: skip


def moments_of_boxes(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
