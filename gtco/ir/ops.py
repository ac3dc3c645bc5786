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

from gtco.ir import aten, references
from gtco.ir.spec import TensorSpec


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
class RowKernel:
    """How a kernel that has whole rows in registers computes a reduction.

    Args:
        cuda: the CUDA expression: `{0}` is the row, `tile` what reduces rows (rowwise.cuh),
            `{name}` an attribute.
        whole: it gives a row again, which a scale and a shift may follow, instead of one element.
        counts: its result numbers elements, so that the row stays in its own type.
        in_parts: a few elements of a row at a time are enough, so that rows may be of any length:
            `{0}` may be a function that gives them (columnwise.cuh).
    """

    cuda: str
    whole: bool = False
    counts: bool = False
    in_parts: bool = False


@dataclass(frozen=True)
class Window:
    """What a pooling does with the pixels of its windows, in fp32.

    Args:
        start: the CUDA expression of a window without pixels, and of a pixel outside the image.
        add: that of `sum`, so far, with `pixel`.
        mean: the sum is divided by the number of pixels, as the attributes of avg_pool say where
            the windows are of one size.
    """

    start: str
    add: str
    mean: bool = False


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
            last dimension of both operands), "attention", "stencil" (windows of an image, each
            channel by itself) or "topk". Empty for an op that joins the kernels of others, or has
            none.
        samples: it multiplies each pixel that it reads once, where another operand says.
        multiplies: on tensor cores; its attribute `products` names what fp32 operands are rounded
            to for that ("tf32"), and is None or missing where they stay as they are.
        convolves: multiplies windows of an image [N, H, W, C] with weights [out, kh, kw, C]; its
            attribute `groups` says into how many the channels fall, one by default.
        row: for a reduction how a kernel that has whole rows in registers computes it.
        axes: what a reduction reduces: the dimensions that its attributes `dims` or `dim` name, the
            "last" one, the pixels and channels of each of its "groups", or the pixels of its
            "boxes".
        window: for a pooling what it does with the pixels of a window.
        gathers: stores elements of its operands in other places.
        by_rows: each row of the result, along the last dimension, is made of the same row of the
            first operand.
        of_images: a graph that has it is rewritten to have the channels of images last.
        selects: the first operand is a condition, of which no value reaches the result.
        commutes: the two operands may change places.
        slow: takes as many instructions an element as a transcendental function.
        stays_finite: of finite operands it makes no -inf, unless it overflows.
        ends_masks: it makes no -inf whatever its operands are, so that no row of it is a mask which
            forbids everything.
        of_pairs: a pointwise op that reads, of columns 2 i and 2 i + 1, the other one.
        never_alone: the kernel of a contraction computes it, behind its products: a pass put it
            there, and no plan has it elsewhere.
        lays_out: of its operand's values it makes the same ones, in the order of its dimensions.
        quantizes: computes in fp32 what it stores in 8 bits, for a product.
    """

    name: str
    pattern: Pattern
    reference: Callable[..., Any]
    cuda: str | None = None
    flops: FlopCount = _one_per_output
    is_view: bool = False
    family: str = ""
    multiplies: bool = False
    convolves: bool = False
    row: RowKernel | None = None
    axes: str = "dims"
    window: Window | None = None
    gathers: bool = False
    samples: bool = False
    by_rows: bool = False
    of_images: bool = False
    selects: bool = False
    commutes: bool = False
    slow: bool = False
    of_pairs: bool = False
    never_alone: bool = False
    lays_out: bool = False
    quantizes: bool = False
    stays_finite: bool = False
    ends_masks: bool = False

    @property
    def is_pointwise(self) -> bool:
        return self.cuda is not None

    @property
    def is_linear(self) -> bool:
        """Rows times a matrix [columns, K], and perhaps a bias of the columns."""
        return self.family == "gemm" and self.by_rows

    @property
    def is_binary(self) -> bool:
        """Pointwise, of two operands, the second of which may be the attribute `other`."""
        return self.cuda is not None and "{1}" in self.cuda and "{2}" not in self.cuda


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
    if "out" in attrs:
        pixels = zip(inputs[0].sizes[1:3], attrs["out"], strict=True)
        kernel = tuple(references.adaptive_window(*each) for each in pixels)
    else:
        kernel = attrs["kernel"] if "kernel" in attrs else inputs[1].sizes[:-1]
    return 2 * outputs[0].numel * math.prod(kernel)


def _resize_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    taps = {"bilinear": 4, "bicubic": 16}.get(attrs["mode"], 0)
    return 2 * taps * outputs[0].numel


def _sample_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    taps = 4 if attrs["mode"] == "bilinear" else 1
    return 2 * taps * outputs[0].numel


def _sample_sum_flops(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> int:
    return _sample_flops(inputs, outputs, attrs) * inputs[-1].sizes[2]


# -- the table -----------------------------------------------------------------------------------


def _unary(name: str, function: Callable[..., Tensor], cuda: str, **traits: Any) -> Op:
    return Op(name, Pattern.ELEMENTWISE, function, cuda, **traits)


def _binary(name: str, function: Callable[..., Tensor], cuda: str, **traits: Any) -> Op:
    return Op(name, Pattern.BROADCAST, references.binary(function), cuda, **traits)


def _view(name: str, function: Callable[..., Tensor], **traits: Any) -> Op:
    return Op(name, Pattern.INJECTIVE, function, flops=_no_flops, is_view=True, **traits)


def _gather(name: str, function: Callable[..., Tensor], **traits: Any) -> Op:
    return Op(name, Pattern.INJECTIVE, function, flops=_no_flops, gathers=True, **traits)


def _reduction(name: str, function: Callable[..., Any], **traits: Any) -> Op:
    return Op(name, Pattern.REDUCTION, function, flops=_one_per_input, **traits)


def _anchor(name: str, function: Callable[..., Tensor], flops: FlopCount, **traits: Any) -> Op:
    return Op(name, Pattern.COMPLEX_OUT_FUSABLE, function, flops=flops, **traits)


_PRODUCTS: dict[str, Any] = {"multiplies": True, "ends_masks": True}
_WINDOWS: dict[str, Any] = {"family": "stencil", "of_images": True}
_LARGEST = Window("-math::infinity()", "math::max_nan(sum, pixel)")
_MEAN = Window("0.0f", "sum + pixel", mean=True)

_ROWS: tuple[Op, ...] = (
    _unary("neg", torch.neg, "-{0}"),
    _unary("abs", torch.abs, "math::abs({0})"),
    _unary("exp", torch.exp, "math::exp({0})", slow=True),
    _unary("log", torch.log, "math::log({0})", slow=True),
    _unary("log1p", torch.log1p, "math::log1p({0})", slow=True),
    _unary("expm1", torch.expm1, "math::expm1({0})", slow=True, ends_masks=True),
    _unary("sqrt", torch.sqrt, "math::sqrt({0})"),
    _unary("rsqrt", torch.rsqrt, "math::rsqrt({0})"),
    _unary("reciprocal", torch.reciprocal, "1.0f / {0}"),
    _unary("erf", torch.erf, "math::erf({0})", slow=True, ends_masks=True),
    _unary("sin", torch.sin, "math::sin({0})", slow=True, ends_masks=True),
    _unary("cos", torch.cos, "math::cos({0})", slow=True, ends_masks=True),
    _unary("tanh", torch.tanh, "math::tanh({0})", slow=True, ends_masks=True),
    *(_unary(name, getattr(torch, name), f"math::{name}({{0}})", slow=True)
      for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
                   "log2", "log10", "exp2", "erfc")),
    _unary("sigmoid", torch.sigmoid, "math::sigmoid({0})", slow=True, ends_masks=True),
    _unary("relu", torch.relu, "math::relu({0})", stays_finite=True),
    _unary("silu", F.silu, "{0} * math::sigmoid({0})", slow=True),
    _unary("gelu", lambda x, *, approximate: F.gelu(x, approximate=approximate),
           "math::gelu_{approximate}({0})", slow=True),
    _unary("square", torch.square, "{0} * {0}"),
    _unary("floor", torch.floor, "math::floor({0})"),
    _unary("ceil", torch.ceil, "math::ceil({0})"),
    _unary("round", torch.round, "math::round({0})"),
    _unary("copy", lambda x: x.contiguous().clone(), "{0}", lays_out=True),
    _unary("cast", lambda x, *, dtype: x.to(dtype), "{0}"),
    Op("quantize", Pattern.BROADCAST, references.quantize, "{0} * {1}", quantizes=True),
    Op("quantize_affine", Pattern.BROADCAST, references.quantize_affine,
       "to_steps(fmaf({0}, {1}, {2}))", quantizes=True),
    Op("quantize_int8", Pattern.BROADCAST, references.quantize_int8,
       "to_int8<{low}, {high}>({0}, {1}, {2})", quantizes=True),
    _binary("add", torch.add, "{0} + {1}", commutes=True, stays_finite=True),
    _binary("sub", torch.sub, "{0} - {1}", stays_finite=True),
    _binary("mul", torch.mul, "{0} * {1}", commutes=True, stays_finite=True),
    _binary("div", torch.div, "{0} / {1}"),
    _binary("pow", torch.pow, "math::pow({0}, {1})", slow=True),
    *(_binary(name, references.of_tensors(getattr(torch, name)), f"math::{name}({{0}}, {{1}})",
              slow=True)
      for name in ("atan2", "hypot")),
    *(_binary(name, getattr(torch, name), f"math::{name}({{0}}, {{1}})", slow=True)
      for name in ("copysign", "fmod", "remainder", "floor_divide")),
    _binary("maximum", references.maximum, "math::max_nan({0}, {1})", commutes=True),
    _binary("minimum", references.minimum, "math::min_nan({0}, {1})", commutes=True),
    _binary("prelu", references.prelu, "{0} > 0 ? {0} : {0} * {1}", stays_finite=True),
    _binary("eq", torch.eq, "{0} == {1}", commutes=True),
    _binary("ne", torch.ne, "{0} != {1}", commutes=True),
    _binary("lt", torch.lt, "{0} < {1}"),
    _binary("le", torch.le, "{0} <= {1}"),
    _binary("gt", torch.gt, "{0} > {1}"),
    _binary("ge", torch.ge, "{0} >= {1}"),
    Op("where", Pattern.BROADCAST, torch.where, "{0} ? {1} : {2}", selects=True, stays_finite=True),
    Op("swap_pairs", Pattern.BROADCAST, references.swap_pairs, "{0}", of_pairs=True),
    Op("rotate", Pattern.BROADCAST, references.rotate,
       "{3} == 0.0f ? {0} * {2} : {0} * {2} + {1} * {3}"),
    # Views: the result is the same memory under another layout.
    _view("reshape", lambda x, *, shape: x.reshape(shape), stays_finite=True),
    _view("permute", lambda x, *, dims: x.permute(dims), stays_finite=True),
    _view("expand", lambda x, *, shape: x.expand(shape), stays_finite=True),
    _view("unfold", references.unfold),
    _view("slice", references.sliced, stays_finite=True),
    # Stored copies of views.
    _gather("concat", references.concat, stays_finite=True),
    _gather("pad", references.pad, stays_finite=True),
    _gather("extend", references.extend, stays_finite=True),
    _gather("roll", references.roll),
    _gather("gather", references.gather),
    _gather("space_to_depth", references.space_to_depth),
    # Reductions.
    _reduction("sum", lambda x, *, dims, keepdim: x.sum(dims, keepdim=keepdim),
               row=RowKernel("tile.sum({0})", in_parts=True)),
    _reduction("mean", lambda x, *, dims, keepdim: x.mean(dims, keepdim=keepdim),
               row=RowKernel("tile.mean({0})", in_parts=True)),
    _reduction("amax", lambda x, *, dims, keepdim: x.amax(dims, keepdim=keepdim),
               row=RowKernel("tile.amax({0})", in_parts=True)),
    _reduction("argmax", lambda x, *, dim, keepdim: x.argmax(dim, keepdim),
               row=RowKernel("tile.argmax({0})", counts=True)),
    _reduction("softmax", lambda x, *, dim: torch.softmax(x, dim), slow=True, ends_masks=True,
               row=RowKernel("tile.softmax({0})", whole=True)),
    _reduction("cumsum", lambda x, *, dim: x.cumsum(dim),
               row=RowKernel("tile.cumsum({0})", whole=True)),
    _reduction("cumprod", lambda x, *, dim: x.cumprod(dim),
               row=RowKernel("tile.cumprod({0})", whole=True)),
    _reduction("layer_norm", references.layer_norm, by_rows=True, ends_masks=True, axes="last",
               row=RowKernel("tile.normalize({0}, {eps})", whole=True)),
    _reduction("group_norm", references.group_norm, axes="groups", of_images=True,
               row=RowKernel("tile.normalize({0}, {eps})", whole=True)),
    _reduction("group_stats", references.group_stats, axes="groups"),
    _reduction("box_moments", references.box_moments, axes="boxes", never_alone=True),
    _reduction("merge_moments", references.merge_moments, axes="groups"),
    _reduction("box_means", references.box_means, axes="boxes",
               row=RowKernel("tile.mean({0})", in_parts=True)),
    Op("normalize_groups", Pattern.BROADCAST, references.normalize_groups),
    _reduction("row_stats", references.row_stats, axes="last", by_rows=True),
    _reduction("merge_stats", references.merge_stats),
    # Contractions.
    _anchor("linear", references.linear, _linear_flops, family="gemm", by_rows=True, **_PRODUCTS),
    _anchor("matmul", references.matmul, _linear_flops, family="gemm", **_PRODUCTS),
    _anchor("attention", references.attention, _attention_flops, family="attention", **_PRODUCTS),
    # Images: conv2d and batch_norm are [N, C, H, W], as captured; the others are [N, H, W, C]. Of
    # volumes, conv3d and batch_norm are [N, C, T, H, W], and conv is [N, T, H, W, C].
    _anchor("conv", references.conv, _conv_flops, family="gemm", convolves=True, **_PRODUCTS),
    _anchor("grouped_conv", references.conv, _conv_flops, family="gemm", convolves=True,
            **_PRODUCTS),
    _anchor("depthwise_conv", references.depthwise_conv, _window_flops, family="stencil"),
    _anchor("max_pool", references.max_pool, _window_flops, window=_LARGEST, **_WINDOWS),
    _anchor("avg_pool", references.avg_pool, _window_flops, window=_MEAN, **_WINDOWS),
    _anchor("adaptive_max_pool", references.adaptive_max_pool, _window_flops, window=_LARGEST,
            **_WINDOWS),
    _anchor("adaptive_avg_pool", references.adaptive_avg_pool, _window_flops, window=_MEAN,
            **_WINDOWS),
    _anchor("resize", references.resize, _resize_flops, family="stencil", of_images=True),
    _anchor("grid_sample", references.grid_sample, _sample_flops, family="stencil", of_images=True,
            samples=True),
    _anchor("sample_sum", references.sample_sum, _sample_sum_flops, family="stencil", samples=True),
    # Alone in their kernels, or ATen's.
    Op("topk", Pattern.OPAQUE, references.topk, flops=_one_per_input, family="topk"),
    Op("conv2d", Pattern.OPAQUE, references.convolution, flops=_conv_flops, of_images=True,
       **_PRODUCTS),
    Op("conv3d", Pattern.OPAQUE, references.convolution, flops=_conv_flops, of_images=True,
       **_PRODUCTS),
    Op("batch_norm", Pattern.OPAQUE, references.batch_norm),
    Op("aten", Pattern.OPAQUE, aten.call),
)  # fmt: skip

OPS: Mapping[str, Op] = {op.name: op for op in _ROWS}
