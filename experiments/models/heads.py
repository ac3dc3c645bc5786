"""Heads and necks, given what a backbone has made: feature maps with their channels first.

Random weights, fp16, on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready


def _convolved(before: int, width: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    padding = kernel // 2 * dilation
    conv = nn.Conv2d(before, width, kernel, padding=padding, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())


class AtrousPyramid(nn.Module):
    """DeepLabV3's head (Chen et al., "Rethinking Atrous Convolution", 2017).

    Args:
        channels: of the feature map.
        width: of what each dilation makes.
        classes: of the result.
    """

    def __init__(self, channels: int = 2048, width: int = 256, classes: int = 21) -> None:
        super().__init__()
        rates = (_convolved(channels, width, 3, rate) for rate in (12, 24, 36))
        self.branches = nn.ModuleList((_convolved(channels, width, 1), *rates))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), _convolved(channels, width, 1))
        self.joined = _convolved(5 * width, width, 1)
        self.head = nn.Sequential(_convolved(width, width, 3), nn.Conv2d(width, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        parts.append(self.pooled(x).expand_as(parts[0]))
        result: Tensor = self.head(self.joined(torch.cat(parts, 1)))
        return result


class FeaturePyramid(nn.Module):
    """Lin et al., "Feature Pyramid Networks for Object Detection", CVPR 2017.

    Args:
        channels: of the feature maps, largest first.
        width: of the results, one for each.
    """

    def __init__(
        self, channels: tuple[int, ...] = (256, 512, 1024, 2048), width: int = 256
    ) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(each, width, 1) for each in channels)
        self.outer = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)

    def forward(self, *maps: Tensor) -> tuple[Tensor, ...]:
        merged: list[Tensor] = []
        for inner, x in list(zip(self.inner, maps, strict=True))[::-1]:
            y = inner(x)
            merged.append(y + F.interpolate(merged[-1], y.shape[2:]) if merged else y)
        return tuple(outer(y) for outer, y in zip(self.outer, merged[::-1], strict=True))


class DetectionHead(nn.Module):
    """RetinaNet's heads of classes and boxes, which all maps share (Lin et al., "Focal Loss for
    Dense Object Detection", ICCV 2017).

    Args:
        width: channels of the maps.
        classes: of each of nine boxes.
    """

    def __init__(self, width: int = 256, classes: int = 91) -> None:
        super().__init__()
        self.towers = nn.ModuleList()
        for outputs in (9 * classes, 36):
            layers: list[nn.Module] = []
            for _ in range(4):
                layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
            self.towers.append(nn.Sequential(*layers, nn.Conv2d(width, outputs, 3, padding=1)))

    def forward(self, *maps: Tensor) -> tuple[Tensor, ...]:
        return tuple(tower(x) for x in maps for tower in self.towers)


class UpBlock(nn.Module):
    """A step up of a U-Net (Ronneberger et al., MICCAI 2015): the map from below is enlarged and
    joined to the skip.

    Args:
        below: channels of the map from below.
        skip: of the skip, and of the result.
    """

    def __init__(self, below: int = 512, skip: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(_convolved(below + skip, skip, 3), _convolved(skip, skip, 3))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        enlarged = F.interpolate(x, scale_factor=2, mode="bilinear")
        result: Tensor = self.layers(torch.cat([skip, enlarged], 1))
        return result


class _Deformable(nn.Module):
    """A modulated deformable convolution (Zhu et al., "Deformable ConvNets v2", CVPR 2019) of
    torchvision's, whose offsets and masks a convolution computes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.places = nn.Conv2d(inputs, 27, 3, padding=1)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        from torchvision.ops import deform_conv2d

        offsets, mask = self.places(x).split([18, 9], 1)
        y = deform_conv2d(x, offsets, self.weight, padding=1, mask=mask.sigmoid())
        return F.relu(self.norm(y))


class KeypointHead(nn.Module):
    """What CenterNet (Zhou et al., "Objects as Points", 2019) has behind a ResNet-18: deformable
    and transposed convolutions in turns, then heat maps, sizes and offsets.

    Args:
        widths: channels of the map and of each step up.
        classes: of the heat maps.
    """

    def __init__(self, widths: Sequence[int] = (512, 256, 128, 64), classes: int = 80) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            enlarge = nn.ConvTranspose2d(outputs, outputs, 4, 2, 1, bias=False)
            layers += [_Deformable(inputs, outputs), enlarge, nn.BatchNorm2d(outputs), nn.ReLU()]
        self.up = nn.Sequential(*layers)
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(widths[-1], 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, outputs, 1)
            )
            for outputs in (classes, 2, 2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.up(x)
        return tuple(head(x) for head in self.heads)


class Peaks(nn.Module):
    """The best local maxima of heat maps, and where they are: how CenterNet finds its objects."""

    def __init__(self, count: int = 100) -> None:
        super().__init__()
        self.count = count

    def forward(self, heat: Tensor) -> tuple[Tensor, Tensor]:
        """Values and places [batch, count] of `heat` [batch, classes, height, width]."""
        highest = F.max_pool2d(heat, 3, 1, 1)
        peaks = torch.where(highest == heat, heat, torch.zeros_like(heat))
        values, places = peaks.flatten(1).topk(self.count)
        return values, places


class SegNet(nn.Module):
    """VGG-16 down, and up again by the places of its maxima (Badrinarayanan et al., TPAMI 2017).

    Args:
        widths: channels of each level.
        depths: convolutions of each level.
        classes: of the result.
    """

    def __init__(
        self,
        widths: Sequence[int] = (64, 128, 256, 512, 512),
        depths: Sequence[int] = (2, 2, 3, 3, 3),
        classes: int = 12,
    ) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        below = 3
        for width, depth in zip(widths, depths, strict=True):
            sizes = [below, *[width] * depth]
            self.down.append(_level(sizes))
            self.up.insert(0, _level([*sizes[:0:-1], classes if below == 3 else below]))
            below = width

    def forward(self, x: Tensor) -> Tensor:
        places = []
        for level in self.down:
            x, at = F.max_pool2d(level(x), 2, return_indices=True)
            places.append(at)
        for level in self.up:
            x = level(F.max_unpool2d(x, places.pop(), 2))
        return x


def _level(sizes: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(_convolved(a, b, 3) for a, b in pairwise(sizes)))


def keypoints() -> Model:
    return ready(KeypointHead(), (1, 512, 16, 16))


def peaks() -> Model:
    return ready(Peaks(), (1, 80, 128, 128))


def peaks_batch8() -> Model:
    return ready(Peaks(), (8, 80, 128, 128))


def segnet() -> Model:
    return ready(SegNet(), (1, 3, 352, 480))


def aspp() -> Model:
    return ready(AtrousPyramid(), (1, 2048, 32, 32))


def _fpn(batch: int) -> Model:
    maps = [(batch, 256 << level, 128 >> level, 128 >> level) for level in range(4)]
    return ready(FeaturePyramid(), *maps)


def fpn() -> Model:
    return _fpn(1)


def fpn_batch8() -> Model:
    return _fpn(8)


def detection_head() -> Model:
    return ready(DetectionHead(), *((1, 256, side, side) for side in (64, 32, 16, 8, 4)))


def up_block() -> Model:
    return ready(UpBlock(), (1, 512, 64, 64), (1, 256, 128, 128))
