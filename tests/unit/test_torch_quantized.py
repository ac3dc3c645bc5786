"""Models that torch quantizes: one operator there and back, or one each way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (defines the operators)
from torch.export import export

import gtco
from gtco.frontend.refusals import CaptureError
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes.quantized_pairs import multiply_pairs

aten, decomposed = torch.ops.aten, torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Form:
    """How a product is written.

    Args:
        of_x: the operator that rounds the input, a key of `OF_X`.
        of_w: and the weights, a key of `OF_W`.
        conv: the product is a convolution.
        low, high, zero, scale: of the input.
        w_low: the smallest integer of the weights.
        w_zero: the zero point of all of them.
        axis: of the weights, along which their scales are.
    """

    of_x: str = "numbers"
    of_w: str = "channels"
    conv: bool = False
    dtype: torch.dtype = torch.float32
    low: int = -128
    high: int = 127
    zero: int = 0
    scale: float = 2.0**-4
    w_low: int = -128
    w_zero: int = 0
    axis: int = 0

    @property
    def byte(self) -> torch.dtype:
        return torch.int8 if self.low < 0 else torch.uint8


class Product(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        gen = torch.Generator().manual_seed(1)
        shape = (32, 32, 3, 3) if form.conv else (32, 32)
        w = torch.randn(shape, generator=gen) / 2
        self.w = nn.Parameter(w.to(form.dtype))
        self.register_buffer(
            "stored", torch.randint(-127, 128, shape, generator=gen).to(torch.int8)
        )
        self.register_buffer("scale", torch.tensor([form.scale]))
        self.register_buffer("zero", torch.tensor([form.zero], dtype=torch.int32))
        self.register_buffer("scales", 2.0 ** -(4 + torch.arange(32) % 3))
        self.register_buffer("zeros", torch.full((32,), form.w_zero, dtype=torch.int32))
        self.register_buffer("x_scales", torch.full((32,), form.scale))
        self.register_buffer("x_zeros", torch.full((32,), form.zero, dtype=torch.int32))
        self.register_buffer("enabled", torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        x, w = OF_X[self.form.of_x](self, x), OF_W[self.form.of_w](self, self.w)
        return F.conv2d(x, w) if self.form.conv else F.linear(x, w)


def _decomposed_numbers(m: Product, x: Tensor) -> Tensor:
    f = m.form
    known = f.scale, f.zero, f.low, f.high, f.byte
    q = decomposed.quantize_per_tensor(x, *known)
    return decomposed.dequantize_per_tensor(q, *known, out_dtype=f.dtype)


def _decomposed_tensors(m: Product, x: Tensor) -> Tensor:
    f = m.form
    known = m.scale, m.zero, f.low, f.high, f.byte
    q = decomposed.quantize_per_tensor.tensor(x, *known)
    return decomposed.dequantize_per_tensor.tensor(q, *known, out_dtype=f.dtype)


def _decomposed_channels(m: Product, w: Tensor) -> Tensor:
    f = m.form
    known = m.scales, m.zeros, f.axis, f.w_low, 127, torch.int8
    q = decomposed.quantize_per_channel(w, *known)
    return decomposed.dequantize_per_channel(q, *known, out_dtype=f.dtype)


OF_X: dict[str, Callable[[Product, Tensor], Tensor]] = {
    "numbers": lambda m, x: torch.fake_quantize_per_tensor_affine(
        x, m.form.scale, m.form.zero, m.form.low, m.form.high
    ),
    "tensors": lambda m, x: torch.fake_quantize_per_tensor_affine(
        x, m.scale, m.zero, m.form.low, m.form.high
    ),
    "numbers, mask": lambda m, x: aten.fake_quantize_per_tensor_affine_cachemask(
        x, m.form.scale, m.form.zero, m.form.low, m.form.high
    )[0],
    "tensors, mask": lambda m, x: aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
        x, m.scale, m.zero, m.enabled, m.form.low, m.form.high
    )[0],
    "decomposed": _decomposed_numbers,
    "decomposed tensors": _decomposed_tensors,
    "channels": lambda m, x: torch.fake_quantize_per_channel_affine(
        x, m.x_scales, m.x_zeros, 1, m.form.low, m.form.high
    ),
}
OF_W: dict[str, Callable[[Product, Tensor], Tensor]] = {
    "channels": lambda m, w: torch.fake_quantize_per_channel_affine(
        w, m.scales, m.zeros, m.form.axis, m.form.w_low, 127
    ),
    "channels, mask": lambda m, w: aten.fake_quantize_per_channel_affine_cachemask(
        w, m.scales, m.zeros, m.form.axis, m.form.w_low, 127
    )[0],
    "one": lambda m, w: torch.fake_quantize_per_tensor_affine(w, 2.0**-5, 0, m.form.w_low, 127),
    "decomposed": _decomposed_channels,
    "stored": lambda m, w: decomposed.dequantize_per_channel(
        m.stored, m.scales, m.zeros, m.form.axis, m.form.w_low, 127, torch.int8,
        out_dtype=m.form.dtype,
    ),
    "stored, no zeros": lambda m, w: decomposed.dequantize_per_channel(
        m.stored, m.scales, None, m.form.axis, m.form.w_low, 127, torch.int8,
        out_dtype=m.form.dtype,
    ),
}  # fmt: skip


def example(form: Form) -> Tensor:
    """Also of numbers halfway between two steps, and beyond the largest."""
    shape = (2, 32, 6, 5) if form.conv else (21, 32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 4
    ties = (torch.arange(32) - 16.5) * form.scale
    x.view(-1)[: len(ties)] = ties
    return x.to(form.dtype)


def captured(form: Form) -> tuple[Graph, Tensor, Tensor]:
    """The graph, what it is given, and what torch makes of that."""
    module, x = Product(form).eval(), example(form)
    with torch.no_grad():
        return gtco.capture(module, (x,)), x, module(x)


def multiplied(graph: Graph) -> list[torch.dtype]:
    """Of what the products of a graph are."""
    graph = multiply_pairs(graph)
    products = [node for node in graph.nodes if node.op in ("linear", "conv2d")]
    return [graph.specs[name].dtype for node in products for name in node.inputs[:2]]


FORMS = {
    **{of_x: Form(of_x=of_x) for of_x in OF_X},
    **{f"weights, {of_w}": Form(of_w=of_w) for of_w in OF_W},
    "decomposed, both": Form(of_x="decomposed", of_w="stored"),
    "convolution": Form(conv=True),
    "decomposed convolution": Form(of_x="decomposed tensors", of_w="decomposed", conv=True),
    "zero point": Form(of_x="tensors", zero=-7),
    "zero point, decomposed": Form(of_x="decomposed", zero=5),
    "zero point, convolution": Form(zero=-128, conv=True),
    "narrow": Form(low=-127),
    "narrow weights": Form(w_low=-127),
    "decomposed, narrow": Form(of_x="decomposed", of_w="decomposed", w_low=-127),
    "unsigned": Form(low=0, high=255, zero=100),
    "unsigned, decomposed": Form(of_x="decomposed", low=0, high=255, zero=128),
    "7 bits": Form(low=0, zero=3),
    "7 bits, decomposed": Form(of_x="decomposed", low=0, zero=3),
    "4 bits": Form(low=-8, high=7, scale=0.5),
    "within a byte": Form(low=10, high=200, zero=50),
    "16 bits": Form(low=-32768, high=32767, scale=2.0**-10),
    "columns": Form(axis=1),
    "columns, decomposed": Form(of_w="decomposed", axis=1),
    "columns, convolution": Form(axis=1, conv=True),
    "weights' zero points": Form(w_zero=3),
    "weights' zero points, decomposed": Form(of_w="stored", w_zero=3),
}
IN_F32 = {"channels", "16 bits", "columns", "columns, decomposed", "columns, convolution",
          "weights' zero points, decomposed"}  # fmt: skip
"""Forms that no product of int8 computes."""


@pytest.mark.parametrize("name", FORMS)
def test_quantized_products_are_as_in_torch(name: str) -> None:
    graph, x, expected = captured(FORMS[name])
    assert "aten" not in {node.op for node in graph.nodes}
    assert torch.equal(interpret(graph, (x,))[0], expected)
    assert multiplied(graph) == [torch.float32 if name in IN_F32 else torch.int8] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "form",
    [Form(), Form(of_x="tensors", zero=2), Form(of_x="decomposed", of_w="decomposed")],
    ids=["numbers", "zero point", "decomposed"],
)
def test_halves_are_rounded_in_f32(form: Form, dtype: torch.dtype) -> None:
    graph, x, expected = captured(replace(form, dtype=dtype))
    (quotient, *_) = (node for node in graph.nodes if node.op == "div")
    assert quotient.outputs[0].dtype == torch.float32
    assert torch.equal(interpret(graph, (x,))[0], expected)
    assert multiplied(graph) == [torch.int8] * 2


class Rounded(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, self.scale, 3, -128, 127)


def test_other_scales_differ_by_one_step_in_few_places() -> None:
    module, x = Rounded(0.013), torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = interpret(gtco.capture(module.eval(), (x,)), (x,))[0]
    off = (found - module(x)).abs()
    assert off.max() < 0.0131 and (off > 0).sum() < 10


def test_programs_that_torch_took_apart_are_captured_too() -> None:
    form = Form(of_x="tensors", zero=4)
    module, x = Product(form).eval(), example(form)
    program = export(module, (x,), strict=False).run_decompositions()
    graph = gtco.capture(program)
    with torch.no_grad():
        assert torch.equal(interpret(graph, (x,))[0], module(x))
    assert multiplied(graph)[0] == torch.int8


def test_a_rounding_that_is_switched_off_does_nothing() -> None:
    module, x = Product(Form(of_x="tensors, mask")), example(Form())
    module.enabled.zero_()
    graph = gtco.capture(module.eval(), (x,))
    with torch.no_grad():
        assert torch.equal(interpret(graph, (x,))[0], module(x))


def test_scales_that_are_computed_are_divided_by() -> None:
    class Dynamic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = x.abs().amax().reshape(1) / 127, torch.zeros(1, dtype=torch.int32)
            return torch.fake_quantize_per_tensor_affine(x, scale, zero, -127, 127)

    x = torch.arange(-127.0, 128.0) / 4
    graph = gtco.capture(Dynamic().eval(), (x,))
    assert torch.equal(interpret(graph, (x,))[0], Dynamic()(x))


def test_zero_points_with_a_fraction_are_refused() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 0.25))
            self.register_buffer("zero", torch.full((4,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero, 0, -128, 127)

    with pytest.raises(CaptureError, match="fake_quantize_per_channel_affine"):
        gtco.capture(Shifted().eval(), (torch.randn(4, 8),))
