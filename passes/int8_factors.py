"""Factors of what is rounded to int8 go into those of the sums that it is made of.

    %b: f16 = cast(add(mul(%a, %u), %c))            %b: f32 = add(mul(%a, %u * %f), (%c + %d) * %f)
    %s: f16 = cast(add(mul(cast(%p), %v), %d))  ->  %s: f32 = mul(cast(%p), %v * %f)
    %r: f16 = relu(add(%b, %s))                     %r: f32 = relu(add(%b, %s))
    %q: i8 = quantize_affine(%r, %f, %z)            %q: i8 = quantize_affine(%r, 1, %z)

An epilogue loads each factor of its columns, while an element takes a few instructions: a residual
that is rounded to int8 has six such, and three where they are put together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

MOST = 3
"""Values that are added."""


@dataclass(frozen=True)
class _Sum:
    """Values times factors of their columns, and a constant of each column; in f64."""

    terms: tuple[tuple[str, Tensor], ...]
    constant: Tensor

    def times(self, factor: Tensor) -> _Sum:
        terms = tuple((value, own * factor) for value, own in self.terms)
        return _Sum(terms, self.constant * factor)


@dataclass(frozen=True)
class _Match:
    node: Node
    has_relu: bool
    sum: _Sum


def _match(edit: Editor, node: Node) -> _Match | None:
    value, factor, _ = node.inputs
    scale = edit.constants[factor].cpu()
    if not bool((scale > 0).all()) or bool((scale == 1).all()):
        return None
    has_relu = False
    while (made := edit.producer(value, "relu", "cast")) is not None and edit.read_once(value):
        if edit.dtype(made.inputs[0]) not in FLOATS:
            break
        has_relu |= made.op == "relu"
        value = made.inputs[0]
    found = _sum_of(edit, value)
    scaled = any(not bool((own == 1).all()) for _, own in found.terms)
    if not scaled or len(found.terms) > MOST:
        return None
    return _Match(node, has_relu, found.times(scale.double()))


def _sum_of(edit: Editor, value: str) -> _Sum:
    """What `value` is: the sum that makes it, if nothing else reads it, else itself times 1."""
    itself = _Sum(
        ((value, torch.ones(1, dtype=torch.float64)),), torch.zeros(1, dtype=torch.float64)
    )
    node = edit.producer(value, "cast", "add", "mul")
    if node is None or not edit.read_once(value) or edit.dtype(value) not in FLOATS:
        return itself
    if any(edit.dtype(name) not in FLOATS for name in node.inputs):
        return itself
    first = node.inputs[0]
    if edit.constant(first) is not None or edit.shape(first) != edit.shape(value):
        return itself
    if node.op == "cast":
        return _sum_of(edit, first)
    if len(node.inputs) == 2 and edit.constant(node.inputs[1]) is None:
        second = node.inputs[1]
        if node.op != "add" or edit.shape(second) != edit.shape(value):
            return itself
        a, b = _sum_of(edit, first), _sum_of(edit, second)
        return _Sum((*a.terms, *b.terms), a.constant + b.constant)
    known = _of_columns(edit, node)
    if known is None:
        return itself
    found = _sum_of(edit, first)
    if node.op == "mul":
        return found.times(known)
    return _Sum(found.terms, found.constant + known)


def _of_columns(edit: Editor, node: Node) -> Tensor | None:
    """The second operand of `node`, a number or one of each column."""
    if "other" in node.attrs:
        return torch.tensor([float(node.attrs["other"])], dtype=torch.float64)
    known = edit.constant(node.inputs[1])
    columns = node.outputs[0].sizes[-1]
    if known is None or known.numel() not in (1, columns) or known.shape[-1:] != (known.numel(),):
        return None
    return known.cpu().double().reshape(-1)


def _replace(edit: Editor, match: _Match) -> str:
    node, made = match.node, match.sum
    total = ""
    for value, factor in made.terms:
        if edit.dtype(value) != torch.float32:
            value = edit.add("cast", value, dtype=torch.float32)
        if not bool((factor == 1).all()):
            value = edit.add("mul", value, _constant(edit, f"{node.name}_factor", factor))
        if not total and bool(made.constant.any()):
            value = edit.add("add", value, _constant(edit, f"{node.name}_shift", made.constant))
        total = edit.add("add", total, value) if total else value
    if match.has_relu:
        total = edit.add("relu", total)
    one = edit.add_constant(f"{node.name}_one", torch.ones(1))
    return edit.add(node.op, total, one, node.inputs[2])


def _constant(edit: Editor, name: str, values: Tensor) -> str:
    same = bool((values == values[0]).all())
    return edit.add_constant(name, (values[:1] if same else values).float())


_RULES = (
    Rule("quantize_affine(relu(x * u + c), f, z) -> quantize_affine(relu(x * uf + cf), 1, z)",
         ("quantize_affine",), _match, _replace),
)  # fmt: skip


def fold_factors(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, _RULES, log)
