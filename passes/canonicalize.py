"""One form for what can be written in several ways.

    %a = permute(%x, dims=[0, 2, 1])
    %b = permute(%a, dims=[0, 2, 1])            ->   %y = linear(%x, %w')
    %y = matmul(%b, %w)   (%w a constant)

Views, casts and copies that do nothing go (the rules of `views.py`), a constant operand of one
element becomes the attribute `other`, a power a square or a root, a constant row added to a linear
its bias, and so does a number added to some of its columns, as in the `1 + scale` of a diffusion
transformer; the concat of what lies behind a row and what lies ahead of it is a roll, which ONNX
does not have; equal nodes become one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node, infer_outputs
from gtco.ir.ops import OPS
from gtco.passes import views
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite

_BINARY = tuple(name for name, op in OPS.items() if op.is_binary)

# -- scalars -------------------------------------------------------------------------------------


def _scalar_operand(edit: Editor, node: Node) -> tuple[Node, str, Any] | None:
    if len(node.inputs) != 2:
        return None
    pairs = [(0, 1), (1, 0)] if node.definition.commutes else [(0, 1)]
    for x, c in pairs:
        constant = edit.constant(node.inputs[c])
        if constant is None or constant.numel() != 1 or constant.dtype == torch.bool:
            continue
        value = constant.item()
        specs = [edit.specs[node.inputs[x]]]
        if infer_outputs(node.op, specs, {"other": value}) == node.outputs:
            return node, node.inputs[x], value
    return None


def _with_scalar(edit: Editor, match: tuple[Node, str, Any]) -> str:
    node, x, value = match
    return edit.add(node.op, x, other=value)


_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _power(edit: Editor, node: Node) -> tuple[str, str] | None:
    """(op, x) of a power that another operator takes in a few instructions, as torch does."""
    op = _POWERS.get(node.attrs["other"]) if len(node.inputs) == 1 else None
    if op is None or not (op == "square" or node.outputs[0].dtype.is_floating_point):
        return None
    return op, node.inputs[0]


# -- matmul --------------------------------------------------------------------------------------


def _constant_matmul(edit: Editor, node: Node) -> tuple[str, str, bool] | None:
    """(x, weight constant, whether it is already transposed) of `x @ constant`."""
    x, w = node.inputs
    if edit.specs[w].rank != 2 or edit.specs[x].rank < 2:
        return None
    if w in edit.constants:
        return x, w, False
    view = edit.producer(w, "permute")
    return (x, view.inputs[0], True) if view and view.inputs[0] in edit.constants else None


def _linear(edit: Editor, match: tuple[str, str, bool]) -> str:
    x, w, transposed = match
    if not transposed:
        # the transpose of a transposed weight is that weight: no copy then
        w = edit.add_constant(f"{w}_t", edit.constants[w].t().contiguous())
    return edit.add("linear", x, w)


def _biased(edit: Editor, node: Node) -> tuple[Node, str] | None:
    """The linear without a bias, and the constant row added to it."""
    for y, b in ((0, 1), (1, 0)) if len(node.inputs) == 2 else ():
        linear, bias = edit.producer(node.inputs[y], "linear"), edit.constant(node.inputs[b])
        if linear is None or bias is None or len(linear.inputs) != 2:
            continue
        columns = linear.outputs[0].sizes[-1]
        is_row = bias.numel() == columns == bias.shape[-1] and linear.outputs == node.outputs
        plain = linear.attrs.get("out_dtype") is None and bias.dtype == linear.outputs[0].dtype
        if is_row and plain and edit.read_once(linear.name):
            return linear, node.inputs[b]
    return None


def _with_bias(edit: Editor, match: tuple[Node, str]) -> str:
    linear, bias = match
    if edit.specs[bias].rank != 1:
        bias = edit.add_constant(bias, edit.constants[bias].reshape(-1))
    return edit.add("linear", *linear.inputs, bias)


@dataclass(frozen=True)
class _Shifted:
    """A number added to `columns` of a linear alone, which are read through `views`, in order."""

    linear: Node
    columns: slice
    views: tuple[Node, ...]
    number: float


def _shifted_columns(edit: Editor, node: Node) -> _Shifted | None:
    number = node.attrs.get("other")
    seen: list[Node] = []
    value = node.inputs[0]
    while view := edit.producer(value, "slice", "reshape", "permute"):
        if not edit.read_once(value):
            return None
        seen.insert(0, view)
        value = view.inputs[0]
    linear = edit.producer(value, "linear")
    if linear is None or number is None or not math.isfinite(number) or not seen:
        return None
    columns = _columns_of(seen[0])
    others = [_columns_of(user) for user in edit.users(value) if user.name != seen[0].name]
    if columns is None or edit.is_output(value) or node.outputs[0].dtype != edit.dtype(value):
        return None
    for other in others:
        if other is None or (other.start < columns.stop and columns.start < other.stop):
            return None
    known = all(name in edit.constants for name in linear.inputs[1:])
    plain = known and linear.attrs.get("out_dtype") is None
    return _Shifted(linear, columns, tuple(seen), number) if plain else None


def _columns_of(view: Node) -> slice | None:
    """The columns that a slice of a matrix takes."""
    taken = views.cut(view)
    if taken is None or taken[0] != view.outputs[0].rank - 1:
        return None
    return slice(*taken[1:])


def _with_shifted_bias(edit: Editor, match: _Shifted) -> str:
    linear, (spec,) = match.linear, match.linear.outputs
    x, w, *biases = linear.inputs
    bias = torch.zeros(spec.sizes[-1], dtype=torch.float64)
    if biases:
        bias = edit.constants[biases[0]].double().reshape(-1).cpu().clone()
    bias[match.columns] += match.number
    made = edit.add_constant(f"{w}_bias", bias.to(spec.dtype))
    value = edit.add("linear", x, w, made, **linear.attrs)
    edit.replace(linear.name, value)
    return edit.add_views(value, match.views)


# -- rolls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Roll:
    x: str
    shifts: tuple[int, ...]


def _swapped(edit: Editor, node: Node) -> _Roll | None:
    """Two parts of x, the last one first. Columns are no rows: a product ahead may make them so."""
    (spec,) = node.outputs
    dim = node.attrs["dim"] % spec.rank
    if len(node.inputs) != 2 or dim == spec.rank - 1:
        return None
    first, second = (edit.shape(value)[dim] for value in node.inputs)
    x = views.whole_of(edit, node.inputs[0], dim, second, first + second)
    if x is None or x != views.whole_of(edit, node.inputs[1], dim, 0, second):
        return None
    shifts = tuple(first if at == dim else 0 for at in range(spec.rank))
    return _Roll(x, shifts) if edit.specs[x] == spec else None


def _twice(edit: Editor, node: Node) -> _Roll | None:
    inner = edit.producer(node.inputs[0], "roll")
    if inner is None:
        return None
    pairs = zip(node.attrs["shifts"], inner.attrs["shifts"], node.outputs[0].sizes, strict=True)
    return _Roll(inner.inputs[0], tuple((a + b) % max(1, size) for a, b, size in pairs))


def _rolled(edit: Editor, match: _Roll) -> str:
    return edit.add("roll", match.x, shifts=match.shifts) if any(match.shifts) else match.x


RULES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("op(x, constant c of one element) -> op(x, other=c)", _BINARY,
         _scalar_operand, _with_scalar),
    Rule("x ** 2 -> square(x), and roots", ("pow",), _power,
         lambda edit, match: edit.add(match[0], match[1])),
    Rule("x @ constant -> linear(x, constant.T)", ("matmul",), _constant_matmul, _linear),
    Rule("linear(x, w) + constant row b -> linear(x, w, b)", ("add",), _biased, _with_bias),
    Rule("slice(linear(x, w, b)) + number -> slice(linear(x, w, b'))", ("add",),
         _shifted_columns, _with_shifted_bias),
    Rule("concat(x[n:], x[:n]) -> roll(x)", ("concat",), _swapped, _rolled),
    Rule("roll(roll(x)) -> roll(x)", ("roll",), _twice, _rolled),
)  # fmt: skip


def canonicalize(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return merge_duplicates(rewrite(graph, RULES, log), log)
