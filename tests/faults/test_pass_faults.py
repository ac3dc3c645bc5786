"""Faults planted in passes, each of which a test of meaning must catch; the twin must pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from gtco.ir.graph import Graph, Group
from gtco.ir.interpreter import interpret
from gtco.passes import (
    channels,
    columns,
    expand_attention,
    gated,
    horizontal,
    normalization,
    pulled,
    read_channels,
    rotary,
    sampling,
    split_norm,
    stored_columns,
    upsampling,
)
from gtco.passes.canonicalize import canonicalize
from gtco.passes.convolutions import fold_convolutions
from gtco.passes.layout import channels_last
from gtco.passes.taps_as_columns import columns_of_taps
from tests.pass_checks import COMPUTE, captured, check, random
from tests.unit.test_passes_read_channels import alternating
from tests.unit.test_passes_stored_columns import shuffled
from tests.unit.test_passes_taps import convolved

Case = tuple[Graph, tuple[Tensor, ...]]
EPS = 1e-3
taps = sys.modules[columns_of_taps.__module__]
"""`gtco.passes` has a function where others have a module of the name."""
convolutions = sys.modules[fold_convolutions.__module__]


def small_norm() -> Case:
    """A layer norm spelled out, of rows whose spread is small against epsilon, and of one without
    any."""
    x = 1 + 0.01 * random(4, 8)
    x[0] = 3.0

    def norm(c: nn.Module, x: Tensor) -> Tensor:
        apart = x - x.mean(-1, keepdim=True)
        return apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + EPS)

    graph, args = captured(norm, x)
    return canonicalize(graph), args


def small_split() -> Case:
    """A layer norm that goes into a linear, of the same rows."""
    x = (1 + 0.01 * random(4, 64)).half()
    x[0] = 3.0
    weights = {name: random(*shape).half() for name, shape in {"g": (64,), "w": (8, 64)}.items()}

    def norm(c: nn.Module, x: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (64,), c.g, None, EPS), c.w)

    return captured(norm, x, **weights)


def small_root_mean_square() -> Case:
    """A norm by the root mean square that goes into a linear, of the same rows."""

    def norm(c: nn.Module, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (64,), c.g, EPS), c.w)

    weights = {name: random(*shape).half() for name, shape in {"g": (64,), "w": (8, 64)}.items()}
    graph, args = captured(norm, (1 + 0.01 * random(4, 64)).half(), **weights)
    return canonicalize(graph), args


def mean_of_another() -> Case:
    """What would be a layer norm, were the mean that of x."""

    def norm(c: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        apart = x - z.mean(-1, keepdim=True)
        return apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + EPS)

    graph, args = captured(norm, random(4, 8), 2 + random(4, 8, seed=1))
    return canonicalize(graph), args


def spread_of_another() -> Case:
    """The same, were the spread that of x."""

    def norm(c: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        apart = x - x.mean(-1, keepdim=True)
        return apart * torch.rsqrt((z * z).mean(-1, keepdim=True) + EPS)

    graph, args = captured(norm, random(4, 8), 2 + random(4, 8, seed=1))
    return canonicalize(graph), args


def geglu() -> Case:
    """Half of a linear, scaled and shifted, times the GELU of the other."""

    def run(c: nn.Module, x: Tensor) -> Tensor:
        value, gate = (F.linear(x, c.w).relu() * c.factors).chunk(2, -1)
        return F.linear(value * F.gelu(gate), c.out)

    weights = {"w": (16, 8), "factors": (16,), "out": (4, 8)}
    tensors = {name: random(*shape, seed=len(name)).float() for name, shape in weights.items()}
    graph, args = captured(run, random(3, 8).float(), **tensors)
    return canonicalize(graph), args


def patches() -> Case:
    """Patches of an image of which the model is given the pixels."""

    def rows(c: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(x, c.w, c.b, (2, 4)).flatten(2).mT

    weights = {"w": random(5, 3, 2, 4), "b": random(5)}
    return captured(rows, random(2, 8, 12, 3).permute(0, 3, 1, 2), **weights)


def siblings() -> Case:
    """Linears of one tensor, of equal and of other widths, each with a bias of its own or none."""

    def linears(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, c.q, c.qb), F.linear(x, c.k, c.kb), F.linear(x, c.v)
        return (q @ k.mT) @ v

    tensors = {name: random(*shape, seed=ord(name[0]) + len(name)) for name, shape in {
        "q": (16, 8), "k": (16, 8), "v": (24, 8), "qb": (16,), "kb": (16,),
    }.items()}  # fmt: skip
    return captured(linears, random(1, 5, 8), **tensors)


def rotated_heads() -> Case:
    """Attention of queries and keys that are rotated by halves behind a class token."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, last = x[:, :, 1:].chunk(2, -1)
        turned = x[:, :, 1:] * cos + torch.cat([-last, first], -1) * sin
        return torch.cat([x[:, :, :1], turned], 2)

    def attend(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (c.q, c.k, c.v))
        q, k = (turn(y, c.cos, c.sin) for y in (q, k))
        return F.scaled_dot_product_attention(q, k, v)

    shapes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "cos": (4, 8), "sin": (4, 8)}
    tensors = {name: random(*shape, seed=ord(name[0])) for name, shape in shapes.items()}
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    graph, args = captured(attend, random(2, 5, 16).float(), **tensors)
    return canonicalize(graph), args


def enlarged() -> Case:
    """A convolution of an enlarged image."""
    weights = {"w": random(3, 2, 3, 3), "b": random(3, seed=1)}

    def net(c: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), c.w, c.b, padding=1)

    return captured(net, random(2, 2, 4, 5), **weights)


def turned_halves() -> Case:
    """Samples of a turned image of halves, at points of fp32."""
    image, points = random(1, 3, 4, 5).half(), random(1, 2, 3, 2, seed=1).float()

    def net(c: nn.Module, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x.float().transpose(2, 3), grid, align_corners=False)

    return captured(net, image, points)


def few_results() -> Case:
    """A dilated convolution of three results."""
    graph = convolved(3, (3, 3), dilation=(1, 2))
    return graph, tuple(random(*spec.sizes) for spec in graph.inputs.values())


def cut_deconvolution() -> Case:
    """What is multiplied behind a transposed convolution, channel by channel."""
    weights = {"w": random(3, 4, 4, 4), "s": random(4, 1, 1, seed=1)}

    def net(c: nn.Module, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, c.w, None, 2, 1) * c.s

    graph, args = captured(net, random(1, 3, 16, 17), **weights)
    return channels_last(graph), args


def classes() -> Case:
    """Scores of 13 classes, returned as an enlarged image and multiplied once more; one pixel of
    what they are made of is infinite."""
    below = {"w": -random(13, 6, 3, 3).abs().float() / 9, "b": 5 + random(13).float()}

    def net(c: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, c.w, c.b, padding=1).relu()
        return F.interpolate(y, scale_factor=2, mode="bilinear"), F.conv2d(1 - y, c.v)

    x = random(1, 6, 7, 9, dtype=torch.float32).abs()
    x[0, 2, 3, 3] = float("inf")
    graph, args = captured(net, x, v=random(8, 13, 1, 1).float(), **below)
    return channels_last(graph), args


def attending(function: Callable[..., Tensor]) -> Case:
    """Attention of one head."""
    graph, args = captured(function, *(random(1, 1, 5, 9, seed=seed) for seed in range(3)))
    return canonicalize(graph), args


def masked() -> Case:
    """Attention of which one query sees no key."""
    seen = random(5, 5) > 0
    seen[2] = False
    return attending(lambda c, *args: F.scaled_dot_product_attention(*args, seen, scale=0.02))


def causal() -> Case:
    return attending(lambda c, *args: F.scaled_dot_product_attention(*args, is_causal=True))


FAULTS: dict[str, tuple[ModuleType, str, Callable[[], Case], str, str]] = {
    "epsilon left out of layer norm": (
        normalization, "fuse_normalization", small_norm, "eps=match[1]", "eps=0.0",
    ),
    "epsilon left out of the statistics that are merged": (
        split_norm, "split_norms", small_split, '"eps": eps}', '"eps": 0.0}',
    ),
    "the mean forgotten in a mean of squares": (
        split_norm, "split_norms", small_root_mean_square,
        'edit.add("mul", mean, mean)', 'edit.add("sub", mean, mean)',
    ),
    "the mean of another tensor": (
        normalization, "fuse_normalization", mean_of_another,
        "if _row_mean(edit, mean) != x or", "if _row_mean(edit, mean) is None or",
    ),
    "the spread of another tensor": (
        normalization, "fuse_normalization", spread_of_another,
        "return _squared(edit, squares) == deviation", "return True",
    ),
    "keys in another order of columns than queries": (
        rotary, "fuse_rotary", rotated_heads, "(of_k, k.order)", "(of_k, k.order.flip(0))",
    ),
    "angles in the order of columns before partners became neighbours": (
        rotary, "fuse_rotary", rotated_heads, "[..., order]", "",
    ),
    "a rotation that turns the other way": (
        rotary, "fuse_rotary", rotated_heads,
        "sin += torch.where(other, factor, 0.0)", "sin -= torch.where(other, factor, 0.0)",
    ),
    "an image sampled before it is turned": (
        sampling, "sum_samples", turned_halves,
        "match.source, match.views", "match.source, match.views[1:]",
    ),
    "an enlarged image's kernel that is not turned": (
        upsampling, "convolve_before_enlarging", enlarged, "weight.flip((2, 3))", "weight",
    ),
    "cut a pixel further on": (
        upsampling, "convolve_before_enlarging", enlarged, "start=k - 1 - p, end=k - 1 - p + size",
        "start=k - 2 - p, end=k - 2 - p + size",
    ),
    "rows and columns exchanged": (
        upsampling, "convolve_before_enlarging", enlarged, "dims=(0, 1, 3, 2, 4, 5)",
        "dims=(0, 2, 3, 1, 4, 5)",
    ),
    "each channel's bias beside itself": (
        upsampling, "convolve_before_enlarging", enlarged, ".repeat(high * wide)",
        ".repeat_interleave(high * wide)",
    ),
    "other channels than those that are real": (
        channels, "pad_channels", classes, "start=0, end=spec.sizes[-1]",
        "start=1, end=1 + spec.sizes[-1]",
    ),
    "padding that is multiplied and not zero": (
        channels, "pad_channels", classes, "if multiplied else product", "if False else product",
    ),
    "columns of weights beside the padding": (
        channels, "pad_channels", classes, "beside = (0, columns,", "beside = (columns, 0,",
    ),
    "taps of other columns": (
        taps, "columns_of_taps", few_results, "start=tap * results, end=(tap + 1) * results",
        "start=0, end=results",
    ),
    "taps of the first pixel": (
        taps, "columns_of_taps", few_results, "start = tap * match.apart", "start = tap",
    ),
    "results beside their taps": (
        taps, "columns_of_taps", few_results, "permute(2, 0, 1, 3)", "permute(0, 2, 1, 3)",
    ),
    "factors of other channels": (
        pulled, "pull_pointwise", cut_deconvolution, "[channels.to(given.device)]",
        "[channels.to(given.device).flip(0)]",
    ),
    "columns in the order of before": (
        stored_columns, "order_stored_columns", shuffled,
        "[order.to(edit.constants[name].device)]", "",
    ),
    "columns by the strides of other parts": (
        stored_columns, "order_stored_columns", shuffled,
        "[stride for _, stride in parts]", "[stride for _, stride in parts[::-1]]",
    ),
    "channels in the order of before": (
        read_channels, "order_read_channels", alternating, "known[:, order.to(known.device)]",
        "known",
    ),
    "channels by parts in another order": (
        read_channels, "order_read_channels", alternating, "permute(match.order).flatten()",
        "permute(match.order[::-1]).flatten()",
    ),
    "slopes of other channels": (
        stored_columns, "order_stored_columns", shuffled,
        "match.run, value, order)", "match.run, value, order.flip(0))",
    ),
    "values beside gates of other columns": (
        gated, "pair_gates", geglu, ".reshape(2, count).t().flatten()", ".flip(0)",
    ),
    "numbers of gates in the order of before": (
        gated, "pair_gates", geglu, "made[order])", "torch.arange(2 * count))",
    ),
    "what is computed of the gates": (
        gated, "pair_gates", geglu, "start=0, end=2 * count", "start=1, end=2 * count",
    ),
    "columns of a patch in the order of before": (
        convolutions, "fold_convolutions", patches, "matrix = matrix.permute(0, 2, 3, 1)", "pass",
    ),
    "pixels of a patch by columns": (
        convolutions, "fold_convolutions", patches,
        "dims=(0, 1, 3, 2, 4, 5)", "dims=(0, 1, 3, 4, 2, 5)",
    ),
    "scores that are not scaled": (
        expand_attention, "expand_attention", masked, 'other=node.attrs["scale"]', "other=1.0",
    ),
    "keys beyond a causal query": (
        expand_attention, "expand_attention", causal, ".tril()", ".tril(1)",
    ),
    "a mask where it forbids": (
        expand_attention, "expand_attention", masked,
        '"where", mask, scores, _scalar(edit, "forbidden", -math.inf, wide)',
        '"where", mask, _scalar(edit, "forbidden", -math.inf, wide), scores',
    ),
    "NaN of a query that sees no key": (
        expand_attention, "expand_attention", masked, "return bool(forbidden.all(-1).any())",
        "return False",
    ),
    "linears in another order than their readers": (
        horizontal, "join_siblings", siblings,
        "for node in linears], ", "for node in linears[::-1]], ",
    ),
}  # fmt: skip


def planted(module: ModuleType, old: str, new: str) -> ModuleType:
    """`module` with `old` replaced in its source."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, "the fault's place has moved"
    wrong = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__name__, "exec"), wrong.__dict__)
    return wrong


def judged(
    step: Callable[[Graph], Graph], cases: Iterable[tuple[Graph, Sequence[Tensor]]]
) -> tuple[list[Graph], list[str]]:
    """(the graphs that `step` makes rightly of `cases`, what `check` says of the others)."""
    right: list[Graph] = []
    found: list[str] = []
    for graph, args in cases:
        try:
            right.append(check(step, graph, args))
        except AssertionError as error:
            found.append(str(error))
    return right, found


def no_attention(group: Group) -> str | None:
    return "no attention" if group.compute[0].op == "attention" else None


def judge(module: ModuleType, name: str, case: Callable[[], Case]) -> None:
    graph, args = case()
    step = getattr(module, name)
    if name == "expand_attention":
        step = partial(step, refusal=no_attention)
    if name == "columns_of_taps":
        with pytest.MonkeyPatch.context() as patch:  # small images are worth it
            patch.setattr(module, "LEAST_FLOPS", 1)
            check(step, graph, args)
        return
    if name != "split_norms":
        check(step, graph, args)
        return
    result = step(graph, None)  # which rounds weights that it has multiplied
    assert result.nodes != graph.nodes
    for a, b in zip(
        interpret(result, args, dtype=COMPUTE), interpret(graph, args, dtype=COMPUTE), strict=True
    ):
        assert_close(a, b, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_pass_itself_keeps_the_meaning(fault: str) -> None:
    module, name, case, _, _ = FAULTS[fault]
    judge(module, name, case)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    module, name, case, old, new = FAULTS[fault]
    with pytest.raises(AssertionError, match="not close"):
        judge(planted(module, old, new), name, case)


@pytest.mark.parametrize("parts", ["weights", "biases"])
def test_a_fault_in_columns_of_several_linears_is_caught(
    parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged = f"torch.cat([{parts}[1], {parts}[0], *{parts}[2:]])"
    wrong = planted(columns, f"torch.cat({parts})", exchanged)
    monkeypatch.setattr(horizontal, "linear_of", wrong.linear_of)
    with pytest.raises(AssertionError, match="not close"):
        judge(horizontal, "join_siblings", siblings)
