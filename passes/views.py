"""Rules that bring views, casts and copies into one form.

    %a = permute(%x, dims=[0, 2, 1])
    %b = reshape(%a, shape=[1, 768, 196])      ->      %c = permute(%x, dims=[0, 2, 1])
    %c = cast(%b, dtype=f16)   (of an f16)

In the normal form a reshape stands before a permute wherever that is possible, and both
after a unary pointwise op, so that a permute meets the permute that undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.ir.ops import OPS, Pattern
from gtco.ir.views import Layout, apply_view, through_views
from gtco.passes.rewrite import Editor, Rule

# -- images --------------------------------------------------------------------------------------

FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
"""The permute from channels last to [N, C, H, W], or [N, C, T, H, W], by rank: dimension i of its
result is FIRST[rank][i] of x."""
LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""The permute back."""


def permuted(edit: Editor, value: str, orders: Mapping[int, tuple[int, ...]]) -> Node | None:
    """The permute that makes `value`, if its order is that of `orders`, which is FIRST or LAST."""
    view = edit.producer(value, "permute")
    turns = view is not None and view.attrs["dims"] == orders.get(len(edit.shape(value)))
    return view if turns else None


# -- casts ---------------------------------------------------------------------------------------


def loses_nothing(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` has every value of `source`: only then may a rule look through a cast."""
    if source == target or source == torch.bool:
        return True
    if source.is_floating_point:
        if not target.is_floating_point:
            return False
        few, many = torch.finfo(source), torch.finfo(target)
        return many.eps <= few.eps and many.max >= few.max and many.tiny <= few.tiny
    if target == torch.bool:
        return False
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point:  # whole numbers up to 2 / eps are exact
        return max(-low, high) <= 2 / torch.finfo(target).eps
    return torch.iinfo(target).min <= low and high <= torch.iinfo(target).max


# -- constants -----------------------------------------------------------------------------------


def without_repeats(constant: Tensor, kept: int) -> Tensor:
    """`constant` with one element along each dimension but the last `kept` along which all are the
    same; it still broadcasts to what it was."""
    for dim in range(constant.dim() - kept):
        first = constant.narrow(dim, 0, 1)
        if torch.equal(first.expand_as(constant), constant):
            constant = first
    return constant


# -- numbers -------------------------------------------------------------------------------------


def scaled_by(node: Node) -> tuple[str, float] | None:
    """(x, c) of a mul or div that is `x * c` with a finite number c other than 0."""
    if len(node.inputs) != 1:
        return None
    other = float(node.attrs["other"])
    factor = other if node.op == "mul" else 1.0 / other if other else math.inf
    return (node.inputs[0], factor) if factor and math.isfinite(factor) else None


# -- no-ops --------------------------------------------------------------------------------------


def _unchanged(edit: Editor, node: Node) -> str | None:
    """The input of a node that changes nothing."""
    x = node.inputs[0]
    if edit.specs[x] != node.outputs[0]:
        return None
    if node.op == "permute":
        return x if list(node.attrs["dims"]) == sorted(node.attrs["dims"]) else None
    if node.op == "slice":
        return x if node.attrs.get("step", 1) == 1 else None
    if node.op == "concat":
        return x if len(node.inputs) == 1 else None
    return x


def _neutral(edit: Editor, node: Node) -> str | None:
    """The input of `x * 1`, `x / 1`, `x + 0` or `x - 0`.

    In floating point `x + 0.0` and `x - -0.0` turn -0.0 into 0.0; `x + -0.0` and `x - 0.0` are x.
    """
    neutral = 1 if node.op in ("mul", "div") else 0
    other = node.attrs.get("other")
    if len(node.inputs) != 1 or other is None or other != neutral:
        return None
    if neutral == 0 and node.outputs[0].dtype.is_floating_point:
        negative = math.copysign(1.0, other) < 0
        if negative != (node.op == "add"):
            return None
    return node.inputs[0] if edit.specs[node.inputs[0]] == node.outputs[0] else None


def _itself(edit: Editor, x: str) -> str:
    return x


# -- merges --------------------------------------------------------------------------------------


def _two(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    inner = edit.producer(node.inputs[0], node.op)
    return None if inner is None else (node, inner)


def _one_reshape(edit: Editor, match: tuple[Node, Node]) -> str:
    outer, inner = match
    return edit.add("reshape", inner.inputs[0], shape=outer.outputs[0].sizes)


def _one_permute(edit: Editor, match: tuple[Node, Node]) -> str:
    outer, inner = match
    dims = tuple(inner.attrs["dims"][dim] for dim in outer.attrs["dims"])
    return edit.add("permute", inner.inputs[0], dims=dims)


def cut(node: Node) -> tuple[int, int, int] | None:
    """(dimension, start, end) of a slice that takes neighbours; None for any other node."""
    if node.op != "slice" or node.attrs.get("step", 1) != 1:
        return None
    (spec,) = node.outputs
    dim, start = node.attrs["dim"] % spec.rank, node.attrs["start"]
    return dim, start, start + spec.sizes[dim]


def whole_of(edit: Editor, value: str, dim: int, start: int, end: int) -> str | None:
    """What `value` is the slice from `start` to `end` of, along `dim`."""
    node = edit.producer(value)
    return node.inputs[0] if node is not None and cut(node) == (dim, start, end) else None


def _two_slices(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    match = _two(edit, node)
    if match is None or match[0].attrs["dim"] != match[1].attrs["dim"]:
        return None
    return match if all(x.attrs.get("step", 1) == 1 for x in match) else None


def _one_slice(edit: Editor, match: tuple[Node, Node]) -> str:
    outer, inner = match
    base, dim = inner.attrs["start"], inner.attrs["dim"]
    return edit.add(
        "slice",
        inner.inputs[0],
        dim=dim,
        start=base + outer.attrs["start"],
        end=base + outer.attrs["end"],
    )


def _permuted_slice(edit: Editor, node: Node) -> tuple[Node, Node, Node] | None:
    """The permute of a slice of a permute that nobody needs by itself."""
    part = edit.producer(node.inputs[0], "slice")
    whole = edit.producer(part.inputs[0], "permute") if part is not None else None
    if part is None or whole is None or edit.is_output(whole.name):
        return None
    for each in edit.users(whole.name):
        readers = edit.users(each.name) if each.op == "slice" else [each]
        if edit.is_output(each.name) or any(reader.op != "permute" for reader in readers):
            return None
    return node, part, whole


def _slice_ahead_of_permute(edit: Editor, match: tuple[Node, Node, Node]) -> str:
    node, part, whole = match
    moved = whole.attrs["dims"]
    attrs = {**part.attrs, "dim": moved[part.attrs["dim"]]}
    sliced = edit.add("slice", whole.inputs[0], **attrs)
    return edit.add("permute", sliced, dims=tuple(moved[dim] for dim in node.attrs["dims"]))


def _windows_apart(edit: Editor, node: Node) -> Node | None:
    """An unfold into windows that lie side by side and leave nothing over."""
    size, extent = node.attrs["size"], edit.shape(node.inputs[0])[node.attrs["dim"]]
    return node if node.attrs["step"] == size and extent % size == 0 else None


def _cut_and_move(edit: Editor, node: Node) -> str:
    dim, size, shape = node.attrs["dim"], node.attrs["size"], edit.shape(node.inputs[0])
    cut = (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
    last = (*range(dim + 1), *range(dim + 2, len(cut)), dim + 1)
    return edit.add("permute", edit.add("reshape", node.inputs[0], shape=cut), dims=last)


def _there_and_back(edit: Editor, node: Node) -> str | None:
    """x of `cast(cast(x, wider), dtype of x)`: widening loses nothing."""
    inner = edit.producer(node.inputs[0], "cast")
    if inner is None or edit.dtype(inner.inputs[0]) != node.outputs[0].dtype:
        return None
    exact = loses_nothing(node.outputs[0].dtype, inner.outputs[0].dtype)
    return inner.inputs[0] if exact else None


# -- order ---------------------------------------------------------------------------------------


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions that a reshape turns into one another.

    `groups((2, 14, 14), (2, 196))` is `[([0], [0]), ([1, 2], [1])]`. No size of `before` may be
    1; those of `after` that are 1 belong to the run before them, or lead in a run of their own.
    """
    leading = [dim for dim in range(len(after)) if all(size == 1 for size in after[: dim + 1])]
    result: list[tuple[list[int], list[int]]] = [([], leading)] if leading else []
    i, j = 0, len(leading)
    while i < len(before) or j < len(after):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while not left or a != b:
            if i < len(before) and (a <= b or j >= len(after)):
                left.append(i)
                a *= before[i]
                i += 1
            elif j < len(after):
                right.append(j)
                b *= after[j]
                j += 1
            else:
                break
        while j < len(after) and after[j] == 1:
            right.append(j)
            j += 1
        result.append((left, right))
    return result


def _reshape_first(edit: Editor, node: Node) -> tuple[str, list[int], list[int]] | None:
    """(x, shape, dims) such that reshape(permute(y)) is permute(reshape(x))."""
    inner = edit.producer(node.inputs[0], "permute")
    if inner is None or 0 in node.outputs[0].sizes:
        return None
    x, target = inner.inputs[0], node.outputs[0].sizes
    source = [dim for dim in inner.attrs["dims"] if edit.shape(x)[dim] != 1]
    if not source:
        return None
    kept = sorted(source)  # dimensions of x larger than one, in memory order
    runs = groups([edit.shape(x)[dim] for dim in source], target)
    placed: list[tuple[int, list[int]]] = []
    for left, right in runs:
        places = [kept.index(source[position]) for position in left]
        first = places[0] if places else -1
        if places != list(range(first, first + len(places))):
            return None
        placed.append((first, right))
    placed.sort()
    order = [dim for _, right in placed for dim in right]
    shape = [target[dim] for dim in order]
    return x, shape, [order.index(dim) for dim in range(len(target))]


def _reshape_then_permute(edit: Editor, match: tuple[str, list[int], list[int]]) -> str:
    x, shape, dims = match
    return edit.add("permute", edit.add("reshape", x, shape=shape), dims=dims)


_POINTWISE = tuple(
    name for name, op in OPS.items() if op.is_pointwise and op.pattern is Pattern.BROADCAST
)
_UNARY = tuple(
    name for name, op in OPS.items() if op.is_pointwise and op.pattern is Pattern.ELEMENTWISE
)


def _pointwise_of_view(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    inner = edit.producer(node.inputs[0], "permute", "reshape")
    if inner is None or len(node.inputs) != 1 or not edit.read_once(node.inputs[0]):
        return None
    return node, inner


def _view_of_pointwise(edit: Editor, match: tuple[Node, Node]) -> str:
    node, inner = match
    y = edit.add(node.op, inner.inputs[0], **node.attrs)
    return edit.add(inner.op, y, **inner.attrs)


def _slice_of_concat(edit: Editor, node: Node) -> tuple[Node, str, int] | None:
    """The operand that a slice along the dimension of a concat lies in, and where it starts."""
    inner = edit.producer(node.inputs[0], "concat")
    if inner is None or inner.attrs["dim"] != node.attrs["dim"] or node.attrs.get("step", 1) != 1:
        return None
    start = 0
    for value in inner.inputs:
        end = start + edit.shape(value)[inner.attrs["dim"]]
        if start <= node.attrs["start"] and node.attrs["end"] <= end:
            return node, value, start
        start = end
    return None


def _slice_of_operand(edit: Editor, match: tuple[Node, str, int]) -> str:
    node, value, base = match
    dtype = node.outputs[0].dtype  # a concat converts what it joins
    if edit.dtype(value) != dtype:
        value = edit.add("cast", value, dtype=dtype)
    start, end = node.attrs["start"] - base, node.attrs["end"] - base
    if (start, end) == (0, edit.shape(value)[node.attrs["dim"]]):
        return value
    return edit.add("slice", value, dim=node.attrs["dim"], start=start, end=end)


def _broadcast_anyway(edit: Editor, node: Node) -> tuple[Node, list[str]] | None:
    """The operands of a pointwise op ahead of their expansion, where its result stays as large."""
    if not any(edit.producer(name, "expand") for name in node.inputs):
        return None
    inputs = list(node.inputs)
    for slot, name in enumerate(inputs):
        expand = edit.producer(name, "expand")
        if expand is None:
            continue
        others = [edit.shape(other) for at, other in enumerate(inputs) if at != slot]
        if (
            torch.broadcast_shapes(  # type: ignore[no-untyped-call]
                edit.shape(expand.inputs[0]), *others
            )
            == node.outputs[0].sizes
        ):
            inputs[slot] = expand.inputs[0]
    return (node, inputs) if inputs != list(node.inputs) else None


def _of_unexpanded(edit: Editor, match: tuple[Node, list[str]]) -> str:
    node, inputs = match
    return edit.add(node.op, *inputs, **node.attrs)


def broadcast(edit: Editor, value: str, sizes: Sequence[int], views: Sequence[Node]) -> str:
    """`value` broadcast to `sizes` and seen through `views`, which are of another value."""
    return edit.add_views(edit.add("expand", value, shape=sizes), views)


def check_broadcast(edit: Editor, value: str, sizes: Sequence[int], views: Sequence[Node]) -> None:
    """Whether strides express what `broadcast` makes.

    Raises:
        NotAView: they do not.
    """
    base, own = through_views(edit.producer, value)
    layout = Layout.contiguous(edit.shape(base))
    for view in own:
        layout = apply_view(layout, view)
    layout = layout.expand(sizes)
    for view in views:
        layout = apply_view(layout, view)


def _empty_pieces(edit: Editor, node: Node) -> tuple[Node, list[str]] | None:
    """The operands of a concat that have elements, if some have none."""
    full = [name for name in node.inputs if edit.specs[name].numel]
    return (node, full) if 0 < len(full) < len(node.inputs) else None


def _without_empty_pieces(edit: Editor, match: tuple[Node, list[str]]) -> str:
    node, full = match
    joined = edit.add("concat", *full, **node.attrs)
    dtype = node.outputs[0].dtype  # a piece without elements may have made it wider
    return joined if edit.dtype(joined) == dtype else edit.add("cast", joined, dtype=dtype)


RULES: tuple[Rule[Any], ...] = (
    Rule("concat(x, nothing) -> concat(x)", ("concat",), _empty_pieces, _without_empty_pieces),
    Rule("f(x, expand(y)) -> f(x, y)", _POINTWISE, _broadcast_anyway, _of_unexpanded),
    Rule("view(x) of x's own shape -> x", ("reshape", "permute", "expand", "slice", "concat"),
         _unchanged, _itself),
    Rule("cast(x, dtype of x) -> x", ("cast",), _unchanged, _itself),
    Rule("copy(x) -> x", ("copy",), _unchanged, _itself),
    Rule("x * 1, x / 1, x + 0, x - 0 -> x", ("mul", "div", "add", "sub"), _neutral, _itself),
    Rule("cast(cast(x, wider), dtype of x) -> x", ("cast",), _there_and_back, _itself),
    Rule("reshape(reshape(x)) -> reshape(x)", ("reshape",), _two, _one_reshape),
    Rule("permute(permute(x)) -> permute(x)", ("permute",), _two, _one_permute),
    Rule("slice(slice(x)) -> slice(x)", ("slice",), _two_slices, _one_slice),
    Rule("permute(slice(permute(x))) -> permute(slice(x))", ("permute",),
         _permuted_slice, _slice_ahead_of_permute),
    Rule("unfold(x, size=n, step=n) -> permute(reshape(x))", ("unfold",),
         _windows_apart, _cut_and_move),
    Rule("slice(concat(a, b)) -> slice(a)", ("slice",), _slice_of_concat, _slice_of_operand),
    Rule("reshape(permute(x)) -> permute(reshape(x))", ("reshape",),
         _reshape_first, _reshape_then_permute),
    Rule("f(permute(x)) -> permute(f(x)), and reshape", _UNARY,
         _pointwise_of_view, _view_of_pointwise),
)  # fmt: skip
"""View rules; they hold whatever the tensors mean."""
