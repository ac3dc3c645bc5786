"""ONNX operators that look at neighbours: convolution, pooling, resizing, sampling.

MaxPool(x), pads [0, 0, 1, 1]   -> F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-inf), ...)
Resize(x), tf_half_pixel_for_nn -> weights(out, in) @ x, an axis at a time
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_shapes import take
from gtco.frontend.onnx_sizes import check_size

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
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
        raise call.refuse(f"{rank} spatial dimensions are not supported; 1 to 3 are")
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


def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel = list(weight.shape[2:])
    if list(call.attr("kernel_shape", kernel)) != kernel:
        raise call.refuse(f"kernel_shape is not that of its weight, {kernel}")
    window = _window(call, x.shape[2:], kernel)
    padding = window.before
    if not window.symmetric:
        x, padding = F.pad(x, window.pads(overhang=False)), [0] * len(kernel)
    groups = call.attr("group", 1)
    convolve = CONVOLUTIONS[len(kernel)]
    return convolve(x, weight, bias, window.stride, padding, window.dilation, groups)


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


def _average_pool(call: Call, x: Tensor) -> Tensor:
    include = bool(call.attr("count_include_pad", 0))
    window = _window(call, x.shape[2:], call.attr("kernel_shape"))
    padding = window.before
    fits = all(2 * pad <= size for pad, size in zip(padding, window.kernel, strict=True))
    if window.symmetric and fits and set(window.dilation) == {1}:
        pool = AVERAGE_POOLS[len(window.kernel)]
        return pool(x, window.kernel, window.stride, padding, False, include)
    channels = x.shape[1]
    ones = torch.ones((channels, 1, *window.kernel), dtype=x.dtype, device=x.device)
    counted = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    plain = window.pads(overhang=False)
    full = window.pads(overhang=True)
    counted = F.pad(counted, plain, value=1.0 if include else 0.0)
    counted = F.pad(counted, [a - b for a, b in zip(full, plain, strict=True)])
    convolve = CONVOLUTIONS[len(window.kernel)]
    stride, dilation = window.stride, window.dilation
    total = convolve(F.pad(x, full), ones, None, stride, 0, dilation, channels)
    return total / convolve(counted, ones[:1], None, stride, 0, dilation)


def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), True)


def _global_max_pool(call: Call, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), True)


# -- resize --------------------------------------------------------------------------------------

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)


@dataclass(frozen=True)
class Axis:
    """One axis that Resize changes.

    Args:
        size, out: its length before and after.
        scale: out / size, as the model gives it or as the sizes imply.
        roi: start and end of the region of interest, 0 to 1.
    """

    size: int
    out: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)

    def coordinate(self, position: int, mode: str) -> float:
        """Where in the input the output's element `position` lies."""
        match mode:
            case "half_pixel":
                return (position + 0.5) / self.scale - 0.5
            case "half_pixel_symmetric":
                adjustment = self.out / (self.scale * self.size)
                offset = self.size / 2 * (1 - adjustment)
                return offset + (position + 0.5) / self.scale - 0.5
            case "pytorch_half_pixel":
                return (position + 0.5) / self.scale - 0.5 if self.out > 1 else 0.0
            case "align_corners":
                return position * (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
            case "asymmetric":
                return position / self.scale
        start, end = self.roi
        if self.out > 1:
            step = (end - start) * (self.size - 1) / (self.out - 1)
            return start * (self.size - 1) + position * step
        return 0.5 * (start + end) * (self.size - 1)


def _resize(
    call: Call,
    x: Tensor,
    roi_input: Tensor | None = None,
    scales_input: Tensor | None = None,
    sizes_input: Tensor | None = None,
) -> Tensor:
    mode = call.attr("mode", "nearest")
    coordinates = call.attr("coordinate_transformation_mode", "half_pixel")
    nearest = call.attr("nearest_mode", "round_prefer_floor")
    a = call.attr("cubic_coeff_a", -0.75)
    exclude, antialias = bool(call.attr("exclude_outside", 0)), bool(call.attr("antialias", 0))
    extrapolation = call.attr("extrapolation_value", 0.0)
    if mode not in ("nearest", "linear", "cubic"):
        raise call.refuse(f"mode={mode!r} is not supported")
    if coordinates not in COORDINATES:
        raise call.refuse(f"coordinate_transformation_mode={coordinates!r} is not supported")
    if mode != "nearest" and not x.is_floating_point():
        raise call.refuse(
            f"mode={mode!r} of {x.dtype} is not supported: it does not say how to round"
        )
    axes = _resized_axes(call, x, coordinates)
    check_size([axes[axis].out if axis in axes else size for axis, size in enumerate(x.shape)])
    if mode == "nearest":
        for axis, along in axes.items():
            points = [along.coordinate(i, coordinates) for i in range(along.out)]
            taken = [_nearest(call, point, nearest, along.scale) for point in points]
            x = take(x, axis, [min(max(index, 0), along.size - 1) for index in taken])
    elif (plain := _interpolate(x, axes, mode, coordinates, a, exclude, antialias)) is not None:
        return plain
    else:
        for axis, along in axes.items():
            if along.out == along.size and along.scale == 1 and along.roi == (0.0, 1.0):
                continue
            weights = _weights(along, mode, coordinates, a, exclude, antialias)
            x = _along(x, axis, torch.tensor(weights, dtype=torch.float64, device=x.device))
    return _extrapolate(x, axes, coordinates, extrapolation)


def _resized_axes(call: Call, x: Tensor, coordinates: str) -> dict[int, Axis]:
    given = call.attr("axes")
    axes = list(range(x.dim())) if given is None else call.axes(given, x.dim())
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    if policy not in ("stretch", "not_larger", "not_smaller"):
        raise call.refuse(f"keep_aspect_ratio_policy={policy!r} is not supported")
    roi = call.constant(1) if coordinates == "tf_crop_and_resize" and call.has(1) else []
    regions = [(0.0, 1.0)] * len(axes)
    if roi:
        regions = [(roi[i], roi[i + len(axes)]) for i in range(len(axes))]
    found = [x.shape[axis] for axis in axes]
    scales = call.constant(2) if call.has(2) else []
    if scales:
        pairs = zip(found, scales, regions, strict=True)
        sizes = [math.floor(size * (b - a) * scale) for size, scale, (a, b) in pairs]
    else:
        sizes = call.ints(3) or []
        scales = [out / size for out, size in zip(sizes, found, strict=True)]
        if policy != "stretch":
            scale = min(scales) if policy == "not_larger" else max(scales)
            scales = [scale] * len(axes)
            sizes = [math.floor(size * scale + 0.5) for size in found]
    rows = list(zip(axes, found, sizes, scales, regions, strict=True))
    if coordinates == "align_corners" and any(
        abs(size * scale - out) > 1e-4 for _, size, out, scale, _ in rows
    ):
        raise call.refuse(
            "align_corners with scales that give no whole size means one thing in the ONNX "
            "reference and another in ONNX Runtime and torch; give sizes instead"
        )
    return {
        axis: Axis(size, int(out), float(scale), region)
        for axis, size, out, scale, region in rows
        if out != size or scale != 1 or region != (0.0, 1.0)
    }


def _nearest(call: Call, point: float, mode: str, scale: float) -> int:
    match mode:
        case "round_prefer_floor":
            return math.ceil(point - 0.5)
        case "round_prefer_ceil":
            return math.floor(point + 0.5)
        case "floor":
            return math.floor(point)
        case "ceil":
            return math.ceil(point)
    raise call.refuse(f"nearest_mode={mode!r} is not supported")


def _interpolate(
    x: Tensor,
    axes: Mapping[int, Axis],
    mode: str,
    coordinates: str,
    a: float,
    exclude: bool,
    antialias: bool,
) -> Tensor | None:
    """By torch's own kernel where it means the same."""
    exact = all(along.out == along.size * along.scale for along in axes.values())
    half = coordinates == "half_pixel" or (
        coordinates == "pytorch_half_pixel" and all(along.out > 1 for along in axes.values())
    )
    means_the_same = x.dim() == 4 and set(axes) <= {2, 3} and not (exclude or antialias)
    if not (means_the_same and (coordinates == "align_corners" or (half and exact))):
        return None
    if mode == "cubic" and a != -0.75:
        return None
    size = [axes[axis].out if axis in axes else x.shape[axis] for axis in (2, 3)]
    kind = "bilinear" if mode == "linear" else "bicubic"
    return F.interpolate(x, size, mode=kind, align_corners=coordinates == "align_corners")


def _kernel(distance: float, mode: str, a: float) -> float:
    d = abs(distance)
    if mode == "linear":
        return max(1.0 - d, 0.0)
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0


def _weights(
    along: Axis, mode: str, coordinates: str, a: float, exclude: bool, antialias: bool
) -> list[list[float]]:
    """(out, size): what each input element adds to each output element."""
    shrink = min(along.scale, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / shrink
    rows = []
    for position in range(along.out):
        point = along.coordinate(position, coordinates)
        row = [0.0] * along.size
        taps = range(math.floor(point - reach) + 1, math.ceil(point + reach))
        found = {tap: _kernel((tap - point) * shrink, mode, a) for tap in taps}
        if exclude:
            found = {tap: w for tap, w in found.items() if 0 <= tap < along.size}
        total = sum(found.values()) if exclude or antialias else 1.0
        for tap, weight in found.items():
            row[min(max(tap, 0), along.size - 1)] += weight / total
        rows.append(row)
    return rows


def _along(x: Tensor, axis: int, weights: Tensor) -> Tensor:
    """`weights` (out, in) applied to `axis` of `x`."""
    return torch.matmul(x.movedim(axis, -1), weights.to(x.dtype).t()).movedim(-1, axis)


def _extrapolate(x: Tensor, axes: Mapping[int, Axis], coordinates: str, value: float) -> Tensor:
    if coordinates != "tf_crop_and_resize":
        return x
    for axis, along in axes.items():
        points = [along.coordinate(i, coordinates) for i in range(along.out)]
        inside = torch.tensor([0 <= p <= along.size - 1 for p in points], device=x.device)
        x = torch.where(inside.reshape([-1] + [1] * (x.dim() - 1 - axis)), x, value)
    return x


def _grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    mode = call.attr("mode", "linear" if call.opset >= 20 else "bilinear")
    kinds = {
        "linear": "bilinear",
        "bilinear": "bilinear",
        "nearest": "nearest",
        "cubic": "bicubic",
        "bicubic": "bicubic",
    }
    padding = call.attr("padding_mode", "zeros")
    if mode not in kinds or (kinds[mode] == "bicubic" and x.dim() != 4):
        raise call.refuse(f"mode={mode!r} of {x.dim() - 2} spatial dimensions is not supported")
    if padding not in ("zeros", "border", "reflection"):
        raise call.refuse(f"padding_mode={padding!r} is not supported")
    corners = bool(call.attr("align_corners", 0))
    return F.grid_sample(x, grid.to(x.dtype), kinds[mode], padding, corners)


WINDOWS: Mapping[str, Op] = MappingProxyType(
    {
        "AveragePool": _average_pool,
        "Conv": _conv,
        "GlobalAveragePool": _global_average_pool,
        "GlobalMaxPool": _global_max_pool,
        "GridSample": _grid_sample,
        "MaxPool": _max_pool,
        "Resize": _resize,
    }
)
