"""What is computed of each element of a product that was reordered or cut moves into its kernel.

    %v: f16[1,130,130,64] = reshape(permute(reshape(%c)))       %r = relu(%c)
    %s: f16[1,128,128,64] = slice(slice(%v))                ->  %v = reshape(permute(reshape(%r)))
    %r: f16[1,128,128,64] = relu(%s)                            %s = slice(slice(%v))

Transposed convolutions and enlarged images end so. A kernel's epilogue has each element once, ahead
of the cut; numbers of each channel go with it to where the channel lies there. Only where nobody
else reads what is moved over, and the cut leaves most of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.views import Layout, NotAView, apply_view
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

LEAST_KEPT = 0.75
"""Of a product, that has to be left: what is cut off is computed as well."""


@dataclass(frozen=True)
class _Run:
    """Pointwise nodes, each of the one before, and where the first reads.

    Args:
        nodes: in order; the last is the root.
        views: from the product's value on, in order.
        value: what the first of them is a view of.
        channels: of each channel of `value`, which of the last view's it is; of none where every
            channel has the same numbers.
    """

    nodes: tuple[Node, ...]
    views: tuple[Node, ...]
    value: str
    channels: Tensor


def _match(edit: Editor, node: Node) -> _Run | None:
    if operand_of(edit, node) is None or _next(edit, node) is not None:
        return None  # the last of the run is its root
    nodes = [node]
    while True:
        operand = operand_of(edit, nodes[0])
        if operand is None:
            return None
        made_by = edit.producer(operand)
        if made_by is None or not edit.read_once(operand):
            return None
        if made_by.definition.is_view:
            break
        if not _is_movable(edit, made_by):
            return None
        nodes.insert(0, made_by)
    views: list[Node] = []
    value = operand
    while (view := edit.producer(value)) is not None and view.definition.is_view:
        if not edit.read_once(value):
            return None
        views.insert(0, view)
        value = view.inputs[0]
    sizes = math.prod(edit.shape(operand)), math.prod(edit.shape(value))
    cuts = list(itertools.takewhile(lambda view: view.op == "slice", reversed(views)))
    pixels = all(
        view.attrs["dim"] % view.outputs[0].rank < view.outputs[0].rank - 1 for view in cuts
    )
    narrow = node.outputs[0].dtype.itemsize <= edit.dtype(value).itemsize
    most = 0 < LEAST_KEPT * sizes[1] <= sizes[0]
    apart = any(view.op in ("slice", "permute") for view in views)
    if not (apart and pixels and most and narrow and _is_product(edit, value)):
        return None
    if all(_is_one_number(edit, name) for each in nodes for name in each.inputs):
        return _Run(tuple(nodes), tuple(views), value, torch.empty(0, dtype=torch.long))
    try:
        layout = Layout.contiguous(edit.shape(value))
        for view in views[: len(views) - len(cuts)]:
            layout = apply_view(layout, view)
    except NotAView:
        return None
    channels = _channels(layout, edit.shape(value)[-1])
    return None if channels is None else _Run(tuple(nodes), tuple(views), value, channels)


def _next(edit: Editor, node: Node) -> Node | None:
    """The node behind `node` that moves with it."""
    (value,) = node.values
    if not edit.read_once(value):
        return None
    (reader,) = edit.users(value)
    return reader if _is_movable(edit, reader) and operand_of(edit, reader) == value else None


def _is_movable(edit: Editor, node: Node) -> bool:
    return (
        node.definition.is_pointwise
        and not node.definition.of_pairs
        and bool(operand_of(edit, node))
    )


def operand_of(edit: Editor, node: Node) -> str | None:
    """What `node` computes each element of, if all else are numbers of each channel or of all."""
    if not node.definition.is_pointwise or node.definition.of_pairs or len(node.outputs) != 1:
        return None
    sizes = node.outputs[0].sizes
    found = [name for name in node.inputs if edit.constant(name) is None]
    if len(found) != 1 or edit.shape(found[0]) != sizes:
        return None
    for name in node.inputs:
        shape = edit.shape(name)
        if name != found[0] and math.prod(shape[:-1]) != 1:
            return None
    return found[0]


def _is_one_number(edit: Editor, name: str) -> bool:
    """Whether `name` is no constant of several numbers."""
    constant = edit.constant(name)
    return constant is None or constant.numel() == 1


def _is_product(edit: Editor, value: str) -> bool:
    """Whether `value` ends in the epilogue of a linear, a convolution or attention."""
    made_by = edit.producer(value)
    while made_by is not None and made_by.definition.is_pointwise:
        first = next((name for name in made_by.inputs if edit.constant(name) is None), None)
        made_by = None if first is None or not edit.read_once(first) else edit.producer(first)
    return made_by is not None and made_by.definition.family in ("gemm", "attention")


def _channels(layout: Layout, count: int) -> Tensor | None:
    """Of each of `count` channels of what `layout` is a view of, which channel of the view it is;
    None where they do not keep together."""
    own, pixels = layout.dims[-1], [part for dim in layout.dims[:-1] for part in dim]
    within = [(size, stride) for size, stride in pixels if 0 < stride < count]
    if any(size * stride > count for size, stride in (*own, *within)):
        return None
    result = torch.full((count,), -1)
    start = layout.offset % count
    for place in itertools.product(*(range(size) for size, _ in (*within, *own))):
        steps = zip(place, (*within, *own), strict=True)
        at = start + sum(number * stride for number, (_, stride) in steps)
        channel = 0
        for number, (size, _) in zip(place[len(within) :], own, strict=True):
            channel = channel * size + number
        if at >= count:
            return None
        result[at] = channel
    return result if bool((result >= 0).all()) else None


def _replace(edit: Editor, match: _Run) -> str:
    edit.root(match.nodes[0])
    value = computed_of(edit, match.nodes, match.value, match.channels)
    return edit.add_views(value, match.views)


def computed_of(edit: Editor, nodes: Iterable[Node], value: str, channels: Tensor) -> str:
    """What `nodes`, each of the one before, make of `value`, whose channel i is their `channels[i]`
    so far."""
    for node in nodes:
        operand = operand_of(edit, node)
        inputs = [
            value if name == operand else _moved(edit, name, channels) for name in node.inputs
        ]
        value = edit.add(node.op, *inputs, **node.attrs)
    return value


def _moved(edit: Editor, name: str, channels: Tensor) -> str:
    """The numbers of the channels where these lie in the product."""
    given = edit.constants[name]
    if given.numel() == 1:
        return name
    return edit.add_constant(name, given.reshape(-1)[channels.to(given.device)])


RULES: tuple[Rule[Any], ...] = (
    Rule("f(slice(x)) -> slice(f(x)), x a product", (), _match, _replace),
)


def pull_pointwise(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
