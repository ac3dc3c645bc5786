"""Memory that shows what a kernel did not write."""

from __future__ import annotations

import torch
from torch import Tensor

from gtco.ir.spec import TensorSpec


def poisoned(spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of `spec` whose every element a kernel must overwrite: NaN, or the largest int."""
    if spec.dtype.is_floating_point:
        return torch.full(spec.sizes, float("nan"), dtype=spec.dtype, device=device)
    value = True if spec.dtype == torch.bool else torch.iinfo(spec.dtype).max
    return torch.full(spec.sizes, value, dtype=spec.dtype, device=device)
