"""Which compute nodes may share one kernel.

Legality is an algebra over patterns. A group is one of a few families, and a kernel of a family
walks one iteration shape, its frame, in which each member is a full value (one element per point)
or a row value (one element per row):

    gemm         one linear, matmul or conv; then pointwise nodes of the result; row_stats of a
                 stored result, box_means or box_moments may end it. merge_stats of stats from
                 outside are row values. The product that scales a linear's operand, channel by
                 channel, may precede it, or the concat that joins the channels of a linear's or
                 conv's. Of pairs of columns it may store one of each, which nobody in the group
                 reads.
    back_to_back two linears of many rows and few columns, pointwise nodes between them, and what
                 may follow a linear.
    squeeze      the mean of each image, two linears and pointwise nodes of the three.
    stencil      one depthwise convolution, pooling, resize or sampling at points, or several of the
                 first two that read one image; then pointwise nodes of each result, and a concat of
                 it and of others. row_stats of a stored result may end those of the first two,
                 box_means a depthwise convolution.
    attention    one attention; then pointwise nodes of the result, or the linear that projects its
                 merged heads and what may follow a linear.
    rowwise      up to four reductions of the same dimensions of one shape, pointwise nodes between
                 them; or merge_stats and pointwise nodes of its row values.
    elementwise  pointwise nodes, concats and pads of one shape.
    topk         one topk, alone.
    library      any other OPAQUE node, alone.

Every refusal is a sentence. Rules about two members (`Legality.pair`) hold for every group that
has both, so a search may drop all supersets of a refused pair; the others judge whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from gtco.ir.graph import Graph, Group, Node
from gtco.ir.ops import Pattern
from gtco.ir.references import STATS_CHUNK
from gtco.ir.spec import BYTES, FLOATS, Dim
from gtco.passes.back_to_back import LEAST_ROWS, BackToBacks
from gtco.passes.box_means import why_not_boxed
from gtco.passes.dataflow import Flow, bits
from gtco.passes.frames import (
    Frame,
    has_windows,
    is_anchor,
    is_reduction,
    is_statistic,
    iteration_shape,
    reduced,
)
from gtco.passes.operands import Operands
from gtco.passes.prepared import Prepared
from gtco.passes.projection import projected_heads
from gtco.passes.squeeze import Gates
from gtco.passes.stencils import Stencils

MAX_GROUP = 24
"""Compute nodes of a group: a norm behind a residual behind a norm, spelled out, has 21."""
MAX_REDUCTIONS = 4
MAX_COLUMNS = 16384
"""Most elements of one row that a block keeps in registers and shared memory."""

_ELEMENT_DTYPES = FLOATS | {
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn,
}  # fmt: skip


def family(group: Group) -> str:
    """The sketch family that makes the kernel of `group`."""
    return _family(group.compute)


def explain(graph: Graph, nodes: Iterable[Node], *, max_group: int = MAX_GROUP) -> str | None:
    """Why the compute nodes `nodes` are not one legal group, or None if they are.

    `graph` is one whose views all resolve (see `gtco.passes.dataflow.materialize_views`).
    """
    members = [node for node in nodes if not node.definition.is_view]
    return Legality(Flow(graph), max_group).explain(members)


def _family(nodes: Sequence[Node]) -> str:
    alone = next((node for node in nodes if node.pattern is Pattern.OPAQUE), None)
    if alone is not None:
        return alone.definition.family or "library"
    if any(_attends(node) for node in nodes):
        return "attention"
    if contractions := sum(_contracts(node) for node in nodes):
        if any(node.op == "mean" for node in nodes):
            return "squeeze"
        return "gemm" if contractions == 1 else "back_to_back"
    if any(node.definition.family == "stencil" for node in nodes):
        return "stencil"
    return "rowwise" if any(is_reduction(node) for node in nodes) else "elementwise"


def _contracts(node: Node) -> bool:
    """Whether a GEMM kernel is built around `node`."""
    return node.definition.family == "gemm"


def _attends(node: Node) -> bool:
    """Whether an attention kernel is built around `node`."""
    return node.definition.family == "attention"


def is_convex(flow: Flow, mask: int) -> bool:
    """Whether no path between two nodes of the bit set `mask` leaves it."""
    above = below = 0
    for position in bits(mask):
        above |= flow.ancestors[position]
        below |= flow.descendants[position]
    return not above & below & ~mask


class Legality:
    """The rules, over one graph."""

    def __init__(self, flow: Flow, max_group: int) -> None:
        self.flow = flow
        self.max_group = max_group
        self._pairs: dict[tuple[str, str], str | None] = {}
        self._lone: dict[str, str | None] = {}
        self._frames: dict[str, Frame] = {}
        self._projections: dict[str, Node | str] = {}
        self._gates = Gates(flow)
        self._back_to_backs = BackToBacks(flow, LEAST_ROWS)
        self._stencils = Stencils(flow)
        self._operands = Operands(flow)
        self._prepared = Prepared(flow)

    def explain(self, nodes: Sequence[Node]) -> str | None:
        """Why `nodes` are not one legal group, or None if they are."""
        if len(nodes) > self.max_group:
            return f"{len(nodes)} nodes are more than the {self.max_group} of one group"
        if len(nodes) == 1:
            return None
        if reason := self._first_refusal(nodes):
            return reason
        mask = sum(1 << self.flow.index[node.name] for node in nodes)
        if self.flow.connected(mask, mask & -mask, siblings=True) != mask:
            return "the nodes are not connected: no value passes between them"
        if not is_convex(self.flow, mask):
            return "a path between two members leads through a node outside the group"
        return self._members(nodes)

    # -- rules about one node or two ----------------------------------------------------------

    def lone(self, node: Node) -> str | None:
        """Why `node` joins no group at all, or None."""
        if node.name not in self._lone:
            self._lone[node.name] = self._judge_lone(node)
        return self._lone[node.name]

    def _judge_lone(self, node: Node) -> str | None:
        if node.pattern is Pattern.OPAQUE:
            kind = "is a library call and" if not is_anchor(node) else "has a kernel of its own and"
            return f"{node.op} {kind} stays alone"
        inputs = node.inputs[:3] if _attends(node) else node.inputs  # a mask may be bool
        specs = [self.flow.graph.specs[name] for name in inputs]
        specs += node.outputs
        if any(isinstance(dim, Dim) for spec in specs for dim in spec.shape):
            return f"%{node.name} has a dimension that is not known before it runs"
        if any(0 in spec.sizes for spec in specs):
            return f"%{node.name} has an empty operand or result"
        if (row := node.definition.row) is not None and row.counts:  # its result is no float
            specs = specs[:1]
        floats_only = is_anchor(node) or is_reduction(node) or node.op == "normalize_groups"
        allowed = FLOATS if floats_only else _ELEMENT_DTYPES
        if _contracts(node):
            exact = node.outputs[0].dtype == torch.float32
            allowed |= BYTES if exact else BYTES - {torch.int8}
        if node.op == "cast" and node.outputs[0].dtype == torch.float8_e4m3fn:
            return f"%{node.name}: torch's cast to fp8 makes NaN of what is too large"
        for spec in specs:
            if spec.dtype not in allowed:
                return f"{node.op} of {spec} has no generated kernel"
        mixes = len({spec.dtype for spec in specs[:2]}) > 1 and not node.definition.samples
        if is_anchor(node) and mixes:
            return f"{node.op} mixes operands of two dtypes"
        if is_anchor(node) and node.outputs[0].rank < 2:
            return f"the result of %{node.name} is no matrix"
        if is_reduction(node) and node.op != "merge_stats":
            frame = self.frame(node)
            columns = math.prod(frame.full) // math.prod(frame.row or ())
            if columns > MAX_COLUMNS:
                return (
                    f"a row of {columns} elements does not fit the registers and shared memory "
                    f"of one block ({MAX_COLUMNS})"
                )
        return None

    def frame(self, node: Node) -> Frame:
        """The frame that a contraction or reduction gives its group."""
        if node.name not in self._frames:
            self._frames[node.name] = self._make_frame(node)
        return self._frames[node.name]

    def _make_frame(self, node: Node) -> Frame:
        if is_anchor(node):
            columns = node.outputs[0].sizes[-1]
            rows = node.outputs[0].numel // columns
            return Frame((rows, columns), (rows, 1))
        if node.op == "merge_stats":
            rows = node.outputs[0].numel
            return Frame((rows, 1), None)
        full, dims = reduced(node, self.flow.graph.specs[node.inputs[0]].sizes)
        return Frame(full, tuple(1 if dim in dims else size for dim, size in enumerate(full)))

    def projection(self, attention: Node) -> Node | None:
        """The linear that alone reads `attention`, if one kernel may hold both."""
        found = self._judge_projection(attention)
        return None if isinstance(found, str) else found

    def _judge_projection(self, attention: Node) -> Node | str:
        """That linear, or why there is none."""
        if attention.name not in self._projections:
            (value,) = attention.values
            linear, *others = self.flow.readers.get(value, (attention,))
            found: Node | str = linear
            if others or value in self.flow.returned or not linear.definition.is_linear:
                found = f"%{value} is read by others than a projection: it must be stored first"
            elif isinstance(heads := projected_heads(self.flow.graph, attention, linear), str):
                found = heads
            self._projections[attention.name] = found
        return self._projections[attention.name]

    def pair(self, first: Node, second: Node) -> str | None:
        """Why no group holds both nodes, or None if one may."""
        key = (first.name, second.name)
        if key not in self._pairs:
            self._pairs[key] = self._pairs[key[::-1]] = (
                self.lone(first)
                or self.lone(second)
                or (None if self._together(first, second) else self._apart(first, second))
            )
        return self._pairs[key]

    def _together(self, first: Node, second: Node) -> bool:
        """Whether a kernel of several contractions may hold both."""
        return self._gates.joins(first, second) or self._back_to_backs.joins(first, second)

    def _apart(self, first: Node, second: Node) -> str | None:
        return (
            self._edge(first, second)
            or self._edge(second, first)
            or self._kinds(first, second)
            or self._kinds(second, first)
        )

    def span(self, first: Node, second: Node) -> str | None:
        """Why no group holds both nodes, seen with all that lies on paths from `first`.

        A convex group with both has every node between them, so these must get along too.
        """
        start, end = self.flow.index[first.name], self.flow.index[second.name]
        hull = self.flow.descendants[start] & self.flow.ancestors[end]
        between = [self.flow.compute[position] for position in bits(hull)]
        if len(between) + 2 > self.max_group:
            return f"the group would need the {len(between)} nodes on the paths between the two"
        reason = self._first_refusal([first, *between, second])
        if reason is None or not between:
            return reason
        return f"the group would need all nodes on the paths between the two, but {reason}"

    def _first_refusal(self, nodes: Sequence[Node]) -> str | None:
        for index, second in enumerate(nodes):
            for first in nodes[:index]:
                if reason := self.pair(first, second):
                    return reason
        return None

    def _edge(self, made_by: Node, user: Node) -> str | None:
        """Why `user` cannot read the values of `made_by` inside one kernel."""
        for slot, read in enumerate(self.flow.reads[user.name]):
            if read.base not in made_by.values:
                continue
            if _attends(made_by) and user.definition.is_linear and slot == 0:
                found = self._judge_projection(made_by)
                if isinstance(found, str):
                    return found
                continue
            if slot == 0 and self._prepared.takes(made_by, user):
                continue
            if user.definition.family == "stencil":
                return f"%{user.name} reads neighbours: %{read.value} must be stored first"
            if _attends(user) or (_contracts(user) and slot < 2):
                return (
                    f"the operand of a tensor-core {'GEMM' if _contracts(user) else 'attention'} "
                    f"is copied to shared memory unchanged: %{read.value} must be stored first"
                )
            if _contracts(user):
                return f"the bias %{read.value} must be stored first"
            if is_statistic(made_by):
                return (
                    f"%{made_by.name} is complete only after the last tile of a row is stored, "
                    f"so %{user.name} cannot read it in the same kernel"
                )
            joins = user.op == "concat" and self._stencils.behind(made_by)
            if user.op == "merge_stats" or (user.definition.gathers and not joins):
                return f"{user.op} reads stored values only, and %{read.value} is computed here"
            if user.op == "normalize_groups" and slot == 1:
                return f"{user.op} reads its statistics whole: %{read.value} must be stored first"
            if is_reduction(user) and slot > 0:
                return f"the scale or shift %{read.value} of {user.op} must be stored first"
            for view in read.views:
                if view.op != "reshape":
                    return (
                        f"a {view.op} (%{view.name}) lies between %{made_by.name} and "
                        f"%{user.name}: another thread holds the element"
                    )
        return None

    def _kinds(self, anchor: Node, node: Node) -> str | None:
        """Why `node` cannot be in the kernel that `anchor` shapes."""
        if _attends(anchor) and (projection := self.projection(anchor)) is not None:
            # Nobody else reads the result: what else the kernel holds, it holds for the projection.
            if node is projection:
                return None
            if node.op in ("box_means", "box_moments"):
                return f"the kernel of {anchor.op} leaves no means of boxes"
            width, depth = anchor.outputs[0].sizes[-1], self.flow.graph.specs[projection.inputs[0]]
            share = projection.outputs[0].sizes[-1] * width // depth.sizes[-1]
            if node.op == "row_stats" and share % STATS_CHUNK:
                return f"{share} columns of a head's block cut the chunks of the row statistics"
            return self._kinds(projection, node)
        if is_anchor(anchor):
            if _attends(node) and self.projection(node) is anchor:
                return None
            if self._prepared.takes(node, anchor):
                return None
            if (beside := self._stencils.beside(anchor, node)) is not None:
                return None if beside is node else self._kinds(beside, node)
            if node.op == "concat" and anchor.name in self._stencils.behind(node):
                return None
            if is_anchor(node):
                return f"{anchor.op} and {node.op} are two contractions"
            if node.op == "normalize_groups" or node.definition.gathers:
                return f"{node.op} has no place in the epilogue of {anchor.op}"
            if node.op in ("box_means", "box_moments"):
                return why_not_boxed(anchor, node, self.flow.graph.specs[node.inputs[0]].sizes)
            if is_reduction(node) and node.op not in ("row_stats", "merge_stats"):
                return f"{node.op} needs whole rows, and a tile of {anchor.op} has parts of them"
            if node.definition.of_pairs and not _contracts(anchor):
                return f"the epilogue of {anchor.op} has no pairs of columns"
            if node.definition.of_pairs and self.frame(anchor).full[1] % 2:
                return f"{node.op} takes pairs of columns, and {self.frame(anchor).full[1]} is odd"
            if node.op == "row_stats" and not (_contracts(anchor) or has_windows(anchor)):
                return f"the epilogue of {anchor.op} has no row statistics"
            if node.op == "row_stats":
                columns = self.frame(anchor).full[1]
                stats = self.flow.graph.specs[node.inputs[0]]
                if stats.numel != anchor.outputs[0].numel or stats.sizes[-1] != columns:
                    return f"row_stats of {stats} does not run along the {columns} columns"
                if columns % 2:
                    return f"row_stats takes pairs of columns, and {columns} is odd"
                return None if _contracts(anchor) else self._stencils.unpaired(anchor)
            return self._in_frame(anchor, node)
        if not is_reduction(anchor) or anchor.op == "merge_stats":
            return None
        if is_reduction(node) and node.op != "merge_stats":
            if self.frame(anchor) != self.frame(node):
                return f"%{anchor.name} and %{node.name} do not reduce the same rows"
        elif node.op == "normalize_groups":
            return f"{node.op} and {anchor.op} share a block's work in different ways"
        elif node.op == "merge_stats":
            if anchor.op != "row_stats":  # a GEMM may read old statistics and make new ones
                return f"merge_stats and {anchor.op} reduce different things"
        elif is_statistic(anchor) and node.name in self._prepared.names:
            return None  # those of what the product gives
        elif not is_anchor(node):
            return self._in_frame(anchor, node)
        return None

    def _in_frame(self, anchor: Node, node: Node) -> str | None:
        frame = self.frame(anchor)
        for spec in node.outputs:
            if not (frame.is_full(spec) or frame.is_row(spec)):
                rows = f" or {list(frame.row)}" if frame.row else ""
                return (
                    f"%{node.name} is {spec}, and the kernel of %{anchor.name} walks "
                    f"{list(frame.full)}{rows}"
                )
        return None

    # -- rules about a whole group ------------------------------------------------------------

    def _members(self, nodes: Sequence[Node]) -> str | None:
        kind = _family(nodes)
        if kind == "squeeze":
            return self._gates.explain(nodes, self._operands)
        if kind == "stencil":
            return self._windowed(nodes)
        if kind == "back_to_back":
            return self._two_linears(nodes)
        reductions = [node for node in nodes if is_reduction(node)]
        if kind in ("gemm", "attention"):
            anchors = [node for node in nodes if is_anchor(node)]
            contractions = [node for node in anchors if _contracts(node)]
            anchor = (contractions or anchors)[0]  # a projection, if any
            if reason := self._made_inside(anchor, nodes):
                return reason
            for operand in nodes:
                if not self._prepared.takes(operand, anchor):
                    continue
                for read in self.flow.reads[operand.name]:
                    if self.flow.producer(read) in nodes:
                        return f"%{read.value}, which %{operand.name} reads, must be stored"
            nodes = [node for node in nodes if not self._prepared.takes(node, anchor)]
            if sum(is_statistic(node) for node in reductions) > 1:
                return "a GEMM ends in one statistic at most"
        elif kind == "rowwise":
            merges = sum(node.op == "merge_stats" for node in reductions)
            if merges and merges < len(reductions):
                return "merge_stats and a reduction of whole rows are two kernels"
            if len(reductions) > MAX_REDUCTIONS:
                return f"{len(reductions)} reductions are more than {MAX_REDUCTIONS}"
            anchor = reductions[0]
        else:
            return self._elementwise(nodes)
        return self._operands.explain(
            nodes, self.frame(anchor), anchor if kind != "rowwise" else None
        )

    def _made_inside(self, anchor: Node, nodes: Sequence[Node]) -> str | None:
        """Why a kernel of this one contraction cannot have its operand made by another member:
        `pair` lets those pass that belong to a kernel of two."""
        made_by = self.flow.producer(self.flow.reads[anchor.name][0])
        if made_by is None or made_by not in nodes or _attends(made_by):
            return None
        if self._prepared.takes(made_by, anchor):
            return None
        return f"%{anchor.name} reads %{made_by.name}, which no contraction of the group makes"

    def _two_linears(self, nodes: Sequence[Node]) -> str | None:
        parts = self._back_to_backs.parts(nodes)
        if isinstance(parts, str):
            return parts
        for part, anchor in parts:
            if sum(node.op == "row_stats" for node in part) > 1:
                return "a GEMM ends in one row_stats at most"
            if any(self._prepared.takes(node, anchor) for node in part):
                return f"%{anchor.name} reads an operand that is prepared"
            if reason := self._operands.explain(part, self.frame(anchor), anchor):
                return reason
        return None

    def _windowed(self, nodes: Sequence[Node]) -> str | None:
        means = next((node for node in nodes if node.op == "box_means"), None)
        beside = [node for node in nodes if is_anchor(node) or node.op == "concat"]
        if means is not None and len(beside) + sum(map(is_statistic, nodes)) > 2:
            return f"%{means.name} comes from a kernel of one convolution, and of nothing besides"
        mask = sum(1 << self.flow.index[node.name] for node in nodes)
        while mask:
            reached = self.flow.connected(mask, mask & -mask)
            mask ^= reached
            part = [self.flow.compute[position] for position in bits(reached)]
            anchors = [node for node in part if is_anchor(node)]
            if len(anchors) != 1:
                return f"the kernel stores each result of {anchors[0].op} by itself"
            frame = self.frame(anchors[0])
            concats = [node for node in part if node.op == "concat"]
            computed = [node for node in part if node.op != "concat"]
            if reason := self._operands.explain(computed, frame, anchors[0]):
                return reason
            inside = {node.name for node in computed}
            if reason := self._stencils.joined(concats, inside, frame.full):
                return reason
        return None

    def _elementwise(self, nodes: Sequence[Node]) -> str | None:
        sizes = {node.outputs[0].numel for node in nodes}
        if len(sizes) > 1:
            return f"the nodes have {min(sizes)} and {max(sizes)} elements: two iteration shapes"
        if sum(node.op == "normalize_groups" for node in nodes) > 1:
            return "two normalize_groups would merge their statistics in the same shared memory"
        return self._operands.explain(nodes, Frame(iteration_shape(nodes), None), None)
