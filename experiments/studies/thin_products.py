"""Linears of many rows and few channels, as mobile networks have them at batch 32, by each sketch.

    python -m experiments.studies.thin_products OUT.json [--programs N] [--quick]

Of each N programs of each sketch are judged and timed in chains, as in
`experiments.studies.conv_patches`. With --quick small ones run on the CPU, in the host build: a
rehearsal that claims no times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from experiments.studies.conv_patches import study
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec

F16 = torch.float16
LINEARS: Mapping[str, tuple[int, int, int, str]] = {
    "112 x 112, 16 to 64, relu": (401408, 16, 64, "relu"),
    "112 x 112, 16 to 96, silu": (401408, 16, 96, "silu"),
    "112 x 112, 16 to 16, residual": (401408, 16, 16, "residual"),
    "56 x 56, 24 to 72, relu": (100352, 24, 72, "relu"),
    "56 x 56, 24 to 144, silu": (100352, 24, 144, "silu"),
    "56 x 56, 72 to 24, residual": (100352, 72, 24, "residual"),
    "56 x 56, 144 to 24, residual": (100352, 144, 24, "residual"),
    "28 x 28, 40 to 120, relu": (25088, 40, 120, "relu"),
    "28 x 28, 40 to 240, silu": (25088, 40, 240, "silu"),
    "28 x 28, 240 to 40, residual": (25088, 240, 40, "residual"),
    "14 x 14, 112 to 672, silu": (6272, 112, 672, "silu"),
    "14 x 14, 184 to 80, residual": (6272, 184, 80, "residual"),
    "7 x 7, 192 to 1152, silu": (1568, 192, 1152, "silu"),
}
"""Name to rows, channels read and made, and what follows."""


def linear(rows: int, k: int, columns: int, behind: str) -> Group:
    """A linear with a bias, and a residual or an activation behind it."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((rows, k), F16))
    weights = b.constant("w", torch.randn(columns, k).half() * k**-0.5)
    y = b.add("linear", x, weights, b.constant("bias", torch.randn(columns).half()))
    if behind == "residual":
        y = b.add("add", y, b.input("residual", b.specs[y]))
    else:
        y = b.add(behind, y)
    return Group("linear", b.build([y]))


def groups_of(quick: bool) -> Mapping[str, Callable[[], Group]]:
    """What is timed, by name."""
    return {
        name: partial(linear, 300 if quick else rows, *more)
        for name, (rows, *more) in LINEARS.items()
    }


if __name__ == "__main__":
    study("thin_products", __doc__, groups_of)
