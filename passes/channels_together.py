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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.ir.ops import Pattern
from gtco.ir.views import Layout, NotAView, apply_view, through_views
from gtco.passes.dataflow import copy_of, stored_form
from gtco.passes.frames import is_reduction, reduced
from gtco.passes.layout import as_last
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite
from gtco.passes.views import FIRST, LAST

RULE = "f(permute(x)) -> f(copy(permute(x)))"
LEAST_READ = 2**14
"""Elements of all windows of a convolution that are worth a copy."""
LEAST_SIZE = 2**15
"""Elements of an image that are, where others read it."""
LEAST_OPERANDS = 2**19
"""Elements of each of several images that are, where a pointwise node reads them: the kernel of one
turns it by itself (`gtco.codegen.sketches.transpose`)."""
LEAST_CHANNELS = 8
"""Of such an image."""
RUN = 8
"""Elements of 16 bits that kernels of images read at once."""
_BORDERS = frozenset(("pad", "extend"))


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
    joins = made.op == "concat" and made.attrs["dim"] == 1
    turns = made.definition.is_pointwise or joins or made.op in _BORDERS
    return turns and edit.read_once(value) and any(_is_of_inputs(edit, x) for x in made.inputs)


def _of_turned_inputs(edit: Editor, made: Node) -> str:
    rank = made.outputs[0].rank
    attrs = dict(made.attrs)
    if made.op == "concat":
        attrs["dim"] = rank - 1
    for name in ("before", "after") if made.op in _BORDERS else ():
        attrs[name] = tuple(made.attrs[name][dim] for dim in LAST[rank])
    turned = [as_last(edit, value, FIRST[rank]) for value in made.inputs]
    return edit.add(made.op, *turned, **attrs)


_RULES: tuple[Rule[Any], ...] = (
    Rule("permute(f(x)) -> f(permute(x)) of inputs", ("permute",), _of_inputs, _of_turned_inputs),
)


def gather_channels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    turned = rewrite(graph, _RULES, log)
    graph = graph if turned is graph else merge_duplicates(turned, log)
    apart = {
        view
        for node in graph.nodes
        for value in _pixels_of(graph, node)
        if (view := _first_apart(graph, value, node)) is not None
    }
    if not apart:
        return graph
    taken = set(graph.specs)
    copies: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(copies.get(name, name) for name in node.inputs)))
        for value in apart.intersection(node.values):
            nodes.append(copy_of(value, graph.specs[value], taken))
            copies[value] = nodes[-1].name
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
    elif definition.is_pointwise:
        large = [x for x in node.inputs if graph.specs[x].numel >= LEAST_OPERANDS]
        apart = [x for x in large if _first_apart(graph, x, node) is not None]
        read = tuple(apart if len(apart) > 1 else ())
    elif (
        definition.family == "stencil"
        or definition.is_linear
        or node.op in ("normalize_groups", "roll", *_BORDERS)
    ):
        read = node.inputs[:1]
    elif is_reduction(node) and node.op != "merge_stats":
        sizes, dims = reduced(node, graph.specs[node.inputs[0]].sizes)
        read = node.inputs[: dims == (len(sizes) - 1,)]
    specs = (graph.specs[value] for value in read)
    return tuple(
        value
        for value, spec in zip(read, specs, strict=True)
        if spec.rank and spec.numel >= LEAST_SIZE and spec.sizes[-1] >= LEAST_CHANNELS
    )


def _first_apart(graph: Graph, value: str, reader: Node) -> str | None:
    """The first of the views that lead to `value` whose copy has the channels of `value` together,
    if they lie apart and no kernel of `reader` reads it as fast."""
    base, chain = through_views(graph.producers.get, value)
    maker = graph.producers.get(base)
    if base in graph.constants or not chain:
        return None
    library = maker is not None and maker.pattern is Pattern.OPAQUE and not maker.definition.family
    if not (maker is None or library or reader.definition.convolves):
        return None
    names = [base, *(view.name for view in chain)]
    start = 0 if maker is None else names.index(stored_form(graph, base))
    views = chain[start:]
    try:
        layout = _seen(graph, names[start], views)
        rows, _ = layout.reshape((math.prod(layout.shape[:-1]), layout.shape[-1])).dims
        if not _is_apart(layout):
            return None
        runs = layout.vector(RUN, len(layout.shape) - 1) > 1  # as patches have, which are gathered
        if reader.definition.is_linear and (runs or len(rows) < 2):
            return None  # of rows of one stride a tensor map describes the columns, too
        for at, view in enumerate(views, 1):
            if not _is_apart(_seen(graph, view.name, views[at:])):
                return view.name
    except NotAView:  # it is copied anyway
        pass
    return None


def _seen(graph: Graph, value: str, views: Sequence[Node]) -> Layout:
    """Where the elements of the last of `views` lie in `value`, stored as it is.

    Raises:
        NotAView: strides cannot express it.
    """
    layout = Layout.contiguous(graph.specs[value].sizes)
    for view in views:
        layout = apply_view(layout, view)
    return layout


def _is_apart(layout: Layout) -> bool:
    """Whether fewer channels of a pixel lie side by side than would in a copy, of 16 bytes."""
    last = len(layout.shape) - 1
    return layout.vector(RUN, last) < Layout.contiguous(layout.shape).vector(RUN, last)
