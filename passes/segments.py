"""The dynamic programme of fusion, over bit sets of compute nodes.

A partition into groups is a plan if its groups are legal and can be launched one after another. An
ending of a set S (closed under dependence) is a group in S that nothing else in S reads; then

    cost[{}]  = 0
    cost[S]   = min over endings G of S of  cost[S - G] + price(G)
    plans[{}] = 1
    plans[S]  = sum over non-empty sets T of disjoint endings of S of  (-1)^(|T|+1) plans[S - T]

Each plan of S ends in some set of groups, and inclusion-exclusion over that set counts it once,
whatever the order of launches. Where the few cheapest plans of each set are kept in place of the
one, the few cheapest of the whole come out. The recurrence is DPOF's (AutoGTCO, ICCAD 2021), as we
reconstruct it.

Segments: nodes that no legal group joins need no common table. Contract each edge that some group
may span, then each cycle of what remains; every plan of the graph is one plan of each such part
and the reverse, so the parts are solved one by one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from gtco.ir.graph import Node
from gtco.passes.dataflow import bits
from gtco.passes.legality import Legality, is_convex

MAX_SETS = 6000
"""Most connected sets of one segment that the search looks at."""
MAX_STATES = 4000
"""Most closed sets of one segment that the search tabulates."""
MAX_TERMS = 200_000
"""Most terms of the count of one segment's plans."""


class TooLarge(Exception):
    """A segment holds more sets than the search looks at."""


@dataclass(frozen=True)
class Partition:
    """One plan of a segment.

    Args:
        cost_us: the sum of its groups' prices.
        groups: bit sets of positions in the segment, in launch order.
    """

    cost_us: float
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Solution:
    """The cheapest plans of a segment.

    Args:
        best: different plans, the cheapest first; at least one.
        plans: how many plans the segment has.
    """

    best: tuple[Partition, ...]
    plans: int


def joined_parts(legality: Legality, nodes: Sequence[Node]) -> list[list[Node]]:
    """The members of `nodes` that are joined by edges which some group may span."""
    flow = legality.flow
    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(node.name for node in nodes)
    inside = sum(1 << flow.index[node.name] for node in nodes)
    siblings = (
        (node, flow.compute[position])
        for node in nodes
        for position in bits(flow.siblings[flow.index[node.name]] & inside)
    )
    for first, second in itertools.chain(_edges(legality, nodes), siblings):
        if legality.span(first, second) is None:
            links.add_edge(first.name, second.name)
    return [
        sorted((flow.compute[flow.index[name]] for name in part), key=lambda n: flow.index[n.name])
        for part in nx.connected_components(links)
    ]


def _edges(legality: Legality, nodes: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """(producer, reader) within `nodes`."""
    flow = legality.flow
    inside = sum(1 << flow.index[node.name] for node in nodes)
    for node in nodes:
        for position in bits(flow.predecessors[flow.index[node.name]] & inside):
            yield flow.compute[position], node


def find_segments(legality: Legality, nodes: Sequence[Node]) -> list[list[Node]]:
    """The parts of `nodes` that can be solved one by one, in an order of launch."""
    flow = legality.flow
    parts = joined_parts(legality, nodes)
    part_of = {node.name: number for number, part in enumerate(parts) for node in part}
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(range(len(parts)))
    for made_by, user in _edges(legality, nodes):
        ends = part_of[made_by.name], part_of[user.name]
        if ends[0] != ends[1]:
            quotient.add_edge(*ends)
    merged = nx.condensation(quotient)
    first = {
        whole: min(flow.index[parts[number][0].name] for number in merged.nodes[whole]["members"])
        for whole in merged
    }
    segments = []
    for whole in nx.lexicographical_topological_sort(merged, key=first.__getitem__):
        members = [node for number in merged.nodes[whole]["members"] for node in parts[number]]
        segments.append(sorted(members, key=lambda node: flow.index[node.name]))
    return segments


def legal_groups(legality: Legality, segment: Sequence[Node]) -> list[int]:
    """All legal groups within `segment`, as bit sets of positions in it.

    Connected sets grow node by node. A refused pair refuses every superset, which prunes; and each
    connected set has a node without which it is still connected, so nothing is missed.

    Raises:
        TooLarge: there are more than `MAX_SETS` connected sets.
    """
    flow = legality.flow
    count = len(segment)
    position = {node.name: index for index, node in enumerate(segment)}
    neighbours, refused = [0] * count, [0] * count
    for index, node in enumerate(segment):
        for other in bits(flow.predecessors[flow.index[node.name]]):
            if (before := position.get(flow.compute[other].name)) is not None:
                neighbours[index] |= 1 << before
                neighbours[before] |= 1 << index
        for other in bits(flow.siblings[flow.index[node.name]]):
            if (beside := position.get(flow.compute[other].name)) is not None:
                neighbours[index] |= 1 << beside
        for before in range(index):
            if legality.pair(segment[before], node) is not None:
                refused[index] |= 1 << before
                refused[before] |= 1 << index

    # Each set comes with its neighbours that no member refuses.
    level: dict[int, int] = {
        1 << index: neighbours[index] & ~refused[index] for index in range(count)
    }
    barred = {1 << index: refused[index] for index in range(count)}
    found: list[int] = list(level)
    for _ in range(min(count, legality.max_group) - 1):
        grown: dict[int, int] = {}
        grown_barred: dict[int, int] = {}
        for mask, fringe in level.items():
            for index in bits(fringe):
                larger = mask | 1 << index
                if larger not in grown:
                    bar = barred[mask] | refused[index]
                    grown_barred[larger] = bar
                    grown[larger] = (fringe | neighbours[index]) & ~bar & ~larger
        found.extend(grown)
        if len(found) > MAX_SETS:
            raise TooLarge
        level, barred = grown, grown_barred
    where = [flow.index[node.name] for node in segment]
    return [
        mask
        for mask in found
        if is_convex(flow, sum(1 << where[index] for index in bits(mask)))
        and legality.explain([segment[index] for index in bits(mask)]) is None
    ]


def solve(
    legality: Legality,
    segment: Sequence[Node],
    price: Callable[[Sequence[Node]], float],
    keep: int = 1,
) -> Solution:
    """The `keep` cheapest plans of `segment`, whose nodes are in topological order.

    A segment that is too large is cut in two, and groups that span the cut are lost: a better
    plan may be missed, a wrong one cannot be made.
    """
    try:
        groups = legal_groups(legality, segment)
        return _tabulate(legality, segment, groups, price, keep)
    except TooLarge:
        pass
    position = {node.name: index for index, node in enumerate(segment)}
    cut = _cut(legality, segment)
    best = [Partition(0.0, ())]
    plans = 1
    for side in (segment[:cut], segment[cut:]):
        for part in find_segments(legality, side):
            solution = solve(legality, part, price, keep)
            where = [1 << position[node.name] for node in part]
            longer = [
                Partition(
                    before.cost_us + after.cost_us,
                    (*before.groups, *(sum(where[i] for i in bits(g)) for g in after.groups)),
                )
                for before in best
                for after in solution.best
            ]
            best = sorted(longer, key=lambda partition: partition.cost_us)[:keep]
            plans *= solution.plans
    return Solution(tuple(best), plans)


def _cut(legality: Legality, segment: Sequence[Node]) -> int:
    """Where to cut `segment`: in its middle half, where fewest edges lead across that a group may
    span, and of such places where least has to be stored."""
    count = len(segment)
    position = {node.name: index for index, node in enumerate(segment)}
    across = [0] * (count + 1)
    last: dict[int, int] = {}  # reader of each node
    for made_by, user in _edges(legality, segment):
        made, read = position[made_by.name], position[user.name]
        last[made] = max(last.get(made, 0), read)
        if legality.span(made_by, user) is None:
            for index in range(made + 1, read + 1):
                across[index] += 1
    stored = [0] * (count + 1)
    for made, read in last.items():
        nbytes = sum(spec.nbytes for spec in segment[made].outputs)
        for index in range(made + 1, read + 1):
            stored[index] += nbytes
    middle = range(max(1, count // 4), max(2, count - count // 4 + 1))
    return min(middle, key=lambda index: (across[index], stored[index], abs(2 * index - count)))


def _tabulate(
    legality: Legality,
    segment: Sequence[Node],
    groups: Sequence[int],
    price: Callable[[Sequence[Node]], float],
    keep: int,
) -> Solution:
    flow = legality.flow
    local = {flow.index[node.name]: index for index, node in enumerate(segment)}
    readers = [0] * len(segment)
    for index, node in enumerate(segment):
        for other in bits(flow.predecessors[flow.index[node.name]]):
            if other in local:
                readers[local[other]] |= 1 << index
    read_by = {mask: _union(readers, mask) & ~mask for mask in groups}
    having: list[list[int]] = [[] for _ in segment]
    for mask in groups:
        for index in bits(mask):
            having[index].append(mask)

    def endings_of(state: int) -> list[int]:
        """Each ending holds a node that nothing in `state` reads: find it by the lowest."""
        last = sum(1 << index for index in bits(state) if not readers[index] & state)
        return [
            mask
            for index in bits(last)
            for mask in having[index]
            if not mask & ~state
            and not read_by[mask] & state
            and mask & last & -(mask & last) == 1 << index
        ]

    everything = (1 << len(segment)) - 1
    endings: dict[int, list[int]] = {}
    waiting = [everything]
    while waiting:
        state = waiting.pop()
        if state in endings or not state:
            continue
        if len(endings) >= MAX_STATES:
            raise TooLarge
        endings[state] = endings_of(state)
        waiting.extend(state & ~mask for mask in endings[state])

    prices = {mask: price([segment[index] for index in bits(mask)]) for mask in groups}
    best: dict[int, list[Partition]] = {0: [Partition(0.0, ())]}
    plans = {0: 1}
    terms = 0
    for state in sorted(endings, key=int.bit_count):
        best[state] = _cheapest(state, endings[state], prices, best, keep)
        plans[state], used = _count(state, endings[state], plans)
        terms += used
        if terms > MAX_TERMS:
            raise TooLarge
    return Solution(tuple(best[everything]), plans[everything])


def _cheapest(
    state: int,
    endings: Sequence[int],
    prices: Mapping[int, float],
    best: Mapping[int, list[Partition]],
    keep: int,
) -> list[Partition]:
    """The `keep` cheapest plans of `state`, from those of the sets that its endings leave.

    Of a plan among them, what is left without its last group is among the cheapest of what is left.
    A plan that ends in either of two groups comes twice and counts once.
    """
    heap = [(best[state & ~last][0].cost_us + prices[last], last, 0) for last in endings]
    heapq.heapify(heap)
    found: dict[frozenset[int], Partition] = {}
    while heap and len(found) < keep:
        cost_us, last, rank = heapq.heappop(heap)
        before = best[state & ~last]
        groups = (*before[rank].groups, last)
        found.setdefault(frozenset(groups), Partition(cost_us, groups))
        if rank + 1 < len(before):
            heapq.heappush(heap, (before[rank + 1].cost_us + prices[last], last, rank + 1))
    return list(found.values())


def _count(state: int, endings: Sequence[int], plans: dict[int, int]) -> tuple[int, int]:
    """Plans of `state`, by inclusion-exclusion over its last groups, and the number of terms."""
    total = terms = 0
    stack = [(0, state, 1)]
    while stack:
        start, rest, sign = stack.pop()
        for number in range(start, len(endings)):
            mask = endings[number]
            if not mask & ~rest:
                total += sign * plans[rest & ~mask]
                terms += 1
                stack.append((number + 1, rest & ~mask, -sign))
                if terms > MAX_TERMS:
                    raise TooLarge
    return total, terms


def _union(masks: Sequence[int], chosen: int) -> int:
    union = 0
    for index in bits(chosen):
        union |= masks[index]
    return union
