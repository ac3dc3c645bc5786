"""Layer norm and GELU spelled out are recognised; layer norm goes into linears exactly."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes.canonicalize import canonicalize
from gtco.passes.fold_constants import fold_constants
from gtco.passes.normalization import fuse_normalization
from gtco.passes.rewrite import Log
from gtco.passes.split_norm import split_norms
from tests.faults.test_pass_faults import planted
from tests.pass_checks import Golden, captured, check, ops, random, reasons, rmse

# -- layer norm and GELU -------------------------------------------------------------------------


def spelled_norm(x: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda c, x: spelled_norm(x) * c.g + c.b, "layer_norm"),
        (lambda c, x: (x - x.mean(-1, True)) / (x.var(-1, False, True) + 1e-5).sqrt(),
         "layer_norm"),
        (lambda c, x: c.g * ((u := x - x.mean(-1, True)) / ((u**2).mean(-1, True) + 1e-5).sqrt()),
         "layer_norm"),
        (lambda c, x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gelu"),
        (lambda c, x: x * ((torch.erf(x * 0.70710678) + 1.0) / 2), "gelu"),
        (lambda c, x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))), "gelu"),
        (lambda c, x: x * 0.5 * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))), "gelu"),
    ],
)  # fmt: skip
def test_spelled_out(function: Callable[..., Tensor], expected: str) -> None:
    graph, args = captured(function, random(2, 3, 8), g=random(8), b=random(8, seed=1))
    assert ops(check(fuse_normalization, canonicalize(graph), args)) == {expected: 1}


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def less(x: Tensor) -> Tensor:
    return mean(x * x) - mean(x) ** 2


def inverse(c: nn.Module, variance: Tensor) -> Tensor:
    return torch.rsqrt(variance + 1e-5) * c.g  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: (x - mean(x)) * inverse(c, spread(x)) + c.b,
        lambda c, x: inverse(c, less(x)) * (x - mean(x)) + c.b,
        lambda c, x: (x - mean(x)) * inverse(c, less(x).clamp(min=0)) + c.b,
        lambda c, x: x * inverse(c, spread(x)) + (c.b - mean(x) * inverse(c, spread(x))),
        lambda c, x: (c.b - inverse(c, less(x)) * mean(x)) + x * inverse(c, less(x)),
    ],
    ids=["Flax", "Flax, fast variance", "Flax, not below zero", "Keras", "Keras, fast variance"],
)
def test_as_other_frameworks_write_it(function: Callable[..., Tensor]) -> None:
    graph, args = captured(function, random(2, 3, 8), g=random(8), b=random(8, seed=1))
    result = check(fuse_normalization, canonicalize(graph), args)
    assert ops(result) == {"layer_norm": 1}


def apart(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def spread(x: Tensor) -> Tensor:
    return (apart(x) * apart(x)).mean(-1, keepdim=True)


LOOK_ALIKES: list[Callable[..., Tensor]] = [
    lambda c, x: (x - c.z.mean(-1, True)) * torch.rsqrt(spread(x) + 1e-5),
    lambda c, x: apart(x) * torch.rsqrt(spread(c.z) + 1e-5),
    lambda c, x: apart(x) * torch.rsqrt((x * x).mean(-1, True) + 1e-5),
    lambda c, x: apart(x) * torch.rsqrt((apart(x) * apart(c.z)).mean(-1, True) + 9),
    lambda c, x: (x - x.mean(1, True)) * torch.rsqrt(spread(x) + 1e-5),
    lambda c, x: (x - x.amax(-1, True)) * torch.rsqrt(spread(x) + 1e-5),
    lambda c, x: (x + x.mean(-1, True)) * torch.rsqrt(spread(x) + 1e-5),
    lambda c, x: apart(x) * (spread(x) + 1e-5).sqrt(),
    lambda c, x: apart(x) / ((x.var(-1, False, True)).sqrt() + 1e-5),
    lambda c, x: (d := x - mean(c.z)) * torch.rsqrt(mean(d * d) + 1e-5),
    lambda c, x: apart(x) * torch.rsqrt(mean(x * x) - mean(x) + 9),
    lambda c, x: apart(x) * torch.rsqrt(mean(c.z * c.z) - mean(x) ** 2 + 9),
    lambda c, x: apart(x) * torch.rsqrt(mean(x * x) - mean(c.z) ** 2 + 9),
    lambda c, x: apart(x) * torch.rsqrt(less(x).clamp(min=1) + 1e-5),
    lambda c, x: x * torch.rsqrt(less(x) + 9) + (c.z - mean(x) * torch.rsqrt(less(x) + 8)),
    lambda c, x: x * torch.rsqrt(less(x) + 9) + (c.z - mean(c.z) * torch.rsqrt(less(x) + 9)),
    lambda c, x: apart(x) / (x.var(-1, True, True) + 1e-5).sqrt(),
    lambda c, x: apart(x) * torch.rsqrt(spread(x) + c.z[..., :1] ** 2),
    lambda c, x: apart(x) * torch.rsqrt(spread(x) * 2 + 1e-5),
]


@pytest.mark.parametrize("function", LOOK_ALIKES)
def test_what_only_looks_like_a_layer_norm_stays(function: Callable[..., Tensor]) -> None:
    graph, args = captured(function, random(2, 3, 8), z=2 + random(2, 3, 8, seed=1))
    assert "layer_norm" not in ops(check(fuse_normalization, canonicalize(graph), args))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("of_x and _squared(edit, less.inputs[1]) == mean", "of_x"),
        ("squares is not None and _squared(edit, squares) == x", "True"),
        ("_squared(edit, squares) == deviation", "True"),
        ("clamped is not None and clamped[1] == 0", "clamped is not None"),
        ("_row_mean(edit, mean) != x or", ""),
        ("scale in moved.inputs and len(means) == 1", "len(means)"),
    ],
)
def test_faults_of_variances_are_caught(before: str, after: str) -> None:
    module = planted(sys.modules[fuse_normalization.__module__], before, after)
    caught = 0
    for function in LOOK_ALIKES:
        graph, args = captured(function, random(2, 3, 8), z=2 + random(2, 3, 8, seed=1))
        try:
            result = check(module.fuse_normalization, canonicalize(graph), args)
            caught += "layer_norm" in ops(result)
        except Exception:
            caught += 1
    assert caught


def squared_in(wide: torch.dtype, end: torch.dtype) -> Callable[..., Tensor]:
    """A layer norm as exporters to ONNX write it in 16 bits: deviations are widened for the rest,
    and scaled by g in the type that its result ends in."""

    def norm(c: Any, x: Tensor) -> Tensor:
        d = apart(x).to(wide)
        return (d / ((d**2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(end) * c.g.to(end)

    return norm


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_layer_norm_whose_squares_are_of_a_wider_type(wide: torch.dtype) -> None:
    x, g = random(2, 3, 8, dtype=torch.float16), random(8, dtype=torch.float16)
    graph, args = captured(squared_in(wide, torch.float16), x, g=g)
    result = fuse_normalization(canonicalize(graph))
    assert ops(result) == {"layer_norm": 1}
    exact = squared_in(torch.float64, torch.float64)(SimpleNamespace(g=g.double()), x.double())
    (found,), (eager,) = interpret(result, args), interpret(graph, args)
    assert rmse(found, exact) <= 1.1 * rmse(eager, exact)


@pytest.mark.parametrize(
    ("of", "wide", "end"),
    [
        (torch.float16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float16, torch.float32),
        (torch.bfloat16, torch.float16, torch.bfloat16),
    ],
    ids=["of another type", "of a narrower one", "of one with fewer exponents"],
)
def test_but_no_other(of: torch.dtype, wide: torch.dtype, end: torch.dtype) -> None:
    graph, _ = captured(squared_in(wide, end), random(2, 3, 8, dtype=of), g=random(8, dtype=of))
    assert "layer_norm" not in ops(fuse_normalization(canonicalize(graph)))


def test_a_layer_norm_without_epsilon() -> None:
    x = 1e-3 * random(2, 3, 8)
    graph, args = captured(lambda c, x: apart(x) * torch.rsqrt(spread(x)), x)
    result = check(fuse_normalization, canonicalize(graph), args)
    assert all(node.attrs["eps"] == 0 for node in result.nodes if node.op == "layer_norm")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: 0.5 * x * (1 + torch.erf(x / c.root)),
        lambda c, x: 0.5 * x * (1 + torch.tanh(c.a * (x + c.b * x**3))),
    ],
    ids=["erf", "tanh"],
)
def test_a_gelu_whose_constants_are_halves(
    function: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """As an ONNX file in half precision has them."""
    constants = {"root": 2**0.5, "a": (2 / math.pi) ** 0.5, "b": 0.044715}
    graph, _ = captured(
        function, random(2, 3, 8, dtype=dtype),
        **{name: torch.tensor([value], dtype=dtype) for name, value in constants.items()},
    )  # fmt: skip
    assert ops(fuse_normalization(canonicalize(graph))) == {"gelu": 1}


def test_what_only_looks_like_a_gelu_stays() -> None:
    graph, args = captured(lambda c, x: 0.5 * x * (1 + torch.erf(x)), random(2, 3))
    assert ops(check(fuse_normalization, graph, args))["gelu"] == 0


# -- the split of layer norm ---------------------------------------------------------------------


class NormLinear(nn.Module):
    def __init__(self, columns: int, *, residual: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(columns)
        self.a, self.b = nn.Linear(columns, 24), nn.Linear(columns, columns, bias=False)
        self.residual = residual
        nn.init.normal_(self.norm.weight, 1.0, 0.2)
        nn.init.normal_(self.norm.bias, 0.0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        y = torch.cat([F.gelu(self.a(n[:, 1:])).flatten(), self.b(n).flatten()])
        return y + n.sum() if self.residual else y


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_split_layer_norm(dtype: torch.dtype, golden: Golden) -> None:
    torch.manual_seed(0)
    model, x = NormLinear(96).eval().to(dtype), random(2, 5, 96, dtype=dtype)
    graph = capture(model, (x,)).graph
    result = split_norms(graph)
    result.verify()
    assert ops(result)["row_stats"] == ops(result)["merge_stats"] == 1
    (actual,), (expected,) = interpret(result, (x,)), interpret(graph, (x,))
    step = torch.finfo(dtype).eps
    assert_close(actual, expected, rtol=8 * step, atol=8 * step)
    if dtype == torch.float16:
        golden("passes/split_layer_norm.txt", result)


@pytest.mark.parametrize("mean, spread", [(0.0, 1.0), (100.0, 1.0), (-100.0, 1.0)])
def test_split_layer_norm_with_a_large_mean(mean: float, spread: float) -> None:
    """DESIGN section 9: the error is at most 3 times eager's, plus a tenth of the tolerance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 256)).eval().half()
    x = (mean + spread * torch.randn(1, 50, 768)).half()
    x[..., 7] += 20 * spread  # an outlier channel
    with torch.no_grad():
        eager, exact = model(x), model.double()(x.double())
    graph = capture(model.half(), (x,)).graph
    result = split_norms(graph)
    assert ops(result)["layer_norm"] == 0
    (actual,) = interpret(result, (x,))
    assert actual.dtype == torch.float16
    assert rmse(actual, exact) <= 3 * rmse(eager, exact) + 1e-3


def test_split_is_wrong_if_the_sums_are_of_unrounded_weights() -> None:
    """The large-mean test can fail: sums taken before the rounding break the cancellation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 256)).eval().half()
    nn.init.normal_(model[0].weight, 1.0, 0.2)
    x = (100 + torch.randn(1, 50, 768)).half()
    graph = split_norms(capture(model, (x,)).graph)
    wrong = dict(graph.constants)
    (name,) = (name for name in wrong if name.endswith("colsum"))
    wrong[name] = (model[1].weight.double() * model[0].weight.double()).sum(1).float()
    broken = Graph(graph.inputs, wrong, graph.nodes, graph.outputs)
    with torch.no_grad():
        eager, exact = model(x), model.double()(x.double())
    (actual,) = interpret(broken, (x,))
    assert rmse(actual, exact) > 3 * rmse(eager, exact) + 1e-3


@pytest.mark.parametrize(
    "model, dtype, reason",
    [
        (NormLinear(64, residual=True), torch.float16, "reads the normalised value too"),
        (NormLinear(64), torch.float32, "as far off as its rows' mean is large"),
    ],
)
def test_split_layer_norm_refuses(model: nn.Module, dtype: torch.dtype, reason: str) -> None:
    x, log = random(1, 5, 64, dtype=dtype), Log()
    result = check(split_norms, capture(model.eval().to(dtype), (x,)).graph, (x,), log)
    assert ops(result)["layer_norm"] == 1
    assert reason in reasons(log)


def by_mean_square(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rounded_first(x: Tensor, g: Tensor) -> Tensor:
    """Llama's, in transformers."""
    y = x.float()
    return g * (y * by_mean_square(y)).to(x.dtype)


def scaled_first(x: Tensor, g: Tensor) -> Tensor:
    """Gemma's."""
    y = x.float()
    return (y * by_mean_square(y) * (1.0 + g.float())).to(x.dtype)


def by_quotient(x: Tensor, g: Tensor) -> Tensor:
    y = x.float()
    return (y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * g


def unscaled(x: Tensor, g: Tensor) -> Tensor:
    y = x.float()
    return (y * by_mean_square(y)).to(x.dtype)


ROOT_MEAN_SQUARES = [
    rounded_first,
    scaled_first,
    by_quotient,
    unscaled,
    lambda x, g: F.rms_norm(x, x.shape[-1:], g, 1e-5),
]


def of_root_mean_square(
    norm: Callable[[Tensor, Tensor], Tensor], *xs: Tensor, bias: bool = True
) -> tuple[Graph, tuple[Tensor, ...]]:
    dtype, columns = xs[0].dtype, xs[0].shape[-1]
    tensors = {
        "g": 1 + 0.2 * random(columns, seed=1),
        "w": random(24, columns, seed=2) / columns**0.5,
        "c": random(24, seed=3),
    }
    tensors = {name: each.to(dtype) for name, each in tensors.items()}
    return captured(
        lambda c, x, *more: F.linear(norm(x, *more, c.g), c.w, c.c if bias else None),
        *xs,
        **tensors,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ROOT_MEAN_SQUARES)
@pytest.mark.parametrize("kind", ["spread", "mean", "one value", "zero"])
def test_a_root_mean_square_moves_into_its_linears(
    norm: Callable[..., Tensor], dtype: torch.dtype, kind: str
) -> None:
    x = 3 * random(2, 5, 96, seed=4)
    x = {"spread": x, "mean": x + 100, "one value": x[..., :1].expand(x.shape), "zero": 0 * x}[kind]
    graph, args = of_root_mean_square(norm, x.to(dtype), bias=kind != "spread")
    result = split_norms(fold_constants(canonicalize(graph)))
    result.verify()
    assert ops(result)["merge_stats"] == 1
    assert not {"mean", "pow", "div"} & ops(result).keys()
    (actual,), (expected,) = interpret(result, args), interpret(graph, args)
    (exact,) = interpret(graph, args, dtype=torch.float64)
    assert rmse(actual, exact) <= 3 * rmse(expected, exact) + 1e-4


def of_another(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return g * (x.float() * by_mean_square(y.float())).to(x.dtype)


def of_columns(x: Tensor, g: Tensor) -> Tensor:
    y = x.float()
    return g * (y * torch.rsqrt(y.pow(2).mean(-2, keepdim=True) + 1e-5)).to(x.dtype)


def rounded_to_less(x: Tensor, g: Tensor) -> Tensor:
    y = x.float()
    return g * (y * by_mean_square(y)).bfloat16().to(x.dtype)


def of_cubes(x: Tensor, g: Tensor) -> Tensor:
    y = x.float()
    return g * (y * torch.rsqrt(y.abs().pow(3).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def squared_in_half(x: Tensor, g: Tensor) -> Tensor:
    return g * (x * by_mean_square(x))


def scaled_by_rows(x: Tensor, g: Tensor) -> Tensor:
    y = x.float()
    return (y * by_mean_square(y)).to(x.dtype) * g[: x.shape[-2], None]


@pytest.mark.parametrize(
    "norm", [of_columns, rounded_to_less, of_cubes, squared_in_half, scaled_by_rows, of_another]
)
def test_look_alikes_of_root_mean_squares_stay(norm: Callable[..., Tensor]) -> None:
    xs = [random(2, 5, 96, dtype=torch.float16, seed=seed) for seed in (4, 5)]
    graph, args = of_root_mean_square(norm, *xs[: 2 if norm is of_another else 1])
    assert ops(check(split_norms, fold_constants(canonicalize(graph)), args))["row_stats"] == 0


@pytest.mark.parametrize(
    "norm, dtype",
    [
        (rounded_first, torch.float32),
        (lambda x, g: (y := rounded_first(x, g)) + y.sum(), torch.float16),
    ],
)
def test_root_mean_squares_in_fp32_or_that_others_need_stay(
    norm: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    graph, args = of_root_mean_square(norm, random(2, 5, 96, dtype=dtype, seed=4))
    assert ops(check(split_norms, fold_constants(canonicalize(graph)), args))["row_stats"] == 0
