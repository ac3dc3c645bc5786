"""A convolution of an image enlarged by repeating its pixels is one of the image as it was.

%u: f16[1,64,128,128] = resize(%x: f16[1,64,64,64], nearest)
%y: f16[1,32,128,128] = conv2d(%u, %w: f16[32,64,3,3])
  ->  %y = interleave(conv2d(%x, %w': f16[128,64,2,2]))

Each result reads few pixels of the image, some of them several times: those of the s x s results
that lie at a pixel's place read 2 x 2 of them where 3 x 3 taps did, each with the sum of the
weights that it had. It is a transposed convolution of stride s. Weights are summed in fp64 and
rounded once. Where the image is infinite and the weights of a pixel differ in sign, the sum was NaN
and is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.phases import phases
from gtco.passes.kept_sums import rounded_keeping_sums
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

FACTORS = (2, 4)
"""By which an image is enlarged: halves and quarters of a place are exact."""


@dataclass(frozen=True)
class _Enlarged:
    """A convolution and what it reads.

    Args:
        node: the convolution.
        image: [N, C, H, W], before it was enlarged.
        factor: by which, along height and width.
        kernel: the weights of its phases.
    """

    node: Node
    image: str
    factor: tuple[int, int]
    kernel: Tensor


def _match(edit: Editor, node: Node) -> _Enlarged | None:
    attrs = node.attrs
    weight = edit.constant(node.inputs[1])
    ones = (*attrs["stride"], *attrs["dilation"], attrs["groups"])
    if (
        weight is None
        or not weight.is_floating_point()
        or set(ones) != {1}
        or any(edit.constant(name) is None for name in node.inputs[2:])
    ):
        return None
    turned = edit.producer(node.inputs[0], "permute")
    resize = None if turned is None else edit.producer(turned.inputs[0], "resize")
    back = None if resize is None else edit.producer(resize.inputs[0], "permute")
    if turned is None or resize is None or back is None:
        return None
    once = edit.read_once(node.inputs[0]) and edit.read_once(turned.inputs[0])
    orders = (tuple(turned.attrs["dims"]), tuple(back.attrs["dims"]))
    if not once or orders != ((0, 3, 1, 2), (0, 2, 3, 1)) or resize.attrs["mode"] != "nearest":
        return None
    before, after = edit.shape(back.inputs[0])[2:], resize.attrs["size"]
    factor = tuple(new // old for old, new in zip(before, after, strict=True))
    given = zip(before, after, factor, resize.attrs["scales"], strict=True)
    if not all(
        by in FACTORS and new == old * by and scale in (None, by) for old, new, by, scale in given
    ):
        return None
    kernel = weight.shape[2:]
    taps = tuple(-(-(size + by - 1) // by) for size, by in zip(kernel, factor, strict=True))
    inside = all(p < k for p, k in zip(attrs["padding"], kernel, strict=True))
    fewer = all(few < size for few, size in zip(taps, kernel, strict=True))
    if not (inside and fewer):
        return None
    summed = phases(_transposed(weight.double(), factor), factor, taps)
    summed = rounded_keeping_sums(summed, weight.dtype)
    if not summed.isfinite().all():
        return None
    return _Enlarged(node, back.inputs[0], (factor[0], factor[1]), summed)


def _replace(edit: Editor, match: _Enlarged) -> str:
    node, (high, wide) = match.node, match.factor
    kernel = edit.add_constant(f"{node.name}_weight", match.kernel)
    bias = [
        edit.add_constant(f"{node.name}_bias", edit.constants[name].repeat(high * wide))
        for name in node.inputs[2:]
    ]
    padding = tuple(each - 1 for each in match.kernel.shape[2:])
    y = edit.add(node.op, match.image, kernel, *bias, **{**node.attrs, "padding": padding})
    n, channels, *_ = node.outputs[0].sizes
    rows, columns = edit.shape(y)[2:]
    y = edit.add("permute", y, dims=(0, 2, 3, 1))
    y = edit.add("reshape", y, shape=(n, rows, columns, high, wide, channels))
    y = edit.add("permute", y, dims=(0, 1, 3, 2, 4, 5))
    y = edit.add("reshape", y, shape=(n, rows * high, columns * wide, channels))
    sizes = node.outputs[0].sizes[2:]
    taps = zip(edit.shape(node.inputs[1])[2:], node.attrs["padding"], strict=True)
    for dim, (size, (k, p)) in enumerate(zip(sizes, taps, strict=True), start=1):
        y = edit.add("slice", y, dim=dim, start=k - 1 - p, end=k - 1 - p + size)
    return edit.add("permute", y, dims=(0, 3, 1, 2))


def _transposed(weight: Tensor, factor: tuple[int, ...]) -> Tensor:
    """The weights [in, out, ...] of the transposed convolution: tap m is the sum of the taps that
    read a pixel of which `factor` copies lie side by side."""
    high, wide = factor
    rows, columns = weight.shape[2:]
    result = weight.new_zeros(*weight.shape[:2], rows + high - 1, columns + wide - 1)
    turned = weight.flip((2, 3))
    for y in range(high):
        for x in range(wide):
            result[:, :, y : y + rows, x : x + columns] += turned
    return result.transpose(0, 1)


RULES: tuple[Rule[Any], ...] = (
    Rule("conv2d(nearest(x), w) -> interleave(conv2d(x, w'))", ("conv2d",), _match, _replace),
)


def convolve_before_enlarging(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
