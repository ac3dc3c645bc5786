"""Slices move backwards, so that rows nobody reads are not computed.

    %h: f16[1,197,3072] = gelu(%x)                 %x0: f16[1,1,3072] = slice(%x, dim=1, end=1)
    %y: f16[1,197,768] = linear(%h, %w)      ->    %h: f16[1,1,3072] = gelu(%x0)
    %z: f16[1,1,768] = slice(%y, dim=1, end=1)     %z: f16[1,1,768] = linear(%h, %w)

A slice of an attention's rows is a slice of its queries. Only when every reader of the sliced
value reads through the same slice, and not where it only takes off what fills rows up to whole
copies (`gtco.passes.channels`). Of what is in order, the first ones need no others:

    %s.0, %s.1 = topk(%x, k=8400)   %y = slice(%s.0, end=300)    ->    %y, %i = topk(%x, k=300)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gtco.ir.graph import Graph, Node
from gtco.passes import views
from gtco.passes.channels import fills_copies
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite


@dataclass(frozen=True)
class _Sliced:
    """`node` and the slices of its result that are to move before it."""

    node: Node
    slices: tuple[Node, ...]
    inputs: tuple[int | None, ...]
    """For each input of `node` the dimension to slice, or None to leave it whole."""
    other_reader: str | None


def _match(edit: Editor, node: Node) -> _Sliced | None:
    source = edit.producer(node.inputs[0])
    if source is None or len(source.outputs) != 1:
        return None
    inputs = _input_dims(edit, source, node.attrs["dim"])
    if inputs is None:
        return None
    readers = edit.users(source.name)
    same = tuple(user for user in readers if user.op == "slice" and user.attrs == node.attrs)
    other = next((f"%{user.name}" for user in readers if user not in same), None)
    if edit.is_output(source.name):
        other = "the caller"
    if other and source.definition.is_view:
        return None  # moving a view before a view saves nothing
    return _Sliced(source, (node, *(s for s in same if s.name != node.name)), inputs, other)


def _input_dims(edit: Editor, node: Node, dim: int) -> tuple[int | None, ...] | None:
    """Where a slice of dimension `dim` of `node` goes, or None if it cannot."""
    rank = node.outputs[0].rank
    rest = (None,) * (len(node.inputs) - 1)
    if node.definition.of_pairs and dim == rank - 1:
        return None
    if node.definition.is_pointwise:
        size = node.outputs[0].sizes[dim]
        return tuple(_broadcast_dim(edit.shape(name), dim - rank, size) for name in node.inputs)
    if node.definition.by_rows:
        return (dim, *rest) if dim < edit.specs[node.inputs[0]].rank - 1 else None
    if (row := node.definition.row) is not None and row.whole and "dim" in node.attrs:
        return (dim,) if dim != node.attrs["dim"] % rank else None
    if node.op == "matmul":
        whole = edit.specs[node.inputs[0]].rank == rank > 1
        return (dim, None) if whole and dim == rank - 2 else None
    if node.definition.family == "attention":
        if dim != rank - 2 or node.attrs["causal"]:
            return None
        rows = node.outputs[0].sizes[dim]
        masks = (_broadcast_dim(edit.shape(name), -2, rows) for name in node.inputs[3:])
        return (dim, None, None, *masks)
    if node.op == "permute":
        return (node.attrs["dims"][dim],)
    if node.op == "reshape":
        place = _kept_dim(edit.shape(node.inputs[0]), node.outputs[0].sizes, dim)
        return None if place is None else (place,)
    return None


def _broadcast_dim(shape: tuple[int, ...], from_end: int, size: int) -> int | None:
    """The dimension of an operand, unless it is broadcast to `size` there."""
    dim = len(shape) + from_end
    return dim if dim >= 0 and shape[dim] == size else None


def _kept_dim(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """The dimension of `before` that a reshape keeps as dimension `dim` of `after`."""
    if 0 in after:
        return None
    outer = math.prod(after[:dim])
    for place, size in enumerate(before):
        if size == after[dim] and math.prod(before[:place]) == outer:
            return place
    return None


def _check(edit: Editor, match: _Sliced) -> str | None:
    if match.other_reader:
        return f"%{match.node.name} is read as a whole by {match.other_reader}"
    wide, (narrow,) = match.node.outputs[0], match.slices[0].outputs
    if fills_copies(narrow, wide):
        return f"the rows of %{match.node.name} are whole copies as they are"
    return None


def _replace(edit: Editor, match: _Sliced) -> str:
    node, attrs = match.node, match.slices[0].attrs
    edit.root(node)
    inputs = [
        name if dim is None else edit.add("slice", name, **{**attrs, "dim": dim})
        for name, dim in zip(node.inputs, match.inputs, strict=True)
    ]
    own = dict(node.attrs)
    if node.op == "reshape":
        own["shape"] = match.slices[0].outputs[0].sizes
    result = edit.add(node.op, *inputs, **own)
    for other in match.slices[1:]:
        edit.replace(other.name, result)
    return result


def _first_ones(edit: Editor, node: Node) -> tuple[Node, Node, list[Node]] | None:
    """A slice of a topk, the topk, and all that read it: slices that take the same first ones."""
    source, rank = edit.producer(node.inputs[0], "topk"), node.outputs[0].rank
    if source is None or node.attrs["dim"] != rank - 1 or node.attrs["start"] > 0:
        return None
    readers = [user for value in source.values for user in edit.users(value)]
    alike = all(user.op == "slice" and user.attrs == node.attrs for user in readers)
    outside = any(edit.is_output(value) for value in source.values)
    return (
        (node, source, readers)
        if alike and not outside and node.attrs.get("step", 1) == 1
        else None
    )


def _fewer(edit: Editor, match: tuple[Node, Node, list[Node]]) -> str:
    node, source, readers = match
    edit.root(source)
    count = node.outputs[0].sizes[-1]
    found = edit.add_node("topk", source.inputs, {**source.attrs, "k": count})
    values = dict(zip(source.values, found, strict=True))
    for other in readers:
        if other.name != node.name:
            edit.replace(other.name, values[other.inputs[0]])
    return values[node.inputs[0]]


RULES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("slice(topk(x, k)) -> topk(x, fewer)", ("slice",), _first_ones, _fewer),
    Rule("slice(f(x)) -> f(slice(x))", ("slice",), _match, _replace, _check),
)


def push_slices(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return merge_duplicates(rewrite(graph, RULES, log), log)
