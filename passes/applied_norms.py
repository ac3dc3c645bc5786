"""Convolutions of few channels apply the norm of groups ahead of them as they copy their image.

    %s: f32[n, chunks, groups, 2] = group_stats(%x)
    %n = normalize_groups(%x, %s, %g, %b)   %r = relu(%n)   %y = conv(%r, %w)   %z = conv(%r, %v)
      ->  %scale: f32[n, 1, 1, c] = mul(rsqrt(...), %g)   %shift = sub(%b, mul(%mean, %scale))
          %y = conv(relu(scale_shift(%x, %scale, %shift)), %w)
          %z = conv(relu(scale_shift(%x, %scale, %shift)), %v)

A norm of so large an image reads and writes all of it, for a few instructions an element. Every
convolution that reads it computes them again (`gtco.passes.prologues`): only where each has a
kernel that does so, and where that is predicted to take less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gtco.ir.graph import Graph, Group, Node
from gtco.ir.spec import HALVES
from gtco.passes.dataflow import Flow, make_group, materialize_views
from gtco.passes.joined import joined_by
from gtco.passes.prologues import is_element_by_element, prologue_of
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

LARGE_BYTES = 2**23
"""Of an image whose norm takes longer than two kernels of a few numbers."""
NUMBERS_US = 2.0
"""Of the kernel that makes scales and shifts of the statistics."""
WORTH = 2 / 3
"""Of the norm's time, which has to be spared: drafts of the products are off by as much."""


@dataclass(frozen=True)
class _Norm:
    """A norm and who reads it.

    Args:
        nodes: the norm and the pointwise nodes behind it, in order.
        value: what the last of them makes.
        readers: convolutions, concats, and linears of an image's pixels.
        convs: the products that are readers or read these concats alone.
    """

    nodes: tuple[Node, ...]
    value: str
    readers: tuple[Node, ...]
    convs: tuple[Node, ...]


def apply_norms(
    graph: Graph,
    log: Log | None = None,
    *,
    refusal: Callable[[Group], str | None],
    price: Callable[[Group], float | None],
) -> Graph:
    """See the module's docstring.

    Args:
        graph: after all other passes.
        log: as of any pass.
        refusal: why no kernel computes a group, or None if one does.
        price: predicted microseconds of a group's best program, or None if it has none.
    """
    norms = [found for node in graph.nodes if (found := _norm(graph, node)) is not None]
    if not norms:
        return graph
    made: dict[str, list[str]] = {}
    trial = Flow(materialize_views(_rewritten(graph, norms, made)))
    flow = Flow(materialize_views(graph))
    chosen = [
        norm
        for norm in norms
        if _gains(norm, flow, trial, made.get(norm.value, []), refusal, price)
    ]
    return _rewritten(graph, chosen, {}, log) if chosen else graph


def _norm(graph: Graph, node: Node) -> _Norm | None:
    if node.op != "normalize_groups":
        return None
    (spec,) = node.outputs
    if spec.dtype not in HALVES or spec.nbytes < LARGE_BYTES:
        return None
    nodes, made = [node], {node.values[0]}
    for other in graph.nodes[graph.nodes.index(node) + 1 :]:
        whole = {name for name in other.inputs if graph.specs[name].sizes == spec.sizes}
        if whole and whole <= made and is_element_by_element(graph, other, spec.sizes):
            nodes.append(other)
            made.update(other.values)
    inside = {each.name for each in nodes}
    left = [
        value
        for value in made
        if value in graph.outputs or any(user.name not in inside for user in graph.users[value])
    ]
    if len(left) != 1 or left[0] in graph.outputs:
        return None
    readers = tuple(user for user in graph.users[left[0]] if user.name not in inside)
    convs = [_conv(graph, reader, left[0]) for reader in readers]
    whole_convs = tuple(conv for conv in convs if conv is not None)
    if len(whole_convs) < len(convs):
        return None
    return _Norm(tuple(nodes), left[0], readers, whole_convs)


def _is_of_pixels(graph: Graph, reader: Node) -> bool:
    """Whether `reader` is a linear of known weights of an image's pixels: a convolution of one."""
    of_image = reader.op == "linear" and graph.specs[reader.inputs[0]].rank in (4, 5)
    return of_image and reader.inputs[1] in graph.constants


def _conv(graph: Graph, reader: Node, value: str) -> Node | None:
    """The product whose image `value` is, or a piece of it."""
    if reader.inputs.count(value) != 1:
        return None
    if reader.definition.convolves or _is_of_pixels(graph, reader):
        return reader if reader.inputs[0] == value else None
    users = graph.users[reader.values[0]] if reader.op == "concat" else ()
    if len(users) != 1 or reader.values[0] in graph.outputs:
        return None
    (conv,) = users
    convolves = conv.definition.convolves
    return conv if convolves and joined_by(graph, conv) is reader else None


def _gains(
    norm: _Norm,
    flow: Flow,
    trial: Flow,
    made: Sequence[str],
    refusal: Callable[[Group], str | None],
    price: Callable[[Group], float | None],
) -> bool:
    """Whether all that read the norm have kernels that apply it, and take less time."""
    before: list[Group] = [make_group(flow, _named(flow, norm.nodes))]
    for conv in norm.convs:
        concat = joined_by(flow.graph, conv)
        before.append(make_group(flow, _named(flow, filter(None, (concat, conv)))))
    after: list[Group] = []
    readers = [trial.graph.producers.get(value) for value in made]
    if len(readers) < len(norm.readers):
        return False
    for reader in readers:
        if reader is None:  # a concat of two such pieces, which was made again
            return False
        conv = reader if reader.op != "concat" else trial.readers[reader.values[0]][0]
        prologue = prologue_of(trial.graph, conv)
        if prologue is None:
            return False
        joins = (reader,) if reader is not conv else ()
        after.append(make_group(trial, (*prologue.nodes, *joins, conv)))
        if refusal(after[-1]) is not None:
            return False
    before_us, after_us = (
        [price(group) or math.inf for group in groups] for groups in (before, after)
    )
    norm_us, *alone_us = before_us
    return sum(after_us) + NUMBERS_US < sum(alone_us) + (1 - WORTH) * norm_us


def _named(flow: Flow, nodes: Iterable[Node]) -> list[Node]:
    """The nodes of the flow that are called as `nodes` are."""
    return [flow.compute[flow.index[node.name]] for node in nodes]


def _rewritten(
    graph: Graph, norms: Iterable[_Norm], made: dict[str, list[str]], log: Log | None = None
) -> Graph:
    """`graph` with these norms applied; `made` takes, by the value of each, what the readers that
    apply it make."""
    by_value = {norm.value: norm for norm in norms}
    numbers: dict[str, tuple[str, str]] = {}

    def match(edit: Editor, reader: Node) -> tuple[Node, _Norm] | None:
        found = [by_value[name] for name in reader.inputs if name in by_value]
        return (reader, found[0]) if found else None

    def replace(edit: Editor, match: tuple[Node, _Norm]) -> str:
        reader, norm = match
        # As they are by now: what they read may be a convolution that was made again.
        first, *behind = (edit.nodes[node.name] for node in norm.nodes)
        if norm.value not in numbers or numbers[norm.value][0] not in edit.specs:
            numbers[norm.value] = _numbers(edit, first)
        new = {first.values[0]: edit.add("scale_shift", first.inputs[0], *numbers[norm.value])}
        for node in behind:
            new.update(zip(node.values, _again(edit, node, new), strict=True))
        if reader.op == "linear":
            conv, value = _of_one_pixel(edit, reader, new[norm.value])
        else:
            (conv,) = (value,) = _again(edit, reader, new)
        made.setdefault(norm.value, []).append(conv)
        return value

    rules = (
        Rule("conv(normalize_groups(x)) -> conv(scale_shift(x))",
             ("conv", "grouped_conv", "linear", "concat"), match, replace),
    )  # fmt: skip
    return rewrite(graph, rules, log)


def _again(edit: Editor, node: Node, renamed: Mapping[str, str]) -> tuple[str, ...]:
    """`node` once more, of the values that `renamed` has for its own."""
    return edit.add_node(node.op, [renamed.get(name, name) for name in node.inputs], node.attrs)


def _of_one_pixel(edit: Editor, linear: Node, image: str) -> tuple[str, str]:
    """The convolution of `image` that the linear is, and that with the bias."""
    _, name, *bias = linear.inputs
    ones = (1,) * (edit.specs[image].rank - 2)
    none = (0,) * len(ones)
    weight = edit.constants[name]
    taps = edit.add_constant(f"{name}_taps", weight.reshape(weight.shape[0], *ones, -1))
    conv = edit.add("conv", image, taps, stride=ones, before=none, after=none, dilation=ones)
    return conv, edit.add("add", conv, bias[0]) if bias else conv


def _numbers(edit: Editor, norm: Node) -> tuple[str, str]:
    """What an element of each channel is multiplied by, and what is added then: f32[n, 1.., c]."""
    x, stats, *affine = norm.inputs
    images, *sides, channels = edit.shape(x)
    _, chunks, groups, _ = edit.shape(stats)
    depth = channels // groups
    count = math.prod(sides) * depth // chunks
    means, squares = (
        edit.add(
            "reshape",
            edit.add("slice", stats, dim=3, start=at, end=at + 1),
            shape=(images, chunks, groups),
        )
        for at in (0, 1)
    )
    mean = edit.add("mean", means, dims=(1,), keepdim=True)
    apart = edit.add("square", edit.add("sub", means, mean))
    spread = edit.add("add", edit.add("mul", squares, other=1.0 / count), apart)
    variance = edit.add("mean", spread, dims=(1,), keepdim=True)
    scale = edit.add("rsqrt", edit.add("add", variance, other=norm.attrs["eps"]))
    if depth > 1:
        mean, scale = (_of_channels(edit, value, depth) for value in (mean, scale))
    if affine:
        scale = edit.add("mul", scale, _wide(edit, affine[0]))
    shift = edit.add("mul", mean, scale)
    if len(affine) > 1:
        shift = edit.add("sub", _wide(edit, affine[1]), shift)
    else:
        shift = edit.add("neg", shift)
    shape = (images, *(1 for _ in sides), channels)
    scale, shift = (edit.add("reshape", value, shape=shape) for value in (scale, shift))
    return scale, shift


def _of_channels(edit: Editor, value: str, depth: int) -> str:
    """f32[n, 1, groups], once for each channel of a group."""
    images, _, groups = edit.shape(value)
    value = edit.add("reshape", value, shape=(images, groups, 1))
    value = edit.add("expand", value, shape=(images, groups, depth))
    return edit.add("reshape", value, shape=(images, 1, groups * depth))


def _wide(edit: Editor, value: str) -> str:
    """The weights or the bias of a norm in f32."""
    constant = edit.constant(value)
    if constant is not None:
        return edit.add_constant(f"{value}_wide", constant.to(torch.float32))
    return edit.add("cast", value, dtype=torch.float32)
