"""Regions of autocast: captured as eager computes them, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco


class Region(nn.Module):
    def __init__(self, product: str) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = x @ x.mT
            with torch.autocast("cpu", enabled=False):
                weights = torch.softmax(scores.float(), -1)
            if self.product == "matmul":
                return torch.matmul(weights, x)
            return torch.einsum("bij,bjk->bik", weights, x)


def test_a_region_with_an_island_is_captured() -> None:
    x = torch.randn(2, 4, 4)
    model = Region("matmul").eval()
    (answer,) = gtco.interpret(gtco.capture(model, (x,)), (x,))
    assert answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer, model(x), atol=2e-2, rtol=2e-2)


def test_a_region_that_torch_loses_is_refused() -> None:
    with pytest.raises(gtco.CaptureError, match=r"\['f32'\] for \['bf16'\].*einsum"):
        gtco.capture(Region("einsum").eval(), (torch.randn(2, 4, 4),))
