"""Nodes whose work the kernel of a product does as it copies its first operand.

The product that scales a linear's operand (`scaled`), the concat that is read in pieces (`joined`)
and what stands ahead of a convolution's image (`prologues`), each where nobody else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from gtco.ir.graph import Node
from gtco.passes.dataflow import Flow
from gtco.passes.joined import joined_by
from gtco.passes.prologues import prologue_of
from gtco.passes.scaled import scale_of


class Prepared:
    """Those nodes, over one graph."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._known: dict[str, frozenset[str]] = {}
        self._prologues: dict[str, tuple[str, ...]] = {}

    def takes(self, node: Node, product: Node) -> bool:
        """Whether the kernel of `product` may do the work of `node`."""
        return node.name in self._of(product)

    def joins(self, made_by: Node, concat: Node) -> bool:
        """Whether a kernel reads `concat` in pieces and makes of one what `made_by` makes."""
        readers = self._flow.readers.get(concat.values[0], ())
        return any({concat.name, made_by.name} <= self._of(reader) for reader in readers)

    def cut(self, product: Node, nodes: Sequence[Node]) -> str | None:
        """Why a group of `product` and other `nodes` has some of what stands ahead of its image,
        and not all."""
        ahead = self._prologue(product)
        if not ahead:
            return None
        inside = {node.name for node in nodes}
        outside = [name for name in ahead if name not in inside]
        if 0 < len(outside) < len(ahead):
            return f"%{outside[0]} is part of what stands ahead of the image of %{product.name}"
        return None

    @cached_property
    def names(self) -> frozenset[str]:
        """Of those of all products."""
        return frozenset(name for node in self._flow.compute for name in self._of(node))

    def _of(self, product: Node) -> frozenset[str]:
        """Names of those of `product`."""
        if product.name not in self._known:
            scale = scale_of(self._flow.graph, product)
            others = (
                joined_by(self._flow.graph, product),
                None if scale is None else scale.product,
            )
            alone = (node.name for node in others if node and not self._is_shared(node))
            self._known[product.name] = frozenset((*self._prologue(product), *alone))
        return self._known[product.name]

    def _prologue(self, product: Node) -> tuple[str, ...]:
        """Names of what stands ahead of the image of `product`, in order."""
        if product.name not in self._prologues:
            found = prologue_of(self._flow.graph, product)
            names = () if found is None else tuple(node.name for node in found.nodes)
            self._prologues[product.name] = names
        return self._prologues[product.name]

    def _is_shared(self, node: Node) -> bool:
        """Whether others than one node read its value."""
        (value,) = node.values
        return value in self._flow.returned or len(self._flow.readers[value]) > 1
