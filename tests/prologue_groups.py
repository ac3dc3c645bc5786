"""Convolutions whose kernels compute the pixels of their image as they copy them, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from tests.pass_checks import random

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def ahead(b: GraphBuilder, x: str, kind: str) -> str:
    """What becomes of the image `x`."""
    image, *sides, channels = b.specs[x].sizes
    ones = (1,) * len(sides)
    if kind == "norm":  # of each image and channel, and a leaky ReLU
        scale, shift = (
            b.input(name, TensorSpec((image, *ones, channels), F32)) for name in ("scale", "shift")
        )
        x = b.add("scale_shift", x, scale, shift)
        return b.add("where", b.add("gt", x, other=0.0), x, b.add("mul", x, other=0.125))
    if kind == "gate":
        return b.add(
            "mul", x, b.input("gate", TensorSpec((image, *ones, channels), b.specs[x].dtype))
        )
    if kind == "gate of all":
        gate = b.input("gate", TensorSpec((image, *ones, 1), b.specs[x].dtype))
        return b.add("silu", b.add("add", x, gate))
    assert kind == "bias"  # the same of all images, and a constant besides
    x = b.add("add", x, b.input("bias_of_image", TensorSpec((channels,), b.specs[x].dtype)))
    return b.add(
        "relu", b.add("sub", x, b.constant("mean", random(channels, dtype=b.specs[x].dtype)))
    )


def prepared(
    image: tuple[int, ...],
    columns: int,
    kernel: tuple[int, ...],
    dtype: torch.dtype,
    kind: str,
    *,
    stride: tuple[int, ...] = (),
    before: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    groups: int = 1,
    joined: Sequence[int] = (),
    piece: int = 0,
) -> Graph:
    """relu(conv(f(x)) + bias); with channels `joined`, f's result stands between such images, ahead
    of which there are `piece`."""
    b, ones = GraphBuilder(), (1,) * len(kernel)
    x = ahead(b, b.input("x", TensorSpec(image, dtype)), kind)
    if joined:
        others = [
            b.input(f"other{at}", TensorSpec((*image[:-1], channels), dtype))
            for at, channels in enumerate(joined)
        ]
        x = b.add("concat", *others[:piece], x, *others[piece:], dim=len(image) - 1)
    depth = b.specs[x].sizes[-1] // groups
    w = b.constant("w", random(columns, *kernel, depth, dtype=dtype) / math.prod(kernel))
    op, cut = ("conv", {}) if groups == 1 else ("grouped_conv", {"groups": groups})
    before = before or ones
    y = b.add(op, x, w, stride=stride or ones, before=before, after=before,
              dilation=dilation or ones, **cut)  # fmt: skip
    y = b.add("add", y, b.constant("b", random(columns, dtype=dtype)))
    return b.build([b.add("relu", y)])


def _group(*args: object, **attrs: object) -> Callable[[], Group]:
    return lambda: Group("prologue", prepared(*args, **attrs))  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Group]] = {
    "norm": _group((2, 11, 13, 32), 24, (3, 3), F16, "norm"),
    "norm of a volume": _group((2, 5, 9, 10, 32), 32, (3, 3, 3), F16, "norm"),
    "norm, strides": _group((1, 9, 18, 17, 16), 16, (3, 2, 3), BF16, "norm", stride=(2, 1, 2)),
    "gate": _group((3, 9, 8, 48), 40, (3, 3), BF16, "gate"),
    "gate of all": _group((2, 7, 9, 16), 40, (3, 2), F16, "gate of all", dilation=(2, 3)),
    "bias": _group((2, 7, 9, 24), 64, (3, 3), F16, "bias", before=(2, 0)),
    "norm of lines": _group((1, 12, 16, 32), 32, (3, 3), F16, "norm"),
    "norm of single pixels": _group((2, 9, 11, 32), 3, (1, 1), F16, "norm", before=(0, 0)),
    "norm of a volume's pixels": _group(
        (1, 3, 9, 11, 24), 40, (1, 1, 1), BF16, "norm", before=(0, 0, 0)
    ),
    "norm of groups": _group((2, 9, 9, 64), 64, (3, 3), F16, "norm", groups=2),
    "norm of the first piece": _group((2, 9, 10, 32), 32, (3, 3), F16, "norm", joined=(16,)),
    "norm of the last piece": _group(
        (2, 6, 9, 10, 16), 32, (3, 3, 3), BF16, "norm", joined=(32, 16), piece=2
    ),
}
WIDE: dict[str, Callable[[], Group]] = {
    "norm in fp32": _group((2, 7, 9, 12), 24, (3, 3), F32, "norm"),
}
"""Of which no sketch of 16 bits is."""
