"""Where a group begins to read an input is an argument of its launch, no part of its work.

    %s = slice(%x, dim=1, start=6912, end=8064)        %s = slice(%x, dim=1, start=0, end=1152)
    %t = slice(%x, dim=1, start=8064, end=9216)   ->   %t = slice(%x, dim=1, start=1152, end=2304)
                                                       and %x begins 6912 elements further on

The blocks of a transformer whose shifts, scales and gates are parts of one long row are one
workload and one kernel then, as are layers that read their parts of joined keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gtco.ir.graph import Graph, Node

READABLE = 16
"""Bytes: what kernels assume of an address, which is their widest access and a tensor map's."""


def at_origins(graph: Graph) -> tuple[Graph, Mapping[str, int]]:
    """`graph` with the slices of each input as early as whole accesses allow.

    Returns:
        The graph, and how many bytes further on than told the inputs begin whose slices moved. Its
        specs are as before: what lies beyond its slices is nobody's.
    """
    moved: dict[str, Node] = {}
    origins: dict[str, int] = {}
    for name, spec in graph.inputs.items():
        read = name  # all that is read of the input lies in it
        while slices := _slices_along_one(graph, read):
            dim = slices[0].attrs["dim"]
            step_bytes = math.prod(spec.sizes[dim + 1 :]) * spec.dtype.itemsize
            first = min(node.attrs["start"] for node in slices)
            first -= first % (READABLE // math.gcd(READABLE, step_bytes))
            if first > 0:
                origins[name] = origins.get(name, 0) + first * step_bytes
                moved |= {node.name: _moved(node, first) for node in slices}
            if len(slices) > 1:
                break
            read = slices[0].name
    if not moved:
        return graph, {}
    return replace(graph, nodes=tuple(moved.get(node.name, node) for node in graph.nodes)), origins


def _slices_along_one(graph: Graph, value: str) -> tuple[Node, ...]:
    """The readers of `value`, if they are slices along one dimension."""
    readers = graph.users[value]
    alike = len({node.attrs["dim"] for node in readers if node.op == "slice"}) == 1
    if not alike or value in graph.outputs or any(node.op != "slice" for node in readers):
        return ()
    return readers


def _moved(node: Node, first: int) -> Node:
    """The slice without the first elements of what it is of."""
    start, end = node.attrs["start"] - first, node.attrs["end"] - first
    return replace(node, attrs=MappingProxyType({**node.attrs, "start": start, "end": end}))
