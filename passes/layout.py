"""Images run with their channels last: a layout is a permute, and permutes move until they cancel.

%c: f16[1,64,56,56] = conv2d(%x, %w, %b)          %n = conv(permute(%x), %w')
%r: f16[1,64,56,56] = relu(%c)              ->    %r = relu(add(%n, %b))
%d: f16[1,64,56,56] = conv2d(%r, %v)              %d = permute(conv(%r, %v'))

A convolution by 1x1 becomes a linear of the pixels, one of several results for each channel is
depthwise over channels that are repeated, and one of an image of few channels becomes a convolution
of its blocks, which are as large as its stride:

%y: f16[1,112,112,64] = conv(%x, %w: f16[64,7,7,3], stride=[2, 2], before=[3, 3])
%s: f16[1,115,115,16] = space_to_depth(%x)     %y = conv(%s, %w': f16[64,4,4,16])

Of volumes, a convolution whose kernel has one frame is one of images, and one whose kernel has one
pixel a frame is one of images whose rows are the frames:

%y: f16[1,64,8,56,56] = conv3d(%x, %w: f16[64,64,1,3,3])    %y = conv(reshape(%x): f16[8,56,56,64])
%y: f16[1,64,8,56,56] = conv3d(%x, %w: f16[64,64,3,1,1])    %y = conv(reshape(%x): f16[1,8,3136,64])

Then each permute from channels last to
channels first moves behind what reads it, until it meets the permute of another convolution, or
the end of the graph. Graphs without convolutions stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.ops import OPS
from gtco.passes import views
from gtco.passes.convolutions import linear_of
from gtco.passes.patches import before_conversion, converted
from gtco.passes.rewrite import Editor, Log, Rule, merge_duplicates, rewrite
from gtco.passes.views import FIRST, LAST
from gtco.passes.zero_borders import POOLINGS, bordered

GROUPED = (0, 3, 4, 1, 2)
"""The permute from groups of channels last, [N, H, W, G, C] to [N, G, C, H, W], and back."""

# -- convolutions ---------------------------------------------------------------------------------


def _convolved(edit: Editor, node: Node) -> Node | None:
    """A convolution; of no input channels torch makes no output channels, whatever the weights."""
    return node if node.outputs[0].sizes[1] == edit.shape(node.inputs[1])[0] else None


def _is_plain(edit: Editor, node: Node) -> bool:
    """Whether each pixel of the result is made of one pixel."""
    attrs = node.attrs
    ones = all(n == 1 for n in (*edit.shape(node.inputs[1])[2:], *attrs["stride"]))
    return ones and not any(attrs["padding"]) and attrs["groups"] == 1


def _channels_last(edit: Editor, node: Node) -> str:
    x, w, *bias = node.inputs
    image = edit.add("permute", x, dims=LAST[4])
    if _is_plain(edit, node):
        y = _linear(edit, image, w, *bias)
    else:
        attrs = dict(node.attrs)
        padding = attrs.pop("padding")
        inner, before, after = bordered(edit, node)
        if inner != x:
            image = edit.add("permute", inner, dims=LAST[4])
        image = _repeated(edit, image, w, attrs["groups"])
        op, kernel = _kernel(edit, w, attrs["groups"], edit.shape(image)[-1])
        if op != "grouped_conv":
            del attrs["groups"]
        before = tuple(n + more for n, more in zip(padding, before, strict=True))
        after = tuple(n + more for n, more in zip(padding, after, strict=True))
        y = edit.add(op, image, kernel, before=before, after=after, **attrs)
        if bias:
            y = edit.add("add", y, *bias)
    return edit.add("permute", y, dims=FIRST[4])


def _linear(edit: Editor, image: str, w: str, *bias: str) -> str:
    """A convolution of one pixel as a linear; `w` is [out, channels, 1, ...]."""
    return linear_of(edit, image, _in_shape(edit, w, edit.shape(w)[:2]), *bias)


def _volume_last(edit: Editor, node: Node) -> str:
    x, w, *bias = node.inputs
    image = edit.add("permute", x, dims=LAST[5])
    if _is_plain(edit, node):
        return edit.add("permute", _linear(edit, image, w, *bias), dims=FIRST[5])
    attrs = dict(node.attrs)
    groups, padding = attrs.pop("groups"), attrs["padding"]
    kernel = edit.shape(w)[2:]
    if kernel[0] == 1 and padding[0] == 0:
        kept: tuple[int, ...] = (1, 2)
    elif kernel[1:] == (1, 1) and not any(padding[1:]):
        kept = (0,)
    else:
        kept = (0, 1, 2)
    for axis in {0, 1, 2} - set(kept):  # along which a pixel is made of one pixel
        if (step := attrs["stride"][axis]) > 1:
            end = edit.shape(image)[axis + 1]
            image = edit.add("slice", image, dim=axis + 1, start=0, end=end, step=step)
    n, frames, height, width, channels = edit.shape(image)
    sizes = {name: tuple(attrs[name][axis] for axis in kept) for name in ("stride", "dilation")}
    border = tuple(padding[axis] for axis in kept)
    taps = tuple(kernel[axis] for axis in kept)
    if kept == (0,):  # frames are the rows of an image of as many columns as a frame has pixels
        sizes = {name: (*size, 1) for name, size in sizes.items()}
        border, taps = (*border, 0), (*taps, 1)
    shapes = {1: (n, frames, height * width), 2: (n * frames, height, width)}
    if len(kept) < 3:
        image = edit.add("reshape", image, shape=(*shapes[len(kept)], channels))
    out, depth = edit.shape(w)[:2]
    image = _repeated(edit, image, w, groups)
    w = _in_shape(edit, w, (out, depth, *taps))
    op, weights = _kernel(edit, w, groups, edit.shape(image)[-1])
    more = {"groups": groups} if op == "grouped_conv" else {}
    y = edit.add(op, image, weights, before=border, after=border, **sizes, **more)
    if bias:
        y = edit.add("add", y, *bias)
    whole = (*(node.outputs[0].sizes[i] for i in (0, 2, 3, 4)), out)
    return edit.add("permute", edit.add("reshape", y, shape=whole), dims=FIRST[5])


def _in_shape(edit: Editor, value: str, shape: tuple[int, ...]) -> str:
    """`value` in another shape; a constant stays one."""
    if edit.shape(value) == shape:
        return value
    tensor = edit.constant(value)
    if tensor is None:
        return edit.add("reshape", value, shape=shape)
    return edit.add_constant(f"{value}_matrix", tensor.reshape(shape))


def _repeated(edit: Editor, image: str, w: str, groups: int) -> str:
    """`image`, with each channel as often as it has results, where it alone makes them."""
    (*pixels, channels), (out, depth, *_) = edit.shape(image), edit.shape(w)
    if groups == 1 or depth > 1 or groups != channels or out == channels:
        return image
    apart = edit.add("reshape", image, shape=(*pixels, channels, 1))
    times = edit.add("expand", apart, shape=(*pixels, channels, out // channels))
    return edit.add("reshape", times, shape=(*pixels, out))


def _kernel(edit: Editor, w: str, groups: int, channels: int) -> tuple[str, str]:
    """The operator that convolves `channels` last in `groups`, and its weights."""
    out, depth, *taps = edit.shape(w)
    last = LAST[len(taps) + 2]
    if groups == 1:
        return "conv", _turned(edit, w, last)
    if depth == 1 and out == channels:
        weight = edit.constant(w)
        if weight is not None:
            flat = weight.flatten(0, 1).movedim(0, -1).contiguous()
            return "depthwise_conv", edit.add_constant(f"{w}_nhwc", flat)
        turned = edit.add("reshape", w, shape=(out, *taps))
        return "depthwise_conv", edit.add("permute", turned, dims=(*range(1, len(taps) + 1), 0))
    return "grouped_conv", _turned(edit, w, last)


def _turned(edit: Editor, value: str, dims: Sequence[int]) -> str:
    """`value` permuted; a constant is moved now."""
    tensor = edit.constant(value)
    if tensor is None:
        return edit.add("permute", value, dims=tuple(dims))
    return edit.add_constant(f"{value}_nhwc", tensor.permute(*dims).contiguous())


# -- permutes move down ---------------------------------------------------------------------------


def _image(edit: Editor, value: str) -> Node | None:
    """The permute that makes `value` of an image with its channels last."""
    node = edit.producer(value, "permute")
    return node if node is not None and node.attrs["dims"] in (*FIRST.values(), GROUPED) else None


def _inverse(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(dims)), key=dims.__getitem__))


@dataclass(frozen=True)
class _Read:
    """`node`, and a permute that makes one of its operands."""

    node: Node
    permute: Node

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimension i of the operand is dims[i] of the image."""
        return tuple(self.permute.attrs["dims"])

    @property
    def image(self) -> str:
        return self.permute.inputs[0]


def _first_is_image(edit: Editor, node: Node) -> _Read | None:
    permute = _image(edit, node.inputs[0]) if node.inputs else None
    return None if permute is None else _Read(node, permute)


def _pointwise(edit: Editor, node: Node) -> _Read | None:
    return _of_rank(edit, node) if node.definition.is_pointwise else None


def _of_rank(edit: Editor, node: Node) -> _Read | None:
    """`node` and the first image of its own rank that it reads.

    Of groups of channels all operands must turn without a permute, which would be as the one that
    moved, so that both would chase each other.
    """
    images = (image for value in node.inputs if (image := _image(edit, value)) is not None)
    rank = node.outputs[0].rank
    match = next((_Read(node, each) for each in images if each.outputs[0].rank == rank), None)
    if match is None or match.dims != GROUPED:
        return match
    return match if all(_turns_freely(edit, value) for value in node.inputs) else None


def _turns_freely(edit: Editor, value: str) -> bool:
    """Whether `value` is as one of groups of channels last without a permute."""
    image = _image(edit, value)
    if edit.constant(value) is not None or (image is not None and image.attrs["dims"] == GROUPED):
        return True
    whole = (1,) * (len(GROUPED) - edit.specs[value].rank) + edit.shape(value)
    moved = [dim for dim in _inverse(GROUPED) if whole[dim] != 1]
    return moved == sorted(moved)


def as_last(edit: Editor, value: str, dims: tuple[int, ...]) -> str:
    """An operand of no more dimensions than `dims` as one of an image with its channels last."""
    image = _image(edit, value)
    if image is not None and image.attrs["dims"] == dims:
        return image.inputs[0]
    sizes = edit.shape(value)
    if all(size == 1 for size in sizes):
        return value
    whole = (1,) * (len(dims) - len(sizes)) + sizes
    tensor, last = edit.constant(value), _inverse(dims)
    if tensor is not None:
        return edit.add_constant(f"{value}_nhwc", tensor.reshape(whole).permute(*last).contiguous())
    if dims == GROUPED:  # `_turns_freely`
        return edit.add("reshape", value, shape=tuple(whole[dim] for dim in last))
    if whole != sizes:
        value = edit.add("reshape", value, shape=whole)
    return edit.add("permute", value, dims=last)


def _pointwise_last(edit: Editor, match: _Read) -> str:
    node, dims = match.node, match.dims
    inputs = [as_last(edit, value, dims) for value in node.inputs]
    return edit.add("permute", edit.add(node.op, *inputs, **node.attrs), dims=dims)


def _reduced_last(edit: Editor, match: _Read) -> str:
    node, first = match.node, match.dims
    dims = tuple(first[dim] for dim in node.attrs["dims"])
    y = edit.add(node.op, match.image, dims=dims, keepdim=node.attrs["keepdim"])
    if node.attrs["keepdim"]:
        return edit.add("permute", y, dims=first)
    kept = [dim for dim in first if dim not in dims]
    order = tuple(sorted(kept).index(dim) for dim in kept)
    return edit.add("permute", y, dims=order) if order != tuple(range(len(kept))) else y


def _rows_last(edit: Editor, match: _Read) -> str:
    y = edit.add(match.node.op, match.image, dim=match.dims[match.node.attrs["dim"]])
    return edit.add("permute", y, dims=match.dims)


def _joined(edit: Editor, node: Node) -> _Read | None:
    match = _of_rank(edit, node)  # a stack of images is one of more channels: `_levels`
    return None if match is None or match.dims == GROUPED else match


def _joined_last(edit: Editor, match: _Read) -> str:
    dims = match.dims
    pieces = [as_last(edit, value, dims) for value in match.node.inputs]
    y = edit.add("concat", *pieces, dim=dims[match.node.attrs["dim"]])
    return edit.add("permute", y, dims=dims)


def _padded_last(edit: Editor, match: _Read) -> str:
    node = match.node
    amounts = {
        name: tuple(node.attrs[name][dim] for dim in _inverse(match.dims))
        for name in ("before", "after")
    }
    y = edit.add(node.op, match.image, **{**node.attrs, **amounts})
    return edit.add("permute", y, dims=match.dims)


def _sliced_last(edit: Editor, match: _Read) -> str:
    attrs = match.node.attrs
    y = edit.add("slice", match.image, **{**attrs, "dim": match.dims[attrs["dim"]]})
    return edit.add("permute", y, dims=match.dims)


def _levels(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    """A reshape, and the concat whose dimension it joins with the one behind."""
    concat = edit.producer(node.inputs[0], "concat")
    if concat is None or not edit.read_once(node.inputs[0]):
        return None
    sizes = list(concat.outputs[0].sizes)
    dim = concat.attrs["dim"] % len(sizes)
    joined = [*sizes[:dim], math.prod(sizes[dim : dim + 2]), *sizes[dim + 2 :]]
    same = dim + 1 < len(sizes) and list(node.outputs[0].sizes) == joined
    return (node, concat) if same else None


def _levels_joined(edit: Editor, match: tuple[Node, Node]) -> str:
    _, concat = match
    dim = concat.attrs["dim"] % concat.outputs[0].rank
    pieces = []
    for value in concat.inputs:
        sizes = edit.shape(value)
        joined = (*sizes[:dim], math.prod(sizes[dim : dim + 2]), *sizes[dim + 2 :])
        pieces.append(edit.add("reshape", value, shape=joined))
    return edit.add("concat", *pieces, dim=dim)


# -- images of few channels ------------------------------------------------------------------------

PIXEL_BYTES = 16
"""What the copy engine takes the pixels of an image in multiples of."""
FEW = 16
"""Channels of an image that is worth packing."""
FEW_TAPS = 16
"""Of blocks of 4 bytes an element. Of more, each of its own 16 bytes, the copy engine takes longer
than threads do that copy element by element: 7 x 7 pixels of RAFT's flow took 11.1 us, not 8.9."""


def _few_channels(edit: Editor, node: Node) -> Node | None:
    x, w = node.inputs
    channels, size = edit.shape(x)[-1], edit.dtype(x).itemsize
    weight = edit.constant(w)
    packs = channels <= FEW and channels * size % PIXEL_BYTES
    plain = all(n == 1 for n in node.attrs["dilation"])
    if not packs or not plain or weight is None:
        return None
    return node if size == 2 or math.prod(_taps(node, weight)) <= FEW_TAPS else None


def _taps(node: Node, weight: Tensor) -> tuple[int, int]:
    """(down, across) of blocks as large as its stride."""
    high, wide = weight.shape[-3:-1]
    down, across = node.attrs["stride"][-2:]
    return -(-high // down), -(-wide // across)


def _of_blocks(edit: Editor, node: Node) -> str:
    x, w = node.inputs
    weight = edit.constants[w]
    out, *frames, high, wide, depth = weight.shape
    attrs = {name: tuple(node.attrs[name]) for name in ("stride", "before", "after", "dilation")}
    block = attrs["stride"][-2:]
    taps = _taps(node, weight)
    pixels = node.outputs[0].sizes[-3:-1]
    size = tuple(n + k - 1 for n, k in zip(pixels, taps, strict=True))
    unit = PIXEL_BYTES // weight.dtype.itemsize
    channels = -(-depth * math.prod(block) // unit) * unit
    x, conversion = before_conversion(edit, x)
    lead = edit.shape(x)[:-3]
    images = edit.add("reshape", x, shape=(math.prod(lead), *edit.shape(x)[-3:])) if frames else x
    image = edit.add(
        "space_to_depth",
        images,
        block=block,
        before=attrs["before"][-2:],
        size=size,
        channels=channels,
    )
    image = converted(edit, image, conversion)
    if frames:
        image = edit.add("reshape", image, shape=(*lead, *size, channels))
    (down, right), (rows, columns) = taps, block
    whole = F.pad(weight, (0, 0, 0, right * columns - wide, 0, down * rows - high))
    cut = whole.reshape(out, *frames, down, rows, right, columns, depth)
    flat = cut.transpose(-4, -3).flatten(-3)  # a tap's rows, columns and channels are its channels
    flat = F.pad(flat, (0, channels - depth * math.prod(block)))
    none = {"stride": (1, 1), "before": (0, 0), "after": (0, 0), "dilation": (1, 1)}
    given = {name: (*attrs[name][:-2], *pair) for name, pair in none.items()}
    return edit.add("conv", image, edit.add_constant(f"{w}_blocks", flat), **given)


_CONVOLUTIONS: tuple[Rule[Any], ...] = (
    Rule("conv2d(x, w, b) -> permute(conv(permute(x), permute(w)) + b)", ("conv2d",),
         _convolved, _channels_last),
    Rule("conv3d(x, w, b) -> permute(conv(permute(x), permute(w)) + b)", ("conv3d",),
         _convolved, _volume_last),
)  # fmt: skip

_ALONG = {name: op.row for name, op in OPS.items() if op.row and op.axes == "dims"}
_REDUCED = tuple(name for name, row in _ALONG.items() if not row.whole and not row.counts)
_ROWS = tuple(name for name, row in _ALONG.items() if row.whole)
"""Reductions to an element, and to a row again: of the dimensions that their attributes name."""

_MOVES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("f(permute(x), y) -> permute(f(x, permute(y)))", (), _pointwise, _pointwise_last),
    Rule("reduce(permute(x)) -> permute(reduce(x))", _REDUCED, _first_is_image, _reduced_last),
    Rule("rows(permute(x)) -> permute(rows(x))", _ROWS, _first_is_image, _rows_last),
    Rule("concat(permute(x), y) -> permute(concat(x, permute(y)))", ("concat",),
         _joined, _joined_last),
    Rule("reshape(concat(x, y)) -> concat(reshape(x), reshape(y)) of the next dimension joined",
         ("reshape",), _levels, _levels_joined),
    Rule("pad(permute(x)) -> permute(pad(x))", ("pad", "extend"), _first_is_image, _padded_last),
    Rule("slice(permute(x)) -> permute(slice(x))", ("slice",), _first_is_image, _sliced_last),
)  # fmt: skip


_STEMS: tuple[Rule[Any], ...] = (
    Rule("conv(x, w) of few channels -> conv(space_to_depth(x), w')", ("conv",),
         _few_channels, _of_blocks),
)  # fmt: skip


def channels_last(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    if not any(node.definition.of_images for node in graph.nodes):
        return graph
    for rules in (_CONVOLUTIONS, _MOVES, POOLINGS):
        graph = rewrite(graph, rules, log)
    return merge_duplicates(graph, log)


def pack_few_channels(graph: Graph, log: Log | None = None) -> Graph:
    """A convolution of an image of few channels becomes one of its blocks, whose pixels are copied
    in multiples of 16 bytes."""
    return merge_duplicates(rewrite(graph, _STEMS, log), log)
