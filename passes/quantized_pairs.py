"""Products whose operands the model itself rounds to fp8 (e4m3) are multiplied in fp8.

    %q: f8_e4m3 = cast(clamp(div(%x, %s)))      %q: f8_e4m3 = quantize(%x, 1 / %s)
    %d: f16 = cast(mul(cast(%q), %s))     ->    %a: f32 = linear(%q, %w8, out_dtype=f32)
    %e: f16 = cast(mul(cast(%w8), %t))          %b = mul(%a, %s * %t)
    %y: f16 = matmul(%d, %e)                    %y = cast(%b, dtype=f16)

These are ONNX's QuantizeLinear and DequantizeLinear around both operands: one scale for the
activations, and for the weights one, or one of each column of the result. Other forms (scales along
the dimension that is summed, zero points, sizes that tensor cores do not take) stay as they are and
compute what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.passes.quantize import FP8, LARGEST, aligned
from gtco.passes.rewrite import Editor, Log, Rule, rewrite


@dataclass(frozen=True)
class Match:
    """A product of two operands that were rounded to fp8.

    Args:
        node: the product.
        rounded: the cast that gives the left one in fp8.
        scale: what takes that back.
        views: on the way from there to the product.
        weights: the right one in fp8, [columns, K].
        scales: what takes each element of it back.
    """

    node: Node
    rounded: Node
    scale: float
    views: tuple[Node, ...]
    weights: Tensor
    scales: Tensor


def multiply_pairs(graph: Graph, log: Log | None = None) -> Graph:
    """Multiply in fp8 what `graph`, as captured, rounds to fp8 and back."""
    return rewrite(graph, RULES, log)


def _match(edit: Editor, node: Node) -> Match | None:
    x, w = node.inputs[:2]
    if len(edit.shape(x)) < 2 or len(edit.shape(w)) != 2 or edit.dtype(x) == FP8:
        return None
    if (left := _left(edit, x)) is None or (right := _right(edit, w)) is None:
        return None
    if node.op == "matmul":
        right = right[0].t(), right[1].t()
    return Match(node, *left, *right)


def _check(edit: Editor, match: Match) -> str | None:
    columns, k = match.weights.shape
    if not torch.equal(match.scales, match.scales[:, :1].expand_as(match.scales)):
        return "the scales of the weights differ along the dimension that is summed"
    if not aligned(k, columns):
        return f"tensor cores take no fp8 operands of {columns} rows of {k}"
    return None


def _replace(edit: Editor, match: Match) -> str:
    node = match.node
    value = _quantized(edit, match.rounded)
    edit.root(node)
    for view in match.views:
        value = edit.add(view.op, value, **view.attrs)
    weights = edit.add_constant(f"{node.name}_fp8", match.weights.contiguous())
    unscale = (match.scales[:, 0].double() * match.scale).float()
    y = edit.add("linear", value, weights, out_dtype=torch.float32)
    y = edit.add("mul", y, edit.add_constant(f"{node.name}_unscale", unscale))
    if len(node.inputs) > 2:
        y = edit.add("add", y, edit.add("cast", node.inputs[2], dtype=torch.float32))
    dtype = node.outputs[0].dtype
    return y if edit.dtype(y) == dtype else edit.add("cast", y, dtype=dtype)


def _quantized(edit: Editor, cast: Node) -> str:
    """What rounds as `cast` does for products, by a reciprocal; others go on to read `cast`, which
    divides as the model says."""
    x, divisor = _quotient(edit, cast) or ("", 1.0)
    factor = torch.tensor([1 / divisor])
    for reader in edit.users(x):
        known = edit.constant(reader.inputs[-1]) if reader.op == "quantize" else None
        if known is not None and torch.equal(known.cpu(), factor):
            return reader.name
    edit.root(cast)
    return edit.add("quantize", x, edit.add_constant(f"{cast.name}_scale", factor))


def _left(edit: Editor, value: str) -> tuple[Node, float, tuple[Node, ...]] | None:
    """The node whose fp8 `value` is taken from, by which scale, and the views behind that."""
    views: list[Node] = []
    while (node := edit.producer(value, "reshape", "permute", "cast")) is not None:
        if node.op != "cast":
            views.append(node)
        elif FP8 in (edit.dtype(value), edit.dtype(node.inputs[0])):
            return None
        value = node.inputs[0]
    if (product := edit.producer(value, "mul")) is None or len(product.inputs) != 2:
        return None
    scale, widened = _scalar(edit, product.inputs[1]), edit.producer(product.inputs[0], "cast")
    if scale is None or widened is None or edit.dtype(widened.inputs[0]) != FP8:
        return None
    rounded = edit.producer(widened.inputs[0], "cast")
    if rounded is None or _quotient(edit, rounded) is None:
        return None
    if edit.shape(rounded.name) != edit.shape(product.name):
        return None
    return rounded, scale, tuple(reversed(views))


def _quotient(edit: Editor, cast: Node) -> tuple[str, float] | None:
    """Of what, and by which divisor, `cast` rounds the saturated quotient to fp8."""
    value = cast.inputs[0]
    for op, limit in (("minimum", LARGEST), ("maximum", -LARGEST)):
        node = edit.producer(value, op)
        if node is None or node.attrs.get("other") != limit:
            return None
        value = node.inputs[0]
    quotient = edit.producer(value, "div")
    if quotient is None or len(quotient.inputs) != 2:
        return None
    x, divisor = quotient.inputs[0], _scalar(edit, quotient.inputs[1])
    if divisor is None or edit.shape(x) != edit.shape(quotient.name):
        return None
    return x, divisor


def _scalar(edit: Editor, value: str) -> float | None:
    """The constant `value` of one element, if one can divide by it."""
    found = _known(edit, value)
    if found is None or found.numel() != 1:
        return None
    number = float(found)
    return number if 0 < number < float("inf") and 0 < 1 / number < float("inf") else None


def _right(edit: Editor, value: str) -> tuple[Tensor, Tensor] | None:
    """The constant `value` as fp8 and the scale of each element, in its shape."""
    path: list[Node] = []
    while (node := edit.producer(value, "reshape", "permute", "cast")) is not None:
        path.append(node)
        value = node.inputs[0]
    if (product := edit.producer(value, "mul")) is None or len(product.inputs) != 2:
        return None
    whole, scale = (_known(edit, name) for name in product.inputs)
    if whole is None or scale is None:
        return None
    rounded = whole.float().to(FP8)
    if not torch.equal(rounded.float(), whole.float()):
        return None
    scale = scale.float().expand(edit.shape(product.name))
    for view in reversed(path):
        if view.op != "cast":
            rounded, scale = (_applied(view, [each]) for each in (rounded, scale))
    return rounded, scale


def _known(edit: Editor, value: str) -> Tensor | None:
    """What `value` is, if it is made of constants alone."""
    if (constant := edit.constant(value)) is not None:
        return constant
    node = edit.producer(value)
    if node is None or node.op not in _FOLDED:
        return None
    values = [_known(edit, name) for name in node.inputs]
    known = [each for each in values if each is not None]
    return _applied(node, known) if len(known) == len(values) else None


def _applied(node: Node, values: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        result: Tensor = node.definition.reference(*values, **node.attrs)
    return result


_FOLDED = ("reshape", "permute", "cast", "div", "sub", "add", "minimum", "maximum", "mul")
"""Of which the rounding of weights consists."""

RULES: tuple[Rule[Match], ...] = (
    Rule(
        "linear(dequantize(quantize(x)), dequantize(w)) -> linear(quantize(x), w) * scales",
        ("linear", "matmul"),
        _match,
        _replace,
        _check,
    ),
)
