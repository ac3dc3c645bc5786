"""A weighed sum of samples is taken where they are sampled: deformable attention in one kernel.

%a: f16[8,300,4,32] = grid_sample(%x, %p)
%b: f16[8,300,4,32] = grid_sample(%y, %q)
%c: f16[8,300,8,32] = concat(%a, %b, dim=2)    ->    %s = sample_sum(%x, %p, %y, %q, %w')
%m = mul(%c, %w: f16[8,300,8,1])
%s: f16[8,300,32] = sum(%m, dims=[2])

Samples are not rounded on their way into the sum, and none of them is stored.

An image is read as it was before it was widened to its points' type, as `deform_conv2d` does it:

%i: f32[1,8,8,64] = cast(%x: f16[1,8,8,64])    ->    %a: f32[1,9,9,64] = grid_sample(%x, %p)
%a: f32[1,9,9,64] = grid_sample(%i, %p)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.ir.views import through_views
from gtco.passes.rewrite import Editor, Log, Rule, rewrite


@dataclass(frozen=True)
class _Sum:
    """Samples, and the value that weighs each [N, P, Q, 1]."""

    node: Node
    samples: tuple[Node, ...]
    weights: str


def _samples(edit: Editor, value: str) -> tuple[Node, ...] | None:
    """The samplings that `value` joins point by point, if nobody else reads them."""
    node = edit.producer(value, "concat", "grid_sample")
    if node is None or not edit.read_once(value):
        return None
    if node.op == "grid_sample":
        return (node,)
    if node.attrs["dim"] % node.outputs[0].rank != 2:
        return None
    once = [piece for piece in node.inputs if edit.read_once(piece)]
    samples = tuple(made for piece in once if (made := edit.producer(piece, "grid_sample")))
    return samples if len(samples) == len(node.inputs) else None


def _weighed(edit: Editor, node: Node) -> _Sum | None:
    product = edit.producer(node.inputs[0], "mul")
    if product is None or len(product.inputs) != 2 or not edit.read_once(product.values[0]):
        return None
    if product.outputs[0].rank != 4 or [dim % 4 for dim in node.attrs["dims"]] != [2]:
        return None
    for value, weights in (product.inputs, product.inputs[::-1]):
        samples = _samples(edit, value)
        same = edit.shape(value) == product.outputs[0].sizes
        if samples is not None and same and edit.shape(weights)[-1:] == (1,):
            return _Sum(node, samples, weights)
    return None


def _differ(edit: Editor, match: _Sum) -> str | None:
    first, *others = match.samples
    if any(sample.attrs != first.attrs for sample in others):
        return "the images are sampled in different ways"
    if len({edit.dtype(sample.inputs[0]) for sample in match.samples}) > 1:
        return "the images are of several dtypes"
    dtypes = {sample.outputs[0].dtype for sample in match.samples}
    if len(dtypes | {edit.dtype(match.weights), match.node.outputs[0].dtype}) > 1:
        return "samples, weights and their sum are of several dtypes"
    return None


def _summed(edit: Editor, match: _Sum) -> str:
    images, rows, _, _ = match.samples[0].outputs[0].sizes
    points = sum(sample.outputs[0].sizes[2] for sample in match.samples)
    weights, whole = match.weights, (images, rows, points, 1)
    if edit.shape(weights) != whole:
        weights = edit.add("expand", weights, shape=whole)
    weights = edit.add("reshape", weights, shape=whole[:3])
    levels = [value for sample in match.samples for value in sample.inputs]
    y = edit.add("sample_sum", *levels, weights, **match.samples[0].attrs)
    if match.node.attrs["keepdim"]:
        y = edit.add("reshape", y, shape=match.node.outputs[0].sizes)
    return y


@dataclass(frozen=True)
class _Widened:
    """Samples of an image that is `views` of the narrower `source`."""

    node: Node
    source: str
    views: tuple[Node, ...]


def _widened(edit: Editor, node: Node) -> _Widened | None:
    base, views = through_views(edit.producer, node.inputs[0])
    cast = edit.producer(base, "cast")
    if cast is None or edit.dtype(node.inputs[1]) != edit.dtype(base):
        return None
    source, wide = edit.dtype(cast.inputs[0]), edit.dtype(base)
    if source not in FLOATS or torch.promote_types(source, wide) != wide or source == wide:
        return None
    return _Widened(node, cast.inputs[0], views)


def _of_source(edit: Editor, match: _Widened) -> str:
    image = edit.add_views(match.source, match.views)
    return edit.add("grid_sample", image, match.node.inputs[1], **match.node.attrs)


_RULES: tuple[Rule[Any], ...] = (
    Rule("grid_sample(cast(x), p) -> grid_sample(x, p)", ("grid_sample",), _widened, _of_source),
    Rule("sum(concat(grid_sample(x, p), grid_sample(y, q)) * w) -> sample_sum(x, p, y, q, w)",
         ("sum",), _weighed, _summed, _differ),
)  # fmt: skip


def sum_samples(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, _RULES, log)
