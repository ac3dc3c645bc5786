"""A gated linear unit ends in the kernel that makes its value and its gate.

    %y = linear(%x, %w, %b)                            %y = linear(%x, %w', %b')
    %v = slice(%y, dim=2, start=0, end=1280)           %g = gelu(swap_pairs(%y))
    %g = gelu(slice(%y, dim=2, start=1280))      ->    %f = mul(%y, %g)
    %h = mul(%v, %g)                                   %h = slice(%f, dim=2, end=2560, step=2)

The rows of the weights are put in an order in which the two factors of an element are neighbours,
which every epilogue has in one vector. Then the even columns of what is computed of all columns
are the result, and nobody stores the odd ones (`gtco.passes.dataflow.keeps_one`). GEGLU and SwiGLU
(Shazeer, 2020), whatever is computed of either half, whether one linear makes both or each has its
own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.passes.columns import linear_of
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

MOST_NODES = 8
"""Pointwise nodes behind the halves: with a folded norm ahead of them they fit one kernel."""
ALIGNMENT = 4
"""Columns of the result; of others, fewer are stored at a time than a kernel computes."""


_Parts = tuple[tuple[Node, Tensor], tuple[Node, Tensor]]
"""Of each half, the linear that makes it and which of its columns it is."""


@dataclass(frozen=True)
class _Gate:
    """What is computed of two halves.

    Args:
        product: the root's value.
        nodes: the product, the pointwise nodes that lead to it from the halves, and those that go
            on with nothing but numbers, in order.
        halves: the values that the even and the odd columns become.
        parts: what makes each half.
        between: pointwise nodes of the linear's columns ahead of the slices, in order.
    """

    product: str
    nodes: tuple[Node, ...]
    halves: tuple[str, str]
    parts: _Parts
    between: tuple[Node, ...]

    @property
    def columns(self) -> int:
        return len(self.parts[0][1])


def _match(edit: Editor, node: Node) -> _Gate | None:
    if node.outputs[0].dtype not in FLOATS or node.outputs[0].rank < 2:
        return None
    found = _computed_of(edit, node)
    if found is None or len(found[1]) != 2:
        return None
    nodes, (first, second) = found
    nodes = _with_next(edit, nodes)
    inside = {each.name for each in nodes}
    inner = [each.values[0] for each in nodes[:-1]]
    for value in (first, second, *inner):
        if edit.is_output(value) or any(user.name not in inside for user in edit.users(value)):
            return None
    made = _of_slices(edit, first, second) or _of_linears(edit, first, second)
    return made and _Gate(node.values[0], nodes, (first, second), *made)


def _computed_of(edit: Editor, root: Node) -> tuple[tuple[Node, ...], tuple[str, ...]] | None:
    """The pointwise nodes that lead to `root`, in order, and the slices and linears that they are
    computed of; None where there is anything else but numbers of a row, a column or all."""
    sizes = root.outputs[0].sizes
    nodes: dict[str, Node] = {}
    leaves: dict[str, None] = {}
    met = set()

    def leads_from(value: str) -> bool:
        if _is_number(edit, value, sizes[-1]) or value in met:
            return True
        node = edit.producer(value)
        if node is None or edit.shape(value) != sizes:
            return False
        if node.op in ("slice", "linear"):
            leaves[value] = None
            return len(leaves) <= 2
        met.add(value)
        pointwise = node.definition.is_pointwise and not node.definition.of_pairs
        if not pointwise or len(met) > MOST_NODES or not all(map(leads_from, node.inputs)):
            return False
        nodes[value] = node
        return True

    return (tuple(nodes.values()), tuple(leaves)) if leads_from(root.values[0]) else None


def _with_next(edit: Editor, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """`nodes` and the pointwise ones that follow the last, of it and of numbers."""
    (value,) = nodes[-1].values
    if not edit.read_once(value) or len(nodes) == MOST_NODES:
        return nodes
    (reader,) = edit.users(value)
    others = [name for name in reader.inputs if name != value]
    sizes = edit.shape(value)
    pointwise = reader.definition.is_pointwise and not reader.definition.of_pairs
    alike = reader.outputs[0].sizes == sizes and reader.outputs[0].dtype in FLOATS
    if not (pointwise and alike and all(_is_number(edit, name, sizes[-1]) for name in others)):
        return nodes
    return _with_next(edit, (*nodes, reader))


def _is_number(edit: Editor, value: str, columns: int) -> bool:
    """Whether `value` has one element for each row, or is constant and has one for each column."""
    sizes = edit.shape(value)
    if sizes[-1:] in ((), (1,)):
        return True
    return value in edit.constants and sizes[-1] == columns and math.prod(sizes[:-1]) == 1


def _of_slices(edit: Editor, *halves: str) -> tuple[_Parts, tuple[Node, ...]] | None:
    """What makes the halves of what one linear makes."""
    slices = [edit.producer(half, "slice") for half in halves]
    if None in slices or len({each.inputs[0] for each in slices if each}) != 1:
        return None
    starts = []
    for each in slices:
        assert each is not None
        y = each.inputs[0]
        *_, width = sizes = edit.shape(y)
        taken = range(*slice(each.attrs["start"], each.attrs["end"]).indices(width))
        last = each.attrs["dim"] % len(sizes) == len(sizes) - 1
        if not last or each.attrs.get("step", 1) != 1 or 2 * len(taken) != width:
            return None
        starts.append(taken.start)
    if sorted(starts) != [0, width // 2]:
        return None
    if edit.is_output(y) or any(user not in slices for user in edit.users(y)):
        return None
    between: list[Node] = []
    value = y
    while (node := edit.producer(value)) is not None and node.definition.is_pointwise:
        operands = [name for name in node.inputs if not _is_number(edit, name, width)]
        if node.definition.of_pairs or len(operands) != 1:
            return None
        (value,) = operands
        if edit.shape(value) != sizes or not edit.read_once(value):
            return None
        between.insert(0, node)
    linear = _constant_linear(edit, value)
    if linear is None:
        return None
    first, second = ((linear, torch.arange(start, start + width // 2)) for start in starts)
    return (first, second), tuple(between)


def _of_linears(edit: Editor, *halves: str) -> tuple[_Parts, tuple[Node, ...]] | None:
    """What makes halves that are two linears of one tensor."""
    linears = [_constant_linear(edit, half) for half in halves]
    first, second = linears
    if first is None or second is None or first.inputs[0] != second.inputs[0]:
        return None
    alike = dict(first.attrs) == dict(second.attrs) and first.outputs == second.outputs
    weights = [edit.dtype(each.inputs[1]) for each in (first, second)]
    if not alike or weights[0] != weights[1]:
        return None
    columns = torch.arange(first.outputs[0].sizes[-1])
    return ((first, columns), (second, columns)), ()


def _constant_linear(edit: Editor, value: str) -> Node | None:
    """The linear with constant weights that makes `value`, if one does."""
    node = edit.producer(value, "linear")
    constant = node is not None and all(name in edit.constants for name in node.inputs[1:])
    return node if constant else None


def _check(edit: Editor, match: _Gate) -> str | None:
    if edit.is_output(match.nodes[-1].values[0]):
        return "the model returns it, and would get all columns"
    if match.columns % ALIGNMENT:
        return f"{match.columns} columns are no multiple of {ALIGNMENT}"
    return None


def _replace(edit: Editor, match: _Gate) -> str:
    count = match.columns
    order = torch.arange(2 * count).reshape(2, count).t().flatten()
    made = torch.cat([columns for _, columns in match.parts])
    edit.root(match.parts[0][0])
    y = linear_of(edit, match.parts, "paired", order)
    moved = {match.parts[0][0].values[0]: y}
    for node in match.between:
        y = moved[node.values[0]] = _again(edit, node, moved, made[order])
    edit.root(match.nodes[-1])
    moved = dict(zip(match.halves, (y, edit.add("swap_pairs", y)), strict=True))
    each_twice = torch.arange(count).repeat_interleave(2)
    for node in match.nodes:
        moved[node.values[0]] = _again(edit, node, moved, each_twice)
    (last,) = match.nodes[-1].values
    dim = edit.specs[last].rank - 1
    even = edit.add("slice", moved[last], dim=dim, start=0, end=2 * count, step=2)
    if last == match.product:
        return even
    edit.replace(last, even)
    return match.product


def _again(edit: Editor, node: Node, moved: dict[str, str], columns: Tensor) -> str:
    """`node` of what its operands have become, and numbers of these of its columns."""
    inputs = [moved.get(name) or _numbers(edit, name, columns) for name in node.inputs]
    return edit.add(node.op, *inputs, **node.attrs)


def _numbers(edit: Editor, name: str, columns: Tensor) -> str:
    if edit.shape(name)[-1:] in ((), (1,)):
        return name
    given = edit.constants[name]
    return edit.add_constant(f"{name}_paired", given[..., columns.to(given.device)])


RULES: tuple[Rule[Any], ...] = (
    Rule("v * f(g) of two halves of y -> (y * f(swap_pairs(y)))[..., ::2]", ("mul",),
         _match, _replace, _check),
)  # fmt: skip


def pair_gates(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
