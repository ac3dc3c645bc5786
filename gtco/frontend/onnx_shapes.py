"""ONNX operators that move or make data.

Reshape(x, [0, -1])                    -> x.reshape(x.shape[0], -1)
Slice(x, [1], [9], [2])                -> x.narrow(2, 1, 8)
Pad(x, [0, 1, 0, 1], mode="reflect")   -> x.index_select(1, [1, 0, 1, ..., n - 2])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_sizes import check_size

FLOAT8_AND_STRINGS = (
    "is not supported: gtco has floats of 16, 32 and 64 bits, float8e4m3fn, signed integers, uint8 "
    "and booleans; export the model with one of these"
)

FP8 = torch.float8_e4m3fn

DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {
        1: torch.float32,
        2: torch.uint8,
        3: torch.int8,
        5: torch.int16,
        6: torch.int32,
        7: torch.int64,
        9: torch.bool,
        10: torch.float16,
        11: torch.float64,
        16: torch.bfloat16,
        17: FP8,
    }
)
"""`TensorProto.DataType` to torch's."""


def take(x: Tensor, axis: int, positions: Sequence[int]) -> Tensor:
    """`x` at `positions` along `axis`: a slice where they are a range."""
    size = x.shape[axis]
    if list(positions) == list(range(size)):
        return x
    if positions:
        step = positions[1] - positions[0] if len(positions) > 1 else 1
        if step > 0 and list(positions) == list(
            range(positions[0], positions[0] + step * len(positions), step)
        ):
            index = [slice(None)] * axis + [slice(positions[0], positions[-1] + 1, step)]
            return x[tuple(index)]
    return x.index_select(axis, torch.tensor(positions, dtype=torch.int64, device=x.device))


def wrap(indices: Tensor, size: int) -> Tensor:
    """Indices counted from the front."""
    return torch.where(indices < 0, indices + size, indices).long()


# -- shapes --------------------------------------------------------------------------------------


def _reshape(call: Call, x: Tensor, shape_input: Tensor) -> Tensor:
    shape = [int(size) for size in call.constant(1)]
    if not call.attr("allowzero", 0):
        shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape(shape)


def _transpose(call: Call, x: Tensor) -> Tensor:
    return x.permute(call.attr("perm", list(range(x.dim()))[::-1]))


def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.attr("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _squeeze(call: Call, x: Tensor, axes_input: Tensor | None = None) -> Tensor:
    axes = call.ints(1, "axes")
    if axes is None:
        return x.squeeze()
    axes = call.axes(axes, x.dim())
    if any(x.shape[axis] != 1 for axis in axes):
        raise call.refuse(f"axes {axes} of {tuple(x.shape)} are not all 1")
    return x.reshape([size for i, size in enumerate(x.shape) if i not in axes])


def _unsqueeze(call: Call, x: Tensor, axes_input: Tensor | None = None) -> Tensor:
    axes = call.ints(1, "axes") or []
    for axis in sorted(call.axes(axes, x.dim() + len(axes))):
        x = x.unsqueeze(axis)
    return x


def _expand(call: Call, x: Tensor, shape_input: Tensor) -> Tensor:
    shape = tuple(int(size) for size in call.constant(1))
    rank = max(len(shape), x.dim())  # each side may grow the other
    wanted = (1,) * (rank - len(shape)) + shape
    found = (1,) * (rank - x.dim()) + tuple(x.shape)
    return x.expand([b if a == 1 else a for a, b in zip(wanted, found, strict=True)])


def _shape(call: Call, x: Tensor) -> Tensor:
    end = call.attr("end")
    return torch.tensor(list(x.shape)[call.attr("start", 0) : end], dtype=torch.int64)


def _size(call: Call, x: Tensor) -> Tensor:
    return torch.tensor(x.numel())


def _tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat([int(count) for count in call.constant(1)])


def _concat(call: Call, *inputs: Tensor) -> Tensor:
    return torch.cat(inputs, call.axis(call.attr("axis"), inputs[0].dim()))


def _split(call: Call, x: Tensor, split_input: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = call.axis(call.attr("axis", 0), x.dim())
    count = len(call.outputs)
    if call.attr("num_outputs", count) != count:
        raise call.refuse(f"num_outputs is not its number of outputs, {count}")
    sizes = call.ints(1, "split")
    if sizes is None:
        whole = x.shape[axis]
        each = -(-whole // count)
        sizes = [max(min(each, whole - each * i), 0) for i in range(count)]
    return torch.split(x, sizes, axis)


def _slice(
    call: Call,
    x: Tensor,
    starts_input: Tensor | None = None,
    ends_input: Tensor | None = None,
    axes_input: Tensor | None = None,
    steps_input: Tensor | None = None,
) -> Tensor:
    starts, ends = call.ints(1, "starts") or [], call.ints(2, "ends") or []
    axes = call.ints(3, "axes") or list(range(len(starts)))
    steps = call.ints(4) or [1] * len(starts)
    for axis, start, end, step in zip(call.axes(axes, x.dim()), starts, ends, steps, strict=True):
        # ONNX clamps as Python does, but -1 as a clamped end means "before the first"
        size = x.shape[axis]
        start = start + size if start < 0 else start
        end = end + size if end < 0 else end
        start = min(max(start, 0), size if step > 0 else size - 1)
        end = min(max(end, 0 if step > 0 else -1), size)
        x = take(x, axis, range(start, end, step))
    return x


def _trilu(call: Call, x: Tensor, k_input: Tensor | None = None) -> Tensor:
    diagonal = int(call.constant(1)[0]) if call.has(1) else 0
    return x.triu(diagonal) if call.attr("upper", 1) else x.tril(diagonal)


# -- padding, blocks -----------------------------------------------------------------------------


def _pad(
    call: Call,
    x: Tensor,
    pads_input: Tensor | None = None,
    value_input: Tensor | None = None,
    axes_input: Tensor | None = None,
) -> Tensor:
    pads = call.ints(1, "pads") or []
    axes = call.axes(call.ints(3) or list(range(x.dim())), x.dim())
    mode = call.attr("mode", "constant")
    if len(pads) != 2 * len(axes):
        raise call.refuse(f"{len(pads)} pads do not fit {len(axes)} axes")
    amounts = {axis: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    if mode == "constant":
        value = call.constant(2)[0] if call.has(2) else call.attr("value", 0)
        flat = [size for axis in reversed(range(x.dim())) for size in amounts.get(axis, (0, 0))]
        return F.pad(x, flat, value=value)
    if mode not in ("reflect", "edge", "wrap"):
        raise call.refuse(f"mode={mode!r} is not supported")
    check_size([size + sum(amounts.get(axis, (0, 0))) for axis, size in enumerate(x.shape)])
    for axis, (before, after) in amounts.items():
        size = x.shape[axis]
        positions = range(-before, size + after)
        if (before or after) and not size:
            raise call.refuse(f"mode={mode!r} of an empty axis")
        x = take(x, axis, [_outside(position, size, mode) for position in positions])
    return x


def _outside(position: int, size: int, mode: str) -> int:
    """The element that stands at `position` of an axis continued by `mode`."""
    if mode == "edge":
        return min(max(position, 0), size - 1)
    if mode == "wrap":
        return position % size
    period = max(2 * (size - 1), 1)
    position %= period
    return position if position < size else period - position


def _center_crop_pad(call: Call, x: Tensor, shape_input: Tensor) -> Tensor:
    axes = call.axes(call.attr("axes", list(range(x.dim()))), x.dim())
    pads = [0] * (2 * x.dim())  # for F.pad: last axis first
    for axis, size in zip(axes, call.ints(1) or [], strict=True):
        before = abs(size - x.shape[axis]) // 2
        before = before if size > x.shape[axis] else -before
        place = 2 * (x.dim() - 1 - axis)
        pads[place : place + 2] = before, size - x.shape[axis] - before
    return F.pad(x, pads)


def _block_order(call: Call) -> str:
    mode = str(call.attr("mode", "DCR"))
    if mode not in ("DCR", "CRD"):
        raise call.refuse(f"mode={mode!r} is not supported")
    return mode


def _depth_to_space(call: Call, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b, order = call.attr("blocksize"), _block_order(call)
    if order == "DCR":
        y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


def _space_to_depth(call: Call, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b, order = call.attr("blocksize"), _block_order(call)
    y = x.reshape(n, c, h // b, b, w // b, b)
    y = y.permute((0, 3, 5, 1, 2, 4) if order == "DCR" else (0, 1, 3, 5, 2, 4))
    return y.reshape(n, c * b * b, h // b, w // b)


# -- making --------------------------------------------------------------------------------------


def dtype_of(call: Call, code: int) -> torch.dtype:
    """The torch dtype of a `TensorProto.DataType`.

    Raises:
        OnnxError: torch, or gtco, has none.
    """
    if code not in DTYPES:
        what, _, remedy = FLOAT8_AND_STRINGS.partition("; ")
        raise call.refuse(f"data type {code} {what}", remedy)
    return DTYPES[code]


def to_fp8(x: Tensor, saturate: bool) -> Tensor:
    """`x` in fp8; what is too large becomes the largest value, or else NaN."""
    largest = torch.finfo(FP8).max
    if not saturate:  # torch's own cast saturates in some of its versions
        x = x.masked_fill(x.abs() > largest * 29 / 28, torch.nan)  # halfway to the next value
    return x.clamp(-largest, largest).to(FP8)


def _as_type(call: Call, x: Tensor, dtype: torch.dtype) -> Tensor:
    call.ignore("round_mode")  # speaks of float8e8m0
    saturate = bool(call.attr("saturate", 1))  # speaks of 8-bit floats
    if dtype == FP8 and x.dtype != FP8:
        return to_fp8(x.float() if x.dtype == torch.bool else x, saturate)
    return x.to(dtype)


def _cast(call: Call, x: Tensor) -> Tensor:
    return _as_type(call, x, dtype_of(call, call.attr("to")))


def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return _as_type(call, x, like.dtype)


def _constant_of_shape(call: Call, shape_input: Tensor) -> Tensor:
    value = call.attr("value", torch.zeros(1))
    shape = [int(size) for size in call.constant(0)]
    return torch.full(shape, value.reshape(-1)[0].item(), dtype=value.dtype)


def _constant(call: Call) -> Tensor:
    for name, dtype in (
        ("value", None),
        ("value_float", torch.float32),
        ("value_floats", torch.float32),
        ("value_int", torch.int64),
        ("value_ints", torch.int64),
    ):
        if (value := call.attr(name)) is not None:
            known: Tensor = torch.as_tensor(value, dtype=dtype)
            return known
    raise call.refuse("it holds a sparse tensor or a string, which is not supported")


def _eye_like(call: Call, x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise call.refuse(f"its input has {x.dim()} dimensions, not 2")
    code = call.attr("dtype")
    dtype = x.dtype if code is None else dtype_of(call, code)
    rows, columns = x.shape
    places = torch.arange(columns) - torch.arange(rows).reshape(-1, 1)
    diagonal: Tensor = places == call.attr("k", 0)
    return diagonal.to(dtype)


def _range(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, last, step = (call.constant(index)[0] for index in range(3))
    count = max(math.ceil((last - first) / step), 0)
    values: Tensor = torch.arange(count, dtype=start.dtype) * step + first
    return values.to(start.dtype)


def _where(call: Call, condition: Tensor, a: Tensor, b: Tensor) -> Any:
    return torch.where(condition, a, b)


def _identity(call: Call, x: Tensor) -> Tensor:
    return x


SHAPES: Mapping[str, Op] = MappingProxyType(
    {
        "Cast": _cast,
        "CastLike": _cast_like,
        "CenterCropPad": _center_crop_pad,
        "Concat": _concat,
        "Constant": _constant,
        "ConstantOfShape": _constant_of_shape,
        "DepthToSpace": _depth_to_space,
        "EyeLike": _eye_like,
        "Expand": _expand,
        "Flatten": _flatten,
        "Identity": _identity,
        "Pad": _pad,
        "Range": _range,
        "Reshape": _reshape,
        "Shape": _shape,
        "Size": _size,
        "Slice": _slice,
        "SpaceToDepth": _space_to_depth,
        "Split": _split,
        "Squeeze": _squeeze,
        "Tile": _tile,
        "Transpose": _transpose,
        "Trilu": _trilu,
        "Unsqueeze": _unsqueeze,
        "Where": _where,
    }
)

KNOWN_FROM_SHAPES = frozenset({"EyeLike", "Shape", "Size"})
"""Operators whose result is known when the shape of their input is."""
