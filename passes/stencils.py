"""Windows of one image, each channel by itself: what several of them and a concat have in common.

    %a = add(depthwise_conv(%x, %v), %b)   %y = concat(%token, %a)
    %c = add(depthwise_conv(%x, %w), %d)   %z = concat(%token, %c)

One kernel makes both: its blocks share the work, each result goes into its slice of the concat,
and other blocks copy the piece that is stored already.
"""

from __future__ import annotations

from collections.abc import Sequence

from gtco.ir.graph import Node
from gtco.ir.views import NotAView, piece_layout
from gtco.passes.dataflow import Flow, bits


class Stencils:
    """What is computed from the stencils of a graph."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._behind: dict[str, frozenset[str]] = {}

    def behind(self, node: Node) -> frozenset[str]:
        """The stencils that `node` is, or is computed from by pointwise nodes alone; of a concat,
        those that its pieces are."""
        if node.name not in self._behind:
            found: frozenset[str] = frozenset()
            if node.definition.family == "stencil":
                found = frozenset((node.name,))
            elif node.definition.is_pointwise or node.op == "concat":
                for read in self.flow.reads[node.name]:
                    made_by = self.flow.producer(read)
                    if made_by is not None and made_by.op != "concat":
                        found |= self.behind(made_by)
            self._behind[node.name] = found
        return self._behind[node.name]

    def beside(self, anchor: Node, node: Node) -> Node | None:
        """The sibling of `anchor` that `node` is or is computed from, where `anchor` is not."""
        behind = self.behind(node)
        if anchor.name in behind:
            return None
        others = bits(self.flow.siblings[self.flow.index[anchor.name]])
        named = (self.flow.compute[position] for position in others)
        return next((other for other in named if other.name in behind), None)

    def unpaired(self, anchor: Node) -> str | None:
        """Why no thread has two neighbouring channels of `anchor`, or None if threads may."""
        read = self.flow.reads[anchor.name][0]
        try:
            width = self.flow.layout(read).vector(2)
        except NotAView as error:
            return f"%{read.value}, the image of {anchor.op}, is no strided view: {error}"
        if width < 2:
            return f"row_stats takes pairs of columns, and those of %{read.value} lie apart"
        return None

    def joined(
        self, concats: Sequence[Node], inside: set[str], full: tuple[int, ...]
    ) -> str | None:
        """Why a kernel cannot store its result in a slice of a concat and copy the others there.

        Args:
            concats: of its members.
            inside: names of the others.
            full: shape of its result.
        """
        if not concats:
            return None
        (node, *more), graph = concats, self.flow.graph
        if more:
            return f"%{node.name} and %{more[0].name} are two concats"
        specs = [graph.specs[name] for name in node.inputs]
        if any(spec.dtype != node.outputs[0].dtype for spec in specs):
            return f"%{node.name} joins values of several dtypes"
        makers = [self.flow.producer(read) for read in self.flow.reads[node.name]]
        made = [at for at, maker in enumerate(makers) if maker is not None and maker.name in inside]
        if len(made) != 1:
            return f"%{node.name} joins {len(made)} results of one kernel"
        try:
            piece_layout(graph, node, made[0], self.flow.stored[node.name]).reshape(full)
        except NotAView as error:
            return f"%{node.name} has no strides for its piece: {error}"
        return None
