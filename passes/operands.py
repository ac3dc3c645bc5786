"""Which operands a kernel finds while it walks its frame.

The walk visits one point after another. A member finds an operand there that is stored and has
strides over the frame, or that another member makes of the same point or of its row.
"""

from __future__ import annotations

from collections.abc import Sequence

from gtco.ir.graph import Node
from gtco.ir.views import Layout, NotAView
from gtco.passes.dataflow import Flow, Read
from gtco.passes.frames import Frame, is_anchor, is_reduction, is_statistic


class Operands:
    """The rules about operands, over one graph."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def explain(self, nodes: Sequence[Node], frame: Frame, anchor: Node | None) -> str | None:
        """Why a member of a group with this frame cannot read an operand, or None if all can.

        `anchor` is the contraction, if there is one: its operands are the pairs' business.
        """
        inside = {node.name for node in nodes}
        full: dict[str, bool] = {}
        for node in sorted(nodes, key=lambda node: self._flow.index[node.name]):
            if is_anchor(node):
                full[node.name] = True
                continue
            if node.op == "merge_stats":
                full[node.name] = anchor is None
                spec = node.outputs[0]
                if not (frame.is_full(spec) if anchor is None else frame.is_row(spec)):
                    return f"%{node.name} gives {spec}, not one value for each row"
                continue
            if is_reduction(node):
                reason = self._reduction(node, anchor, inside, full)
                row = node.definition.row
                full[node.name] = row is not None and row.whole
            else:
                full[node.name] = frame.is_full(node.outputs[0])
                if not full[node.name] and not frame.is_row(node.outputs[0]):
                    return f"%{node.name} is {node.outputs[0]}, neither a full nor a row value"
                reason = self.pointwise(node, frame, inside, full)
            if reason:
                return reason
        if anchor is None:
            return None
        for node in nodes:
            row_value = not full[node.name] and not is_statistic(node)
            if row_value and any(self._flow.escapes(value, inside) for value in node.values):
                return f"%{node.name} is a row value, and no one block of a GEMM stores it"
        return None

    def _reduction(
        self, node: Node, anchor: Node | None, inside: set[str], full: dict[str, bool]
    ) -> str | None:
        read = self._flow.reads[node.name][0]
        made_by = self._inner(read, inside)
        if made_by is not None and not full[made_by.name]:
            return f"%{node.name} reduces the row value %{read.value}"
        if (
            anchor is not None
            and node.op == "row_stats"
            and not self._flow.escapes(read.base, inside)
        ):
            return f"row_stats describes stored values, and nobody stores %{read.base}"
        return None

    def pointwise(
        self, node: Node, frame: Frame, inside: set[str], full: dict[str, bool]
    ) -> str | None:
        """Why pointwise `node` cannot read an operand, or None.

        Args:
            node: the reader.
            frame: of its kernel.
            inside: names of the members.
            full: whether each member so far, and `node`, is a full value or else a row value.
        """
        shape = node.outputs[0].sizes
        target = frame.full if full[node.name] else frame.row
        assert target is not None
        for slot, read in enumerate(self._flow.reads[node.name]):
            if node.op == "normalize_groups" and slot == 1:
                if not self._flow.layout(read).is_contiguous:
                    return f"%{node.name} reads its statistics through a view"
                continue
            operand = self._flow.graph.specs[read.value].sizes
            made_by = self._inner(read, inside)
            if made_by is not None and node.definition.gathers:
                return f"{node.op} reads stored values only, and %{read.value} is computed here"
            where = f"%{read.value}, an operand of %{node.name},"
            try:
                if made_by is None:
                    layout = self._flow.layout(read)
                    if node.definition.gathers:
                        if shape != frame.full:
                            return f"the result of %{node.name} is reshaped in the kernel"
                    else:
                        layout.expand(shape).reshape(target)
                    continue
                seen = Layout.contiguous(operand).expand(shape).reshape(target)
            except NotAView as error:
                return f"{where} has no strides over {list(target)}: {error}"
            if full[node.name] and not full[made_by.name]:
                row_map = frame.row_map
                if row_map is None or seen.dims != row_map.dims:
                    return f"{where} is no row value of {list(frame.full)}"
            elif seen.dims != Layout.contiguous(target).dims:
                return f"{where} is broadcast inside the kernel"
        return None

    def _inner(self, read: Read, inside: set[str]) -> Node | None:
        """The member that makes the operand, or None if it comes from outside."""
        made_by = self._flow.producer(read)
        return made_by if made_by is not None and made_by.name in inside else None
