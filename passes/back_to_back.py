"""A linear whose result is the operand of the next one: when one kernel may hold both.

    %y = relu(add(linear(%x, %w), %r))   %z = relu(linear(%y, %v))

Back-to-back products (CUTLASS's B2B GEMM): the expanding convolution of a bottleneck with the
reducing one of the next, or both linears of an MLP. A block makes all columns of its rows of %y, so
that the second product, whose K they are, takes them from registers. It keeps the sums of all of
its own columns, which are few therefore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gtco.ir.graph import Node
from gtco.ir.views import in_order
from gtco.passes.dataflow import Flow, bits

MOST_COLUMNS = 256
"""Of the second product: what two warpgroups keep the sums of."""
MOST_DEPTH = 512
"""K of the first product, of which 128 rows lie in shared memory."""
LEAST_ROWS = 8192
"""Of fewer, too few blocks would walk over all columns of the first product, one after another."""


@dataclass(frozen=True)
class BackToBack:
    """Two linears and what is computed between them.

    Args:
        first: the first linear.
        between: pointwise nodes from its result to the second one's operand, in order.
        second: the second linear. What may follow a linear may follow it.
        beside: names of pointwise nodes that only those between read, such as the product of a
            row's mean and constants. They may be computed with these.
    """

    first: Node
    between: tuple[Node, ...]
    second: Node
    beside: frozenset[str] = frozenset()

    @property
    def middle(self) -> str:
        """The value that both products have in common."""
        return (self.first, *self.between)[-1].values[0]

    @cached_property
    def ahead(self) -> frozenset[str]:
        """Names of the nodes ahead of the second linear."""
        return frozenset(node.name for node in (self.first, *self.between))


class BackToBacks:
    """Those of a graph, by their second linear.

    Args:
        flow: the graph.
        least_rows: of the products.
    """

    def __init__(self, flow: Flow, least_rows: int = 1) -> None:
        self.flow = flow
        linears = [node for node in flow.compute if node.definition.is_linear]
        large = [node for node in linears if _rows(node) >= least_rows]
        found = (_behind(flow, node) for node in large)
        self._of = {each.second.name: each for each in found if each is not None}

    def of(self, second: Node) -> BackToBack | None:
        """The pair that ends in the linear `second`."""
        return self._of.get(second.name)

    def joins(self, first: Node, second: Node) -> bool:
        """Whether one kernel may hold both for the sake of a pair: one of its nodes ahead of its
        second linear, and that or one that is computed from its result."""
        return any(
            node.name in pair.ahead | pair.beside and self._follows(pair, other)
            for pair in self._of.values()
            for node, other in ((first, second), (second, first))
        )

    def parts(self, nodes: Sequence[Node]) -> tuple[tuple[list[Node], Node], ...] | str:
        """The nodes of both epilogues and the linear of each, or why `nodes` are no kernel of two
        linears."""
        anchors = [node for node in nodes if node.definition.family == "gemm"]
        names = {node.name for node in nodes}
        pairs = (self.of(node) for node in anchors)
        pair = next((each for each in pairs if each is not None and each.ahead <= names), None)
        if pair is None or len(anchors) > 2:
            return f"%{anchors[0].name} and %{anchors[1].name} are two contractions"
        before = self.flow.ancestors[self.flow.index[pair.second.name]]
        ahead = [node for node in nodes if before >> self.flow.index[node.name] & 1]
        behind = [node for node in nodes if node not in ahead]
        made = {value for node in ahead for value in node.values}
        for node in behind:
            for slot, read in enumerate(self.flow.reads[node.name]):
                if read.base in made and (node is not pair.second or slot):
                    return f"%{node.name} reads %{read.value} behind %{pair.second.name}"
        return (ahead, pair.first), (behind, pair.second)

    def _follows(self, pair: BackToBack, node: Node) -> bool:
        if node is pair.second:
            return True
        after = self.flow.descendants[self.flow.index[pair.second.name]]
        point_by_point = node.definition.is_pointwise or node.op == "row_stats"
        return point_by_point and bool(after >> self.flow.index[node.name] & 1)


def _behind(flow: Flow, second: Node) -> BackToBack | None:
    """The pair that ends in `second`, if its operand is computed point by point from one linear and
    nobody else reads what lies between; of two linears, from the one with less to copy."""
    graph = flow.graph
    read = flow.reads[second.name][0]
    last = flow.producer(read)
    if last is None or not in_order(read.views, graph.specs[read.base].sizes):
        return None
    (middle,) = last.values
    spec = graph.specs[middle]
    waiting, linears, seen = [last], [], {last.name}
    while waiting:
        node = waiting.pop()
        if node.definition.is_linear:
            linears.append(node)
        elif _is_point_by_point(node):
            for each in map(flow.producer, flow.reads[node.name]):
                if (
                    each is not None
                    and each.name not in seen
                    and each.outputs[0].sizes == spec.sizes
                ):
                    seen.add(each.name)
                    waiting.append(each)
    linears.sort(key=lambda node: (_depth(flow, node), -flow.index[node.name]))
    for first in linears:
        path = flow.descendants[flow.index[first.name]] & flow.ancestors[flow.index[second.name]]
        between = tuple(flow.compute[position] for position in bits(path))
        pair = BackToBack(first, between, second)
        inside = pair.ahead | {second.name}
        points = all(
            _is_point_by_point(node) and node.outputs[0].sizes == spec.sizes for node in between
        )
        ahead = (value for node in (first, *between) for value in node.values if value != middle)
        if points and _fits(flow, pair) and not any(flow.escapes(each, inside) for each in ahead):
            return replace(pair, beside=_beside(flow, pair))
    return None


def _beside(flow: Flow, pair: BackToBack) -> frozenset[str]:
    sizes, inside, found = pair.first.outputs[0].sizes, set(pair.ahead), set[str]()
    waiting = list(pair.between)
    while waiting:
        for node in map(flow.producer, flow.reads[waiting.pop().name]):
            if (
                node is not None
                and node.name not in inside
                and _is_point_by_point(node)
                and node.outputs[0].sizes == sizes
                and not flow.escapes(node.values[0], inside)
            ):
                found.add(node.name)
                inside.add(node.name)
                waiting.append(node)
    return frozenset(found)


def _is_point_by_point(node: Node) -> bool:
    return node.definition.is_pointwise and not node.definition.of_pairs


def _rows(linear: Node) -> int:
    spec = linear.outputs[0]
    return spec.numel // spec.sizes[-1] if spec.rank and spec.sizes[-1] else 0


def _depth(flow: Flow, linear: Node) -> int:
    return flow.graph.specs[linear.inputs[0]].sizes[-1]


def _fits(flow: Flow, pair: BackToBack) -> bool:
    """Whether a kernel could hold the pair: what its size says, whatever the target."""
    graph, linears = flow.graph, (pair.first, pair.second)
    operands = {graph.specs[name].dtype for node in linears for name in node.inputs[:2]}
    return (
        all(name in graph.constants for node in linears for name in node.inputs[1:])
        and operands in ({torch.float16}, {torch.bfloat16})
        and _rows(pair.first) == _rows(pair.second) > 0
        and pair.second.outputs[0].sizes[-1] <= MOST_COLUMNS
        and _depth(flow, pair.first) <= MOST_DEPTH
    )
