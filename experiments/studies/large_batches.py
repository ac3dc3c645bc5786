"""Depthwise convolutions and linears back to back, of large batches, by each sketch.

    python -m experiments.studies.large_batches OUT.json [--programs N] [--quick]

Of each group N programs of each sketch are judged and timed in chains, as in
`experiments.studies.conv_patches`. Of two linears back to back each is timed as a kernel of its own
too. With --quick small ones run on the CPU, in the host build: a rehearsal that claims no times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from experiments.studies.conv_patches import study
from gtco.ir.graph import Group
from tests.back_to_back_groups import bottleneck, perceptron
from tests.groups import norm_linear, plain_linear, residual_linear
from tests.stencil_groups import depthwise

F16 = torch.float16
WINDOWS: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "ConvNeXt's first stage": (32, 56, 96, 7, 1, True),
    "its second": (32, 28, 192, 7, 1, True),
    "its third": (32, 14, 384, 7, 1, True),
    "its last": (32, 7, 768, 7, 1, True),
    "its first, one image": (1, 56, 96, 7, 1, True),
    "its third, one image": (1, 14, 384, 7, 1, True),
    "EfficientNet's 112 x 112 by twos": (32, 112, 96, 3, 2, False),
    "its 112 x 112": (32, 112, 32, 3, 1, False),
    "its 56 x 56": (32, 56, 144, 3, 1, False),
    "its 28 x 28": (32, 28, 240, 5, 1, False),
    "its 14 x 14": (32, 14, 672, 5, 1, False),
    "its 7 x 7": (32, 7, 1152, 5, 1, False),
    "its 56 x 56, one image": (1, 56, 144, 3, 1, False),
    "its 14 x 14, one image": (1, 14, 672, 5, 1, False),
}
"""Name to images, side, channels, kernel, stride and whether row statistics are made."""
PAIRS: dict[str, tuple[int, tuple[int, int, int]]] = {
    "ResNet-50's first stage, batch 32": (100352, (64, 256, 64)),
    "its second, batch 32": (25088, (128, 512, 128)),
    "its first, batch 128": (401408, (64, 256, 64)),
    "its first to its second, batch 128": (401408, (64, 256, 128)),
    "its second, batch 128": (100352, (128, 512, 128)),
    "its second to its third, batch 128": (100352, (128, 512, 256)),
    "its third, batch 128": (25088, (256, 1024, 256)),
    "DETR's first stage": (66800, (64, 256, 64)),
}
"""Name to rows and the columns of what is read, between and made; with a residual."""
PERCEPTRONS: dict[str, tuple[int, tuple[int, int, int]]] = {
    "an MLP of ConvNeXt's first stage": (100352, (96, 384, 96)),
    "an MLP of its second": (25088, (192, 768, 192)),
}


def groups_of(quick: bool) -> Mapping[str, Callable[[], Group]]:
    """What is timed, by name."""
    found: dict[str, Callable[[], Group]] = {}
    for name, (images, side, channels, size, stride, stats) in WINDOWS.items():
        image = (1, 9, 9, channels) if quick else (images, side, side, channels)
        given = {"before": (size // 2,) * 2, "stride": (stride,) * 2, "stats": stats}
        found[f"depthwise, {name}"] = partial(depthwise, image, (size, size), F16, **given)
    for name, (rows, sizes) in (PAIRS | PERCEPTRONS).items():
        rows, (k, middle, columns) = 300 if quick else rows, sizes
        if name in PAIRS:
            both = partial(bottleneck, rows, sizes, F16)
            first = partial(residual_linear, rows, k, middle, F16, stats=False)
            second = partial(plain_linear, rows, middle, columns, F16)
        else:
            both = partial(perceptron, rows, sizes, F16, stats=False)
            first = partial(norm_linear, rows, k, middle, F16, gelu=True)
            second = partial(residual_linear, rows, middle, columns, F16, stats=False)
        parts = {"both": both, "the first": first, "the second": second}
        found |= {f"{part}, {name}": make for part, make in parts.items()}
    return found


if __name__ == "__main__":
    study("large_batches", __doc__, groups_of)
