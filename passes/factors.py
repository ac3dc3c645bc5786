"""What a linear reads becomes one product of a tensor and factors of its channels.

    %t = mul(%weight, mul(%x, %n))            %f = add(mul(%weight, %n), 1)
    %u = add(add(%t, %shift), %x)         ->  %y = linear(mul(%x, %f), %w, %b + %w %shift)
    %y = linear(%u, %w, %b)

The factors are one row for an image, so what is left is small, and `scaled` says which kernel has
the product. Constant shifts go into the bias. Global response normalization (ConvNeXt V2, CVPR
2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.scaled import groups_of

Term = str | tuple[str, "Term | None", "Term | None"]
"""A value with one row for each image, or (op, a, b) of such; None is 1 in a factor."""
OF_CONSTANTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


@dataclass(frozen=True)
class _Affine:
    """x * factor + shift, channel by channel.

    Args:
        value: x.
        factor: None: 1.
        shift: None: 0.
        steps: how many nodes compute it.
    """

    value: str
    factor: Term | None = None
    shift: Term | None = None
    steps: int = 0


@dataclass(frozen=True)
class _Match:
    linear: Node
    operand: _Affine


def _match(edit: Editor, node: Node) -> _Match | None:
    operand = node.inputs[0]
    if edit.dtype(operand) not in FLOATS or not edit.read_once(operand):
        return None
    found = _affine(edit, operand, edit.shape(operand))
    if found.factor is None or (found.shift is None and found.steps == 1):
        return None
    return _Match(node, found)


def _affine(edit: Editor, value: str, shape: tuple[int, ...]) -> _Affine:
    node = edit.producer(value, *OF_CONSTANTS)
    alone = _Affine(value)
    if node is None or len(node.inputs) != 2 or not edit.read_once(value):
        return alone
    if any(edit.dtype(each) != edit.dtype(value) for each in node.inputs):
        return alone
    a, b = node.inputs
    if node.op in ("add", "mul") and _is_row(edit, a, shape):
        a, b = b, a
    if edit.shape(a) != shape:
        return alone
    left = _affine(edit, a, shape)
    steps = left.steps + 1
    if _is_row(edit, b, shape):
        if node.op in ("add", "sub"):
            return _Affine(left.value, left.factor, _moved(node.op, left.shift, b), steps)
        shift: Term | None = None if left.shift is None else (node.op, left.shift, b)
        plain = left.factor is None and node.op == "mul"
        return _Affine(left.value, b if plain else (node.op, left.factor, b), shift, steps)
    if node.op in ("mul", "div") or edit.shape(b) != shape:
        return alone
    right = _affine(edit, b, shape)
    if left.value != right.value:
        return alone
    if _cancels(edit, node.op, left.factor, right.factor):
        return alone
    shift = left.shift if right.shift is None else _moved(node.op, left.shift, right.shift)
    factor = (node.op, left.factor, right.factor)
    return _Affine(left.value, factor, shift, steps + right.steps)


def _cancels(edit: Editor, op: str, *factors: Term | None) -> bool:
    """Whether infinite elements times known factors, added or subtracted, are NaN somewhere: one
    product by the sum of the factors would be infinite."""
    if not {leaf for factor in factors for leaf in _leaves(factor)} <= edit.constants.keys():
        return False
    one = torch.ones(1, dtype=torch.float64)
    a, b = (one if factor is None else _value(edit, factor) for factor in factors)
    return bool((a * (b if op == "add" else -b) <= 0).any())


def _moved(op: str, shift: Term | None, by: Term) -> Term:
    """The sum or difference of two shifts, the first of which may be 0."""
    if shift is not None:
        return op, shift, by
    return by if op == "add" else ("neg", by, None)


def _is_row(edit: Editor, value: str, shape: tuple[int, ...]) -> bool:
    """Whether one row of channels is shared by several rows of `shape`."""
    sizes = edit.shape(value)
    return sizes != shape and groups_of(sizes, shape) is not None


def _leaves(term: Term | None) -> Iterator[str]:
    if isinstance(term, str):
        yield term
    elif term is not None:
        yield from _leaves(term[1])
        yield from _leaves(term[2])


def _check(edit: Editor, match: _Match) -> str | None:
    linear, operand = match.linear, match.operand
    known = edit.constants.keys()
    if operand.shift is None:
        return None
    if not set(_leaves(operand.shift)) <= known:
        return f"what is added to %{operand.value} is not constant"
    if not set(linear.inputs[1:]) <= known:
        return f"%{linear.name} has weights that are not constant"
    channels = edit.shape(linear.inputs[0])[-1]
    if any(edit.specs[name].numel != channels for name in _leaves(operand.shift)):
        return f"what is added to %{operand.value} differs from image to image"
    return None


def _replace(edit: Editor, match: _Match) -> str:
    linear, operand = match.linear, match.operand
    factor = _built(edit, operand.factor, edit.dtype(operand.value))
    inputs = [edit.add("mul", operand.value, factor), *linear.inputs[1:]]
    if operand.shift is not None:
        weight = edit.constants[inputs[1]]
        moved = weight.double() @ _value(edit, operand.shift).reshape(-1)
        if len(inputs) > 2:
            moved = moved + edit.constants[inputs[2]].double()
        inputs[2:] = [edit.add_constant("bias", moved.to(weight.dtype))]
    return edit.add("linear", *inputs, **linear.attrs)


def _built(edit: Editor, term: Term | None, dtype: torch.dtype) -> str:
    if term is None:
        return edit.add_constant("one", torch.ones((), dtype=dtype))
    if isinstance(term, str):
        return term
    op, a, b = term
    return edit.add(op, _built(edit, a, dtype), _built(edit, b, dtype))


def _value(edit: Editor, term: Term) -> torch.Tensor:
    if isinstance(term, str):
        return edit.constants[term].double().reshape(-1)
    op, a, b = term
    assert a is not None
    if op == "neg":
        return -_value(edit, a)
    assert b is not None
    return OF_CONSTANTS[op](_value(edit, a), _value(edit, b))


RULES: tuple[Rule[Any], ...] = (
    Rule("linear(x * f + s, w, b) -> linear(x * f, w, b + w s)", ("linear",),
         _match, _replace, _check),
)  # fmt: skip


def join_factors(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
