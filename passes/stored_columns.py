"""Columns of a product come in the order in which the values that they become are stored.

    %c: f16[1,64,64,256] = conv(%x, %w)                       %c = conv(%x, %w[order])
    %r: f16[1,64,64,64,2,2] = reshape(%c)                 ->  %s: f16[1,64,64,2,2,64] = reshape(%c)
    %p: f16[1,64,2,64,2,64] = permute(%r, [0,1,4,2,5,3])      %r = permute(%s)   %p = permute(%r)

Shuffled pixels, channels last: neighbours of the product lie in four pixels, so that lanes store
two bytes at a time; with the rows of its weights in another order they lie side by side. Numbers of
each channel on the way go with them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.views import Axis, Layout, NotAView, apply_view
from gtco.passes.pulled import computed_of, operand_of
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite


@dataclass(frozen=True)
class _Shuffle:
    """A product and how its columns are stored.

    Args:
        product: with constant weights.
        run: pointwise nodes behind it, in order.
        reshape: the view behind them, which cuts the columns into parts.
        first: which of its dimensions is the first of these parts.
        parts: (size, stride in columns) in the order in which they are stored.
    """

    product: Node
    run: tuple[Node, ...]
    reshape: Node
    first: int
    parts: Axis


def _match(edit: Editor, reshape: Node) -> _Shuffle | None:
    value = reshape.inputs[0]
    first = _first_part(edit.shape(value), reshape.outputs[0].sizes)
    if first is None or not edit.read_once(value):
        return None
    parts = _stored(edit, reshape, edit.shape(value)[-1])
    if parts is None:
        return None
    run: list[Node] = []
    while (made_by := edit.producer(value)) is not None and made_by.definition.family != "gemm":
        operand = operand_of(edit, made_by)
        if operand is None or not edit.read_once(operand):
            return None
        run.insert(0, made_by)
        value = operand
    if made_by is None or made_by.attrs.get("groups", 1) > 1:
        return None
    if not (made_by.definition.is_linear or made_by.definition.convolves):
        return None
    if any(edit.constant(name) is None for name in made_by.inputs[1:]):
        return None
    return _Shuffle(made_by, tuple(run), reshape, first, parts)


def _first_part(sizes: tuple[int, ...], cut: tuple[int, ...]) -> int | None:
    """Where in `cut` the parts of the last of `sizes` begin, if it is cut into several."""
    for first in range(len(cut) - 1 if sizes else 0):
        if math.prod(cut[first:]) == sizes[-1] and cut[first] > 1:
            return first
    return None


def _stored(edit: Editor, view: Node, columns: int) -> Axis | None:
    """The parts of the columns in the order in which the last view from `view` on stores them,
    where those that are stored side by side are not made side by side."""
    try:
        layout = apply_view(Layout.contiguous(edit.shape(view.inputs[0])), view)
        while edit.read_once(view.values[0]):
            (view,) = edit.users(view.values[0])
            if not view.definition.is_view:
                break
            layout = apply_view(layout, view)
    except NotAView:
        return None
    stored = [part for dim in layout.dims for whole in dim for part in _cut(whole, columns)]
    parts = tuple((size, stride) for size, stride in stored if 0 < stride < columns)
    if layout.offset or math.prod(size for size, _ in parts) != columns:
        return None
    if any(size * stride > columns for size, stride in parts):
        return None
    return parts if stored[-1] == parts[-1] and parts[-1][1] > 1 else None


def _cut(whole: tuple[int, int], columns: int) -> Axis:
    """(size, stride) as two where it goes on from the columns of one pixel to those of the next."""
    size, stride = whole
    if stride < columns < size * stride and columns % stride == 0 == size * stride % columns:
        return (size * stride // columns, columns), (columns // stride, stride)
    return (whole,)


def _replace(edit: Editor, match: _Shuffle) -> str:
    order = _order(match.parts)
    edit.root(match.product)
    image, *constants = match.product.inputs
    ordered = [
        edit.add_constant(name, edit.constants[name][order.to(edit.constants[name].device)])
        for name in constants
    ]
    value = edit.add(match.product.op, image, *ordered, **match.product.attrs)
    value = computed_of(edit, match.run, value, order)
    sizes, first = match.reshape.outputs[0].sizes, match.first
    pixels = sizes[:first]
    value = edit.add("reshape", value, shape=(*pixels, *(size for size, _ in match.parts)))
    as_made = sorted(range(len(match.parts)), key=lambda at: -match.parts[at][1])
    dims = (*range(first), *(first + at for at in as_made))
    return edit.add("reshape", edit.add("permute", value, dims=dims), shape=sizes)


def _order(parts: Axis) -> Tensor:
    """Which column each of the columns was, in the new order."""
    places = itertools.product(*(range(size) for size, _ in parts))
    strides = [stride for _, stride in parts]
    found = [sum(at * by for at, by in zip(place, strides, strict=True)) for place in places]
    return torch.tensor(found)


RULES: tuple[Rule[Any], ...] = (
    Rule("permute(reshape(conv(x, w))) -> permute(reshape(conv(x, w[order])))",
         ("reshape",), _match, _replace, never_refused),
)  # fmt: skip


def order_stored_columns(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
