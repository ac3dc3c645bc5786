"""A linear reads channels in the order in which they lie.

    %p: f16[64,33,192,2] = permute(%c, [1,2,3,0])          %t = permute(reshape(%x))
    %x: f16[64,33,384] = reshape(%p)                  ->   %z: f16[64,33,384] = reshape(%t)
    %y = linear(%x, %w)                                    %y = linear(%z, %w[:, order])

Real and imaginary parts that alternate, or unshuffled pixels: what makes them stores, or a copy
reads, neighbours far apart. With the weights in another order all of a part lies side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.views import Axis, Layout, NotAView, apply_view, through_views
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite


@dataclass(frozen=True)
class _Parts:
    """A linear and the parts of its channels.

    Args:
        linear: with constant weights.
        sizes: of the parts, as they are read.
        order: the parts in the order in which they lie.
    """

    linear: Node
    sizes: tuple[int, ...]
    order: tuple[int, ...]


def _match(edit: Editor, linear: Node) -> _Parts | None:
    x, w, *_ = linear.inputs
    parts = _parts(edit, x)
    if edit.constant(w) is None or not parts:
        return None
    order = tuple(sorted(range(len(parts)), key=lambda at: -parts[at][1]))
    apart = parts[-1][1] > 1 and parts[order[-1]][1] == 1
    return _Parts(linear, tuple(size for size, _ in parts), order) if apart else None


def _parts(edit: Editor, value: str) -> Axis:
    """(size, stride) of the parts of the last dimension of views that nobody else reads."""
    base, views = through_views(edit.producer, value)
    try:
        layout = Layout.contiguous(edit.shape(base))
        for view in views:
            if not edit.read_once(view.values[0]):
                return ()
            layout = apply_view(layout, view)
    except NotAView:
        return ()
    return layout.dims[-1]


def _replace(edit: Editor, match: _Parts) -> str:
    x, w, *bias = match.linear.inputs
    *rows, channels = edit.shape(x)
    value = edit.add("reshape", x, shape=(*rows, *match.sizes))
    dims = (*range(len(rows)), *(len(rows) + at for at in match.order))
    value = edit.add("permute", value, dims=dims)
    value = edit.add("reshape", value, shape=(*rows, channels))
    order = torch.arange(channels).reshape(match.sizes).permute(match.order).flatten()
    known = edit.constants[w]
    ordered = edit.add_constant(w, known[:, order.to(known.device)])
    return edit.add("linear", value, ordered, *bias, **match.linear.attrs)


RULES: tuple[Rule[Any], ...] = (
    Rule("linear(permuted channels of x, w) -> linear(x, w[:, order])", ("linear",),
         _match, _replace, never_refused),
)  # fmt: skip


def order_read_channels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
