"""Rounding to few bits and back, as torch's quantizers write it, to ordinary ops.

    aten.fake_quantize_per_tensor_affine(x, s, z, -128, 127)
        -> %q: i8 = cast(minimum(maximum(add(round(div(x, s)), z), other=-128), other=127))
           mul(sub(cast(%q, dtype=f32), z), s)

These are the nodes that ONNX's QuantizeLinear and DequantizeLinear become, in which
`passes.quantized_pairs` finds products in 8 bits. All of it is computed in at least f32, as torch
does it. torch multiplies by 1 / s where this divides: halfway between two steps, or within a
rounding error of that, the two may differ by one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Scalar, Value, registrar

aten = torch.ops.aten

FAKE_QUANTIZED: dict[OpOverload, Lowering] = {}
_lowers = registrar(FAKE_QUANTIZED)


def _beside(ctx: Context, x: Value, number: Value | Scalar, axis: int | None) -> Value:
    """A scale or a zero point in f32 and in the rank of `x`; one, or one along `axis`."""
    shape = [1] * ctx.rank(x)
    if not isinstance(number, Value):
        tensor = torch.full(shape, number, dtype=torch.float32, device=ctx.device)
        return ctx.constant("step", tensor)
    if axis is not None:
        shape[axis] = -1
    return ctx.cast(ctx.reshape(number, shape), torch.float32)


def _unless_zero(ctx: Context, zero: Value | Scalar | None) -> Value | Scalar | None:
    """A zero point that is not known to be 0."""
    if not isinstance(zero, Value):
        return zero or None
    known = ctx.builder.constants.get(zero.name)
    return zero if known is None or bool(known.any()) else None


def _rounded(
    ctx: Context,
    x: Value,
    scale: Value | Scalar,
    zero: Value | Scalar | None,
    limits: tuple[int, int],
    axis: int | None,
) -> Value:
    """The integers, still as floats."""
    low, high = limits
    wide = ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))
    steps = ctx.add("round", ctx.add("div", wide, _beside(ctx, x, scale, axis)))
    if zero is not None:
        steps = ctx.add("add", steps, _beside(ctx, x, zero, axis))
    return ctx.add("minimum", ctx.add("maximum", steps, other=low), other=high)


def _restored(
    ctx: Context,
    steps: Value,
    scale: Value | Scalar,
    zero: Value | Scalar | None,
    dtype: torch.dtype,
    axis: int | None,
) -> Value:
    """What the integers stand for."""
    wide = ctx.cast(steps, torch.promote_types(dtype, torch.float32))
    if zero is not None:
        wide = ctx.add("sub", wide, _beside(ctx, steps, zero, axis))
    return ctx.cast(ctx.add("mul", wide, _beside(ctx, steps, scale, axis)), dtype)


def _byte(low: int, high: int) -> torch.dtype | None:
    """The type of 8 bits that holds the integers from `low` to `high`."""
    for dtype in (torch.int8, torch.uint8):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return None


# -- there and back in one operator --------------------------------------------------------------


def _there_and_back(
    ctx: Context,
    x: Value,
    scale: Value | Scalar,
    zero: Value | Scalar,
    limits: tuple[int, int],
    axis: int | None = None,
) -> Value | None:
    offset = _unless_zero(ctx, zero)
    if isinstance(offset, Value) and ctx.dtype(offset).is_floating_point:
        return None  # torch adds such a zero point before it rounds, or cuts its fraction off
    steps = _rounded(ctx, x, scale, offset, limits, axis)
    steps = ctx.cast(steps, _byte(*limits))
    return _restored(ctx, steps, scale, offset, ctx.dtype(x), axis)


@_lowers(
    aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_tensor_affine.tensor_qparams,
)
def _per_tensor(
    ctx: Context,
    x: Value,
    scale: Value | float,
    zero_point: Value | int,
    quant_min: int,
    quant_max: int,
) -> Value | None:
    return _there_and_back(ctx, x, scale, zero_point, (quant_min, quant_max))


@_lowers(aten.fake_quantize_per_channel_affine.default)
def _per_channel(
    ctx: Context,
    x: Value,
    scale: Value,
    zero_point: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Value | None:
    return _there_and_back(ctx, x, scale, zero_point, (quant_min, quant_max), axis % ctx.rank(x))


def _without_mask(ctx: Context, y: object) -> tuple[Value | None, ...] | None:
    """With the second result, what was not cut off, that training alone reads."""
    return (y, None) if isinstance(y, Value) and not ctx.used_outputs - {0} else None


@_lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def _per_tensor_and_mask(
    ctx: Context, *args: Any, **kwargs: Any
) -> tuple[Value | None, ...] | None:
    return _without_mask(ctx, _per_tensor(ctx, *args, **kwargs))


@_lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def _per_tensor_of_tensors_and_mask(
    ctx: Context,
    x: Value,
    scale: Value,
    zero_point: Value,
    fake_quant_enabled: Value,
    quant_min: int,
    quant_max: int,
) -> tuple[Value | None, ...] | None:
    enabled = ctx.builder.constants.get(fake_quant_enabled.name)
    if enabled is None:
        return None
    if not enabled.any():
        return _without_mask(ctx, x)
    return _without_mask(ctx, _per_tensor(ctx, x, scale, zero_point, quant_min, quant_max))


@_lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def _per_channel_and_mask(
    ctx: Context, *args: Any, **kwargs: Any
) -> tuple[Value | None, ...] | None:
    return _without_mask(ctx, _per_channel(ctx, *args, **kwargs))


# -- one operator each way -----------------------------------------------------------------------


def _quantize(
    ctx: Context,
    x: Value,
    scale: Value | float,
    zero_point: Value | int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    axis: int | None = None,
) -> Value | None:
    if dtype.is_floating_point:
        return None
    zero, limits = _unless_zero(ctx, zero_point), (quant_min, quant_max)
    return ctx.cast(_rounded(ctx, x, scale, zero, limits, axis), dtype)


def _quantize_channels(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Value | None:
    axis %= ctx.rank(x)
    return _quantize(ctx, x, scales, zero_points, quant_min, quant_max, dtype, axis)


def _dequantize(
    ctx: Context,
    x: Value,
    scale: Value | float,
    zero_point: Value | int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Value:
    zero = _unless_zero(ctx, zero_point)
    return _restored(ctx, x, scale, zero, out_dtype or torch.float32, None)


def _dequantize_channels(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Value:
    zero = _unless_zero(ctx, zero_points)
    return _restored(ctx, x, scales, zero, out_dtype or torch.float32, axis % ctx.rank(x))


QUANTIZED: Mapping[str, Lowering] = MappingProxyType(
    {
        "quantized_decomposed.quantize_per_tensor.default": _quantize,
        "quantized_decomposed.quantize_per_tensor.tensor": _quantize,
        "quantized_decomposed.quantize_per_channel.default": _quantize_channels,
        "quantized_decomposed.dequantize_per_tensor.default": _dequantize,
        "quantized_decomposed.dequantize_per_tensor.tensor": _dequantize,
        "quantized_decomposed.dequantize_per_channel.default": _dequantize_channels,
    }
)
"""Of operators that exist only once the module of torch's that defines them is imported, which
whoever quantizes a model does."""
