"""Attention whose operands TMA brings: groups with a schedule each, for kernel tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from gtco.codegen.sketch import Schedule
from gtco.ir.graph import Group
from tests import attention_groups as groups
from tests.groups import tf32
from tests.kernel_checks import inputs_of


def schedule(block_q: int, block_k: int, warps_k: int, stages: int) -> Schedule:
    return {
        "block_q": block_q,
        "block_k": block_k,
        "warps_k": warps_k,
        "stages": stages,
        "copy_warps": 0,
        "tma": 1,
    }


CASES: dict[str, tuple[Callable[[], Group], Schedule]] = {
    "heads of 8 and 72": (lambda: groups.cross((3,), 5, 40, 8, 72), schedule(16, 16, 1, 2)),
    "heads of 16": (lambda: groups.cross((2, 3), 37, 101, 16), schedule(48, 32, 1, 3)),
    "heads of 32, as DETR's": (lambda: groups.cross((1, 3), 50, 131, 32), schedule(32, 32, 2, 2)),
    "heads of 48": (lambda: groups.packed(61, 2, 48, groups.BF16), schedule(64, 32, 1, 2)),
    "heads of 64, each slot refilled at once": (
        lambda: groups.packed(97, 2, 64, epilogue=True, batch=2),
        schedule(32, 32, 2, 1),
    ),
    "heads of 80": (lambda: groups.packed(101, 1, 80), schedule(96, 16, 1, 4)),
    "heads of 128 and 96": (lambda: groups.cross((1, 2), 65, 129, 128, 96), schedule(16, 64, 4, 2)),
    "Swin's windows": (
        lambda: groups.cross((4, 3), 49, 49, 32, mask=groups.F16, mask_lead=(1, 3)),
        schedule(64, 64, 1, 1),
    ),
    "bool mask": (
        lambda: groups.cross((2, 2), 37, 70, 24, mask=groups.BOOL, mask_lead=(2, 1)),
        schedule(48, 32, 1, 2),
    ),
    "added mask, two parts": (
        lambda: groups.cross((2,), 17, 33, 40, 72, groups.BF16, mask=groups.F32),
        schedule(32, 32, 2, 1),
    ),
    "causal, two parts": (
        lambda: groups.cross((1, 2), 70, 130, 64, causal=True),
        schedule(48, 64, 2, 3),
    ),
    "causal, more queries than keys": (
        lambda: groups.cross((1, 2), 130, 33, 16, causal=True),
        schedule(80, 16, 1, 1),
    ),
    "a tile of two boxes": (lambda: groups.cross((2,), 20, 290, 32), schedule(16, 288, 2, 1)),
    "seven parts, three without a key": (
        lambda: groups.packed(60, 1, 32),
        schedule(16, 112, 7, 1),
    ),
    "a last tile that has a key for one part": (
        lambda: groups.cross((2,), 20, 65, 32),
        schedule(16, 64, 4, 1),
    ),
    "one query": (lambda: groups.cross((1, 4), 1, 70, 64), schedule(16, 64, 4, 2)),
    "one key": (lambda: groups.cross((3,), 5, 1, 8), schedule(16, 16, 1, 1)),
    "tf32": (
        lambda: tf32(groups.cross((2, 2), 37, 70, 24, 44, groups.F32, mask=groups.F32)),
        schedule(32, 32, 2, 2),
    ),
    "tf32, an epilogue": (
        lambda: tf32(groups.packed(37, 3, 36, groups.F32, batch=2, epilogue=True)),
        schedule(16, 16, 1, 1),
    ),
    "fp32": (lambda: groups.packed(37, 3, 36, groups.F32, epilogue=True), schedule(16, 32, 2, 2)),
    "fp32, wide": (lambda: groups.cross((2,), 33, 65, 96, 20, groups.F32), schedule(16, 32, 2, 1)),
}


def between_nan(width: int = 24) -> tuple[Group, dict[str, torch.Tensor]]:
    """Heads packed side by side, three of three images: all are NaN but the middle one of the
    middle image. What lies beyond its last row and column is theirs."""
    group = groups.packed(37, 3, width, batch=3)
    values = inputs_of(group)
    for part, image, head in itertools.product(range(3), range(3), range(3)):
        if (image, head) != (1, 1):
            column = (part * 3 + head) * width
            values["qkv"][image, :, column : column + width] = math.nan
    return group, values
