"""A latent diffusion model (Rombach et al., CVPR 2022): the decoder of its autoencoder, and the
U-Net that predicts the noise of latents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready


def waves(steps: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of time steps [N]: [N, width]."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=steps.device) * (-math.log(10000) / half))
    angles = steps.float()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


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


class _Timed(nn.Module):
    """A residual block that knows the time step."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), _same(before, after)
        self.time = nn.Linear(time, after)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), _same(after, after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        result: Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        return result


class _Heads(nn.Module):
    """Attention of `heads` heads to the text, or to x itself."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made in (self.q(x), self.k(context), self.v(context))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        result: Tensor = self.out(y)
        return result


class _Gated(nn.Module):
    """GEGLU (Shazeer 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, -1)
        result: Tensor = self.down(value * F.gelu(gate))
        return result


class _Transformer(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm, self.first = _norm(width), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = _Heads(width, heads, width), _Heads(width, heads, context)
        self.gated, self.last = _Gated(width), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.first(self.norm(x)).flatten(2).transpose(1, 2)
        own = self.norms[0](y)
        y = y + self.own(own, own)
        y = y + self.text(self.norms[1](y), context)
        y = y + self.gated(self.norms[2](y))
        result: Tensor = x + self.last(y.transpose(1, 2).unflatten(2, x.shape[2:]))
        return result


class _Level(nn.Module):
    """A residual block, attention where `heads` says how many, and on the way down or up."""

    def __init__(self, before: int, after: int, time: int, heads: int, context: int) -> None:
        super().__init__()
        self.block = _Timed(before, after, time)
        self.attention = _Transformer(after, heads, context) if heads else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        y: Tensor = self.block(x, time)
        return y if self.attention is None else self.attention(y, context)


class Denoiser(nn.Module):
    """The noise of latents [N, 4, H, W] at time steps [N], with a text [N, L, 768], as of Stable
    Diffusion 1.

    Args:
        widths: channels of each level.
        heads: of every attention.
        context: channels of the text.
    """

    def __init__(
        self, widths: Sequence[int] = (320, 640, 1280, 1280), heads: int = 8, context: int = 768
    ) -> None:
        super().__init__()
        self.width, time = widths[0], 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.first = _same(4, widths[0])
        skips, before = [widths[0]], widths[0]
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            last = level + 1 == len(widths)
            for _ in range(2):
                self.down.append(_Level(before, width, time, 0 if last else heads, context))
                before = width
                skips.append(width)
            if not last:
                self.smaller.append(nn.Conv2d(width, width, 3, 2, 1))
                skips.append(width)
        self.middle = nn.ModuleList(
            (_Level(before, before, time, heads, context), _Timed(before, before, time))
        )
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(reversed(widths)):
            for _ in range(3):
                joined = before + skips.pop()
                self.up.append(_Level(joined, width, time, heads if level else 0, context))
                before = width
            if level + 1 < len(widths):
                self.larger.append(_Enlarged(width))
        self.norm, self.last = nn.GroupNorm(32, before), _same(before, 4)

    def forward(self, latents: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        time = self.time(waves(steps, self.width, self.last.weight.dtype))
        x = self.first(latents)
        skips = [x]
        for i, level in enumerate(self.down):
            x = level(x, time, text)
            skips.append(x)
            if i % 2 and i // 2 < len(self.smaller):
                x = self.smaller[i // 2](x)
                skips.append(x)
        x = self.middle[1](self.middle[0](x, time, text), time)
        for i, level in enumerate(self.up):
            x = level(torch.cat((x, skips.pop()), 1), time, text)
            if i % 3 == 2 and i // 3 < len(self.larger):
                x = self.larger[i // 3](x)
        result: Tensor = self.last(F.silu(self.norm(x)))
        return result


def denoiser() -> Model:
    """Of 512 x 512 pixels, with and without the text, as guidance wants it."""
    module, (latents, text) = ready(Denoiser(), (2, 4, 64, 64), (2, 77, 768))
    return module, (latents, torch.tensor([981, 981], device=latents.device), text)
