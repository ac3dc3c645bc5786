"""Lower the precision of an fp32 graph, or of its products alone; its inputs and outputs keep their
dtype.

    %y: f32[8,64] = linear(%x, %w)
    ->
    %x16: f16[8,32] = cast(%x, dtype=f16)
    %y16: f16[8,64] = linear(%x16, %w16)
    %y: f32[8,64] = cast(%y16, dtype=f32)

Accumulation, normalisation and exponentials stay in fp32: that is the kernels' doing. So do sums of
products of 8 bits until they meet another value. Constants of
one element become numbers first, which stay as exact as they are: an epsilon of 1e-12 would be zero
in f16. A finite constant stays finite: rounded to -inf, a mask would make NaN of a whole row. What
becomes part of a convolution's weights does so first, so that these are rounded once.

    %y: f32[8,64] = linear(%x, %w)    ->    %y: f32[8,64] = linear(%x, %w, products='tf32')
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from gtco.ir.graph import Graph, GraphBuilder, Node
from gtco.passes.branches import merge_branches
from gtco.passes.canonicalize import canonicalize
from gtco.passes.convolutions import fold_convolutions
from gtco.passes.fold_constants import fold_constants
from gtco.passes.kept_sums import rounded_keeping_sums


def lower_precision(graph: Graph, dtype: torch.dtype) -> Graph:
    """Compute every f32 value of `graph` in `dtype` (f16 or bf16)."""
    graph = fold_convolutions(merge_branches(fold_constants(canonicalize(graph))))
    windows = {node.inputs[1] for node in graph.nodes if node.op in ("conv2d", "conv3d")}
    exact = _exact(graph)
    read_exactly = {name for node in graph.nodes if node.name in exact for name in node.inputs}
    builder = GraphBuilder()
    names: dict[str, str] = {}
    for name, spec in graph.inputs.items():
        names[name] = builder.input(name, spec, graph.orders.get(name))
    for name, tensor in graph.constants.items():
        if tensor.dtype == torch.float32 and name not in read_exactly:
            tensor = _finite(tensor, dtype)
            kept = name in windows
            tensor = rounded_keeping_sums(tensor.double(), dtype) if kept else tensor.to(dtype)
        names[name] = builder.constant(name, tensor)
    lowered = dict(names)
    for name, spec in graph.inputs.items():
        if spec.dtype == torch.float32:
            lowered[name] = builder.add("cast", names[name], dtype=dtype, hint=f"{name}_low")

    def low(name: str) -> str:
        """`name`, which is f32 where it is exact, for a reader that is not."""
        kept = name in exact or name in read_exactly
        if kept and builder.specs[lowered[name]].dtype == torch.float32:
            lowered[name] = builder.add("cast", names[name], dtype=dtype, hint=f"{name}_low")
        return lowered[name]

    for node in graph.nodes:
        attrs, inputs = dict(node.attrs), [names[name] for name in node.inputs]
        if node.name not in exact:
            attrs = {
                key: dtype if value is torch.float32 else value for key, value in attrs.items()
            }
            inputs = [low(name) for name in node.inputs]
        values = builder.node(node.op, inputs, attrs, hint=node.name, source=node.source)
        names.update(zip(node.values, values, strict=True))
        lowered.update(zip(node.values, values, strict=True))
    outputs = []
    for name in graph.outputs:
        value = names[name] if name in exact else lowered[name]
        original = graph.specs[name].dtype
        if builder.specs[value].dtype != original:
            value = builder.add("cast", value, dtype=original)
        outputs.append(value)
    return builder.build(outputs)


def _exact(graph: Graph) -> set[str]:
    """The nodes that stay in f32: products of 8 bits and what takes them back, and what rounds to
    8 bits, whose factors may be too small for 16."""
    found: set[str] = set()
    for node in graph.nodes:
        definition, specs = node.definition, [graph.specs[name] for name in node.inputs]
        product = definition.multiplies and specs[0].dtype.itemsize == 1
        others = [name for name in node.inputs if name not in graph.constants]
        made = others and all(name in found for name in others)
        if definition.quantizes or product or (definition.is_pointwise and made):
            found.add(node.name)
    return found


def _finite(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor`, of which no finite element is infinite in `dtype`."""
    most = torch.finfo(dtype).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most))


def fp32_products(node: Node, graph: Graph) -> bool:
    """Whether `node` of `graph` multiplies f32 values as they are."""
    return (
        node.definition.multiplies
        and graph.specs[node.inputs[0]].dtype == torch.float32
        and node.attrs.get("products") is None
    )


def lower_products(graph: Graph, products: str) -> Graph:
    """Take the products of `graph` whose operands are f32 in `products` ("tf32")."""

    def lowered(node: Node) -> Node:
        if not fp32_products(node, graph):
            return node
        return replace(node, attrs=MappingProxyType({**node.attrs, "products": products}))

    return replace(graph, nodes=tuple(lowered(node) for node in graph.nodes))
