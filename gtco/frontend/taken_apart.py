"""Operators that no kernel computes, as torch operations that kernels do compute.

    torchvision.deform_conv2d(x, w, offsets, mask)  -> linear(grid_sample(x, points) * mask, w)
    aten.bucketize(x, boundaries)                   -> sum(not (boundaries >= x))
    aten.median.dim(x, dim)                         -> select(sort(x, dim), middle)

A function takes the overload's own arguments and gives its results, or `NotImplemented`: "not in
this form", and the operator stays. Some of them torch knows only once their library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gtco.frontend import sampled

aten = torch.ops.aten

Result = Any
"""A tensor or a tuple of them, or `NotImplemented`."""

MOST_BOUNDARIES = 1024
"""Each is compared with each element; where there are more, a search is less work."""
MOST_SORTED = 4096
"""Elements of a row that a kernel sorts."""
MOST_ELEMENTS = 255 * 1024
"""Elements of a row from which it picks those."""

_BICUBIC = 2
"""Of the samplings of ATen; the others are bilinear and nearest."""
_BORDER, _REFLECTION = 1, 2
"""Of its paddings; the other one is zeros."""


def _deform_conv2d(
    x: Tensor, weight: Tensor, offsets: Tensor, mask: Tensor, bias: Tensor,
    stride_h: int, stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int,
    groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    return sampled.deform_conv(
        x,
        weight,
        offsets,
        mask if use_mask else None,
        bias,
        stride=(stride_h, stride_w),
        pad=(pad_h, pad_w),
        dilation=(dilation_h, dilation_w),
        groups=groups,
        offset_groups=offset_groups,
    )


def _roi_align(
    x: Tensor, regions: Tensor, scale: float, rows: int, columns: int, samples: int, aligned: bool
) -> Result:
    if samples <= 0:  # as many as a region is large
        return NotImplemented
    return sampled.roi_align(
        x,
        regions[:, 1:],
        regions[:, 0].long(),
        scale=scale,
        size=(rows, columns),
        samples=samples,
        aligned=aligned,
    )


def _grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> Result:
    """Of images or volumes: ATen's own table has this one, so it cannot stay as it is."""
    sampler = aten.grid_sampler_2d if x.dim() == 4 else aten.grid_sampler_3d
    return sampler.default(x, grid, mode, padding, align)


def _grid_sampler_2d(x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> Result:
    if padding != _REFLECTION or mode == _BICUBIC:
        return NotImplemented
    return aten.grid_sampler_2d.default(x, _reflected(grid), mode, _BORDER, align)


def _grid_sampler_3d(x: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> Tensor:
    return sampled.sample_volume(
        x,
        _reflected(grid) if padding == _REFLECTION else grid,
        nearest=mode == 1,
        border=padding != 0,
        align_corners=align,
    )


def _reflected(grid: Tensor) -> Tensor:
    """Points outside of [-1, 1] turned back at these, as often as it takes."""
    at = (grid.to(torch.promote_types(grid.dtype, torch.float32)) + 1).abs()
    return (1 - (at - 4 * (at / 4).floor() - 2).abs()).to(grid.dtype)


def _trilinear(
    x: Tensor, weight: Tensor, y: Tensor, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Result:  # fmt: skip
    """As nn.Bilinear calls it: x [N, I], weight [O, I, J], y [N, J] -> sum of x W y, [N, O]."""
    forms = (list(expand1), list(expand2), list(expand3), list(sumdim))
    if forms != ([1, 3], [0], [1, 2], [2, 3]):
        return NotImplemented
    outputs, inner, last = weight.shape
    of_x = x @ weight.permute(1, 0, 2).reshape(inner, outputs * last)
    return (of_x.reshape(len(x), outputs, last) * y.unsqueeze(1)).sum(2)


def _bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Result:
    """How many boundaries lie before each element; all of them before what is no number."""
    if boundaries.dim() != 1 or len(boundaries) > MOST_BOUNDARIES:
        return NotImplemented
    each = x.unsqueeze(-1)
    behind = boundaries > each if right else boundaries >= each
    return torch.where(behind, 0.0, 1.0).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _searchsorted(
    boundaries: Tensor, x: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Result:  # fmt: skip
    if sorter is not None:
        return NotImplemented
    return _bucketize(x, boundaries, out_int32=out_int32, right=right or side == "right")


def _median_dim(x: Tensor, dim: int, keepdim: bool = False) -> Result:
    """The lower one of two in the middle, and where it is; NaN where there is one."""
    if not x.dim() or not 0 < x.shape[dim] <= MOST_SORTED:
        return NotImplemented
    found = torch.sort(x, dim=dim, descending=True, stable=True)
    values, places = (each.narrow(dim, x.shape[dim] // 2, 1) for each in found)
    if x.is_floating_point():  # NaN is the largest, and so the first
        first = [each.narrow(dim, 0, 1) for each in found]
        is_nan = first[0].isnan()
        values = torch.where(is_nan, first[0], values)
        places = torch.where(is_nan, first[1], places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median(x: Tensor) -> Result:
    found = _median_dim(x.reshape(-1), 0)
    return found if found is NotImplemented else found[0]


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Result:
    """The last of the `k` smallest elements, or of the largest where these are fewer."""
    if not x.dim() or not 0 < x.shape[dim] <= MOST_ELEMENTS:
        return NotImplemented
    from_end = x.shape[dim] - k + 1
    fewer = min(k, from_end)
    if fewer > MOST_SORTED:
        return NotImplemented
    found = torch.topk(x, fewer, dim, largest=from_end < k, sorted=True)
    values, places = (each.narrow(dim, fewer - 1, 1) for each in found)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


TAKEN_APART: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten._trilinear.default": _trilinear,
        "aten.bucketize.Tensor": _bucketize,
        "aten.grid_sampler.default": _grid_sampler,
        "aten.grid_sampler_2d.default": _grid_sampler_2d,
        "aten.grid_sampler_3d.default": _grid_sampler_3d,
        "aten.kthvalue.default": _kthvalue,
        "aten.median.default": _median,
        "aten.median.dim": _median_dim,
        "aten.searchsorted.Tensor": _searchsorted,
        "torchvision.deform_conv2d.default": _deform_conv2d,
        "torchvision.roi_align.default": _roi_align,
    }
)
"""Overloads by their names, and what computes them."""


def taken_apart() -> dict[OpOverload, Callable[..., Any]]:
    """Those of them that torch has."""
    found = {}
    for name, function in TAKEN_APART.items():
        library, operator, overload = name.split(".")
        packet = getattr(getattr(torch.ops, library), operator, None)
        if packet is not None:
            found[getattr(packet, overload)] = function
    return found
