"""Weights rounded to 8 bits so that their errors cancel in what a linear reads.

    w [rows, K], moment [K, K], the sum of x^T x over inputs x [n, K]    ->    8 bits [rows, K]

The columns are rounded one after another, those that carry most first, and what one is off by is
taken off the columns to come as well as they can stand in for it. What remains is smaller where
inputs are correlated, as those of real models are. From GPTQ (Frantar et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gtco.passes.scales import to_8_bits

DAMPING = 0.01
"""Of the mean diagonal of a moment, added to it: inputs vary more than those that were seen."""
_BLOCK = 128
"""Columns whose errors are passed on to all later ones at once."""


def compensated_weights(w: Tensor, moment: Tensor, dtype: torch.dtype) -> Tensor:
    """`w` in `dtype`, fp8 or int8, for inputs of `moment`.

    Args:
        w: [rows, K], of floats, as `Scales.scaled` gives it.
        moment: [K, K] in fp32, finite: the second moment of what is multiplied by `w`, as rounded.
    """
    order = moment.diagonal().argsort(descending=True)
    # (K, rows), so that what belongs to a column of w lies together
    left = w.float().t()[order].contiguous()
    rounded = torch.empty_like(left)
    shares = _shares(moment[order][:, order])
    for start in range(0, len(left), _BLOCK):
        block = left[start : start + _BLOCK]
        inside = shares[start : start + _BLOCK, start : start + _BLOCK]
        off = torch.empty_like(block)
        for column in range(len(block)):
            rounded[start + column] = to_8_bits(block[column], dtype).float()
            off[column] = block[column] - rounded[start + column]
            block[column + 1 :] -= inside[column, column + 1 :, None] * off[column]
        end = start + len(block)
        left[end:] -= shares[start:end, end:].t() @ off
    result = torch.empty_like(rounded)
    result[order] = rounded
    return to_8_bits(result.t().contiguous(), dtype)


def _shares(moment: Tensor) -> Tensor:
    """[K, K], above the diagonal: how much of a later column makes up for 1 of an earlier one, of
    the columns behind it alone."""
    wide = moment.double()
    wide.diagonal().add_(DAMPING * wide.diagonal().mean() + torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    upper = torch.linalg.cholesky(inverse, upper=True)
    shares: Tensor = upper / upper.diagonal()[:, None]
    return shares.float()
