"""Linears whose operands are fp8 (e4m3), by the largest values that calibration saw.

    %y: f16 = linear(%x, %w, %c)    ->    %q: f8_e4m3 = quantize(%x, %scale)
                                          %a: f32 = linear(%q, %w8, out_dtype=f32)
                                          %b = add(mul(%a, %unscale), %c)
                                          %y = cast(%b, dtype=f16)

Scales are powers of two, which change no digit: one of the activations, of which twice the largest
value that was seen finds room, and one of each row of the weights. The quantisation is made of what
a kernel computes, ahead of the views on the way to the linear, so that it ends up in that kernel's
epilogue. Behind a folded layer norm (split_norm), the sums of the weights are those of the weights
as rounded here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import HALVES
from gtco.passes.dataflow import keeps_one
from gtco.passes.rewrite import Editor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
HEADROOM = 2.0
"""How much larger than in calibration a value may be before it is cut."""
FEWEST_ROWS = 16
"""Of a linear that gains by it: what classifies one token is as fast in 16 bits."""
_ALIGNMENT = 16
"""Bytes of which the rows of operands are multiples."""


def aligned(k: int, columns: int) -> bool:
    """Whether tensor cores take fp8 operands of rows of `k`, and results of `columns`."""
    return not k % _ALIGNMENT and not columns % 8


def quantizable(graph: Graph) -> tuple[Node, ...]:
    """The linears of `graph`, as the passes leave it, that `quantize` takes."""

    def takes(node: Node) -> bool:
        if node.op != "linear" or any(name not in graph.constants for name in node.inputs[1:]):
            return False
        x, out = graph.specs[node.inputs[0]], node.outputs[0]
        if x.dtype not in HALVES or node.inputs[0] in graph.constants:
            return False
        return math.prod(x.sizes[:-1]) >= FEWEST_ROWS and aligned(x.sizes[-1], out.sizes[-1])

    return tuple(node for node in graph.nodes if takes(node))


def quantize(
    graph: Graph, largest: Mapping[str, float], weights: Mapping[str, Tensor] | None = None
) -> Graph:
    """Multiply in fp8 what `largest` names.

    Args:
        graph: as the passes leave it.
        largest: by the name of a linear (one of `quantizable`), the largest magnitude that it
            reads.
        weights: by the name of a linear, its weights in fp8, by the scales of `row_scales`; those
            of others are rounded to the nearest.
    """
    edit = Editor(graph)
    weights = weights or {}
    made: dict[str, tuple[str, str, float]] = {}
    bases = {name: _base(edit, edit.nodes[name].inputs[0]) for name in largest}
    most: dict[str, float] = {}
    for name, (base, _) in bases.items():
        most[base] = max(most.get(base, 0.0), largest[name])
    for name, (base, views) in bases.items():
        linear = edit.nodes[name]
        edit.root(linear)
        if base not in made:
            scale = activation_scale(most[base])
            factor = edit.add_constant(f"{base}_scale", torch.tensor([scale]))
            if (producer := edit.producer(base)) is not None:
                edit.root(producer)
            made[base] = (edit.add("quantize", base, factor), factor, scale)
            edit.root(linear)
        value, _, scale = made[base]
        for view in views:
            value = edit.add(view.op, value, **view.attrs)
        _multiply(edit, linear, value, scale, weights.get(name))
    edit.remove_dead()
    return edit.finish()


@dataclass(frozen=True)
class Operand:
    """What a linear's weights are multiplied by: `(value - mean) * rstd` behind a norm that the
    passes have folded, else `value`.

    Args:
        value: what the linear reads, and what is rounded to fp8.
        mean: of each row; None without a folded norm.
        rstd: of each row, 1 over the standard deviation; None without a folded norm.
    """

    value: str
    mean: str | None = None
    rstd: str | None = None

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(name for name in (self.value, self.mean, self.rstd) if name is not None)

    def rows(self, found: Mapping[str, Tensor], largest: float) -> Tensor:
        """[rows, K], rounded, of the values in `found`, for the scale that `largest` gives."""
        scale = activation_scale(largest)
        x = to_fp8(found[self.value].float() * scale).float() / scale
        if self.mean is not None:
            x = x - found[self.mean]
        if self.rstd is not None:
            x = x * found[self.rstd]
        return x.reshape(-1, x.shape[-1])


def operands(graph: Graph) -> dict[str, Operand]:
    """By name of each linear that `quantize` takes, what its weights are multiplied by."""
    edit = Editor(graph)
    found = {}
    for node in quantizable(graph):
        norm = _folded_norm(edit, node, edit.constants[node.inputs[1]])
        _, mean, factor = (None, None, None) if norm is None else norm
        column = factor is not None and edit.shape(factor)[-1:] == (1,)
        found[node.name] = Operand(node.inputs[0], mean, factor if column else None)
    return found


def _base(edit: Editor, value: str) -> tuple[str, tuple[Node, ...]]:
    """What `value` is a reshape or a permutation of, and the views on the way from there; or of
    which it keeps one of each pair, where nobody else reads it."""
    views: list[Node] = []
    while (node := edit.producer(value, "reshape", "permute", "slice")) is not None:
        if node.op == "slice" and not (edit.read_once(value) and keeps_one(edit.producer, node)):
            break
        views.append(node)
        value = node.inputs[0]
    return value, tuple(reversed(views))


def activation_scale(largest: float) -> float:
    """By what to multiply values up to `largest` ahead of rounding them."""
    return 2.0 ** math.floor(math.log2(LARGEST / (HEADROOM * largest))) if largest else 1.0


def row_scales(w: Tensor) -> Tensor:
    """By what to multiply each row of `w` [rows, K] ahead of rounding it, in fp32."""
    most = w.float().abs().amax(1)
    scale = torch.exp2((LARGEST / most).log2().floor())
    return torch.where(most > 0, scale, 1.0)


def to_fp8(values: Tensor) -> Tensor:
    """The nearest in fp8, whose largest stands for what is larger."""
    return values.clamp(-LARGEST, LARGEST).to(FP8)


def rounded_weights(w: Tensor) -> Tensor:
    """`w` [rows, K] in fp8, to the nearest: over `row_scales` it stands for `w`."""
    return to_fp8(w.float() * row_scales(w)[:, None])


def _multiply(edit: Editor, linear: Node, x: str, scale: float, weights: Tensor | None) -> None:
    _, weight, *bias = linear.inputs
    w = edit.constants[weight]
    rounded = rounded_weights(w) if weights is None else weights.to(w.device)
    scales = row_scales(w)
    y = edit.add("linear", x, edit.add_constant(f"{weight}_fp8", rounded), out_dtype=torch.float32)
    y = edit.add("mul", y, edit.add_constant(f"{weight}_unscale", 1 / (scale * scales)))
    if bias:
        shift = edit.constants[bias[0]].float()
        y = edit.add("add", y, edit.add_constant(f"{bias[0]}_f32", shift))
    old = linear.name
    if (norm := _folded_norm(edit, linear, w)) is not None:
        sub, mean, _ = norm
        sums = (rounded.double() / scales.double()[:, None]).sum(1).float()
        sums_name = edit.add_constant(f"{weight}_fp8_colsum", sums)
        y = edit.add("sub", y, edit.add("mul", mean, sums_name))
        old = sub.name
    if edit.dtype(old) != torch.float32:
        y = edit.add("cast", y, dtype=edit.dtype(old))
    edit.replace(old, y)


def _folded_norm(edit: Editor, linear: Node, w: Tensor) -> tuple[Node, str, str | None] | None:
    """The `sub` that takes the mean times the sums of `w` off, the mean, and what the difference is
    multiplied by; None without one."""
    users = edit.users(linear.name)
    if len(users) != 1 or users[0].op != "sub" or users[0].inputs[0] != linear.name:
        return None
    (sub,) = users
    if len(sub.inputs) != 2 or (product := edit.producer(sub.inputs[1], "mul")) is None:
        return None
    mean, sums = product.inputs[0], edit.constant(product.inputs[-1])
    if sums is None or len(product.inputs) != 2 or not torch.equal(sums, w.double().sum(1).float()):
        return None
    readers = [node for node in edit.users(sub.name) if node.op == "mul" and len(node.inputs) == 2]
    factors = [name for node in readers for name in node.inputs if name != sub.name]
    return sub, mean, factors[0] if len(factors) == 1 else None
