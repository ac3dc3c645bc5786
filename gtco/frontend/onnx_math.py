"""ONNX operators that compute: arithmetic, reductions, scans and matrix products.

ReduceL1(x, axes=[1])     -> x.abs().sum([1], True)
Gemm(a, b, c), transB=1   -> F.linear(a, b, c)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op, plain
from gtco.frontend.onnx_shapes import dtype_of

# -- pointwise -----------------------------------------------------------------------------------


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Op:
    return lambda call, *inputs: reduce(function, inputs)


def _div(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


def _pow(call: Call, base: Tensor, exponent: Tensor) -> Tensor:
    known = call.known(1)
    if known is not None and known.numel() == 1 and base.is_floating_point():
        powered = torch.pow(base, call.constant(1)[0])  # keeps x ** 2 a scalar power
        return powered.reshape([1] * (known.dim() - base.dim()) + list(base.shape))
    return torch.pow(base, exponent).to(base.dtype)


def _mod(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b) if call.attr("fmod", 0) else torch.remainder(a, b)


def _bit_shift(call: Call, x: Tensor, places: Tensor) -> Tensor:
    direction = call.attr("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise call.refuse(f"direction={direction!r} is not LEFT or RIGHT")
    width = 8 * x.element_size()  # torch leaves shifts by it or more open
    if direction == "RIGHT" and x.dtype.is_signed:
        return torch.bitwise_right_shift(x, places.clamp_max(width - 1))
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return torch.where(places < width, shift(x, places.clamp_max(width - 1)), 0)


def _bit_cast(call: Call, x: Tensor) -> Tensor:
    dtype = dtype_of(call, call.attr("to"))
    if dtype.itemsize != x.element_size():
        raise call.refuse(f"{x.dtype} and {dtype} are not of one width")
    return x.view(dtype)


def _mean(call: Call, *inputs: Tensor) -> Tensor:
    return reduce(torch.add, inputs) / len(inputs)


def _clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds: list[Any] = [call.attr("min"), call.attr("max")] if call.opset < 11 else []
    for index, bound in ((1, low), (2, high)) if call.opset >= 11 else ():
        known = call.known(index)
        bounds.append(bound if known is None else call.constant(index)[0])
    for index, bound in enumerate(bounds):
        if isinstance(bound, Tensor):
            x = torch.minimum(x, bound) if index else torch.maximum(x, bound)
        elif bound is not None:
            x = x.clamp_max(bound) if index else x.clamp_min(bound)
    return x


# -- reductions ----------------------------------------------------------------------------------


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Op:
    def run(call: Call, x: Tensor, axes_input: Tensor | None = None) -> Tensor:
        axes = call.ints(1, "axes")
        keep = bool(call.attr("keepdims", 1))
        nothing = bool(call.attr("noop_with_empty_axes", 0))
        if not axes:
            axes = [] if nothing else list(range(x.dim()))
        if not axes:  # over no axis: x itself, as far as the operator is one of a single element
            return function(x[None], [0], False)
        return function(x, call.axes(axes, x.dim()), keep)

    return run


def _extreme(x: Tensor, axes: list[int], keep: bool, sign: int) -> Tensor:
    if x.numel():
        return x.amax(axes, keep) if sign > 0 else x.amin(axes, keep)
    if x.is_floating_point():
        value: Any = -sign * math.inf
    elif x.dtype == torch.bool:
        value = sign < 0
    else:
        value = torch.iinfo(x.dtype).min if sign > 0 else torch.iinfo(x.dtype).max
    return torch.full_like(x.sum(axes, keep), value, dtype=x.dtype)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keep, dtype=x.dtype)


def _average(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(_sum(x, axes, keep), count, rounding_mode="trunc")


def _arg(sign: int) -> Op:
    def run(call: Call, x: Tensor) -> Tensor:
        axis = call.axis(call.attr("axis", 0), x.dim())
        keep = bool(call.attr("keepdims", 1))
        last = call.attr("select_last_index", 0)
        size = x.shape[axis]
        # torch.argmax leaves a tie open; ONNX takes the first (or the last) index
        best = x == _extreme(x, [axis], True, sign)
        positions = torch.arange(size, device=x.device)
        shape = [-1 if i == axis else 1 for i in range(x.dim())]
        where = torch.where(best, positions.reshape(shape), -1 if last else size)
        return where.amax(axis, keep) if last else where.amin(axis, keep)

    return run


def _cumulative(function: Callable[..., Tensor], neutral: int) -> Op:
    def run(call: Call, x: Tensor, axis_input: Tensor) -> Tensor:
        axis = call.axis(int(call.constant(1)[0]), x.dim())
        exclusive, backwards = call.attr("exclusive", 0), call.attr("reverse", 0)
        x = x.flip(axis) if backwards else x
        if exclusive and x.shape[axis]:
            first = torch.full_like(x.narrow(axis, 0, 1), neutral)
            x = torch.cat((first, x.narrow(axis, 0, x.shape[axis] - 1)), axis)
        total = function(x, axis, dtype=x.dtype)
        return total.flip(axis) if backwards else total

    return run


def _topk(call: Call, x: Tensor, k_input: Tensor | None = None) -> tuple[Tensor, Tensor]:
    axis = call.axis(call.attr("axis", -1), x.dim())
    call.ignore("sorted")  # sorted is one of the orders that unsorted allows
    count = int(call.attr("k") if call.opset < 10 else call.constant(1)[0])
    # equal elements come in the order of their index, which torch.topk does not promise
    values, indices = torch.sort(x, dim=axis, descending=bool(call.attr("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


# -- products ------------------------------------------------------------------------------------


def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    a = a.t() if call.attr("transA", 0) else a
    transposed = call.attr("transB", 0)
    weight = b if transposed else b.t()
    if alpha == 1 and beta == 1 and (c is None or c.dim() == 1) and a.is_floating_point():
        vector = None if c is None else c.expand(weight.shape[0])
        return F.linear(a, weight, vector)
    product = a @ weight.t()
    product = product if alpha == 1 else (product * alpha).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else (c * beta).to(c.dtype))


def _einsum(call: Call, *inputs: Tensor) -> Tensor:
    product: Tensor = torch.einsum(call.attr("equation"), *inputs)
    return product


def _is_inf(call: Call, x: Tensor) -> Tensor:
    positive, negative = call.attr("detect_positive", 1), call.attr("detect_negative", 1)
    none = torch.zeros_like(x, dtype=torch.bool)
    return (x == math.inf if positive else none) | (x == -math.inf if negative else none)


MATH: Mapping[str, Op] = MappingProxyType(
    {
        "Abs": plain(torch.abs),
        "Acos": plain(torch.acos),
        "Acosh": plain(torch.acosh),
        "Add": plain(torch.add),
        "And": plain(torch.logical_and),
        "ArgMax": _arg(1),
        "ArgMin": _arg(-1),
        "Asin": plain(torch.asin),
        "Asinh": plain(torch.asinh),
        "Atan": plain(torch.atan),
        "Atanh": plain(torch.atanh),
        "BitCast": _bit_cast,
        "BitShift": _bit_shift,
        "BitwiseAnd": plain(torch.bitwise_and),
        "BitwiseNot": plain(torch.bitwise_not),
        "BitwiseOr": plain(torch.bitwise_or),
        "BitwiseXor": plain(torch.bitwise_xor),
        "Ceil": plain(torch.ceil),
        "Clip": _clip,
        "Cos": plain(torch.cos),
        "Cosh": plain(torch.cosh),
        "CumProd": _cumulative(torch.cumprod, 1),
        "CumSum": _cumulative(torch.cumsum, 0),
        "Det": plain(torch.linalg.det),
        "Div": _div,
        "Einsum": _einsum,
        "Equal": plain(torch.eq),
        "Erf": plain(torch.erf),
        "Exp": plain(torch.exp),
        "Floor": plain(torch.floor),
        "Gemm": _gemm,
        "Greater": plain(torch.gt),
        "GreaterOrEqual": plain(torch.ge),
        "IsInf": _is_inf,
        "IsNaN": plain(lambda x: x != x),  # an op that fuses; torch.isnan is none
        "Less": plain(torch.lt),
        "LessOrEqual": plain(torch.le),
        "Log": plain(torch.log),
        "MatMul": plain(torch.matmul),
        "Max": _variadic(torch.maximum),
        "Mean": _mean,
        "Min": _variadic(torch.minimum),
        "Mod": _mod,
        "Mul": plain(torch.mul),
        "Neg": plain(torch.neg),
        "Not": plain(torch.logical_not),
        "Or": plain(torch.logical_or),
        "Pow": _pow,
        "Reciprocal": plain(torch.reciprocal),
        "ReduceL1": _reduction(lambda x, axes, keep: _sum(x.abs(), axes, keep)),
        "ReduceL2": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep).sqrt().to(x.dtype)),
        "ReduceLogSum": _reduction(lambda x, axes, keep: _sum(x, axes, keep).log().to(x.dtype)),
        "ReduceLogSumExp": _reduction(torch.logsumexp),
        "ReduceMax": _reduction(lambda x, axes, keep: _extreme(x, axes, keep, 1)),
        "ReduceMean": _reduction(_average),
        "ReduceMin": _reduction(lambda x, axes, keep: _extreme(x, axes, keep, -1)),
        "ReduceProd": _reduction(_prod),
        "ReduceSum": _reduction(_sum),
        "ReduceSumSquare": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep)),
        "Round": plain(torch.round),
        "Sign": plain(torch.sign),
        "Sin": plain(torch.sin),
        "Sinh": plain(torch.sinh),
        "Sqrt": plain(torch.sqrt),
        "Sub": plain(torch.sub),
        "Sum": _variadic(torch.add),
        "Tan": plain(torch.tan),
        "TopK": _topk,
        "Xor": plain(torch.logical_xor),
    }
)
