"""Models with parts at the edge of what torch allows: fused, they mean what they meant.

Empty tensors, tensors of rank 0, operands that broadcast the wrong way, casts that round: each goes
through capture, fuse and interpret, and no rule may fail on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import gtco
from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.ir.ops import OPS
from gtco.passes import run_pipeline
from gtco.passes.rewrite import DECLINED, Log
from gtco.passes.views import loses_nothing
from tests.pass_checks import Function, random, reasons

aten = torch.ops.aten
SCALAR = random(1).reshape(())
ZEROS = torch.tensor([-0.0, 1.0, 0.0], dtype=torch.float64)
Model = Callable[..., Any]


def means_the_same(model: Model, *args: Tensor, **tensors: Tensor) -> Graph:
    """The graph of `model(constants, *args)` after fusion; it gives what torch gives."""
    module = Function(model, **tensors).eval()
    captured = capture(module, args)
    log = Log()
    run_pipeline(captured.graph, log=log)
    assert DECLINED not in reasons(log)
    fused = gtco.fuse(captured.graph)
    result, expected = captured.unflatten(interpret(fused, args)), module(*args)
    assert_close(result, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    return fused.graph


def _ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


EMPTY: dict[str, tuple[Model, tuple[int, ...]]] = {
    "slice": (lambda c, x: x[:, 2:2] * 2, (2, 3, 4)),
    "strided slice": (lambda c, x: x[:, 1:1:2] + 1, (2, 3, 4)),
    "slices and a sum": (lambda c, x: (x[:, 2:2].relu() + x[:, 1:1]).sum(), (2, 3, 4)),
    "resize of no image": (
        lambda c, x: F.interpolate(x, size=(3, 5), mode="nearest-exact"),
        (0, 2, 1, 5),
    ),
    "pooling of no channel": (
        lambda c, x: F.interpolate(x, size=(2, 3), mode="area"),
        (8, 0, 2, 6),
    ),
    "pooling of no boolean": (lambda c, x: F.adaptive_avg_pool2d(x.bool(), (1, 2)), (0, 2, 3, 4)),
    "slice of one": (lambda c, x: (x + x.relu())[0:0], (1, 4)),
    "rows": (lambda c, x: F.linear(x, c.w, c.b).relu() * 2, (0, 4)),
    "columns": (lambda c, x: F.linear(x, c.w[:0]).relu(), (3, 4)),
    "depth": (lambda c, x: F.linear(x[:, :0], c.w[:, :0], c.b).relu(), (3, 4)),
    "product": (lambda c, x: x @ c.w.T + 1, (2, 0, 4)),
    "softmax": (lambda c, x: torch.softmax(x, -1) + torch.softmax(x, 0), (3, 0)),
    "norm": (lambda c, x: F.linear(F.layer_norm(x, (4,), c.w[0]), c.w), (2, 0, 4)),
    "sum": (lambda c, x: (x.sum(1) + 1, x.mean(1), x.amax(2), x.sum()), (2, 0, 4)),
    "any and all": (lambda c, x: (x.any(1), x.all(1), x.any(), x.all()), (2, 0, 4)),
    "queries": (lambda c, q: F.scaled_dot_product_attention(q, q, q) * 2, (1, 2, 0, 4)),
    "keys": (
        lambda c, q: torch.softmax(q @ q[:, :0].transpose(1, 2) * 0.5, -1) @ q[:, :0],
        (2, 3, 4),
    ),
    "biased scores of no pixels": (
        lambda c, x: (torch.einsum(
            "...id,...jd->...ij", y := x.diagonal(0, 0, 1), y) + c.b[:0]).softmax(-1) @ y,
        (3, 4, 4, 0),
    ),
    "heads": (lambda c, q: F.scaled_dot_product_attention(q, q, q), (1, 2, 3, 0)),
    "concat": (lambda c, x: torch.cat([x, x[:, :0]], 1) * torch.cat([x[:, :0], x], 1), (2, 3)),
    "permute": (lambda c, x: x.transpose(1, 2).reshape(0, 2) + 1, (2, 0, 4)),
    "reshape": (lambda c, x: x.reshape(6, 4)[3:3].reshape(0, 2, 2) + 1, (2, 3, 4)),
    "expand": (lambda c, x: x.expand(0, 3) + 1, (1, 3)),
    "patches": (
        lambda c, x: F.conv2d(x, c.k, stride=2).flatten(2).transpose(1, 2), (0, 3, 8, 8),
    ),
    "no channels": (lambda c, x: F.conv1d(x, c.w[..., None][:, :0]) + 1, (1, 0, 4)),
    "no channels of an image": (lambda c, x: F.conv2d(x, c.k[:, :0]) * 2, (2, 0, 3, 3)),
    "no instances": (lambda c, x: F.instance_norm(x) + 1, (2, 0, 13)),
    "no channels of patches": (lambda c, x: F.conv2d(x, c.k[:, :0], stride=2), (2, 0, 4, 4)),
    "crop": (lambda c, x: F.pad(x, (-1, -2)) + F.pad(x[:, :0], (0, 0, 1, -1)), (2, 3)),
    "roll": (lambda c, x: torch.roll(x, (1, 2), (0, 1)) * 2, (2, 0)),
    "split": (lambda c, x: (*x.split(0, 1), *x.chunk(3, 1)), (2, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY)
def test_empty_tensors(case: str) -> None:
    model, shape = EMPTY[case]
    w, k = random(8, 4, seed=1), random(4, 3, 2, 2, seed=3)
    means_the_same(model, random(*shape), w=w, b=random(8, seed=2), k=k)


def test_dimensions_of_a_tensor_of_rank_0() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        sums = x.sum(0), x.mean(-1) + 1, x.amax(0, keepdim=True), x.var(0, unbiased=False)
        softmax = torch.softmax(x, 0) * 2, torch.log_softmax(x, -1) * 2
        norm = torch.linalg.vector_norm(x, dim=0)
        views = x.squeeze(0) + x.unsqueeze(-1), x.permute(()) + x.t() + x.transpose(0, -1)
        others = x.flip(-1) * 2, x.any(0), (x > 0).all(-1)
        return *sums, *softmax, norm, *views, *others, x.max(0).values, x.cumsum(0) * 2

    means_the_same(model, SCALAR)


def test_rows_of_one_number_that_one_number_scales() -> None:
    def model(c: Function, x: Tensor, factor: Tensor) -> Tensor:
        return F.linear(x.mean(-1, keepdim=True) * factor, c.w)

    means_the_same(model, random(6, 8).float(), SCALAR.float(), w=random(1, 1).float())


def test_no_dimensions() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        squeezed = aten.squeeze.dims(x, []) * 2, aten.squeeze.dims(x, [1]) * 2, x.squeeze() * 2
        return *squeezed, x.sum(()), x.mean(()), x.amax(()), torch.var(x, ())

    means_the_same(model, random(2, 1, 3, 1))


def test_zeros_keep_their_sign() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        sums = x + 0, x - 0, x + (-0.0), x - (-0.0), 0 - x, c.zero + x, c.zero - x, x * 1, x / 1
        return tuple(1 / value for value in sums)

    graph = means_the_same(model, ZEROS, zero=torch.zeros((), dtype=torch.float64))
    assert sum(node.op in ("add", "mul") for node in graph.nodes) <= 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("number", [0.125, 3, -1000])
def test_a_number_minus_narrow_integers(number: float, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 100, 127], dtype=dtype)
    means_the_same(lambda c, x: number - x, x)
    if dtype == torch.int16:
        means_the_same(lambda c, x: number - x, torch.tensor([-32768, 32767], dtype=dtype))


def test_attention_by_a_scale_of_zero_gives_torch_none() -> None:
    """Its fused kernels for GPUs make NaN of it."""
    q, k, v = (random(1, 2, 5, 3) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.0)
    with pytest.MonkeyPatch.context() as patch:
        scales: list[float] = []
        real = F.scaled_dot_product_attention

        def note(*args: Any, scale: float, **kwargs: Any) -> Tensor:
            scales.append(scale)
            return real(*args, scale=scale, **kwargs)

        patch.setattr(F, "scaled_dot_product_attention", note)
        found = OPS["attention"].reference(q, k, v, scale=0.0)
    assert scales == [1.0]
    assert_close(found, expected)


def test_a_sum_scales_in_its_own_type() -> None:
    def model(c: Function, x: Tensor, small: Tensor) -> tuple[Tensor, ...]:
        return torch.add(x, small, alpha=100), torch.sub(x, small, alpha=100), torch.rsub(
            small, x, alpha=100
        )  # fmt: skip

    means_the_same(model, torch.tensor([1, 2]), torch.tensor([100, 7], dtype=torch.int8))


@pytest.mark.parametrize("end", [slice(4, None), slice(0, 3), slice(0, 2)])
def test_a_slice_of_a_concat_of_two_dtypes(end: slice) -> None:
    def model(c: Function, x: Tensor) -> Tensor:
        return torch.cat([x.float(), x], 1)[:, end] * 2

    means_the_same(model, random(2, 3))


def test_a_concat_has_the_type_of_its_empty_parts_too() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([c.none, x], 0) * 2, torch.cat([c.none, x, x], 0) * 2

    means_the_same(model, random(3, 2).float(), none=random(0))


def test_infinite_factors_stay_behind_their_convolution() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, c.k)
        norm = F.batch_norm(y, c.m, torch.zeros_like(c.m), eps=0.0)
        return norm, F.conv2d(x, c.k + 1) * c.infinite

    infinite = torch.full((3, 1, 1), torch.inf, dtype=torch.float64)
    k = random(3, 3, 1, 1, seed=1)
    means_the_same(model, random(2, 3, 5, 5), k=k, m=random(3, seed=2), infinite=infinite)


def test_a_constant_added_to_a_concat() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        mixed = torch.cat([c.narrow, x], 1) + c.row
        wide = torch.cat([c.token, x[:, :0]], 1) + c.row
        return mixed, wide

    tensors = {"narrow": random(2, 1).half(), "row": random(1, 4), "token": random(2, 1)}
    means_the_same(model, random(2, 3), **tensors)


CONSTANTS: dict[str, Model] = {
    "max": lambda c, x: x + c.w.max(1).values,
    "topk": lambda c, x: x + c.w.topk(2, 1).values[:, 0],
    "sort": lambda c, x: x + c.w.sort(1)[0][:, 0] + c.w.sort(1)[1][:, 1],
    "group norm": lambda c, x: x + F.group_norm(c.w[None], 3)[0, :, 0],
    "mean of a norm": lambda c, x: x + aten.native_layer_norm(c.w, [4], None, None, 1e-5)[1][:, 0],
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_a_constant_node_of_several_results(case: str) -> None:
    graph = means_the_same(CONSTANTS[case], random(3), w=random(3, 4, seed=1))
    assert "aten" not in _ops(graph)


@pytest.mark.parametrize("bias", [(1,), (), (1, 8), (3, 8), (8,)])
def test_siblings_with_any_bias(bias: tuple[int, ...]) -> None:
    def model(c: Function, x: Tensor) -> Tensor:
        a, b = F.linear(x, c.v, c.b), F.linear(x, c.w)
        return torch.softmax(a, -1) @ torch.softmax(b, -1).T

    b = random(math.prod(bias), seed=3).reshape(bias)
    graph = means_the_same(model, random(3, 4), v=random(8, 4, seed=1), w=random(8, 4, seed=2), b=b)
    if len(bias) < 2:
        assert sum(node.op == "linear" for node in graph.nodes) == 1


@pytest.mark.parametrize("shape", [(8, 4), (3, 8, 4), (4,)])
def test_weights_that_are_vectors(shape: tuple[int, ...]) -> None:
    def model(c: Function, x: Tensor) -> Tensor:
        a, b, d = F.linear(x, c.v), F.linear(x, c.w), F.linear(x, c.m)
        return a.exp().sum() + b.exp().sum() + d.exp().sum() + (F.linear(x, c.v) + 1).sum()

    v, w, m = random(4, seed=1), random(4, seed=2), random(8, 4, seed=3)
    means_the_same(model, random(*shape), v=v, w=w, m=m)


def test_a_vector_of_weights_behind_what_has_no_dimension() -> None:
    """A linear whose operand is computed from a value of rank 0 is no gate."""

    def row(c: Function, x: Tensor) -> Tensor:
        return F.linear(x.log_softmax(0)[..., None], c.v)

    def column(c: Function, x: Tensor) -> Tensor:
        return F.linear(x + x.var(), c.v[None], c.v)[:, :1].relu()

    means_the_same(row, SCALAR, v=random(1))
    means_the_same(column, random(3, 1), v=random(1))


@pytest.mark.parametrize("shape", [(3, 0), (0, 4)])
def test_a_norm_of_nothing_in_front_of_a_linear(shape: tuple[int, ...]) -> None:
    def model(c: Function, x: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, x.shape[-1:], c.g), c.w, c.b)

    g, w, b = (random(*size).half() for size in (shape[1:], (2, shape[1]), (2,)))
    means_the_same(model, random(*shape).half(), g=g, w=w, b=b)


def test_a_norm_with_parameters_of_a_higher_rank() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        d = x - x.mean(-1, keepdim=True)
        spelled = d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)
        return spelled * c.g + c.b, F.layer_norm(x, (4,)) * c.g + c.b, F.layer_norm(x, (4,)) @ c.w

    g, b = random(1, 1, 4, seed=1), random(1, 1, 1, 4, seed=2)
    graph = means_the_same(model, random(3, 4), g=g, b=b, w=random(2, 4, 5, seed=3))
    assert "sqrt" not in _ops(graph)


@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 1, 3, 3), (1, 1, 1, 3, 3)])
def test_a_mask_wider_than_the_scores_is_no_mask(shape: tuple[int, ...]) -> None:
    def model(c: Function, q: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) + c.m, -1) @ q

    assert "attention" not in _ops(means_the_same(model, random(1, 3, 8), m=random(*shape)))


def test_a_mask_with_more_rows_or_keys_is_no_mask() -> None:
    def model(c: Function, q: Tensor) -> tuple[Tensor, ...]:
        rows = torch.softmax(q[:, :1] @ q.transpose(-1, -2) + c.m, -1) @ q
        keys = torch.softmax(q @ q[:, :1].transpose(-1, -2) + c.m, -1) @ q
        return rows, keys

    assert "attention" not in _ops(means_the_same(model, random(2, 3, 8), m=random(3, 3)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (3, 1)])
def test_a_mask_of_any_lower_rank(shape: tuple[int, ...]) -> None:
    def model(c: Function, q: Tensor, m: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) + m.sin(), -1) @ q

    graph = means_the_same(model, random(2, 2, 3, 8), random(*shape, seed=1))
    assert "attention" in _ops(graph)


@pytest.mark.parametrize("shape, found", [((1, 2, 3, 3), False), ((2, 1, 3, 3), False)])
def test_scores_that_are_reshaped(shape: tuple[int, ...], found: bool) -> None:
    def model(c: Function, q: Tensor) -> Tensor:
        return torch.softmax((q @ q.transpose(-1, -2)).reshape(shape), -1) @ q

    assert ("attention" in _ops(means_the_same(model, random(2, 3, 8)))) == found


def test_scores_over_zero_or_times_infinity() -> None:
    def model(c: Function, q: Tensor) -> tuple[Tensor, ...]:
        scores = q @ q.transpose(-1, -2)
        scaled = scores / 0.0, scores * 0.0, scores * float("inf")
        gelu = (q / 0.0) * (1 + torch.erf(q * 0.5**0.5)), q * 0.5 * (1 + torch.erf(q / 0.0))
        zero = q * 0.0 * 0.5 * (1 + torch.erf(q * 0.5**0.5))
        return *(torch.softmax(value, -1) @ q for value in scaled), *gelu, zero

    assert not {"attention", "gelu"} & _ops(means_the_same(model, random(2, 3, 8)))


def test_products_of_whole_numbers() -> None:
    def model(c: Function, x: Tensor) -> Tensor:
        return x * (x + 1)

    means_the_same(model, torch.arange(4))


def test_attention_of_whole_numbers() -> None:
    def model(c: Function, x: Tensor) -> Tensor:
        return torch.softmax((x @ x.mT).float(), -1).to(x.dtype) @ x

    x = torch.arange(6).reshape(2, 3)
    for dtype in (torch.int8, torch.int64):
        assert "attention" not in _ops(means_the_same(model, x.to(dtype)))


def test_batch_norm_by_statistics_that_are_computed() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        convolved = F.conv2d(x, c.k)
        return (
            F.batch_norm(x, mean, var, c.w, c.b),
            F.batch_norm(x, c.b, c.v, mean, c.b),
            F.batch_norm(convolved, mean, c.v),
            F.batch_norm(convolved, c.b, var),
        )

    tensors = {"w": random(3, seed=1), "b": random(3, seed=2), "v": random(3, seed=3).abs()}
    means_the_same(model, random(2, 3, 4, 4), k=random(3, 3, 1, 1, seed=4), **tensors)


# -- casts ---------------------------------------------------------------------------------------

_CASTS = (torch.int32, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", _CASTS)
def test_no_rule_looks_through_a_cast_that_rounds(dtype: torch.dtype) -> None:
    def model(c: Function, q: Tensor) -> tuple[Tensor, ...]:
        scores = q @ q.transpose(-1, -2) * 3
        probabilities = torch.softmax(q @ q.transpose(-1, -2), -1)
        before = torch.softmax(scores.to(dtype).double(), -1) @ q
        return before, probabilities.to(dtype).double() @ q, (q * 100).to(dtype).double() + 1

    assert "attention" not in _ops(means_the_same(model, random(2, 3, 8)))


def test_attention_in_half_looks_through_single() -> None:
    def model(c: Function, q: Tensor) -> Tensor:
        return torch.softmax((q @ q.transpose(-1, -2)).float() * 0.5, -1).half() @ q

    module = Function(model).eval()
    q = random(2, 3, 8).half()
    assert "attention" in _ops(gtco.fuse(capture(module, (q,)).graph).graph)


_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
           torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32,
           torch.float64)  # fmt: skip


def _edges(dtype: torch.dtype) -> Tensor:
    """The values of `dtype` that a smaller type is the likeliest to lose."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.min + 1, 0, 1, info.max - 1, info.max], dtype=dtype)
    bits = torch.finfo(dtype)
    return torch.tensor([-bits.max, -bits.tiny, 0, 0.5, 1 + bits.eps, bits.max], dtype=dtype)


@pytest.mark.parametrize("source", _DTYPES)
@pytest.mark.parametrize("target", _DTYPES)
def test_casts_that_lose_nothing(source: torch.dtype, target: torch.dtype) -> None:
    values = _edges(source)
    there, back = values.to(target), values.to(target).to(source)
    kept = all(torch.equal(values.double(), each.double()) for each in (there, back))
    assert loses_nothing(source, target) == kept


def test_values_that_are_rounded_to_fp8() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        rounded = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        joined = torch.cat([rounded, rounded])
        return rounded.to(x.dtype) * 0.25, joined.float(), rounded == rounded.mT

    x = 3 * random(4, 4)
    means_the_same(model, x)
    means_the_same(model, x.half())


# -- compiled ------------------------------------------------------------------------------------


def _compiles(model: Model, *args: Tensor, **tensors: Tensor) -> None:
    module = Function(model, **tensors).eval()
    compiled = gtco.compile(module, args, target="host")
    assert_close(compiled(*args), module(*args), rtol=1e-4, atol=1e-4)


def test_empty_tensors_compile() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat([x[:, :0], x], 1).relu() + 1, x.exp().sum(-1)
        rows = x[:, 2:2]
        return *whole, rows * 2, F.linear(rows, c.w) + 1, F.layer_norm(rows, (4,)), rows.sum(1)

    single = torch.float32
    _compiles(model, random(2, 3, 4, dtype=single), w=random(8, 4, dtype=single, seed=1))


def test_odd_operands_compile() -> None:
    def model(c: Function, x: Tensor) -> tuple[Tensor, ...]:
        scores = x @ x.transpose(-1, -2)
        rounded = torch.softmax(scores.int().to(x.dtype), -1) @ x
        wide = torch.softmax(scores + c.m, -1) @ x
        return F.linear(x, c.w, c.b).relu(), F.linear(x, c.w[0]), x.sum().softmax(0), rounded, wide

    single = torch.float32
    w, b, m = random(8, 8, dtype=single), random(1, dtype=single), random(2, 3, 3, dtype=single)
    _compiles(model, random(1, 3, 8, dtype=single), w=w, b=b, m=m)
