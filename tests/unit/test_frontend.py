"""Capture: the graph means what the module means, and bad input is refused in words."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from gtco.compiler import fuse
from gtco.cost_model.knowledge import Knowledge
from gtco.frontend.refusals import CaptureError
from gtco.frontend.torch_export import Captured, capture
from gtco.ir.interpreter import ArgumentError, interpret
from gtco.ir.spec import TensorSpec
from gtco.passes import run_pipeline
from gtco.passes.precision import lower_precision
from gtco.selection import select
from gtco.target import CARDS, find_target
from tests import models

ATEN_LEFT: dict[Callable[[], nn.Module], dict[str, int]] = {}


def run(captured: Captured, *args: Any, **kwargs: Any) -> Any:
    return captured.unflatten(interpret(captured.graph, captured.flatten(args, kwargs)))


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Equal up to `tolerance` of each tensor's largest element, in one structure."""
    a, spec_a = pytree.tree_flatten(actual)
    b, spec_b = pytree.tree_flatten(expected)
    assert spec_a == spec_b
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            scale = y.abs().max().item() if y.is_floating_point() and y.numel() else 0.0
            assert_close(x, y, rtol=0, atol=tolerance * scale)
        else:
            assert x == y


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def check(function: Callable[..., Any], *args: Any) -> Captured:
    """Capture, verify, compare before and after the pipeline; return what was captured."""
    captured = capture(Function(function), args)
    captured.graph.verify()
    expected = function(*args)
    assert_same(run(captured, *args), expected, 1e-12)
    rewritten = run_pipeline(captured.graph)
    outputs = interpret(rewritten, captured.flatten(args))
    assert_same(captured.unflatten(outputs), expected, 1e-6)
    return captured


def ops(captured: Captured) -> Counter[str]:
    return Counter(node.op for node in captured.graph.nodes)


@pytest.mark.parametrize("build", models.IMAGE_SIZES, ids=lambda build: build.__name__)
def test_models(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, side = build(), models.IMAGE_SIZES[build]
    image = torch.randn(1, 3, side, side)
    captured = capture(model, (image,))
    captured.graph.verify()
    rewritten = run_pipeline(captured.graph)
    with torch.no_grad():
        expected = model(image)
    assert_same(run(captured, image), expected, 1e-5)
    outputs = interpret(rewritten, captured.flatten((image,)))
    assert_same(captured.unflatten(outputs), expected, 1e-4)
    aten = Counter(node.attrs["target"] for node in rewritten.nodes if node.op == "aten")
    assert aten == ATEN_LEFT.get(build, {})
    assert "softmax" not in {node.op for node in rewritten.nodes}, "an attention was not recognised"


@pytest.mark.parametrize("build", models.IMAGE_SIZES, ids=lambda build: build.__name__)
def test_all_but_a_few_operators_have_kernels(build: Callable[[], nn.Module]) -> None:
    """In fp16; what has none is one operator, and says why."""
    torch.manual_seed(0)
    side = models.IMAGE_SIZES[build]
    graph = capture(build(), (torch.randn(1, 3, side, side),)).graph
    target = find_target("sm_90a")
    fused = fuse(lower_precision(graph, torch.float16), target=target)
    launches = select(fused, target, Knowledge(CARDS["sm_90a"].name))
    without = [launch for launch in launches if launch.program is None]
    for launch in without:
        (node,) = launch.group.compute
        target_name = str(node.attrs.get("target", node.op))
        assert target_name in ATEN_LEFT.get(build, {})
        assert target_name in launch.reason


def test_clip_with_text() -> None:
    torch.manual_seed(0)
    ids, image = torch.randint(1, 98, (2, 16)), torch.randn(3, 3, 32, 32)
    ids[:, -2:] = 98
    model = models.hf_clip()
    captured = capture(model, (ids, image))
    with torch.no_grad():
        expected = model(ids, image)
    rewritten = run_pipeline(captured.graph)
    outputs = interpret(rewritten, captured.flatten((ids, image)))
    assert_same(captured.unflatten(outputs), expected, 1e-4)
    found = Counter(node.attrs.get("target", node.op) for node in rewritten.nodes)
    assert found["attention"] == 4
    aten = {name for name in found if name.startswith("aten.")}
    assert aten == {"aten.argmax.default"}  # of integers


X = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.flip(0)


def assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + 2.0 * y - 1,
        lambda x, y: torch.add(x, y, alpha=3) - torch.sub(x, y, alpha=0.5),
        lambda x, y: torch.rsub(x, y, alpha=2) + (1 - x),
        lambda x, y: x.clamp(-0.5, 0.5) + y.clamp_min(0.1).clamp_max(1.0),
        lambda x, y: x.clamp(y, x.abs()) + torch.clamp(y, max=x) + torch.clamp(x, min=y, max=-y),
        lambda x, y: torch.where(x > y, x, y * x.sigmoid()),
        lambda x, y: x.masked_fill(y <= 0, -1.0),
        lambda x, y: F.silu(x) + F.gelu(y, approximate="tanh") + x.tanh() + y.erf(),
        lambda x, y: F.hardswish(x) + F.leaky_relu(y) + F.hardtanh(x) + F.relu6(y),
        lambda x, y: x.abs().sqrt().log() + y.exp().reciprocal() + x.square().rsqrt(),
        lambda x, y: x.abs().log1p() + y.expm1() * F.elu(x) + F.softplus(y) + x.floor() - y.ceil(),
        lambda x, y: (F.selu(x) + F.celu(y, 0.5), (x / x.relu()).isnan(), F.log_softmax(y, 1)),
        lambda x, y: F.batch_norm(x, None, None, y[0, :, 0], x[0, :, 1], True, 0.0, 1e-3),
        lambda x, y: F.batch_norm(x[None], None, None, training=True),
        lambda x, y: torch.zeros_like(x).scatter(1, y.argmax(1, keepdim=True), 1.5),
        lambda x, y: y.scatter(-1, x.argmin(-1, keepdim=True), -2) + torch.cat([x, y[:, :, :0]], 2),
        lambda x, y: x[None].squeeze() + y.unsqueeze(-1).squeeze(-1).flatten(1).view(2, 6, 8),
        lambda x, y: (x.transpose(1, 2).reshape(2, -1), y.permute(2, 0, 1).contiguous()),
        lambda x, y: x.unflatten(-1, (2, -1)).flatten(1, 2),
        lambda x, y: x[:, 1:5:2] + y[:, -2:] + x[:, 0:1] + y[0, None, None, 3],
        lambda x, y: [*x.chunk(3, 1), *y.split([2, 6], -1), *x.split(4, 2), *y.unbind(0)],
        lambda x, y: (torch.cat([x, y], -1), torch.stack([x, y], 1), x.repeat(1, 2, 3)),
        lambda x, y: (x.roll((1, -2), (1, 2)), F.pad(y, (1, 2, -1, 3), value=0.5)),
        lambda x, y: (x.mean(), y.sum(1), x.amax((1, 2)), y.mean(-1, keepdim=True), x.sum()),
        lambda x, y: (x.var(-1, keepdim=True), y.var(dim=(1, 2), correction=0), x.std(-1)),
        lambda x, y: (*torch.var_mean(x, 1), *torch.var_mean(y, (0, 2), correction=0)),
        lambda x, y: (x.amin((1, 2)), y.amin(-1, keepdim=True), x.amin()),
        lambda x, y: ((x > 1).any(1), (y > x).any(), (x < 2).all(-1, keepdim=True), x.any((0, 2))),
        lambda x, y: (x.sign() + (y * 3).trunc(), (x / x.relu()).sign(), (x * 4).frac()),
        lambda x, y: ((x > y).sign(), x.int().sign()),
        lambda x, y: (x.flip(0, -1), torch.rot90(y, 1, (1, 2)), F.lp_pool1d(x, 2, 2)),
        lambda x, y: (F.prelu(x, y[0, :, 0]), F.leaky_relu(y, 0.3), F.pad(x, (2, 3), "reflect")),
        lambda x, y: (x.softmax(1), F.softmax(y, -1, dtype=torch.float32)),
        lambda x, y: (x @ y.mT, torch.bmm(x, y.transpose(1, 2)), x @ y[0, 0]),
        lambda x, y: F.layer_norm(x, (6, 8)) + F.layer_norm(y, (8,), y[0, 0], x[0, 0]),
        lambda x, y: F.scaled_dot_product_attention(x, y, x, is_causal=True),
        lambda x, y: F.scaled_dot_product_attention(x, y, x, (x @ y.mT) > 0.0, scale=0.3),
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None, :1], y[None, :1],
                                                    enable_gqa=True),
        lambda x, y: (x.roll(3), x.roll((1, 8), (1, 1)), x.unfold(1, 3, 2) + 1, y.argmax(1)),
        lambda x, y: (x.argmax(keepdim=True), *x.max(2), *y.min(1, keepdim=True), x.argmin()),
        lambda x, y: (*x.topk(2, 1), *y.topk(1, 0, largest=False), *x.sort(-1, descending=True)),
        lambda x, y: (F.adaptive_avg_pool1d(x, 2), F.adaptive_avg_pool2d(y[None], (3, 4))),
        lambda x, y: (F.adaptive_max_pool2d(x[None], (3, 2)), F.unfold(y[None], 2, 2, 1, (1, 2))),
        lambda x, y: (F.adaptive_avg_pool1d(x, 1), F.adaptive_avg_pool2d(y, 1)),
        lambda x, y: (x.float() + 1, (y > 0).long() + 1, x.to(torch.float64), y.half().double()),
        lambda x, y: {"a": (None, 3), "b": [x * 1, "text"], "c": F.dropout(y, 0.5, False)},
        lambda x, y: torch.baddbmm(x[:, :, :6], x, y.mT),
        lambda x, y: (torch.baddbmm(x[:, :, :6] * math.nan, x, y.mT, beta=0, alpha=0.5),
                      torch.addmm(x[0, :, :6], x[0], y[0].mT, beta=2, alpha=-0.3)),
        lambda x, y: x + torch.arange(8, dtype=torch.float64) + torch.full((6, 1), 2.0),
        lambda x, y: ((x > 0) & (y > 0) | ~(x < y), F.normalize(x, dim=-1), y.norm(dim=1)),
        lambda x, y: (x.norm(1, dim=2), y.norm(float("inf"), dim=(0, 1)), x[..., :1].norm(1, -1)),
        lambda x, y: x + torch.ones_like(y) + torch.full_like(x, 2) + y.new_zeros(8),
        lambda x, y: (x, x, y + 0),
        lambda x, y: assigned(x, (slice(None), slice(1, 4)), y[:, 2:5]),
        lambda x, y: assigned(x, (slice(None), slice(2, None), slice(0, 3)), 7.0),
        lambda x, y: assigned(x, (..., slice(None)), y[0].float()),
    ],
)  # fmt: skip
def test_operators(function: Callable[..., Any]) -> None:
    assert ops(check(function, X, Y))["aten"] == 0


@pytest.mark.parametrize(
    "function, target",
    [
        (lambda x, y: x.cummax(1).values + y, "aten.cummax.default"),
        (lambda x, y: x.scatter(1, y[:, :2].argsort(1), 1.0), "aten.scatter.value"),
        (lambda x, y: x[torch.tensor([0, 1]), :, [2, 2]] * y[:, :, 0], "aten.index.Tensor"),
    ],
)
def test_fallback(function: Callable[..., Any], target: str) -> None:
    nodes = check(function, X, Y).graph.nodes
    assert target in {node.attrs["target"] for node in nodes if node.op == "aten"}


def test_a_lowering_that_promotes_otherwise_than_the_operator_declines() -> None:
    captured = check(lambda x: F.hardtanh(x) * 2, torch.arange(-3, 3))
    assert ops(captured) == {"aten": 1, "mul": 1}


def test_booleans_are_clamped() -> None:
    check(lambda x: (x.clamp(True, 1), x.clamp(False, 0.5)), X > 0)


def test_memory_of_a_contiguous_tensor_is_read() -> None:
    def strided(x: Tensor) -> tuple[Tensor, ...]:
        odd = x[1:].mT.exp().contiguous()
        return x.as_strided((2, 2), (1, 1)), odd.as_strided((3,), (2,), 1)

    check(strided, X)


def test_convolutions() -> None:
    image = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    w, w1 = torch.randn(2, 6, 2, 3, 3).double(), torch.randn(6, 4, 3).double()

    def function(x: Tensor) -> Any:
        a = F.conv2d(x, w[0], None, 1, 1, 1, groups=2)
        b = F.conv2d(x, w[1], torch.ones(6).double(), stride=(2, 1), groups=2)
        return (
            a,
            b,
            F.conv1d(x[0, :, 0], w1),
            F.max_pool2d(x, 3, 2, 1),
            F.interpolate(x, scale_factor=2),
        )

    captured = check(function, image)
    assert ops(captured)["conv2d"] == 3  # a line is an image of one row
    assert ops(captured)["max_pool"] == 1
    assert ops(captured)["resize"] == 1
    assert not ops(captured)["aten"]


def test_random_numbers_are_not_frozen() -> None:
    captured = capture(Function(lambda x: x + torch.rand(3)), (torch.zeros(3),))
    a, b = (interpret(captured.graph, (torch.zeros(3),))[0] for _ in range(2))
    assert not torch.equal(a, b)
    rewritten = run_pipeline(captured.graph)
    assert [node.op for node in rewritten.nodes] == ["aten", "add"]


def test_a_range_is_rounded_as_torch_rounds_it() -> None:
    """Frequencies of rotary positions: an exponent's last bit is 0.01 of the largest angle."""
    x = torch.ones(10)

    def angles(x: Tensor) -> Tensor:
        return (x * 10000.0 ** torch.linspace(0, 1, 10) * torch.pi / 2).cos()

    captured = capture(Function(angles), (x,))
    assert torch.equal(run(captured, x), angles(x))


class Keeping(nn.Module):
    """Anchors of the last shape, a table by size and a list of shapes, as detectors keep them, and
    a hook that the first call adds."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        self.anchors = torch.empty(0)
        self.tables: dict[int, torch.Tensor] = {}
        self.seen = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if self.shape != x.shape:
            self.shape, self.anchors = tuple(x.shape), torch.arange(size) + 0.5
            self.seen.append(size)
        if size not in self.tables:
            self.tables[size] = torch.ones(size).cumsum(0)
        if not hasattr(self, "late"):
            self.late = self.register_forward_hook(lambda module, inputs, result: 2 * result)
        return x * self.anchors + self.tables[size]


def test_a_model_keeps_nothing_of_its_capture() -> None:
    x, model = torch.randn(3, 5), nn.Sequential(Keeping()).eval()
    anchors = model[0].anchors
    for given in (x, x[:, :4]):
        captured = capture(model, (given,))
        assert model[0].shape == () and model[0].anchors is anchors
        assert model[0].tables == {} and model[0].seen == [0] and not hasattr(model[0], "late")
        assert_close(run(captured, given), Keeping()(given))
    assert_close(model(x), Keeping()(x))
    assert model[0].shape == (3, 5) and model[0].seen == [0, 5]


def test_tied_parameters_are_one_constant_that_shares_memory() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Tied()
    (constant,) = capture(model, (torch.randn(2, 8),)).graph.constants.values()
    assert constant.data_ptr() == model.a.weight.data_ptr()


def test_source_is_the_module_path() -> None:
    graph = capture(models.vit(), (torch.randn(1, 3, 32, 32),)).graph
    sources = {node.source for node in graph.nodes if node.op == "linear"}
    assert {"encoder.blocks.0.attn.qkv", "encoder.blocks.1.fc2", "head"} <= sources


def test_signature_with_keywords_and_literals() -> None:
    def function(x: Tensor, times: int = 2, *, y: dict[str, Tensor], flag: bool) -> Any:
        return {"sum": x * times + y["y"], "flag": flag, "none": None}

    captured = capture(Function(function), (X, 3), {"y": {"y": Y}, "flag": True})
    result = run(captured, X, 3, flag=True, y={"y": Y})
    assert_same(result, {"sum": X * 3 + Y, "flag": True, "none": None}, 1e-12)
    assert captured.input_literals == {1: 3, 3: True}
    assert captured.input_positions == (0, 2)
    with pytest.raises(ArgumentError, match="baked in"):
        captured.flatten((X, 4), {"y": {"y": Y}, "flag": True})
    with pytest.raises(ArgumentError, match="is missing"):
        captured.flatten((X,), {})
    with pytest.raises(ArgumentError, match="not a tensor"):
        captured.flatten((X, 3), {"y": {"y": 1}, "flag": True})


def test_exported_programs_and_graph_modules() -> None:
    function = Function(lambda x, y: x.relu() @ y.mT)
    program = torch.export.export(function, (X, Y))
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).double())
    assert_same(run(capture(program), X, Y), function(X, Y), 1e-12)
    assert_same(run(capture(traced, (X,)), X), traced(X), 1e-12)


def test_bfloat16_and_integers() -> None:
    x = torch.randn(2, 8).bfloat16()
    captured = capture(Function(lambda x, i: (x * 2, i + 1)), (x, torch.arange(3)))
    assert list(captured.graph.inputs.values())[1] == TensorSpec((3,), torch.int64)
    assert_same(run(captured, x, torch.arange(3)), (x * 2, torch.arange(3) + 1), 0.0)


class Training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def _chosen(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


@pytest.mark.parametrize(
    "model, args, words",
    [
        (Training(), (X,), r"Training: drop \(Dropout\).*model\.eval\(\)"),
        (nn.BatchNorm1d(6), (X,), r"BatchNorm1d.*training mode.*model\.eval\(\)"),
        (Function(lambda x: F.dropout(x, 0.5)), (X,), r"dropout.*training mode.*eval"),
        (Counting(), (X,), r"buffer 'calls' in place.*clone"),
        (Function(lambda x: x.add_(1)), (X,), r"input '.*' in place.*clone"),
        (Function(lambda x: x * 2 if x.sum() > 0 else x), (X,), r"data-dependent.*torch\.where"),
        (Function(_chosen), (X,), r"node cond \(cond\) chooses or repeats steps.*torch\.where"),
        (Function(lambda x: x[x > 0]), (X,), r"depends on data"),
        (Function(lambda x: torch.fft.fft(x)), (X,), r"returns complex.*view_as_real"),
        (Function(lambda z: z.abs()), (X.to(torch.complex64),), r"argument .*complex64.*as_real"),
        (Function(lambda x: torch.fft.fft(x).sqrt().real), (X,), r"sqrt.*complex.*real arith"),
        (Function(lambda x: torch.fft.fft(x, n=5000).real), (X,), r"_fft.*5000 points.*4096"),
        (Function(lambda x: x[1:].as_strided((2, 2), (1, 1))), (X,), r"the memory of a view"),
        (Function(lambda x: x.mT.exp().as_strided((2,), (1,))), (X,), r"not contiguous; call"),
        (Function(lambda x: x), (X, X), r"cannot be captured.*Error"),
        (Function(lambda x: x), X, r"pass a tuple"),
    ],
)  # fmt: skip
def test_refusals(model: nn.Module, args: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(model, args)


def test_dynamic_shapes_are_refused() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(
        Function(lambda x: x + 1), (X,), dynamic_shapes={"args": ({0: batch},)}
    )
    with pytest.raises(CaptureError, match=r"dynamic shape.*fixed shapes"):
        capture(program)


def test_what_a_refused_model_prints_is_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """torch.export prints the program as far as it came, thousands of lines of a detector's."""

    def detect(x: Tensor) -> Tensor:
        print("looking", file=sys.stderr)
        found = x[torch.where(x > 0)[0]]
        return found if found.numel() == 0 else found * 2

    with pytest.raises(CaptureError, match="data-dependent"):
        capture(Function(detect), (torch.randn(6),))
    assert capfd.readouterr().err == "looking\n"
