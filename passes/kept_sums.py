"""Weights rounded so that what they are off by adds up to nothing.

A constant factor folded into the weights of a convolution, or weights of several added up, have to
be rounded to 16 bits once more. To the nearest, the errors of a row add up as chance will have it,
and what a convolution reads has a mean: images have one, and so has what an activation leaves. That
mean times the sum is an error of its own, the same for all pixels, which no later layer averages
out. So a few weights that lie nearly half-way between two numbers go to the other one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gtco.ir.spec import HALVES

TAPS = 4
"""Of a channel, from which on each channel's errors add up to nothing by themselves: fewer leave
no choice."""


def rounded_keeping_sums(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """`weights` in `dtype`, each as one of the two numbers that it lies between.

    Args:
        weights: [out, in, taps ...] in f64. Of each channel of an output, the errors of all taps
            add up to nothing, or of each output where a channel has fewer than `TAPS`.
        dtype: of the result; where it has more than 16 bits, all weights go to the nearest.
    """
    nearest = weights.to(dtype)
    if dtype not in HALVES or not weights.numel():
        return nearest
    by_channel = math.prod(weights.shape[2:]) >= TAPS
    rows = math.prod(weights.shape[: 2 if by_channel else 1])
    return _kept(weights.reshape(rows, -1), nearest.reshape(rows, -1)).reshape(weights.shape)


def _kept(weights: Tensor, nearest: Tensor) -> Tensor:
    """`nearest`, but where the sum of a row's errors asks for the number on the other side."""
    off = nearest.double() - weights
    total = off.sum(1, keepdim=True)
    grows = (off > 0) == (nearest < 0)  # the magnitude, to the other side
    other = (nearest.view(torch.int16) + torch.where(grows, 1, -1).to(torch.int16)).view(
        nearest.dtype
    )
    step = (other.double() - nearest.double()).abs()
    helps = (off * total > 0) & (nearest != 0) & other.isfinite() & total.isfinite()
    order = torch.where(helps, off.abs() / step, 0.0).argsort(dim=1, descending=True, stable=True)
    moved = torch.where(helps, step, 0.0).gather(1, order).cumsum(1)
    left = (total.abs() - torch.cat((torch.zeros_like(total), moved), 1)).abs()
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
    return torch.where(helps & (rank < left.argmin(1, keepdim=True)), other, nearest)
