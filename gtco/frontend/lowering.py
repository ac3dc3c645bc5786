"""ATen to gtco's ops: one table, from an overload to a small function.

A lowering takes the overload's own arguments, with tensors as `Value`s, and returns a `Value`, a
tuple of them, or None: "not in this form", and the node becomes an `aten` node.

    aten.add.Tensor(x, 2.0)            -> add(x, other=2.0)
    aten.transpose.int(x, 1, 2)        -> permute(x, dims=[0, 2, 1])
    aten.select.int(x, 1, 0)           -> reshape(slice(x, dim=1, start=0, end=1))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from gtco.graph import GraphBuilder, TensorSpec

aten = torch.ops.aten

Scalar = int | float | bool


@dataclass(frozen=True)
class Value:
    """A tensor in the graph that is being built."""

    name: str


@dataclass
class Context:
    """What a lowering builds with.

    Args:
        builder: the graph so far.
        source: the user's module that the present node came from.
        device: where the present node's result lives.
        used_outputs: which results of the present node somebody reads.
    """

    builder: GraphBuilder
    source: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    used_outputs: frozenset[int] = frozenset({0})

    def spec(self, x: Value) -> TensorSpec:
        return self.builder.specs[x.name]

    def shape(self, x: Value) -> tuple[int, ...]:
        return self.spec(x).sizes

    def rank(self, x: Value) -> int:
        return self.spec(x).rank

    def dtype(self, x: Value) -> torch.dtype:
        return self.spec(x).dtype

    def add(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        """Append a node; trailing inputs that are None are left out."""
        names = [x.name for x in inputs if x is not None]
        return Value(self.builder.add(op, *names, hint=None, source=self.source, **attrs))

    def reshape(self, x: Value, shape: Iterable[int]) -> Value:
        new = _resolve_shape(tuple(shape), math.prod(self.shape(x)))
        return x if new == self.shape(x) else self.add("reshape", x, shape=new)

    def permute(self, x: Value, dims: Iterable[int]) -> Value:
        order = tuple(dim % self.rank(x) for dim in dims)
        return x if order == tuple(range(len(order))) else self.add("permute", x, dims=order)

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        own = (1,) * (len(shape) - self.rank(x)) + self.shape(x)
        new = tuple(old if size == -1 else size for old, size in zip(own, shape, strict=True))
        return x if new == self.shape(x) else self.add("expand", x, shape=new)

    def slice(self, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
        dim %= self.rank(x)
        size = self.shape(x)[dim]
        if (start, end, step) == (0, size, 1):
            return x
        attrs = {} if step == 1 else {"step": step}
        return self.add("slice", x, dim=dim, start=start, end=end, **attrs)

    def cast(self, x: Value, dtype: torch.dtype | None) -> Value:
        return x if dtype in (None, self.dtype(x)) else self.add("cast", x, dtype=dtype)

    def constant(self, hint: str, tensor: torch.Tensor) -> Value:
        return Value(self.builder.constant(hint, tensor))


Lowering = Callable[..., Value | tuple[Value | None, ...] | None]
_TABLE: dict[OpOverload, Lowering] = {}


def _lowers(*overloads: OpOverload) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        _TABLE.update(dict.fromkeys(overloads, function))
        return function

    return register


def _resolve_shape(shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
    if -1 not in shape:
        return shape
    known = -math.prod(shape)
    return tuple(numel // known if size == -1 else size for size in shape)


def _pair(values: Sequence[int] | int) -> tuple[int, int]:
    items = (values,) if isinstance(values, int) else tuple(values)
    return (items[0], items[0]) if len(items) == 1 else (items[0], items[1])


def _all_dims(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim % rank for dim in dims) if dims else tuple(range(rank))


# -- pointwise -----------------------------------------------------------------------------------


def _unary(op: str) -> Lowering:
    def lowering(ctx: Context, x: Value) -> Value | None:
        # An integer argument is promoted by most of these; the op's reference does the same.
        return ctx.add(op, x)

    return lowering


for _op in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "sin", "cos", "tanh",
            "sigmoid", "relu", "silu", "square"):  # fmt: skip
    _lowers(getattr(aten, _op).default)(_unary(_op))


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


def _scaled(ctx: Context, b: Value | Scalar, alpha: Scalar) -> Value | Scalar:
    if alpha == 1:
        return b
    return ctx.add("mul", b, other=alpha) if isinstance(b, Value) else b * alpha


@_lowers(aten.add.Tensor, aten.add.Scalar)
def _add(ctx: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value | None:
    return _apply(ctx, "add", a, _scaled(ctx, b, alpha))


@_lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(ctx: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value | None:
    return _apply(ctx, "sub", a, _scaled(ctx, b, alpha))


@_lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(ctx: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value | None:
    a = ctx.add("mul", a, other=alpha) if alpha != 1 else a
    if isinstance(b, Value):
        return ctx.add("sub", b, a)
    return ctx.add("add", ctx.add("neg", a), other=b)


@_lowers(aten.clamp.default, aten.hardtanh.default)
def _clamp(ctx: Context, x: Value, low: Scalar | None = None, high: Scalar | None = None) -> Value:
    if low is not None:
        x = ctx.add("maximum", x, other=low)
    return x if high is None else ctx.add("minimum", x, other=high)


@_lowers(aten.where.self)
def _where(ctx: Context, condition: Value, a: Value, b: Value) -> Value:
    return ctx.add("where", condition, a, b)


@_lowers(aten.leaky_relu.default)
def _leaky_relu(ctx: Context, x: Value, slope: float = 0.01) -> Value:
    return ctx.add("where", ctx.add("gt", x, other=0), x, ctx.add("mul", x, other=slope))


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


# -- casts and copies ----------------------------------------------------------------------------


@_lowers(aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(ctx: Context, x: Value) -> Value:
    return x


@_lowers(aten.clone.default, aten.contiguous.default)
def _same_values(ctx: Context, x: Value, memory_format: torch.memory_format | None = None) -> Value:
    return x


@_lowers(aten.dropout.default)
def _dropout(ctx: Context, x: Value, p: float, train: bool) -> Value | None:
    return None if train and p > 0 else x


@_lowers(aten._to_copy.default)
def _to_copy(
    ctx: Context,
    x: Value,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    return ctx.cast(x, dtype)


@_lowers(aten.to.dtype)
def _to_dtype(
    ctx: Context,
    x: Value,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    return ctx.cast(x, dtype)


# -- views ---------------------------------------------------------------------------------------


@_lowers(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(ctx: Context, x: Value, shape: Sequence[int]) -> Value:
    return ctx.reshape(x, shape)


@_lowers(aten.unsqueeze.default)
def _unsqueeze(ctx: Context, x: Value, dim: int) -> Value:
    shape = list(ctx.shape(x))
    shape.insert(dim % (len(shape) + 1), 1)
    return ctx.reshape(x, shape)


@_lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(ctx: Context, x: Value, dims: Sequence[int] | int | None = None) -> Value:
    rank = ctx.rank(x)
    chosen = range(rank) if dims is None else _all_dims(dims, rank)
    shape = ctx.shape(x)
    return ctx.reshape(x, (n for i, n in enumerate(shape) if not (i in chosen and n == 1)))


@_lowers(aten.flatten.using_ints)
def _flatten(ctx: Context, x: Value, start: int = 0, end: int = -1) -> Value:
    shape, rank = ctx.shape(x), max(ctx.rank(x), 1)
    first, last = start % rank, end % rank
    return ctx.reshape(x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@_lowers(aten.unflatten.int)
def _unflatten(ctx: Context, x: Value, dim: int, sizes: Sequence[int]) -> Value:
    shape, dim = ctx.shape(x), dim % ctx.rank(x)
    return ctx.reshape(
        x, (*shape[:dim], *_resolve_shape(tuple(sizes), shape[dim]), *shape[dim + 1 :])
    )


@_lowers(aten.permute.default)
def _permute(ctx: Context, x: Value, dims: Sequence[int]) -> Value:
    return ctx.permute(x, dims)


@_lowers(aten.transpose.int)
def _transpose(ctx: Context, x: Value, a: int, b: int) -> Value:
    order = list(range(ctx.rank(x)))
    order[a], order[b] = order[b], order[a]
    return ctx.permute(x, order)


@_lowers(aten.t.default)
def _t(ctx: Context, x: Value) -> Value:
    return ctx.permute(x, reversed(range(ctx.rank(x))))


@_lowers(aten.expand.default)
def _expand(ctx: Context, x: Value, shape: Sequence[int], implicit: bool = False) -> Value:
    return ctx.expand(x, shape)


@_lowers(aten.slice.Tensor)
def _slice(
    ctx: Context,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    first, last, step = slice(start, end, step).indices(ctx.shape(x)[dim])
    return ctx.slice(x, dim, first, max(first, last), step)


def _select_index(ctx: Context, x: Value, dim: int, index: int) -> Value:
    shape, dim = ctx.shape(x), dim % ctx.rank(x)
    index %= shape[dim]
    row = ctx.slice(x, dim, index, index + 1)
    return ctx.reshape(row, (*shape[:dim], *shape[dim + 1 :]))


@_lowers(aten.select.int)
def _select(ctx: Context, x: Value, dim: int, index: int) -> Value:
    return _select_index(ctx, x, dim, index)


@_lowers(aten.unbind.int)
def _unbind(ctx: Context, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select_index(ctx, x, dim, i) for i in range(ctx.shape(x)[dim]))


def _pieces(ctx: Context, x: Value, sizes: Iterable[int], dim: int) -> tuple[Value, ...]:
    parts, start = [], 0
    for size in sizes:
        parts.append(ctx.slice(x, dim, start, start + size))
        start += size
    return tuple(parts)


@_lowers(aten.split.Tensor)
def _split(ctx: Context, x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    whole = ctx.shape(x)[dim]
    return _pieces(ctx, x, (min(size, whole - i) for i in range(0, whole, size)), dim)


@_lowers(aten.split_with_sizes.default)
def _split_sizes(ctx: Context, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    return _pieces(ctx, x, sizes, dim)


@_lowers(aten.chunk.default)
def _chunk(ctx: Context, x: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    return _split(ctx, x, -(-ctx.shape(x)[dim] // chunks), dim)  # type: ignore[return-value]


@_lowers(aten.repeat.default)
def _repeat(ctx: Context, x: Value, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - ctx.rank(x)) + ctx.shape(x)
    pairs = tuple(zip(repeats, shape, strict=True))
    apart = ctx.reshape(x, (n for _, size in pairs for n in (1, size)))
    whole = ctx.expand(apart, [n for pair in pairs for n in pair])
    return ctx.reshape(whole, (times * size for times, size in pairs))


# -- moves ---------------------------------------------------------------------------------------


def _join(ctx: Context, parts: Sequence[Value], dim: int) -> Value:
    # torch still accepts the empty 1-d tensor that once meant "nothing yet"
    real = [x for x in parts if ctx.shape(x) != (0,)] or list(parts[:1])
    return real[0] if len(real) == 1 else ctx.add("concat", *real, dim=dim % ctx.rank(real[0]))


@_lowers(aten.cat.default)
def _cat(ctx: Context, parts: Sequence[Value], dim: int = 0) -> Value:
    return _join(ctx, parts, dim)


@_lowers(aten.stack.default)
def _stack(ctx: Context, parts: Sequence[Value], dim: int = 0) -> Value:
    dim %= ctx.rank(parts[0]) + 1
    return _join(ctx, [_unsqueeze(ctx, x, dim) for x in parts], dim)  # type: ignore[misc]


@_lowers(aten.roll.default)
def _roll(ctx: Context, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value | None:
    if not dims:
        return None
    for shift, dim in zip(shifts, dims, strict=True):
        size = ctx.shape(x)[dim]
        cut = -shift % size
        if cut:
            x = _join(ctx, [ctx.slice(x, dim, cut, size), ctx.slice(x, dim, 0, cut)], dim)
    return x


@_lowers(aten.constant_pad_nd.default)
def _pad(ctx: Context, x: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    for index in range(0, len(pad), 2):
        dim = ctx.rank(x) - 1 - index // 2
        size = ctx.shape(x)[dim]
        before, after = pad[index], pad[index + 1]
        x = ctx.slice(x, dim, max(0, -before), size - max(0, -after))
        parts = [_filled(ctx, x, dim, before, value), x, _filled(ctx, x, dim, after, value)]
        x = _join(ctx, [part for part in parts if part is not None], dim)
    return x


def _filled(ctx: Context, like: Value, dim: int, size: int, value: Scalar) -> Value | None:
    if size <= 0:
        return None
    shape = list(ctx.shape(like))
    shape[dim] = size
    return ctx.constant("pad", torch.full(shape, value, dtype=ctx.dtype(like), device=ctx.device))


# -- reductions ----------------------------------------------------------------------------------


@_lowers(aten.mean.dim)
def _mean(
    ctx: Context,
    x: Value,
    dims: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    x = ctx.cast(x, dtype)
    return ctx.add("mean", x, dims=_all_dims(dims, ctx.rank(x)), keepdim=keepdim)


@_lowers(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def _global_pool(ctx: Context, x: Value, size: Sequence[int]) -> Value | None:
    if any(n != 1 for n in size):
        return None
    rank = ctx.rank(x)
    return ctx.add("mean", x, dims=tuple(range(rank - len(size), rank)), keepdim=True)


@_lowers(aten.mean.default)
def _mean_all(ctx: Context, x: Value, *, dtype: torch.dtype | None = None) -> Value:
    return _mean(ctx, x, None, dtype=dtype)  # type: ignore[return-value]


@_lowers(aten.sum.dim_IntList)
def _sum(
    ctx: Context,
    x: Value,
    dims: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    x = ctx.cast(x, dtype)
    return ctx.add("sum", x, dims=_all_dims(dims, ctx.rank(x)), keepdim=keepdim)


@_lowers(aten.sum.default)
def _sum_all(ctx: Context, x: Value, *, dtype: torch.dtype | None = None) -> Value:
    return _sum(ctx, x, None, dtype=dtype)  # type: ignore[return-value]


@_lowers(aten.amax.default)
def _amax(ctx: Context, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return ctx.add("amax", x, dims=_all_dims(dims, ctx.rank(x)), keepdim=keepdim)


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
    axes = _all_dims(dims, ctx.rank(x))
    wide = ctx.cast(x, torch.promote_types(ctx.dtype(x), torch.float32))
    delta = ctx.add("sub", wide, ctx.add("mean", wide, dims=axes, keepdim=True))
    var = ctx.add("mean", ctx.add("square", delta), dims=axes, keepdim=keepdim)
    count = math.prod(ctx.shape(x)[axis] for axis in axes)
    bias = 1 if correction is None else correction
    if bias:
        var = ctx.add("mul", var, other=count / (count - bias) if count > bias else math.inf)
    return ctx.cast(var, ctx.dtype(x))


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
    """The Euclidean norm, summed in at least f32, as torch does it."""
    if ord != 2:
        return None
    wide = ctx.cast(x, torch.promote_types(dtype or ctx.dtype(x), torch.float32))
    total = ctx.add("sum", ctx.add("square", wide), dims=_all_dims(dims, ctx.rank(x)),
                    keepdim=keepdim)  # fmt: skip
    return ctx.cast(ctx.add("sqrt", total), dtype or ctx.dtype(x))


@_lowers(aten.softmax.int)
def _softmax(ctx: Context, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    return ctx.add("softmax", ctx.cast(x, dtype), dim=dim % ctx.rank(x))


@_lowers(aten._softmax.default)
def _softmax_kernel(ctx: Context, x: Value, dim: int, half_to_float: bool) -> Value:
    wide = torch.float32 if half_to_float else None
    return ctx.add("softmax", ctx.cast(x, wide), dim=dim % ctx.rank(x))


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


# -- contractions --------------------------------------------------------------------------------


@_lowers(aten.linear.default)
def _linear(ctx: Context, x: Value, w: Value, b: Value | None = None) -> Value:
    return ctx.add("linear", x, w, b)


@_lowers(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(ctx: Context, a: Value, b: Value) -> Value:
    return ctx.add("matmul", a, b)


@_lowers(aten.addmm.default, aten.baddbmm.default)
def _addmm(
    ctx: Context, c: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value | None:
    if beta != 1 or alpha != 1:
        return None
    weight = _untransposed(ctx, b)
    if weight is not None and ctx.rank(c) == 1 and ctx.shape(c)[0] == ctx.shape(b)[1]:
        return ctx.add("linear", a, weight, c)
    return ctx.add("add", ctx.add("matmul", a, b), c)


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
    if dropout_p > 0 or enable_gqa:
        return None
    factor = ctx.shape(q)[-1] ** -0.5 if scale is None else scale
    return ctx.add("attention", q, k, v, mask, scale=factor, causal=is_causal)


@_lowers(aten.conv2d.default)
def _conv2d(
    ctx: Context,
    x: Value,
    w: Value,
    b: Value | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Value | None:
    if ctx.rank(x) != 4:
        return None
    return ctx.add(
        "conv2d", x, w, b,
        stride=_pair(stride), padding=_pair(padding), dilation=_pair(dilation), groups=groups,
    )  # fmt: skip


@_lowers(aten.convolution.default)
def _convolution(
    ctx: Context,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value | None:
    if transposed or ctx.rank(w) != 4:
        return None
    return _conv2d(ctx, x, w, b, stride, padding, dilation, groups)  # type: ignore[return-value]


TABLE: Mapping[OpOverload, Lowering] = MappingProxyType(_TABLE)
"""The one table: overload to lowering."""

KEPT_AS_ATEN: tuple[OpOverload, ...] = (
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.vec,
    aten.upsample_nearest2d.vec,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.batch_norm.default,  # functionalisation turns it into the no-training form
)
"""Overloads without a lowering that one library kernel does better than their decomposition."""
