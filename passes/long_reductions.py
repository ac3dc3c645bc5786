"""A reduction of all pixels of few channels becomes one of each of some parts and one of those.

    %y[n, 1, 1, c] = mean(%x[n, h, w, c], dims=[1, 2])
      ->  %p = reshape(cast(%x, f32), shape=[n, parts, h * w / parts, c])
          %y = mean(mean(%p, dims=[2]), dims=[1])

A kernel gives each channel of an image to one block, of which few channels make too few; the first
of two has one for each part besides. What lies between is fp32, as the sums in one kernel are. Rows
that no block has registers for are reduced in parts as well.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import Layout, NotAView, apply_view, through_views
from gtco.passes.legality import MAX_COLUMNS
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

SPARED = 1800
"""Pixels that a block reads in the time that a second kernel takes: it has to spare more."""
BLOCKS = 128
"""As many have about one multiprocessor each."""
LEAST_BLOCKS, MOST_BLOCKS = 96, 1024
"""Of as many, a cut between two dimensions is preferred: what is computed ahead of it, such as a
concat, may then be in the first kernel."""
CHANNELS = 16
"""Of a pixel, a block reads as many at least: 32 bytes of halves come from memory together."""

PART_OF_ROW = MAX_COLUMNS // 4


def blocks_of(images: int, channels: int, together: int = CHANNELS) -> int:
    """Blocks that read so many images, each so many neighbouring channels of all pixels of one."""
    return images * max(1, channels // together)


def parts_that_fill(
    images: int, pixels: int, channels: int, together: int = CHANNELS
) -> Iterator[int]:
    """Into how many parts of equally many pixels images may be cut so that there is a block for
    each multiprocessor, the fewest first: 1 where there are enough blocks.

    Args:
        images: how many there are.
        pixels: of an image.
        channels: of a pixel.
        together: of these, neighbours that a block reads.
    """
    least = -(-BLOCKS // blocks_of(images, channels, together))
    return (n for n in range(least, pixels + 1) if pixels % n == 0)


@dataclass(frozen=True)
class _Long:
    """A reduction of neighbouring dimensions.

    Args:
        shape: of its operand, with those dimensions as parts and the pixels of one.
        first: of these two.
    """

    node: Node
    shape: tuple[int, ...]
    first: int


def _match(edit: Editor, node: Node) -> _Long | None:
    x = node.inputs[0]
    shape, rank = edit.shape(x), edit.specs[x].rank
    dims = sorted(dim % rank for dim in node.attrs.get("dims", ()))
    in_order = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    if not in_order or edit.dtype(x) not in FLOATS:
        return None
    ahead, behind = shape[: dims[0]], shape[dims[-1] + 1 :]
    images, pixels, channels = map(math.prod, (ahead, shape[dims[0] : dims[-1] + 1], behind))
    if dims[-1] == rank - 1:
        parts = _parts_of_row(images, pixels) if pixels > MAX_COLUMNS else 1
        cut = (*ahead, parts, pixels // parts)
        return _Long(node, cut, dims[0]) if parts > 1 and _is_view(edit, x, cut) else None
    blocks = blocks_of(images, channels)
    if not (channels and 0 < blocks < BLOCKS):
        return None
    between = itertools.accumulate((shape[dim] for dim in dims[:-1]), operator.mul)
    whole = [n for n in between if LEAST_BLOCKS <= n * blocks <= MOST_BLOCKS]
    for parts in itertools.chain(whole, parts_that_fill(images, pixels, channels)):
        cut = (*ahead, parts, pixels // parts, *behind)
        read = max(pixels // parts, pixels * blocks // BLOCKS) + parts  # by one of each kernel
        if pixels - read > SPARED and _is_view(edit, x, cut):
            return _Long(node, cut, dims[0])
    return None


def _parts_of_row(rows: int, elements: int) -> int:
    """Into how many parts rows are cut: enough for all multiprocessors, where they may be; 1 if
    they cannot be cut."""
    least, most = -(-elements // PART_OF_ROW), min(elements, PART_OF_ROW)
    able = [n for n in range(least, most + 1) if elements % n == 0]
    return next((n for n in able if n * rows >= BLOCKS), able[-1] if able else 1)


def layout_of(edit: Editor, value: str) -> Layout:
    """Where the elements of `value` lie in what is stored of it.

    Raises:
        NotAView: strides cannot express it.
    """
    base, chain = through_views(edit.producer, value)
    return functools.reduce(apply_view, chain, Layout.contiguous(edit.shape(base)))


def _is_view(edit: Editor, value: str, shape: tuple[int, ...]) -> bool:
    """Whether `value` under another shape is where it is stored."""
    try:
        layout_of(edit, value).reshape(shape)
    except NotAView:
        return False
    return True


def _replace(edit: Editor, match: _Long) -> str:
    node, value = match.node, match.node.inputs[0]
    kept = edit.dtype(value)
    if kept != torch.float32:
        value = edit.add("cast", value, dtype=torch.float32)
    if edit.shape(value) != match.shape:
        value = edit.add("reshape", value, shape=match.shape)
    value = edit.add(node.op, value, dims=(match.first + 1,), keepdim=True)
    value = edit.add(node.op, value, dims=(match.first,), keepdim=True)
    if kept != torch.float32:
        value = edit.add("cast", value, dtype=kept)
    same = edit.shape(value) == node.outputs[0].sizes
    return value if same else edit.add("reshape", value, shape=node.outputs[0].sizes)


RULES: tuple[Rule[Any], ...] = (
    Rule("mean(x, pixels) -> mean(mean(x, each part), parts)", ("mean", "sum", "amax"),
         _match, _replace, never_refused),
)  # fmt: skip


def split_long_reductions(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
