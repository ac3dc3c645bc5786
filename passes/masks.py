"""A mask that is a sum goes to its attention as the two that make it.

    %b[h, q, kh, kw] = add(%rows[h, q, kh, 1], %columns[h, q, 1, kw])
    %y = attention(%q, %k, %v, %b[h, q, kh * kw])  ->  %y = attention(%q, %k, %v, %rows', %columns')

What is added for the row of a key and what is added for its column (the decomposed relative
positions of MViTv2, CVPR 2022, and SAM, ICCV 2023) are small: their sum, one value for each query
and key, is as large as all scores, and nobody stores it. The kernel reads both with strides of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gtco.ir.graph import Node
from gtco.ir.views import Layout, NotAView, apply_view, through_views
from gtco.passes.rewrite import Editor, Rule


@dataclass(frozen=True)
class _Sum:
    attention: Node
    added: Node
    views: tuple[Node, ...]
    """From the sum to the mask."""


def _match(edit: Editor, node: Node) -> _Sum | None:
    if len(node.inputs) != 4:
        return None
    base, views = through_views(edit.producer, node.inputs[3])
    added = edit.producer(base, "add")
    return None if added is None or len(added.inputs) != 2 else _Sum(node, added, views)


def _check(edit: Editor, match: _Sum) -> str | None:
    dtype = edit.dtype(match.attention.inputs[0])
    if any(edit.dtype(name) != dtype for name in match.added.inputs):
        return "what is added is not of q's dtype"
    for node in (match.added, *match.views):
        if not edit.read_once(node.values[0]):
            return f"%{node.values[0]} is read elsewhere too, so it must be stored"
    sizes = match.added.outputs[0].sizes
    operands = {name: through_views(edit.producer, name) for name in match.added.inputs}
    if all(edit.specs[base].numel >= math.prod(sizes) for base, _ in operands.values()):
        return "both are as large as their sum"
    for name, (base, views) in operands.items():
        layout = Layout.contiguous(edit.shape(base))
        try:
            for view in views:
                layout = apply_view(layout, view)
            layout = layout.expand(sizes)
            for view in match.views:
                layout = apply_view(layout, view)
        except NotAView as error:
            return f"%{name} has no strides over the scores: {error}"
    return None


def _replace(edit: Editor, match: _Sum) -> str:
    masks = []
    for name in match.added.inputs:
        value = edit.add("expand", name, shape=match.added.outputs[0].sizes)
        for view in match.views:
            value = edit.add(view.op, value, **view.attrs)
        masks.append(value)
    return edit.add("attention", *match.attention.inputs[:3], *masks, **match.attention.attrs)


SUM_OF_MASKS = Rule(
    "attention(q, k, v, a + b) -> attention(q, k, v, a, b)",
    ("attention",), _match, _replace, _check,
)  # fmt: skip
