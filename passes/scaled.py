"""A linear whose operand is scaled channel by channel on its way into the products.

    %m[n, h, w, c] = mul(%x[n, h, w, c], %g[n, 1, 1, c])   %y = linear(%m, %w)

The gate of squeeze-and-excitation (Hu et al., CVPR 2018), the factors of global response
normalization (ConvNeXt V2, CVPR 2023), or a second operand of as many rows. A kernel that has the
operand in registers ahead of the products multiplies it there, so nobody stores the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import in_order, through_views


@dataclass(frozen=True)
class Scale:
    """What scales the operand of a linear.

    Args:
        product: the node that does.
        value: of its inputs, what is scaled: [..., k].
        factor: the other one, one row of k factors for each `rows` rows.
        groups: of rows, in their order, which share a row of factors.
        rows: of a group.
    """

    product: Node
    value: str
    factor: str
    groups: int
    rows: int


def scale_of(graph: Graph, linear: Node) -> Scale | None:
    """What scales the operand of `linear` in `graph`, if a node there does nothing else.

    Whether others read the product is not asked.
    """
    if not linear.definition.is_linear:
        return None
    base, views = through_views(graph.producers.get, linear.inputs[0])
    product = graph.producers.get(base)
    if product is None or product.op != "mul" or len(product.inputs) != 2:
        return None
    spec = product.outputs[0]
    depth = graph.specs[linear.inputs[0]].sizes[-1:]
    if spec.dtype not in FLOATS or spec.rank < 2 or not spec.numel or spec.sizes[-1:] != depth:
        return None
    if any(graph.specs[name].dtype != spec.dtype for name in product.inputs):
        return None
    if not in_order(views, spec.sizes):
        return None
    for value, factor in (product.inputs, product.inputs[::-1]):
        if graph.specs[value].sizes != spec.sizes:
            continue
        groups = groups_of(graph.specs[factor].sizes, spec.sizes)
        if groups is not None:
            rows = spec.numel // (spec.sizes[-1] * groups)
            return Scale(product, value, factor, groups, rows)
    return None


def groups_of(factor: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
    """How many rows of factors there are, or None where they are not shared so."""
    lead = (1,) * (len(sizes) - len(factor)) + factor
    if not factor or lead[-1] != sizes[-1]:
        return None
    own = 0
    while own < len(sizes) - 1 and lead[own] == sizes[own]:
        own += 1
    return math.prod(sizes[:own]) if all(size == 1 for size in lead[own:-1]) else None
