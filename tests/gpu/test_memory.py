"""All that a captured graph touches is its own: nothing else is read or destroyed by a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gtco
from gtco import selection
from gtco.codegen.rules import Derivation
from gtco.runtime.module import CompiledModule

pytestmark = pytest.mark.gpu

GUARD = 0x5A


class Linears(nn.Module):
    """Products in fp32, with a bias and without, batched and not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 1024), nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.gelu(self.first(x)))
        return torch.matmul(y, y.transpose(-1, -2)).softmax(-1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.reshape(4, 64, 8, 64).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 0.0 * torch.rand_like(x)).sort(-1).values


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "products": lambda: (Linears(), torch.randn(4, 64, 512)),
    "convolutions": lambda: (Convolutions(), torch.randn(2, 8, 32, 32)),
    "attention": lambda: (Attention(), torch.randn(4, 64, 512)),
    "random numbers": lambda: (Noise(), torch.randn(64, 64)),
}


@pytest.fixture(autouse=True)
def no_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch is a library's, whatever has a kernel of its own by now."""
    monkeypatch.setattr(selection, "derive", lambda group, kind, target: Derivation((), ()))


def _compiled(model: nn.Module, x: Tensor, **options: Any) -> CompiledModule:
    compiled = gtco.compile(model, (x,), **options)
    assert compiled.report().generated == 0
    return compiled


def _made(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = CASES[case]()
    return model.eval().cuda(), x.cuda()


def _give_back_what_libraries_keep() -> list[Tensor]:
    """Whatever libraries held is free now, and is somebody else's."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    guards = [torch.full((1 << 20,), GUARD, dtype=torch.uint8, device="cuda") for _ in range(96)]
    torch.cuda.empty_cache()
    guards += [torch.full((1 << 20,), GUARD, dtype=torch.uint8, device="cuda") for _ in range(96)]
    return guards


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_call_touches_nothing_of_others(case: str, cuda_graph: bool) -> None:
    model, x = _made(case)
    with torch.no_grad():
        expected = model(x)
        compiled = _compiled(model, x, cuda_graph=cuda_graph)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
        guards = _give_back_what_libraries_keep()
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
        torch.cuda.synchronize()
        assert all(bool((guard == GUARD).all()) for guard in guards)


def test_a_graph_outlives_another_one() -> None:
    """Streams are few and come round again: what one graph took must not be another's."""
    model, x = _made("products")
    with torch.no_grad():
        expected = model(x)
        kept = [_compiled(model, x) for _ in range(2)]
        for compiled in kept:
            compiled(x)
        for _ in range(36):  # more than torch has streams
            _compiled(model, x)(x)
        del compiled, kept[0]
        guards = _give_back_what_libraries_keep()
        torch.testing.assert_close(kept[0](x), expected, rtol=1e-3, atol=1e-3)
        torch.cuda.synchronize()
        assert all(bool((guard == GUARD).all()) for guard in guards)


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("case", ["products", "convolutions", "attention"])
def test_beside_inductor_in_one_process(case: str, ours_first: bool) -> None:
    model, x = _made(case)
    with torch.no_grad():
        expected = model(x)
        made: list[Callable[[Tensor], Tensor]] = []

        def ours() -> None:
            made.append(_compiled(model, x))
            made[-1](x)

        def inductors() -> None:
            torch._dynamo.reset()
            made.append(torch.compile(model, mode="reduce-overhead"))
            for _ in range(3):
                made[-1](x)

        for make in (ours, inductors) if ours_first else (inductors, ours):
            make()
        for _ in range(3):
            for each in made:
                torch.testing.assert_close(each(x), expected, rtol=2e-3, atol=2e-3)
