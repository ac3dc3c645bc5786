"""A mask that is a sum goes to its attention as the two that make it.

    %b[h, q, kh, kw] = add(%rows[h, q, kh, 1], %columns[h, q, 1, kw])
    %y = attention(%q, %k, %v, %b[h, q, kh * kw])  ->  %y = attention(%q, %k, %v, %rows', %columns')

What is added for the row of a key and what is added for its column (the decomposed relative
positions of MViTv2, CVPR 2022, and SAM, ICCV 2023) are small: their sum, one value for each query
and key, is as large as all scores, and nobody stores it. The kernel reads both with strides of 0.

Rows of a mask that is stored with a border get a length of whole copies, so that the kernel reads
more than one of its elements at a time:

    %m: f16[4,1569,393] = pad(%b, before=[0, 1, 1])
                  ->    %m: f16[4,1569,393] = slice(pad(%b, before=[0, 1, 1], after=[0, 0, 7]))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gtco.ir.graph import Node
from gtco.ir.views import NotAView, through_views
from gtco.passes.rewrite import Editor, Rule, never_refused
from gtco.passes.views import broadcast, check_broadcast


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
    bases = [through_views(edit.producer, name)[0] for name in match.added.inputs]
    if all(edit.specs[base].numel >= math.prod(sizes) for base in bases):
        return "both are as large as their sum"
    for name in match.added.inputs:
        try:
            check_broadcast(edit, name, sizes, match.views)
        except NotAView as error:
            return f"%{name} has no strides over the scores: {error}"
    return None


def _replace(edit: Editor, match: _Sum) -> str:
    sizes = match.added.outputs[0].sizes
    masks = [broadcast(edit, name, sizes, match.views) for name in match.added.inputs]
    return edit.add("attention", *match.attention.inputs[:3], *masks, **match.attention.attrs)


WHOLE = 8
"""Elements of a mask that are copied at once at most."""


def _bordered(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    """(attention, the border around its mask) where rows of the mask begin between two copies."""
    pad = edit.producer(node.inputs[3], "pad") if len(node.inputs) == 4 else None
    odd = pad is not None and pad.outputs[0].sizes[-1] % WHOLE
    return (node, pad) if pad and odd and edit.read_once(node.inputs[3]) else None


def _with_whole_rows(edit: Editor, match: tuple[Node, Node]) -> str:
    node, pad = match
    keys = pad.outputs[0].sizes[-1]
    *after, last = pad.attrs["after"]
    after.append(last + -keys % WHOLE)
    wide = edit.add("pad", pad.inputs[0], before=pad.attrs["before"], after=tuple(after))
    mask = edit.add("slice", wide, dim=pad.outputs[0].rank - 1, start=0, end=keys)
    return edit.add("attention", *node.inputs[:3], mask, **node.attrs)


ROWS_OF_MASKS = Rule(
    "attention(q, k, v, pad(b)) -> attention(q, k, v, slice(pad(b)))",
    ("attention",), _bordered, _with_whole_rows, never_refused,
)  # fmt: skip
SUM_OF_MASKS = Rule(
    "attention(q, k, v, a + b) -> attention(q, k, v, a, b)",
    ("attention",), _match, _replace, _check,
)  # fmt: skip
