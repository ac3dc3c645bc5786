"""One text for all graphs that are the same work.

Names, the order of independent nodes, the values of constants and where in an input the first of
what is read lies (`gtco.passes.origins`) do not matter; operators,
attributes, edges, shapes, dtypes, the layout of each operand in its buffer and the positions of
constants do. Two graphs with the same text are isomorphic: text position maps node to node.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import DTYPE_NAMES
from gtco.ir.views import Layout, NotAView, apply_view, store_layout
from gtco.passes.dataflow import Read, trace
from gtco.passes.origins import at_origins


@dataclass(frozen=True)
class Workload:
    """Canonical description of a graph.

    Args:
        content: JSON values.
        order: names of the compute nodes in the order in which `content` lists them.
    """

    content: dict[str, Any]
    order: tuple[str, ...]

    def text(self, **extra: str) -> str:
        """The description as JSON text, with `extra` fields such as the architecture."""
        return json.dumps(extra | self.content, sort_keys=True, separators=(",", ":"))


def describe(graph: Graph) -> Workload:
    """The canonical description of `graph`."""
    graph, _ = at_origins(graph)
    nodes = [node for node in graph.nodes if not node.definition.is_view]
    reads = {node.name: [trace(graph, name) for name in node.inputs] for node in nodes}
    layouts = {
        (read.value, read.base): _layout(graph, read) for each in reads.values() for read in each
    }
    local = {node.name: _local(node) for node in nodes}
    order = _canonical_order(graph, nodes, reads, layouts, local)
    position = {node.name: index for index, node in enumerate(order)}
    externals: dict[str, int] = {}

    def reference(base: str) -> list[Any]:
        node = graph.producers.get(base)
        if node is None:
            return ["x", externals.setdefault(base, len(externals))]
        return ["n", position[node.name], node.values.index(base)]

    listed = []
    for node in order:
        operands = [
            [reference(read.base), layouts[read.value, read.base]] for read in reads[node.name]
        ]
        listed.append([*local[node.name], operands])
    outputs = []
    for name in graph.outputs:
        read = trace(graph, name)
        outputs.append([reference(read.base), _output_layout(graph, read)])
    content = {
        "nodes": listed,
        "externals": [[str(graph.specs[n]), n in graph.constants] for n in externals],
        "outputs": sorted(outputs, key=repr),
    }
    return Workload(content, tuple(node.name for node in order))


def _local(node: Node) -> list[Any]:
    attrs = {key: _plain(value) for key, value in node.attrs.items()}
    return [node.op, attrs, [str(spec) for spec in node.outputs]]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _layout(graph: Graph, read: Read) -> str:
    layout = Layout.contiguous(graph.specs[read.base].sizes)
    try:
        for view in read.views:
            layout = apply_view(layout, view)
    except NotAView:
        return _spelled(read)
    return str(layout)


def _output_layout(graph: Graph, read: Read) -> str:
    if read.base not in graph.producers:
        return _layout(graph, read)
    try:
        return str(store_layout(graph, read.base, read.value))
    except NotAView:
        return _spelled(read)


def _spelled(read: Read) -> str:
    """The chain of views by name, where no layout expresses it."""
    return json.dumps([_local(view) for view in read.views], sort_keys=True)


def _canonical_order(
    graph: Graph,
    nodes: list[Node],
    reads: dict[str, list[Read]],
    layouts: dict[tuple[str, str], str],
    local: dict[str, list[Any]],
) -> list[Node]:
    """A topological order by structure: what a node is computed from, then who reads it.

    Nodes that look alike from both sides keep the order of the graph, which costs a missed match
    at worst, since texts are compared in full.
    """
    below: dict[str, str] = {}
    users: dict[str, list[tuple[str, str]]] = {node.name: [] for node in nodes}
    for node in nodes:
        operands = []
        for slot, read in enumerate(reads[node.name]):
            made_by = graph.producers.get(read.base)
            layout = layouts[read.value, read.base]
            if made_by is None:
                operands.append(f"{graph.specs[read.base]}{read.base in graph.constants}{layout}")
            else:
                which = made_by.values.index(read.base)
                operands.append(f"{below[made_by.name]}.{which}{layout}")
                users[made_by.name].append((node.name, f"{slot}.{which}{layout}"))
        below[node.name] = _digest(local[node.name], operands)
    returned = {trace(graph, name).base for name in graph.outputs}
    above: dict[str, str] = {}
    for node in reversed(nodes):
        ends = [value in returned for value in node.values]
        readers = sorted(above[name] + how for name, how in users[node.name])
        above[node.name] = _digest(below[node.name], ends, readers)

    waiting = {
        node.name: len(
            {made.name for read in reads[node.name] if (made := graph.producers.get(read.base))}
        )
        for node in nodes
    }
    rank = {node.name: index for index, node in enumerate(nodes)}
    ready = [(above[n.name], rank[n.name]) for n in nodes if not waiting[n.name]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for name in {name for name, _ in users[node.name]}:
            waiting[name] -= 1
            if not waiting[name]:
                heapq.heappush(ready, (above[name], rank[name]))
    return order


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
