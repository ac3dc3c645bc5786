"""The first elements of a long row are among the first ones of its parts.

    %v[r, k], %i[r, k] = topk(%x[r, n], k)
      ->  %p[r, parts, k], %j[r, parts, k] = topk(reshape(%x, shape=[r, parts, n / parts]), k)
          %v, %at = topk(reshape(%p, shape=[r, parts * k]), k)
          %i = gather(%j, %at) + gather(where parts begin, %at)

Elements that lie apart, such as all pixels of one channel after another of an image whose channels
are last, are copied first: each load of a warp, or each store ahead, would touch 32 lines.

A kernel has a block for each row, which counts to a quarter of a million elements and has no
registers for so many: it reads them again for each digit of what it looks for. Of equal elements
those of the part ahead stay ahead, so that the order is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import NotAView, through_views
from gtco.passes.long_reductions import layout_of
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

LONG = 100_000
"""Elements of a row that one block looks through in the time that its parts and theirs take."""
PART = 8192
"""Elements of a part, about: a block of 512 threads holds them."""

RUN = 16
"""Neighbours in memory that a row is read by where it lies: 32 bytes come together."""


@dataclass(frozen=True)
class _Long:
    """A topk of rows that are cut into `parts` of `length`, the last one with what fills it up."""

    node: Node
    parts: int
    length: int


def _match(edit: Editor, node: Node) -> _Long | None:
    (x,), k = node.inputs, node.attrs["k"]
    elements = math.prod(edit.shape(x)[-1:])
    if elements <= LONG or edit.dtype(x) not in FLOATS | {torch.int32, torch.int64}:
        return None
    least = -(-elements // PART)
    even = (parts for parts in range(least, 2 * least) if elements % parts == 0)
    parts = next(even, least)
    length = -(-elements // parts)
    worth = k <= length and 2 * parts * k <= elements
    return _Long(node, parts, length) if worth else None


def _is_stored_so(edit: Editor, value: str) -> bool:
    """Whether neighbours in a row are neighbours in memory."""
    try:
        layout = layout_of(edit, value).reshape((-1, edit.shape(value)[-1]))
    except NotAView:
        return False
    return layout.contiguous_run() >= RUN


def _last(dtype: torch.dtype, largest: bool) -> float:
    """What comes behind everything that is ahead of it in a row: NaN is the largest of floats."""
    if dtype in FLOATS:
        return -math.inf if largest else math.nan
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def _replace(edit: Editor, match: _Long) -> tuple[str, str]:
    node, parts, length = match.node, match.parts, match.length
    (x,), attrs = node.inputs, node.attrs
    *ahead, elements = edit.shape(x)
    if not _is_stored_so(edit, x):
        _, views = through_views(edit.producer, x)
        turns = [at for at, view in enumerate(views, 1) if view.op == "permute"]
        turned = views[max(turns) - 1].values[0] if turns else x
        x = edit.add_views(edit.add("copy", turned), views[max(turns, default=len(views)) :])
    if parts * length > elements:
        behind, last = parts * length - elements, _last(edit.dtype(x), attrs["largest"])
        fill = torch.full((*ahead, behind), last, dtype=edit.dtype(x))
        x = edit.add("concat", x, edit.add_constant("fill", fill), dim=len(ahead))
    x = edit.add("reshape", x, shape=(*ahead, parts, length))
    firsts, places = edit.add_node("topk", (x,), attrs)
    joined = (*ahead, parts * attrs["k"])
    firsts_at = torch.arange(parts).mul(length).repeat_interleave(attrs["k"])
    values, found = edit.add_node("topk", (edit.add("reshape", firsts, shape=joined),), attrs)
    places = edit.add("reshape", places, shape=joined)
    begins = edit.add("expand", edit.add_constant("begins", firsts_at), shape=joined)
    in_part, begin = (edit.add("gather", each, found, dim=len(ahead)) for each in (places, begins))
    return values, edit.add("add", in_part, begin)


RULES: tuple[Rule[Any], ...] = (
    Rule("topk(x, k) -> topk(topk(parts, k), k)", ("topk",), _match, _replace, never_refused),
)


def split_long_topk(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
