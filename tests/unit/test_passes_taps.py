"""Convolutions of few results make those of a row's taps at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes import taps_as_columns as taps
from gtco.passes.taps_as_columns import columns_of_taps
from tests.pass_checks import check, ops, random

F16, F64 = torch.float16, torch.float64


@pytest.fixture(autouse=True)
def _small_images_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "LEAST_FLOPS", 1.0)


def convolved(
    results: int,
    kernel: tuple[int, ...],
    *,
    channels: int = 16,
    stride: tuple[int, ...] = (),
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    dtype: torch.dtype = F64,
    known: bool = True,
    op: str = "conv",
) -> Graph:
    b, ones = GraphBuilder(), (1,) * len(kernel)
    x = b.input("x", TensorSpec((2, *(7, 11, 13)[-len(kernel) :], channels), dtype))
    attrs = {} if op == "conv" else {"groups": 2}
    depth = channels // attrs.get("groups", 1)
    shape = (results, *kernel, depth)
    w = b.constant("w", random(*shape)) if known else b.input("w", TensorSpec(shape, dtype))
    y = b.add(op, x, w, stride=stride or ones, before=before or ones, after=after or ones,
              dilation=dilation or ones, **attrs)  # fmt: skip
    return b.build([b.add("tanh", y)])


@pytest.mark.parametrize(
    ("results", "kernel", "attrs"),
    [
        (3, (9, 9), {"before": (4, 4), "after": (4, 4)}),
        (3, (3, 3), {}),
        (1, (2, 5), {"before": (0, 3), "after": (1, 0)}),
        (8, (3, 7), {"stride": (2, 1), "before": (1, 2), "after": (1, 2)}),
        (2, (3, 3), {"dilation": (2, 3), "before": (2, 3), "after": (2, 3)}),
    ],
)
def test_the_same_image(
    results: int, kernel: tuple[int, ...], attrs: dict[str, tuple[int, ...]]
) -> None:
    made = convolved(results, kernel, **attrs)  # type: ignore[arg-type]
    result = check(columns_of_taps, made, [random(2, 11, 13, 16)])
    (conv,) = (node for node in result.nodes if node.op == "conv")
    assert conv.outputs[0].sizes[-1] % 8 == 0 and ops(result)["add"] == kernel[1] - 1
    assert result.specs[conv.inputs[1]].sizes[1:3] == (kernel[0], 1)


@pytest.mark.parametrize(
    "made",
    [
        lambda: convolved(9, (3, 3)),  # columns enough
        lambda: convolved(3, (3, 1)),  # one tap a row
        lambda: convolved(8, (9, 9)),  # 72 columns
        lambda: convolved(3, (3, 3), stride=(1, 2)),
        lambda: convolved(3, (3, 3), channels=8),
        lambda: convolved(3, (3, 3), known=False),
        lambda: convolved(2, (3, 3), op="grouped_conv"),
        lambda: convolved(3, (3, 3, 3)),
    ],
)
def test_what_stays(made: object) -> None:
    assert callable(made)
    graph = made()
    assert ops(columns_of_taps(graph)) == ops(graph)


def test_small_images_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "LEAST_FLOPS", 1.5e9)
    graph = convolved(3, (3, 3))
    assert ops(columns_of_taps(graph)) == ops(graph)


class Last(nn.Module):
    """The last layers of an image translator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 3, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.relu(self.first(x))))


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_compiles_as_close_as_torch(dtype: torch.dtype) -> None:
    """With weights whose taps cancel: neighbours' differences of pixels far from zero."""
    torch.manual_seed(0)
    model = Last().eval()
    with torch.no_grad():
        model.last.weight.sub_(model.last.weight.flip(3))
    given, x = copy.deepcopy(model).to(dtype), (torch.randn(1, 8, 9, 12) + 4).to(dtype)
    compiled = gtco.compile(given, (x,), target="host", fallback="error", precision=None)
    with torch.no_grad():
        exact = copy.deepcopy(given).double()(x.double())
        found, eager = compiled(x).double(), given(x).double()
    assert (found - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sums_are_one_kernel(arch: str) -> None:
    model, x = Last().eval().half(), torch.randn(1, 8, 64, 64).half()
    plan, _ = make_plan(model, (x,), {}, Options.of(target=arch, fallback="error"))
    last, sums = plan.launches[-2:]
    assert {node.op for node in last.group.compute} == {"conv", "cast"}
    assert {node.op for node in sums.group.compute} == {"add", "cast", "tanh"}
