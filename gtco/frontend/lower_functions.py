"""ATen's less usual functions of numbers to gtco's ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Scalar, Value, registrar
from gtco.frontend.lower_math import truncated, unary

aten = torch.ops.aten

FUNCTIONS: dict[OpOverload, Lowering] = {}
_lowers = registrar(FUNCTIONS)

MOST_FACTORS = 8
"""Of a product along a dimension that is written out."""


for _op in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "log2",
            "log10", "exp2", "erfc"):  # fmt: skip
    _lowers(getattr(aten, _op).default)(unary(_op))
_lowers(aten._neg_view.default)(unary("neg"))


@_lowers(aten.isinf.default)
def _isinf(ctx: Context, x: Value) -> Value | None:
    if not ctx.dtype(x).is_floating_point:
        return None
    return ctx.add("eq", ctx.add("abs", x), other=math.inf)


def _of_floats(op: str) -> Lowering:
    """Of two operands, one of which may be a number."""

    def lowering(ctx: Context, a: Value, b: Value | Scalar) -> Value | None:
        if any(not ctx.dtype(x).is_floating_point for x in (a, b) if isinstance(x, Value)):
            return None
        return ctx.add(op, a, b) if isinstance(b, Value) else ctx.add(op, a, other=b)

    return lowering


_lowers(aten.atan2.default)(_of_floats("atan2"))
_lowers(aten.hypot.default)(_of_floats("hypot"))
_lowers(aten.copysign.Tensor, aten.copysign.Scalar)(_of_floats("copysign"))


def _of_numbers(op: str) -> Callable[[Context, Value, Value | Scalar], Value | None]:
    """Likewise, and of integers where the divisor is a number, which is not 0."""
    of_floats = _of_floats(op)

    def lowering(ctx: Context, a: Value, b: Value | Scalar) -> Value | None:
        if isinstance(b, int) and b and isinstance(a, Value) and ctx.dtype(a) in _INTEGERS:
            return ctx.add(op, a, other=b)
        return of_floats(ctx, a, b) if isinstance(a, Value) else None  # type: ignore[return-value]

    return lowering


_INTEGERS = (torch.int64, torch.int32)
_floor_divide = _of_numbers("floor_divide")
_lowers(aten.fmod.Tensor, aten.fmod.Scalar)(_of_numbers("fmod"))
_lowers(aten.remainder.Tensor, aten.remainder.Scalar)(_of_numbers("remainder"))
_lowers(aten.floor_divide.default, aten.floor_divide.Scalar)(_floor_divide)


@_lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div(
    ctx: Context, a: Value, b: Value | Scalar, *, rounding_mode: str | None = None
) -> Value | None:
    if rounding_mode == "floor":
        return _floor_divide(ctx, a, b)
    if any(not ctx.dtype(x).is_floating_point for x in (a, b) if isinstance(x, Value)):
        return None
    # Rounded once, as torch does it: a quotient just below a whole number stays below it.
    wide = _wide(ctx, a)
    whole = (
        ctx.add("div", wide, _wide(ctx, b))
        if isinstance(b, Value)
        else ctx.add("div", wide, other=b)
    )
    if rounding_mode == "trunc":
        whole = truncated(ctx, whole)  # type: ignore[assignment]
    result = torch.promote_types(ctx.dtype(a), ctx.dtype(b)) if isinstance(b, Value) else None
    return ctx.cast(whole, result or ctx.dtype(a))


def _wide(ctx: Context, x: Value) -> Value:
    return ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))


def _ignoring_nan(op: str) -> Lowering:
    def lowering(ctx: Context, a: Value, b: Value) -> Value | None:
        if not ctx.dtype(a).is_floating_point or ctx.dtype(a) != ctx.dtype(b):
            return None
        both = ctx.add("where", ctx.add("ne", b, b), a, ctx.add(op, a, b))
        return ctx.add("where", ctx.add("ne", a, a), b, both)

    return lowering


_lowers(aten.fmax.default)(_ignoring_nan("maximum"))
_lowers(aten.fmin.default)(_ignoring_nan("minimum"))


@_lowers(aten.bitwise_xor.Tensor, aten.logical_xor.default)
def _xor(ctx: Context, a: Value, b: Value) -> Value | None:
    if any(ctx.dtype(x) != torch.bool for x in (a, b)):
        return None
    return ctx.add("ne", a, b)


@_lowers(aten.prod.dim_int)
def _prod(
    ctx: Context, x: Value, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value | None:
    """In at least f32, as torch does it: one factor after another, or the last partial product."""
    result = dtype or ctx.dtype(x)
    if not ctx.rank(x) or not ctx.spec(x).numel or not result.is_floating_point:
        return None
    dim %= ctx.rank(x)
    size = ctx.shape(x)[dim]
    wide = ctx.cast(x, torch.promote_types(result, torch.float32))
    if size <= MOST_FACTORS:
        factors = [ctx.slice(wide, dim, at, at + 1) for at in range(size)]
        product = reduce(lambda a, b: ctx.add("mul", a, b), factors)
    else:
        product = ctx.slice(ctx.add("cumprod", wide, dim=dim), dim, size - 1, size)
    shape = list(ctx.shape(product))
    if not keepdim:
        del shape[dim]
    return ctx.cast(ctx.reshape(product, shape), result)
