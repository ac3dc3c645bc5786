"""Weights rounded so that what they are off by adds up to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.ir.interpreter import interpret
from gtco.passes import convolutions, kept_sums, run_pipeline
from gtco.passes.kept_sums import rounded_keeping_sums
from gtco.passes.precision import lower_precision

F16, BF16 = torch.float16, torch.bfloat16


def weights(*shape: int, scale: float = 0.05) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def apart(rounded: Tensor) -> Tensor:
    """From each number of 16 bits to the next one up."""
    return (rounded.abs().view(torch.int16) + 1).view(rounded.dtype).double() - rounded.abs()


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((24, 16, 3, 3), 24 * 16),
        ((40, 1, 5, 5), 40),
        ((8, 6, 3, 1, 2), 48),
        ((32, 200, 1, 1), 32),
        ((16, 24, 1, 3), 16),
    ],
)
def test_errors_add_up_to_nothing(shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    exact = weights(*shape)
    kept, nearest = rounded_keeping_sums(exact, dtype), exact.to(dtype)
    off, far = (each.double() - exact for each in (kept, nearest))
    assert (off.abs() < 1.001 * apart(nearest)).all(), "one of the two on either side"
    sums, before = (each.reshape(rows, -1).sum(1).abs() for each in (off, far))
    assert (sums <= before).all()
    assert sums.mean() < 0.6 * before.mean()
    assert off.norm() < 1.15 * far.norm()


def test_what_is_to_the_nearest() -> None:
    exact = weights(8, 8, 3, 3)
    assert torch.equal(rounded_keeping_sums(exact, torch.float32), exact.float())
    represented = exact.half().double()
    assert torch.equal(rounded_keeping_sums(represented, F16), exact.half())
    none = rounded_keeping_sums(torch.empty(0, 4, 3, 3, dtype=torch.float64), F16)
    assert none.shape == (0, 4, 3, 3)
    extremes = torch.tensor([[[[0.0, 1e-9, 65503.0, 65519.0, -65519.0, 1e6, -0.0, 3e-8]]]])
    kept = rounded_keeping_sums(extremes.double(), F16)
    assert torch.equal(kept.isfinite(), extremes.half().isfinite())
    assert kept[0, 0, 0, 0] == 0


class Folded(nn.Module):
    """Convolutions and their batch norms, over an image whose mean is large."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False)
        self.first = nn.BatchNorm2d(16)
        self.dense = nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.second = nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.depthwise(x))
        y: Tensor = self.second(self.dense(x + 4))
        return y


def test_a_mean_is_no_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Folded().eval()
    for norm in (model.first, model.second):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    model, x = model.half(), (torch.randn(2, 16, 24, 24) + 8).half()
    graph = gtco.capture(model, x)
    (exact,) = interpret(graph, (x,), dtype=torch.float64)

    def error() -> float:
        (y,) = interpret(run_pipeline(graph), (x,), dtype=torch.float64)
        return float((y - exact).norm() / exact.norm())

    kept = error()
    monkeypatch.setattr(convolutions, "rounded_keeping_sums", lambda w, dtype: w.to(dtype))
    assert kept < 0.6 * error()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_weights_of_an_fp32_model_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Folded().eval()
    for norm in (model.first, model.second):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = (torch.randn(2, 16, 24, 24) + 8).to(dtype)  # nothing of it is rounded away
    graph = gtco.capture(model, x.float())
    (exact,) = interpret(graph, (x.double(),), dtype=torch.float64)
    errors = []
    for lowered in (lower_precision(graph, dtype), gtco.capture(model.to(dtype), x)):
        rewritten = run_pipeline(lowered)
        (y,) = interpret(rewritten, (x.double(),), dtype=torch.float64)
        errors.append(float((y - exact).norm()))
        assert not any(node.op == "batch_norm" for node in rewritten.nodes)
    assert errors[0] < 0.6 * errors[1], "against weights that were rounded ahead of the norms"


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_sums, "_kept", lambda exact, nearest: nearest)
    with pytest.raises(AssertionError):
        test_errors_add_up_to_nothing((24, 16, 3, 3), 24 * 16, F16)
