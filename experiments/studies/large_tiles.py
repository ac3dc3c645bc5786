"""Products of many steps of K or many rows, by tile and ring: `gemm_wgmma` beside the others.

    python -m experiments.studies.large_tiles OUT.json [--programs N] [--quick]

Of each N programs of each sketch are judged and timed in chains, as in
`experiments.studies.conv_patches`. With --quick small ones run on the CPU, in the host build: a
rehearsal that claims no times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from experiments.studies.conv_patches import study
from gtco.ir.graph import Group
from tests.groups import convolution, norm_linear, plain_linear, residual_linear

F16 = torch.float16
CONVOLUTIONS: Mapping[str, tuple[tuple[int, ...], int, int]] = {
    "DeepLab's pyramid": ((1, 65, 65, 2048), 256, 12),
    "FCN's head": ((1, 65, 65, 2048), 512, 1),
    "its last stage": ((1, 65, 65, 512), 512, 4),
    "DETR's first stage": ((1, 200, 334, 64), 64, 1),
    "its third": ((1, 50, 84, 256), 256, 1),
    "its last": ((1, 25, 42, 512), 512, 1),
    "a denoiser's 64 x 64": ((2, 64, 64, 320), 320, 1),
    "its 32 x 32": ((2, 32, 32, 640), 640, 1),
    "its 32 x 32, joined": ((2, 32, 32, 1280), 640, 1),
    "its 16 x 16": ((2, 16, 16, 1280), 1280, 1),
    "ResNet's third stage, batch 32": ((32, 14, 14, 256), 256, 1),
    "its last, batch 32": ((32, 7, 7, 512), 512, 1),
}
"""Name to the image, the columns and the dilation of a kernel of 3 x 3."""
LINEARS: Mapping[str, tuple[int, int, int, str]] = {
    "a denoiser's FC2": (8192, 1280, 320, "residual"),
    "its queries": (8192, 320, 320, "plain"),
    "its queries, keys and values": (2048, 640, 1920, "plain"),
    "its FC2 of 640": (2048, 2560, 640, "residual"),
    "DeepLab's reducing": (4225, 2048, 512, "plain"),
    "its expanding": (4225, 512, 2048, "residual"),
    "its widest": (4225, 1024, 2048, "plain"),
    "DETR's expanding": (66800, 64, 256, "residual"),
    "its reducing": (16700, 512, 128, "plain"),
    "DiT's QKV": (512, 1152, 3456, "norm"),
    "its projection": (512, 1152, 1152, "residual"),
    "its FC1": (512, 1152, 4608, "gelu"),
    "its FC2": (512, 4608, 1152, "residual"),
    "SETR's FC1": (576, 1024, 4096, "gelu"),
    "its FC2 of 1024": (576, 4096, 1024, "residual"),
    "ViT-B's FC2, batch 32": (6304, 3072, 768, "residual"),
}
"""Name to rows, channels read and made, and what stands around."""


def linear(rows: int, k: int, columns: int, around: str) -> Group:
    """A linear behind a norm, or with a residual, or neither."""
    if around == "residual":
        return residual_linear(rows, k, columns, F16, stats=False)
    if around == "plain":
        return plain_linear(rows, k, columns, F16)
    return norm_linear(rows, k, columns, F16, gelu=around == "gelu")


def groups_of(quick: bool) -> Mapping[str, Callable[[], Group]]:
    """What is timed, by name."""
    found: dict[str, Callable[[], Group]] = {}
    for name, (image, columns, dilation) in CONVOLUTIONS.items():
        image = (1, 9, 9, image[-1]) if quick else image
        given = {"dilation": (dilation,) * 2, "before": (dilation,) * 2, "residual": False}
        found[name] = partial(convolution, image, columns, (3, 3), F16, **given)
    for name, (rows, *more) in LINEARS.items():
        found[name] = partial(linear, min(rows, 300) if quick else rows, *more)
    return found


if __name__ == "__main__":
    study("large_tiles", __doc__, groups_of)
