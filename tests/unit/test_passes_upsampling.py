"""Convolutions of enlarged images, and pointwise work behind cuts of a product: what is rewritten,
what is not, and that values stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.compiler import make_plan
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import channels_last, fold_convolutions, pull_pointwise, run_pipeline
from gtco.passes.upsampling import convolve_before_enlarging
from tests.pass_checks import captured, check, ops, random

Net = Callable[[Any, Tensor], Tensor]
TENSORS = {
    "shuffled": random(8, 4, 3, 3, seed=11),
    "square": random(5, 4, 3, 3, seed=1),
    "wide": random(5, 4, 5, 5, seed=2),
    "uneven": random(5, 4, 3, 5, seed=3),
    "point": random(5, 4, 1, 1, seed=4),
    "pairs": random(6, 2, 3, 3, seed=5),
    "turned": random(4, 5, 4, 4, seed=6),
    "small": random(4, 5, 2, 2, seed=10),
    "b": random(5, seed=7),
    "gamma": random(5, 1, 1, seed=8),
    "var": random(5, seed=9).abs() + 0.5,
}


def enlarged(x: Tensor, factor: float = 2.0, mode: str = "nearest") -> Tensor:
    return F.interpolate(x, scale_factor=factor, mode=mode)


ENLARGED: dict[str, Net] = {
    "3x3": lambda m, x: F.conv2d(enlarged(x), m.square, m.b, padding=1),
    "without a border": lambda m, x: F.conv2d(enlarged(x), m.square),
    "a wide border": lambda m, x: F.conv2d(enlarged(x), m.square, padding=2),
    "5x5": lambda m, x: F.conv2d(enlarged(x), m.wide, m.b, padding=2),
    "5x5, a narrow border": lambda m, x: F.conv2d(enlarged(x), m.wide, padding=1),
    "3x5": lambda m, x: F.conv2d(enlarged(x), m.uneven, padding=(0, 2)),
    "by four": lambda m, x: F.conv2d(enlarged(x, 4.0), m.square, m.b, padding=1),
    "to a size": lambda m, x: F.conv2d(
        F.interpolate(x, (2 * x.shape[2], 4 * x.shape[3]), mode="nearest"), m.square, padding=1
    ),
    "with a norm behind it": lambda m, x: F.batch_norm(
        F.conv2d(enlarged(x), m.square, padding=1), m.b, m.var, m.b, m.b
    ),
}
KEPT: dict[str, Net] = {
    "of one tap": lambda m, x: F.conv2d(enlarged(x), m.point),
    "bilinear": lambda m, x: F.conv2d(enlarged(x, mode="bilinear"), m.square, padding=1),
    "by three": lambda m, x: F.conv2d(enlarged(x, 3.0), m.square, padding=1),
    "by one and a half": lambda m, x: F.conv2d(enlarged(x, 1.5), m.square, padding=1),
    "steps of two": lambda m, x: F.conv2d(enlarged(x), m.square, padding=1, stride=2),
    "dilated": lambda m, x: F.conv2d(enlarged(x), m.square, padding=1, dilation=2),
    "in groups": lambda m, x: F.conv2d(enlarged(x), m.pairs, padding=1, groups=2),
    "a border as wide as the kernel": lambda m, x: F.conv2d(enlarged(x), m.square, padding=3),
    "read by another": lambda m, x: F.conv2d(enlarged(x), m.square, padding=1).sum() + enlarged(x),
    "weights that are computed": lambda m, x: F.conv2d(enlarged(x), m.square * x.mean(), padding=1),
}


def rewritten(net: Net) -> bool:
    """Whether an enlarged image is convolved as it was; its values are checked."""
    graph, args = captured(net, random(2, 4, 5, 7), **TENSORS)
    graph = fold_convolutions(graph)
    return ops(check(convolve_before_enlarging, graph, args))["resize"] < ops(graph)["resize"]


@pytest.mark.parametrize("name", ENLARGED)
def test_an_enlarged_image_is_convolved_as_it_was(name: str) -> None:
    assert rewritten(ENLARGED[name])


@pytest.mark.parametrize("name", KEPT)
def test_what_is_enlarged_first(name: str) -> None:
    assert not rewritten(KEPT[name])


def test_fewer_taps_are_multiplied() -> None:
    graph, _ = captured(ENLARGED["3x3"], random(2, 4, 5, 7), **TENSORS)
    (conv,) = (node for node in convolve_before_enlarging(graph).nodes if node.op == "conv2d")
    assert graph.constants.keys() >= {"square"}
    assert conv.outputs[0].sizes == (2, 4 * 5, 6, 8)  # each pixel's four, and a border of them
    assert conv.attrs["padding"] == (1, 1)


def test_weights_whose_sum_is_too_large_stay() -> None:
    tensors = {**TENSORS, "square": torch.full((5, 4, 3, 3), 60000.0, dtype=torch.float16)}
    net = ENLARGED["without a border"]
    graph, _ = captured(net, random(1, 4, 5, 7, dtype=torch.float16), **tensors)
    assert ops(convolve_before_enlarging(graph))["resize"] == 1


PULLED: dict[str, Net] = {
    "relu": lambda m, x: F.conv_transpose2d(x, m.turned, m.b, 2, 1).relu(),
    "a norm and gelu": lambda m, x: F.gelu(
        F.batch_norm(F.conv_transpose2d(x, m.turned, m.b, 2, 1), m.b, m.var, m.b, m.b)
    ),
    "factors": lambda m, x: F.conv_transpose2d(x, m.turned, None, 2, 1) * m.gamma + 2.0,
    "behind an enlarged image": lambda m, x: (
        F.conv2d(enlarged(x), m.square, m.b, padding=1).sigmoid() * m.gamma
    ),
    "of other strides": lambda m, x: F.conv_transpose2d(x, m.turned, m.b, (3, 2), 1).tanh(),
    "where no pixel is cut off": lambda m, x: F.conv_transpose2d(x, m.small, None, 2) * m.gamma,
    "shuffled pixels": lambda m, x: F.leaky_relu(
        F.pixel_shuffle(F.conv2d(x, m.shuffled, padding=1), 2), 0.25
    ),
}
LEFT: dict[str, Net] = {
    "a sum with an image": lambda m, x: (
        F.conv_transpose2d(x, m.turned, m.b, 2, 1) + x.mean(1, True).repeat(1, 1, 2, 2)
    ),
    "read by another": lambda m, x: (
        (y := F.conv_transpose2d(x, m.turned, m.b, 2, 1)).relu() * y.mean()
    ),
    "most of it cut off": lambda m, x: F.conv_transpose2d(x, m.turned, m.b, 2, 1)[
        :, :, 8:, 8:
    ].relu(),
}


def places(net: Net) -> tuple[bool, bool]:
    """Whether pointwise work stands behind a cut or a permute of a product, before and after the
    pass; its values are checked."""
    graph, args = captured(net, random(1, 4, 16, 18), **TENSORS)
    graph = channels_last(convolve_before_enlarging(fold_convolutions(graph)))

    def behind(graph: Any) -> bool:
        makers = [graph.producers.get(node.inputs[0]) for node in graph.nodes
                  if node.definition.is_pointwise]  # fmt: skip
        return any(maker is not None and maker.definition.is_view for maker in makers)

    return behind(graph), behind(check(pull_pointwise, graph, args))


@pytest.mark.parametrize("name", PULLED)
def test_pointwise_work_moves_into_the_kernel(name: str) -> None:
    assert places(PULLED[name]) == (True, False)


@pytest.mark.parametrize("name", LEFT)
def test_pointwise_work_that_stays(name: str) -> None:
    assert places(LEFT[name]) == (True, True)


class Head(nn.Module):
    """Deconvolutions of a pose model, and an enlarged image."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(16, 24, 4, 2, 1)
        self.norm = nn.BatchNorm2d(24)
        self.conv = nn.Conv2d(24, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x)).relu()
        return self.last(F.silu(self.conv(enlarged(x))))


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_head_is_three_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Head().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(2, 16, 9, 11)
    given = copy.deepcopy(model).to(dtype)
    compiled = gtco.compile(given, (x.to(dtype),), target="host", fallback="error", precision=None)
    with torch.no_grad():
        exact = copy.deepcopy(given).double()(x.to(dtype).double())
        found, eager = compiled(x.to(dtype)).double(), given(x.to(dtype)).double()
    assert (found - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()

    plan, _ = make_plan(given, (x.to(dtype),), None, Options.of(target="sm_90a", fallback="error"))
    products = [launch for launch in plan.launches if launch.family == "gemm"]
    assert len(products) == 3
    assert len(plan.launches) <= 4  # and one that turns the image


def test_an_infinite_pixel_stays_in_its_windows() -> None:
    graph, _ = captured(ENLARGED["3x3"], random(1, 4, 5, 7), **TENSORS)
    result = run_pipeline(graph)
    x = random(1, 4, 5, 7)
    x[0, 0, 2, 3] = torch.inf
    (found,), (right,) = (interpret(each, (x,), dtype=torch.float64) for each in (result, graph))
    assert torch.equal(found.isfinite(), right.isfinite())
