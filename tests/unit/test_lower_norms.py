"""Norms by the root mean square are the same graph whatever a device exports them as."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.compiler import make_plan
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes.canonicalize import canonicalize
from tests.pass_checks import captured, ops, random

WEIGHT = random(6, 8, seed=1)
aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("shape", [(8,), (6, 8)])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_a_gpu_leaves_whole_is_taken_apart(
    weighted: bool, shape: tuple[int, ...], eps: float | None, dtype: torch.dtype
) -> None:
    """torch exports a norm on a GPU as `aten._fused_rms_norm`, and takes it apart on a CPU."""

    def spelled(c: nn.Module, x: Tensor) -> Tensor:
        return F.rms_norm(x, shape, c.w if weighted else None, eps)

    def whole(c: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = aten._fused_rms_norm.default(x, shape, c.w if weighted else None, eps)[0]
        return found

    weight = (WEIGHT if len(shape) == 2 else WEIGHT[0]).to(dtype)
    x = random(3, 6, 8).to(dtype)
    graph, args = captured(spelled, x, w=weight)
    assert str(graph) == str(captured(whole, x, w=weight)[0])
    assert "aten" not in ops(graph)
    (found,) = interpret(graph, args)
    torch.testing.assert_close(found, spelled(_holding(weight), x))


def _holding(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.w = weight
    return module


def test_its_reciprocal_root_is_left_to_aten_where_somebody_reads_it() -> None:
    def both(c: nn.Module, x: Tensor) -> Tensor:
        y, root = aten._fused_rms_norm.default(x, (8,), c.w, 1e-6)
        return y * root

    graph, _ = captured(both, random(3, 8).float(), w=WEIGHT[0].float())
    assert ops(graph)["aten"] == 1


def test_a_norm_is_one_kernel() -> None:
    model = nn.RMSNorm(64).half().eval()
    plan, _ = make_plan(model, (torch.randn(5, 64).half(),), None, Options.of(target="sm_90a"))
    assert [launch.program is not None for launch in plan.launches] == [True]


@pytest.mark.parametrize(
    ("exponent", "op"), [(2, "square"), (0.5, "sqrt"), (-0.5, "rsqrt"), (-1, "reciprocal")]
)
def test_powers_of_a_few_instructions(exponent: float, op: str) -> None:
    """`powf` takes about 30."""
    x = random(3, 8).abs().float()
    graph, args = captured(lambda c, x: x**exponent, x)
    result = canonicalize(graph)
    assert ops(result) == {op: 1}
    torch.testing.assert_close(interpret(result, args)[0], x**exponent)


@pytest.mark.parametrize(("exponent", "dtype"), [(3, torch.float32), (2.5, torch.float32)])
def test_other_powers_stay(exponent: float, dtype: torch.dtype) -> None:
    graph, _ = captured(lambda c, x: x**exponent, random(3, 8).to(dtype))
    assert ops(canonicalize(graph)) == {"pow": 1}


def test_squares_of_integers_wrap_around() -> None:
    x = torch.tensor([-3, 5, 2**30], dtype=torch.int32)
    graph, args = captured(lambda c, x: x**2, x)
    result = canonicalize(graph)
    assert ops(result) == {"square": 1} and torch.equal(interpret(result, args)[0], x**2)
