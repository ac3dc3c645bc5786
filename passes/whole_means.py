"""Means and moments of boxes that no kernel leaves become those of the whole image again.

    %b = box_means(%x[n, h, w, c], box=[8, 8])
    %y: f32 = mean(%b, dims=[1, 2])
                                        ->    %y = mean(cast(%x, dtype=f32), dims=[1, 2])

    %b = box_moments(%x[n, p, c], box=[16], columns=4)
    %y = merge_moments(%b[0], %b[1], groups=32, chunks=64, count=64)
                                        ->    %y = group_stats(%x, groups=32, chunks=64)

A mean of one box is a view, unless the kernel of a gate takes it.

Whether the kernel of the pixels leaves them, the sketches say: their limits depend on the target
and stand there. Moments are undone as well where that kernel is predicted to be so much slower than
another one that the image is better read once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gtco.ir.graph import Graph, Group, Node
from gtco.ir.views import through_views
from gtco.passes.box_means import MAKERS
from gtco.passes.dataflow import Flow, bits, make_group, materialize_views
from gtco.passes.legality import explain
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite
from gtco.passes.squeeze import Gates

BOXES = ("box_means", "box_moments")


def whole_means(
    graph: Graph,
    log: Log | None = None,
    *,
    refusal: Callable[[Group], str | None],
    price: Callable[[Group], float | None],
) -> Graph:
    """See the module's docstring.

    Args:
        graph: after all other passes.
        log: as of any pass.
        refusal: why no kernel computes a group, or None if one does.
        price: predicted microseconds of a group's best program, or None if it has none.
    """
    if not any(node.op in BOXES for node in graph.nodes):
        return graph
    flow = Flow(materialize_views(graph))
    known: dict[object, bool] = {}
    refused: set[str] = set()
    for means in flow.compute:
        if means.op in BOXES:
            nodes = _with_its_maker(flow, means)
            group = make_group(flow, nodes)
            key = group.form, group.starts
            if key not in known:
                known[key] = (
                    len(nodes) < 2
                    or explain(flow.graph, nodes) is not None
                    or refusal(group) is not None
                    or (means.op == "box_moments" and _is_dearer(flow, nodes, price))
                )
            if known[key]:
                refused.add(means.name)

    def match(edit: Editor, node: Node) -> tuple[Node, Node] | None:
        means = edit.producer(node.inputs[0], "box_means")
        return (node, means) if means is not None and means.name in refused else None

    def match_moments(edit: Editor, merged: Node) -> tuple[Node, Node] | None:
        moments = edit.producer(through_views(edit.producer, merged.inputs[0])[0])
        found = moments is not None and moments.name in refused
        return (merged, moments) if found and moments is not None else None

    gates = Gates(flow)
    alone = {node.name for node in flow.compute if node.op == "mean" and gates.of(node) is None}

    def match_one(edit: Editor, node: Node) -> Node | None:
        means = edit.producer(node.inputs[0], "box_means")
        same = means is not None and means.outputs[0].numel == node.outputs[0].numel
        return node if same and node.name in alone else None

    rules: tuple[Rule[Any], ...] = (
        Rule("mean(box_means(x), boxes) -> mean(x, pixels)", ("mean",),
             match, _replace, never_refused),
        Rule("merge_moments(box_moments(x)) -> group_stats(x)", ("merge_moments",),
             match_moments, _replace_moments, never_refused),
        Rule("mean(one box) -> reshape(one box)", ("mean",), match_one, _view, never_refused),
    )  # fmt: skip
    return rewrite(graph, rules, log)


def _with_its_maker(flow: Flow, means: Node) -> tuple[Node, ...]:
    """The first product or convolution that `means` is computed from, point by point, it, and what
    lies between; `means` alone if there is none."""
    numel, waiting = flow.graph.specs[means.inputs[0]].numel, [means]
    while waiting:
        for read in flow.reads[waiting.pop().name]:
            node = flow.producer(read)
            if node is None or node.outputs[0].numel != numel:
                continue
            if node.op in MAKERS:
                first, last = flow.index[node.name], flow.index[means.name]
                between = bits(flow.descendants[first] & flow.ancestors[last])
                return (node, *(flow.compute[at] for at in between), means)
            if node.definition.is_pointwise:
                waiting.append(node)
    return (means,)


def _is_dearer(flow: Flow, nodes: tuple[Node, ...], price: Callable[[Group], float | None]) -> bool:
    """Whether the last of `nodes` is computed faster of the image that the others have stored."""
    together, alone, behind = (
        price(make_group(flow, part)) or math.inf for part in (nodes, nodes[:-1], nodes[-1:])
    )
    return together > alone + behind


def _replace(edit: Editor, match: tuple[Node, Node]) -> str:
    mean, boxes = match
    (value,), (spec,) = boxes.inputs, mean.outputs
    if edit.dtype(value) != spec.dtype:
        value = edit.add("cast", value, dtype=spec.dtype)
    dims = tuple(range(1, edit.specs[value].rank - 1))
    value = edit.add("mean", value, dims=dims, keepdim=mean.attrs["keepdim"])
    same = edit.shape(value) == spec.sizes
    return value if same else edit.add("reshape", value, shape=spec.sizes)


def _view(edit: Editor, mean: Node) -> str:
    return edit.add("reshape", mean.inputs[0], shape=mean.outputs[0].sizes)


def _replace_moments(edit: Editor, match: tuple[Node, Node]) -> str:
    merged, moments = match
    attrs = {name: merged.attrs[name] for name in ("groups", "chunks")}
    return edit.add("group_stats", *moments.inputs, **attrs)
