"""ONNX operators that read between the elements: resizing, grids, regions of interest.

Resize(x), tf_half_pixel_for_nn -> weights(out, in) @ x, an axis at a time
GridSample(x, grid)             -> F.grid_sample(x, grid, "bilinear", "zeros", False)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend import sampled
from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_shapes import take
from gtco.frontend.onnx_sizes import check_size

# -- resize --------------------------------------------------------------------------------------

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)

OLDER = "as ONNX Runtime before opset 11"
"""The `nearest_mode` of operators that did not say which is the nearest."""


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
    older = call.opset < 11  # as Upsample
    place, side = ("asymmetric", OLDER) if older else ("half_pixel", "round_prefer_floor")
    coordinates = call.attr("coordinate_transformation_mode", place)
    nearest = call.attr("nearest_mode", side)
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
    sizes = [axes[axis].out if axis in axes else size for axis, size in enumerate(x.shape)]
    check_size(sizes)
    if mode == "nearest":
        taken = {
            axis: [
                min(max(_nearest(call, point, nearest, along.scale), 0), along.size - 1)
                for point in (along.coordinate(i, coordinates) for i in range(along.out))
            ]
            for axis, along in axes.items()
        }
        if (kind := _kind_of_nearest(x, axes, taken)) is not None:
            x = F.interpolate(x, sizes[2:], mode=kind)
        else:
            for axis, elements in taken.items():
                x = take(x, axis, elements)
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
    scales = _scales(call)
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
            "reference and another in ONNX Runtime and torch",
            "give sizes instead",
        )
    return {
        axis: Axis(size, int(out), float(scale), region)
        for axis, size, out, scale, region in rows
        if out != size or scale != 1 or region != (0.0, 1.0)
    }


def _scales(call: Call) -> list[float]:
    """Before opset 11 they are the only input beside the image, before 9 an attribute."""
    if call.opset < 11:
        return list(call.attr("scales") or call.constant(1))
    return call.constant(2) if call.has(2) else []


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
        case _ if mode == OLDER:
            return math.ceil(point) if scale < 1 else math.floor(point)
    raise call.refuse(f"nearest_mode={mode!r} is not supported")


def _kind_of_nearest(
    x: Tensor, axes: Mapping[int, Axis], taken: Mapping[int, list[int]]
) -> str | None:
    """The mode of torch's that takes the same elements of images or volumes, if one does."""
    if x.dim() not in (4, 5) or not x.is_floating_point() or min(axes, default=0) < 2:
        return None
    for mode, offset in (("nearest", 0.0), ("nearest-exact", 0.5)):
        same = all(
            taken[axis]
            == ((torch.arange(along.out) + offset) * torch.tensor(along.size / along.out))
            .long()
            .clamp(max=along.size - 1)
            .tolist()
            for axis, along in axes.items()
        )
        if same:
            return mode
    return None


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


# -- grids, regions ------------------------------------------------------------------------------


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


def _affine_grid(call: Call, theta: Tensor, size_input: Tensor) -> Tensor:
    corners = bool(call.attr("align_corners", 0))
    return F.affine_grid(theta, call.ints(1) or [], align_corners=corners)


def _roi_align(call: Call, x: Tensor, regions: Tensor, images: Tensor) -> Tensor:
    """x [n, c, h, w], regions [r, 4] (x1, y1, x2, y2), images [r] -> [r, c, oh, ow]."""
    default = "half_pixel" if call.opset >= 16 else "output_half_pixel"
    coordinates = call.attr("coordinate_transformation_mode", default)
    mode, samples = call.attr("mode", "avg"), call.attr("sampling_ratio", 0)
    if mode not in ("avg", "max") or coordinates not in ("half_pixel", "output_half_pixel"):
        raise call.refuse(f"mode={mode!r} of {coordinates!r} is not supported")
    if samples <= 0:
        raise call.refuse(
            "sampling_ratio=0 takes as many samples as a region is large, which depends on data",
            "export the model with a fixed one, such as 2",
        )
    return sampled.roi_align(
        x,
        regions,
        images,
        scale=call.attr("spatial_scale", 1.0),
        size=(call.attr("output_height", 1), call.attr("output_width", 1)),
        samples=samples,
        aligned=coordinates == "half_pixel",
        largest=mode == "max",
    )


def _deform_conv(
    call: Call,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """x [n, c, h, w], offsets [n, groups * kh * kw * 2, oh, ow] in (y, x), mask without the 2."""
    if x.dim() != 4:
        raise call.refuse(f"{x.dim() - 2} spatial dimensions are not supported, 2 are")
    kernel = list(weight.shape[2:])
    if list(call.attr("kernel_shape", kernel)) != kernel:
        raise call.refuse(f"kernel_shape is not that of its weight, {kernel}")
    return sampled.deform_conv(
        x,
        weight,
        offsets,
        mask,
        bias,
        stride=call.attr("strides", [1, 1]),
        pad=call.attr("pads", [0] * 4)[:2],
        dilation=call.attr("dilations", [1, 1]),
        groups=call.attr("group", 1),
        offset_groups=call.attr("offset_group", 1),
    )


SAMPLING: Mapping[str, Op] = MappingProxyType(
    {
        "AffineGrid": _affine_grid,
        "DeformConv": _deform_conv,
        "GridSample": _grid_sample,
        "Resize": _resize,
        "Upsample": _resize,
        "RoiAlign": _roi_align,
    }
)
