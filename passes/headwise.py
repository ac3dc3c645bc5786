"""What is made of the heads of a linear, each of its rows alone: norms of queries and keys.

    %y = linear(%x, %w)                                %y = linear(%x, %w[order])
    %h = reshape(minimum(%y, %most), ...)              %h = permute(reshape(minimum(%y, %most)))
    %s = mean(square(%h), dims=[3], keepdim=True)  ->  %s = mean(square(%h), dims=[3], ...)
    %n = mul(mul(%h, rsqrt(%s)), %g)                   %n = mul(mul(%h, rsqrt(%s)), %g[order])

Such a value may have the columns of its heads in any order: the same order of the linear's weights,
and of what differs by column on the way, gives it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.ir.ops import Pattern
from gtco.passes.columns import linear_of
from gtco.passes.rewrite import Editor
from gtco.passes.views import without_repeats
from gtco.passes.weighted_sums import (
    Unlike,
    behind,
    first_items,
    first_size,
    numbered,
    seen,
)


@dataclass(frozen=True)
class Heads:
    """A value [batch, heads, tokens, width] that is a view of some columns of a linear.

    Args:
        linear: the node, whose weights are constants.
        columns: [heads, width], which of its columns they are.
    """

    linear: Node
    columns: Tensor

    def like(self, other: Heads) -> bool:
        """Whether one linear can make both."""
        return (
            self.linear.inputs[0] == other.linear.inputs[0]
            and dict(self.linear.attrs) == dict(other.linear.attrs)
            and self.linear.outputs[0].dtype == other.linear.outputs[0].dtype
            and self.columns.shape == other.columns.shape
        )


def heads_of(
    edit: Editor, value: str, views: Sequence[Node], shape: tuple[int, ...]
) -> Heads | None:
    """`value` seen through `views`, which give it `shape`, if a linear makes it."""
    base, own = behind(edit, value)
    linear = edit.producer(base, "linear")
    return None if linear is None else _heads(edit, linear, (*own, *views), shape)


def _heads(
    edit: Editor, linear: Node, views: Sequence[Node], shape: tuple[int, ...]
) -> Heads | None:
    """What `linear` gives, seen through `views`, which give it `shape`."""
    if len(shape) != 4 or any(name not in edit.constants for name in linear.inputs[1:]):
        return None
    batch, heads, tokens, width = shape
    out = linear.outputs[0].sizes
    if linear.outputs[0].numel != batch * tokens * out[-1]:
        return None
    with suppress(Unlike):  # items that stay apart are all like the first
        views = first_items(views, out)
        out, shape = first_size(out), first_size(shape)
    columns, row = (
        seen(each.expand(out), views) for each in (torch.arange(out[-1]), numbered((*out[:-1], 1)))
    )
    wanted = numbered((shape[0], 1, tokens, 1))
    if not torch.equal(row, wanted.expand(shape)):
        return None
    of_head = columns[:1, :, :1]
    distinct = len(set(of_head.flatten().tolist())) == of_head.numel()
    if not distinct or not torch.equal(of_head.expand(shape), columns):
        return None
    return Heads(linear, of_head.reshape(heads, width))


@dataclass(frozen=True)
class Headwise:
    """A value [batch, heads, tokens, width] of which each row is made of a row of a linear's head.

    Args:
        value: its name, behind views and casts that lose nothing.
        heads: the columns of the linear.
        shape: of the value.
        ahead: pointwise nodes of the linear's own shape, each of the one before it.
        split: the value in which heads have a dimension of their own.
        within: the nodes that make `value` of `split`, in order.
        inside: all values between the linear and `value`, and these two.
    """

    value: str
    heads: Heads
    shape: tuple[int, ...]
    ahead: tuple[Node, ...]
    split: str
    within: tuple[Node, ...]
    inside: frozenset[str]

    def with_order(self, edit: Editor, order: Tensor, dtype: torch.dtype) -> str:
        """The value with the columns of its heads in another order, from a linear of its own, in
        `dtype`."""
        batch, heads, tokens, width = self.shape
        y = linear_of(edit, [(self.heads.linear, self.heads.columns[:, order].flatten())], "paired")
        y = edit.add("reshape", y, shape=(batch, tokens, heads, width))
        y = edit.add("permute", y, dims=(0, 2, 1, 3))
        for node in self.ahead:  # behind the views, where they share a kernel with what follows
            inputs = [name if name in edit.constants else y for name in node.inputs]
            y = edit.add(node.op, *inputs, **node.attrs)
        made = {self.split: y}
        for node in self.within:
            inputs = [made.get(name) or _ordered(edit, name, order) for name in node.inputs]
            attrs = {**node.attrs, **({"dims": (3,)} if "dims" in node.attrs else {})}
            made[node.name] = edit.add(node.op, *inputs, **attrs)
        y = made[self.value]
        return y if edit.dtype(y) == dtype else edit.add("cast", y, dtype=dtype)


def headwise(
    edit: Editor, value: str, views: Sequence[Node], shape: tuple[int, ...]
) -> Headwise | None:
    """`value` seen through `views`, which give it `shape`, if it is made of heads alone."""
    base, own = behind(edit, value)
    within: dict[str, Node] = {}
    split = _split(edit, base, within)
    if split is None:
        return None
    found = _linear_behind(edit, split)
    if found is None:
        return None
    linear, ahead, moved = found
    heads = _heads(edit, linear, (*moved, *own, *views), shape)
    if heads is None:
        return None
    names = (*within, *(node.name for node in (linear, *ahead, *moved, *own)), value)
    return Headwise(base, heads, shape, ahead, split, tuple(within.values()), frozenset(names))


def _split(edit: Editor, value: str, within: dict[str, Node]) -> str | None:
    """The one value of which `value` is made row by row; `within` gets the nodes between them."""
    sizes = edit.shape(value)
    starts: set[str] = set()

    def visit(name: str) -> bool:
        node = edit.producer(name)
        if name in within or name in starts:
            return True
        if name in edit.constants:
            return _by_column(edit.constants[name], sizes[-1]) is not None
        if node is None or len(node.outputs) != 1:
            return False
        if node.definition.is_view or node.op == "linear":
            starts.add(name)
            return edit.shape(name) == sizes
        if not _is_of_rows(edit, node, sizes) or not all(visit(each) for each in node.inputs):
            return False
        within[name] = node
        return True

    return starts.pop() if visit(value) and len(starts) == 1 else None


def _is_of_rows(edit: Editor, node: Node, sizes: tuple[int, ...]) -> bool:
    """Whether `node` makes rows of rows, or one element of each, whatever their columns' order."""
    definition, made = node.definition, node.outputs[0].sizes
    if made not in (sizes, (*sizes[:-1], 1)):
        return False
    if definition.is_pointwise:
        return not definition.of_pairs
    if node.op == "layer_norm":
        return edit.shape(node.inputs[0]) == sizes
    reduces = definition.pattern is Pattern.REDUCTION and definition.axes == "dims"
    kept = bool(node.attrs.get("keepdim"))
    return reduces and kept and tuple(node.attrs.get("dims", ())) in ((len(sizes) - 1,), (-1,))


def _linear_behind(
    edit: Editor, value: str
) -> tuple[Node, tuple[Node, ...], tuple[Node, ...]] | None:
    """(linear, pointwise nodes, views) if they lead to `value`, the nodes each in order."""
    ahead: list[Node] = []
    moved: list[Node] = []
    while (node := edit.producer(value)) is not None and node.op != "linear":
        computed = [name for name in node.inputs if name not in edit.constants]
        if len(computed) != 1 or len(node.outputs) != 1:
            return None
        if node.definition.is_view:
            moved.append(node)
        elif node.definition.is_pointwise and not node.definition.of_pairs:
            if any(edit.specs[n].numel != 1 for n in node.inputs if n in edit.constants):
                return None
            ahead.append(node)
        else:
            return None
        value = computed[0]
    return None if node is None else (node, tuple(ahead[::-1]), tuple(moved[::-1]))


def _by_column(constant: Tensor, columns: int) -> Tensor | None:
    """`constant` as one element, or as one for each column, if it is that."""
    kept = without_repeats(constant, kept=0)
    of_columns = kept.dim() > 0 and kept.shape[-1] == kept.numel() == columns
    return kept if kept.numel() == 1 or of_columns else None


def _ordered(edit: Editor, name: str, order: Tensor) -> str:
    """The constant `name` with its columns in another order."""
    constant = _by_column(edit.constants[name], len(order))
    assert constant is not None
    if constant.numel() == 1:
        return edit.add_constant(name, constant.flatten())
    return edit.add_constant(f"{name}_paired", constant.flatten()[order.to(constant.device)])


def read_elsewhere(edit: Editor, values: Iterable[str], inside: Container[str]) -> bool:
    """Whether others than `inside` read one of `values`, through views and casts or not."""
    pending = [*values]
    known = {*pending}
    while pending:
        value = pending.pop()
        if edit.is_output(value):
            return True
        for user in edit.users(value):
            if user.name in known or user.name in inside:
                continue
            if not user.definition.is_view and user.op != "cast":
                return True
            known.add(user.name)
            pending.append(user.name)
    return False
