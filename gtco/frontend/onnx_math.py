"""ONNX operators that compute: pointwise, reductions, norms and matrix products.

Softmax(x), opset 11, axis 1   -> x.flatten(1).softmax(1).reshape(x.shape)
Gemm(a, b, c), transB=1        -> F.linear(a, b, c)
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

from gtco.frontend.onnx_call import Call, Op

# -- pointwise -----------------------------------------------------------------------------------


def _plain(function: Callable[..., Tensor]) -> Op:
    """An operator without attributes that is one torch function."""
    return lambda call, *inputs: function(*inputs)


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


def _mean(call: Call, *inputs: Tensor) -> Tensor:
    return reduce(torch.add, inputs) / len(inputs)


def _clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds: list[Any] = []
    for index, bound in ((1, low), (2, high)):
        known = call.known(index)
        bounds.append(bound if known is None else call.constant(index)[0])
    for index, bound in enumerate(bounds):
        if isinstance(bound, Tensor):
            x = torch.minimum(x, bound) if index else torch.maximum(x, bound)
        elif bound is not None:
            x = x.clamp_max(bound) if index else x.clamp_min(bound)
    return x


def _gelu(call: Call, x: Tensor) -> Tensor:
    kind = call.attr("approximate", "none")
    if kind not in ("none", "tanh"):
        raise call.refuse(f"approximate={kind!r} is not supported")
    return F.gelu(x, approximate=kind)


def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    line: Tensor = x * call.attr("alpha", 0.2) + call.attr("beta", 0.5)
    return line.clamp(0, 1)


def _prelu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _dropout(
    call: Call, x: Tensor, ratio: Tensor | None = None, training_mode: Tensor | None = None
) -> Any:
    call.ignore("ratio", "seed")
    training = call.has(2) and any(call.constant(2))
    if training and (not call.has(1) or any(call.constant(1))):
        raise call.refuse("training_mode is on; export the model in eval mode")
    return (x, torch.ones_like(x, dtype=torch.bool)) if call.wants(1) else x


# -- softmax, reductions -------------------------------------------------------------------------


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Op:
    def run(call: Call, x: Tensor) -> Tensor:
        if call.opset >= 13:
            return function(x, call.axis(call.attr("axis", -1), x.dim()))
        axis = call.attr("axis", 1)
        axis = axis + x.dim() if axis < 0 else axis
        if axis == x.dim() - 1:
            return function(x, axis)
        rows = math.prod(x.shape[:axis])
        return function(x.reshape(rows, -1), 1).reshape(x.shape)

    return run


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


def _cumsum(call: Call, x: Tensor, axis_input: Tensor) -> Tensor:
    axis = call.axis(int(call.constant(1)[0]), x.dim())
    exclusive, backwards = call.attr("exclusive", 0), call.attr("reverse", 0)
    x = x.flip(axis) if backwards else x
    if exclusive:
        first = torch.zeros_like(x.narrow(axis, 0, 1))
        x = torch.cat((first, x.narrow(axis, 0, x.shape[axis] - 1)), axis)
    total = x.cumsum(axis, dtype=x.dtype)
    return total.flip(axis) if backwards else total


def _topk(call: Call, x: Tensor, k_input: Tensor) -> tuple[Tensor, Tensor]:
    axis = call.axis(call.attr("axis", -1), x.dim())
    call.ignore("sorted")  # sorted is one of the orders that unsorted allows
    count = int(call.constant(1)[0])
    # equal elements come in the order of their index, which torch.topk does not promise
    values, indices = torch.sort(x, dim=axis, descending=bool(call.attr("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


# -- normalisation -------------------------------------------------------------------------------


def _layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis = call.axis(call.attr("axis", -1), x.dim())
    eps = call.attr("epsilon", 1e-5)
    if call.attr("stash_type", 1) not in (1, 11):
        raise call.refuse("stash_type has to be float or double")
    shape = x.shape[axis:]
    scale = scale.expand(shape)
    y = F.layer_norm(x, shape, scale, None if bias is None else bias.expand(shape), eps)
    if not (call.wants(1) or call.wants(2)):
        return y
    axes = list(range(axis, x.dim()))
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(axes, True)
    return y, mean, ((wide - mean).square().mean(axes, True) + eps).rsqrt()


def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, x.shape[1], scale, bias, call.attr("epsilon", 1e-5))


def _group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = int(call.attr("num_groups"))
    if call.attr("stash_type", 1) not in (1, 11):
        raise call.refuse("stash_type has to be float or double")
    return F.group_norm(x, groups, scale, bias, call.attr("epsilon", 1e-5))


def _batch_norm(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    call.ignore("momentum")
    if call.attr("training_mode", 0) or call.wants(1):
        raise call.refuse("training_mode is on; export the model in eval mode")
    if not mean.dtype == scale.dtype == x.dtype:  # statistics may be wider than x
        wide = torch.promote_types(mean.dtype, torch.promote_types(scale.dtype, x.dtype))
        tensors = tuple(each.to(wide) for each in (x, scale, bias, mean, variance))
        return _batch_norm(call, *tensors).to(x.dtype)
    eps = call.attr("epsilon", 1e-5)
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, eps)


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


def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.attr("alpha", 0.01))


def _elu(call: Call, x: Tensor) -> Tensor:
    return F.elu(x, call.attr("alpha", 1.0))


def _is_inf(call: Call, x: Tensor) -> Tensor:
    positive, negative = call.attr("detect_positive", 1), call.attr("detect_negative", 1)
    none = torch.zeros_like(x, dtype=torch.bool)
    return (x == math.inf if positive else none) | (x == -math.inf if negative else none)


MATH: Mapping[str, Op] = MappingProxyType(
    {
        "Abs": _plain(torch.abs),
        "Add": _plain(torch.add),
        "And": _plain(torch.logical_and),
        "ArgMax": _arg(1),
        "ArgMin": _arg(-1),
        "BatchNormalization": _batch_norm,
        "Ceil": _plain(torch.ceil),
        "Clip": _clip,
        "Cos": _plain(torch.cos),
        "CumSum": _cumsum,
        "Div": _div,
        "Dropout": _dropout,
        "Einsum": _einsum,
        "Elu": _elu,
        "Equal": _plain(torch.eq),
        "Erf": _plain(torch.erf),
        "Exp": _plain(torch.exp),
        "Floor": _plain(torch.floor),
        "Gelu": _gelu,
        "Gemm": _gemm,
        "Greater": _plain(torch.gt),
        "GreaterOrEqual": _plain(torch.ge),
        "GroupNormalization": _group_norm,
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": _plain(F.hardswish),
        "InstanceNormalization": _instance_norm,
        "IsInf": _is_inf,
        "IsNaN": _plain(lambda x: x != x),  # an op that fuses; torch.isnan is none
        "LayerNormalization": _layer_norm,
        "LeakyRelu": _leaky_relu,
        "Less": _plain(torch.lt),
        "LessOrEqual": _plain(torch.le),
        "Log": _plain(torch.log),
        "LogSoftmax": _softmax(lambda x, axis: F.log_softmax(x, axis)),
        "MatMul": _plain(torch.matmul),
        "Max": _variadic(torch.maximum),
        "Mean": _mean,
        "Min": _variadic(torch.minimum),
        "Mish": _plain(F.mish),
        "Mod": _mod,
        "Mul": _plain(torch.mul),
        "Neg": _plain(torch.neg),
        "Not": _plain(torch.logical_not),
        "Or": _plain(torch.logical_or),
        "PRelu": _prelu,
        "Pow": _pow,
        "Reciprocal": _plain(torch.reciprocal),
        "ReduceL1": _reduction(lambda x, axes, keep: _sum(x.abs(), axes, keep)),
        "ReduceL2": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep).sqrt().to(x.dtype)),
        "ReduceLogSumExp": _reduction(torch.logsumexp),
        "ReduceMax": _reduction(lambda x, axes, keep: _extreme(x, axes, keep, 1)),
        "ReduceMean": _reduction(_average),
        "ReduceMin": _reduction(lambda x, axes, keep: _extreme(x, axes, keep, -1)),
        "ReduceProd": _reduction(_prod),
        "ReduceSum": _reduction(_sum),
        "ReduceSumSquare": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep)),
        "Relu": _plain(torch.relu),
        "Round": _plain(torch.round),
        "Sigmoid": _plain(torch.sigmoid),
        "Sign": _plain(torch.sign),
        "Sin": _plain(torch.sin),
        "Softmax": _softmax(lambda x, axis: F.softmax(x, axis)),
        "Softplus": _plain(F.softplus),
        "Sqrt": _plain(torch.sqrt),
        "Sub": _plain(torch.sub),
        "Sum": _variadic(torch.add),
        "Tanh": _plain(torch.tanh),
        "TopK": _topk,
        "Xor": _plain(torch.logical_xor),
    }
)
