"""The patches of an image are copied into rows, beside zeros where constant rows stand.

%p: f16[1,196,588] = reshape(permute(reshape(%x)))     %q: f16[1,197,592] = pad(%p, ...)
%y: f16[1,196,768] = linear(%p, %w, %b)                %z: f16[1,197,768] = linear(%q, %w')
%s: f16[1,196,768] = add(%y, %d)                  ->   %c: f16[1,197,768] = add(%z, %r)
%c: f16[1,197,768] = concat(%first, %s, dim=1)

The constant %r holds %first in its rows and %b + %d in the others. The product then reads plain
rows of whole 16 bytes, which TMA can bring, and its epilogue makes what whole rows are needed for.
An image that is converted first (of zeros to zeros) is converted on the way, by the same kernel.

Where no constant rows stand beside the patches, a large product reads a copy of them as well on
targets whose products read what a tensor map describes; the price decides whether the copy has a
kernel of its own:

%y: f16[1,5184,1024] = linear(%p, %w)   ->   %c = copy(%p)   %y = linear(%c, %w)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.views import Layout, NotAView, apply_view, through_views
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite

ROW_BYTES = 16
"""Rows that a tensor map describes start at multiples of it."""
LEAST_FLOPS = 1e8
"""Of a product that is worth a copy of its patches."""
LEAST_COLUMNS = 256
"""Of a patch that is; fewer are gathered in a step or two."""


@dataclass(frozen=True)
class _Rows:
    """A concat of constants and one linear of constant weights.

    Args:
        sums: the additions of constants between the linear and the concat, last first.
        terms: what they add, and the bias.
        position: of the computed operand of the concat.
    """

    concat: Node
    linear: Node
    sums: tuple[Node, ...]
    terms: tuple[Tensor, ...]
    position: int


def _rows_of_patches(edit: Editor, node: Node) -> _Rows | None:
    computed = [name for name in node.inputs if edit.constant(name) is None]
    if len(computed) != 1 or len(node.inputs) == 1:
        return None
    (value,) = computed
    sums: list[Node] = []
    terms: list[Tensor] = []
    while (add := edit.producer(value, "add")) is not None and len(add.inputs) == 2:
        known = [name for name in add.inputs if edit.constant(name) is not None]
        if len(known) != 1:
            return None
        sums.append(add)
        terms.append(edit.constants[known[0]])
        (value,) = (name for name in add.inputs if name not in known)
    linear = edit.producer(value, "linear")
    if linear is None or any(edit.constant(name) is None for name in linear.inputs[1:]):
        return None
    terms += [edit.constants[name] for name in linear.inputs[2:]]
    return _Rows(node, linear, tuple(sums), tuple(terms), node.inputs.index(computed[0]))


def _rows_stay(edit: Editor, match: _Rows) -> str | None:
    concat, linear = match.concat, match.linear
    (made,), (joined,) = linear.outputs, concat.outputs
    if joined.rank != 3 or concat.attrs["dim"] % joined.rank != 1:
        return f"%{concat.name} does not join rows of [batch, rows, columns]"
    for node in (linear, *match.sums):
        if not edit.read_once(node.name):
            return f"%{node.name} is also read by something other than %{concat.name}"
        if node.outputs[0] != made or made.dtype != joined.dtype:
            return f"%{linear.name} is broadcast or converted before %{concat.name}"
    for tensor in (*_pieces(edit, concat), *match.terms):
        if tensor is not None and tensor.dim() == 3 and not torch.equal(tensor, _repeated(tensor)):
            return f"the constants of %{concat.name} differ from one item of the batch to another"
    return _why_not_gathered(edit, linear.inputs[0])


def _pieces(edit: Editor, concat: Node) -> list[Tensor | None]:
    """The operands of `concat`; None stands for what is computed."""
    return [edit.constant(name) for name in concat.inputs]


def _repeated(tensor: Tensor) -> Tensor:
    """The first item of a batch in place of all."""
    return tensor[:1].expand_as(tensor)


def _image(edit: Editor, value: str) -> tuple[str, tuple[Node, ...], tuple[Node, ...]]:
    """What `value` is a view of, the views, and what converts a stored image ahead of them, the
    last first."""
    base, chain = through_views(edit.producer, value)
    image, found = base, []
    while (node := edit.producer(image)) is not None:
        if not edit.read_once(image) or not _keeps_zeros(edit, node):
            return base, chain, ()
        found.append(node)
        image = node.inputs[0]
    return image, chain, tuple(found)


def _keeps_zeros(edit: Editor, node: Node) -> bool:
    """Whether `node` makes an element of one of its first operand, and zeros of zeros."""
    others = [edit.constant(name) for name in node.inputs[1:]]
    numbers = [each.cpu() for each in others if each is not None and each.numel() == 1]
    (x, *_), attrs = node.inputs, node.attrs
    of_one = node.definition.is_pointwise and not node.definition.of_pairs
    if not of_one or len(numbers) < len(others):
        return False
    if edit.shape(x) != node.outputs[0].sizes:
        return False
    made = node.definition.reference(torch.zeros(1, dtype=edit.dtype(x)), *numbers, **attrs).float()
    return not made.any() and not made.signbit().any()


def before_conversion(edit: Editor, value: str) -> tuple[str, tuple[Node, ...]]:
    """`value` of the stored image as it is, and what converted it ahead of its views."""
    image, chain, conversion = _image(edit, value)
    if not conversion:
        return value, ()
    return edit.add_views(image, chain), conversion


def converted(edit: Editor, value: str, conversion: Sequence[Node]) -> str:
    """`value`, of the stored image, as the image was converted; zeros around it stay zeros."""
    for node in reversed(conversion):
        value = edit.add(node.op, value, *node.inputs[1:], **node.attrs)
    return value


def _why_not_gathered(edit: Editor, value: str) -> str | None:
    """Why a product may read its operand `value` where it lies."""
    base, chain, _ = _image(edit, value)
    if edit.producer(base) is not None:
        return f"%{base} is computed: its kernel stores what the product reads"
    layout = Layout.contiguous(edit.shape(base))
    *rows, k = edit.shape(value)
    try:
        for view in chain:
            layout = apply_view(layout, view)
        one, columns = layout.reshape((math.prod(rows), k)).dims
    except NotAView as error:
        return f"%{value} is copied anyway: {error}"
    if len(one) <= 1 and columns == ((k, 1),):
        return f"the product reads plain rows of %{base}"
    return None


def _padded_rows(edit: Editor, match: _Rows) -> str:
    concat, linear = match.concat, match.linear
    edit.source = linear.source  # what users know the product by, not where it is concatenated
    patches, name = linear.inputs[:2]
    sizes = [edit.shape(value)[1] for value in concat.inputs]
    above, below = sum(sizes[: match.position]), sum(sizes[match.position + 1 :])
    z = edit.add("linear", *_copied(edit, patches, name, (above, below)), **linear.attrs)
    return edit.add("add", z, edit.add_constant(f"{concat.name}_rows", _addend(edit, match)))


def _copied(edit: Editor, patches: str, weight: str, rows: tuple[int, int]) -> tuple[str, str]:
    """A copy of `patches` in rows of whole 16 bytes, with zero rows above and below, and `weight`
    for it."""
    weights = edit.constants[weight]
    beside = -weights.shape[1] % (ROW_BYTES // weights.dtype.itemsize)
    patches, conversion = before_conversion(edit, patches)
    if beside or any(rows):
        ahead = (0,) * (len(edit.shape(patches)) - 2)
        before, after = (*ahead, rows[0], 0), (*ahead, rows[1], beside)
        copy = edit.add("pad", patches, before=before, after=after)
    else:
        copy = patches if conversion else edit.add("copy", patches)
    copy = converted(edit, copy, conversion)
    if beside:
        weight = edit.add_constant(f"{weight}_padded", F.pad(weights, (0, beside)))
    return copy, weight


def _addend(edit: Editor, match: _Rows) -> Tensor:
    """(1, rows, columns): what is added to the product of each item of the batch, rounded once."""
    (spec,) = match.linear.outputs
    total = torch.zeros((1, *spec.sizes[1:]), dtype=torch.float64)
    for term in match.terms:
        total = total + (term[:1] if term.dim() == 3 else term).to(total)
    pieces = [
        total if tensor is None else tensor[:1].to(total) for tensor in _pieces(edit, match.concat)
    ]
    return torch.cat(pieces, 1).to(spec.dtype)


_RULES: tuple[Rule[Any], ...] = (
    Rule("concat(c, linear(patches(x), w, b) + d) -> linear(pad(patches(x)), w) + [c, b + d]",
         ("concat",), _rows_of_patches, _padded_rows, _rows_stay),
)  # fmt: skip


def _large(edit: Editor, node: Node) -> Node | None:
    x, weight = node.inputs[:2]
    known = edit.constant(weight)
    if known is None or known.shape[1] < LEAST_COLUMNS or len(edit.shape(x)) < 2:
        return None
    flops = node.definition.flops([edit.specs[x], edit.specs[weight]], node.outputs, node.attrs)
    return node if flops >= LEAST_FLOPS else None


def _of_a_copy(edit: Editor, node: Node) -> str:
    x, weight, *bias = node.inputs
    return edit.add("linear", *_copied(edit, x, weight, (0, 0)), *bias, **node.attrs)


_COPIES: tuple[Rule[Any], ...] = (
    Rule("linear(patches(x), w) -> linear(copy(patches(x)), w)",
         ("linear",), _large, _of_a_copy,
         lambda edit, node: _why_not_gathered(edit, node.inputs[0])),
)  # fmt: skip


def copy_patches(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring; for targets whose products read what a tensor map describes."""
    return rewrite(graph, _COPIES, log)


def pad_patches(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return merge_duplicates(rewrite(graph, _RULES, log), log)
