"""Operators that read between the pixels of an image, as torch operations that have kernels.

deform_conv(x, weight, offsets, mask, bias) -> linear(grid_sample(x, points) * mask, weight, bias)
roi_align(x, regions, images)               -> sum(grid_sample(x, points) * share)
sample_volume(x, grid)                      -> sum of 8 gather(x, index) * share
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FINE_ROWS = 512
"""Of images one above the other, in which positions are as fine as in one large image."""


def deform_conv(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
) -> Tensor:
    """A convolution each of whose taps lies somewhere else at each place, weighed by `mask`.

    What lies between pixels is their bilinear mean; pixels outside of x are zero.

    Args:
        x: [N, C, H, W].
        weight: [O, C / groups, KH, KW].
        offsets: pixels in (y, x), [N, offset_groups * KH * KW * 2, OH, OW].
        mask: [N, offset_groups * KH * KW, OH, OW].
        bias: [O].
        stride, pad, dilation: in (y, x); `pad` is what lies before the first pixel.

    Returns:
        [N, O, OH, OW].
    """
    batch, channels, height, width = x.shape
    outputs, depth, *kernel = weight.shape
    rows, columns = offsets.shape[2:]
    taps, pixels, part = kernel[0] * kernel[1], rows * columns, channels // offset_groups
    wide = _position_dtype(x)
    images = x.reshape(batch * offset_groups, part, height, width).to(wide)
    places = []  # of the taps that do not move: f64 [OH, OW, KH, KW] along each axis
    for axis, count in enumerate((rows, columns)):
        of_output = torch.arange(count, dtype=torch.float64, device=x.device) * stride[axis]
        of_tap = torch.arange(kernel[axis], dtype=torch.float64, device=x.device) * dilation[axis]
        at = of_output.unsqueeze(1) + of_tap - pad[axis]
        at = at[:, None, :, None] if axis == 0 else at[None, :, None, :]
        places.append(at.expand(rows, columns, *kernel))
    edges = _numbers((height, width), torch.float64, x)
    plain = _on_grid(torch.stack(places, -1), edges).reshape(rows, columns, 1, taps, 2).to(wide)
    # A convolution makes offsets with their channels last, and in that order they are computed on.
    moved = offsets.permute(0, 2, 3, 1).reshape(batch, rows, columns, offset_groups, taps, 2)
    points = (moved.to(wide) * (2 / edges).to(wide) + plain).permute(0, 3, 1, 2, 4, 5)
    points = points.reshape(batch * offset_groups, pixels, taps, 2)
    # They are in (y, x), and the grid is to be in (x, y), so the image is turned.
    found = F.grid_sample(images.transpose(2, 3), points, "bilinear", "zeros", False)
    found = found.permute(0, 2, 3, 1).reshape(batch, offset_groups, pixels, taps, part)
    if mask is not None:
        shares = mask.permute(0, 2, 3, 1).reshape(batch, pixels, offset_groups, taps, 1)
        found = found * shares.transpose(1, 2)
    found = found.to(x.dtype).permute(0, 2, 3, 1, 4).reshape(batch * pixels, taps, groups, depth)
    factor = weight.flatten(2).transpose(1, 2).reshape(groups, outputs // groups, taps * depth)
    if groups == 1:
        y = F.linear(found.reshape(batch * pixels, taps * depth), factor[0], bias)
    else:
        columns_of_groups = found.permute(2, 0, 1, 3).reshape(groups, batch * pixels, taps * depth)
        y = columns_of_groups @ factor.transpose(1, 2)
        y = y if bias is None else y + bias.reshape(groups, 1, outputs // groups)
        y = y.transpose(0, 1)
    return y.reshape(batch, rows, columns, outputs).permute(0, 3, 1, 2)


def roi_align(
    x: Tensor,
    regions: Tensor,
    images: Tensor,
    *,
    scale: float,
    size: Sequence[int],
    samples: int,
    aligned: bool,
    largest: bool = False,
) -> Tensor:
    """Each region as an image of one size, an element the mean of `samples` x `samples` points.

    A point up to one pixel outside of x is moved to its edge; further out there are zeros.

    Args:
        x: [N, C, H, W].
        regions: (x, y) of two corners, [R, 4].
        images: which of the N a region is of, [R], int64.
        scale: how many pixels of x one unit of the corners is.
        size: (OH, OW) of the results.
        aligned: corners are counted from the edge of the first pixel, not from its centre; regions
            that are not aligned are a pixel large at least.
        largest: take the largest weighed pixel next to the points instead of their mean.

    Returns:
        [R, C, OH, OW].
    """
    batch, channels, height, width = x.shape
    wide = _position_dtype(x)
    rows, columns = size
    along = []  # each axis of a region, 0 to 1: f64 [OH, OW, samples, samples]
    for axis, count in ((1, columns), (0, rows)):
        steps = torch.arange(count * samples, dtype=torch.float64, device=x.device) + 0.5
        at = (steps / (count * samples)).reshape(count, samples)
        at = at[None, :, None, :] if axis else at[:, None, :, None]
        along.append(at.expand(rows, columns, samples, samples))
    corners = regions.to(wide) * scale - (0.5 if aligned else 0.0)
    start, length = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not aligned:
        length = length.clamp_min(1)
    each = (len(regions), 1, 1, 1, 1, 2)
    points = start.reshape(each) + torch.stack(along, -1).to(wide) * length.reshape(each)
    edges = _numbers((width, height), wide, x)
    inside = (points >= -1) & (points <= edges)
    points = torch.minimum(points.clamp_min(0), edges - 1)
    stacked = batch * (height + 1)
    most = max(FINE_ROWS, torch.finfo(x.dtype).eps / torch.finfo(wide).eps)
    if largest or (batch > 1 and stacked > most):
        pooled = _of_neighbours(x, points, inside, images, largest)
    else:
        pixels = x.permute(0, 2, 3, 1).to(wide)
        if batch > 1:  # one image of all, with zeros in between
            pixels = F.pad(pixels, (0, 0, 0, 0, 0, 1)).reshape(1, stacked, width, channels)
            below = _numbers((0, height + 1), wide, x) * images.to(wide).reshape(-1, 1, 1, 1, 1, 1)
            points, edges = points + below, _numbers((width, stacked), wide, x)
        # Zeros outside change nothing inside of the image, and are what lies further out.
        grid = torch.where(inside, _on_grid(points, edges), -4.0)
        grid = grid.reshape(1, len(regions) * rows * columns, samples**2, 2)
        found = F.grid_sample(pixels.permute(0, 3, 1, 2), grid, "bilinear", "zeros", False)
        share = torch.full((samples**2, 1), samples**-2, dtype=wide, device=x.device)
        pooled = (found.permute(0, 2, 3, 1) * share).sum(2)
        pooled = pooled.reshape(len(regions), rows, columns, channels)
    return pooled.permute(0, 3, 1, 2).to(x.dtype)


def _of_neighbours(
    x: Tensor, points: Tensor, inside: Tensor, images: Tensor, largest: bool
) -> Tensor:
    """The mean of points [R, OH, OW, S, S, 2] of x, from the pixels next to them, or the largest of
    these: [R, OH, OW, C]."""
    _, channels, height, width = x.shape
    low, last = points.floor(), _numbers((width - 1, height - 1), torch.int64, x)
    share, first = points - low, low.long()
    weights = ((1 - share) * inside, share * inside)
    places = (first, torch.minimum(first + 1, last))
    flat = x.permute(0, 2, 3, 1).reshape(-1, channels)
    found = []
    for row, of_row in zip(places, weights, strict=True):
        for column, of_column in zip(places, weights, strict=True):
            at = images.reshape(-1, 1, 1, 1, 1) * height + row[..., 1]
            at = at * width + column[..., 0]
            values = flat.index_select(0, at.reshape(-1)).reshape(*at.shape, channels)
            found.append(values * (of_row[..., 1] * of_column[..., 0]).unsqueeze(-1))
    if largest:
        return torch.stack(found).amax((0, 4, 5))
    return (found[0] + found[1] + found[2] + found[3]).mean((3, 4))


def sample_volume(
    x: Tensor, grid: Tensor, *, nearest: bool, border: bool, align_corners: bool
) -> Tensor:
    """`F.grid_sample` of volumes, trilinear or of the nearest pixels.

    Args:
        x: [N, C, D, H, W].
        grid: points in (x, y, z), [N, OD, OH, OW, 3].
        border: the outermost pixels go on outside, instead of zeros.

    Returns:
        [N, C, OD, OH, OW].
    """
    batch, channels, *sizes = x.shape
    wide, taps = _position_dtype(x), 1 if nearest else 2
    axes = sizes[::-1]  # in the order of a point's coordinates
    pixels = _numbers(axes, wide, x)
    at = grid.to(wide) + 1
    at = at * ((pixels - 1) / 2) if align_corners else at * (pixels / 2) - 0.5
    # Two steps outside there are zeros as well, also of what is no number.
    first, last = (0, pixels - 1) if border else (-1, pixels)
    at = torch.where(at > first, torch.minimum(at, last), float(first))
    low = at.round() if nearest else at.floor()
    # What lies around the pixels is made, and one index serves all neighbours of a point: each of
    # them is the first one of its own view.
    beyond = taps - 1 if border else taps
    around = F.pad(x.permute(0, 2, 3, 4, 1), (0, 0, *(-first, beyond) * 3))
    _, depth, height, width, _ = around.shape
    steps = (1, width, width * height)
    index = torch.arange(batch, device=x.device).reshape(-1, 1, 1, 1) * (depth * steps[2])
    for axis, place in enumerate((low - first).long().unbind(-1)):
        index = index + place * steps[axis]
    flat, index = around.reshape(-1, channels), index.reshape(-1)
    count = flat.shape[0] - (taps - 1) * sum(steps)
    shares = (at - low).reshape(-1, 3, 1).unbind(1)

    def between(axis: int, ahead: int) -> Tensor:
        """The means of pixels along the first `axis` axes, so many pixels ahead of the first."""
        if axis == 0:
            return flat[ahead : ahead + count].index_select(0, index).to(wide)
        one = between(axis - 1, ahead)
        if nearest:
            return one
        return one + shares[axis - 1] * (between(axis - 1, ahead + steps[axis - 1]) - one)

    y = between(3, 0).to(x.dtype).reshape(batch, *grid.shape[1:4], channels)
    return y.permute(0, 4, 1, 2, 3)


def _position_dtype(x: Tensor) -> torch.dtype:
    """16 bits have too few to name a place between the pixels of an image."""
    return torch.promote_types(x.dtype, torch.float32)


def _numbers(numbers: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A vector of them, made by operations that can be traced again."""
    return torch.stack([torch.full((), x, dtype=dtype, device=like.device) for x in numbers])


def _on_grid(pixels: Tensor, sizes: Tensor) -> Tensor:
    """Positions in pixels as grid_sample wants them: -1 and 1 are the outer edges of an axis."""
    return (2 * pixels + 1) / sizes - 1
