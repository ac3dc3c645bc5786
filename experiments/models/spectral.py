"""Models that compute among the frequencies of an image: a filter of all of them, and convolutions.

Random weights, fp16 with transforms in fp32, on the GPU if there is one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready

# -- classification (Rao et al., "Global Filter Networks", NeurIPS 2021) --------------------------


class _Filtering(nn.Module):
    """A global filter and an MLP.

    Args:
        width: channels.
        side: of the map, in tokens.
    """

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(side, side // 2 + 1, width, 2) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        side, width = self.filter.shape[0], x.shape[-1]
        image = self.norm1(x).reshape(-1, side, side, width).float()
        f = torch.fft.rfft2(image, dim=(1, 2), norm="ortho")
        f = f * torch.view_as_complex(self.filter.float())
        y = torch.fft.irfft2(f, s=(side, side), dim=(1, 2), norm="ortho")
        result: Tensor = x + self.mlp(self.norm2(y.reshape(x.shape).to(x.dtype)))
        return result


class GlobalFilterNet(nn.Module):
    """GFNet of images of 224 pixels in patches of 16.

    Args:
        width: channels.
        depth: blocks.
        classes: of the head.
        image: its side.
    """

    def __init__(
        self, width: int = 384, depth: int = 19, classes: int = 1000, image: int = 224
    ) -> None:
        super().__init__()
        side = image // 16
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, side * side, width))
        self.blocks = nn.Sequential(*(_Filtering(width, side) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        result: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return result


# -- inpainting (Suvorov et al., "Resolution-robust Large Mask Inpainting", WACV 2022) ------------


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(
        inputs, outputs, kernel, stride, kernel // 2, bias=False, padding_mode="reflect"
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class _Spectral(nn.Module):
    """1x1 convolutions around one of the frequencies' real and imaginary parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.reduce, self.frequencies = _normed(width, half, 1), _normed(width, width, 1)
        self.expand = nn.Conv2d(half, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(x)
        f = torch.fft.rfftn(x.float(), dim=(-2, -1), norm="ortho")
        parts = torch.stack((f.real, f.imag), -1).permute(0, 1, 4, 2, 3).flatten(1, 2)
        y = self.frequencies(parts.to(x.dtype)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2)
        f = torch.complex(y[..., 0].float(), y[..., 1].float())
        back = torch.fft.irfftn(f, s=x.shape[-2:], dim=(-2, -1), norm="ortho").to(x.dtype)
        result: Tensor = self.expand(x + back)
        return result


class _Fourier(nn.Module):
    """A fast Fourier convolution (Chi et al., NeurIPS 2020): a quarter of the channels is local."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.local = local = width // 4
        self.both = nn.Conv2d(width, local, 3, padding=1, bias=False, padding_mode="reflect")
        self.across = nn.Conv2d(
            local, width - local, 3, padding=1, bias=False, padding_mode="reflect"
        )
        self.spectral = _Spectral(width - local)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (local, width - local))

    def forward(self, x: Tensor) -> Tensor:
        near, far = x[:, : self.local], x[:, self.local :]
        parts = self.both(x), self.across(near) + self.spectral(far)
        normed = [F.relu(norm(part)) for norm, part in zip(self.norms, parts, strict=True)]
        return torch.cat(normed, 1)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_Fourier(width), _Fourier(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class Inpainter(nn.Sequential):
    """LaMa's generator: an image and its mask, eight times smaller and back.

    Args:
        blocks: residual blocks of two Fourier convolutions between the way down and the way up.
        width: channels of the first layer.
    """

    def __init__(self, blocks: int = 9, width: int = 64) -> None:
        layers: list[nn.Module] = [_normed(4, width, 7)]
        widths = [width << level for level in range(4)]
        layers += [_normed(a, b, 3, 2) for a, b in pairwise(widths)]
        layers += [_Residual(widths[-1]) for _ in range(blocks)]
        for size in widths[:0:-1]:
            layers += [nn.ConvTranspose2d(size, size // 2, 3, 2, 1, 1), nn.BatchNorm2d(size // 2)]
            layers += [nn.ReLU()]
        layers += [nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Sigmoid()]
        super().__init__(*layers)


def gfnet() -> Model:
    return ready(GlobalFilterNet(), (1, 3, 224, 224))


def gfnet_batch32() -> Model:
    return ready(GlobalFilterNet(), (32, 3, 224, 224))


def lama() -> Model:
    return ready(Inpainter(), (1, 4, 256, 256))


def lama_512() -> Model:
    return ready(Inpainter(), (1, 4, 512, 512))
