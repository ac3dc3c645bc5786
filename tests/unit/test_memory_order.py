"""What a model is given is read as the example lay in memory: channels last as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.benchmarking.answers import example_inputs, fresh_inputs
from gtco.compiler import capture_for, make_plan
from gtco.frontend.signature import memory_order
from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.ir.interpreter import ArgumentError, interpret
from gtco.ir.spec import GraphError
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.runtime.encoding import decode_graph, encode_graph
from gtco.runtime.inputs import check_signature
from gtco.runtime.plan import PlanError

LAST = torch.channels_last


class Backbone(nn.Module):
    """A stem of few channels, a convolution of its own, and what is not an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv = nn.Conv2d(16, 24, 3, padding=1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.conv(F.relu(self.stem(x))) * scale
        return y


class Patches(nn.Module):
    """Patches of an image as rows, and a layer norm over each."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, 40, size, stride=size)
        self.norm = nn.LayerNorm(40)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.patches(x).flatten(2).mT)
        return y


def image(channels: int = 3, side: int = 10) -> Tensor:
    return torch.randn(2, channels, side, side).contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("lies", "order"),
    [
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=LAST), (0, 2, 3, 1)),
        (lambda: torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
         (0, 2, 3, 4, 1)),
        (lambda: torch.randn(4, 5, 3).permute(2, 0, 1)[None], (0, 2, 3, 1)),
        (lambda: torch.randn(2, 3, 4).mT, (0, 2, 1)),
        (lambda: torch.randn(2, 3, 4).permute(2, 0, 1), (1, 2, 0)),
        (lambda: torch.randn(3, 4), (0, 1)),
        (lambda: torch.randn(2, 1, 4, 5).to(memory_format=LAST), (0, 1, 2, 3)),
        (lambda: torch.randn(3, 8)[:, ::2], (0, 1)),
        (lambda: torch.randn(3, 1).expand(3, 4), (0, 1)),
        (lambda: torch.randn(4, 8)[:, :3].mT, (0, 1)),
        (lambda: torch.randn(0, 3).t(), (0, 1)),
        (lambda: torch.tensor(1.0), ()),
    ],
)  # fmt: skip
def test_the_order_in_memory(lies: Callable[[], Tensor], order: tuple[int, ...]) -> None:
    tensor = lies()
    assert memory_order(tensor) == order
    if order != tuple(range(tensor.dim())):
        assert tensor.permute(order).is_contiguous()


def test_a_graph_takes_what_callers_have() -> None:
    x, scale = image(), torch.randn(1, 24, 5, 5)
    model = Backbone().eval()
    captured = capture(model, (x, scale))
    graph = captured.graph
    assert graph.inputs["x"].sizes == (2, 10, 10, 3)
    assert graph.given["x"].sizes == (2, 3, 10, 10)
    assert graph.given["scale"] == graph.inputs["scale"]
    assert dict(graph.orders) == {"x": (0, 2, 3, 1)}
    assert "%x: f32[2,10,10,3] of [0, 2, 3, 1]" in str(graph)
    for given in (x, x.contiguous()):
        expected = model(given, scale)
        for each in (graph, run_pipeline(graph), gtco.fuse(graph)):
            (answer,) = interpret(each, captured.flatten((given, scale)))
            torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("given", [torch.float32, torch.uint8])
def test_images_of_another_type_are_packed_as_they_are(given: torch.dtype, last: bool) -> None:
    """What converts an image stands behind the copy of its blocks, in one kernel."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x.half())
            return y

    x = torch.randint(0, 9, (2, 3, 10, 10)).to(given)
    x = x.contiguous(memory_format=LAST) if last else x
    model = Stem().eval().half()
    compiled = gtco.compile(model, x, target="host")
    assert [each.ops[:2] for each in compiled.launches] == [
        ("space_to_depth", "cast"),
        ("conv", "add"),
    ]
    near(compiled(x).float(), model.float().conv(x.float()), 2e-2)


def near(answer: Tensor, expected: Tensor, tolerance: float = 1e-2) -> None:
    torch.testing.assert_close(answer, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("precision", [None, "fp16", "bf16"])
def test_compiled_modules_take_any_order(precision: str | None) -> None:
    model, x, scale = Backbone().eval(), image(), torch.randn(1, 24, 5, 5)
    compiled = gtco.compile(model, (x, scale), target="host", precision=precision)
    assert "x: f32[2,3,10,10]" in repr(compiled)
    tolerance = 1e-1 if precision == "bf16" else 1e-2
    wide = torch.randn(2, 3, 10, 20)
    for given in (torch.randn_like(x), wide[..., :10].contiguous(), wide[..., 1::2], x.half()):
        near(compiled(given, scale), model(given.float(), scale), tolerance)


@pytest.mark.parametrize(("size", "channels"), [(4, 3), (5, 3), (2, 8), (7, 5), (1, 3)])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_patches_are_rows_of_the_image_as_it_lies(size: int, channels: int, last: bool) -> None:
    """No copy of their own is made that the other order does not need."""
    model = Patches(size, channels).eval().half()
    shape = (2, channels, 3 * size, 4 * size)
    x = torch.randn(shape).half()
    given = x.contiguous(memory_format=LAST) if last else x
    compiled = gtco.compile(model, (given,), target="host")
    other = gtco.compile(model, (x,), target="host")
    assert len(compiled.launches) <= len(other.launches)
    near(compiled(given).float(), model.float()(x.float()))


def test_feature_maps_with_channels_last_are_not_copied() -> None:
    model, x = nn.Conv2d(64, 64, 3, padding=1).eval().half(), image(64, 32).half()
    options = Options.of(target="sm_90a")
    first, last = (make_plan(model, given, None, options)[0] for given in (x.contiguous(), x))
    assert [launch.family for launch in first.launches] == ["elementwise", "gemm"]
    assert [launch.family for launch in last.launches] == ["gemm"]


def test_messages_name_the_shape_that_callers_have() -> None:
    model, x, scale = Backbone().eval(), image(), torch.randn(1, 24, 5, 5)
    compiled = gtco.compile(model, (x, scale), target="host")
    with pytest.raises(ArgumentError, match=r"x: expected f32\[2,3,10,10\], got f32\[2,10,10,3\]"):
        compiled(x.permute(0, 2, 3, 1), scale)
    with pytest.raises(ArgumentError, match=r"x: expected f32\[2,3,10,10\], got f32\[3\]"):
        compiled(x[0, :, 0, 0], scale)
    with pytest.raises(ArgumentError, match=r"pass a tensor of f32\[2,3,10,10\]"):
        compiled._captured.flatten((3.0, scale))
    with pytest.raises(ArgumentError, match=r"%x is f32\[2,3,10,10\], but a \(2, 10, 10, 3\)"):
        interpret(compiled.graph, (x.permute(0, 2, 3, 1), scale))


def test_the_order_is_kept_in_files() -> None:
    graph = capture(Patches(4, 3).eval(), (image(side=8),)).graph
    data = encode_graph(graph, {})
    assert decode_graph(data, {}).orders == graph.orders
    for wrong in ({"x": [0, 2, 3, 3]}, {"x": [0, 1]}, {"y": [0, 2, 3, 1]}):
        with pytest.raises(GraphError, match="no order of the dimensions"):
            decode_graph(data | {"orders": wrong}, {})


def test_a_plan_of_another_order_is_refused() -> None:
    plan, captured = make_plan(Patches(4, 3).eval(), image(side=8), None, Options.of(target="host"))
    other: Graph = replace(captured.graph, orders={"x": (0, 1, 3, 2)})
    with pytest.raises(PlanError, match="order of the dimensions"):
        check_signature(plan, replace(captured, graph=other))


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp8"])
def test_other_precisions_keep_the_order(precision: str) -> None:
    options = Options.of(precision=precision)
    captured = capture_for(Patches(4, 3).eval(), image(side=8), None, options)
    assert dict(captured.graph.orders) == {"x": (0, 2, 3, 1)}


def test_inputs_of_benchmarks_lie_like_the_example() -> None:
    captured = capture(Patches(4, 3).eval(), (image(side=8),))
    made = example_inputs(captured, torch.device("cpu"))
    for args, _ in (made, fresh_inputs(made, "normal", 0)):
        assert args[0].shape == (2, 3, 8, 8)
        assert args[0].is_contiguous(memory_format=LAST)


def test_a_calibration_is_good_for_either_order() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = Patches(4, 3)
            self.out = nn.Linear(40, 24)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(F.gelu(self.patches(x)))
            return y

    model, x = Tokens().eval(), image(side=16)
    known = gtco.calibrate(model, [x.contiguous()])
    options = Options.of(target="sm_90a", precision="fp8", calibration=known, error_budget=1.0)
    plan, _ = make_plan(model, (x,), None, options)
    assert any(node.op == "quantize" for node in plan.graph.nodes)


def test_dynamo_gives_images_as_they_lie() -> None:
    model, x, scale = Backbone().eval(), image(), torch.randn(1, 24, 5, 5)
    compiled = torch.compile(model, backend="gtco", options={"target": "host"})
    with torch.no_grad():
        near(compiled(x, scale), model(x, scale))
        near(compiled(x.contiguous(), scale), model(x, scale))
