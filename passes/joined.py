"""A linear or a convolution of values joined along their channels, read where each of them lies.

    %c[n, h, w, a + b] = concat(%x[n, h, w, a], %y[n, h, w, b])   %z = conv(%c, %w)

The skips of a U-Net (Ronneberger et al., MICCAI 2015), the branches of CSP, DLA and VoVNet blocks:
K comes in ranges, one a piece, so nobody stores the concat.
"""

from __future__ import annotations

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import NotAView, in_order, through_views
from gtco.passes.dataflow import stored_layout

MOST_PIECES = 8
"""Of a concat that a kernel reads so: each has a pointer or a tensor map of its own."""
RUN = 16
"""Bytes of which a piece's channels are a multiple: what a copy takes at most."""


def joined_by(graph: Graph, product: Node) -> Node | None:
    """The concat of channels that `product` reads as its first operand, if its kernel may read the
    pieces instead.

    Whether others read the concat is not asked.
    """
    if not (product.definition.is_linear or product.definition.convolves):
        return None
    if product.attrs.get("groups", 1) > 1:
        return None
    base, views = through_views(graph.producers.get, product.inputs[0])
    node = graph.producers.get(base)
    if node is None or node.op != "concat":
        return None
    (spec,) = node.outputs
    last = node.attrs["dim"] % spec.rank == spec.rank - 1
    whole = graph.specs[product.inputs[0]].sizes[-1] == spec.sizes[-1]
    if not (last and whole and spec.dtype in FLOATS and in_order(views, spec.sizes)):
        return None
    if not 2 <= len(node.inputs) <= MOST_PIECES:
        return None
    return node if all(_fits(graph, name, node) for name in node.inputs) else None


def _fits(graph: Graph, piece: str, concat: Node) -> bool:
    """Whether copies of 16 bytes bring the channels of `piece`."""
    spec, (whole,) = graph.specs[piece], concat.outputs
    try:
        layout = stored_layout(graph, piece)
    except NotAView:
        return False
    run = RUN // spec.dtype.itemsize
    aligned = spec.sizes[-1] % run == 0 and layout.vector(run, len(layout.dims) - 1) == run
    return spec.dtype == whole.dtype and aligned
