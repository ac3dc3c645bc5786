"""Complex numbers as two real tensors, and Fourier transforms as products with constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco import compiler
from gtco.frontend.complex_parts import Parts
from gtco.frontend.fourier import MOST_TOGETHER, transforms
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests.pass_checks import Function, random

aten = torch.ops.aten


def check(model: nn.Module, x: Tensor) -> None:
    """Equal to the module in fp64, in fp32 planned without ATen."""
    captured = capture(model, (x,))
    for graph in (captured.graph, run_pipeline(captured.graph)):
        (found,) = interpret(graph, (x,))
        torch.testing.assert_close(found, model(x), rtol=1e-11, atol=1e-11)
    options = gtco.Options.of(target="sm_90a")
    narrow = model._apply(lambda t: t.to(torch.complex64 if t.is_complex() else torch.float32))
    plan, _ = compiler.make_plan(narrow, (x.float(),), None, options)
    assert not [launch.reason for launch in plan.launches if launch.program is None]


def global_filter(m: Any, x: Tensor) -> Tensor:
    """GFNet (NeurIPS 2021): a filter in the frequencies of an image with its channels last."""
    f = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(m.weight)
    return torch.fft.irfft2(f, s=x.shape[1:3], dim=(1, 2), norm="ortho")


def fourier_unit(m: Any, x: Tensor) -> Tensor:
    """Fast Fourier convolution (NeurIPS 2020), as LaMa has it."""
    f = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
    parts = torch.stack((f.real, f.imag), -1).permute(0, 1, 4, 2, 3).contiguous()
    y = F.relu(F.conv2d(parts.flatten(1, 2), m.weight)).unflatten(1, (-1, 2))
    y = y.permute(0, 1, 3, 4, 2).contiguous()
    back = torch.complex(y[..., 0], y[..., 1])
    return torch.fft.irfftn(back, s=x.shape[-2:], dim=(-2, -1), norm="ortho")


def neural_operator(m: Any, x: Tensor) -> Tensor:
    """Fourier neural operator (ICLR 2021): complex weights of the lowest frequencies."""
    f = torch.fft.rfft2(x)
    out = torch.zeros(*f.shape, dtype=f.dtype, device=x.device)
    out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, :3, :3], m.weight)
    out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, -3:, :3], m.weight.conj())
    return torch.fft.irfft2(out, s=x.shape[-2:])


def rotary(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned: Tensor = torch.view_as_real(z * m.turns)
    return turned.flatten(-2)


def turned_in_forward(m: Any, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1] * 4, device=x.device).reshape(-1, 4).to(x.dtype)
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    by_exp = z * torch.exp(1j * angles)
    return torch.view_as_real(by_exp * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def arithmetic(m: Any, x: Tensor) -> Tensor:
    f = torch.fft.fft(x)
    parts = [f / (f.abs() + 1), f * 2, f / (f + 30), f - 1, 2 - f, f * (1 + 2j), f / (2 - 1j),
             f.conj() * f, -f, 1 / (f + 40), f.square(), torch.full_like(f, 1 - 2j) + f,
             torch.add(f, x, alpha=3), torch.sub(x, f, alpha=2)]  # fmt: skip
    return torch.stack([part.real + 3 * part.imag for part in parts])


def moved(m: Any, x: Tensor) -> Tensor:
    f = torch.fft.fft2(x)
    both = torch.cat([f.roll(1, -1), f.flip(-2), x.to(f.dtype)], 0).transpose(-1, -2)
    chosen = torch.where(x.transpose(-1, -2).repeat(3, 1, 1) > 0, both, both.conj())
    first, rest = chosen.split([1, 5])
    total = first + rest.sum(0, keepdim=True) + rest[:, 1:2].mean(1, keepdim=True)
    return (F.pad(total, (1, 2), value=2.0) + F.pad(x.to(f.dtype), (0, 3, 0, 0))[:1]).abs()


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "a global filter": (
        Function(global_filter, weight=random(7, 4, 6, 2, seed=1)), random(2, 7, 6, 6)),
    "a Fourier unit": (
        Function(fourier_unit, weight=random(6, 6, 1, 1, seed=1)), random(2, 3, 6, 5)),
    "a neural operator": (
        Function(neural_operator, weight=torch.complex(*random(2, 4, 4, 3, 3, seed=1))),
        random(2, 4, 8, 9)),
    "rotary positions": (
        Function(rotary, turns=torch.polar(torch.ones(5, 4).double(), random(5, 4, seed=1))),
        random(2, 5, 8)),
    "positions made in forward": (Function(turned_in_forward), random(2, 5, 8)),
    "arithmetic": (Function(arithmetic), random(3, 7)),
    "what moves elements": (Function(moved), random(2, 4, 4)),
    "sizes and angles": (
        Function(lambda m, x: (lambda f: torch.fft.ifft2(
            torch.polar(f.abs() * 0.9, f.angle())).real)(torch.fft.fft2(x))), random(3, 5, 6)),
    "a long convolution": (
        Function(lambda m, x: torch.fft.irfft(
            torch.fft.rfft(x, n=14) * torch.fft.rfft(m.k, n=14), n=14)[..., :7],
            k=random(3, 7, seed=1)), random(2, 3, 7)),
    "windows of a signal": (
        Function(lambda m, x: torch.stft(
            x, 8, 3, window=m.window, return_complex=True).abs(),
            window=torch.hann_window(8).double()), random(2, 40)),
    "a product of matrices": (
        Function(lambda m, x: (lambda f: (f @ f.mT.conj() + f @ f.mT.real.to(f.dtype)).real)(
            torch.fft.fft(x))), random(2, 3, 5)),
    "the other half": (
        Function(lambda m, x: torch.fft.ihfft(x).imag + torch.fft.rfft(x).real), random(2, 9)),
    "an even and an odd axis, back": (
        Function(lambda m, x: torch.fft.irfftn(torch.fft.rfftn(x), s=(4, 5, 6))),
        random(4, 5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_the_module(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("shape", [(2, 40, 41, 3), (3, 33, 32)])
def test_axes_too_large_together_go_one_after_another(norm: str, shape: tuple[int, ...]) -> None:
    assert shape[1] * shape[2] > MOST_TOGETHER

    def there_and_back(m: Any, x: Tensor) -> Tensor:
        f = torch.fft.rfft2(x, dim=(1, 2), norm=norm)
        g = torch.fft.fftn(f * f.conj(), dim=(2, 1), norm=norm)
        return g.real + torch.fft.irfft2(f * 1j, s=f.shape[1:3], dim=(1, 2), norm=norm)

    check(Function(there_and_back), random(*shape))


def test_axes_apart_are_products_apart() -> None:
    each = [*transforms(aten._fft_r2c.default, (4, 3, 5, 2), [0, 2, 3], 0, True)]
    assert [(first, transform.sizes) for first, transform in each] == [(2, (5, 2)), (0, (4,))]


def test_equal_transforms_share_their_constants() -> None:
    model = Function(lambda m, x: torch.fft.fft2(x).real + torch.fft.fft2(x * 2).imag)
    graph = capture(model, (random(3, 8, 8),)).graph
    assert len(graph.constants) == 1


def test_an_imaginary_part_that_is_zero_is_not_computed() -> None:
    model = Function(lambda m, x: torch.fft.fft(x.to(torch.complex128) * 2).abs())
    graph = capture(model, (random(3, 8),)).graph
    assert sum(node.op == "linear" for node in graph.nodes) == 1


@pytest.mark.parametrize("fault", ["minus", "negative"])
def test_a_wrong_sign_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"minus": Parts.plus, "negative": lambda self, x: x}[fault]
    monkeypatch.setattr(Parts, fault, wrong)
    with pytest.raises(AssertionError, match="not close"):
        check(Function(arithmetic), random(3, 7))
