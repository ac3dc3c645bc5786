"""The decoder of a latent diffusion model's autoencoder (Rombach et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready


def _norm(width: int) -> nn.Module:
    return nn.GroupNorm(32, width, 1e-6)


def _same(before: int, after: int) -> nn.Module:
    return nn.Conv2d(before, after, 3, padding=1)


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(before), _same(before, after)
        self.norm2, self.conv2 = _norm(after), _same(after, after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        result: Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        return result


class _Attention(nn.Module):
    """Of one head, over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2).unsqueeze(1)
        y = F.scaled_dot_product_attention(self.q(rows), self.k(rows), self.v(rows))
        result: Tensor = x + self.out(y.squeeze(1)).transpose(1, 2).unflatten(2, x.shape[2:])
        return result


class _Enlarged(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = _same(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return result


class Decoder(nn.Module):
    """Latents [N, 4, H, W] to images [N, 3, 8 H, 8 W], as of Stable Diffusion 1 and 2."""

    def __init__(self, widths: tuple[int, ...] = (512, 512, 256, 128), latent: int = 4) -> None:
        super().__init__()
        first = widths[0]
        self.unquantize, self.first = nn.Conv2d(latent, latent, 1), _same(latent, first)
        self.middle = nn.Sequential(
            _Residual(first, first), _Attention(first), _Residual(first, first)
        )
        self.up = nn.Sequential(*self._levels(widths))
        self.norm, self.last = _norm(widths[-1]), _same(widths[-1], 3)

    @staticmethod
    def _levels(widths: tuple[int, ...]) -> Iterator[nn.Module]:
        before = widths[0]
        for level, width in enumerate(widths):
            for _ in range(3):
                yield _Residual(before, width)
                before = width
            if level + 1 < len(widths):
                yield _Enlarged(width)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.up(self.middle(self.first(self.unquantize(latents))))
        result: Tensor = self.last(F.silu(self.norm(x)))
        return result


def vae_decoder() -> Model:
    """Of 512 x 512 pixels."""
    return ready(Decoder(), (1, 4, 64, 64))
