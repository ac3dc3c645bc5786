"""Fusion: partition a graph's compute nodes into the groups that become kernels.

The plan is the cheapest by the given price among all partitions into legal groups (DPOF, AutoGTCO,
ICCAD 2021); `gtco.passes.segments` has the recurrence and `gtco.passes.legality` the rules.

    %y = linear(%x, %w)   %h = gelu(%y)   %z = linear(%h, %v)
    gemm_0(%x, %w) -> %h   gemm_1(%h, %v) -> %z
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gtco.ir.graph import FusedGraph, Graph, Group, Node
from gtco.passes.dataflow import Flow, bits, drop_dead, make_group, materialize_views
from gtco.passes.legality import MAX_GROUP, Legality, family
from gtco.passes.segments import Partition, find_segments, joined_parts, solve
from gtco.passes.workload import describe

_log = logging.getLogger("gtco.fusion")

Price = Callable[[Group], float]
"""Predicted time of a group from its start to the next one's, in microseconds; infinite where a
plan that was replayed is wanted again and does not have the group."""


def fuse(graph: Graph, price: Price, *, max_group: int = MAX_GROUP) -> FusedGraph:
    """Partition the compute nodes of `graph` into groups so that the sum of prices is least.

    Args:
        graph: after the rewrite passes.
        price: microseconds of a group; called once for each distinct workload.
        max_group: most compute nodes in a group.

    Returns:
        The groups in launch order, and the graph they run: views that strides cannot express
        have become copies, and cheap nodes with readers in several groups have clones.
    """
    return best_plans(graph, price, 1, max_group=max_group)[0]


def best_plans(
    graph: Graph, price: Price, count: int, *, max_group: int = MAX_GROUP
) -> tuple[FusedGraph, ...]:
    """The `count` cheapest plans (fewer if there are fewer), the cheapest first.

    Segments that are the same work, such as the layers of a transformer, have the same plan: plans
    that differ in one layer of twelve would say little when they are replayed.

    Args:
        graph, price, max_group: as for `fuse`.
        count: how many to keep.
    """
    graph = clone_cheap(materialize_views(drop_dead(graph)), max_group)
    flow = Flow(graph)
    legality = Legality(flow, max_group)
    known_prices: dict[str, float] = {}

    def price_of(nodes: Sequence[Node]) -> float:
        group = make_group(flow, nodes)
        key = describe(group.graph).text()
        if key not in known_prices:
            known_prices[key] = price(group)
        return known_prices[key]

    segments: dict[str, list[list[Node]]] = {}
    for segment in find_segments(legality, flow.compute):
        workload = describe(make_group(flow, segment).graph)
        ordered = [flow.compute[flow.index[name]] for name in workload.order]
        segments.setdefault(workload.text(), []).append(ordered)
    legal_plans = 1
    best: list[tuple[float, tuple[Partition, ...]]] = [(0.0, ())]
    for alike in segments.values():
        solution = solve(legality, alike[0], price_of, count)
        legal_plans *= solution.plans ** len(alike)
        _log.debug(
            "%d segments of %d nodes like that of %%%s: %d plans, %d groups",
            len(alike),
            len(alike[0]),
            alike[0][0].name,
            solution.plans,
            len(solution.best[0].groups),
        )
        longer = [
            (cost_us + len(alike) * partition.cost_us, (*chosen, partition))
            for cost_us, chosen in best
            for partition in solution.best
        ]
        best = sorted(longer, key=lambda plan: plan[0])[:count]
    plans = []
    for rank, (_, chosen) in enumerate(best):
        partition = [
            [node for index, node in enumerate(ordered) if mask >> index & 1]
            for part, alike in zip(chosen, segments.values(), strict=True)
            for ordered in alike
            for mask in part.groups
        ]
        ordered_groups = _launch_order(flow, partition)
        groups = _named(flow, ordered_groups)
        cut = "the search was cut here" if rank == 0 else "this is not the cheapest plan"
        refusals = _refusals(legality, ordered_groups, groups, price_of, cut)
        plans.append(FusedGraph(graph, groups, refusals, legal_plans))
    return tuple(plans)


def in_groups(graph: Graph, partition: Iterable[Sequence[Node]]) -> FusedGraph:
    """`graph` in groups that somebody else chose.

    Args:
        graph: after `gtco.passes.dataflow.materialize_views`.
        partition: its compute nodes, each once, in legal groups that leave an order of launch.
    """
    flow = Flow(graph)
    return FusedGraph(graph, _named(flow, _launch_order(flow, list(partition))))


def _named(flow: Flow, partition: Sequence[Sequence[Node]]) -> tuple[Group, ...]:
    """The groups of `partition`, numbered in its order."""
    groups = (make_group(flow, nodes) for nodes in partition)
    return tuple(
        replace(group, name=f"{family(group)}_{number}") for number, group in enumerate(groups)
    )


def clone_cheap(graph: Graph, max_group: int = MAX_GROUP) -> Graph:
    """Give each part of the graph that may become a group its own copy of the cheap nodes it reads.

        %m = merge_stats(%s)   %a = mul(%x, %m)   %b = mul(%y, %m)
        %m = merge_stats(%s)   %a = mul(%x, %m)   %m_1 = merge_stats(%s)   %b = mul(%y, %m_1)

    Cheap are merge_stats and pointwise nodes of one value per row or of constants alone: making
    them again costs less than a kernel that makes them once.
    """
    flow = Flow(graph)
    cheap = frozenset(node.name for node in flow.compute if _is_cheap(graph, node))
    if not cheap:
        return graph
    legality = Legality(flow, max_group)
    costly = [node for node in flow.compute if node.name not in cheap]
    parts = joined_parts(legality, costly)
    part_of = {node.name: number for number, part in enumerate(parts) for node in part}

    needed: dict[str, tuple[int, ...]] = {}
    for node in reversed(flow.compute):
        if node.name in cheap:
            readers = [user for value in node.values for user in flow.readers.get(value, ())]
            stored = any(value in flow.returned for value in node.values)
            if stored or any(legality.pair(node, user) for user in readers):
                continue  # one copy must be stored anyway
            parts_of = [needed.get(user.name, ()) for user in readers if user.name in cheap]
            wanted = {part for each in parts_of for part in each}
            wanted |= {part_of[user.name] for user in readers if user.name in part_of}
            needed[node.name] = tuple(sorted(wanted))
    if all(len(wanted) < 2 for wanted in needed.values()):
        return graph
    return _Cloner(graph, needed, part_of).run()


class _Cloner:
    """Rewrites a graph so that each part reads its own instance of the nodes in `needed`."""

    def __init__(
        self, graph: Graph, needed: Mapping[str, tuple[int, ...]], part_of: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.needed = needed
        self.part_of = part_of
        self.nodes: list[Node] = []
        self.taken = set(graph.specs) | {node.name for node in graph.nodes}
        self.clones: dict[tuple[str, int], Node] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            wanted = self.needed.get(node.name, ())
            home = wanted[0] if wanted else self.part_of.get(node.name)
            inputs = node.inputs
            if home is not None:
                inputs = tuple(self._instance(name, home) for name in inputs)
            self.nodes.append(replace(node, inputs=inputs))
            for part in wanted[1:]:
                self._clone(node, part)
        return drop_dead(replace(self.graph, nodes=tuple(self.nodes)))

    def _instance(self, value: str, part: int) -> str:
        """The name under which `part` reads `value`."""
        node = self.graph.producers.get(value)
        if node is None:
            return value
        if node.definition.is_view and (node.name, part) not in self.clones:
            source = self._instance(node.inputs[0], part)
            if source != node.inputs[0]:
                self._clone(node, part)
        clone = self.clones.get((node.name, part))
        return value if clone is None else clone.values[node.values.index(value)]

    def _clone(self, node: Node, part: int) -> None:
        inputs = tuple(self._instance(name, part) for name in node.inputs)
        name = f"{node.name}_{part}"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        clone = replace(node, name=name, inputs=inputs)
        self.clones[node.name, part] = clone
        self.nodes.append(clone)


def _is_cheap(graph: Graph, node: Node) -> bool:
    if node.op == "merge_stats":
        return True
    if not node.definition.is_pointwise:
        return False
    sizes = node.outputs[0].sizes
    constants = all(name in graph.constants for name in node.inputs)
    return constants or sizes[-1:] in ((), (1,))


def _launch_order(flow: Flow, partition: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """The groups in an order that respects the edges, close to the order of the graph."""
    group_of = {node.name: number for number, nodes in enumerate(partition) for node in nodes}
    before = _edges(flow, group_of)
    last = [max(flow.index[node.name] for node in nodes) for nodes in partition]
    waiting = [len(sources) for sources in before]
    after: list[list[int]] = [[] for _ in partition]
    for number, sources in enumerate(before):
        for source in sources:
            after[source].append(number)
    ready = [(last[number], number) for number, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)[1]
        order.append(sorted(partition[number], key=lambda node: flow.index[node.name]))
        for user in after[number]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (last[user], user))
    return order


def _edges(flow: Flow, group_of: Mapping[str, int]) -> list[set[int]]:
    """The groups that each group reads."""
    before: list[set[int]] = [set() for _ in set(group_of.values())]
    for node in flow.compute:
        for position in bits(flow.predecessors[flow.index[node.name]]):
            source = group_of[flow.compute[position].name]
            if source != group_of[node.name]:
                before[group_of[node.name]].add(source)
    return before


def _refusals(
    legality: Legality,
    partition: Sequence[Sequence[Node]],
    groups: Sequence[Group],
    price: Callable[[Sequence[Node]], float],
    cut: str,
) -> tuple[tuple[str, str, str], ...]:
    """(producer, consumer, reason) for each edge between two groups.

    `cut` says why two groups that would be cheaper as one may be two.
    """
    flow = legality.flow
    group_of = {node.name: number for number, nodes in enumerate(partition) for node in nodes}
    before = _edges(flow, group_of)
    reasons: dict[tuple[int, int], str] = {}
    refusals = []
    for node in flow.compute:
        for position in bits(flow.predecessors[flow.index[node.name]]):
            made_by = flow.compute[position]
            ends = group_of[made_by.name], group_of[node.name]
            if ends[0] == ends[1]:
                continue
            reason = legality.span(made_by, node)
            if reason is None:
                if ends not in reasons:
                    reasons[ends] = _why_apart(
                        legality, partition, groups, before, ends, price, cut
                    )
                reason = reasons[ends]
            refusals.append((made_by.name, node.name, reason))
    return tuple(refusals)


def _why_apart(
    legality: Legality,
    partition: Sequence[Sequence[Node]],
    groups: Sequence[Group],
    before: Sequence[set[int]],
    ends: tuple[int, int],
    price: Callable[[Sequence[Node]], float],
    cut: str,
) -> str:
    """Why two neighbouring groups are not one."""
    low, high = ends
    joined = [*partition[low], *partition[high]]
    joined.sort(key=lambda node: legality.flow.index[node.name])
    if reason := legality.explain(joined):
        return reason
    between = _reaching(before, high, low)
    if between is not None:
        return f"joined, they and {groups[between].name} would wait for each other"
    apart = price(partition[low]) + price(partition[high])
    together = price(joined)
    if math.isinf(together):
        return "legal, but apart in the plan that was fastest when it was replayed"
    if together < apart:
        return f"legal at {together:.3g} us against {apart:.3g} us, but {cut}"
    return f"legal, but predicted slower: {together:.3g} us against {apart:.3g} us"


def _reaching(before: Sequence[set[int]], start: int, goal: int) -> int | None:
    """A group that `start` reads, other than `goal`, and that depends on `goal`."""
    for first in sorted(before[start] - {goal}):
        seen = {first}
        stack = [first]
        while stack:
            for source in before[stack.pop()]:
                if source == goal:
                    return first
                if source not in seen and source > goal:
                    seen.add(source)
                    stack.append(source)
    return None
