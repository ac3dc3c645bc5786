"""Diffusion transformers: DiT (Peebles and Xie, ICCV 2023), and the one of two streams of Stable
Diffusion 3 (Esser et al., ICML 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.diffusion import waves
from experiments.models.transformers_zoo import Model, ready


class _Steps(nn.Module):
    """Time steps [N] as vectors of `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, steps: Tensor) -> Tensor:
        result: Tensor = self.mlp(waves(steps, 256, self.mlp[0].weight.dtype))
        return result


class _Modulated(nn.Module):
    """A layer norm without parameters of its own: its shift and scale come with each input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, 1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return result


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))


def _heads(made: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[N, L, 3 C] as queries, keys and values [N, heads, L, C / heads]."""
    return made.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _pixels(patches: Tensor, side: int, channels: int) -> Tensor:
    """[N, side * side, 4 * channels] as [N, channels, 2 * side, 2 * side]."""
    n = patches.shape[0]
    image = patches.reshape(n, side, side, 2, 2, channels).permute(0, 5, 1, 3, 2, 4)
    return image.reshape(n, channels, 2 * side, 2 * side)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(_Modulated(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = _mlp(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition).chunk(6, 1)
        q, k, v = _heads(self.qkv(self.norms[0](x, shift, scale)), self.heads)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate[:, None] * self.out(y)
        return x + gate2[:, None] * self.mlp(self.norms[1](x, shift2, scale2))


class DiT(nn.Module):
    """The noise, and its variance, of latents [N, 4, H, H] of classes [N] at time steps [N]."""

    def __init__(self, side: int, width: int = 1152, depth: int = 28, heads: int = 16) -> None:
        super().__init__()
        self.side = side // 2
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.positions = nn.Parameter(torch.zeros(1, self.side**2, width))
        self.steps, self.classes = _Steps(width), nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = _Modulated(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.last = nn.Linear(width, 2 * 2 * 8)

    def forward(self, latents: Tensor, steps: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.steps(steps) + self.classes(classes)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, 1)
        return _pixels(self.last(self.norm(x, shift, scale)), self.side, 8)


def dit_xl2() -> Model:
    """DiT-XL/2 of 256 pixels, with and without the class, as guidance wants it."""
    return _dit(32)


def dit_xl2_512() -> Model:
    return _dit(64)


def _dit(side: int) -> Model:
    module, (latents,) = ready(DiT(side), (2, 4, side, side))
    steps, classes = ([981, 981], [207, 1000])
    return module, (latents, *(torch.tensor(x, device=latents.device) for x in (steps, classes)))


class _Stream(nn.Module):
    """What text or image has of its own in a block of two streams.

    Args:
        ends: the stream ends with the attention of this block.
    """

    def __init__(self, width: int, *, ends: bool = False) -> None:
        super().__init__()
        self.ends = ends
        parts = 2 if ends else 6
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))
        self.norm, self.qkv = _Modulated(width), nn.Linear(width, 3 * width)
        if not ends:
            self.out = nn.Linear(width, width)
            self.norm2, self.mlp = _Modulated(width), _mlp(width)

    def read(self, x: Tensor, condition: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Queries, keys and values in one, and what `write` wants."""
        shift, scale, *rest = self.modulation(condition).chunk(2 if self.ends else 6, 1)
        return self.qkv(self.norm(x, shift, scale)), tuple(rest)

    def write(self, x: Tensor, attended: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        if self.ends:
            return x
        gate, shift, scale, gate2 = rest
        x = x + gate[:, None] * self.out(attended)
        return x + gate2[:, None] * self.mlp(self.norm2(x, shift, scale))


class _Joint(nn.Module):
    def __init__(self, width: int, heads: int, *, last: bool) -> None:
        super().__init__()
        self.heads = heads
        self.text, self.image = _Stream(width, ends=last), _Stream(width)

    def forward(self, text: Tensor, image: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        made, rest = zip(
            self.text.read(text, condition), self.image.read(image, condition), strict=True
        )
        q, k, v = _heads(torch.cat(made, 1), self.heads)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        words = text.shape[1]
        return (
            self.text.write(text, y[:, :words], rest[0]),
            self.image.write(image, y[:, words:], rest[1]),
        )


class MMDiT(nn.Module):
    """The velocity of latents [N, 16, H, H] at times [N], with texts [N, L, 4096] and [N, 2048]."""

    def __init__(self, side: int, width: int = 1536, depth: int = 24) -> None:
        super().__init__()
        self.side = side // 2
        self.patches, self.words = nn.Conv2d(16, width, 2, 2), nn.Linear(4096, width)
        self.positions = nn.Parameter(torch.zeros(1, self.side**2, width))
        self.steps = _Steps(width)
        self.pooled = nn.Sequential(nn.Linear(2048, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            _Joint(width, width // 64, last=block + 1 == depth) for block in range(depth)
        )
        self.norm = _Modulated(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.last = nn.Linear(width, 2 * 2 * 16)

    def forward(self, latents: Tensor, steps: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
        image = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        text, condition = self.words(words), self.steps(steps) + self.pooled(pooled)
        for block in self.blocks:
            text, image = block(text, image, condition)
        shift, scale = self.modulation(condition).chunk(2, 1)
        return _pixels(self.last(self.norm(image, shift, scale)), self.side, 16)


def sd3() -> Model:
    """Stable Diffusion 3 Medium's transformer: 512 pixels, 154 words, with and without a text."""
    module, (latents, words, pooled) = ready(MMDiT(64), (2, 16, 64, 64), (2, 154, 4096), (2, 2048))
    steps = torch.tensor([981, 981], device=latents.device)
    return module, (latents, steps, words, pooled)
