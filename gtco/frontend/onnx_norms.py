"""ONNX operators that normalise.

LayerNormalization(x, scale, bias), axis -1  -> F.layer_norm(x, x.shape[-1:], scale, bias, eps)
RMSNormalization(x, scale), axis -1          -> x * rsqrt(mean(x * x) + eps) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_shapes import DTYPES


def _stash(call: Call) -> torch.dtype:
    """The dtype of what is normalised, and of the statistics where they are results."""
    code = call.attr("stash_type", 1)
    if code not in (1, 11):
        raise call.refuse("stash_type has to be float or double")
    return DTYPES[code]


def _wide(call: Call, x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, _stash(call)))


def _layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis = call.axis(call.attr("axis", -1), x.dim())
    eps = call.attr("epsilon", 1e-5)
    stash = _stash(call)
    shape = x.shape[axis:]
    scale = scale.expand(shape)
    y = F.layer_norm(x, shape, scale, None if bias is None else bias.expand(shape), eps)
    if not (call.wants(1) or call.wants(2)):
        return y
    axes = list(range(axis, x.dim()))
    wide = _wide(call, x)
    mean = wide.mean(axes, True)
    deviation = ((wide - mean).square().mean(axes, True) + eps).rsqrt()
    return y, mean.to(stash), deviation.to(stash)


def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, x.shape[1], scale, bias, call.attr("epsilon", 1e-5))


def _group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = int(call.attr("num_groups"))
    _stash(call)
    return F.group_norm(x, groups, scale, bias, call.attr("epsilon", 1e-5))


def _batch_norm(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor | tuple[Tensor, ...]:
    momentum = call.attr("momentum", 0.9)
    if not call.attr("spatial", 1):
        raise call.refuse("spatial=0, a mean of each pixel, is not supported")
    if call.attr("training_mode", 0) or call.wants(1):
        if not call.of_weights:
            raise call.refuse("training_mode is on", "export the model in eval mode")
        return _standardized(call, x, scale, bias, momentum, mean, variance)
    if not mean.dtype == scale.dtype == x.dtype:  # statistics may be wider than x
        wide = torch.promote_types(mean.dtype, torch.promote_types(scale.dtype, x.dtype))
        tensors = [each.to(wide) for each in (x, scale, bias, mean, variance)]
        return _normalized(call, *tensors).to(x.dtype)
    return _normalized(call, x, scale, bias, mean, variance)


def _normalized(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, call.attr("epsilon", 1e-5))


def _standardized(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, momentum: float, *running: Tensor
) -> tuple[Tensor, ...]:
    """Weights by their own mean and variance, as a weight-standardized convolution has them (Qiao
    et al. 2019), whatever the mode of the model is."""
    wide = x.float()
    axes = [axis for axis in range(x.dim()) if axis != 1]
    variance, mean = torch.var_mean(wide, axes, correction=0)
    own = (mean, variance)
    y = _normalized(call, wide, scale.float(), bias.float(), *own).to(x.dtype)
    kept = [
        (old * momentum + new * (1 - momentum)).to(old.dtype)
        for old, new in zip(running, own, strict=True)
    ]
    return (y, *kept, *own)


def _rms_norm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    axis = call.axis(call.attr("axis", -1), x.dim())
    wide = _wide(call, x)
    power = (wide * wide).mean(list(range(axis, x.dim())), True)
    normal = (wide * torch.rsqrt(power + call.attr("epsilon", 1e-5))).to(x.dtype)
    return normal.to(scale.dtype) * scale


def _lp_norm(call: Call, x: Tensor) -> Tensor:
    axis, p = call.axis(call.attr("axis", -1), x.dim()), call.attr("p", 2)
    if p not in (1, 2):
        raise call.refuse(f"p={p} is not 1 or 2")
    length = x.abs().sum(axis, True) if p == 1 else (x * x).sum(axis, True).sqrt()
    return torch.where(length == 0, 0, x / length)


def _mean_variance_norm(call: Call, x: Tensor) -> Tensor:
    axes = call.axes(call.attr("axes", [0, 2, 3]), x.dim())
    centred = x - x.mean(axes, True)
    return centred / ((centred * centred).mean(axes, True).sqrt() + 1e-9)


def _local_response_norm(call: Call, x: Tensor) -> Tensor:
    size = int(call.attr("size"))
    alpha, beta, bias = call.attr("alpha", 1e-4), call.attr("beta", 0.75), call.attr("bias", 1.0)
    if size % 2 == 0:  # the channel more is behind in ONNX, before in torch
        x = x.flip(1)
    y = F.local_response_norm(x, size, alpha, beta, bias)
    return y if size % 2 else y.flip(1)


NORMS: Mapping[str, Op] = MappingProxyType(
    {
        "BatchNormalization": _batch_norm,
        "GroupNormalization": _group_norm,
        "InstanceNormalization": _instance_norm,
        "LRN": _local_response_norm,
        "LayerNormalization": _layer_norm,
        "LpNormalization": _lp_norm,
        "MeanVarianceNormalization": _mean_variance_norm,
        "RMSNormalization": _rms_norm,
    }
)
