"""ONNX operators that bend or weigh: activations, softmax, dropout.

Softmax(x), opset 11, axis 1   -> x.flatten(1).softmax(1).reshape(x.shape)
Swish(x), alpha=1              -> F.silu(x)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op, plain


def _gelu(call: Call, x: Tensor) -> Tensor:
    kind = call.attr("approximate", "none")
    if kind not in ("none", "tanh"):
        raise call.refuse(f"approximate={kind!r} is not supported")
    return F.gelu(x, approximate=kind)


def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    line: Tensor = x * call.attr("alpha", 0.2) + call.attr("beta", 0.5)
    return line.clamp(0, 1)


def _prelu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    if x.is_floating_point():
        found: Tensor = torch.ops.aten._prelu_kernel(x, slope)  # broadcasts
        return found
    return torch.where(x < 0, x * slope, x)


def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.attr("alpha", 0.01))


def _elu(call: Call, x: Tensor) -> Tensor:
    return F.elu(x, call.attr("alpha", 1.0))


def _celu(call: Call, x: Tensor) -> Tensor:
    return F.celu(x, float(call.attr("alpha", 1.0)))


def _selu(call: Call, x: Tensor) -> Tensor:
    alpha, gamma = call.attr("alpha", 1.6732631921768188), call.attr("gamma", 1.0507010221481323)
    bent: Tensor = F.elu(x, alpha) * gamma
    return bent


def _shrink(call: Call, x: Tensor) -> Tensor:
    bias, threshold = call.attr("bias", 0.0), call.attr("lambd", 0.5)
    if not x.is_floating_point():  # what is compared and added is rounded to x's type
        bias, threshold = int(bias), math.floor(threshold)
    shrunk = torch.where(x > threshold, x - bias, torch.zeros_like(x))
    return torch.where(x < -threshold, x + bias, shrunk)


def _swish(call: Call, x: Tensor) -> Tensor:
    alpha = call.attr("alpha", 1.0)
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


def _swi_glu(call: Call, gate: Tensor, value: Tensor) -> Tensor:
    return _swish(call, gate) * value


def _thresholded_relu(call: Call, x: Tensor) -> Tensor:
    return F.threshold(x, call.attr("alpha", 1.0), 0.0)


def _dropout(
    call: Call, x: Tensor, ratio: Tensor | None = None, training_mode: Tensor | None = None
) -> Any:
    call.ignore("ratio", "seed")
    training = call.has(2) and any(call.constant(2))
    if training and (not call.has(1) or any(call.constant(1))):
        raise call.refuse("training_mode is on", "export the model in eval mode")
    return (x, torch.ones_like(x, dtype=torch.bool)) if call.wants(1) else x


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


def _first_of_largest(x: Tensor, axis: int) -> Tensor:
    largest = x == x.amax(axis, True)
    positions = torch.arange(x.shape[axis], device=x.device)
    positions = positions.reshape([-1 if i == axis else 1 for i in range(x.dim())])
    first = torch.where(largest, positions, x.shape[axis]).amin(axis, True)
    return (positions == first).to(x.dtype)


ACTIVATIONS: Mapping[str, Op] = MappingProxyType(
    {
        "Celu": _celu,
        "Dropout": _dropout,
        "Elu": _elu,
        "Gelu": _gelu,
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": plain(F.hardswish),
        "Hardmax": _softmax(_first_of_largest),
        "LeakyRelu": _leaky_relu,
        "LogSoftmax": _softmax(lambda x, axis: F.log_softmax(x, axis)),
        "Mish": plain(F.mish),
        "PRelu": _prelu,
        "Relu": plain(torch.relu),
        "Selu": _selu,
        "Shrink": _shrink,
        "Sigmoid": plain(torch.sigmoid),
        "Softmax": _softmax(lambda x, axis: F.softmax(x, axis)),
        "Softplus": plain(F.softplus),
        "Softsign": plain(F.softsign),
        "SwiGLU": _swi_glu,
        "Swish": _swish,
        "Tanh": plain(torch.tanh),
        "ThresholdedRelu": _thresholded_relu,
    }
)
