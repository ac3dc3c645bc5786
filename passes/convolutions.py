"""Constant factors go into convolutions, and convolutions that are matrix products become linears.

%c = conv2d(%x, %w, %b, padding=[1, 1], ...)
%y = batch_norm(%c, %mean, %var, %g, %h)        ->   %y = conv2d(%x, %w', %b', ...)

%c: f16[1,768,14,14] = conv2d(%x, %w, stride=[16, 16])
%r: f16[1,768,196] = reshape(%c)                ->   %p = reshape(permute(reshape(%x)))
%y: f16[1,196,768] = permute(%r)                     %y: f16[1,196,768] = linear(%p, %w')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import TensorSpec
from gtco.passes import views
from gtco.passes.kept_sums import rounded_keeping_sums
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite

# -- batch norm and other factors per channel -----------------------------------------------------


@dataclass(frozen=True)
class _Affine:
    """A node that is `x * scale + shift` with one f64 number per channel each."""

    node: Node
    scale: Tensor
    shift: Tensor


def batch_norm_factors(constants: Mapping[str, Tensor], node: Node) -> tuple[Tensor, Tensor] | None:
    """(scale, shift) of batch norm `node`, f64 of each channel, if its statistics are constants."""
    if any(name not in constants for name in node.inputs[1:]):
        return None
    mean, var, *affine = (constants[name].double() for name in node.inputs[1:])
    scale = (var + node.attrs["eps"]).rsqrt()
    if affine:
        scale = scale * affine[0]
    if not scale.isfinite().all():
        return None  # times infinity, the order of operations shows
    shift = -mean * scale
    return scale, shift + affine[1] if len(affine) == 2 else shift


def _batch_norm(edit: Editor, node: Node) -> _Affine | None:
    factors = batch_norm_factors(edit.constants, node)
    return None if factors is None else _Affine(node, *factors)


def is_by_channel(constant: Tensor, spec: TensorSpec) -> bool:
    """Whether `constant` has one number for each channel of `spec` [N, channels, ...]."""
    channels = (spec.sizes[1], *(1,) * (spec.rank - 2))
    return tuple(constant.shape) in ((1, *channels), channels)


@dataclass(frozen=True)
class _Scaled:
    """An image, the permute to channels last behind it if there is one, and what is done to its
    channels then."""

    image: str
    turned: Node | None
    affine: _Affine


def _per_channel(edit: Editor, node: Node) -> _Scaled | None:
    """`x * c`, `x + c` or `x - c` with a constant c[1, channels, 1, 1], or c[channels] where x is a
    permute to channels last."""
    for x, c in ((0, 1), (1, 0)) if len(node.inputs) == 2 else ():
        constant, spec = edit.constant(node.inputs[c]), node.outputs[0]
        if constant is None or spec != edit.specs[node.inputs[x]] or spec.rank not in (4, 5):
            continue
        last = (*(1,) * (constant.dim() - 1), spec.sizes[-1])
        turned = views.permuted(edit, node.inputs[x], views.LAST)
        if not (tuple(constant.shape) == last if turned else is_by_channel(constant, spec)):
            continue
        flat = constant.double().flatten()
        if node.op == "mul" and not flat.isfinite().all():
            continue
        one, zero = torch.ones_like(flat), torch.zeros_like(flat)
        scale, shift = (flat, zero) if node.op == "mul" else (one, flat)
        if node.op == "sub":
            scale, shift = (one, -flat) if c == 1 else (-one, flat)
        image = node.inputs[x] if turned is None else turned.inputs[0]
        return _Scaled(image, turned, _Affine(node, scale, shift))
    return None


def _affine_of_conv(edit: Editor, node: Node) -> tuple[Node, _Scaled] | None:
    """(the convolution, what `node` does to its channels)."""
    if node.op == "batch_norm":
        norm = _batch_norm(edit, node)
        found = norm and _Scaled(node.inputs[0], None, norm)
    else:
        found = _per_channel(edit, node)
    conv = found and edit.producer(found.image, "conv2d", "conv3d")
    if not found or not conv or any(edit.constant(name) is None for name in conv.inputs[1:]):
        return None
    return (conv, found) if edit.dtype(conv.inputs[1]).is_floating_point else None


def _conv_is_shared(edit: Editor, match: tuple[Node, _Scaled]) -> str | None:
    conv, scaled = match
    for node in (conv, scaled.turned):
        if node is not None and not edit.read_once(node.name):
            return f"%{node.name} is also read by something other than %{scaled.affine.node.name}"
    return None


def _folded_conv(edit: Editor, match: tuple[Node, _Scaled]) -> str:
    conv, norm, turned = match[0], match[1].affine, match[1].turned
    w, *bias = (edit.constants[name] for name in conv.inputs[1:])
    scale = norm.scale.reshape(-1, *(1,) * (w.dim() - 1))
    folded = rounded_keeping_sums(w.double() * scale, w.dtype)
    shift = norm.shift + (bias[0].double() * norm.scale if bias else 0)
    made = edit.add(
        conv.op,
        conv.inputs[0],
        edit.add_constant(f"{conv.inputs[1]}_folded", folded),
        edit.add_constant(f"{conv.inputs[1]}_bias", shift.to(w.dtype)),
        **conv.attrs,
    )
    return made if turned is None else edit.add("permute", made, **turned.attrs)


@dataclass(frozen=True)
class _TakenBack:
    """A convolution of int8, the f64 numbers of each channel that make of its sums what it stands
    for, and the norm behind that."""

    conv: Node
    scale: Tensor
    shift: Tensor
    norm: _Affine


def _norm_of_int8(edit: Editor, node: Node) -> _TakenBack | None:
    norm, value = _batch_norm(edit, node), node.inputs[0]
    found: dict[str, Tensor | None] = {}
    for op in ("cast", "add", "mul"):
        step = edit.producer(value, op)
        if step is not None and edit.read_once(value):
            value = step.inputs[0]
            if op != "cast":
                found[op] = edit.constant(step.inputs[-1])
    conv = edit.producer(value, "conv2d")
    if norm is None or conv is None or edit.dtype(conv.inputs[0]) != torch.int8:
        return None
    one, zero = torch.ones_like(norm.scale), torch.zeros_like(norm.scale)
    scale, shift = found.get("mul", one), found.get("add", zero)
    if scale is None or shift is None or not edit.read_once(value):
        return None
    if {scale.numel(), shift.numel()} != {len(one)}:
        return None
    return _TakenBack(conv, scale.double().flatten(), shift.double().flatten(), norm)


def _folded_norm(edit: Editor, match: _TakenBack) -> str:
    norm, node = match.norm, match.norm.node
    numbers = {"scale": match.scale * norm.scale, "shift": match.shift * norm.scale + norm.shift}
    scale, shift = (
        edit.add_constant(f"{node.name}_{name}", each.float().reshape(-1, 1, 1))
        for name, each in numbers.items()
    )
    y = edit.add("add", edit.add("mul", match.conv.name, scale), shift)
    dtype = node.outputs[0].dtype
    return y if dtype == torch.float32 else edit.add("cast", y, dtype=dtype)


def _affine(edit: Editor, norm: _Affine) -> str:
    (x, mean, *_), (spec,) = norm.node.inputs, norm.node.outputs
    wide = torch.promote_types(spec.dtype, torch.float32)
    shape = (1, -1, *(1,) * (spec.rank - 2))
    scale = edit.add_constant(f"{mean}_scale", norm.scale.to(wide).reshape(shape))
    shift = edit.add_constant(f"{mean}_shift", norm.shift.to(wide).reshape(shape))
    y = edit.add("cast", x, dtype=wide) if wide != spec.dtype else x
    y = edit.add("add", edit.add("mul", y, scale), shift)
    return edit.add("cast", y, dtype=spec.dtype) if wide != spec.dtype else y


# -- convolutions that are matrix products -------------------------------------------------------

WHOLE = 8
"""Channels that are copied at once."""


def _patches(edit: Editor, node: Node) -> Node | None:
    """A convolution whose windows do not overlap and that has no groups."""
    attrs = node.attrs
    w = edit.constant(node.inputs[1])
    plain = all(n == 0 for n in attrs["padding"]) and all(n == 1 for n in attrs["dilation"])
    if w is None or attrs["groups"] != 1 or not plain:
        return None
    return node if tuple(w.shape[2:]) == tuple(attrs["stride"]) else None


def _patches_fit(edit: Editor, node: Node) -> str | None:
    kernel, image = edit.shape(node.inputs[1])[2:], edit.shape(node.inputs[0])[2:]
    if any(size % k for size, k in zip(image, kernel, strict=True)):
        return f"the image {image} is no multiple of the patch {kernel}"
    channels = edit.shape(node.inputs[0])[1]
    if kernel != (1, 1) and channels % WHOLE == 0 and edit.producer(node.inputs[0]) is not None:
        return f"%{node.inputs[0]} is stored channels last, where a window's rows are contiguous"
    if kernel == (1, 1) and views.permuted(edit, node.inputs[0], views.FIRST) is None:
        return "the input of this 1x1 convolution is not stored channels last"
    return None


def linear_of(edit: Editor, x: str, w: str, *bias: str) -> str:
    """A linear for a convolution, which multiplies int8 in fp32."""
    exact = {"out_dtype": torch.float32} if edit.dtype(x) == torch.int8 else {}
    return edit.add("linear", x, w, *bias, **exact)


def _patch_linear(edit: Editor, node: Node) -> str:
    x, weight, *bias = node.inputs
    batch, channels, height, width = edit.shape(x)
    out, _, p, q = edit.shape(weight)
    rows, columns = height // p, width // q
    matrix = edit.constants[weight]
    if (last := views.permuted(edit, x, views.FIRST)) is not None:
        matrix = matrix.permute(0, 2, 3, 1)  # the columns of a patch in the order that lies there
        y = last.inputs[0]
        y = edit.add("reshape", y, shape=(batch, rows, p, columns, q, channels))
        y = edit.add("permute", y, dims=(0, 1, 3, 2, 4, 5))
    else:
        y = edit.add("reshape", x, shape=(batch, channels, rows, p, columns, q))
        y = edit.add("permute", y, dims=(0, 2, 4, 1, 3, 5))
    flat = edit.add_constant(f"{weight}_matrix", matrix.reshape(out, -1))
    y = edit.add("reshape", y, shape=(batch, rows * columns, channels * p * q))
    y = linear_of(edit, y, flat, *bias)
    y = edit.add("permute", y, dims=(0, 2, 1))
    return edit.add("reshape", y, shape=(batch, out, rows, columns))


_AFFINE: tuple[Rule[Any], ...] = (
    Rule("batch_norm(conv2d(x, w)) -> conv2d(x, w * s, t)", ("batch_norm",),
         _affine_of_conv, _folded_conv, _conv_is_shared),
    Rule("conv2d(x, w) * s -> conv2d(x, w * s)", ("mul",),
         _affine_of_conv, _folded_conv, _conv_is_shared),
    Rule("conv2d(x, w) + t -> conv2d(x, w, t)", ("add", "sub"),
         _affine_of_conv, _folded_conv, _conv_is_shared),
)  # fmt: skip

_BATCH_NORMS: tuple[Rule[Any], ...] = (
    Rule(
        "batch_norm(conv2d of int8 * u + v) -> conv2d * (u * s) + (v * s + t)",
        ("batch_norm",),
        _norm_of_int8,
        _folded_norm,
    ),
    Rule("batch_norm(x) -> x * s + t", ("batch_norm",), _batch_norm, _affine),
)

_PATCHES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("conv2d(x, w) with kernel = stride -> linear(patches(x), w)", ("conv2d",),
         _patches, _patch_linear, _patches_fit),
)  # fmt: skip


def fold_convolutions(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    # A factor must meet its convolution before either becomes something else.
    for rules in (_AFFINE, _BATCH_NORMS, _PATCHES):
        graph = rewrite(graph, rules, log)
    return merge_duplicates(graph, log)
