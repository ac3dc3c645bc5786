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

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
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
        if x.dtype not in (torch.float16, torch.bfloat16) or node.inputs[0] in graph.constants:
            return False
        return math.prod(x.sizes[:-1]) >= FEWEST_ROWS and aligned(x.sizes[-1], out.sizes[-1])

    return tuple(node for node in graph.nodes if takes(node))


def quantize(graph: Graph, largest: Mapping[str, float]) -> Graph:
    """Multiply in fp8 what `largest` names.

    Args:
        graph: as the passes leave it.
        largest: by the name of a linear (one of `quantizable`), the largest magnitude that it
            reads.
    """
    edit = Editor(graph)
    made: dict[str, tuple[str, str, float]] = {}
    bases = {name: _base(edit, edit.nodes[name].inputs[0]) for name in largest}
    most: dict[str, float] = {}
    for name, (base, _) in bases.items():
        most[base] = max(most.get(base, 0.0), largest[name])
    for name, (base, views) in bases.items():
        linear = edit.nodes[name]
        edit.root(linear)
        if base not in made:
            scale = _power_of_two(LARGEST / (HEADROOM * most[base])) if most[base] else 1.0
            device = edit.constants[linear.inputs[1]].device
            factor = edit.add_constant(f"{base}_scale", torch.tensor([scale], device=device))
            if (producer := edit.producer(base)) is not None:
                edit.root(producer)
            made[base] = (edit.add("quantize", base, factor), factor, scale)
            edit.root(linear)
        value, _, scale = made[base]
        for view in views:
            value = edit.add(view.op, value, **view.attrs)
        _multiply(edit, linear, value, scale)
    edit.remove_dead()
    return edit.finish()


def _base(edit: Editor, value: str) -> tuple[str, tuple[Node, ...]]:
    """What `value` is a reshape or a permutation of, and the views on the way from there."""
    views: list[Node] = []
    while (node := edit.producer(value, "reshape", "permute")) is not None:
        views.append(node)
        value = node.inputs[0]
    return value, tuple(reversed(views))


def _power_of_two(limit: float) -> float:
    """The largest one up to `limit`."""
    return 2.0 ** math.floor(math.log2(limit))


def rounded_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """`w` [rows, K] in fp8 and the scale of each row: their quotient is what stands for `w`."""
    most = w.float().abs().amax(1)
    scale = torch.exp2((LARGEST / most).log2().floor())
    scale = torch.where(most > 0, scale, 1.0)
    return (w.float() * scale[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scale


def _multiply(edit: Editor, linear: Node, x: str, scale: float) -> None:
    _, weight, *bias = linear.inputs
    w = edit.constants[weight]
    rounded, scales = rounded_weights(w)
    y = edit.add("linear", x, edit.add_constant(f"{weight}_fp8", rounded), out_dtype=torch.float32)
    y = edit.add("mul", y, edit.add_constant(f"{weight}_unscale", 1 / (scale * scales)))
    if bias:
        shift = edit.constants[bias[0]].float()
        y = edit.add("add", y, edit.add_constant(f"{bias[0]}_f32", shift))
    old = linear.name
    if (norm := _folded_norm(edit, linear, w)) is not None:
        sub, mean = norm
        sums = (rounded.double() / scales.double()[:, None]).sum(1).float()
        sums_name = edit.add_constant(f"{weight}_fp8_colsum", sums)
        y = edit.add("sub", y, edit.add("mul", mean, sums_name))
        old = sub.name
    if edit.dtype(old) != torch.float32:
        y = edit.add("cast", y, dtype=edit.dtype(old))
    edit.replace(old, y)


def _folded_norm(edit: Editor, linear: Node, w: Tensor) -> tuple[Node, str] | None:
    """The `sub` that takes the mean times the sums of `w` off, and the mean; None without one."""
    users = edit.users(linear.name)
    if len(users) != 1 or users[0].op != "sub" or users[0].inputs[0] != linear.name:
        return None
    (sub,) = users
    if len(sub.inputs) != 2 or (product := edit.producer(sub.inputs[1], "mul")) is None:
        return None
    mean, sums = product.inputs[0], edit.constant(product.inputs[-1])
    if sums is None or len(product.inputs) != 2:
        return None
    return (sub, mean) if torch.equal(sums, w.double().sum(1).float()) else None
