"""What is computed alike of all parts of a tensor, and joined again, is computed of the tensor.

    %a = div(slice(%x, dim=3, start=0, end=1), other=127)
    %b = div(slice(%x, dim=3, start=1, end=2), other=54)       ->   %c = div(%x, [127, 54])
    %c = concat(%a, %b, dim=3)

Coordinates that are normalised one by one (RAFT, Teed and Deng, ECCV 2020), boxes that are decoded
corner by corner: one kernel, or a part of one, instead of one a part and one that joins them.
Numbers that differ from part to part become a constant, if the type of the values has them. Parts
of which nothing is computed are the tensor itself, and where they are joined along another
dimension, such as the real and imaginary parts of a transform, a permutation of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite
from gtco.passes.views import cut, whole_of


@dataclass(frozen=True)
class _Step:
    """What is done to each part in turn: an operator of one value and perhaps a number."""

    op: str
    attrs: Mapping[str, Any]
    numbers: tuple[Any, ...]
    """One for each part; all None where the operator has none."""


@dataclass(frozen=True)
class _Rejoined:
    whole: str
    dim: int
    sizes: tuple[int, ...]
    """Of the parts."""
    steps: tuple[_Step, ...]


def _match(edit: Editor, node: Node) -> _Rejoined | None:
    dim, start = node.attrs["dim"] % node.outputs[0].rank, 0
    wholes: set[str] = set()
    chains: list[list[Node]] = []
    for value in node.inputs:
        end = start + edit.shape(value)[dim]
        chain = _chain(edit, value)
        part = whole_of(edit, chain[0].inputs[0] if chain else value, dim, start, end)
        if part is None:
            return None
        wholes.add(part)
        chains.append(chain)
        start = end
    if len(wholes) != 1 or len(chains) < 2 or len({len(chain) for chain in chains}) != 1:
        return None
    (whole,) = wholes
    if edit.shape(whole) != node.outputs[0].sizes:
        return None
    steps: list[_Step] = []
    for nodes in zip(*chains, strict=True):
        step = _step(nodes)
        if step is None:
            return None
        steps.append(step)
    sizes = tuple(edit.shape(value)[dim] for value in node.inputs)
    return _Rejoined(whole, dim, sizes, tuple(steps))


def _chain(edit: Editor, value: str) -> list[Node]:
    """Pointwise nodes of one value each, of which nobody else reads any; `value` is the last."""
    found: list[Node] = []
    while node := edit.producer(value):
        alone = node.definition.is_pointwise and len(node.inputs) == len(node.outputs) == 1
        if not alone or node.definition.of_pairs or not edit.read_once(value):
            break
        found.insert(0, node)
        value = node.inputs[0]
    return found


def _step(nodes: tuple[Node, ...]) -> _Step | None:
    """The step that all parts take at once in `nodes`, if it is one."""
    first, *others = nodes
    attrs = _but_its_number(first)
    for other in others:
        if (other.op, _but_its_number(other)) != (first.op, attrs):
            return None
        if other.outputs[0].dtype != first.outputs[0].dtype:
            return None
        if ("other" in other.attrs) != ("other" in first.attrs):
            return None
    numbers = tuple(node.attrs.get("other") for node in nodes)
    if len(set(numbers)) > 1:
        dtype = first.outputs[0].dtype
        known = torch.tensor(numbers, dtype=torch.float64)
        if not dtype.is_floating_point or not torch.equal(known.to(dtype).double(), known):
            return None
    return _Step(first.op, attrs, numbers)


def _but_its_number(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.attrs.items() if key != "other"}


def _check(edit: Editor, match: _Rejoined) -> str | None:
    dtype = edit.dtype(match.whole)
    if any(len(set(step.numbers)) > 1 for step in match.steps) and not dtype.is_floating_point:
        return f"%{match.whole} is {edit.specs[match.whole]}, no float"
    return None


def _of_the_whole(edit: Editor, match: _Rejoined) -> str:
    value = match.whole
    for step in match.steps:
        if len(set(step.numbers)) == 1:
            (number,) = set(step.numbers)
            attrs = {**step.attrs, **({} if number is None else {"other": number})}
            value = edit.add(step.op, value, **attrs)
            continue
        numbers = torch.tensor(step.numbers, dtype=edit.dtype(value))
        spread = numbers.repeat_interleave(torch.tensor(match.sizes))
        after = len(edit.shape(value)) - match.dim - 1
        constant = edit.add_constant("numbers", spread.reshape(-1, *(1,) * after))
        value = edit.add(step.op, value, constant, **step.attrs)
    return value


@dataclass(frozen=True)
class _Moved:
    whole: str
    dim: int
    """Of which each part is one index, in order."""
    to: int
    """Where the parts are joined."""
    shape: tuple[int, ...]


def _match_moved(edit: Editor, node: Node) -> _Moved | None:
    to = node.attrs["dim"] % node.outputs[0].rank
    found: set[tuple[str, int]] = set()
    for at, value in enumerate(node.inputs):
        view = edit.producer(value, "reshape")
        part = edit.producer(view.inputs[0], "slice") if view else None
        taken = cut(part) if part else None
        if part is None or taken is None or taken[1:] != (at, at + 1):
            return None
        dim, *_ = taken
        rest = [size for d, size in enumerate(part.outputs[0].sizes) if d != dim]
        if list(edit.shape(value)) not in (rest, [*rest[:to], 1, *rest[to:]]):
            return None
        found.add((part.inputs[0], dim))
    if len(found) != 1:
        return None
    ((whole, dim),) = found
    all_of_them = edit.shape(whole)[dim] == len(node.inputs)
    return _Moved(whole, dim, to, node.outputs[0].sizes) if all_of_them else None


def _permuted(edit: Editor, match: _Moved) -> str:
    dims = [dim for dim in range(len(edit.shape(match.whole))) if dim != match.dim]
    dims.insert(match.to, match.dim)
    return edit.add("reshape", edit.add("permute", match.whole, dims=dims), shape=match.shape)


RULES: tuple[Rule[Any], ...] = (
    Rule("concat(f(x[:n]), g(x[n:])) -> h(x)", ("concat",), _match, _of_the_whole, _check),
    Rule("concat(x[..., 0], x[..., 1]) -> reshape(permute(x))", ("concat",),
         _match_moved, _permuted, never_refused),
)  # fmt: skip


def rejoin_parts(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
