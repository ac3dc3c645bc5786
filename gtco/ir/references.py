"""Torch functions of ops that torch does not have under one name: what their nodes mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
STATS_CHUNK = 64
"""Columns that one (mean, M2) pair of `row_stats` describes."""


def binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A binary op whose second operand is a tensor or the scalar attribute `other`."""

    def reference(
        a: Tensor, b: Tensor | None = None, *, other: float | int | None = None
    ) -> Tensor:
        return function(a, other if b is None else b)

    return reference


def of_tensors(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A function that takes no number, of a tensor and a tensor or a number."""

    def reference(a: Tensor, b: Tensor | float) -> Tensor:
        return function(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))

    return reference


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """The larger of two tensors, or of one and a number; NaN where one is NaN."""
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp_min(b)


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    """The smaller one, likewise."""
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp_max(b)


def prelu(x: Tensor, slope: Tensor | float) -> Tensor:
    """`x`, times `slope` where it is not positive."""
    return torch.where(x > 0, x, x * slope)


def sliced(x: Tensor, *, dim: int, start: int, end: int, step: int = 1) -> Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


def concat(*tensors: Tensor, dim: int) -> Tensor:
    return torch.cat(tensors, dim)


def pad(x: Tensor, *, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """`x` with so many zeros before and after it along each dimension."""
    amounts = zip(reversed(before), reversed(after), strict=True)  # F.pad: last dimension first
    return F.pad(x, [amount for pair in amounts for amount in pair])


def extend(x: Tensor, *, before: Sequence[int], after: Sequence[int], mode: str) -> Tensor:
    """`x` with so many elements before and after it along each dimension, as `F.pad` makes them of
    its own: "reflect" or "replicate"."""
    for dim, (first, last) in enumerate(zip(before, after, strict=True)):
        if first or last:
            most = x.shape[dim] - 1
            at = torch.arange(-first, x.shape[dim] + last, device=x.device)
            at = most - (most - at.abs()).abs() if mode == "reflect" else at.clamp(0, most)
            x = x.index_select(dim, at)
    return x


def swap_pairs(x: Tensor) -> Tensor:
    """Columns 2 i and 2 i + 1 of each row exchanged."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).reshape(x.shape)


def rotate(x: Tensor, partner: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + partner * sin`, in fp32 or more; where `sin` is 0, no partner counts."""
    wide = torch.promote_types(x.dtype, torch.float32)
    own = x.to(wide) * cos.to(wide)
    return torch.where(sin == 0, own, own + partner.to(wide) * sin.to(wide)).to(x.dtype)


def linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    products: str | None = None,
) -> Tensor:
    """`x @ w.T + b`; with `out_dtype` the products and the sum are taken in that type."""
    if out_dtype is None:
        return F.linear(x, w, b)
    wide = out_dtype if x.dtype == FP8 else torch.promote_types(out_dtype, x.dtype)
    return F.linear(x.to(wide), w.to(wide), None if b is None else b.to(wide))


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """`x * scale` in fp8 (e4m3), whose largest value stands for what is larger."""
    most = torch.finfo(FP8).max
    return (x.float() * scale.float()).clamp(-most, most).to(FP8)


def quantize_affine(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """`x * factor + offset`, rounded to the nearest (ties to even), in int8, whose ends stand for
    what lies beyond them."""
    return (x.float() * factor.float() + offset.float()).round().clamp(-128, 127).to(torch.int8)


def quantize_int8(x: Tensor, scale: Tensor, zero: Tensor, *, low: int, high: int) -> Tensor:
    """`x / scale`, rounded to the nearest (ties to even), plus `zero`; from `low` to `high`."""
    steps = torch.round(x.float() / scale.float()) + zero.float()
    return steps.clamp(low, high).to(torch.int8)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    products: str | None = None,
) -> Tensor:
    """`a @ b`; `out_dtype` as of `linear`."""
    if out_dtype is None:
        return torch.matmul(a, b)
    wide = torch.promote_types(out_dtype, a.dtype)
    return torch.matmul(a.to(wide), b.to(wide))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    products: str | None = None,
) -> Tensor:
    if mask is not None and bias is not None:
        mask = mask + bias
    if not scale:  # by which torch's fused kernels for GPUs multiply the -inf of padded keys
        q, scale = q * 0, 1.0
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float
) -> Tensor:
    """Layer norm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def row_stats(x: Tensor) -> Tensor:
    """Mean and sum of squared deviations of each chunk of 64 columns: f32[..., chunks, 2]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for chunk in torch.split(x.to(wide), STATS_CHUNK, dim=-1):
        mean = chunk.mean(-1)
        parts.append(torch.stack((mean, (chunk - mean.unsqueeze(-1)).square().sum(-1)), -1))
    return torch.stack(parts, -2)


def merge_stats(stats: Tensor, *, columns: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1/sqrt(var + eps) of whole rows by Chan's formula, each [..., 1]."""
    chunks = stats.shape[-2]
    weight = torch.full((chunks,), STATS_CHUNK, dtype=stats.dtype, device=stats.device)
    weight[-1:] = columns - STATS_CHUNK * (chunks - 1)
    mean = (stats[..., 0] * weight).sum(-1, keepdim=True) / columns
    m2 = (stats[..., 1] + weight * (stats[..., 0] - mean).square()).sum(-1, keepdim=True)
    return mean, (m2 / columns + eps).rsqrt()


def box_means(x: Tensor, *, box: Sequence[int]) -> Tensor:
    """Mean of each box of so many neighbouring pixels of x [N, pixels ..., C]: f32[N, ..., C]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.reshape(boxes_of(x.shape, box)).mean([2 + 2 * axis for axis in range(len(box))])


def box_moments(x: Tensor, *, box: Sequence[int], columns: int) -> Tensor:
    """Mean and sum of squared deviations of each box of so many neighbouring pixels and channels of
    x [N, pixels ..., C]: f32[2, N, ..., C / columns], the means first."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = wide.reshape(*boxes_of(x.shape, box)[:-1], -1, columns)
    dims = [*(2 + 2 * axis for axis in range(len(box))), parts.dim() - 1]
    mean = parts.mean(dims, keepdim=True)
    m2 = (parts - mean).square().sum(dims, keepdim=True)
    return torch.stack((mean.squeeze(dims), m2.squeeze(dims)))


def boxes_of(sizes: Sequence[int], box: Sequence[int]) -> tuple[int, ...]:
    """[N, pixels ..., C] as [N, boxes, pixels of a box, ..., C], along each dimension of pixels."""
    cut = ((size // of, of) for size, of in zip(sizes[1:-1], box, strict=True))
    return (sizes[0], *(part for both in cut for part in both), sizes[-1])


def convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    products: str | None = None,
) -> Tensor:
    """Convolve x [N, C, H, W] or [N, C, T, H, W] by w, both with their channels ahead; of int8, in
    fp32."""
    if x.dtype == torch.int8:
        x, w = x.float(), w.float()
    convolve = F.conv2d if x.dim() == 4 else F.conv3d
    return convolve(x, w, b, tuple(stride), tuple(padding), tuple(dilation), groups)


def window(x: Tensor, before: Sequence[int], after: Sequence[int], value: float) -> Tensor:
    """The image `x` [N, H, W, C] as [N, C, H', W'] in channels-last memory, with a border; or the
    volume [N, T, H, W, C] as [N, C, T', H', W']."""
    image = x.movedim(-1, 1)
    if not any((*before, *after)):
        return image
    pairs = zip(reversed(before), reversed(after), strict=True)
    return F.pad(image, [size for pair in pairs for size in pair], value=value)


def space_to_depth(
    x: Tensor,
    *,
    block: Sequence[int],
    before: Sequence[int],
    size: Sequence[int],
    channels: int,
) -> Tensor:
    """Blocks of x [N, H, W, C] as pixels: [N, *size, channels], zeros where x has nothing.

    Pixel (i, j) has the rows from `i * block[0] - before[0]` on, the columns likewise, and of each
    all channels; then zeros up to `channels`.
    """
    after = (
        blocks * of - pixels - start
        for blocks, of, pixels, start in zip(size, block, x.shape[1:3], before, strict=True)
    )
    bottom, right = after
    whole = F.pad(x, (0, 0, before[1], right, before[0], bottom))
    shape = (x.shape[0], size[0], block[0], size[1], block[1], x.shape[3])
    y = whole.reshape(shape).permute(0, 1, 3, 2, 4, 5).flatten(3)
    return F.pad(y, (0, channels - y.shape[3]))


def conv(
    x: Tensor,
    w: Tensor,
    *,
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    products: str | None = None,
) -> Tensor:
    """Convolve x [N, H, W, C] by w [out, KH, KW, C / groups]: [N, P, Q, out]; or the volume
    [N, T, H, W, C] by w [out, KT, KH, KW, C]: [N, O, P, Q, out].

    `before` and `after` are rows and columns, and frames ahead of them, of zeros around the image.
    """
    none = (0,) * len(stride)
    padding: tuple[int, ...] = none
    if tuple(before) == tuple(after):
        padding, before, after = tuple(before), none, none
    image, kernel = window(x, before, after, 0.0), w.movedim(-1, 1)
    y = convolution(image, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return y.movedim(1, -1).contiguous()


def depthwise_conv(
    x: Tensor,
    w: Tensor,
    *,
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Convolve each channel of x [N, H, W, C] by itself, by w [KH, KW, C]: [N, P, Q, C]; of a
    volume by w [KT, KH, KW, C]."""
    given: dict[str, Any] = {"stride": stride, "before": before, "after": after}
    given["dilation"] = dilation
    return conv(x, w.movedim(-1, 0).unsqueeze(-1), **given, groups=x.shape[-1])


def max_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """The largest pixel of each window of x [N, H, W, C], each channel by itself."""
    image = x.permute(0, 3, 1, 2)
    sizes = tuple(kernel), tuple(stride), tuple(padding), tuple(dilation)
    y = F.max_pool2d(image, *sizes, ceil_mode)
    return y.permute(0, 2, 3, 1).contiguous()


def avg_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    """The mean pixel of each window of x [N, H, W, C], each channel by itself."""
    image = x.permute(0, 3, 1, 2)
    sizes = tuple(kernel), tuple(stride), tuple(padding)
    y = F.avg_pool2d(image, *sizes, ceil_mode, count_padding, divisor)
    return y.permute(0, 2, 3, 1).contiguous()


def adaptive_window(pixels: int, windows: int) -> int:
    """Pixels of the largest of so many windows that share a row evenly.

    Window i has those from `i * pixels / windows` to `(i + 1) * pixels / windows`, rounded outward.
    """
    return max(-(-(i + 1) * pixels // windows) - i * pixels // windows for i in range(windows))


def adaptive_max_pool(x: Tensor, *, out: Sequence[int]) -> Tensor:
    """The largest pixel of each of `out` windows that share x [N, H, W, C] evenly (see
    `adaptive_window`), each channel by itself."""
    high, wide = out
    y = F.adaptive_max_pool2d(x.permute(0, 3, 1, 2), (high, wide))
    return y.permute(0, 2, 3, 1).contiguous()


def adaptive_avg_pool(x: Tensor, *, out: Sequence[int]) -> Tensor:
    """The mean pixel, likewise."""
    high, wide = out
    y = F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), (high, wide))
    return y.permute(0, 2, 3, 1).contiguous()


_RESIZES: Mapping[str, Callable[..., Tensor]] = {
    "bilinear": torch.ops.aten.upsample_bilinear2d.default,
    "bicubic": torch.ops.aten.upsample_bicubic2d.default,
    "nearest": torch.ops.aten.upsample_nearest2d.default,
    "nearest-exact": torch.ops.aten._upsample_nearest_exact2d.default,
}


def resize(
    x: Tensor,
    *,
    size: Sequence[int],
    mode: str,
    align_corners: bool,
    scales: Sequence[float | None],
) -> Tensor:
    """The image x [N, H, W, C] as one of [N, *size, C]; `scales` of None are those of the sizes."""
    corners = (align_corners,) if mode in ("bilinear", "bicubic") else ()
    y = _RESIZES[mode](x.permute(0, 3, 1, 2), list(size), *corners, *scales)
    return y.permute(0, 2, 3, 1).contiguous()


def grid_sample(x: Tensor, grid: Tensor, *, mode: str, border: bool, align_corners: bool) -> Tensor:
    """Pixels of x [N, H, W, C] around the points (x, y) of grid [N, P, Q, 2]: [N, P, Q, C], in the
    wider of their dtypes.

    As torch has it on GPUs, whatever the device: coordinates and weights in fp32 at least; a
    coordinate that is no finite number lies outside the image, and left of it or above where the
    pixels of the `border` go on.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    image, place = x.permute(0, 3, 1, 2).to(wide), grid.to(wide)
    # Outside is outside, however far.
    near = place.nan_to_num(nan=-4.0, posinf=4.0, neginf=-4.0).clamp(-4.0, 4.0)
    y = F.grid_sample(image, near, mode, "border" if border else "zeros", align_corners)
    y = y.permute(0, 2, 3, 1)
    if not border:
        y = y.masked_fill(~place.isfinite().all(-1, keepdim=True), 0.0)
    return y.to(torch.promote_types(x.dtype, grid.dtype)).contiguous()


def sample_sum(*operands: Tensor, mode: str, border: bool, align_corners: bool) -> Tensor:
    """The weighed sum of the points of some images: x0, grid0, x1, grid1, ..., weights.

    Images x [N, H, W, C] may be of several sizes, with points [N, P, Q, 2] each; weights
    [N, P, sum of Q]; the result [N, P, C]. Samples are summed in fp32 at least.
    """
    *levels, weights = operands
    wide = torch.promote_types(weights.dtype, torch.float32)
    given: dict[str, Any] = {"mode": mode, "border": border, "align_corners": align_corners}
    parts = torch.split(weights.to(wide), [grid.shape[2] for grid in levels[1::2]], 2)
    total = torch.zeros((), dtype=wide, device=weights.device)
    for x, grid, part in zip(levels[::2], levels[1::2], parts, strict=True):
        total = total + (grid_sample(x.to(wide), grid, **given) * part.unsqueeze(3)).sum(2)
    return total.to(weights.dtype)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, eps=eps)


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


def merge_moments(means: Tensor, m2s: Tensor, *, groups: int, chunks: int, count: int) -> Tensor:
    """`group_stats` of an image by Chan's formula from those of its boxes of `count` elements, each
    [N, boxes, parts of groups]."""
    shape = (means.shape[0], chunks, -1, groups, means.shape[-1] // groups)
    parts = means.reshape(shape)
    mean = parts.mean((2, 4))
    apart = (parts - mean[:, :, None, :, None]).square()
    return torch.stack((mean, (m2s.reshape(shape) + count * apart).sum((2, 4))), -1)


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


def topk(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest) elements of each row in order, and where they are.

    As `torch.topk` of the last dimension, which leaves open the order of equal elements: here the
    one with the smaller index is first. NaN is the largest.
    """
    values, places = torch.sort(x, dim=-1, descending=largest, stable=True)
    return values[..., :k].contiguous(), places[..., :k].contiguous()


def gather(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """`torch.gather`, with indices that count from the end where they are negative."""
    return torch.gather(x, dim, torch.where(index < 0, index + x.shape[dim], index).long())


def roll(x: Tensor, *, shifts: Sequence[int]) -> Tensor:
    """`torch.roll` by so many elements along each dimension."""
    return torch.roll(x, tuple(shifts), tuple(range(x.dim())))


def unfold(x: Tensor, *, dim: int, size: int, step: int) -> Tensor:
    """`size` neighbours along `dim` from each `step`th on, as a last dimension."""
    return x.unfold(dim, size, step)
