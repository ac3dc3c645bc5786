"""ATen ops that compute to gtco's ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Scalar, Value, all_dims, registrar

aten = torch.ops.aten

MATH: dict[OpOverload, Lowering] = {}
_lowers = registrar(MATH)


# -- pointwise -----------------------------------------------------------------------------------


def unary(op: str) -> Lowering:
    def lowering(ctx: Context, x: Value) -> Value | None:
        # An integer argument is promoted by most of these; the op's reference does the same.
        return ctx.add(op, x)

    return lowering


for _op in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "sin", "cos", "tanh",
            "sigmoid", "relu", "silu", "square", "round", "floor", "ceil", "log1p",
            "expm1"):  # fmt: skip
    _lowers(getattr(aten, _op).default)(unary(_op))


@_lowers(aten.gelu.default)
def _gelu(ctx: Context, x: Value, approximate: str = "none") -> Value:
    return ctx.add("gelu", x, approximate=approximate)


def _apply(ctx: Context, op: str, a: Value | Scalar, b: Value | Scalar) -> Value | None:
    if isinstance(a, Value) and isinstance(b, Value):
        return ctx.add(op, a, b)
    if isinstance(a, Value):
        return ctx.add(op, a, other=b)
    if isinstance(b, Value) and op in ("add", "mul", "maximum", "minimum", "eq", "ne"):
        return ctx.add(op, b, other=a)
    return None


def _binary(op: str) -> Lowering:
    def lowering(ctx: Context, a: Value | Scalar, b: Value | Scalar) -> Value | None:
        return _apply(ctx, op, a, b)

    return lowering


for _op, _overloads in {
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar),
    "pow": (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar),
    "maximum": (aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor),
    "minimum": (aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor),
    "eq": (aten.eq.Tensor, aten.eq.Scalar),
    "ne": (aten.ne.Tensor, aten.ne.Scalar),
    "lt": (aten.lt.Tensor, aten.lt.Scalar),
    "le": (aten.le.Tensor, aten.le.Scalar),
    "gt": (aten.gt.Tensor, aten.gt.Scalar),
    "ge": (aten.ge.Tensor, aten.ge.Scalar),
}.items():
    _lowers(*_overloads)(_binary(_op))


@_lowers(aten.pow.Scalar)
def _power_of(ctx: Context, base: Scalar, x: Value) -> Value | None:
    """Of a number, which torch rounds to the type of the power."""
    dtype = ctx.dtype(x)
    if not dtype.is_floating_point:
        return None
    number = torch.full((), base, dtype=dtype, device=ctx.device)
    return ctx.add("pow", ctx.constant("base", number), x)


def _scaled(ctx: Context, b: Value | Scalar, alpha: Scalar, a: Value | Scalar) -> Value | Scalar:
    """`alpha * b` as an operand beside `a`: in the type of their sum, as torch does it."""
    if alpha == 1:
        return b
    if not isinstance(b, Value):
        return b * alpha
    other = ctx.spec(a).meta() if isinstance(a, Value) else a
    wide = ctx.cast(b, torch.result_type(ctx.spec(b).meta(), other))
    return ctx.add("mul", wide, other=alpha)


@_lowers(aten.add.Tensor, aten.add.Scalar)
def _add(ctx: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value | None:
    return _apply(ctx, "add", a, _scaled(ctx, b, alpha, a))


@_lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(ctx: Context, a: Value | Scalar, b: Value | Scalar, alpha: Scalar = 1) -> Value | None:
    if not isinstance(a, Value):
        return _rsub(ctx, b, a, alpha)  # type: ignore[return-value]
    return _apply(ctx, "sub", a, _scaled(ctx, b, alpha, a))


@_lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(ctx: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value | None:
    scaled = _scaled(ctx, a, alpha, b)
    if isinstance(b, Value) or not isinstance(scaled, Value):
        return _apply(ctx, "sub", b, scaled)
    # In the type of the difference: of bytes, the negative would wrap around.
    wide = ctx.cast(scaled, torch.result_type(ctx.spec(scaled).meta(), b))
    return ctx.add("add", ctx.add("neg", wide), other=b)


@_lowers(aten.clamp.default, aten.hardtanh.default)
def _clamp(
    ctx: Context, x: Value, low: Scalar | None = None, high: Scalar | None = None
) -> Value | None:
    if ctx.dtype(x) == torch.bool:
        return None  # the bounds' type decides, and torch has no clamp_min of booleans
    if low is not None:
        x = ctx.add("maximum", x, other=low)
    return x if high is None else ctx.add("minimum", x, other=high)


@_lowers(aten.clamp.Tensor)
def _clamp_between(
    ctx: Context, x: Value, low: Value | None = None, high: Value | None = None
) -> Value | None:
    """Where the bounds cross, the upper one counts, as in torch."""
    if ctx.dtype(x) == torch.bool:
        return None  # as above
    above = x if low is None else _apply(ctx, "maximum", x, low)
    return above if high is None or above is None else _apply(ctx, "minimum", above, high)


@_lowers(aten.where.self)
def _where(ctx: Context, condition: Value, a: Value, b: Value) -> Value:
    return ctx.add("where", condition, a, b)


@_lowers(aten.leaky_relu.default)
def _leaky_relu(ctx: Context, x: Value, slope: float = 0.01) -> Value:
    return ctx.add("prelu", x, other=slope)


@_lowers(aten._prelu_kernel.default)
def _prelu(ctx: Context, x: Value, slope: Value) -> Value:
    return ctx.add("prelu", x, slope)


@_lowers(aten.elu.default)
def _elu(
    ctx: Context, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Value:
    """Also selu and celu, which torch takes apart into it; one rounding, as torch does it."""
    wide = ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))
    below = ctx.add("expm1", ctx.add("mul", wide, other=input_scale))
    below = ctx.add("mul", below, other=alpha * scale)
    above = ctx.add("mul", wide, other=scale)
    return ctx.cast(ctx.add("where", ctx.add("gt", wide, other=0), above, below), ctx.dtype(x))


@_lowers(aten.sign.default)
def _sign(ctx: Context, x: Value) -> Value:
    if ctx.dtype(x) == torch.bool:
        return x
    above, below = (ctx.cast(ctx.add(op, x, other=0), ctx.dtype(x)) for op in ("gt", "lt"))
    return ctx.add("sub", above, below)


@_lowers(aten.trunc.default)
def truncated(ctx: Context, x: Value) -> Value | None:
    if not ctx.dtype(x).is_floating_point:
        return None
    below = ctx.add("lt", x, other=0)
    return ctx.add("where", below, ctx.add("ceil", x), ctx.add("floor", x))


@_lowers(aten.isnan.default)
def _isnan(ctx: Context, x: Value) -> Value:
    return ctx.add("ne", x, x)


@_lowers(aten._log_softmax.default)
def _log_softmax(ctx: Context, x: Value, dim: int, half_to_float: bool) -> Value | None:
    """In at least f32, of the distances from the largest, as torch does it."""
    if not ctx.rank(x) or not ctx.spec(x).numel:
        return None
    wide = ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))
    most = ctx.add("amax", wide, dims=(dim % ctx.rank(x),), keepdim=True)
    below = ctx.add("sub", wide, most)
    total = ctx.add("sum", ctx.add("exp", below), dims=(dim % ctx.rank(x),), keepdim=True)
    result = torch.float32 if half_to_float else ctx.dtype(x)
    return ctx.cast(ctx.add("sub", below, ctx.add("log", total)), result)


def _on_bools(op: str) -> Lowering:
    """Of two booleans the smaller is their "and" and the larger their "or"."""

    def lowering(ctx: Context, a: Value | Scalar, b: Value | Scalar) -> Value | None:
        if any(not isinstance(x, Value) or ctx.dtype(x) != torch.bool for x in (a, b)):
            return None
        return _apply(ctx, op, a, b)

    return lowering


_lowers(aten.bitwise_and.Tensor, aten.logical_and.default)(_on_bools("minimum"))
_lowers(aten.bitwise_or.Tensor, aten.logical_or.default)(_on_bools("maximum"))


@_lowers(aten.bitwise_not.default, aten.logical_not.default)
def _not(ctx: Context, x: Value) -> Value | None:
    return ctx.add("eq", x, other=False) if ctx.dtype(x) == torch.bool else None


# -- reductions ----------------------------------------------------------------------------------


def _reduction(op: str) -> Lowering:
    def lowering(
        ctx: Context,
        x: Value,
        dims: Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Value:
        x = ctx.cast(x, dtype)
        return ctx.add(op, x, dims=all_dims(dims, ctx.rank(x)), keepdim=keepdim)

    return lowering


_lowers(aten.mean.dim, aten.mean.default)(_reduction("mean"))
_lowers(aten.sum.dim_IntList, aten.sum.default)(_reduction("sum"))


@_lowers(aten.amax.default)
def _amax(ctx: Context, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return ctx.add("amax", x, dims=all_dims(dims, ctx.rank(x)), keepdim=keepdim)


@_lowers(aten.amin.default)
def _amin(ctx: Context, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value | None:
    if not ctx.dtype(x).is_floating_point:
        return None
    return ctx.add("neg", _amax(ctx, ctx.add("neg", x), dims, keepdim))  # type: ignore[arg-type]


@_lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _any(
    ctx: Context, x: Value, dims: int | Sequence[int] | None = None, keepdim: bool = False
) -> Value | None:
    if not ctx.rank(x) or not ctx.spec(x).numel:  # `amax` of nothing is not False
        return None
    if ctx.dtype(x) != torch.bool:
        x = ctx.add("ne", x, other=0)
    axes = all_dims((dims,) if isinstance(dims, int) else dims, ctx.rank(x))
    found = ctx.add("amax", ctx.cast(x, torch.float32), dims=axes, keepdim=keepdim)
    return ctx.add("ne", found, other=0)


@_lowers(aten.argmax.default)
def _argmax(ctx: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value | None:
    if not ctx.rank(x) or not ctx.dtype(x).is_floating_point:
        return None
    if dim is None:
        ones = (1,) * ctx.rank(x) if keepdim else ()
        flat = ctx.reshape(x, (ctx.spec(x).numel,))
        return ctx.reshape(ctx.add("argmax", flat, dim=0, keepdim=True), ones)
    return ctx.add("argmax", x, dim=dim % ctx.rank(x), keepdim=keepdim)


@_lowers(aten.argmin.default)
def _argmin(ctx: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value | None:
    if not ctx.rank(x) or not ctx.dtype(x).is_floating_point:
        return None
    return _argmax(ctx, ctx.add("neg", x), dim, keepdim)  # type: ignore[return-value]


@_lowers(aten.max.dim)
def _max(ctx: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...] | None:
    place = _argmax(ctx, x, dim, keepdim)
    if not isinstance(place, Value):
        return None
    return ctx.add("amax", x, dims=(dim % ctx.rank(x),), keepdim=keepdim), place


@_lowers(aten.min.dim)
def _min(ctx: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...] | None:
    if not ctx.rank(x) or not ctx.dtype(x).is_floating_point:
        return None
    found = _max(ctx, ctx.add("neg", x), dim, keepdim)
    assert isinstance(found, tuple)
    value, place = found
    assert value is not None and place is not None
    return ctx.add("neg", value), place


@_lowers(aten.var.correction)
def _var(
    ctx: Context,
    x: Value,
    dims: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> Value:
    """Two passes in at least f32, as torch does it."""
    axes = all_dims(dims, ctx.rank(x))
    wide = ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))
    delta = ctx.add("sub", wide, ctx.add("mean", wide, dims=axes, keepdim=True))
    var = ctx.add("mean", ctx.add("square", delta), dims=axes, keepdim=keepdim)
    count = math.prod(ctx.shape(x)[axis] for axis in axes)
    bias = 1 if correction is None else correction
    if bias:
        var = ctx.add("mul", var, other=count / (count - bias) if count > bias else math.inf)
    return ctx.cast(var, ctx.dtype(x))


@_lowers(aten.var_mean.correction)
def _var_mean(
    ctx: Context,
    x: Value,
    dims: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    mean = ctx.add("mean", x, dims=all_dims(dims, ctx.rank(x)), keepdim=keepdim)
    return _var(ctx, x, dims, correction=correction, keepdim=keepdim), mean  # type: ignore[return-value]


@_lowers(aten.linalg_vector_norm.default)
def _norm(
    ctx: Context,
    x: Value,
    ord: Scalar = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value | None:
    """Norms of the orders 1, 2 and infinity, summed in at least f32, as torch does it."""
    result, axes = dtype or ctx.dtype(x), all_dims(dims, ctx.rank(x))
    wide = ctx.cast(x, torch.promote_types(result, torch.float32))
    if ord == 2:
        total = ctx.add("sum", ctx.add("square", wide), dims=axes, keepdim=keepdim)
        return ctx.cast(ctx.add("sqrt", total), result)
    reduction = {1: "sum", math.inf: "amax"}.get(ord)
    if reduction is None:
        return None
    return ctx.cast(ctx.add(reduction, ctx.add("abs", wide), dims=axes, keepdim=keepdim), result)


def _axis(ctx: Context, x: Value, dim: int) -> int:
    """`dim` counted from the front; a tensor of rank 0 counts as one of rank 1."""
    return dim % max(ctx.rank(x), 1)


def _cumulative(op: str) -> Lowering:
    """Of floats: integers are combined exactly, for which there is no kernel of rows."""

    def lowering(
        ctx: Context, x: Value, dim: int, *, dtype: torch.dtype | None = None
    ) -> Value | None:
        if not ctx.rank(x) or not (dtype or ctx.dtype(x)).is_floating_point:
            return None
        return ctx.add(op, ctx.cast(x, dtype), dim=_axis(ctx, x, dim))

    return lowering


_lowers(aten.cumsum.default)(_cumulative("cumsum"))
_lowers(aten.cumprod.default)(_cumulative("cumprod"))


@_lowers(aten.softmax.int)
def _softmax(ctx: Context, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    return ctx.add("softmax", ctx.cast(x, dtype), dim=_axis(ctx, x, dim))


@_lowers(aten._softmax.default)
def _softmax_kernel(ctx: Context, x: Value, dim: int, half_to_float: bool) -> Value:
    wide = torch.float32 if half_to_float else None
    return ctx.add("softmax", ctx.cast(x, wide), dim=_axis(ctx, x, dim))


# -- contractions --------------------------------------------------------------------------------


@_lowers(aten.linear.default)
def _linear(ctx: Context, x: Value, w: Value, b: Value | None = None) -> Value | None:
    """A linear whose weight is a matrix and whose bias is one number per row of it."""
    if ctx.rank(w) != 2:
        if b is not None or ctx.rank(w) != 1:
            return None
        row = ctx.reshape(w, (1, *ctx.shape(w)))
        return ctx.reshape(ctx.add("linear", x, row), ctx.shape(x)[:-1])
    columns = ctx.shape(w)[:1]
    if b is not None and ctx.shape(b) != columns:
        if ctx.spec(b).numel != 1:
            return ctx.add("add", ctx.add("linear", x, w), b)
        b = ctx.expand(ctx.reshape(b, (1,)), columns)
    return ctx.add("linear", x, w, b)


@_lowers(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(ctx: Context, a: Value, b: Value) -> Value:
    if ctx.rank(b) == 1 and ctx.rank(a) > 1:
        column = ctx.add("linear", a, ctx.reshape(b, (1, *ctx.shape(b))))
        return ctx.reshape(column, ctx.shape(a)[:-1])
    if ctx.rank(a) == 1 and ctx.rank(b) > 1:
        rows = ctx.add("matmul", ctx.reshape(a, (1, *ctx.shape(a))), b)
        return ctx.reshape(rows, (*ctx.shape(b)[:-2], ctx.shape(b)[-1]))
    return ctx.add("matmul", a, b)


@_lowers(aten.addmm.default, aten.baddbmm.default)
def _addmm(
    ctx: Context, c: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value | None:
    if not all(isinstance(factor, (int, float)) for factor in (alpha, beta)):
        return None
    weight = _untransposed(ctx, b)
    of_columns = ctx.rank(c) == 1 and ctx.shape(c)[0] == ctx.shape(b)[-1]
    if alpha == beta == 1 and weight is not None and of_columns:
        return ctx.add("linear", a, weight, c)
    product = ctx.add("matmul", a, b)
    if alpha != 1:
        product = ctx.add("mul", product, other=alpha)
    if beta == 0:  # whatever c holds, which people leave empty
        return product
    return ctx.add("add", product, c if beta == 1 else ctx.add("mul", c, other=beta))


def _untransposed(ctx: Context, x: Value) -> Value | None:
    """The matrix constant that `x` is the transpose of."""
    if ctx.rank(x) != 2:
        return None
    for node in reversed(ctx.builder.nodes):
        if node.name == x.name:
            constant = node.op == "permute" and node.inputs[0] in ctx.builder.constants
            return Value(node.inputs[0]) if constant else None
    return None


@_lowers(aten.scaled_dot_product_attention.default)
def _sdpa(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value | None:
    if dropout_p > 0:
        return None
    if scale is None and ctx.shape(q)[-1] == 0:
        return None
    if ctx.shape(k)[-2] != ctx.shape(v)[-2]:
        return None  # an error in most of torch's kernels, and an answer in one of them
    if enable_gqa:
        k, v = (_for_heads(ctx, each, ctx.shape(q)[-3]) for each in (k, v))
    factor = ctx.shape(q)[-1] ** -0.5 if scale is None else scale
    return ctx.add("attention", q, k, v, mask, scale=factor, causal=is_causal)


def _for_heads(ctx: Context, x: Value, heads: int) -> Value:
    """[..., heads, tokens, width] of fewer heads, each for as many of `heads` as share it."""
    *batch, own, tokens, width = ctx.shape(x)
    if own == heads:
        return x
    x = ctx.add("reshape", x, shape=(*batch, own, 1, tokens, width))
    x = ctx.expand(x, (*batch, own, heads // own, tokens, width))
    return ctx.add("reshape", x, shape=(*batch, heads, tokens, width))
