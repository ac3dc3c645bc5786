"""Partitions that no dynamic programme chose: what fusion by search is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from gtco.ir.graph import FusedGraph, Graph, Node
from gtco.passes.dataflow import Flow, bits, drop_dead, materialize_views
from gtco.passes.fusion import clone_cheap, in_groups
from gtco.passes.legality import MAX_GROUP, Legality
from gtco.passes.segments import TooLarge, find_segments, legal_groups


def unfused(graph: Graph) -> FusedGraph:
    """Each compute node of `graph`, which the passes have rewritten, is a group of its own."""
    graph = materialize_views(drop_dead(graph))
    return in_groups(graph, ([node] for node in Flow(graph).compute))


def greedy(graph: Graph, max_group: int = MAX_GROUP) -> FusedGraph:
    """The largest legal group first, then the largest of what is left: no price has a say.

    It sees all legal groups of a segment at once, where a compiler that walks the graph and grows
    one group after another may be stuck with a small one; of equally large groups the one that
    begins first counts. Like the dynamic programme it clones cheap nodes for each reader.

    Args:
        graph: after the rewrite passes.
        max_group: most compute nodes in a group.
    """
    graph = clone_cheap(materialize_views(drop_dead(graph)), max_group)
    flow = Flow(graph)
    legality = Legality(flow, max_group)
    segments = find_segments(legality, flow.compute)
    return in_groups(graph, (group for each in segments for group in _largest(legality, each)))


def _largest(legality: Legality, segment: Sequence[Node]) -> list[list[Node]]:
    """The groups of one segment; one that is too large is cut in half, as the programme does."""
    try:
        legal = legal_groups(legality, segment)
    except TooLarge:
        half = len(segment) // 2
        sides = (segment[:half], segment[half:])
        parts = (part for side in sides for part in find_segments(legality, side))
        return [group for part in parts for group in _largest(legality, part)]
    taken = 0
    chosen: list[int] = []
    for mask in sorted(legal, key=lambda each: (-each.bit_count(), each & -each, each)):
        if not mask & taken and _launchable(legality.flow, segment, [*chosen, mask]):
            chosen.append(mask)
            taken |= mask
    return [[segment[index] for index in bits(mask)] for mask in chosen]


def _launchable(flow: Flow, segment: Sequence[Node], groups: Iterable[int]) -> bool:
    """Whether these groups, with every other node alone, can be launched one after another."""
    home = {node.name: node.name for node in segment}
    for mask in groups:
        members = [segment[index].name for index in bits(mask)]
        home |= dict.fromkeys(members, members[0])
    edges: nx.DiGraph[str] = nx.DiGraph()
    for node in segment:
        for position in bits(flow.predecessors[flow.index[node.name]]):
            source = home.get(flow.compute[position].name)
            if source is not None and source != home[node.name]:
                edges.add_edge(source, home[node.name])
    return bool(nx.is_directed_acyclic_graph(edges))
