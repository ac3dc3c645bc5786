"""A transposed convolution as one of stride 1: its channels are the pixels of one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def phases(weight: Tensor, stride: Sequence[int], taps: Sequence[int]) -> Tensor:
    """The weights of the convolution of stride 1.

    Args:
        weight: [in, out, kernel height, kernel width] of the transposed convolution; of volumes
            with frames ahead of the height.
        stride: its.
        taps: of each phase, along each axis.

    Returns:
        [stride height * stride width * out, in, taps height, taps width].
    """
    axes = len(taps)
    sides = list(zip(taps, stride, weight.shape[2:], strict=True))
    missing = [each for taps, step, size in reversed(sides) for each in (0, taps * step - size)]
    split = [each for taps, step, _ in sides for each in (taps, step)]
    parts = F.pad(weight, missing).reshape(*weight.shape[:2], *split)
    parts = parts.flip([2 + 2 * axis for axis in range(axes)])
    steps, rest = (range(first, 2 + 2 * axes, 2) for first in (3, 2))
    return parts.permute(*steps, 1, 0, *rest).flatten(0, axes).contiguous()
