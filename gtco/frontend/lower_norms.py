"""ATen's norms to gtco's ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Value, registrar

aten = torch.ops.aten

NORMS: dict[OpOverload, Lowering] = {}
_lowers = registrar(NORMS)


@_lowers(aten.layer_norm.default)
def _layer_norm(
    ctx: Context,
    x: Value,
    normalized: Sequence[int],
    w: Value | None = None,
    b: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value | None:
    if w is None and b is not None:
        return None
    shape, columns = ctx.shape(x), math.prod(normalized)
    rows = shape[: len(shape) - len(normalized)]
    flat = ctx.reshape(x, (*rows, columns))
    affine = (None if p is None else ctx.reshape(p, (columns,)) for p in (w, b))
    return ctx.reshape(ctx.add("layer_norm", flat, *affine, eps=eps), shape)


@_lowers(aten.native_layer_norm.default)
def _native_layer_norm(
    ctx: Context,
    x: Value,
    normalized: Sequence[int],
    w: Value | None,
    b: Value | None,
    eps: float,
) -> tuple[Value | None, ...] | None:
    if ctx.used_outputs - {0}:
        return None
    y = _layer_norm(ctx, x, normalized, w, b, eps)
    return None if y is None else (y, None, None)  # type: ignore[return-value]


@_lowers(aten.rms_norm.default)
def _rms_norm(
    ctx: Context,
    x: Value,
    normalized: Sequence[int],
    w: Value | None = None,
    eps: float | None = None,
) -> Value:
    """In the operators that torch takes it apart into on a CPU; on a GPU it has one that it leaves
    whole."""
    dtype = ctx.dtype(x)
    wide = ctx.cast(x, torch.promote_types(dtype, torch.float32))
    eps = torch.finfo(ctx.dtype(wide)).eps if eps is None else eps
    dims = tuple(ctx.rank(x) - 1 - at for at in range(len(normalized)))
    squares = ctx.add("mean", ctx.add("square", wide), dims=dims, keepdim=True)
    y = ctx.add("mul", wide, ctx.add("rsqrt", ctx.add("add", squares, other=eps)))
    return ctx.cast(y if w is None else ctx.add("mul", y, w), dtype)


@_lowers(aten._fused_rms_norm.default)
def _fused_rms_norm(
    ctx: Context, x: Value, normalized: Sequence[int], w: Value | None, eps: float | None
) -> tuple[Value | None, ...] | None:
    if ctx.used_outputs - {0}:
        return None
    return _rms_norm(ctx, x, normalized, w, eps), None  # type: ignore[return-value]


@_lowers(aten.group_norm.default)
def _group_norm(
    ctx: Context,
    x: Value,
    groups: int,
    w: Value | None = None,
    b: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value | None:
    """Of an image [N, C, H, W] or a volume with its channels last, of other shapes by the memory's
    order."""
    if groups == 0 or (w is None and b is not None):
        return None
    shape, rank = ctx.shape(x), ctx.rank(x)
    if rank in (4, 5):
        y = ctx.permute(x, (0, *range(2, rank), 1))
        y = ctx.add("group_norm", y, w, b, groups=groups, eps=eps)
        return ctx.permute(y, (0, rank - 1, *range(1, rank - 1)))
    y = ctx.reshape(x, (shape[0], groups, math.prod(shape[1:]) // groups))
    y = ctx.reshape(ctx.add("layer_norm", y, eps=eps), shape)
    for op, p in (("mul", w), ("add", b)):
        if p is not None:
            y = ctx.add(op, y, ctx.reshape(p, (shape[1], *(1 for _ in shape[2:]))))
    return y


@_lowers(aten.native_group_norm.default)
def _native_group_norm(
    ctx: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    images: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Value | None, ...] | None:
    if ctx.used_outputs - {0}:
        return None
    y = _group_norm(ctx, x, groups, w, b, eps)
    return None if y is None else (y, None, None)  # type: ignore[return-value]


@_lowers(aten.instance_norm.default)
def _instance_norm(
    ctx: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value | None:
    if not use_input_stats:
        return (
            None
            if mean is None or var is None
            else ctx.add("batch_norm", x, mean, var, w, b, eps=eps)
        )
    if mean is not None or var is not None:
        return None
    return _group_norm(ctx, x, ctx.shape(x)[1], w, b, eps)  # type: ignore[return-value]


@_lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(
    ctx: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...] | None:
    if ctx.used_outputs - {0} or (w is None and b is not None):
        return None
    return (ctx.add("batch_norm", x, mean, var, w, b, eps=eps), None, None)


@_lowers(aten._native_batch_norm_legit.no_stats)
def _batch_norm_of_itself(
    ctx: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...] | None:
    """By the statistics of x itself, which nobody keeps: standardised weights, for example."""
    if ctx.used_outputs - {0} or ctx.rank(x) < 2 or not training:
        return None
    axes, channels = (0, *range(2, ctx.rank(x))), (-1, *(1 for _ in range(ctx.rank(x) - 2)))
    wide = ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))
    delta = ctx.add("sub", wide, ctx.add("mean", wide, dims=axes, keepdim=True))
    var = ctx.add("mean", ctx.add("square", delta), dims=axes, keepdim=True)
    y = ctx.add("mul", delta, ctx.add("rsqrt", ctx.add("add", var, other=eps)))
    for op, each in (("mul", w), ("add", b)):
        y = y if each is None else ctx.add(op, y, ctx.reshape(each, channels))
    return ctx.cast(y, ctx.dtype(x)), None, None
