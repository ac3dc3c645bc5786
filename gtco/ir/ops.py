"""The operator table: everything gtco knows about an op stands in one row here.

A row is the op's torch reference function (running it on the meta device is the only shape and
dtype rule), its fusion pattern (after Relay and AutoGTCO), its FLOP count and, for a pointwise op,
the one CUDA expression of its scalar form. What the table does not have becomes an `aten` node,
which calls the ATen op by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.ir import references
from gtco.ir.spec import TensorSpec

STATS_CHUNK = 64
"""Columns that one (mean, M2) pair of `row_stats` describes."""


class Pattern(IntEnum):
    """How an op may fuse, from Relay (OSDI 2018) and AutoGTCO (ICCAD 2021)."""

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    COMPLEX_OUT_FUSABLE = 4
    OPAQUE = 5


FlopCount = Callable[[Sequence["TensorSpec"], Sequence["TensorSpec"], Mapping[str, Any]], int]


def _one_per_output(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    return sum(spec.numel for spec in outputs)


def _one_per_input(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    return sum(spec.numel for spec in inputs)


def _no_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    return 0


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Args:
        name: its key.
        pattern: how it may fuse.
        reference: torch function of the input tensors and the node's attributes.
        cuda: for a pointwise op the scalar CUDA expression: `{0}`, `{1}` are the inputs (a missing
            second input is the attribute `other`), `{name}` an attribute.
        flops: floating-point operations, from input specs, output specs and attributes.
        is_view: the result aliases the input: no kernel is needed.
        family: of the kernels that are built around this op: "gemm" (products that sum over the
            last dimension of both operands), "attention" or "stencil" (windows of an image, each
            channel by itself). Empty for an op that joins the kernels of others.
        multiplies: on tensor cores; its attribute `products` names what fp32 operands are rounded
            to for that ("tf32"), and is None or missing where they stay as they are.
    """

    name: str
    pattern: Pattern
    reference: Callable[..., Any]
    cuda: str | None = None
    flops: FlopCount = _one_per_output
    is_view: bool = False
    family: str = ""
    multiplies: bool = False

    @property
    def is_pointwise(self) -> bool:
        return self.cuda is not None


@dataclass(frozen=True)
class Slot:
    """Stands for input number `index` in the arguments of an `aten` node."""

    index: int

    def __repr__(self) -> str:
        return f"${self.index}"


# -- reference functions that torch does not have under one name ---------------------------------


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A binary op whose second operand is a tensor or the scalar attribute `other`."""

    def reference(
        a: Tensor, b: Tensor | None = None, *, other: float | int | None = None
    ) -> Tensor:
        return function(a, other if b is None else b)

    return reference


def _slice(x: Tensor, *, dim: int, start: int, end: int, step: int = 1) -> Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


def _concat(*tensors: Tensor, dim: int) -> Tensor:
    return torch.cat(tensors, dim)


def _pad(x: Tensor, *, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """`x` with so many zeros before and after it along each dimension."""
    amounts = zip(reversed(before), reversed(after), strict=True)  # F.pad: last dimension first
    return F.pad(x, [amount for pair in amounts for amount in pair])


def _linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    products: str | None = None,
) -> Tensor:
    """`x @ w.T + b`; with `out_dtype` the products and the sum are taken in that type."""
    if out_dtype is None:
        return F.linear(x, w, b)
    wide = torch.promote_types(out_dtype, x.dtype)
    return F.linear(x.to(wide), w.to(wide), None if b is None else b.to(wide))


def _matmul(a: Tensor, b: Tensor, *, products: str | None = None) -> Tensor:
    return torch.matmul(a, b)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    products: str | None = None,
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def _layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float
) -> Tensor:
    """Layer norm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def _row_stats(x: Tensor) -> Tensor:
    """Mean and sum of squared deviations of each chunk of 64 columns: f32[..., chunks, 2]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for chunk in torch.split(x.to(wide), STATS_CHUNK, dim=-1):
        mean = chunk.mean(-1)
        parts.append(torch.stack((mean, (chunk - mean.unsqueeze(-1)).square().sum(-1)), -1))
    return torch.stack(parts, -2)


def _merge_stats(stats: Tensor, *, columns: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1/sqrt(var + eps) of whole rows by Chan's formula, each [..., 1]."""
    chunks = stats.shape[-2]
    weight = torch.full((chunks,), STATS_CHUNK, dtype=stats.dtype, device=stats.device)
    weight[-1:] = columns - STATS_CHUNK * (chunks - 1)
    mean = (stats[..., 0] * weight).sum(-1, keepdim=True) / columns
    m2 = (stats[..., 1] + weight * (stats[..., 0] - mean).square()).sum(-1, keepdim=True)
    return mean, (m2 / columns + eps).rsqrt()


def _conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    products: str | None = None,
) -> Tensor:
    return F.conv2d(x, w, b, tuple(stride), tuple(padding), tuple(dilation), groups)


def _window(x: Tensor, before: Sequence[int], after: Sequence[int], value: float) -> Tensor:
    """The image `x` [N, H, W, C] as [N, C, H', W'] in channels-last memory, with a border."""
    top, left = before
    bottom, right = after
    image = x.permute(0, 3, 1, 2)
    if not any((top, left, bottom, right)):
        return image
    return F.pad(image, (left, right, top, bottom), value=value)


def _space_to_depth(
    x: Tensor,
    *,
    block: Sequence[int],
    before: Sequence[int],
    size: Sequence[int],
    channels: int,
) -> Tensor:
    """Blocks of x [N, H, W, C] as pixels: [N, *size, channels], zeros where x has nothing.

    Pixel (i, j) has the rows from `i * block[0] - before[0]` on, the columns likewise, and of each
    all channels; then zeros up to `channels`.
    """
    after = (
        blocks * of - pixels - start
        for blocks, of, pixels, start in zip(size, block, x.shape[1:3], before, strict=True)
    )
    bottom, right = after
    whole = F.pad(x, (0, 0, before[1], right, before[0], bottom))
    shape = (x.shape[0], size[0], block[0], size[1], block[1], x.shape[3])
    y = whole.reshape(shape).permute(0, 1, 3, 2, 4, 5).flatten(3)
    return F.pad(y, (0, channels - y.shape[3]))


def _conv(
    x: Tensor,
    w: Tensor,
    *,
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    products: str | None = None,
) -> Tensor:
    """Convolve x [N, H, W, C] by w [out, KH, KW, C / groups]: [N, P, Q, out].

    `before` and `after` are rows and columns of zeros around the image.
    """
    padding: tuple[int, ...] = (0, 0)
    if tuple(before) == tuple(after):
        padding, before, after = tuple(before), (0, 0), (0, 0)
    image, kernel = _window(x, before, after, 0.0), w.permute(0, 3, 1, 2)
    y = F.conv2d(image, kernel, None, tuple(stride), padding, tuple(dilation), groups)
    return y.permute(0, 2, 3, 1).contiguous()


def _depthwise_conv(
    x: Tensor,
    w: Tensor,
    *,
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Convolve each channel of x [N, H, W, C] by itself, by w [KH, KW, C]: [N, P, Q, C]."""
    given: dict[str, Any] = {"stride": stride, "before": before, "after": after}
    given["dilation"] = dilation
    return _conv(x, w.permute(2, 0, 1).unsqueeze(3), **given, groups=x.shape[3])


def _max_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """The largest pixel of each window of x [N, H, W, C], each channel by itself."""
    image = x.permute(0, 3, 1, 2)
    sizes = tuple(kernel), tuple(stride), tuple(padding), tuple(dilation)
    y = F.max_pool2d(image, *sizes, ceil_mode)
    return y.permute(0, 2, 3, 1).contiguous()


def _avg_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    """The mean pixel of each window of x [N, H, W, C], each channel by itself."""
    image = x.permute(0, 3, 1, 2)
    sizes = tuple(kernel), tuple(stride), tuple(padding)
    y = F.avg_pool2d(image, *sizes, ceil_mode, count_padding, divisor)
    return y.permute(0, 2, 3, 1).contiguous()


_RESIZES: Mapping[str, Callable[..., Tensor]] = {
    "bilinear": torch.ops.aten.upsample_bilinear2d.default,
    "bicubic": torch.ops.aten.upsample_bicubic2d.default,
    "nearest": torch.ops.aten.upsample_nearest2d.default,
    "nearest-exact": torch.ops.aten._upsample_nearest_exact2d.default,
}


def _resize(
    x: Tensor,
    *,
    size: Sequence[int],
    mode: str,
    align_corners: bool,
    scales: Sequence[float | None],
) -> Tensor:
    """The image x [N, H, W, C] as one of [N, *size, C]; `scales` of None are those of the sizes."""
    corners = (align_corners,) if mode in ("bilinear", "bicubic") else ()
    y = _RESIZES[mode](x.permute(0, 3, 1, 2), list(size), *corners, *scales)
    return y.permute(0, 2, 3, 1).contiguous()


def _batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, eps=eps)


def _aten(
    *inputs: Tensor, target: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]
) -> Any:
    """Call the ATen overload `target`, with `Slot`s replaced by the inputs.

    They are contiguous, as they were when the model was exported: some kernels ask for that, and
    others read their memory in its order.
    """
    inputs = tuple(tensor.contiguous() for tensor in inputs)

    def fill(value: Any) -> Any:
        if isinstance(value, Slot):
            return inputs[value.index]
        return [fill(item) for item in value] if isinstance(value, tuple) else value

    return _overload(target)(*(fill(a) for a in args), **{k: fill(v) for k, v in kwargs})


def _overload(target: str) -> Any:
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def without_data(op: str, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`attrs` with which `op` allocates nothing: an ATen call makes its tensors on no device."""
    if op != "aten":
        return attrs
    names = [argument.name for argument in _overload(attrs["target"])._schema.arguments]
    if "device" not in names:
        return attrs
    meta, args, kwargs = torch.device("meta"), list(attrs["args"]), dict(attrs["kwargs"])
    if (index := names.index("device")) < len(args):
        args[index] = meta
    else:
        kwargs["device"] = meta
    return {**attrs, "args": args, "kwargs": tuple(kwargs.items())}


# -- FLOP counts ----------------------------------------------------------------------------------


def _linear_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    return 2 * outputs[0].numel * inputs[0].sizes[-1]


def _attention_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    q, k, v = (spec.sizes for spec in inputs[:3])
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _conv_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    return 2 * outputs[0].numel * math.prod(inputs[1].sizes[1:])


def _window_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    kernel = attrs["kernel"] if "kernel" in attrs else inputs[1].sizes[:2]
    return 2 * outputs[0].numel * math.prod(kernel)


def _resize_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    taps = {"bilinear": 4, "bicubic": 16}.get(attrs["mode"], 0)
    return 2 * taps * outputs[0].numel


# -- the table -----------------------------------------------------------------------------------

_UNARY: tuple[tuple[str, Callable[..., Tensor], str], ...] = (
    ("neg", torch.neg, "-{0}"),
    ("abs", torch.abs, "math::abs({0})"),
    ("exp", torch.exp, "math::exp({0})"),
    ("log", torch.log, "math::log({0})"),
    ("sqrt", torch.sqrt, "math::sqrt({0})"),
    ("rsqrt", torch.rsqrt, "math::rsqrt({0})"),
    ("reciprocal", torch.reciprocal, "1.0f / {0}"),
    ("erf", torch.erf, "math::erf({0})"),
    ("sin", torch.sin, "math::sin({0})"),
    ("cos", torch.cos, "math::cos({0})"),
    ("tanh", torch.tanh, "math::tanh({0})"),
    ("sigmoid", torch.sigmoid, "math::sigmoid({0})"),
    ("relu", torch.relu, "math::relu({0})"),
    ("silu", F.silu, "{0} * math::sigmoid({0})"),
    ("gelu", lambda x, *, approximate: F.gelu(x, approximate=approximate),
     "math::gelu_{approximate}({0})"),
    ("square", torch.square, "{0} * {0}"),
    ("copy", lambda x: x.contiguous().clone(), "{0}"),
    ("cast", lambda x, *, dtype: x.to(dtype), "{0}"),
)  # fmt: skip

_BINARY: tuple[tuple[str, Callable[..., Tensor], str], ...] = (
    ("add", torch.add, "{0} + {1}"),
    ("sub", torch.sub, "{0} - {1}"),
    ("mul", torch.mul, "{0} * {1}"),
    ("div", torch.div, "{0} / {1}"),
    ("pow", torch.pow, "math::pow({0}, {1})"),
    ("maximum", lambda a, b: a.clamp_min(b) if not isinstance(b, Tensor) else torch.maximum(a, b),
     "math::max_nan({0}, {1})"),
    ("minimum", lambda a, b: a.clamp_max(b) if not isinstance(b, Tensor) else torch.minimum(a, b),
     "math::min_nan({0}, {1})"),
    ("eq", torch.eq, "{0} == {1}"),
    ("ne", torch.ne, "{0} != {1}"),
    ("lt", torch.lt, "{0} < {1}"),
    ("le", torch.le, "{0} <= {1}"),
    ("gt", torch.gt, "{0} > {1}"),
    ("ge", torch.ge, "{0} >= {1}"),
)  # fmt: skip

_ROWS: tuple[Op, ...] = (
    *(Op(name, Pattern.ELEMENTWISE, function, cuda) for name, function, cuda in _UNARY),
    *(Op(name, Pattern.BROADCAST, _binary(function), cuda) for name, function, cuda in _BINARY),
    Op("where", Pattern.BROADCAST, torch.where, "{0} ? {1} : {2}"),
    # Views: the result is the same memory under another layout.
    Op("reshape", Pattern.INJECTIVE, lambda x, *, shape: x.reshape(shape), None, _no_flops, True),
    Op("permute", Pattern.INJECTIVE, lambda x, *, dims: x.permute(dims), None, _no_flops, True),
    Op("expand", Pattern.INJECTIVE, lambda x, *, shape: x.expand(shape), None, _no_flops, True),
    Op("unfold", Pattern.INJECTIVE, references.unfold, None, _no_flops, True),
    Op("slice", Pattern.INJECTIVE, _slice, None, _no_flops, True),
    # Stored copies of views.
    Op("concat", Pattern.INJECTIVE, _concat, None, _no_flops),
    Op("pad", Pattern.INJECTIVE, _pad, None, _no_flops),
    Op("roll", Pattern.INJECTIVE, references.roll, None, _no_flops),
    Op("gather", Pattern.INJECTIVE, references.gather, None, _no_flops),
    Op("space_to_depth", Pattern.INJECTIVE, _space_to_depth, None, _no_flops),
    # Reductions.
    Op("sum", Pattern.REDUCTION, lambda x, *, dims, keepdim: x.sum(dims, keepdim=keepdim),
       flops=_one_per_input),
    Op("mean", Pattern.REDUCTION, lambda x, *, dims, keepdim: x.mean(dims, keepdim=keepdim),
       flops=_one_per_input),
    Op("amax", Pattern.REDUCTION, lambda x, *, dims, keepdim: x.amax(dims, keepdim=keepdim),
       flops=_one_per_input),
    Op("argmax", Pattern.REDUCTION,
       lambda x, *, dim, keepdim: x.argmax(dim, keepdim), flops=_one_per_input),
    Op("softmax", Pattern.REDUCTION, lambda x, *, dim: torch.softmax(x, dim), flops=_one_per_input),
    Op("layer_norm", Pattern.REDUCTION, _layer_norm, flops=_one_per_input),
    Op("group_norm", Pattern.REDUCTION, references.group_norm, flops=_one_per_input),
    Op("group_stats", Pattern.REDUCTION, references.group_stats, flops=_one_per_input),
    Op("normalize_groups", Pattern.BROADCAST, references.normalize_groups),
    Op("row_stats", Pattern.REDUCTION, _row_stats, flops=_one_per_input),
    Op("merge_stats", Pattern.REDUCTION, _merge_stats, flops=_one_per_input),
    # Contractions.
    Op("linear", Pattern.COMPLEX_OUT_FUSABLE, _linear, flops=_linear_flops, family="gemm",
       multiplies=True),
    Op("matmul", Pattern.COMPLEX_OUT_FUSABLE, _matmul, flops=_linear_flops, family="gemm",
       multiplies=True),
    Op("attention", Pattern.COMPLEX_OUT_FUSABLE, _attention, flops=_attention_flops,
       family="attention", multiplies=True),
    # Images: conv2d and batch_norm are [N, C, H, W], as captured; the others are [N, H, W, C].
    Op("conv", Pattern.COMPLEX_OUT_FUSABLE, _conv, flops=_conv_flops, family="gemm",
       multiplies=True),
    Op("grouped_conv", Pattern.OPAQUE, _conv, flops=_conv_flops, multiplies=True),
    Op("depthwise_conv", Pattern.COMPLEX_OUT_FUSABLE, _depthwise_conv, flops=_window_flops,
       family="stencil"),
    Op("max_pool", Pattern.COMPLEX_OUT_FUSABLE, _max_pool, flops=_window_flops, family="stencil"),
    Op("avg_pool", Pattern.COMPLEX_OUT_FUSABLE, _avg_pool, flops=_window_flops, family="stencil"),
    Op("resize", Pattern.COMPLEX_OUT_FUSABLE, _resize, flops=_resize_flops, family="stencil"),
    Op("conv2d", Pattern.OPAQUE, _conv2d, flops=_conv_flops, multiplies=True),
    Op("batch_norm", Pattern.OPAQUE, _batch_norm),
    Op("aten", Pattern.OPAQUE, _aten),
)  # fmt: skip

OPS: Mapping[str, Op] = {op.name: op for op in _ROWS}

GATHERS = ("concat", "pad", "roll", "gather", "space_to_depth")
"""Ops that move elements and change none: their kernels read stored values, through any view."""
