"""Images with their channels last: permutes cancel, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.passes import run_pipeline
from gtco.passes.layout import channels_last, pack_few_channels
from tests.pass_checks import Function, Golden, captured, check, ops, random


def _permutes(graph: object) -> int:
    return str(graph).count("= permute(")


def test_a_residual_block_has_permutes_at_its_ends_alone(golden: Golden) -> None:
    def block(m: Function, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, m.w, m.b, stride=2, padding=1))
        z = F.relu(F.conv2d(y, m.v, padding=1) + m.c + y)
        return F.conv2d(z, m.u)

    x = random(2, 3, 9, 7)
    tensors = {
        "w": random(8, 3, 3, 3, seed=1),
        "b": random(8, seed=2),
        "v": random(8, 8, 3, 3, seed=3),
        "c": random(8, 1, 1, seed=4),
        "u": random(5, 8, 1, 1, seed=5),
    }
    graph, args = captured(block, x, **tensors)
    result = check(channels_last, graph, args)
    assert _permutes(result) == 2
    assert ops(result)["conv"] == 2 and ops(result)["linear"] == 1
    golden("passes/channels_last.txt", result)


def test_permutes_move_behind_what_reads_an_image() -> None:
    def model(m: Function, x: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, m.w, padding=1)
        gate = torch.sigmoid(y.mean((2, 3), keepdim=True))
        joined = torch.cat((y * gate, F.pad(y[:, :2], (0, 0, 0, 0, 1, 0)), x), 1)
        attention = torch.softmax(y, 1) + torch.softmax(y, 3) + torch.cumsum(y, 1)
        sums = y.sum((1,)) + y.amax(1), y.sum((0, 2)), y.mean((0, 1, 2, 3))
        return F.conv2d(joined, m.v), attention, *sums, y[:, :, 1:3, ::2] * 2

    x = random(2, 3, 6, 5)
    graph, args = captured(model, x, w=random(4, 3, 3, 3, seed=1), v=random(2, 10, 1, 1, seed=2))
    result = check(channels_last, graph, args)
    inner = {"concat", "pad", "softmax", "cumsum", "sum", "mean", "amax", "mul", "sigmoid"}
    for node in result.nodes:
        for name in node.inputs:
            made = result.producers.get(name)
            from_image = made is not None and made.attrs.get("dims") == (0, 3, 1, 2)
            assert not (node.op in inner and from_image), str(node)


@pytest.mark.parametrize(("dim", "joined"), [(-2, True), (2, True), (-1, False)])
def test_no_permute_stands_around_stacked_images_that_a_reshape_joins(
    dim: int, joined: bool
) -> None:
    def model(m: Function, x: Tensor) -> Tensor:
        y = F.conv2d(x, m.w, padding=1)
        start = min(dim % 5, 3)  # behind the last dimension, a stack's elements alternate
        return F.conv2d(torch.stack((y, y.sigmoid()), dim).flatten(start, start + 1), m.w)

    graph, args = captured(model, random(2, 3, 6, 5), w=random(3, 3, 3, 3, seed=1))
    result = check(channels_last, graph, args)
    (concat,) = (node for node in result.nodes if node.op == "concat")
    assert (concat.outputs[0].rank == 4) == joined
    assert _permutes(result) == 2


def splits(c: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """ResNeSt's split attention: channels in two groups, and a weight of each."""
    groups = F.conv2d(x, c.w, padding=1, groups=2).relu().unflatten(1, (2, -1))
    gates = F.conv2d(groups.sum(1).mean((2, 3), keepdim=True), c.v).unflatten(1, (2, -1)).softmax(1)
    y = (groups * gates.reshape(2, 2, 4, 1, 1)).sum(1)
    return y, groups * x[:, :8].unflatten(1, (2, -1))


def test_groups_of_channels_stay_last() -> None:
    tensors = {"w": random(8, 4, 3, 3, seed=1), "v": random(8, 4, 1, 1, seed=2)}
    graph, args = captured(splits, random(2, 8, 5, 7), **tensors)
    result = check(channels_last, graph, args)
    (conv,) = (node for node in result.nodes if node.op == "grouped_conv")
    sums = [node for node in result.nodes if node.op == "sum"]
    assert {result.specs[node.inputs[0]].sizes for node in sums} == {(2, 5, 7, 2, 4)}
    assert conv.outputs[0].sizes == (2, 5, 7, 8)


def test_operands_of_every_rank_are_turned_with_the_image() -> None:
    def model(m: Function, x: Tensor, row: Tensor, whole: Tensor) -> Tensor:
        y = F.conv2d(x, m.w, padding=1)
        y = torch.where(y > m.scalar, y * m.row + row, y + m.plane)
        return F.conv2d(y + m.whole - whole, m.w)

    x = random(2, 3, 6, 5)
    graph, args = captured(
        model,
        x,
        random(5, seed=7),
        random(1, 3, 6, 5, seed=8),
        w=random(3, 3, 3, 3, seed=1),
        scalar=random(1, 1, seed=2),
        row=random(5, seed=3),
        plane=random(6, 5, seed=4),
        whole=random(2, 3, 6, 5, seed=5),
    )
    check(channels_last, graph, args)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("times", [2, 3])
def test_several_results_of_each_channel_are_depthwise(axes: int, times: int) -> None:
    convolve = F.conv2d if axes == 2 else F.conv3d

    def model(m: Function, x: Tensor) -> Tensor:
        y = convolve(x.relu(), m.w, m.b, stride=2, padding=1, groups=6)
        return y.relu()

    x = random(2, 6, *(5, 8, 7)[-axes:])
    w, b = random(6 * times, 1, *(3, 3, 3)[-axes:], seed=1), random(6 * times, seed=2)
    graph, args = captured(model, x, w=w, b=b)
    result = check(channels_last, graph, args)
    assert ops(result)["depthwise_conv"] == 1


def test_strides_dilations_groups_and_computed_weights() -> None:
    def model(m: Function, x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(x, w, None, (2, 1), (2, 3), (1, 2))
        return F.conv2d(y, m.v, m.b, groups=2) + F.conv2d(y, w[:, :, :1, :1].repeat(1, 1, 1, 1))

    x, w = random(2, 4, 11, 8), random(4, 4, 3, 3, seed=1)
    graph, args = captured(model, x, w, v=random(4, 2, 1, 1, seed=2), b=random(4, seed=3))
    check(channels_last, graph, args)


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding"),
    [(3, (7, 7), 2, 3), (3, (7, 7), 4, 2), (1, (3, 3), 1, 1), (5, (4, 3), (2, 3), (0, 1)),
     (3, (16, 8), (16, 8), 0), (3, (2, 2), 3, 1)],
)  # fmt: skip
def test_images_of_few_channels_are_packed(
    channels: int, kernel: tuple[int, int], stride: Any, padding: Any
) -> None:
    graph, args = captured(
        lambda m, x: F.conv2d(x, m.w, m.b, stride, padding),
        random(2, channels, 23, 18, dtype=torch.float16),
        w=random(8, channels, *kernel, seed=1, dtype=torch.float16),
        b=random(8, seed=2, dtype=torch.float16),
    )
    result = check(pack_few_channels, check(channels_last, graph, args), args)
    assert ops(result) == {"space_to_depth": 1, "conv": 1, "add": 1}
    (conv,) = (node for node in result.nodes if node.op == "conv")
    assert result.specs[conv.inputs[0]].sizes[3] % 8 == 0


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "packed"),
    [(3, 7, 2, 4), (3, 3, 1, 4), (2, 7, 1, 0), (4, 3, 1, 0)],
    ids=["a stem", "of small windows", "of many taps", "whole pixels"],
)
def test_images_of_floats(channels: int, kernel: int, stride: int, packed: int) -> None:
    """Pixels of 16 bytes are four floats; windows of many of them are copied as they are."""
    graph, args = captured(
        lambda m, x: F.conv2d(x, m.w, None, stride, kernel // 2),
        random(1, channels, 19, 18, dtype=torch.float32),
        w=random(8, channels, kernel, kernel, seed=1, dtype=torch.float32),
    )
    result = check(pack_few_channels, check(channels_last, graph, args), args)
    assert ops(result)["space_to_depth"] == (packed > 0)
    (conv,) = (node for node in result.nodes if node.op == "conv")
    assert result.specs[conv.inputs[0]].sizes[3] % max(1, packed) == 0


@pytest.mark.parametrize(("shift", "ahead"), [(0.0, 0), (1.0, 1)], ids=["zeros stay", "of them 1"])
def test_packing_converts_on_the_way(shift: float, ahead: int) -> None:
    """Pixels that the border lacks are zeros behind the conversion."""
    graph, args = captured(
        lambda m, x: F.conv2d((x / 255 + shift).half(), m.w, None, 2, 3),
        torch.randint(0, 256, (2, 3, 19, 18), dtype=torch.uint8),
        w=random(8, 3, 7, 7, seed=1, dtype=torch.float16),
    )
    result = check(pack_few_channels, check(channels_last, graph, args), args)
    made = [node.op for node in result.nodes if not node.definition.is_view]
    assert made.index("space_to_depth") == (0 if not ahead else made.index("cast") + 1)
    assert made[-1] == "conv"


def test_a_graph_without_convolutions_stays() -> None:
    def model(m: Function, x: Tensor) -> Tensor:
        return torch.relu(x.permute(0, 3, 1, 2)) + 1

    graph, _ = captured(model, random(2, 3, 4, 5))
    assert channels_last(graph) is graph


def test_the_pipeline_joins_convolutions_into_one_layout() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()
    for norm in (model[1], model[4]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    model = model.double()
    graph, args = captured(lambda m, x: model(x), random(2, 3, 8, 6))
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert _permutes(result) == 1


@pytest.mark.parametrize("depth", (8, 1, 3))
@pytest.mark.parametrize("pad", ((0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1)))
def test_zeros_around_an_image_are_the_border_of_its_convolution(
    depth: int, pad: tuple[int, ...]
) -> None:
    channels = 3 if depth == 3 else 8

    def model(m: Function, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, pad), m.w, stride=2, groups=channels // depth)

    graph, args = captured(model, random(2, channels, 9, 8), w=random(8, depth, 3, 3, seed=1))
    assert ops(graph)["concat"] == 2
    assert "concat" not in ops(check(lambda g, log: run_pipeline(g, log=log), graph, args))


@pytest.mark.parametrize("pad", ((0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1)))
@pytest.mark.parametrize("groups", (1, 8))
def test_zeros_around_an_image_with_its_channels_last_are_too(
    pad: tuple[int, ...], groups: int
) -> None:
    def model(m: Function, x: Tensor) -> Tensor:
        y = F.pad(x.relu(), (0, 0, *pad)).permute(0, 3, 1, 2)
        return F.conv2d(y, m.w, stride=2, groups=groups).permute(0, 2, 3, 1)

    graph, args = captured(model, random(2, 9, 8, 8), w=random(8, 8 // groups, 3, 3, seed=1))
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert set(ops(result)) == {"relu", "conv" if groups == 1 else "depthwise_conv"}


@pytest.mark.parametrize("last", (True, False))
def test_zeros_around_what_is_not_negative_are_the_border_of_its_pooling(last: bool) -> None:
    """As Keras pads ahead of a pooling of its own, whose border would be -inf."""

    def model(m: Function, x: Tensor) -> Tensor:
        y = F.conv2d(x, m.w).relu()
        if last:
            y = F.pad(y.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).permute(0, 3, 1, 2)
        else:
            y = F.pad(y, (1, 1, 1, 1))
        return F.max_pool2d(y, 3, 2)

    graph, args = captured(model, random(2, 8, 9, 8), w=random(8, 8, 2, 2, seed=1))
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert "concat" not in ops(result) and "pad" not in ops(result)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "what may be negative": lambda y: F.max_pool2d(F.pad(y, (1, 1, 1, 1)), 3, 2),
    "one side": lambda y: F.max_pool2d(F.pad(y.relu(), (0, 1, 0, 1)), 3, 2),
    "more than half of a window": lambda y: F.max_pool2d(F.pad(y.relu(), (2, 2, 2, 2)), 3, 2),
    "a border of ones": lambda y: F.max_pool2d(F.pad(y.relu(), (1, 1, 1, 1), value=1.0), 3, 2),
    "windows that begin in it": lambda y: F.max_pool2d(
        F.pad(y.relu(), (1, 1, 1, 1)), 2, 2, ceil_mode=True
    ),
    "taps apart": lambda y: F.max_pool2d(F.pad(y.relu(), (1, 1, 1, 1)), 2, 1, dilation=3),
}


@pytest.mark.parametrize("pool", POOLS)
def test_other_zeros_around_an_image_that_is_pooled_stay(pool: str) -> None:
    graph, args = captured(
        lambda m, x: POOLS[pool](F.conv2d(x, m.w)),
        -random(2, 8, 9, 8),
        w=random(8, 8, 2, 2, seed=1),
    )
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert {"concat", "pad"} & set(ops(result))


@pytest.mark.parametrize("columns", (0, 1))
def test_a_border_of_channels_stays(columns: int) -> None:
    def model(m: Function, x: Tensor) -> Tensor:
        y = F.pad(x, (1, 0, 0, columns)).permute(0, 3, 1, 2)
        return F.conv2d(y, m.w, padding=1)

    graph, args = captured(model, random(1, 9, 8, 7), w=random(8, 8, 3, 3, seed=1))
    assert "concat" in ops(check(channels_last, graph, args))


@pytest.mark.parametrize(("pad", "value"), (((0, 1, 0, 1), 1.0), ((0, 0, 0, 3), 0.0)))
def test_a_border_of_ones_or_as_large_as_a_window_stays(pad: tuple[int, ...], value: float) -> None:
    def model(m: Function, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, pad, value=value), m.w)

    graph, args = captured(model, random(1, 8, 9, 8), w=random(8, 8, 3, 3, seed=1))
    assert "concat" in ops(check(channels_last, graph, args))
