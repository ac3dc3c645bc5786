"""How the weights of each linear are rounded to fp8, by what it reads in batches of inputs.

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
from gtco.passes.quantize import Operand, operands, rounded_weights, row_scales

Batch = tuple[Tensor, ...]
"""A tensor for each input of the graph."""

ROOM = 1 << 30
"""Bytes of second moments that are kept at a time; a linear that needs more by itself is rounded to
the nearest."""


def held_out(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Those that no second moment is taken of: the last quarter, and one at least."""
    return batches[-max(1, len(batches) // 4) :]


def rounded(
    graph: Graph, largest: Mapping[str, float], batches: Sequence[Batch]
) -> Iterator[dict[str, Tensor | None]]:
    """Linears of `graph` with weights in fp8 whose errors compensate each other, some at a time.

    Args:
        graph: as the passes leave it.
        largest: by the name of each linear, the largest magnitude that it reads.
        batches: of real inputs.

    Yields:
        By the name of a linear, [rows, K] in fp8, or None where rounding to the nearest is as good
        on the batches held out, or nothing is left besides these.
    """
    unseen = held_out(batches)
    seen = batches[: len(batches) - len(unseen)]
    known = {name: operand for name, operand in operands(graph).items() if name in largest}
    sizes = {name: graph.specs[operand.value].sizes[-1] for name, operand in known.items()}
    left = [name for name, k in sizes.items() if seen and 4 * k * k <= ROOM]
    if set(known) - set(left):
        yield {name: None for name in known if name not in left}
    while left:
        group: dict[str, Operand] = {}
        while left and sum(4 * sizes[name] ** 2 for name in (*group, left[0])) <= ROOM:
            name = left.pop(0)
            group[name] = known[name]
        yield _compensated(graph, group, largest, seen, unseen)


def _compensated(
    graph: Graph,
    group: Mapping[str, Operand],
    largest: Mapping[str, float],
    seen: Sequence[Batch],
    unseen: Sequence[Batch],
) -> dict[str, Tensor | None]:
    moments: dict[str, Tensor] = {}
    for name, rows in _read(graph, group, largest, seen):
        moments[name] = rows.t() @ rows + moments.get(name, 0.0)
    exact = {
        node.name: graph.constants[node.inputs[1]].to(moments[node.name].device)
        for node in graph.nodes
        if node.name in group
    }
    found = {name: compensated_weights(exact[name], moments.pop(name)) for name in group}
    saved = dict.fromkeys(group, 0.0)
    for name, rows in _read(graph, group, largest, unseen):
        w = exact[name]
        saved[name] += _error(rounded_weights(w), w, rows) - _error(found[name], w, rows)
    return {name: found[name] if saved[name] > 0 else None for name in group}


def _error(rounded: Tensor, w: Tensor, rows: Tensor) -> float:
    """Squared, of the products of `rows` with weights that stand for `w`."""
    off = rounded.float() / row_scales(w)[:, None] - w.float()
    return float((rows @ off.t()).double().square().sum())


def _read(
    graph: Graph,
    group: Mapping[str, Operand],
    largest: Mapping[str, float],
    batches: Iterable[Batch],
) -> Iterator[tuple[str, Tensor]]:
    """What each linear of `group` reads, rounded, in each of `batches`: [n, K] in fp32."""
    values = tuple(dict.fromkeys(name for operand in group.values() for name in operand.values))
    for tensors in batches:
        outputs = interpret(replace(graph, outputs=values), tensors, dtype=torch.float32)
        found = dict(zip(values, outputs, strict=True))
        for name, operand in group.items():
            yield name, operand.rows(found, largest[name])
