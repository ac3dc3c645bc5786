"""Sums of convolutions of one image are one convolution, beside what is added of the image itself.

%a = conv2d(%x, %w: f16[64,64,3,3], padding=[1, 1])
%b = conv2d(%x, %v: f16[64,64,1,1])                    ->   %c = conv2d(%x, %u, %t, padding=[1, 1])
%n = batch_norm(%x, ...)                                    %y = add(%c, mul(%x, %s))
%y = add(add(%a, %b), %n)

Factors and shifts by channel on the way, batch norms among them, go into the weights, which are
summed in fp64 and rounded once (RepVGG, CVPR 2021, which adds the image in the weights too: they
are rounded as coarsely as its factor then, in each channel the same way). Each convolution that is
left out is a kernel. Where %x is infinite and the branches' weights differ in sign, the sum of the
branches is NaN and the one convolution infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.passes.convolutions import batch_norm_factors, is_by_channel
from gtco.passes.kept_sums import rounded_keeping_sums
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

RULE = "conv2d(x, w) + conv2d(x, v) -> conv2d(x, w + v)"


def merge_branches(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    sums = _Branches(graph).largest()
    if not sums:
        return graph

    def match(edit: Editor, node: Node) -> _Sum | None:
        return sums.get(node.name)

    return rewrite(graph, (Rule(RULE, (), match, _merged),), log)


@dataclass(frozen=True)
class _Sum:
    """What takes the place of `node`: a convolution as `like`, the largest of those it is made of.

    `scale` is that of the image itself, which is added; None if it is not.
    """

    node: Node
    like: Node
    weight: Tensor
    bias: Tensor
    scale: Tensor | None


def _merged(edit: Editor, match: _Sum) -> str:
    # The image may have been such a sum itself.
    image = edit.nodes[match.like.name].inputs[0]
    weight = edit.add_constant(f"{match.node.name}_weight", match.weight)
    bias = edit.add_constant(f"{match.node.name}_bias", match.bias)
    y = edit.add(match.like.op, image, weight, bias, **match.like.attrs)
    if match.scale is None:
        return y
    if (match.scale == 1).all():
        return edit.add("add", y, image)
    dtype = match.node.outputs[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    shape = (1, -1, *(1,) * (match.weight.dim() - 2))
    scale = edit.add_constant(f"{match.node.name}_scale", match.scale.to(wide).reshape(shape))
    if wide == dtype:
        return edit.add("add", y, edit.add("mul", image, scale))
    scaled = edit.add("mul", edit.add("cast", image, dtype=wide), scale)
    both = edit.add("add", edit.add("cast", y, dtype=wide), scaled)  # rounded once, as the sum
    return edit.add("cast", both, dtype=dtype)


@dataclass(frozen=True)
class _Linear:
    """What is linear in an image [N, C, H, W], or a volume, one channel of results at a time.

    Args:
        image: the value.
        terms: convolutions of it that are added, and a factor of each channel of their results.
        like: of these the one whose taps are all there are; None if there are no terms.
        scale: (channels), of the image itself, which is added; None if it is not.
        shift: (channels), what is added to all pixels.
    """

    image: str
    terms: tuple[tuple[Node, Tensor], ...]
    like: Node | None
    scale: Tensor | None
    shift: Tensor

    def times(self, factor: Tensor) -> _Linear:
        """By a factor of each channel."""
        terms = tuple((node, by * factor) for node, by in self.terms)
        scale = None if self.scale is None else self.scale * factor
        return replace(self, terms=terms, scale=scale, shift=self.shift * factor)

    def plus(self, other: _Linear, graph: Graph) -> _Linear | None:
        """The sum of two of one image, if it is one."""
        like = self.like or other.like
        if self.like is not None and other.like is not None:
            pair = ((self.like, other.like), (other.like, self.like))
            like = next((a for a, b in pair if _has_taps_of(a, b, graph)), None)
            if like is None:
                return None
        scale = self.scale if other.scale is None else other.scale
        if self.scale is not None and other.scale is not None:
            scale = self.scale + other.scale
        terms = (*self.terms, *other.terms)
        return _Linear(self.image, terms, like, scale, self.shift + other.shift)

    def summed(self, graph: Graph, node: Node) -> _Sum | None:
        """As one convolution, with weights summed in fp64 and rounded once, if they stay close."""
        like = self.like
        assert like is not None
        of = graph.constants[like.inputs[1]]
        weight = torch.zeros(of.shape, dtype=torch.float64)
        taps = _taps(like, graph)
        for term, factor in self.terms:
            added = graph.constants[term.inputs[1]].double().cpu()
            places = map(_places, _taps(term, graph), taps)
            by_channel = factor.reshape(-1, *(1,) * (added.dim() - 1))
            weight[(slice(None), slice(None), *tuple(places))] += added * by_channel
        dtype = node.outputs[0].dtype
        rounded, bias = rounded_keeping_sums(weight, dtype), self.shift.to(dtype)
        by_channel = (rounded.double() - weight).flatten(1).norm(dim=1)
        close = by_channel <= torch.finfo(dtype).eps * weight.flatten(1).norm(dim=1)
        if not close.all() or not bias.isfinite().all():
            return None
        return _Sum(node, like, rounded, bias, self.scale)


def _taps(conv: Node, graph: Graph) -> list[range]:
    """Where taps lie along each axis, in pixels from the one that gives a window its place."""
    attrs, kernel = conv.attrs, graph.constants[conv.inputs[1]].shape[2:]
    return [
        range(-padding, size * step - padding, step)
        for size, padding, step in zip(kernel, attrs["padding"], attrs["dilation"], strict=True)
    ]


def _places(some: range, among: range) -> slice:
    """Which of `among` the taps `some` are."""
    first, last = among.index(some[0]), among.index(some[-1])
    return slice(first, last + 1, max((last - first) // max(len(some) - 1, 1), 1))


def _has_taps_of(one: Node, other: Node, graph: Graph) -> bool:
    """Whether convolution `one` can take the weights of `other`, a tap for each."""
    same = all(one.attrs[key] == other.attrs[key] for key in ("stride", "groups"))
    pairs = zip(_taps(one, graph), _taps(other, graph), strict=True)
    return same and all(tap in taps for taps, others in pairs for tap in others)


class _Branches:
    """Finds the largest sums of convolutions of one image."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._found: dict[str, _Linear | None] = {}
        for node in graph.nodes:
            self._found[node.name] = self._derived(node)

    def largest(self) -> dict[str, _Sum]:
        """By node what takes its place, where no sum that it is part of has one."""
        sums = {
            name: made
            for name, linear in self._found.items()
            if linear is not None and len(linear.terms) > 1
            if (made := linear.summed(self._graph, self._graph.producers[name])) is not None
        }
        return {name: made for name, made in sums.items() if not self._is_part(name, sums)}

    def _is_part(self, name: str, sums: Mapping[str, _Sum]) -> bool:
        """Whether a sum of `sums` is made of `name`'s."""
        users = self._graph.users[name]
        while len(users) == 1 and name not in self._graph.outputs:
            larger, made = self._found[users[0].name], self._found[name]
            if larger is None or made is None or larger.image != made.image:
                return False
            if users[0].name in sums:
                return True
            name, users = users[0].name, self._graph.users[users[0].name]
        return False

    def _derived(self, node: Node) -> _Linear | None:
        (spec, *others) = node.outputs
        if others or not spec.dtype.is_floating_point or spec.rank not in (4, 5):
            return None
        if node.op in ("conv2d", "conv3d"):
            return self._convolution(node)
        if node.op == "batch_norm":
            factors = batch_norm_factors(self._graph.constants, node)
            made = factors and self._operand(node.inputs[0], node)
            if not factors or not made:
                return None
            scaled = made.times(factors[0].cpu())
            return replace(scaled, shift=scaled.shift + factors[1].cpu())
        if node.op in ("add", "sub", "mul") and len(node.inputs) in (1, 2):
            return self._arithmetic(node)
        return None

    def _convolution(self, node: Node) -> _Linear | None:
        x, *constants = node.inputs
        if any(name not in self._graph.constants for name in constants):
            return None
        channels = node.outputs[0].sizes[1]
        weight, *bias = (self._graph.constants[name] for name in constants)
        if len(weight) != channels or 0 in weight.shape or not weight.is_floating_point():
            return None
        one = torch.ones(channels, dtype=torch.float64)
        shift = bias[0].double().cpu() if bias else torch.zeros_like(one)
        return _Linear(x, ((node, one),), node, None, shift)

    def _arithmetic(self, node: Node) -> _Linear | None:
        first, *rest = node.inputs
        factor = self._by_channel(rest[0], node) if rest else _number(node)
        if factor is None and rest and node.op != "sub":  # the constant may come first
            factor, first = self._by_channel(first, node), rest[0]
        sign = -1.0 if node.op == "sub" else 1.0
        if factor is not None:
            made = self._operand(first, node)
            if made is None:
                return None
            if node.op == "mul":
                return made.times(factor)
            return replace(made, shift=made.shift + sign * factor)
        if node.op == "mul" or not rest:
            return None
        return self._sum(node, sign)

    def _sum(self, node: Node, sign: float) -> _Linear | None:
        """Of two operands, of which one may be the image of the other."""
        pair = [self._operand(value, node) for value in node.inputs]
        for of, by in ((0, 1), (1, 0)):
            inner = pair[by]
            if inner is not None and inner.image == node.inputs[of] and inner.terms:
                pair[of] = self._itself(node.inputs[of], node)
        a, b = pair
        if a is None or b is None or a.image != b.image:
            return None
        return a.plus(b.times(torch.full_like(b.shift, sign)), self._graph)

    def _operand(self, value: str, node: Node) -> _Linear | None:
        """`value` as `node` reads it; what others read too is an image of its own."""
        spec = self._graph.specs[value]
        if spec != node.outputs[0]:
            return None
        producer = self._graph.producers.get(value)
        alone = len(self._graph.users[value]) == 1 and value not in self._graph.outputs
        made = self._found[producer.name] if producer is not None and alone else None
        return made or self._itself(value, node)

    def _itself(self, value: str, node: Node) -> _Linear:
        channels = node.outputs[0].sizes[1]
        one = torch.ones(channels, dtype=torch.float64)
        return _Linear(value, (), None, one, torch.zeros_like(one))

    def _by_channel(self, value: str, node: Node) -> Tensor | None:
        """The constant `value` as a number for each channel of what `node` makes."""
        constant, spec = self._graph.constants.get(value), node.outputs[0]
        if constant is None:
            return None
        if constant.numel() != 1 and not is_by_channel(constant, spec):
            return None
        flat = constant.double().cpu().flatten().expand(spec.sizes[1])
        return flat if flat.isfinite().all() else None


def _number(node: Node) -> Tensor | None:
    other: Any = node.attrs.get("other")
    if not isinstance(other, (int, float)):
        return None
    number = torch.full((node.outputs[0].sizes[1],), float(other), dtype=torch.float64)
    return number if number.isfinite().all() else None
