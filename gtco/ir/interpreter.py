"""Run a graph, fused or not, in torch: the oracle of every pass and every kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from gtco.ir.autocast import no_autocast
from gtco.ir.graph import FusedGraph, Graph, Node
from gtco.ir.spec import GraphError


class ArgumentError(TypeError):
    """The arguments of a call do not fit the graph's inputs."""


def interpret(
    graph: Graph | FusedGraph,
    args: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    rounded: bool = False,
) -> tuple[Tensor, ...]:
    """Run `graph` on `args`, node by node (group by group if fused), with each op's reference.

    Args:
        graph: what to run.
        args: one tensor per graph input, of the shape that callers have; where they live, it runs.
        dtype: compute every floating-point value in this dtype instead of its own: float64
            or float32 gives the reference that DESIGN section 9 judges by.
        rounded: round what is multiplied as the nodes' `products` say, as tensor cores do; without
            it the answer is exact for its dtype.

    Returns:
        One tensor per graph output.

    Raises:
        ArgumentError: the number of arguments or a shape differs.
        GraphError: `graph` is no graph.
    """
    if not isinstance(graph, (Graph, FusedGraph)):
        raise GraphError(
            f"graph is a {type(graph).__name__}, not a gtco.Graph; pass gtco.capture(model, args)"
        )
    whole = graph.graph if isinstance(graph, FusedGraph) else graph
    inputs = ", ".join(f"%{name}: {spec}" for name, spec in whole.given.items())
    if isinstance(args, Tensor) or len(args) != len(whole.inputs):
        given = "one tensor is" if isinstance(args, Tensor) else f"{len(args)} were"
        raise ArgumentError(
            f"the graph has {len(whole.inputs)} inputs, but {given} given: pass a tuple with a "
            f"tensor for each ({inputs})"
        )
    values: dict[str, Tensor] = {}
    for (name, spec), tensor in zip(whole.given.items(), args, strict=True):
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != spec.sizes:
            kind = type(tensor).__name__
            shown = str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else kind
            raise ArgumentError(
                f"input %{name} is {spec}, but a {shown} was given; pass a tensor of that shape"
            )
        values[name] = _widen(whole.as_stored(name, tensor), dtype)
    parts = [group.graph for group in graph] if isinstance(graph, FusedGraph) else []
    with no_autocast():
        _run((*parts, whole), values, dtype, rounded)  # behind groups: views for the caller alone
    return tuple(values[name] for name in whole.outputs)


def _run(
    graphs: Sequence[Graph], values: dict[str, Tensor], dtype: torch.dtype | None, rounded: bool
) -> None:
    """Add what the last of `graphs` gives to `values`, which are its inputs; what nobody reads any
    more is not kept, for all values of a large model at once are more than a machine has."""
    device = next(iter(values.values())).device if values else torch.device("cpu")
    constants: dict[str, Tensor] = {}
    steps: list[Node] = []
    made: set[str] = set()
    for graph in graphs:
        constants = {**graph.constants, **constants}
        missing = [node for node in graph.nodes if not made.issuperset(node.values)]
        steps += missing
        made.update(name for node in missing for name in node.values)
    reads = Counter(name for node in steps for name in node.inputs)
    reads.update(graphs[-1].outputs)
    for name in graphs[-1].outputs:
        if name in constants:
            values[name] = _widen(constants[name].to(device), dtype)
    for node in steps:
        for name in node.inputs:
            if name not in values:
                values[name] = _widen(constants[name].to(device), dtype)
        results = _results(node, [values[name] for name in node.inputs], dtype, rounded)
        values.update(zip(node.values, results, strict=True))
        reads.subtract(node.inputs)
        for name in {*node.inputs, *node.values}:
            if not reads[name]:
                del values[name]


def _results(
    node: Node, inputs: list[Tensor], dtype: torch.dtype | None, rounded: bool
) -> Sequence[Tensor]:
    attrs = dict(node.attrs)
    if dtype is not None:
        for key in ("dtype", "out_dtype"):
            if isinstance(attrs.get(key), torch.dtype) and attrs[key].is_floating_point:
                attrs[key] = dtype
        if node.definition.is_pointwise and node.outputs[0].dtype.is_floating_point:
            # Of whole numbers alone torch would compute in its default type.
            inputs = [each if each.dtype == torch.bool else each.to(dtype) for each in inputs]
    operands = rounded_operands(node) if rounded else 0
    inputs[:operands] = map(round_to_tf32, inputs[:operands])
    result = node.definition.reference(*inputs, **attrs)
    return result if isinstance(result, (tuple, list)) else (result,)


def _widen(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def rounded_operands(node: Node) -> int:
    """How many of its first inputs `node` multiplies in tf32."""
    if node.attrs.get("products") != "tf32":
        return 0
    return 3 if node.definition.family == "attention" else 2


def round_to_tf32(tensor: Tensor) -> Tensor:
    """f32 values rounded to the nearest with the 10 bits of mantissa that tf32 has, ties to even,
    as the GPU's copy engine rounds."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)
    return torch.where(tensor.isnan(), tensor, rounded)
