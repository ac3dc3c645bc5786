"""Convolutions read a copy of an image whose channels lie apart in memory.

    %p: f16[1,64,64,256] = permute(%x: f16[1,256,64,64])      %p = permute(%x)   %c = copy(%p)
    %y = conv(%p, %w)                                    ->   %y = conv(%c, %w)
    %z = add(%y, %p)                                          %z = add(%y, %c)

What a model is given has its channels first, as has what a library's kernel made, and the kernels
of a convolution read 16 bytes of a pixel's channels at a time: element by element they took up to
ten times as long. All that reads the pixels reads the copy then. Images of few channels are packed
instead (`gtco.passes.layout`), and those of no whole 16 bytes are padded (`whole_pixels`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from gtco.ir.graph import Graph, Node
from gtco.ir.views import NotAView
from gtco.passes.dataflow import stored_layout
from gtco.passes.rewrite import Log

RULE = "conv(permute(x)) -> conv(copy(permute(x)))"
LEAST_READ = 2**19
"""Elements of all windows that are worth a copy: it takes as long as 300,000 take one by one."""


def gather_channels(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    apart = {node.inputs[0] for node in graph.nodes if _reads_apart(graph, node)}
    if not apart:
        return graph
    copies: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(copies.get(name, name) for name in node.inputs)))
        for value in apart.intersection(node.values):
            name = f"{value}_together".replace(".", "_")
            while name in graph.specs:
                name += "_"
            copies[value] = name
            copy = Node(name, "copy", (value,), MappingProxyType({}), (graph.specs[value],))
            nodes.append(copy)
    if log is not None:
        log.applied[RULE] += len(copies)
    return replace(graph, nodes=tuple(nodes))


def _reads_apart(graph: Graph, node: Node) -> bool:
    """Whether `node` is a large convolution of an image whose channels lie apart."""
    if not node.definition.convolves or node.inputs[0] in graph.constants:
        return False
    image, weight = (graph.specs[name] for name in node.inputs[:2])
    rows = node.outputs[0].numel // node.outputs[0].sizes[-1]
    groups = node.attrs.get("groups", 1)
    if rows * math.prod(weight.sizes[1:]) * groups < LEAST_READ or image.sizes[-1] == 1:
        return False
    try:
        channels = stored_layout(graph, node.inputs[0]).dims[-1]
    except NotAView:  # it is copied anyway
        return False
    return not channels or channels[-1][1] != 1
