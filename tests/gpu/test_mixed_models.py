"""Autocast and inputs of another type on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco import dynamo

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(64),
            nn.Linear(64, 256),
            nn.Linear(256, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Region(nn.Module):
    """Half of it in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            y = self.first(x)
        return self.second(y.float())


def like(model: nn.Module) -> tuple[nn.Module, Tensor]:
    return model.cuda().eval(), torch.randn(3, 50, 64, device="cuda")


@pytest.mark.parametrize("graph", [False, True])
def test_a_region_within(graph: bool) -> None:
    model, x = like(Region())
    with torch.no_grad():
        compiled = gtco.compile(model, (x,), cuda_graph=graph)
        for each in (x, torch.randn_like(x)):
            torch.testing.assert_close(compiled(each), model(each), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["compile", "torch.compile"])
def test_a_region_around(how: str, dtype: torch.dtype) -> None:
    model, x = like(Block())
    with torch.no_grad(), torch.autocast("cuda", dtype=dtype):
        compiled: Any = (
            gtco.compile(model, (x,))
            if how == "compile"
            else torch.compile(model, backend=dynamo.backend)
        )
        found, right = compiled(x), model(x)
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right, rtol=3e-2, atol=3e-2)


def test_inputs_of_another_type() -> None:
    model, x = like(Block())
    with torch.no_grad():
        compiled = gtco.compile(model.half(), (x.half(),))
        assert torch.equal(compiled(x), compiled(x.half()))
        again = torch.randn_like(x)
        assert torch.equal(compiled(again), compiled(again.half()))
