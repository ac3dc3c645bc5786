"""Layer norm and GELU spelled out become one node; norms by the root mean square are found.

%m = mean(%x, dims=[2], keepdim=True)
%d = sub(%x, %m)
%q = mean(square(%d), dims=[2], ...)        ->    %y = layer_norm(%x, %g, %b, eps=1e-06)
%r = rsqrt(add(%q, other=1e-06))
%y = add(mul(mul(%d, %r), %g), %b)

Flax scales the root first, (x - mean) * (rsqrt * g) + b, and Keras moves the mean behind it,
x * (rsqrt * g) + (b - mean * (rsqrt * g)).

%e = erf(mul(%x, other=0.7071))
%y = mul(mul(%x, other=0.5), add(%e, other=1))    ->    %y = gelu(%x)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.passes import views
from gtco.passes.rewrite import Editor, Log, Rule, rewrite
from gtco.passes.views import scaled_by

# -- layer norm ----------------------------------------------------------------------------------


def _with_number(edit: Editor, value: str, op: str) -> tuple[str, float] | None:
    """(x, c) if `value` is `op(x, other=c)`."""
    node = edit.producer(value, op)
    if node is None or len(node.inputs) != 1:
        return None
    return node.inputs[0], float(node.attrs["other"])


def _row_mean(edit: Editor, value: str) -> str | None:
    """x if `value` is the mean of x's rows, kept as a column."""
    node = edit.producer(value, "mean")
    if node is None or not node.attrs["keepdim"]:
        return None
    last = edit.specs[node.inputs[0]].rank - 1
    return node.inputs[0] if tuple(node.attrs["dims"]) in ((last,), (-1,)) else None


def _squared(edit: Editor, value: str) -> str | None:
    node = edit.producer(value, "square", "mul")  # a power of 2 is a square by now
    if node is None:
        return None
    product = node.op == "mul" and len(node.inputs) == 2 and len(set(node.inputs)) == 1
    return node.inputs[0] if node.op == "square" or product else None


def _deviation_scale(edit: Editor, node: Node) -> tuple[str, str] | None:
    """(x - mean, sqrt or rsqrt argument) of `d / sqrt(v)` or `d * rsqrt(v)`."""
    if len(node.inputs) != 2:
        return None
    wanted = "sqrt" if node.op == "div" else "rsqrt"
    for d, r in ((0, 1), (1, 0)) if node.op == "mul" else ((0, 1),):
        root = edit.producer(node.inputs[r], wanted)
        if root is not None:
            return node.inputs[d], root.inputs[0]
    return None


def _layer_norm(edit: Editor, node: Node) -> tuple[str, float] | None:
    """(x, eps). A cast may end it, back to the type of x: exporters square in a wider one."""
    ended = edit.producer(node.inputs[0], "mul", "div") if node.op == "cast" else node
    pair = ended and _deviation_scale(edit, ended)
    variance = pair and _with_number(edit, pair[1], "add")
    if not pair or not variance:
        return None
    value = pair[0]
    if ended is not node:
        widened = edit.producer(value, "cast")
        if widened is None or edit.dtype(widened.inputs[0]) != node.outputs[0].dtype:
            return None
        (value,) = widened.inputs
        if not views.loses_nothing(edit.dtype(value), edit.dtype(pair[0])):
            return None
    deviation = edit.producer(value, "sub")
    if deviation is None or len(deviation.inputs) != 2:
        return None
    x, mean = deviation.inputs
    if _row_mean(edit, mean) != x or not _is_variance(edit, variance[0], pair[0], x, mean):
        return None
    return x, variance[1]


def _is_variance(edit: Editor, value: str, deviation: str, x: str, mean: str) -> bool:
    """Whether `value` is the mean of squares of `deviation`, or that of squares of x less that of
    `mean`, not below zero perhaps, as Flax computes it."""
    if (squares := _row_mean(edit, value)) is not None:
        return _squared(edit, squares) == deviation
    clamped = _with_number(edit, value, "maximum")
    if clamped is not None and clamped[1] == 0:
        return _is_variance(edit, clamped[0], deviation, x, mean)
    less = edit.producer(value, "sub")
    if less is None or len(less.inputs) != 2:
        return False
    squares = _row_mean(edit, less.inputs[0])
    of_x = squares is not None and _squared(edit, squares) == x
    return of_x and _squared(edit, less.inputs[1]) == mean


def _scaled_root(edit: Editor, node: Node) -> tuple[str, str, str] | None:
    """(x - mean, rsqrt, g) of `(x - mean) * (rsqrt * g)`."""
    for d, r in ((0, 1), (1, 0)) if len(node.inputs) == 2 else ():
        scaled = edit.producer(node.inputs[r], "mul")
        if scaled is None or edit.producer(node.inputs[d], "sub") is None:
            continue
        for root, g in (scaled.inputs, scaled.inputs[::-1]) if len(scaled.inputs) == 2 else ():
            if edit.producer(root, "rsqrt") is not None and g in edit.constants:
                return node.inputs[d], root, g
    return None


@dataclass(frozen=True)
class _Moved:
    """`x * scale + (shift - mean * scale)`."""

    x: str
    mean: str
    scale: str
    shift: str


def _shifted_by_mean(edit: Editor, node: Node) -> _Moved | None:
    for a, b in ((0, 1), (1, 0)) if len(node.inputs) == 2 else ():
        scaled, less = edit.producer(node.inputs[a], "mul"), edit.producer(node.inputs[b], "sub")
        if scaled is None or less is None or len(scaled.inputs) != 2 or len(less.inputs) != 2:
            continue
        moved = edit.producer(less.inputs[1], "mul")
        if moved is None or len(moved.inputs) != 2:
            continue
        for x, scale in (scaled.inputs, scaled.inputs[::-1]):
            means = [name for name in moved.inputs if name != scale]
            if scale in moved.inputs and len(means) == 1 and _row_mean(edit, means[0]) == x:
                return _Moved(x, means[0], scale, less.inputs[0])
    return None


def _of_deviations(edit: Editor, match: _Moved) -> str:
    pair = (match.x, match.mean)
    squared = (
        node.name for node in edit.users(match.mean) if (node.op, node.inputs) == ("sub", pair)
    )
    deviation = next(squared, None) or edit.add("sub", *pair)
    return edit.add("add", edit.add("mul", deviation, match.scale), match.shift)


@dataclass(frozen=True)
class RootMeanSquare:
    """`x * rsqrt(mean(x * x) + eps) * scale` of rows, computed in fp32; scale is 1 or a row."""

    x: str
    eps: float
    scale: torch.Tensor | None


def root_mean_square(edit: Editor, node: Node) -> RootMeanSquare | None:
    """The norm that ends in `node`, in the type of its x, however it is rounded on the way."""
    value, dtype, scale = node.name, node.outputs[0].dtype, None
    while (step := edit.producer(value, "cast", "mul", "div")) is not None:
        if step.op == "cast":
            value = step.inputs[0]
            rounded = step.outputs[0].dtype
            if rounded != dtype and not views.loses_nothing(edit.dtype(value), rounded):
                return None
        elif pair := _deviation_scale(edit, step):
            found = _mean_of_squares(edit, *pair, dtype)
            return found and RootMeanSquare(*found, scale)
        elif (scaled := _scaled_by_row(edit, step)) is not None:
            value, row = scaled
            scale = row if scale is None else row * scale
        else:
            return None
    return None


def _mean_of_squares(
    edit: Editor, x: str, root: str, dtype: torch.dtype
) -> tuple[str, float] | None:
    """(x as stored, eps) if `root` is mean(x * x) + eps of rows, in fp32 at least."""
    mean = _with_number(edit, root, "add")
    square = mean and _row_mean(edit, mean[0])
    if not mean or not square or _squared(edit, square) != x:
        return None
    if not views.loses_nothing(torch.float32, edit.dtype(x)):
        return None
    stored = edit.producer(x, "cast")
    if stored is None or edit.dtype(stored.inputs[0]) != dtype:
        return None
    return stored.inputs[0], mean[1]


def _scaled_by_row(edit: Editor, node: Node) -> tuple[str, torch.Tensor] | None:
    """(x, c) if `node` is `x * c` with a constant c for each column."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    columns = node.outputs[0].sizes[-1:]
    for x, c in (node.inputs, node.inputs[::-1]):
        row = edit.constant(c)
        if row is not None and (row.numel(),) == columns == tuple(row.shape[-1:]):
            return x, row.reshape(-1).double()
    return None


def _one_layer_norm(edit: Editor, match: tuple[str, float]) -> str:
    return edit.add("layer_norm", match[0], eps=match[1])


def _affine_of_norm(edit: Editor, node: Node) -> tuple[Node, Node, str] | None:
    """(the mul or add, the layer norm, its new parameter)."""
    for n, p in ((0, 1), (1, 0)) if len(node.inputs) == 2 else ():
        norm = edit.producer(node.inputs[n], "layer_norm")
        parameter = node.inputs[p]
        if norm is None or parameter not in edit.constants:
            continue
        columns = edit.shape(norm.inputs[0])[-1]
        same_type = edit.dtype(parameter) == norm.outputs[0].dtype
        rows = math.prod(edit.shape(parameter)) == columns == edit.shape(parameter)[-1]
        wanted = 1 if node.op == "mul" else 2  # the inputs a norm has before it gets this one
        if rows and same_type and len(norm.inputs) == wanted and edit.read_once(norm.name):
            return node, norm, parameter
    return None


def _norm_with_affine(edit: Editor, match: tuple[Node, Node, str]) -> str:
    node, norm, parameter = match
    columns = edit.shape(parameter)[-1:]
    if edit.specs[parameter].rank != 1:
        parameter = edit.add_constant(parameter, edit.constants[parameter].reshape(columns))
    y = edit.add("layer_norm", *norm.inputs, parameter, **norm.attrs)
    # a parameter of higher rank puts dimensions of one before the norm's
    same = edit.specs[y] == node.outputs[0]
    return y if same else edit.add("reshape", y, shape=node.outputs[0].sizes)


# -- GELU ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """A tree of multiplications: `scale * factors[0] * factors[1] * ...`."""

    scale: float
    factors: tuple[str, ...]


def _product(edit: Editor, node: Node) -> _Product:
    scale, factors, pending = 1.0, [], [*node.inputs]
    if len(node.inputs) == 1:
        scale = float(node.attrs["other"])
    while pending:
        value = pending.pop()
        inner = edit.producer(value, "mul", "div")
        if inner is None or not edit.read_once(value):
            factors.append(value)
        elif (scaled := scaled_by(inner)) is not None:
            scale *= scaled[1]
            pending.append(scaled[0])
        elif inner.op == "mul" and len(inner.inputs) == 2:
            pending += inner.inputs
        else:
            factors.append(value)
    return _Product(scale, tuple(factors))


def _close(a: float, b: float, dtype: torch.dtype) -> bool:
    """Models write constants with 5 digits or more, and store some of them in their own dtype."""
    if not dtype.is_floating_point:
        return False
    return math.isclose(a, b, rel_tol=max(1e-4, torch.finfo(dtype).eps))


def _gelu(edit: Editor, node: Node) -> tuple[str, str] | None:
    """(x, "none" or "tanh") of `0.5 * x * (1 + erf(x / sqrt 2))` in any order of factors."""
    product, dtype = _product(edit, node), node.outputs[0].dtype
    if len(product.factors) != 2 or not _close(product.scale, 0.5, dtype):
        return None
    for x, gate in (product.factors, product.factors[::-1]):
        one = _with_number(edit, gate, "add")
        if one is None or one[1] != 1:
            continue
        if (erf := edit.producer(one[0], "erf")) and _is_scaled(
            edit, erf.inputs[0], x, math.sqrt(0.5)
        ):
            return x, "none"
        if (tanh := edit.producer(one[0], "tanh")) and _is_cubic(edit, tanh.inputs[0], x):
            return x, "tanh"
    return None


def _is_scaled(edit: Editor, value: str, x: str, factor: float) -> bool:
    """Whether `value` is `factor * x`."""
    node = edit.producer(value, "mul", "div")
    scaled = node and scaled_by(node)
    if not scaled:
        return False
    return scaled[0] == x and _close(scaled[1], factor, edit.dtype(x))


def _is_cubic(edit: Editor, value: str, x: str) -> bool:
    """Whether `value` is `sqrt(2 / pi) * (x + 0.044715 * x ** 3)`."""
    outer = _with_number(edit, value, "mul")
    if outer is None or not _close(outer[1], math.sqrt(2 / math.pi), edit.dtype(x)):
        return False
    total = edit.producer(outer[0], "add")
    if total is None or len(total.inputs) != 2:
        return False
    for a, b in (total.inputs, total.inputs[::-1]):
        cubic = edit.producer(b, "mul")
        if a != x or cubic is None:
            continue
        product = _product(edit, cubic)
        power = [_with_number(edit, factor, "pow") for factor in product.factors]
        cube = product.factors == (x, x, x) or power == [(x, 3.0)]
        if cube and _close(product.scale, 0.044715, edit.dtype(x)):
            return True
    return False


def _one_gelu(edit: Editor, match: tuple[str, str]) -> str:
    return edit.add("gelu", match[0], approximate=match[1])


RULES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("(x - mean(x)) / sqrt(var(x) + eps) -> layer_norm(x)", ("mul", "div", "cast"),
         _layer_norm, _one_layer_norm),
    Rule("(x - mean) * (rsqrt * g) -> (x - mean) * rsqrt * g", ("mul",), _scaled_root,
         lambda edit, match: edit.add("mul", edit.add("mul", *match[:2]), match[2])),
    Rule("x * s + (b - mean * s) -> (x - mean) * s + b", ("add",),
         _shifted_by_mean, _of_deviations),
    Rule("layer_norm(x) * g -> layer_norm(x, g)", ("mul",), _affine_of_norm, _norm_with_affine),
    Rule("layer_norm(x, g) + b -> layer_norm(x, g, b)", ("add",),
         _affine_of_norm, _norm_with_affine),
    Rule("0.5 * x * (1 + erf(x / sqrt(2))) -> gelu(x)", ("mul",), _gelu, _one_gelu),
)  # fmt: skip


def fuse_normalization(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
