"""Models whose results are images: translation, super resolution, restoration.

Random weights, fp16, on the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready

# -- translation (Zhu et al., "Unpaired Image-to-Image Translation", ICCV 2017) -------------------


def _normed(*layers: nn.Module, width: int) -> list[nn.Module]:
    return [*layers, nn.InstanceNorm2d(width), nn.ReLU()]


class _Translating(nn.Module):
    """Two convolutions of reflected borders, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += _normed(nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), width=width)
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class Translator(nn.Sequential):
    """CycleGAN's generator for images of 256 pixels and more.

    Args:
        blocks: residual blocks between the way down and the way up.
        width: channels of the first layer.
    """

    def __init__(self, blocks: int = 9, width: int = 64) -> None:
        layers = _normed(nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), width=width)
        for depth in (width, 2 * width):
            layers += _normed(nn.Conv2d(depth, 2 * depth, 3, 2, 1), width=2 * depth)
        layers += [_Translating(4 * width) for _ in range(blocks)]
        for depth in (2 * width, width):
            up = nn.ConvTranspose2d(2 * depth, depth, 3, 2, 1, output_padding=1)
            layers += _normed(up, width=depth)
        super().__init__(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


def translator() -> Model:
    return ready(Translator(), (1, 3, 256, 256))


# -- super resolution, four times ------------------------------------------------------------------


class _Plain(nn.Module):
    """Two convolutions, batch norms and a PReLU, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.PReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class SRResNet(nn.Module):
    """Ledig et al., "Photo-Realistic Single Image Super-Resolution", CVPR 2017."""

    def __init__(self, blocks: int = 16, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 9, padding=4), nn.PReLU())
        self.body = nn.Sequential(
            *(_Plain(width) for _ in range(blocks)),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        up: list[nn.Module] = []
        for _ in range(2):
            up += [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()]
        self.up = nn.Sequential(*up, nn.Conv2d(width, 3, 9, padding=4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.up(x + self.body(x))
        return result


def srresnet() -> Model:
    return ready(SRResNet(), (1, 3, 128, 128))


class _Dense(nn.Module):
    """Five convolutions, each of all values before it, and a residual."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width + at * growth, width if at == 4 else growth, 3, padding=1)
            for at in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for conv in self.convs[:4]:
            values.append(F.leaky_relu(conv(torch.cat(values, 1)), 0.2))
        result: Tensor = x + 0.2 * self.convs[4](torch.cat(values, 1))
        return result


class _Threefold(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Dense(width, growth) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + 0.2 * self.layers(x)
        return result


class RRDBNet(nn.Module):
    """The generator of ESRGAN (Wang et al., ECCV Workshops 2018) and of Real-ESRGAN."""

    def __init__(self, blocks: int = 23, width: int = 64, growth: int = 32) -> None:
        super().__init__()

        def same(before: int, after: int) -> nn.Module:
            return nn.Conv2d(before, after, 3, padding=1)

        self.first = same(3, width)
        self.body = nn.Sequential(
            *(_Threefold(width, growth) for _ in range(blocks)), same(width, width)
        )
        self.up = nn.ModuleList(same(width, width) for _ in range(2))
        self.last = nn.Sequential(same(width, width), nn.LeakyReLU(0.2), same(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.body(x)
        for conv in self.up:
            x = F.leaky_relu(conv(F.interpolate(x, scale_factor=2.0)), 0.2)
        result: Tensor = self.last(x)
        return result


def esrgan() -> Model:
    return ready(RRDBNet(), (1, 3, 128, 128))


# -- restoration (Chen et al., "Simple Baselines for Image Restoration", ECCV 2022) ----------------


class _Pixels(nn.LayerNorm):
    """A layer norm of each pixel's channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _gated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return first * second


class _Restoring(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Pixels(width, eps=1e-6) for _ in range(2))
        self.expand = nn.Conv2d(width, 2 * width, 1)
        self.mix = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.attend = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1))
        self.project = nn.Conv2d(width, width, 1)
        self.widen, self.narrow = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 1)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1, width, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = _gated(self.mix(self.expand(self.norms[0](x))))
        x = x + self.scales[0] * self.project(y * self.attend(y))
        return x + self.scales[1] * self.narrow(_gated(self.widen(self.norms[1](x))))


class NAFNet(nn.Module):
    """A U-Net of gated blocks without activations.

    Args:
        width: channels of the first level.
        down, middle, up: blocks of each level.
    """

    def __init__(
        self,
        width: int = 32,
        down: Sequence[int] = (2, 2, 4, 8),
        middle: int = 12,
        up: Sequence[int] = (2, 2, 2, 2),
    ) -> None:
        super().__init__()

        def blocks(count: int, width: int) -> nn.Module:
            return nn.Sequential(*(_Restoring(width) for _ in range(count)))

        self.first, self.last = (nn.Conv2d(*d, 3, padding=1) for d in ((3, width), (width, 3)))
        widths = [width << level for level in range(len(down))]
        self.down = nn.ModuleList(map(blocks, down, widths))
        self.shrink = nn.ModuleList(nn.Conv2d(each, 2 * each, 2, 2) for each in widths)
        self.middle = blocks(middle, 2 * widths[-1])
        self.enlarge = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * each, 4 * each, 1, bias=False), nn.PixelShuffle(2))
            for each in widths[::-1]
        )
        self.up = nn.ModuleList(map(blocks, up, widths[::-1]))

    def forward(self, image: Tensor) -> Tensor:
        x, skips = self.first(image), []
        for level, shrink in zip(self.down, self.shrink, strict=True):
            skips.append(level(x))
            x = shrink(skips[-1])
        x = self.middle(x)
        for level, enlarge in zip(self.up, self.enlarge, strict=True):
            x = level(enlarge(x) + skips.pop())
        result: Tensor = self.last(x) + image
        return result


def nafnet() -> Model:
    return ready(NAFNet(), (1, 3, 256, 256))
