"""How the weights of each linear are rounded to 8 bits, by what it reads in batches of inputs.

Three quarters of the batches give the second moments by which errors are compensated; the others
show whether that is better than rounding to the nearest, linear by linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes.compensation import compensated_weights
from gtco.passes.quantize import Operand, operands
from gtco.passes.scales import Scales

Batch = tuple[Tensor, ...]
"""A tensor for each input of the graph."""

ROOM = 1 << 30
"""Bytes of second moments that are kept at a time; a linear that needs more by itself is rounded to
the nearest."""


def held_out(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Those that no second moment is taken of: the last quarter, and one at least."""
    return batches[-max(1, len(batches) // 4) :]


def rounded(
    graph: Graph, scales: Mapping[str, Scales], batches: Sequence[Batch]
) -> Iterator[dict[str, Tensor | None]]:
    """Weights in 8 bits of products of `graph`, whose errors compensate each other, some at a time.

    Args:
        graph: as the passes leave it.
        scales: by the name of each, how its operands are rounded.
        batches: of real inputs.

    Yields:
        By the name of a product, its weights in 8 bits, or None where rounding to the nearest is as
        good on the batches held out, or nothing is left besides these; None of a convolution.
    """
    unseen = held_out(batches)
    seen = batches[: len(batches) - len(unseen)]
    known = {name: operand for name, operand in operands(graph).items() if name in scales}
    sizes = {name: graph.specs[operand.value].sizes[-1] for name, operand in known.items()}
    left = [name for name, k in sizes.items() if seen and 4 * k * k <= ROOM]
    others: dict[str, Tensor | None] = {name: None for name in scales if name not in left}
    if others:
        yield others
    while left:
        group: dict[str, Operand] = {}
        while left and sum(4 * sizes[name] ** 2 for name in (*group, left[0])) <= ROOM:
            name = left.pop(0)
            group[name] = known[name]
        yield _compensated(graph, group, scales, seen, unseen)


def _compensated(
    graph: Graph,
    group: Mapping[str, Operand],
    scales: Mapping[str, Scales],
    seen: Sequence[Batch],
    unseen: Sequence[Batch],
) -> dict[str, Tensor | None]:
    moments: dict[str, Tensor] = {}
    for name, rows in _read(graph, group, scales, seen):
        rows = rows * scales[name].factor.to(rows.device)  # what scaled weights are multiplied by
        moments[name] = rows.t() @ rows + moments.get(name, 0.0)
    exact = {
        node.name: graph.constants[node.inputs[1]].to(moments[node.name].device)
        for node in graph.nodes
        if node.name in group
    }
    found = {
        name: compensated_weights(by.scaled(exact[name]), moments.pop(name), by.dtype)
        for name in group
        for by in [scales[name]]
    }
    saved = dict.fromkeys(group, 0.0)
    for name, rows in _read(graph, group, scales, unseen):
        w, by = exact[name], scales[name]
        saved[name] += _error(by.nearest(w), w, rows, by) - _error(found[name], w, rows, by)
    return {name: found[name] if saved[name] > 0 else None for name in group}


def _error(rounded: Tensor, w: Tensor, rows: Tensor, scales: Scales) -> float:
    """Squared, of the products of `rows` with weights that stand for `w`."""
    off = scales.stands_for(rounded) - w.float()
    return float((rows @ off.t()).double().square().sum())


def _read(
    graph: Graph,
    group: Mapping[str, Operand],
    scales: Mapping[str, Scales],
    batches: Iterable[Batch],
) -> Iterator[tuple[str, Tensor]]:
    """What each linear of `group` reads, rounded, in each of `batches`: [n, K] in fp32."""
    values = tuple(dict.fromkeys(name for operand in group.values() for name in operand.values))
    for tensors in batches:
        outputs = interpret(replace(graph, outputs=values), tensors, dtype=torch.float32)
        found = dict(zip(values, outputs, strict=True))
        for name, operand in group.items():
            yield name, operand.rows(found, scales[name])
