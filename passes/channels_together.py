"""Kernels of images read a copy of one whose channels lie apart in memory.

    %p: f16[1,64,64,256] = permute(%x: f16[1,256,64,64])      %p = permute(%x)   %c = copy(%p)
    %y = conv(%p, %w)                                    ->   %y = conv(%c, %w)
    %z = add(%y, %p)                                          %z = add(%y, %c)

Ahead of that, what is made of inputs alone is made of their pixels:

    %r = relu(%x)   %p = permute(%r)      ->      %p = permute(%x)   %r = relu(%p)

What a model is given has its channels first, as has what a library's kernel made, and the kernels
of images read 16 bytes of a pixel's channels at a time: element by element they took up to ten
times as long (experiments/notes/41-borders.md). All that reads the pixels reads the copy then.
Images of few channels are packed instead (`gtco.passes.layout`), and those of no whole 16 bytes
are padded (`whole_pixels`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.ir.ops import Pattern
from gtco.ir.views import Layout, NotAView, apply_view, through_views
from gtco.passes.dataflow import stored_form
from gtco.passes.layout import FIRST, LAST, as_last
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite

RULE = "f(permute(x)) -> f(copy(permute(x)))"
LEAST_READ = 2**19
"""Elements of all windows of a convolution that are worth a copy."""
LEAST_SIZE = 2**16
"""Elements of an image that are, where others read it."""
LEAST_CHANNELS = 8
"""Of such an image."""


def _of_inputs(edit: Editor, node: Node) -> Node | None:
    """What makes the image that `node` turns, of inputs alone."""
    (value,) = node.inputs
    turns = node.attrs["dims"] == LAST.get(len(edit.shape(value)))
    return edit.producer(value) if turns and _is_of_inputs(edit, value) else None


def _is_of_inputs(edit: Editor, value: str) -> bool:
    """Whether `value` is an image that the graph is given, or what makes it of one, which nothing
    else reads, can have its channels last."""
    made = edit.producer(value)
    if made is None:
        sizes = edit.shape(value)
        return value in edit.inputs and len(sizes) in LAST and sizes[1] >= LEAST_CHANNELS
    turns = made.definition.is_pointwise or (made.op == "concat" and made.attrs["dim"] == 1)
    return turns and edit.read_once(value) and any(_is_of_inputs(edit, x) for x in made.inputs)


def _of_turned_inputs(edit: Editor, made: Node) -> str:
    dims = FIRST[made.outputs[0].rank]
    last = {"dim": len(dims) - 1} if made.op == "concat" else {}
    turned = [as_last(edit, value, dims) for value in made.inputs]
    return edit.add(made.op, *turned, **{**made.attrs, **last})


_RULES: tuple[Rule[Any], ...] = (
    Rule("permute(f(x)) -> f(permute(x)) of inputs", ("permute",), _of_inputs, _of_turned_inputs),
)


def gather_channels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    if any(node.definition.convolves or node.definition.of_images for node in graph.nodes):
        graph = merge_duplicates(rewrite(graph, _RULES, log), log)
    apart = {
        view
        for node in graph.nodes
        for value in _pixels_of(graph, node)
        if (view := _first_apart(graph, value, node)) is not None
    }
    if not apart:
        return graph
    copies: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(copies.get(name, name) for name in node.inputs)))
        for value in apart.intersection(node.values):
            name = f"{value}_together".replace(".", "_")
            while name in graph.specs:
                name += "_"
            copies[value] = name
            copy = Node(name, "copy", (value,), MappingProxyType({}), (graph.specs[value],))
            nodes.append(copy)
    if log is not None:
        log.applied[RULE] += len(copies)
    return replace(graph, nodes=tuple(nodes))


def _pixels_of(graph: Graph, node: Node) -> tuple[str, ...]:
    """The operands of `node` of which its kernel would read all channels of a pixel at once, if
    they are large."""
    definition, (out, *_) = node.definition, node.outputs
    if definition.convolves:
        weight = graph.specs[node.inputs[1]]
        windows = out.numel // out.sizes[-1] * node.attrs.get("groups", 1)
        large = windows * math.prod(weight.sizes[1:]) >= LEAST_READ
        return node.inputs[:1] if large else ()
    read: tuple[str, ...] = ()
    if node.op == "concat" and node.attrs["dim"] % out.rank == out.rank - 1:
        read = node.inputs
    elif definition.family == "stencil" or definition.is_linear or node.op == "normalize_groups":
        read = node.inputs[:1]
    specs = (graph.specs[value] for value in read)
    return tuple(
        value
        for value, spec in zip(read, specs, strict=True)
        if spec.numel >= LEAST_SIZE and spec.sizes[-1] >= LEAST_CHANNELS
    )


def _first_apart(graph: Graph, value: str, reader: Node) -> str | None:
    """The first of the views that lead to `value` whose channels lie apart, if those of `value` do
    and no kernel of `reader` reads it as fast."""
    base, chain = through_views(graph.producers.get, value)
    maker = graph.producers.get(base)
    if base in graph.constants or not chain:
        return None
    generated = maker is not None and (
        maker.pattern is not Pattern.OPAQUE or maker.definition.family
    )
    if generated and not reader.definition.convolves:
        return None
    names = [base, *(view.name for view in chain)]
    start = names.index(stored_form(graph, base)) if maker is not None else 0
    layout, first = Layout.contiguous(graph.specs[names[start]].sizes), None
    try:
        for view in chain[start:]:
            layout = apply_view(layout, view)
            if first is None and _is_apart(layout):
                first = view.name
        *_, columns = layout.shape
        rows, _ = layout.reshape((math.prod(layout.shape) // columns, columns)).dims
    except NotAView:  # it is copied anyway
        return None
    if reader.definition.is_linear and len(rows) < 2:  # a tensor map describes these
        return None
    return first if _is_apart(layout) else None


def _is_apart(layout: Layout) -> bool:
    """Whether the channels of a pixel lie apart."""
    channels = layout.dims[-1]
    return bool(channels) and channels[-1][1] > 1
