"""Attention followed by the projection of its merged heads: when one kernel may hold both."""

from __future__ import annotations

import math

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import HALVES
from gtco.ir.views import Layout, NotAView, resolve

MAX_HEADS = 16
"""Most heads of one batch item: each is a block of a cluster."""


def projected_heads(graph: Graph, attention: Node, linear: Node) -> int | str:
    """How many heads of a batch item `linear` projects, or why one kernel cannot hold both.

        %y[b, q, :] = linear(%a[b, 0, q, :], %a[b, 1, q, :], ...)   %a = attention(...)

    Each head is a block's, and so is an equal share of the columns.
    """
    (value,) = attention.values
    *lead, queries, width = attention.outputs[0].sizes
    depth, columns = (graph.specs[name].sizes[-1] for name in (linear.inputs[0], linear.values[0]))
    try:
        base, layout = resolve(graph, linear.inputs[0])
        if base != value:
            return (
                f"attention and linear are two contractions, and %{linear.name} reads no %{value}"
            )
        heads, rest = divmod(depth, width)
        if (
            rest
            or math.prod(lead) % heads
            or math.prod(layout.shape) != math.prod(lead) * queries * width
        ):
            return f"%{linear.name} does not project whole heads of %{value}"
        items = math.prod(lead) // heads
        merged = Layout.contiguous((items, heads, queries, width)).permute((0, 2, 1, 3))
        rows = (items * queries, depth)
        if layout.reshape(rows) != merged.reshape(rows):
            return f"%{linear.name} reads the heads of %{value} in another order"
    except NotAView as error:
        return f"%{linear.name} reads no strided view of %{value}: {error}"
    if not 2 <= heads <= MAX_HEADS:
        return f"{heads} heads of a batch item, a cluster has 2 to {MAX_HEADS} blocks"
    if attention.outputs[0].dtype not in HALVES:
        return f"m16n8k16 takes no {attention.outputs[0].dtype}"
    if width % 16:
        return f"a head of {width} columns, and m16n8k16 takes 16 at a time"
    if columns % (16 * heads):
        return f"{columns} columns are no multiple of 16 for each of {heads} heads"
    return heads
