"""What the kernel of a group iterates over: its points and rows, and which nodes shape them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gtco.ir.graph import Node
from gtco.ir.ops import Pattern
from gtco.ir.references import boxes_of
from gtco.ir.spec import TensorSpec
from gtco.ir.views import Layout


def is_anchor(node: Node) -> bool:
    """Whether a kernel of its own is built around `node`."""
    return bool(node.definition.family)


def is_reduction(node: Node) -> bool:
    return node.pattern is Pattern.REDUCTION


def is_statistic(node: Node) -> bool:
    """Whether the kernel of a contraction or of windows may store it beside what it describes."""
    return node.op in ("row_stats", "box_means", "box_moments")


def has_windows(node: Node) -> bool:
    """Whether `node` reduces windows of one size in each channel."""
    return node.definition.family == "stencil" and "stride" in node.attrs


@dataclass(frozen=True)
class Frame:
    """What a kernel iterates over: `full` points, in rows that `row` has one element for."""

    full: tuple[int, ...]
    row: tuple[int, ...] | None

    @property
    def row_map(self) -> Layout | None:
        """Where each point finds its row's element."""
        return None if self.row is None else Layout.contiguous(self.row).expand(self.full)

    def is_full(self, spec: TensorSpec) -> bool:
        return spec.numel == math.prod(self.full)

    def is_row(self, spec: TensorSpec) -> bool:
        """Whether `spec` is one element per row, in the order of the rows, and broadcasts so."""
        if self.row is None or spec.numel != math.prod(self.row):
            return False
        if self.row[-1:] == (1,):
            return spec.sizes[-1:] == (1,)
        return _without_leading_ones(spec.sizes) == _without_leading_ones(self.row)


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape


def reduced(node: Node, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, dimensions of it) that a reduction other than merge_stats walks and reduces.

    Args:
        node: the reduction.
        sizes: of its first input, whose elements in their order the shape has too.
    """
    axes = node.definition.axes
    if axes == "groups":
        chunks, groups = node.attrs.get("chunks", 1), node.attrs["groups"]
        pixels = math.prod(sizes[1:-1]) // chunks
        whole = (sizes[0], chunks, pixels, groups, sizes[-1] // groups)
        return (whole, (2, 4)) if chunks > 1 else ((sizes[0], *whole[2:]), (1, 3))
    if axes == "boxes":
        box, columns = node.attrs["box"], node.attrs.get("columns", 1)
        boxes, pixels = boxes_of(sizes, box), tuple(2 + 2 * axis for axis in range(len(box)))
        if columns == 1:
            return boxes, pixels
        return (*boxes[:-1], boxes[-1] // columns, columns), (*pixels, len(boxes))
    shape = sizes or (1,)
    if axes == "last":
        return shape, (len(shape) - 1,)
    dims = (node.attrs["dim"],) if "dim" in node.attrs else node.attrs["dims"]
    found = tuple(sorted(dim % len(shape) for dim in dims))
    return shape, found or tuple(range(len(shape)))


def iteration_shape(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The shape an elementwise kernel walks: of its concat or pad, else of its first node."""
    gathers = [node for node in nodes if node.definition.gathers]
    return (gathers or list(nodes))[0].outputs[0].sizes
