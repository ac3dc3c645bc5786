"""Products whose operands the model itself rounds to 8 bits, fp8 (e4m3) or integers, are multiplied
so.

    %q: f8_e4m3 = cast(clamp(div(%x, %s)))      %q: f8_e4m3 = quantize(%x, 1 / %s)
    %d: f16 = cast(mul(cast(%q), %s))     ->    %a: f32 = linear(%q, %w8, out_dtype=f32)
    %e: f16 = cast(mul(cast(%w8), %t))          %b = mul(%a, %s * %t)
    %y: f16 = matmul(%d, %e)                    %y = cast(%b, dtype=f16)

    %q: i8 = cast(clamp(round(div(%x, %s)) + %z))    %q: i8 = quantize_int8(%x, %s, %z)
    %d = mul(sub(cast(%q), %z), %s)            ->    %a: f32 = conv2d(%q, %w8)
    %e = mul(cast(%w8), %t)                          %b = mul(%a, %s * %t)
    %y = conv2d(%d, %e)                              %y = add(%b, -%z * %s * %t * sum(%w8))

These are ONNX's QuantizeLinear and DequantizeLinear around both operands: one scale for the
activations, and for the weights one, or one of each column of the result. Unsigned integers become
signed ones, 128 less. A border of zeros, around an image whose zero is another number, has a share
of the last sum, which differs there. Other forms (scales along the dimension that is summed, sizes
that tensor cores do not take) stay as they are and compute what they say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.references import convolution
from gtco.ir.spec import HALVES
from gtco.passes.quantize import aligned
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.scales import FP8, LARGEST

LIMITS: Mapping[torch.dtype, tuple[float, float]] = {
    FP8: (-LARGEST, LARGEST),
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
}
"""What is rounded, by type, is cut at; integers may be cut nearer to 0."""
_DIVISORS = (2.0**-60, 2.0**60)
"""That `quantize_int8` divides by."""
COPIED = 4
"""Bytes that a copy into shared memory takes at least."""
LARGEST_SHIFT = 1 << 22
"""Results of an image of which each may have a shift of its own."""
_UNSIGNED = 128
"""By how much an unsigned integer exceeds the signed one that stands for it."""


@dataclass(frozen=True)
class _Quotient:
    """What is rounded to 8 bits.

    Args:
        value: which is divided.
        divisor: by what.
        offset: what is added to the integer.
        limits: where that is cut, below and above.
    """

    value: str
    divisor: float
    offset: float
    limits: tuple[float, float]


@dataclass(frozen=True)
class _Rounding:
    """How an operand was rounded to 8 bits.

    Args:
        node: what gives it in 8 bits.
        quotient: what that rounds; None where a product can read `node` itself.
        scale: what takes it back.
        zero: what is taken off the integer ahead of that.
        views: on the way from there to the product.
    """

    node: Node
    quotient: _Quotient | None
    scale: float
    zero: float
    views: tuple[Node, ...]

    @property
    def is_fp8(self) -> bool:
        return self.node.outputs[0].dtype == FP8

    @property
    def kind(self) -> str:
        return "fp8" if self.is_fp8 else "int8"

    @property
    def unsigned(self) -> int:
        return _UNSIGNED if self.node.outputs[0].dtype == torch.uint8 else 0


@dataclass(frozen=True)
class Match:
    """A product of two operands that were rounded to 8 bits.

    Args:
        node: the product.
        left: how the left one was rounded.
        weights: the right one in 8 bits, [columns, K], or the windows of a convolution.
        scales: what takes each element of it back.
    """

    node: Node
    left: _Rounding
    weights: Tensor
    scales: Tensor

    @property
    def zero(self) -> float:
        """Of the integers that are multiplied."""
        return self.left.zero - self.left.unsigned


def multiply_pairs(graph: Graph, log: Log | None = None, *, fp8: bool = True) -> Graph:
    """Multiply in 8 bits what `graph`, as captured, rounds to 8 bits and back; `fp8` says whether
    of fp8 too."""
    if not any(spec.dtype in LIMITS for spec in graph.specs.values()):
        return graph

    def match(edit: Editor, node: Node) -> Match | None:
        found = _match(edit, node)
        return None if found and found.left.is_fp8 and not fp8 else found

    graph = rewrite(graph, ROUNDING, log)
    return rewrite(graph, (replace(RULE, match=match),), log)


def _match(edit: Editor, node: Node) -> Match | None:
    x, w = node.inputs[:2]
    windows = node.definition.of_images
    if len(edit.shape(x)) < 2 or (not windows and len(edit.shape(w)) != 2):
        return None
    if edit.dtype(x).itemsize == 1 or (left := _left(edit, x)) is None:
        return None
    if (right := _right(edit, w, FP8 if left.is_fp8 else torch.int8)) is None:
        return None
    if node.op == "matmul":
        right = right[0].t(), right[1].t()
    return Match(node, left, *right)


def _check(edit: Editor, match: Match) -> str | None:
    columns, k, *_ = match.weights.shape
    by_column = match.scales.flatten(1)
    if not torch.equal(by_column, by_column[:, :1].expand_as(by_column)):
        return "the scales of the weights differ along the dimension that is summed"
    kind, groups = match.left.kind, match.node.attrs.get("groups", 1)
    whole = aligned(k, columns) if match.left.is_fp8 else not k % COPIED
    if columns % groups or not whole:
        return f"tensor cores take no {kind} operands of {columns // groups} rows of {k}"
    if match.node.definition.of_images and match.left.is_fp8:
        return "no convolution multiplies fp8"
    pixels = math.prod(match.node.outputs[0].sizes[1:])
    if match.zero and any(match.node.attrs.get("padding", ())) and pixels > LARGEST_SHIFT:
        return (
            f"a shift of {pixels} results, which differ at a border of another zero, is too large"
        )
    return None


def _replace(edit: Editor, match: Match) -> str:
    node, left = match.node, match.left
    value = _quantized(edit, left)
    edit.root(node)
    value = edit.add_views(value, left.views)
    weights = edit.add_constant(f"{node.name}_{left.kind}", match.weights.contiguous())
    if node.definition.of_images:
        y = edit.add(node.op, value, weights, **node.attrs)
    else:
        y = edit.add("linear", value, weights, out_dtype=torch.float32)
    columns = (len(match.weights), *(1,) * (match.weights.dim() - 2))
    scales = match.scales.flatten(1)[:, 0].double().reshape(columns) * left.scale
    y = edit.add("mul", y, edit.add_constant(f"{node.name}_unscale", scales.float()))
    shift = -match.zero * scales * _sums(edit, match) if match.zero else None
    if len(node.inputs) > 2:
        bias = _known(edit, node.inputs[2])
        if bias is not None:
            own = bias.double().reshape(columns)
            shift = own if shift is None else shift + own
        else:
            wide = edit.add("cast", node.inputs[2], dtype=torch.float32)
            y = edit.add("add", y, edit.add("reshape", wide, shape=columns))
    if shift is not None:
        y = edit.add("add", y, edit.add_constant(f"{node.name}_shift", shift.float()))
    dtype = node.outputs[0].dtype
    return y if edit.dtype(y) == dtype else edit.add("cast", y, dtype=dtype)


def _sums(edit: Editor, match: Match) -> Tensor:
    """Of the weights that a result is made with, in f64: [columns, 1, ...], or [columns, H, W]
    where those differ, since a border has none of the image's pixels."""
    weights, attrs = match.weights.double(), match.node.attrs
    if not any(attrs.get("padding", ())):
        return weights.flatten(1).sum(1).reshape(-1, *(1,) * (weights.dim() - 2))
    inside = weights.new_ones(1, 1, *edit.shape(match.node.inputs[0])[2:])
    stride, padding, dilation = (attrs[name] for name in ("stride", "padding", "dilation"))
    return convolution(
        inside, weights.sum(1, keepdim=True), stride=stride, padding=padding, dilation=dilation,
        groups=1,
    )[0]  # fmt: skip


def _quantized(edit: Editor, left: _Rounding) -> str:
    """What rounds as `left` does for products: to fp8 by a reciprocal, of unsigned integers the
    signed ones; others go on to read its node."""
    if (quotient := left.quotient) is None:
        return left.node.name
    if left.is_fp8:
        return _once(edit, "quantize", left.node, quotient.value, (1 / quotient.divisor,))
    return _integers(edit, left.node, quotient, left.unsigned)


def _integers(edit: Editor, cast: Node, of: _Quotient, less: int = 0) -> str:
    low, high = (int(limit) - less for limit in of.limits)
    numbers = (of.divisor, of.offset - less)
    return _once(edit, "quantize_int8", cast, of.value, numbers, low=low, high=high)


def _once(edit: Editor, op: str, cast: Node, x: str, numbers: Sequence[float], **attrs: int) -> str:
    """What `op` makes of `x`; one that is there already, as of several layers that read it."""
    factors = [torch.tensor([float(number)]) for number in numbers]
    for reader in edit.users(x):
        if reader.op == op and reader.attrs == attrs:
            known = [float(edit.constants[name]) for name in reader.inputs[1:]]
            if known == [float(each) for each in factors]:
                return reader.name
    edit.root(cast)
    names = [f"{cast.name}_{name}" for name in ("scale", "zero")]
    return edit.add(op, x, *map(edit.add_constant, names, factors), **attrs)


def _left(edit: Editor, value: str) -> _Rounding | None:
    """How what `value` is taken from was rounded to 8 bits."""
    views: list[Node] = []
    while (node := edit.producer(value, "reshape", "permute", "cast")) is not None:
        if node.op != "cast":
            views.append(node)
        elif 1 in (edit.dtype(value).itemsize, edit.dtype(node.inputs[0]).itemsize):
            return None
        value = node.inputs[0]
    if (product := edit.producer(value, "mul")) is None:
        return None
    scale, widened = _divisor(edit, product), edit.producer(product.inputs[0])
    zero: float | None = 0.0
    if widened is not None and widened.op == "sub":
        zero, widened = _number(edit, widened), edit.producer(widened.inputs[0])
    if scale is None or zero is None or widened is None or widened.op != "cast":
        return None
    rounded = edit.producer(widened.inputs[0], "cast", "quantize_int8")
    if rounded is None or rounded.outputs[0].dtype not in LIMITS:
        return None
    if edit.shape(rounded.name) != edit.shape(product.name):
        return None
    quotient = None
    if rounded.op == "cast" and (quotient := _quotient(edit, rounded)) is None:
        return None
    return _Rounding(rounded, quotient, scale, zero, tuple(reversed(views)))


def _quotient(edit: Editor, cast: Node) -> _Quotient | None:
    """Of what `cast` rounds the saturated quotient to 8 bits."""
    dtype, value = cast.outputs[0].dtype, cast.inputs[0]
    limits: list[float] = []
    for op in ("minimum", "maximum"):
        node = edit.producer(value, op)
        if node is None or "other" not in node.attrs:
            return None
        limits.insert(0, float(node.attrs["other"]))
        value = node.inputs[0]
    (low, high), offset = LIMITS[dtype], 0.0
    if dtype == FP8:
        possible = limits == [low, high]
    else:
        possible = low <= limits[0] < limits[1] <= high and all(x.is_integer() for x in limits)
    if not possible:
        return None
    if dtype != FP8:
        if (total := edit.producer(value, "add")) is not None:
            value, number = total.inputs[0], _number(edit, total)
            if number is None or not low <= number <= high or not number.is_integer():
                return None
            offset = number
        while (node := edit.producer(value, "cast")) is not None:
            value = node.inputs[0]
        if (node := edit.producer(value, "round")) is None:
            return None
        value = node.inputs[0]
    quotient = edit.producer(value, "div")
    divisor = None if quotient is None else _divisor(edit, quotient)
    if quotient is None or divisor is None:
        return None
    x = quotient.inputs[0]
    if (wide := edit.producer(x, "cast")) and edit.dtype(x) == torch.float32:
        x = wide.inputs[0] if edit.dtype(wide.inputs[0]) in HALVES else x
    if edit.shape(x) != edit.shape(cast.name):
        return None
    return _Quotient(x, divisor, offset, (limits[0], limits[1]))


def _number(edit: Editor, node: Node) -> float | None:
    """The second operand of `node`, if it is a number or a constant of one element."""
    if len(node.inputs) < 2:
        return float(node.attrs["other"])
    found = _known(edit, node.inputs[1])
    return None if found is None or found.numel() != 1 else float(found)


def _divisor(edit: Editor, node: Node) -> float | None:
    """The same, if one can divide by it."""
    number = _number(edit, node)
    least, most = _DIVISORS
    return number if number is not None and least < number < most else None


def _right(edit: Editor, value: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The constant `value` in 8 bits and the scale of each element, in its shape."""
    path: list[Node] = []
    while (node := edit.producer(value, "reshape", "permute", "cast")) is not None:
        path.append(node)
        value = node.inputs[0]
    if (product := edit.producer(value, "mul")) is None:
        return None
    whole, *scales = (_known(edit, name) for name in product.inputs)
    scale = scales[0] if scales else torch.tensor(float(product.attrs["other"]))
    if whole is None or scale is None:
        return None
    low, high = LIMITS[dtype]
    rounded = whole.float().clamp(low, high).to(dtype)
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


_FOLDED = ("reshape", "permute", "cast", "div", "round", "sub", "add", "minimum", "maximum", "mul")
"""Of which the rounding of weights consists."""


def _rounds(edit: Editor, cast: Node) -> tuple[Node, _Quotient] | None:
    """A cast that quantises to int8, of what is not known now."""
    if cast.outputs[0].dtype != torch.int8 or (found := _quotient(edit, cast)) is None:
        return None
    return None if found.value in edit.constants else (cast, found)


ROUNDING = (
    Rule("cast(clamp(round(x / s) + z)) -> quantize_int8(x, s, z)", ("cast",),
         _rounds, lambda edit, match: _integers(edit, *match)),
)  # fmt: skip
RULE = Rule(
    "linear(dequantize(quantize(x)), dequantize(w)) -> linear(quantize(x), w) * scales",
    ("linear", "matmul", "conv2d"),
    _match,
    _replace,
    _check,
)
