"""The mean of each image and the two small linears of its gate: when one kernel may hold them all.

    %m = mean(%x[n, h, w, c])   %h = relu(linear(%m, %w1))   %g = sigmoid(linear(%h, %w2))

Squeeze-and-excitation (Hu et al., CVPR 2018). An image is the work of one block, or of a cluster
whose blocks share its channels, so the weights are small: each image reads them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import in_order
from gtco.passes.dataflow import Flow, bits
from gtco.passes.frames import Frame
from gtco.passes.operands import Operands

MAX_WEIGHTS = 1 << 20
"""Most elements of one of the two weights."""


@dataclass(frozen=True)
class Gate:
    """The nodes of one gate, by what they are computed for.

    Args:
        mean: of an image's pixels: [N, ..., C].
        before: pointwise nodes of the mean.
        squeeze: the first linear, to [N, ..., hidden].
        between: pointwise nodes of its result.
        excite: the second linear. Pointwise nodes of its result may follow.
    """

    mean: Node
    before: tuple[Node, ...]
    squeeze: Node
    between: tuple[Node, ...]
    excite: Node

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return (self.mean, *self.before, self.squeeze, *self.between, self.excite)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(node.name for node in self.nodes)

    @property
    def images(self) -> int:
        return self.mean.outputs[0].numel // self.mean.outputs[0].sizes[-1]

    def leads_to(self, node: Node) -> bool:
        """Whether `node` is computed point by point and has as many elements as the result."""
        alone = node.definition.is_pointwise and not node.definition.of_pairs
        return alone and node.outputs[0].numel == self.excite.outputs[0].numel


class Gates:
    """The gates of a graph."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._of: dict[str, Gate] = {}
        for node in flow.compute:
            gate = _gate(flow, node) if node.definition.is_linear else None
            if gate is not None and not gate.names & self._of.keys():
                self._of |= dict.fromkeys(gate.names, gate)

    def of(self, node: Node) -> Gate | None:
        """The gate that `node` belongs to."""
        return self._of.get(node.name)

    def joins(self, first: Node, second: Node) -> bool:
        """Whether one kernel may hold both for a gate's sake: nodes of it, or one ahead of its last
        linear and one that is computed from its result."""
        gates = self.of(first), self.of(second)
        if gates[0] is not None and gates[1] is not None:
            return gates[0] is gates[1]
        for gate, node, other in ((gates[0], first, second), (gates[1], second, first)):
            if gate is not None and node is not gate.excite and gate.leads_to(other):
                after = self.flow.descendants[self.flow.index[gate.excite.name]]
                return bool(after >> self.flow.index[other.name] & 1)
        return False

    def explain(self, nodes: Sequence[Node], operands: Operands) -> str | None:
        """Why the kernel of a gate's mean does not hold all of `nodes`, or None if it does."""
        inside = {node.name for node in nodes}
        mean = next(node for node in nodes if node.op == "mean")
        gate = self.of(mean)
        if gate is None or not gate.names <= inside:
            return f"%{mean.name} shares a kernel with two linears or with none"
        after = [node for node in nodes if node.name not in gate.names]
        if not all(gate.leads_to(node) for node in after):
            return f"the kernel of %{mean.name} ends in values of %{gate.excite.name}"
        full = dict.fromkeys(inside, True)
        for width_of, part in (
            (gate.mean, gate.before),
            (gate.squeeze, gate.between),
            (gate.excite, after),
        ):
            frame = Frame((gate.images, width_of.outputs[0].sizes[-1]), None)
            for node in part:
                if reason := operands.pointwise(node, frame, inside, full):
                    return reason
        return None


def _is_mean_of_pixels(graph: Graph, node: Node) -> bool:
    """Whether `node` keeps the first and the last dimension of [N, pixels ..., C] alone."""
    rank = graph.specs[node.inputs[0]].rank
    if node.op != "mean" or rank < 3 or not node.outputs[0].numel:
        return False
    dims = sorted(dim % rank for dim in node.attrs["dims"])
    return dims == list(range(1, rank - 1))


def _gate(flow: Flow, excite: Node) -> Gate | None:
    if not excite.outputs[0].rank:  # its weights are one row
        return None
    if (second := _behind(flow, excite)) is None or not second[0].definition.is_linear:
        return None
    squeeze, between = second
    if not squeeze.outputs[0].rank:
        return None
    if (first := _behind(flow, squeeze)) is None or not _is_mean_of_pixels(flow.graph, first[0]):
        return None
    mean, before = first
    gate = Gate(mean, before, squeeze, between, excite)
    images = gate.images
    rows = all(node.outputs[0].numel == images * node.outputs[0].sizes[-1] for node in gate.nodes)
    known = all(spec.dtype in FLOATS for node in gate.nodes for spec in node.outputs)
    return gate if rows and known else None


def _behind(flow: Flow, linear: Node) -> tuple[Node, tuple[Node, ...]] | None:
    """What the operand of `linear` is computed from by pointwise nodes, and those.

    None if there is no one such node, others read what lies between, or the weights are large.
    """
    weights = linear.inputs[1:]
    if any(name not in flow.graph.constants for name in weights):
        return None
    if flow.graph.specs[weights[0]].numel > MAX_WEIGHTS:
        return None
    starts: dict[str, Node] = {}
    between: dict[str, Node] = {}
    waiting = [flow.reads[linear.name][0]]  # a GEMM's operand: any view in the order of its rows
    while waiting:
        read = waiting.pop()
        made_by = flow.producer(read)
        if made_by is None or made_by.name in between:
            continue
        if any(view.op != "reshape" for view in read.views) and (
            between or not in_order(read.views, flow.graph.specs[read.base].sizes)
        ):
            return None
        if made_by.definition.is_pointwise and not made_by.definition.of_pairs:
            between[made_by.name] = made_by
            waiting += flow.reads[made_by.name]
        else:
            starts[made_by.name] = made_by
    if len(starts) != 1:
        return None
    (start,) = starts.values()
    reached = flow.descendants[flow.index[start.name]] & flow.ancestors[flow.index[linear.name]]
    if {flow.compute[position].name for position in bits(reached)} != between.keys():
        return None
    inside = {*between, linear.name}
    width = start.outputs[0].sizes[-1:]
    for node in (start, *between.values()):
        if flow.escapes(node.values[0], inside) or node.outputs[0].sizes[-1:] != width:
            return None
    ordered = sorted(between.values(), key=lambda node: flow.index[node.name])
    return start, tuple(ordered)
