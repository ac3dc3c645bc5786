"""The mean of an image's pixels becomes that of means which the kernel of the pixels leaves.

    %y[n, 1, 1, c] = mean(%x[n, h, w, c], dims=[1, 2])
      ->  %b = box_means(%x, box=[8, 8])
          %y = cast(mean(%b, dims=[1, 2]), dtype=f16)

Squeeze-and-excitation asks for it (Hu et al., CVPR 2018). Whoever computes the pixels has a box of
them in registers and shared memory: nobody reads the image once more. A depthwise convolution has
boxes along both sides, a product runs of `RUN` pixels, whatever their image's width is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

MAKERS = ("depthwise_conv", "conv", "linear")
"""Of pixels whose kernels leave means."""
RUN = 16
"""Pixels of a run: the rows of a fragment of `wgmma`."""
SIDES = ((8, 7, 4, 2, 1), (8, 7, 5, 4))
"""Pixels of a box down and across, the most first: of each, many tiles are whole boxes."""
LEAST_PIXELS = 16
"""Of a box: the means of fewer are as many bytes as half of the image."""
LARGE_BYTES = 2**22
"""Of a product's result: a smaller one comes from tiles that leave no means."""


def why_not_boxed(anchor: Node, means: Node, sizes: Sequence[int]) -> str | None:
    """Why the kernel of `anchor` does not leave `means`, whose operand has `sizes`; None if it
    does."""
    box, made = means.attrs["box"], anchor.outputs[0]
    if anchor.op == "depthwise_conv":
        fits = means.op == "box_means" and len(box) == 2 and tuple(sizes) == made.sizes
        return None if fits else f"the kernel of {anchor.op} has no boxes of {list(box)}"
    fits = box == (RUN,) and sizes[-1] == made.sizes[-1] and math.prod(sizes) == made.numel
    if anchor.op in ("conv", "linear") and anchor.attrs.get("groups", 1) == 1 and fits:
        return None
    return f"the epilogue of {anchor.op} leaves no means of boxes of {list(box)}"


@dataclass(frozen=True)
class _Boxes:
    """A mean of pixels, what it reads, as what, and the boxes that it falls into."""

    mean: Node
    shape: tuple[int, ...]
    box: tuple[int, ...]


def _match(edit: Editor, mean: Node) -> _Boxes | None:
    value = mean.inputs[0]
    shape, rank = edit.shape(value), edit.specs[value].rank
    dims = sorted(dim % rank for dim in mean.attrs["dims"])
    if rank < 3 or dims != list(range(1, rank - 1)) or edit.dtype(value) not in FLOATS:
        return None
    maker, pixels = maker_of(edit, value), math.prod(shape[1:-1])
    if maker is None or not mean.outputs[0].numel:
        return None
    if maker.op == "depthwise_conv":
        if rank != 4 or maker.outputs[0].sizes != shape:
            return None
        box = tuple(
            next((side for side in sides if size % side == 0), 0)
            for size, sides in zip(shape[1:-1], SIDES, strict=True)
        )
        return _Boxes(mean, shape, box) if math.prod(box) >= LEAST_PIXELS else None
    if pixels % RUN or edit.specs[value].nbytes < LARGE_BYTES:
        return None
    return _Boxes(mean, (shape[0], pixels, shape[-1]), (RUN,))


def maker_of(edit: Editor, value: str) -> Node | None:
    """The convolution or linear that `value` is computed from, point by point."""
    numel, waiting = edit.specs[value].numel, [value]
    while waiting:
        node = edit.producer(waiting.pop())
        if node is None or node.outputs[0].numel != numel:
            continue
        alone = node.attrs.get("groups", 1) == 1
        if node.op in MAKERS:
            return node if alone else None
        if node.op == "reshape" or (node.definition.is_pointwise and not node.definition.of_pairs):
            waiting += node.inputs
    return None


def _replace(edit: Editor, match: _Boxes) -> str:
    mean, value = match.mean, match.mean.inputs[0]
    if edit.shape(value) != match.shape:
        value = edit.add("reshape", value, shape=match.shape)
    value = edit.add("box_means", value, box=match.box)
    # Of one box, too: a gate begins with a mean (passes/squeeze.py).
    dims = tuple(range(1, edit.specs[value].rank - 1))
    value = edit.add("mean", value, dims=dims, keepdim=mean.attrs["keepdim"])
    dtype, sizes = mean.outputs[0].dtype, mean.outputs[0].sizes
    if dtype != torch.float32:
        value = edit.add("cast", value, dtype=dtype)
    return value if edit.shape(value) == sizes else edit.add("reshape", value, shape=sizes)


RULES: tuple[Rule[_Boxes], ...] = (
    Rule("mean(x, pixels) -> mean(box_means(x), boxes)", ("mean",), _match, _replace,
         never_refused),
)  # fmt: skip


def mean_of_boxes(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
