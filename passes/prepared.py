"""Nodes whose work the kernel of a product does as it copies its first operand.

The product that scales a linear's operand (`scaled`) and the concat that is read in pieces
(`joined`), each where nobody else reads it.
"""

from __future__ import annotations

from functools import cached_property

from gtco.ir.graph import Node
from gtco.passes.dataflow import Flow
from gtco.passes.joined import joined_by
from gtco.passes.scaled import scale_of


class Prepared:
    """Those nodes, over one graph."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._known: dict[str, Node | None] = {}

    def takes(self, node: Node, product: Node) -> bool:
        """Whether the kernel of `product` may do the work of `node`."""
        return self._of(product) is node

    @cached_property
    def names(self) -> frozenset[str]:
        """Of those of all products."""
        found = (self._of(node) for node in self._flow.compute)
        return frozenset(node.name for node in found if node is not None)

    def _of(self, product: Node) -> Node | None:
        """The one of `product`, if any."""
        if product.name not in self._known:
            scale = scale_of(self._flow.graph, product)
            made_by = joined_by(self._flow.graph, product) if scale is None else scale.product
            shared = made_by is not None and self._is_shared(made_by)
            self._known[product.name] = None if shared else made_by
        return self._known[product.name]

    def _is_shared(self, node: Node) -> bool:
        """Whether others than one node read its value."""
        (value,) = node.values
        return value in self._flow.returned or len(self._flow.readers[value]) > 1
