"""ONNX operators with sliding windows: convolution, pooling and what undoes them.

MaxPool(x), pads [0, 0, 1, 1]   -> F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-inf), ...)
ConvTranspose(x, w), pads [0, 1] -> F.pad(F.conv_transpose1d(x, w), (0, -1))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True)
class Window:
    """A sliding window: one number per spatial axis in each field.

    Args:
        overhang: padding behind the end that ceil_mode adds (negative: what floor leaves unread).
    """

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]
    overhang: list[int]

    @property
    def symmetric(self) -> bool:
        return self.before == self.after and all(size <= 0 for size in self.overhang)

    def pads(self, *, overhang: bool) -> list[int]:
        """For `F.pad`: last axis first."""
        flat = []
        for before, after, over in reversed(
            list(zip(self.before, self.after, self.overhang, strict=True))
        ):
            flat += [before, after + max(over, 0) if overhang else after]
        return flat


def _window(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    rank = len(sizes)
    if rank not in CONVOLUTIONS:
        raise call.refuse(f"{rank} spatial dimensions are not supported, 1 to 3 are")
    stride = list(call.attr("strides", [1] * rank))
    dilation = list(call.attr("dilations", [1] * rank))
    pads = list(call.attr("pads", [0] * (2 * rank)))
    ceil_mode = bool(call.attr("ceil_mode", 0))
    auto = call.attr("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise call.refuse(f"auto_pad={auto!r} is not supported")
    if not len(kernel) == len(stride) == len(dilation) == len(pads) // 2 == rank:
        raise call.refuse(f"strides, dilations, pads and kernel do not all have {rank} dimensions")
    if min(pads) < 0:
        raise call.refuse(f"negative pads {pads} are not supported")
    before, after, overhang = pads[:rank], pads[rank:], []
    for i, size in enumerate(sizes):
        reach = dilation[i] * (kernel[i] - 1) + 1
        if auto == "VALID":
            before[i] = after[i] = 0
        elif auto != "NOTSET":
            total = max((-(-size // stride[i]) - 1) * stride[i] + reach - size, 0)
            small, large = total // 2, total - total // 2
            before[i], after[i] = (small, large) if auto == "SAME_UPPER" else (large, small)
        room = size + before[i] + after[i] - reach
        count = room // stride[i] + 1
        if ceil_mode:
            count = -(-room // stride[i]) + 1
            if (count - 1) * stride[i] >= size + before[i]:
                count -= 1  # the last window would start behind the input
        overhang.append((count - 1) * stride[i] - room)
    return Window(list(kernel), stride, dilation, before, after, overhang)


def convolve(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution with the attributes of Conv: x is [n, c, *sizes], weight [m, c / group, *k]."""
    kernel = list(weight.shape[2:])
    if list(call.attr("kernel_shape", kernel)) != kernel:
        raise call.refuse(f"kernel_shape is not that of its weight, {kernel}")
    window = _window(call, x.shape[2:], kernel)
    padding = window.before
    if not window.symmetric:
        x, padding = F.pad(x, window.pads(overhang=False)), [0] * len(kernel)
    groups = call.attr("group", 1)
    function = CONVOLUTIONS[len(kernel)]
    return function(x, weight, bias, window.stride, padding, window.dilation, groups)


def _conv_transpose(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel, sizes = list(weight.shape[2:]), list(x.shape[2:])
    rank = len(kernel)
    if rank not in TRANSPOSED:
        raise call.refuse(f"{rank} spatial dimensions are not supported, 1 to 3 are")
    if list(call.attr("kernel_shape", kernel)) != kernel:
        raise call.refuse(f"kernel_shape is not that of its weight, {kernel}")
    stride, dilation = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    extra = list(call.attr("output_padding", [0] * rank))
    pads, auto = list(call.attr("pads", [0] * (2 * rank))), call.attr("auto_pad", "NOTSET")
    wanted = call.attr("output_shape")
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * step for size, step in zip(sizes, stride, strict=True)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    whole = [s * (n - 1) + r for s, n, r in zip(stride, sizes, reach, strict=True)]
    before, after = pads[:rank], pads[rank:]
    if auto == "VALID":
        before, after = [0] * rank, [0] * rank
    if wanted is not None:
        for i in range(rank):
            total = whole[i] + extra[i] - wanted[-rank:][i]
            small, large = total // 2, total - total // 2
            before[i], after[i] = (small, large) if auto == "SAME_UPPER" else (large, small)
    groups = call.attr("group", 1)
    function = TRANSPOSED[rank]
    fits = all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True))
    if before == after and min(before) >= 0 and fits:
        return function(x, weight, bias, stride, before, extra, groups, dilation)
    y = function(x, weight, None, stride, 0, 0, groups, dilation)
    cut = [size for i in reversed(range(rank)) for size in (-before[i], extra[i] - after[i])]
    y = F.pad(y, cut)
    return y if bias is None else y + bias.reshape([-1] + [1] * rank)


def _max_pool(call: Call, x: Tensor) -> Any:
    columns_first = bool(call.attr("storage_order", 0))  # of the indices
    window = _window(call, x.shape[2:], call.attr("kernel_shape"))
    pool = MAX_POOLS[len(window.kernel)]
    padding = window.before
    fits = all(2 * pad <= size for pad, size in zip(padding, window.kernel, strict=True))
    if call.wants(1):
        if not (x.is_floating_point() and x.dim() == 4 and window.symmetric and fits):
            raise call.refuse("its output Indices is supported for float images and symmetric pads")
        y, places = F.max_pool2d(
            x, window.kernel, window.stride, padding, window.dilation, return_indices=True
        )
        return y, _whole_indices(places, x.shape, columns_first)
    if not x.is_floating_point():
        wide = _max_pool_padded(window, x.to(torch.float64), -math.inf)
        return wide.to(x.dtype)
    if not (window.symmetric and fits):
        return _max_pool_padded(window, x, -math.inf)
    return pool(x, window.kernel, window.stride, padding, window.dilation)


def _whole_indices(places: Tensor, shape: Sequence[int], columns_first: bool) -> Tensor:
    """Indices into a whole [n, c, h, w] tensor, of those into each of its images."""
    batch, channels, height, width = shape
    if columns_first:
        places = places % width * height + places // width
    images = torch.arange(batch * channels, device=places.device) * (height * width)
    return places + images.reshape(batch, channels, 1, 1)


def _max_pool_padded(window: Window, x: Tensor, value: float) -> Tensor:
    padded = F.pad(x, window.pads(overhang=True), value=value)
    pool = MAX_POOLS[len(window.kernel)]
    return pool(padded, window.kernel, window.stride, 0, window.dilation)


def _max_unpool(call: Call, x: Tensor, places: Tensor, shape_input: Tensor | None = None) -> Tensor:
    """Into a tensor of the wanted shape; `places` are indices into the one before its pads."""
    kernel = list(call.attr("kernel_shape"))
    rank = len(kernel)
    stride, pads = call.attr("strides", [1] * rank), call.attr("pads", [0] * (2 * rank))
    sizes = [
        (x.shape[i + 2] - 1) * stride[i] - pads[i] - pads[i + rank] + kernel[i] for i in range(rank)
    ]
    shape = [*x.shape[:2], *sizes]
    flat = x.new_zeros(math.prod(shape)).scatter(0, places.reshape(-1), x.reshape(-1))
    y = flat.reshape(shape)
    if not call.has(2):
        return y
    wanted = call.ints(2) or []
    flat_pads = [b - a for a, b in zip(reversed(shape), reversed(wanted), strict=True)]
    return F.pad(y, [size for pad in flat_pads for size in (0, pad)])


def _column_to_image(call: Call, x: Tensor, image_input: Tensor, block_input: Tensor) -> Tensor:
    """Overlapping blocks are added: a transposed convolution with one weight per block element."""
    image, block = call.ints(1) or [], call.ints(2) or []
    rank = len(image)
    if rank not in TRANSPOSED:
        raise call.refuse(f"{rank} spatial dimensions are not supported, 1 to 3 are")
    stride, dilation = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    pads = call.attr("pads", [0] * (2 * rank))
    elements = math.prod(block)
    counts = [
        (image[i] + pads[i] + pads[i + rank] - dilation[i] * (block[i] - 1) - 1) // stride[i] + 1
        for i in range(rank)
    ]
    columns = x.reshape(-1, elements, *counts)
    weight = torch.eye(elements, dtype=x.dtype, device=x.device).reshape(elements, 1, *block)
    y = TRANSPOSED[rank](columns, weight, None, stride, 0, 0, 1, dilation)
    cut = []
    for i in reversed(range(rank)):
        cut += [-pads[i], image[i] + pads[i] - y.shape[i + 2]]
    return F.pad(y, cut).reshape(x.shape[0], -1, *image)


def _window_sums(window: Window, x: Tensor) -> Tensor:
    """The sum of each window of x, whose padding counts as zero."""
    channels, padded = x.shape[1], F.pad(x, window.pads(overhang=True))
    ones = torch.ones((channels, 1, *window.kernel), dtype=x.dtype, device=x.device)
    function = CONVOLUTIONS[len(window.kernel)]
    return function(padded, ones, None, window.stride, 0, window.dilation, channels)


def _root(total: Tensor, p: int) -> Tensor:
    return total if p == 1 else total.sqrt() if p == 2 else total.pow(1 / p)


def _powers(x: Tensor, p: int) -> Tensor:
    return x.abs() if p == 1 else x * x if p == 2 else x.abs().pow(p)


def _lp_pool(call: Call, x: Tensor) -> Tensor:
    p = call.attr("p", 2)
    window = _window(call, x.shape[2:], call.attr("kernel_shape"))
    return _root(_window_sums(window, _powers(x, p)), p)


def _global_lp_pool(call: Call, x: Tensor) -> Tensor:
    p = call.attr("p", 2)
    return _root(_powers(x, p).sum(list(range(2, x.dim())), True), p)


def _average_pool(call: Call, x: Tensor) -> Tensor:
    include = bool(call.attr("count_include_pad", 0))
    window = _window(call, x.shape[2:], call.attr("kernel_shape"))
    padding = window.before
    fits = all(2 * pad <= size for pad, size in zip(padding, window.kernel, strict=True))
    if window.symmetric and fits and set(window.dilation) == {1}:
        pool = AVERAGE_POOLS[len(window.kernel)]
        return pool(x, window.kernel, window.stride, padding, False, include)
    counted = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    rank = len(window.kernel)
    plain = window.pads(overhang=False)
    full = window.pads(overhang=True)
    counted = F.pad(counted, plain, value=1.0 if include else 0.0)
    counted = F.pad(counted, [a - b for a, b in zip(full, plain, strict=True)])
    inside = replace(window, before=[0] * rank, after=[0] * rank, overhang=[0] * rank)
    return _window_sums(window, x) / _window_sums(inside, counted)


def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), True)


def _global_max_pool(call: Call, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), True)


WINDOWS: Mapping[str, Op] = MappingProxyType(
    {
        "AveragePool": _average_pool,
        "Col2Im": _column_to_image,
        "Conv": convolve,
        "ConvTranspose": _conv_transpose,
        "GlobalAveragePool": _global_average_pool,
        "GlobalLpPool": _global_lp_pool,
        "GlobalMaxPool": _global_max_pool,
        "LpPool": _lp_pool,
        "MaxPool": _max_pool,
        "MaxUnpool": _max_unpool,
    }
)
