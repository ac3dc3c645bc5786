"""Torch functions of ops that torch does not have under one name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, groups: int, eps: float
) -> Tensor:
    """Normalise each group of neighbouring channels of each image of x [N, ..., C]."""
    return torch.group_norm(x.movedim(-1, 1), groups, w, b, eps).movedim(1, -1).contiguous()


def group_stats(x: Tensor, *, groups: int, chunks: int) -> Tensor:
    """Mean and sum of squared deviations of x [N, ..., C] per group of channels and run of pixels.

    Every image is cut into `chunks` runs of equally many pixels: f32[N, chunks, groups, 2].
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = wide.reshape(x.shape[0], chunks, -1, groups, x.shape[-1] // groups)
    mean = parts.mean((2, 4))
    m2 = (parts - mean[:, :, None, :, None]).square().sum((2, 4))
    return torch.stack((mean, m2), -1)


def normalize_groups(
    x: Tensor, stats: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float
) -> Tensor:
    """`group_norm` of x [N, ..., C] whose `group_stats` are known, merged by Chan's formula."""
    images, chunks, groups, _ = stats.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = wide.reshape(images, -1, groups, x.shape[-1] // groups)
    count = parts.shape[1] * parts.shape[3] // chunks
    mean = stats[..., 0].mean(1, keepdim=True)
    m2 = stats[..., 1] + count * (stats[..., 0] - mean).square()
    rstd = (m2.sum(1, keepdim=True) / (count * chunks) + eps).rsqrt()
    y = ((parts - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)
    y = y if w is None else y * w
    return (y if b is None else y + b).to(x.dtype)


def gather(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """`torch.gather`, with indices that count from the end where they are negative."""
    return torch.gather(x, dim, torch.where(index < 0, index + x.shape[dim], index).long())


def roll(x: Tensor, *, shifts: Sequence[int]) -> Tensor:
    """`torch.roll` by so many elements along each dimension."""
    return torch.roll(x, tuple(shifts), tuple(range(x.dim())))


def unfold(x: Tensor, *, dim: int, size: int, step: int) -> Tensor:
    """`size` neighbours along `dim` from each `step`th on, as a last dimension."""
    return x.unfold(dim, size, step)
