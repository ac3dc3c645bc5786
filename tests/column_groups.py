"""Groups that reduce columns lying side by side in memory, at odd shapes, for kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from tests.tile_groups import group_stats, pool

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def _group(b: GraphBuilder, *outputs: str) -> Group:
    graph = b.build(outputs)
    graph.verify()
    return Group("case", graph)


def statistics(*shape: int, groups: int, chunks: int, dtype: torch.dtype = F16) -> Group:
    """Of groups of channels of images alone."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    return _group(b, b.add("group_stats", x, groups=groups, chunks=chunks))


def box_moments(*shape: int, box: int, columns: int, dtype: torch.dtype = F16) -> Group:
    """Of boxes of images alone."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    return _group(b, b.add("box_moments", x, box=(box,), columns=columns))


def merged_moments(*shape: int, groups: int, chunks: int, count: int) -> Group:
    """Of boxes whose statistics lie in two planes."""
    b = GraphBuilder()
    boxes = b.input("boxes", TensorSpec((2, *shape), F32))
    planes = [
        b.add("reshape", b.add("slice", boxes, dim=0, start=at, end=at + 1), shape=shape)
        for at in (0, 1)
    ]
    b_merged = b.add("merge_moments", *planes, groups=groups, chunks=chunks, count=count)
    return _group(b, b_merged)


def gated_mean(*shape: int, dtype: torch.dtype = F16) -> Group:
    """The mean of pixels times a row of each image and of a sum that is stored too, and what is
    computed of it and of another row."""
    b = GraphBuilder()
    row = (shape[0], *(1 for _ in shape[2:]), shape[-1])
    x, y = (b.input(name, TensorSpec(shape, dtype)) for name in "xy")
    gate, bias = (b.input(name, TensorSpec(row, dtype)) for name in ("gate", "bias"))
    total, dims = b.add("add", x, y), tuple(range(1, len(shape) - 1))
    mean = b.add("mean", b.add("mul", total, gate), dims=dims, keepdim=True)
    return _group(b, total, b.add("sigmoid", b.add("add", mean, bias)), mean)


def permuted(op: str, *shape: int, dtype: torch.dtype = F16) -> Group:
    """A reduction of the pixels of images [N, C, H, W] that have their channels last in memory."""
    b = GraphBuilder()
    n, c, h, w = shape
    x = b.add("permute", b.input("x", TensorSpec((n, h, w, c), dtype)), dims=(0, 3, 1, 2))
    return _group(b, b.add(op, x, dims=(2, 3), keepdim=False))


def squares(*shape: int, dims: tuple[int, ...], dtype: torch.dtype = F16) -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec(shape, dtype))
    wide = b.add("cast", x, dtype=F32) if dtype != F32 else x
    return _group(b, b.add("sum", b.add("square", wide), dims=dims, keepdim=True))


COLUMNWISE: dict[str, Callable[[], Group]] = {
    "channels": lambda: statistics(2, 3, 5, 11, 16, groups=16, chunks=3),
    "channels_of_f32": lambda: statistics(1, 23, 19, 7, groups=7, chunks=1, dtype=F32),
    "groups_of_2": lambda: statistics(1, 9, 14, 54, groups=27, chunks=7, dtype=BF16),
    "groups_of_3": lambda: statistics(3, 7, 5, 9, groups=3, chunks=5),
    "groups_of_4": lambda: statistics(1, 33, 9, 24, groups=6, chunks=3),
    "groups_of_10": lambda: statistics(1, 6, 8, 40, groups=4, chunks=2),
    "moments_of_boxes": lambda: box_moments(2, 48, 24, box=16, columns=4),
    "moments_of_channels": lambda: box_moments(1, 64, 20, box=16, columns=1, dtype=BF16),
    "merged_moments": lambda: merged_moments(2, 36, 24, groups=6, chunks=4, count=64),
    "merged_channels": lambda: merged_moments(1, 51, 7, groups=7, chunks=3, count=16),
    "stored_sum": lambda: group_stats(2, 9, 10, 20, groups=20, chunks=2),
    "stored_sum_of_groups": lambda: group_stats(3, 7, 5, 12, groups=3, chunks=5, dtype=BF16),
    "mean_54": lambda: pool("mean", 2, 3, 5, 7, 54, dims=(1, 2, 3), keepdim=False, dtype=F16),
    "mean_of_odd": lambda: pool("mean", 1, 13, 9, 13, dims=(1, 2), keepdim=True, dtype=BF16),
    "mean_of_frames": lambda: pool("mean", 2, 3, 77, 10, dims=(2,), keepdim=True, dtype=F32),
    "mean_of_rows": lambda: pool("mean", 5, 6, 9, dims=(0,), keepdim=False, dtype=F32),
    "gated": lambda: gated_mean(3, 5, 7, 24),
    "gated_volume": lambda: gated_mean(1, 3, 5, 7, 20, dtype=F32),
    "squares": lambda: squares(2, 37, 20, dims=(1,)),
    "channels_first": lambda: permuted("mean", 2, 40, 7, 9),
    "largest_channels_first": lambda: permuted("amax", 1, 24, 5, 11, dtype=BF16),
    "largest_of_ends": lambda: pool("amax", 5, 3, 35, dims=(0, 2), keepdim=True, dtype=F16),
    "largest_of_bytes": lambda: pool("amax", 3, 33, dims=(0,), keepdim=False, dtype=torch.int8),
    "counted": lambda: pool("sum", 2, 50, 33, dims=(1,), keepdim=True, dtype=torch.bool),
    "sum_of_f64": lambda: pool("sum", 41, 6, dims=(0,), keepdim=False, dtype=F64),
}
