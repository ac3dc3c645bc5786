"""Whether a kernel's outputs are right: random inputs, references made once, the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Group
from gtco.ir.interpreter import interpret
from gtco.ir.ops import OPS
from gtco.passes.dataflow import trace


def random_values(
    group: Group, device: torch.device, seed: int, integers: range = range(8)
) -> dict[str, Tensor]:
    """Random tensors for all that the group reads; statistics are those of random rows.

    Args:
        group: its inputs are drawn, its constants are taken as they are.
        device: where the values are to be.
        seed: equal seeds give equal values.
        integers: what integer inputs are drawn from; small by default, since some are indices;
            those of `gather` are drawn from all that are there.
    """
    generator = torch.Generator().manual_seed(seed)
    graph = group.graph
    merged = {node.inputs[0] for node in graph.nodes if node.op == "merge_stats"}
    indices = {
        trace(graph, node.inputs[1]).base: graph.specs[node.inputs[0]].sizes[node.attrs["dim"]]
        for node in graph.nodes
        if node.op == "gather"
    }
    grouped = {node.inputs[1] for node in graph.nodes if node.op == "normalize_groups"}
    squares = {
        trace(graph, node.inputs[1]).base for node in graph.nodes if node.op == "merge_moments"
    }
    values: dict[str, Tensor] = {}
    for name, spec in graph.inputs.items():
        if spec.dtype == torch.bool:
            tensor = torch.rand(spec.sizes, generator=generator) < 0.5
        elif name in indices:
            tensor = torch.randint(-indices[name], indices[name], spec.sizes, generator=generator)
        elif not spec.dtype.is_floating_point:
            tensor = torch.randint(integers.start, integers.stop, spec.sizes, generator=generator)
        elif name in merged:
            rows = torch.randn((*spec.sizes[:-2], spec.sizes[-2] * 64), generator=generator)
            tensor = OPS["row_stats"].reference(rows)
        elif name in grouped:
            images, chunks, groups, _ = spec.sizes
            pixels = torch.randn((images, chunks * 16, groups), generator=generator)
            tensor = OPS["group_stats"].reference(pixels, groups=groups, chunks=chunks)
        elif name in squares:
            tensor = torch.randn(spec.sizes, generator=generator).abs()
        else:
            tensor = torch.randn(spec.sizes, generator=generator)
        values[name] = tensor.to(device, spec.dtype)
    values.update({name: tensor.to(device) for name, tensor in graph.constants.items()})
    return values


@dataclass(frozen=True)
class _Reference:
    """What one output must be.

    Args:
        eager: torch's own answer.
        exact: in fp64, zero where `odd`.
        odd: where a reference is not finite and the answer must be `eager`'s; None if nowhere.
        limit: the largest RMSE that passes.
    """

    eager: Tensor
    exact: Tensor
    odd: Tensor | None
    limit: float


class Judge:
    """Decides as DESIGN section 9 does, in proportion to what torch eager gets wrong.

    An output may be off from fp64 by 3 times eager's RMSE plus `slack` of its size. Where it was
    rounded to 8 bits, one number more may be its neighbour: next to a half, the last bit decides.
    What is no number, and other integers, must be torch's own.

    Args:
        group: what was computed.
        values: all that it reads, by name; where they live, the references are made.
        slack: part of an output's RMS that is allowed beside eager's error.
    """

    def __init__(self, group: Group, values: Mapping[str, Tensor], slack: float = 1e-3) -> None:
        args = [values[name] for name in group.graph.inputs]
        eager = interpret(group.graph, args, rounded=True)
        exact = interpret(group.graph, args, dtype=torch.float64)
        self._rounded = {name for name in group.graph.outputs if _quantizes(group.graph, name)}
        self._references = {
            name: _reference(
                self._wide(name, mine), self._wide(name, truth), slack, _neighbour(mine)
            )
            for name, mine, truth in zip(group.graph.outputs, eager, exact, strict=True)
        }

    def __call__(self, outputs: Mapping[str, Tensor]) -> str:
        """Which output is wrong, or "" if all are right; waits for the device once."""
        errors = torch.stack(
            [
                _error(self._wide(name, outputs[name]), each)
                for name, each in self._references.items()
            ]
        )
        for (name, each), error in zip(self._references.items(), errors.tolist(), strict=True):
            if not error <= each.limit:  # NaN is wrong too
                if not each.eager.dtype.is_floating_point:
                    return f"wrong answer: {error:.0f} elements of %{name} differ"
                return f"wrong answer: %{name} has an RMSE of {error:.3g}, allowed {each.limit:.3g}"
        return ""

    def _wide(self, name: str, x: Tensor) -> Tensor:
        """The output `name` as floats, if it was rounded to 8 bits."""
        return x.float() if name in self._rounded or x.dtype == torch.float8_e4m3fn else x


def _quantizes(graph: Graph, name: str) -> bool:
    """Whether `name` is what was rounded to 8 bits, or a view of it."""
    node = graph.producers.get(name)
    while node is not None and node.definition.is_view:
        node = graph.producers.get(node.inputs[0])
    return node is not None and node.definition.quantizes


def _neighbour(x: Tensor) -> float:
    """How far the largest of 8-bit numbers is from the next; 0 for numbers of more bits."""
    if x.dtype == torch.float8_e4m3fn:
        largest = max(map(float, x.float().nan_to_num().aminmax()), key=abs) if x.numel() else 0.0
        return 2.0 ** (math.frexp(largest)[1] - 4)  # three bits behind the leading one
    return float(x.dtype == torch.int8)


def _reference(eager: Tensor, exact: Tensor, slack: float, neighbour: float) -> _Reference:
    if not eager.dtype.is_floating_point:
        return _Reference(eager, exact, None, 0.0)
    odd = ~(eager.isfinite() & exact.isfinite())
    truth = exact.masked_fill(odd, 0.0)
    allowed = _rms(eager.double().masked_fill(odd, 0.0) - truth)
    limit = (
        3 * float(allowed) + slack * float(_rms(truth)) + neighbour / max(truth.numel(), 1) ** 0.5
    )
    return _Reference(eager, truth, odd if bool(odd.any()) else None, limit)


def _error(output: Tensor, reference: _Reference) -> Tensor:
    """The RMSE of floats, the number of wrong integers."""
    eager = reference.eager
    if not eager.dtype.is_floating_point:
        return (output != eager).sum().double()
    off = output.double() - reference.exact
    if reference.odd is not None:
        same = (output == eager) | (output.isnan() & eager.isnan())
        off = torch.where(reference.odd, torch.where(same, 0.0, torch.nan), off)
    return _rms(off)


def _rms(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    return x.square().mean().sqrt()
