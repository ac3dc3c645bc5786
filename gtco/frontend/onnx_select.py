"""ONNX operators that read or write at indices.

Gather(x, [3, 4, 5])       -> x[3:6]
ScatterND(x, indices, y)   -> x.flatten(0, 1).index_put((rows,), y)
NonZero(known)             -> known.nonzero().t()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from gtco.frontend.onnx_call import Call, Op
from gtco.frontend.onnx_shapes import take, wrap


def _gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.axis(call.attr("axis", 0), x.dim())
    size = x.shape[axis]
    if call.known(1) is not None and indices.numel() <= 4096:
        positions = [int(index) for index in call.constant(1)]
        if any(not -size <= index < size for index in positions):
            raise call.refuse(f"an index is out of range for {size} elements")
        taken = take(x, axis, [index % size for index in positions])
    else:
        taken = x.index_select(axis, wrap(indices, size).reshape(-1))
    return taken.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.axis(call.attr("axis", 0), x.dim())
    return torch.gather(x, axis, wrap(indices, x.shape[axis]))


def _gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    batch = call.attr("batch_dims", 0)
    rows = math.prod(x.shape[:batch])
    data = x.reshape(rows, *x.shape[batch:])
    flat = indices.reshape(rows, -1, indices.shape[-1])
    depth = indices.shape[-1]
    where = [wrap(flat[..., i], x.shape[batch + i]) for i in range(depth)]
    first = torch.arange(rows, device=x.device).reshape(-1, 1).expand(flat.shape[:2])
    return data[(first, *where)].reshape(*indices.shape[:-1], *x.shape[batch + depth :])


def _scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    reduction = call.attr("reduction", "none")
    kinds = {"none": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    if reduction not in kinds:
        raise call.refuse(f"reduction={reduction!r} is not supported")
    depth = indices.shape[-1]
    where = [wrap(indices[..., i], x.shape[i]).reshape(-1) for i in range(depth)]
    tail = x.shape[depth:]
    rows = torch.zeros_like(where[0])
    for size, each in zip(x.shape[:depth], where, strict=True):
        rows = rows * size + each
    flat = x.reshape(math.prod(x.shape[:depth]), *tail)
    source = updates.reshape(rows.shape[0], *tail)
    if reduction == "none":
        return flat.index_put((rows,), source).reshape(x.shape)
    index = rows.reshape(-1, *[1] * len(tail)).expand(source.shape)
    return flat.scatter_reduce(0, index, source, kinds[reduction]).reshape(x.shape)  # type: ignore[arg-type]


def _scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = call.axis(call.attr("axis", 0), x.dim())
    reduction = call.attr("reduction", "none")
    kinds = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    index = wrap(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, index, updates)
    if reduction not in kinds:
        raise call.refuse(f"reduction={reduction!r} is not supported")
    return x.scatter_reduce(axis, index, updates, kinds[reduction])


def _one_hot(call: Call, indices: Tensor, depth_input: Tensor, values: Tensor) -> Tensor:
    depth = int(call.constant(1)[0])
    axis = call.axis(call.attr("axis", -1), indices.dim() + 1)
    index = torch.where(indices < 0, indices + depth, indices).unsqueeze(axis)
    shape = [-1 if i == axis else 1 for i in range(index.dim())]
    hot = index == torch.arange(depth, device=indices.device).reshape(shape)
    return torch.where(hot, values[1], values[0])


def _reverse_sequence(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = call.attr("time_axis", 0), call.attr("batch_axis", 1)
    if {time, batch} != {0, 1}:
        raise call.refuse(f"batch_axis={batch} and time_axis={time} are not 0 and 1")
    along = [-1 if i == time else 1 for i in range(x.dim())]
    steps = torch.arange(x.shape[time], device=x.device).reshape(along)
    each = lengths.reshape([-1 if i == batch else 1 for i in range(x.dim())])
    where = torch.where(steps < each, each - 1 - steps, steps)
    return torch.gather(x, time, where.expand(x.shape))


# -- results whose size depends on data: taken where the data is known -----------------------------


def _compress(call: Call, x: Tensor, condition: Tensor) -> Tensor:
    axis = call.attr("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    kept = [i for i, keep in enumerate(call.constant(1)) if keep]
    return take(x, call.axis(axis, x.dim()), kept)


def _non_zero(call: Call, x: Tensor) -> Tensor:
    call.constant(0)
    return x.reshape(1).nonzero().t()[:0] if x.dim() == 0 else x.nonzero().t()


def _unique(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call.constant(0)
    axis, ordered = call.attr("axis"), call.attr("sorted", 1)
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = call.axis(axis, x.dim())
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    positions = torch.arange(inverse.numel())
    first = torch.full_like(counts, inverse.numel())
    first = first.scatter_reduce(0, inverse, positions, "amin")
    if not ordered:
        order = first.argsort()
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = order.argsort()[inverse]
    return values, first, inverse, counts


SELECT: Mapping[str, Op] = MappingProxyType(
    {
        "Compress": _compress,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "NonZero": _non_zero,
        "OneHot": _one_hot,
        "ReverseSequence": _reverse_sequence,
        "Scatter": _scatter_elements,
        "ScatterElements": _scatter_elements,
        "ScatterND": _scatter_nd,
        "Unique": _unique,
    }
)
