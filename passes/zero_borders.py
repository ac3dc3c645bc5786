"""Constant zeros that are joined to an image are the border of what reads its windows.

%z: f16[1,64,57,56] = concat(%x, 0, dim=2)
%p: f16[1,64,57,57] = concat(%z, 0, dim=3)              %y = conv(permute(%x), %w', before=[0, 0],
%y: f16[1,32,28,28] = conv2d(%p, %w, stride=[2, 2])  ->            after=[1, 1], ...)

Frameworks whose convolutions have no border on one side alone pad their images so. A pooling's own
border is -inf, so that zeros are one only around what is nowhere negative:

%y = max_pool(zeros around relu(%x))   ->   %y = max_pool(relu(%x), padding=[1, 1], ...)
"""

from __future__ import annotations

from typing import Any

from gtco.ir.graph import Node
from gtco.passes.rewrite import Editor, Rule
from gtco.passes.views import FIRST, permuted


def bordered(edit: Editor, node: Node) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What conv2d `node` reads inside constant zeros joined to its rows and columns.

    Returns the value and the rows and columns of zeros before and after it. Zeros that fill a whole
    window stay: a convolution's own border is narrower than its window.
    """
    x, rows, before, after = node.inputs[0], 2, [0, 0], [0, 0]
    if (turned := permuted(edit, x, FIRST)) is not None:
        x, rows = turned.inputs[0], 1
    while (joined := _joined_zeros(edit, x, rows)) is not None:
        inside, axis, first, last = joined
        reach = (edit.shape(node.inputs[1])[axis + 2] - 1) * node.attrs["dilation"][axis]
        border = node.attrs["padding"][axis]
        if max(before[axis] + first, after[axis] + last) + border > reach:
            break
        x = inside
        before[axis] += first
        after[axis] += last
    if not any((*before, *after)):
        x = node.inputs[0]
    elif rows == 1:
        x = edit.add("permute", x, dims=FIRST[4])
    return x, tuple(before), tuple(after)


def _joined_zeros(edit: Editor, image: str, rows: int) -> tuple[str, int, int, int] | None:
    """What constant zeros are joined to along rows, which are dimension `rows` of `image` (axis 0),
    or columns (axis 1), the axis, and how many zeros stand before and after."""
    concat = edit.producer(image, "concat")
    if concat is None or concat.attrs["dim"] - rows not in (0, 1):
        return None
    inner = [at for at, part in enumerate(concat.inputs) if not edit.is_zero(part)]
    if [edit.dtype(concat.inputs[at]) == concat.outputs[0].dtype for at in inner] != [True]:
        return None
    sizes = [edit.shape(part)[concat.attrs["dim"]] for part in concat.inputs]
    before, after = sum(sizes[: inner[0]]), sum(sizes[inner[0] + 1 :])
    return concat.inputs[inner[0]], concat.attrs["dim"] - rows, before, after


def _pooled_zeros(edit: Editor, node: Node) -> tuple[Node, str, tuple[int, ...]] | None:
    """(max_pool `node`, what it reads inside zeros, its border if they are no pixels)."""
    x, attrs = node.inputs[0], node.attrs
    border = list(attrs["padding"])
    while (joined := _joined_zeros(edit, x, 1)) is not None:
        x, axis, before, after = joined
        border[axis] += before
        if before != after:
            return None
    relu = edit.producer(x, "relu")  # of which no pixel is less than zero
    plain = not attrs["ceil_mode"] and set(attrs["dilation"]) == {1}
    halves = all(2 * p <= k for p, k in zip(border, attrs["kernel"], strict=True))
    if relu is None or x == node.inputs[0] or not (plain and halves):
        return None
    return node, x, tuple(border)


def _pool_inside(edit: Editor, match: tuple[Node, str, tuple[int, ...]]) -> str:
    node, x, border = match
    return edit.add(node.op, x, **{**node.attrs, "padding": border})


POOLINGS: tuple[Rule[Any], ...] = (
    Rule("max_pool(zeros around relu(x)) -> max_pool(relu(x)) with a border", ("max_pool",),
         _pooled_zeros, _pool_inside),
)  # fmt: skip
