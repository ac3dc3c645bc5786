"""ONNX's operators on quantized tensors. Of QuantizeLinear and DequantizeLinear around products
`gtco.passes.quantized_pairs` makes products in 8 bits; the others are right, not fast.

DequantizeLinear(x, scale, zero)  -> (x.float() - zero.float()) * scale
MatMulInteger(a, b)               -> (a.double() @ b.double()).int()
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op, concrete
from gtco.frontend.onnx_shapes import FP8, dtype_of, to_fp8
from gtco.frontend.onnx_windows import convolve

EXACT = torch.float64
"""Where products of 8-bit integers are summed: exact up to 2**53, and every device has it."""


def _along(call: Call, value: Tensor, x: Tensor) -> Tensor:
    """A scale or a zero point of one element, of one along `axis`, or of one a block of it."""
    axis, block = call.attr("axis", 1), call.attr("block_size", 0)
    if value.numel() == 1:
        return value.reshape([1] * x.dim())
    axis = call.axis(axis, x.dim())
    if block:
        return value.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    if value.dim() != 1 or value.shape[0] != x.shape[axis]:
        raise call.refuse(f"a scale of {list(value.shape)} does not fit axis {axis} of its input")
    return value.reshape([-1 if i == axis else 1 for i in range(x.dim())])


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return x.clamp(limits.min, limits.max).to(dtype)


def _unless_zero(call: Call, zero: Tensor | None) -> Tensor | None:
    """A zero point that is not known to be 0."""
    if (known := call.known(2)) is None:
        return zero
    with concrete():
        return zero if known.float().any() else None


def _quantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    call.ignore("axis", "block_size")
    saturate = bool(call.attr("saturate", 1))  # speaks of 8-bit floats
    code, precision = call.attr("output_dtype", 0), call.attr("precision", 0)
    dtype = zero.dtype if zero is not None else dtype_of(call, code) if code else torch.uint8
    if dtype.is_floating_point and dtype != FP8:
        raise call.refuse(f"quantizing to {dtype} is not supported, integers and float8e4m3fn are")
    scale = _along(call, scale, x)
    if precision:
        x, scale = x.to(dtype_of(call, precision)), scale.to(dtype_of(call, precision))
    zero = _unless_zero(call, zero)
    if dtype == FP8:
        steps = x / scale
        return to_fp8(steps if zero is None else steps + _along(call, zero, x).float(), saturate)
    steps = torch.round(x / scale).float()
    return _saturated(steps if zero is None else steps + _along(call, zero, x).float(), dtype)


def _dequantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    code = call.attr("output_dtype", 0)
    call.ignore("axis", "block_size")
    dtype = dtype_of(call, code) if code else scale.dtype
    zero = _unless_zero(call, zero)
    steps = x.float() if zero is None else x.float() - _along(call, zero, x).float()
    return (steps * _along(call, scale, x)).to(dtype)


def _dynamic_quantize(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    high, low = x.amax().clamp_min(0), x.amin().clamp_max(0)
    scale = torch.where(high == low, 1, high - low) / 255
    zero = torch.round((-low / scale).clamp(0, 255))
    return (
        (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8),
        scale,
        zero.to(torch.uint8),
    )


def _centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """x less its zero point, which may be one along `axis`."""
    wide = x.to(EXACT)
    if zero is None:
        return wide
    if zero.dim() == 1 and zero.numel() > 1:
        zero = zero.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return wide - (zero if zero.numel() > 1 else zero.reshape(())).to(EXACT)


def _mat_mul_integer(
    call: Call,
    a: Tensor,
    b: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
) -> Tensor:
    return (_centred(a, a_zero, -2) @ _centred(b, b_zero, -1)).to(torch.int32)


def _conv_integer(
    call: Call,
    x: Tensor,
    weight: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
) -> Tensor:
    centred = _centred(x, x_zero, 1), _centred(weight, w_zero, 0)
    return convolve(call, *centred, None).to(torch.int32)


def _requantized(total: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return _saturated(torch.round(total * scale) + zero.to(EXACT), zero.dtype)


def _q_linear_mat_mul(
    call: Call,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    if any(each.numel() > 1 for each in (a_scale, y_scale, y_zero)):
        raise call.refuse("scales of a's rows are not supported, those of b's columns are")
    total = _centred(a, a_zero, -2) @ _centred(b, b_zero, -1)
    scale = a_scale.to(EXACT).reshape(()) * b_scale.to(EXACT) / y_scale.to(EXACT).reshape(())
    scale = scale if scale.numel() > 1 else scale.reshape(())
    return _requantized(total, scale, y_zero.reshape(()))


def _q_linear_conv(
    call: Call,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    whole = _centred(x, x_zero, 1), _centred(weight, w_zero, 0)
    total = convolve(call, *whole, None if bias is None else bias.to(EXACT))
    scale = x_scale.to(EXACT).reshape(()) * w_scale.to(EXACT) / y_scale.to(EXACT).reshape(())
    if scale.numel() > 1:  # one an output channel
        scale = scale.reshape([-1] + [1] * (total.dim() - 2))
    else:
        scale = scale.reshape(())
    return _requantized(total, scale, y_zero.reshape(()))


QUANTIZED: Mapping[str, Op] = MappingProxyType(
    {
        "ConvInteger": _conv_integer,
        "DequantizeLinear": _dequantize,
        "DynamicQuantizeLinear": _dynamic_quantize,
        "MatMulInteger": _mat_mul_integer,
        "QLinearConv": _q_linear_conv,
        "QLinearMatMul": _q_linear_mat_mul,
        "QuantizeLinear": _quantize,
    }
)
