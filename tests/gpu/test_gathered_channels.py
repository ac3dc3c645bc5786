"""Channels that no copy divides, and images that `cp.async` gathers, in whole models on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gtco

pytestmark = pytest.mark.gpu


class OddChannels(nn.Module):
    """Convolutions of 14, 21 and 45 channels, a gate, a sum and a resize between them."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[axes - 2]
        self.mode = ("bilinear", "trilinear")[axes - 2]
        self.stem = conv(3, 14, 3, 2, 1)
        self.depth = conv(14, 14, 3, 1, 1, groups=14)
        self.gate = conv(14, 14, 1)
        self.wide = conv(14, 45, 3, 1, 1)
        self.narrow = conv(45, 21, 1)
        self.last = conv(21, 16, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.stem(x))
        x = x + self.depth(x)
        x = x * torch.sigmoid(self.gate(x.mean(tuple(range(2, x.dim())), keepdim=True)))
        x = nn.functional.interpolate(self.wide(x).relu(), scale_factor=2, mode=self.mode)
        return self.last(self.narrow(x))


class Gathered(nn.Module):
    """Windows that tensor maps do not describe: few channels, groups, steps of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(5, 32, (3, 5), (2, 1), (1, 3))
        self.groups = nn.Conv2d(32, 48, 3, 1, 2, dilation=2, groups=4)
        self.narrow = nn.Conv2d(48, 32, (1, 7), 1, (0, 3))
        self.far = nn.Conv2d(32, 32, 3, 3, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(self.stem(x).relu()).relu()
        return self.far(self.narrow(x))


CASES = {
    "odd, images": (OddChannels(2), (2, 3, 37, 45)),
    "odd, volumes": (OddChannels(3), (1, 3, 7, 21, 25)),
    "gathered": (Gathered(), (3, 5, 41, 38)),
    "gathered, one pixel of the last": (Gathered(), (1, 5, 5, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", list(CASES))
def test_models_of_odd_channels(case: str, dtype: torch.dtype) -> None:
    model, shape = CASES[case]
    torch.manual_seed(0)
    exact = copy.deepcopy(model).eval().double().cuda()
    given = copy.deepcopy(model).eval().to("cuda", dtype)
    x = torch.randn(shape, device="cuda", dtype=dtype)

    with torch.no_grad():
        compiled = gtco.compile(given, (x,), fallback="error")
        for each in (x, torch.randn_like(x), torch.full_like(x, torch.nan), x.clone()):
            found, right, eager = compiled(each), exact(each.double()), given(each)
            if right.isnan().any():
                assert torch.equal(found.isnan(), right.isnan())
                continue
            error = (found.double() - right).norm() / right.norm()
            assert error <= 2 * (eager.double() - right).norm() / right.norm() + 1e-6
