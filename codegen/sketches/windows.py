"""The operand of a convolution: the windows of an image as rows, without making them.

x[N, H, W, C] -> rows[N P Q, KH KW C]: a row for each pixel of the result, in their order; along it
the kernel's taps one after another, and the channels of each. Elements beyond the image are zeros.
Of a convolution in groups, each group has such rows of its own channels. Of a volume
x[N, T, H, W, C], windows have frames as well: rows[N O P Q, KT KH KW C].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gtco.codegen.emit import index
from gtco.codegen.program import TensorMapArgument, WindowBox
from gtco.codegen.sketch import check
from gtco.codegen.tile_loads import SECTOR
from gtco.ir.graph import Graph, Node
from gtco.ir.references import adaptive_window
from gtco.ir.views import Axis, Layout, resolve

CORNERS = {2: range(-128, 128), 3: range(-16, 16)}
"""What a tensor map takes as the corners of the first tap's pixels, by the dimensions of an image
(CUDA driver API, cuTensorMapEncodeIm2col)."""
FARTHEST_TAP = {2: 255, 3: 31}
"""Likewise, pixels from a window's first tap to another (PTX manual, im2colOffsets)."""
MOST_STRIDE = 8
"""Likewise, of a step between two windows."""
AXES = {2: ("H", "W"), 3: ("T", "H", "W")}
WINDOWS = {2: ("P", "Q"), 3: ("O", "P", "Q")}
"""What the device library calls the dimensions of an image, and how many windows lie along them."""


@dataclass(frozen=True)
class WindowOperand:
    """An image and how windows of it lie.

    Args:
        base: the stored value.
        layout: of the image [N, H, W, C] or the volume [N, T, H, W, C] in it.
        constant: whether it is one.
        out: rows and columns of windows in one image; of a volume, frames ahead of them.
        kernel, stride, before, dilation: along height and width, likewise; `before` are zeros ahead
            of the first row and column. A stride of 0 stands for windows that share the image
            evenly, the largest of which is `kernel`.
        groups: into which the channels are cut.
    """

    base: str
    layout: Layout
    constant: bool
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def k_major(self) -> bool:
        """Neighbours along K are neighbours in memory, or are treated so."""
        return True

    @property
    def channels(self) -> int:
        """Of one group."""
        return self.layout.shape[-1] // self.groups

    @property
    def axes(self) -> int:
        """Dimensions of an image."""
        return len(self.out)

    def chunks(self, elements: int) -> int:
        """How many pieces of K, of `elements` each, one tap has."""
        return -(-self.channels // elements)

    @property
    def taps(self) -> int:
        """Of a window."""
        return math.prod(self.kernel)

    def atoms(self, elements: int) -> int:
        """How many pieces K has in all."""
        return self.taps * self.chunks(elements)

    @property
    def fields(self) -> str:
        """The constants that the device library's window structs have."""
        return self.fields_of(self.channels)

    def fields_of(self, channels: int) -> str:
        """The same of as many channels, where this is one of several pieces."""
        pairs = {
            "KERNEL": self.kernel,
            "STRIDE": self.stride,
            "BEFORE": self.before,
            "DILATION": self.dilation,
        }
        lines = [_constants(WINDOWS[self.axes], self.out)]
        lines += [
            _constants([f"{name}_{axis}" for axis in AXES[self.axes]], sizes)
            for name, sizes in pairs.items()
        ]
        lines.append(f"static constexpr int CHANNELS = {channels};")
        return "\n".join(f"  {line}" for line in lines)

    def check_map(self, dtype: torch.dtype) -> None:
        """Refuse an image whose windows no tensor map describes.

        Raises:
            Illegal: naming the reason.
        """
        whole = self.channels * dtype.itemsize % 128 == 0
        check(
            self.groups == 1 or whole,
            f"groups of {self.channels} channels, which begin within the 128 bytes of a copy",
        )
        strides = [single_stride(axis) for axis in self.layout.dims]
        check(
            all(stride is not None for stride in strides) and strides[-1] in (0, 1),
            f"the image {self.layout} has no single stride for each dimension",
        )
        unit = 16 // dtype.itemsize
        sized = zip(strides[:-1], self.layout.shape[:-1], strict=True)
        check(
            all(stride and stride % unit == 0 for stride, size in sized if size > 1)
            and self.layout.offset % unit == 0
            and self.channels % unit == 0,
            f"the image {self.layout} has pixels that are not 16-byte aligned",
        )
        check(max(self.stride) <= MOST_STRIDE, f"windows {self.stride} apart")
        corners = [-n for n in self.before] + list(self._upper())
        allowed, farthest = CORNERS[self.axes], FARTHEST_TAP[self.axes]
        check(all(each in allowed for each in corners), f"windows with the corners {corners}")
        far = max((k - 1) * step for k, step in zip(self.kernel, self.dilation, strict=True))
        check(far <= farthest, f"windows of {far + 1} pixels")

    def _upper(self) -> tuple[int, ...]:
        """How far beyond the last row and column of the image the last window begins."""
        return tuple(
            (out - 1) * stride + 1 - size - before
            for out, stride, size, before in zip(
                self.out, self.stride, self.layout.shape[1:-1], self.before, strict=True
            )
        )

    def tensor_map(self, dtype: torch.dtype, pixels: int) -> TensorMapArgument:
        """The map of tiles of `pixels` rows and 128 bytes of one tap's channels."""
        channels, *sizes = self.layout.shape[::-1]
        strides = []
        whole = channels
        for axis, size in zip(self.layout.dims[-2::-1], sizes, strict=True):
            strides.append(single_stride(axis) or whole)
            whole = strides[-1] * size
        return TensorMapArgument(
            self.base,
            self.layout.offset,
            dtype,
            (channels, *sizes),
            tuple(strides),
            (128 // dtype.itemsize, pixels),
            window=WindowBox(
                tuple(-n for n in self.before[::-1]), self._upper()[::-1], self.stride[::-1]
            ),
        )

    def copied(self, dtype: torch.dtype) -> int:
        """Elements that a copy of at most 16 bytes takes."""
        return math.gcd(self.layout.vector(16 // dtype.itemsize, self.axes + 1), self.channels)

    def text(self, label: str, dtype: torch.dtype, parameter: str) -> str:
        """The struct called `label` through which mma.sync templates read the windows."""
        place = self.place_of(self.layout, "at.channel")
        element = "Config::Element"
        grouped = self.groups > 1
        first = "int group" if grouped else "int"
        channel = "\n    at.channel += group * CHANNELS;" if grouped else ""
        strides = [single_stride(axis) for axis in self.layout.dims[1:]]
        step = (strides[-2] or 0) * self.stride[-1] * dtype.itemsize
        return f"""struct {label} {{  // %{parameter}, {self.layout}
{self.fields}
  {self.sizes}
  const {element}* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = {str(self.constant).lower()};
  static constexpr int VECTOR = {self.copied(dtype)};
  static constexpr bool APART = {str(None not in strides).lower()};
  static constexpr bool SHARES_SECTORS = {str(0 < step < SECTOR).lower()};
  __device__ __forceinline__ static int place(const Pixel& at) {{ return {place}; }}
  __device__ __forceinline__ const {element}* pixel(const Pixel& at) const {{
    return base + place(at);
  }}
  __device__ __forceinline__ const {element}* at({first}, int row, int k, bool& valid) const {{
    auto at = pixel_of<{label}>(row, k);{channel}
    valid = valid && is_inside<{label}>(at);
    return pixel(at);
  }}
}};
"""

    @property
    def sizes(self) -> str:
        """The constants of the image's sides."""
        return _constants([f"SIZE_{axis}" for axis in AXES[self.axes]], self.layout.shape[1:-1])

    def place_of(self, layout: Layout, channel: str) -> str:
        """Where `channel` of the pixel `at` lies in an image of this geometry."""
        return index(layout, ("at.image", *("at.z", "at.y", "at.x")[-self.axes :], channel))


def windows_of(graph: Graph, node: Node, image: str | None = None) -> WindowOperand:
    """The windows that `node`, a convolution or a pooling, reads, of its operand or of `image`,
    which has as many pixels.

    Raises:
        NotAView: the image is no strided view.
    """
    base, layout = resolve(graph, node.inputs[0] if image is None else image)
    if image is not None:
        pixels = graph.specs[node.inputs[0]].sizes[:-1]
        layout = layout.reshape((*pixels, layout.shape[-1]))
    attrs = node.attrs
    if "out" in attrs:
        high, wide = map(adaptive_window, layout.shape[1:3], attrs["out"])
        attrs = {"kernel": (high, wide), "stride": (0, 0), "padding": (0, 0)}
    pooling = "kernel" in attrs  # else the weights are [..., KH, KW, C]
    before = attrs["before"] if "before" in attrs else attrs["padding"]
    out = node.outputs[0].sizes[1:-1]
    kernel = attrs["kernel"] if pooling else graph.specs[node.inputs[1]].sizes[-1 - len(out) : -1]
    sizes = (out, kernel, attrs["stride"], before, attrs.get("dilation", (1,) * len(out)))
    out, kernel, stride, before, dilation = (tuple(map(int, each)) for each in sizes)
    return WindowOperand(
        base,
        layout,
        base in graph.constants,
        out,
        kernel,
        stride,
        before,
        dilation,
        groups=attrs.get("groups", 1),
    )


def of_whole_rows(operand: WindowOperand) -> WindowOperand:
    """The same windows with a row of the kernel as one tap, if it lies in one piece of the image.

    Pixels of few channels would leave most of a tap's piece of K empty.
    """
    if operand.groups > 1:  # whose channels do not follow one another from pixel to pixel
        return operand
    *outer, columns, channels = operand.layout.dims
    *others, width = operand.kernel
    pixels, depth = operand.layout.shape[-2:]
    inside = (operand.out[-1] - 1) * operand.stride[-1] + width <= pixels
    in_one_piece = columns == ((pixels, depth),) and channels == ((depth, 1),)
    fills = depth % 64 == 0 or width == 1  # a piece of K, or all that there is of a row
    if fills or operand.before[-1] or operand.dilation[-1] > 1 or not (inside and in_one_piece):
        return operand
    rows = ((pixels - width + 1, depth),) if pixels > width else ()
    layout = Layout((*outer, rows, ((width * depth, 1),)), operand.layout.offset)
    dilation = (*operand.dilation[:-1], 1)
    return replace(operand, layout=layout, kernel=(*others, 1), dilation=dilation)


def _constants(names: Sequence[str], sizes: Sequence[int]) -> str:
    each = (f"{name} = {size}" for name, size in zip(names, sizes, strict=True))
    return f"static constexpr int {', '.join(each)};"


def single_stride(axis: Axis) -> int | None:
    """The one stride of a dimension, 0 if it has one element, None if it is nested."""
    if not axis:
        return 0
    return axis[0][1] if len(axis) == 1 else None
