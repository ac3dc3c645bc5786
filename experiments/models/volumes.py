"""Models of volumes: clips of a video [N, 3, T, H, W] and scans [N, 1, D, H, W].

Random weights, fp16, on the GPU if there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready

# -- ResNets of clips (Tran et al., "A Closer Look at Spatiotemporal Convolutions", CVPR 2018) -----


def _convolution(before: int, channels: int, stride: int, between: int) -> nn.Module:
    """A convolution of 3x3x3; or, with channels `between`, one of 1x3x3 and one of 3x1x1."""
    if not between:
        return nn.Conv3d(before, channels, 3, stride, 1, bias=False)
    return nn.Sequential(
        nn.Conv3d(before, between, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
        nn.BatchNorm3d(between),
        nn.ReLU(),
        nn.Conv3d(between, channels, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False),
    )


class ClipBlock(nn.Module):
    """Two convolutions, factored or not, and a residual."""

    def __init__(self, before: int, channels: int, stride: int, factored: bool) -> None:
        super().__init__()
        # A factored convolution has about as many parameters as a whole one.
        between = before * channels * 27 // (before * 9 + channels * 3) if factored else 0
        self.first = nn.Sequential(
            _convolution(before, channels, stride, between), nn.BatchNorm3d(channels), nn.ReLU()
        )
        self.second = nn.Sequential(
            _convolution(channels, channels, 1, between), nn.BatchNorm3d(channels)
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or before != channels:
            conv = nn.Conv3d(before, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm3d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class ClipResNet(nn.Module):
    """A classifier of clips into 400 classes, of eight blocks."""

    def __init__(self, *, factored: bool, width: int = 64, classes: int = 400) -> None:
        super().__init__()
        stem: list[nn.Module] = [nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)]
        if factored:
            stem = [
                nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False),
                nn.BatchNorm3d(45),
                nn.ReLU(),
                nn.Conv3d(45, width, (3, 1, 1), 1, (1, 0, 0), bias=False),
            ]
        blocks: list[nn.Module] = []
        before = width
        for stage in range(4):
            channels = width << stage
            blocks.append(ClipBlock(before, channels, 2 if stage else 1, factored))
            blocks.append(ClipBlock(channels, channels, 1, factored))
            before = channels
        self.features = nn.Sequential(*stem, nn.BatchNorm3d(width), nn.ReLU(), *blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3, 4)))


def r3d_18() -> Model:
    return ready(ClipResNet(factored=False), (1, 3, 16, 112, 112))


def r2plus1d_18() -> Model:
    return ready(ClipResNet(factored=True), (1, 3, 16, 112, 112))


# -- X3D (Feichtenhofer, "Expanding Architectures for Efficient Video Recognition", CVPR 2020) ----


class ExpandedBlock(nn.Module):
    """1x1x1 to more channels, 3x3x3 of each channel by itself, a gate in every other block, 1x1x1
    back, and a residual."""

    def __init__(self, before: int, channels: int, inner: int, stride: int, gated: bool) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv3d(before, inner, 1, bias=False), nn.BatchNorm3d(inner), nn.ReLU()
        )
        step = (1, stride, stride)
        self.mix = nn.Sequential(
            nn.Conv3d(inner, inner, 3, step, 1, groups=inner, bias=False), nn.BatchNorm3d(inner)
        )
        # A sixteenth of the channels, in eights: down unless that is more than a tenth less.
        eights = max(8, (inner + 64) // 128 * 8)
        squeezed = eights + 8 if eights < 0.9 * inner / 16 else eights
        self.gate = nn.Sequential()
        if gated:
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool3d(1),
                nn.Conv3d(inner, squeezed, 1),
                nn.ReLU(),
                nn.Conv3d(squeezed, inner, 1),
                nn.Sigmoid(),
            )
        self.project = nn.Sequential(
            nn.SiLU(), nn.Conv3d(inner, channels, 1, bias=False), nn.BatchNorm3d(channels)
        )
        self.shortcut = nn.Sequential()
        if before != channels or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv3d(before, channels, 1, step, bias=False))
            if before != channels:
                self.shortcut.append(nn.BatchNorm3d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.expand(x))
        if len(self.gate):
            y = y * self.gate(y)
        return torch.relu(self.project(y) + self.shortcut(x))


class X3D(nn.Module):
    """A classifier of clips into 400 classes.

    Args:
        depths: blocks of each stage; those of X3D-S.
    """

    def __init__(self, depths: Sequence[int] = (3, 5, 11, 7), classes: int = 400) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 24, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False),
            nn.Conv3d(24, 24, (5, 1, 1), 1, (2, 0, 0), groups=24, bias=False),
            nn.BatchNorm3d(24),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = []
        before = 24
        for stage, depth in enumerate(depths):
            channels = 24 << stage
            for at in range(depth):
                stride = 1 if at else 2
                blocks.append(
                    ExpandedBlock(before, channels, channels * 9 // 4, stride, at % 2 == 0)
                )
                before = channels
        self.blocks = nn.Sequential(*blocks)
        inner = before * 9 // 4
        self.head = nn.Sequential(
            nn.Conv3d(before, inner, 1, bias=False),
            nn.BatchNorm3d(inner),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Conv3d(inner, 2048, 1, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2048, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def x3d_s() -> Model:
    return ready(X3D(), (1, 3, 13, 160, 160))


# -- a U-Net of scans -----------------------------------------------------------------------------


def _twice(before: int, channels: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for depth, step in ((before, stride), (channels, 1)):
        layers += [
            nn.Conv3d(depth, channels, 3, step, 1),
            nn.InstanceNorm3d(channels, affine=True),
            nn.LeakyReLU(0.01),
        ]
    return nn.Sequential(*layers)


class ScanUNet(nn.Module):
    """A U-Net as nnU-Net builds them (Isensee et al., Nature Methods 2021): strided convolutions on
    the way down, transposed ones on the way up, instance norms and leaky ReLUs.

    Args:
        widths: channels of each level.
        classes: of a voxel.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 320), classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _twice(before, width, 2 if before > 1 else 1)
            for before, width in zip((1, *widths), widths, strict=False)
        )
        pairs = list(itertools.pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose3d(deep, wide, 2, 2) for wide, deep in pairs)
        self.joined = nn.ModuleList(_twice(2 * wide, wide) for wide, _ in pairs)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
        skips.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def scan_unet() -> Model:
    return ready(ScanUNet(), (1, 1, 64, 128, 128))
