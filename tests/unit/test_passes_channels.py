"""Padded channels: what is padded, what keeps its width and why, and that values stay."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.passes.channels import RULE, pad_channels
from gtco.passes.layout import channels_last
from gtco.passes.rewrite import Log
from tests.pass_checks import captured, check, random, reasons

Net = Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, ...]]


def weights(inner: int = 13, taps: int = 3) -> dict[str, Tensor]:
    return {
        "w": random(inner, 6, taps, taps, seed=1),
        "v": random(16, inner, taps, taps, seed=2),
        "b": random(inner, seed=3),
        "row": random(1, inner, 1, 1, seed=4),
        "w2": random(inner, 6, taps, taps, seed=5),
        "depth": random(inner, 1, taps, taps, seed=6),
        "square": random(inner, inner, 1, 1, seed=7),
        "bottom": random(8, inner, seed=8),
        "rows": random(inner, 6, seed=9),
        "again": random(inner, 16, taps, taps, seed=11),
        "below": -random(inner, 6, taps, taps, seed=10).abs(),
    }


def graph_of(net: Net, dtype: torch.dtype = torch.float32, inner: int = 13) -> tuple[Graph, Tensor]:
    """A network of images with its channels last, before channels are padded."""
    tensors = {name: tensor.to(dtype) for name, tensor in weights(inner).items()}
    x = random(2, 6, 7, 9, dtype=dtype)
    graph, _ = captured(net, x, **tensors)
    return channels_last(graph), x


def first(m: nn.Module, x: Tensor, w: str = "w") -> Tensor:
    return F.conv2d(x, getattr(m, w), m.b, padding=1)


def last(m: nn.Module, x: Tensor) -> Tensor:
    return F.conv2d(x, m.v, padding=1)


def widths(graph: Graph) -> set[int]:
    """The channels of what kernels make; views have other dimensions last."""
    made = [node.outputs[0] for node in graph.nodes if not node.definition.is_view]
    return {spec.sizes[-1] for spec in made if spec.rank > 1}


PADDED: dict[str, Net] = {
    "activation": lambda m, x: last(m, torch.relu(first(m, x))),
    "sigmoid": lambda m, x: last(m, torch.sigmoid(first(m, x))),
    "products in a row": lambda m, x: last(m, F.conv2d(last(m, first(m, x)), m.again, padding=1)),
    "sum": lambda m, x: last(m, first(m, x) + first(m, x, "w2")),
    "row": lambda m, x: last(m, first(m, x) * m.row + m.row),
    "number": lambda m, x: last(m, 1.5 - first(m, x)),
    "depthwise": lambda m, x: last(m, F.conv2d(first(m, x), m.depth, padding=1, groups=13)),
    "sigmoid, depthwise": lambda m, x: last(
        m, F.conv2d(first(m, x).sigmoid(), m.depth, padding=1, groups=13)
    ),
    "pool": lambda m, x: last(m, F.max_pool2d(F.avg_pool2d(first(m, x), 3, 2, 1), 2)),
    "resize": lambda m, x: last(m, F.interpolate(first(m, x), scale_factor=2, mode="bilinear")),
    "1x1": lambda m, x: last(m, F.conv2d(F.conv2d(first(m, x), m.square), m.square)),
    "gate": lambda m, x: last(
        m, (y := first(m, x)) * torch.sigmoid(F.conv2d(y.mean((2, 3), keepdim=True), m.square))
    ),
    "head": lambda m, x: F.linear(first(m, x).amax((2, 3)), m.bottom),
    "zeros around": lambda m, x: last(m, F.pad(first(m, x), (1, 2, 0, 1))),
    "pixels": lambda m, x: last(m, first(m, x)[:, :, 1:, ::2]),
}


def resized(y: Tensor, mode: str = "bilinear") -> Tensor:
    return F.interpolate(y, scale_factor=2, mode=mode)


RETURNED: dict[str, Net] = {
    "bilinear": lambda m, x: resized(first(m, x)),
    "nearest": lambda m, x: resized(first(m, x), "nearest"),
    "pool": lambda m, x: F.max_pool2d(first(m, x), 2),
    "activation behind": lambda m, x: resized(first(m, x)).sigmoid(),
    "pixels in a row": lambda m, x: resized(first(m, x)).flatten(2),
    "pixels last": lambda m, x: resized(first(m, x)).flatten(2).transpose(1, 2),
    "some rows": lambda m, x: resized(first(m, x))[:, :, 3:9],
    "one image": lambda m, x: resized(first(m, x))[1:],
    "two": lambda m, x: (resized(first(m, x)), resized(first(m, x, "w2"), "nearest")),
    "before and behind": lambda m, x: (y := first(m, x), resized(y)),
    "read by a product too": lambda m, x: (y := first(m, x).relu(), last(m, y)),
    "as it is and permuted": lambda m, x: (y := resized(first(m, x)), y.transpose(2, 3)),
    "channels last": lambda m, x: resized(first(m, x)).permute(0, 2, 3, 1),
}


@pytest.mark.parametrize(
    "net",
    [*PADDED.values(), *RETURNED.values()],
    ids=[*(f"between products: {name}" for name in PADDED),
         *(f"returned: {name}" for name in RETURNED)],
)  # fmt: skip
def test_channels_between_products_and_of_returned_images_are_padded(net: Net) -> None:
    graph, x = graph_of(net)
    log = Log()

    result = check(pad_channels, graph, (x,), log)

    assert 13 in widths(graph)
    assert 13 not in widths(result)
    assert log.applied[RULE] >= 1


@pytest.mark.parametrize("net", RETURNED.values(), ids=list(RETURNED))
def test_no_later_pass_takes_the_padding_off(net: Net) -> None:
    tensors = {name: tensor.float() for name, tensor in weights().items()}
    graph, args = captured(net, random(2, 6, 7, 9, dtype=torch.float32), **tensors)

    result = check(lambda graph, log=None: run_pipeline(graph, log=log), graph, args)

    assert not {13, 26} & widths(result)


def test_rows_that_nobody_reads_are_not_computed() -> None:
    """The slice that takes padding off does not stand in the way of one that takes images off."""

    def net(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, m.w).relu()[:1]
        return y, F.conv2d(y, m.square)

    tensors = {name: tensor.float() for name, tensor in weights(taps=1).items()}
    graph, args = captured(net, random(2, 6, 7, 9, dtype=torch.float32), **tensors)

    result = check(lambda graph, log=None: run_pipeline(graph, log=log), graph, args)

    first, _ = (node.outputs[0] for node in result.nodes if node.op == "linear")
    assert first.sizes == (1, 7, 9, 16)


def test_the_mask_is_only_where_padding_is_multiplied() -> None:
    for net, masks in ((RETURNED["two"], 0), (RETURNED["read by a product too"], 1)):
        result = pad_channels(graph_of(net)[0])
        assert sum(node.op == "where" for node in result.nodes) == masks


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("classes", "width"),
    [(150, 160), (91, 96), (85, 88), (21, 24), (19, 24), (5, 5), (18, 24), (17, 17)],
)
def test_how_wide_a_returned_image_of_classes_gets(
    classes: int, width: int, dtype: torch.dtype
) -> None:
    graph, x = graph_of(RETURNED["bilinear"], dtype, classes)

    result = pad_channels(graph)

    assert widths(result) == {width}
    assert result.outputs and result.specs[result.outputs[0]].sizes[1] == classes
    assert_same(graph, result, x)


@pytest.mark.parametrize(("classes", "width"), [(150, 160), (57, 64), (56, 56), (21, 21)])
def test_a_product_that_is_permuted_and_returned_gains_by_whole_32s(
    classes: int, width: int
) -> None:
    graph, x = graph_of(first, torch.float16, classes)

    result = pad_channels(graph)

    assert widths(result) == {width}
    assert_same(graph, result, x)


def test_rows_that_the_caller_gets_stay_side_by_side() -> None:
    graph, _ = graph_of(lambda m, x: F.linear(x.permute(0, 2, 3, 1), m.rows), torch.float16, 150)

    assert str(pad_channels(graph)) == str(graph)


KEPT: dict[str, tuple[Net, str]] = {
    "returned": (lambda m, x: torch.relu(first(m, x)), "no other product reads it"),
    "returned by two": (
        lambda m, x: (first(m, x).relu(), first(m, x, "w2")),
        "no other product reads it",
    ),
    "few pixels": (
        lambda m, x: (y := F.linear(x.mean((2, 3)), m.rows), F.linear(y, m.bottom)),
        "few pixels",
    ),
    "softmax behind": (
        lambda m, x: resized(first(m, x)).softmax(1),
        "reads it as wide as it is",
    ),
    "classes": (lambda m, x: resized(first(m, x)).argmax(1), "reads it as wide as it is"),
    "returned, and its classes": (
        lambda m, x: (y := resized(first(m, x)), y.argmax(1)),
        "reads it as wide as it is",
    ),
    "joined": (lambda m, x: torch.cat([first(m, x), x], 1), "reads it as wide as it is"),
    "softmax": (lambda m, x: last(m, first(m, x).softmax(1)), "reads it as wide as it is"),
    "norm": (
        lambda m, x: last(m, F.group_norm(first(m, x), 1)),
        "reads it as wide as it is",
    ),
    "logarithm": (lambda m, x: last(m, first(m, x).abs().log()), "reads it as wide as it is"),
    "quotient": (lambda m, x: last(m, first(m, x) / first(m, x, "w2")), "as wide as it is"),
    "another operand": (
        lambda m, x: last(m, first(m, x) + x.mean((1, 2, 3), keepdim=True)),
        "as wide as it is",
    ),
    "pool of what is not zero": (
        lambda m, x: last(m, F.avg_pool2d(first(m, x).sigmoid(), 2)),
        "reads it as wide as it is",
    ),
    "channels moved": (lambda m, x: last(m, first(m, x).roll(1, 1)), "as wide as it is"),
    "channels cut": (
        lambda m, x: F.conv2d(first(m, x)[:, 2:8], m.w),
        "as wide as it is",
    ),
    "weights": (
        lambda m, x: F.linear(y := F.linear(x.mean((2, 3)), m.rows), y),
        "reads it as weights|as wide as it is",
    ),
}


@pytest.mark.parametrize(("net", "reason"), KEPT.values(), ids=list(KEPT))
def test_channels_keep_their_width(net: Net, reason: str) -> None:
    graph, x = graph_of(net)
    log = Log()

    result = check(pad_channels, graph, (x,), log)

    assert str(result) == str(graph)
    assert re.search(reason, reasons(log))


@pytest.mark.parametrize(("inner", "grows"), [(5, False), (6, True), (9, False), (12, True)])
def test_what_lies_between_grows_by_a_third_at_most(inner: int, grows: bool) -> None:
    graph, x = graph_of(PADDED["activation"], torch.float16, inner)

    result = pad_channels(graph)

    assert (inner not in widths(result)) == grows
    assert_same(graph, result, x)


def test_channels_that_copies_divide_stay() -> None:
    """12 channels of four bytes are three copies; of two bytes they are one and a half."""
    graph, _ = graph_of(PADDED["activation"], torch.float32, 12)

    assert 12 in widths(pad_channels(graph))


def assert_same(graph: Graph, result: Graph, x: Tensor) -> None:
    for before, after in zip(
        interpret(graph, [x], dtype=torch.float64),
        interpret(result, [x], dtype=torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_infinities_stay_out_of_the_padding() -> None:
    """Zero rows times an infinity are NaN, which %real keeps from the sums behind."""

    def net(m: nn.Module, x: Tensor) -> Tensor:
        return last(m, torch.relu(F.conv2d(x, m.below, m.b, padding=1)))

    graph, x = graph_of(net)
    x = x.abs()
    x[0, 2, 3, 3] = float("inf")

    result = pad_channels(graph)

    assert 13 not in widths(result)
    assert interpret(graph, [x])[0].isfinite().all()
    assert_same(graph, result, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_whole_model_on_the_host(dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 14, 3, 2, 1)
            self.depth = nn.Conv2d(14, 14, 3, 1, 1, groups=14)
            self.gate = nn.Conv2d(14, 14, 1)
            self.last = nn.Conv2d(14, 23, 1)
            self.head = nn.Linear(23, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = F.silu(self.stem(x))
            x = x + self.depth(x)
            x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
            return self.head(F.relu(self.last(x)).mean((2, 3)))

    torch.manual_seed(0)
    model, x = Model().eval().to(dtype), random(1, 3, 11, 13, dtype=dtype)
    graph = run_pipeline(capture(model, (x,)).graph)
    assert not {14, 23} & widths(graph)

    answer = gtco.compile(model, (x,), target="host")(x)

    exact = model.double()(x.double())
    torch.testing.assert_close(answer.double(), exact, rtol=2e-2, atol=2e-3)
