"""Products whose operands are 8 bits, fp8 (e4m3) or integers, by the values that calibration saw.

    %y: f16 = linear(%x, %w, %c)    ->    %q: f8_e4m3 = quantize(%x, %factor)
                                          %a: f32 = linear(%q, %w8, out_dtype=f32)
                                          %b = add(mul(%a, %unscale), %c)
                                          %y = cast(%b, dtype=f16)

    %y: f16 = conv(%x, %w)          ->    %q: i8 = quantize_affine(%x, %factor, %offset)
    %z: f16 = add(%y, %c)                 %a: f32 = conv(%q, %w8)
                                          %b = add(mul(%a, %unscale), %c')
                                          %z = cast(%b, dtype=f16)

`scales` says by what. %c' is %c less what %offset brings in. The quantisation is made of what a
kernel computes, ahead of the views on the way to the product, so that it ends up in that kernel's
epilogue. Behind a folded layer norm (split_norm), the sums of the weights are those of the weights
as rounded here. A sum whose operand is rounded anyway, such as a residual, may read the integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import HALVES
from gtco.passes.dataflow import keeps_one
from gtco.passes.int8_factors import fold_factors
from gtco.passes.rewrite import Editor
from gtco.passes.scales import FP8, Scales, fp8_scales, int8_scales

FEWEST_ROWS = 16
"""Of a product that gains by it: what classifies one token is as fast in 16 bits."""
LARGE = 4 << 20
"""Bytes of 16-bit values that no L2 keeps for long, so that a sum gains by reading half of them."""
_ENDS = ("before", "after")
"""Where a convolution has a border."""
_ALIGNMENT = 16
"""Bytes of which the rows of operands are multiples."""


def aligned(k: int, columns: int) -> bool:
    """Whether tensor cores take fp8 operands of rows of `k`, and results of `columns`."""
    return not k % _ALIGNMENT and not columns % 8


def quantizable(graph: Graph, dtype: torch.dtype = FP8) -> tuple[Node, ...]:
    """The products of `graph`, as the passes leave it, that `quantize` takes: linears, and of
    integers also convolutions of images."""

    ops = ("linear",) if dtype == FP8 else ("linear", "conv")

    def takes(node: Node) -> bool:
        if node.op not in ops or any(name not in graph.constants for name in node.inputs[1:]):
            return False
        x, out = graph.specs[node.inputs[0]], node.outputs[0]
        if node.op == "conv" and (x.rank != 4 or node.attrs.get("groups", 1) != 1):
            return False
        if x.dtype not in HALVES or node.inputs[0] in graph.constants:
            return False
        return math.prod(out.sizes[:-1]) >= FEWEST_ROWS and aligned(x.sizes[-1], out.sizes[-1])

    return tuple(node for node in graph.nodes if takes(node))


def sums(graph: Graph) -> dict[str, tuple[str, str]]:
    """By the name of each large sum of two values, such as with a residual, that one which products
    may read as integers too, and the first of these."""
    read: dict[str, str] = {}
    for node in quantizable(graph, torch.int8):
        read.setdefault(node.inputs[0], node.name)
    found = {}
    for node in graph.nodes:
        specs = [graph.specs[name] for name in node.inputs]
        if node.op != "add" or len(specs) != 2 or specs[0] != specs[1]:
            continue
        rounded = [name for name in node.inputs if name in read]
        if len(rounded) == 1 and specs[0].numel * specs[0].dtype.itemsize >= LARGE:
            found[node.name] = (rounded[0], read[rounded[0]])
    return found


def _bases(edit: Editor, names: Iterable[str]) -> dict[str, tuple[str, tuple[Node, ...]]]:
    """By the name of a product, the value that is rounded, and the views of it that it reads."""
    return {name: _base(edit, edit.nodes[name].inputs[0]) for name in names}


def scales_of_fp8(graph: Graph, largest: Mapping[str, float]) -> dict[str, Scales]:
    """By the name of a linear, of which `largest` has the largest magnitude that it reads."""
    edit = Editor(graph)
    most: dict[str, float] = {}
    read = _bases(edit, largest)
    for name, (base, _) in read.items():
        most[base] = max(most.get(base, 0.0), largest[name])
    return {name: fp8_scales(_weights(edit, name), most[base]) for name, (base, _) in read.items()}


def scales_of_int8(graph: Graph, seen: Mapping[str, Tensor]) -> dict[str, Scales]:
    """By the name of a product, of what `seen` has of the values that it reads
    (`scales.seen_in`)."""
    edit = Editor(graph)
    of_base: dict[str, list[str]] = {}
    read = _bases(edit, seen)
    for name, (base, _) in read.items():
        of_base.setdefault(base, []).append(name)
    found: dict[str, Scales] = {}
    for base, names in of_base.items():
        nodes = [edit.nodes[name] for name in names]
        borders = [size for node in nodes for end in _ENDS for size in node.attrs.get(end, ())]
        views = {view.op for name in names for view in read[name][1]}
        lasts = {edit.shape(name)[-1] for name in (base, *(node.inputs[0] for node in nodes))}
        found |= int8_scales(
            {name: _weights(edit, name) for name in names},
            [seen[name] for name in names],
            by_channel=views <= {"reshape"} and len(lasts) == 1,
            centred=any(borders),
        )
    return found


def _weights(edit: Editor, product: str) -> Tensor:
    return edit.constants[edit.nodes[product].inputs[1]]


def quantize(
    graph: Graph,
    scales: Mapping[str, Scales],
    weights: Mapping[str, Tensor] | None = None,
    of_sums: Mapping[str, Scales] | None = None,
) -> Graph:
    """Multiply in 8 bits what `scales` names.

    Args:
        graph: as the passes leave it.
        scales: by the name of a product (one of `quantizable`), how its operands are rounded; the
            same of all that read the same.
        weights: by the name of a product, its weights in 8 bits; those of others are rounded to the
            nearest.
        of_sums: by the name of a sum (one of `sums`) that is to read integers, how these are made.
    """
    edit = Editor(graph)
    weights = weights or {}
    made: dict[str, str] = {}
    read = _bases(edit, scales)
    totals = sums(graph) if of_sums else {}
    for name, how in (of_sums or {}).items():
        _read_rounded(edit, edit.nodes[name], totals[name][0], how, made)
    for name, (base, views) in read.items():
        value = _rounded(edit, base, scales[name], made)
        edit.root(edit.nodes[name])
        value = edit.add_views(value, views)
        _multiply(edit, edit.nodes[name], value, scales[name], weights.get(name))
    edit.remove_dead()
    return fold_factors(edit.finish())


def _rounded(edit: Editor, base: str, scales: Scales, made: dict[str, str]) -> str:
    """`base` in 8 bits, made once."""
    if base not in made:
        if (producer := edit.producer(base)) is not None:
            edit.root(producer)
        factor = edit.add_constant(f"{base}_scale", scales.factor)
        if scales.dtype == FP8:
            made[base] = edit.add("quantize", base, factor)
        else:
            offset = edit.add_constant(f"{base}_offset", scales.offset)
            made[base] = edit.add("quantize_affine", base, factor, offset)
    return made[base]


def _read_rounded(edit: Editor, add: Node, base: str, scales: Scales, made: dict[str, str]) -> None:
    """Let `add` read the integers that `base` is rounded to."""
    rounded = _rounded(edit, base, scales, made)
    edit.root(add)
    step = edit.add_constant(f"{base}_step", 1 / scales.factor)
    zero = edit.add_constant(f"{base}_zero", -scales.offset / scales.factor)
    wide = edit.add("mul", edit.add("cast", rounded, dtype=torch.float32), step)
    value = edit.add("cast", edit.add("add", wide, zero), dtype=edit.dtype(base))
    edit.replace(add.name, edit.add("add", *(value if x == base else x for x in add.inputs)))


@dataclass(frozen=True)
class Operand:
    """What a linear's weights are multiplied by: `(value - mean) * rstd` behind a norm that the
    passes have folded, else `value`.

    Args:
        value: what the linear reads, and what is rounded to 8 bits.
        mean: of each row; None without a folded norm.
        rstd: of each row, 1 over the standard deviation; None without a folded norm.
    """

    value: str
    mean: str | None = None
    rstd: str | None = None

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(name for name in (self.value, self.mean, self.rstd) if name is not None)

    def rows(self, found: Mapping[str, Tensor], scales: Scales) -> Tensor:
        """[rows, K], rounded by `scales`, of the values in `found`."""
        x = scales.as_rounded(found[self.value])
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


def _multiply(edit: Editor, node: Node, x: str, scales: Scales, weights: Tensor | None) -> None:
    _, weight, *bias = node.inputs
    w = edit.constants[weight]
    rounded = scales.nearest(w) if weights is None else weights.to(w.device)
    rows, offset = scales.rows.to(w.device), scales.offset.to(w.device)
    label = f"{weight}_{'fp8' if scales.dtype == FP8 else 'int8'}"
    attrs = node.attrs if node.op == "conv" else {"out_dtype": torch.float32}
    y = edit.add(node.op, x, edit.add_constant(label, rounded), **attrs)
    y = edit.add("mul", y, edit.add_constant(f"{label}_unscale", 1 / rows))
    old = node.name
    if not bias and (added := _bias_behind(edit, node)) is not None:
        old, bias = added.name, [added.inputs[1]]
    shift = edit.constants[bias[0]].double() if bias else torch.zeros_like(rows).double()
    if offset.any():
        shift = shift - (rounded.double() * offset.double()).flatten(1).sum(1) / rows.double()
    if bias or offset.any():
        y = edit.add("add", y, edit.add_constant(f"{label}_shift", shift.float()))
    if (norm := _folded_norm(edit, node, w)) is not None:
        sub, mean, _ = norm
        of_rows = scales.stands_for(rounded).double().sum(1).float()
        y = edit.add("sub", y, edit.add("mul", mean, edit.add_constant(f"{label}_colsum", of_rows)))
        old = sub.name
    if edit.dtype(old) != torch.float32:
        y = edit.add("cast", y, dtype=edit.dtype(old))
    edit.replace(old, y)


def _bias_behind(edit: Editor, product: Node) -> Node | None:
    """The sum with one constant of each column, where nothing else reads `product`."""
    users = edit.users(product.name)
    if len(users) != 1 or users[0].op != "add" or users[0].inputs[:1] != (product.name,):
        return None
    bias = edit.constant(users[0].inputs[-1])
    columns = product.outputs[0].sizes[-1:]
    return users[0] if bias is not None and bias.shape == columns else None


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
