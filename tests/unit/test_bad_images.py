"""Images and windows that do not fit are refused with torch's own words and the module's name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self.weight, groups=2)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv2d(3, 8, 9), "Kernel size can't be greater than actual input size"),
        (nn.Conv2d(3, 8, 3, dilation=5), "Kernel size can't be greater than actual input size"),
        (nn.Conv2d(4, 8, 3), r"expected input\[1, 3, 8, 6\] to have 4 channels"),
        (Grouped(), r"to have 6 channels, but got 3 channels"),
        (nn.ConvTranspose2d(3, 8, 3, padding=9), "Output size is too small"),
        (nn.MaxPool2d(9), "Output size is too small"),
        (nn.AvgPool2d(7), "Output size is too small"),
        (nn.AvgPool2d(3, padding=2), "pad should be at most half of effective kernel size"),
        (nn.GroupNorm(1, 6), "weight"),
        (nn.Upsample(size=(0, 4)), "ZeroDivisionError"),
        (nn.PixelShuffle(2), "Invalid input shape for pixel_shuffle"),
    ],
)
def test_what_leaves_no_output_is_refused_by_name(module: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(module)).eval()
    name = rf"Sequential cannot be captured: torch.export refuses 1\.0 \({type(module).__name__}\)"
    with pytest.raises(gtco.CaptureError, match=rf"{name}.*{reason}"):
        gtco.compile(model, (torch.zeros(1, 3, 8, 6),), target="sm_90a")
