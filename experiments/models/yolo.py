"""A one-stage detector as YOLOv8 has it: convolutions with batch norm and SiLU, stages whose parts
are joined, three levels, and boxes as distributions over 16 distances (Li et al., "Generalized
Focal Loss", NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready


def _conv(before: int, after: int, kernel: int = 1, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(after, 1e-3),
        nn.SiLU(),
    )


class _Stage(nn.Module):
    """Half of the channels through `depth` blocks; what each of them gives is joined."""

    def __init__(self, before: int, after: int, depth: int, *, skip: bool) -> None:
        super().__init__()
        self.skip, half = skip, after // 2
        self.first, self.last = _conv(before, after), _conv((2 + depth) * half, after)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(half, half, 3), _conv(half, half, 3)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            made = block(parts[-1])
            parts.append(parts[-1] + made if self.skip else made)
        result: Tensor = self.last(torch.cat(parts, 1))
        return result


class _Pyramid(nn.Module):
    """Maxima of 5, 9 and 13 pixels, joined."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = _conv(width, width // 2), _conv(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        result: Tensor = self.last(torch.cat(parts, 1))
        return result


class YOLO(nn.Module):
    """Images [N, 3, H, W] to boxes and scores [N, 4 + classes, H W (1/64 + 1/256 + 1/1024)].

    Args:
        widths: channels of the stem and of each stage.
        depth: blocks of the first and last stage; those between have twice as many.
    """

    def __init__(
        self, widths: Sequence[int] = (32, 64, 128, 256, 512), depth: int = 1, classes: int = 80
    ) -> None:
        super().__init__()
        w = widths
        self.stem = _conv(3, w[0], 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(a, b, 3, 2), _Stage(b, b, n * depth, skip=True))
            for a, b, n in zip(w[:-1], w[1:], (1, 2, 2, 1), strict=True)
        )
        self.pyramid = _Pyramid(w[4])
        self.up = nn.ModuleList(
            (_Stage(w[4] + w[3], w[3], depth, skip=False),
             _Stage(w[3] + w[2], w[2], depth, skip=False))
        )  # fmt: skip
        self.shrink = nn.ModuleList((_conv(w[2], w[2], 3, 2), _conv(w[3], w[3], 3, 2)))
        self.down = nn.ModuleList(
            (_Stage(w[2] + w[3], w[3], depth, skip=False),
             _Stage(w[3] + w[4], w[4], depth, skip=False))
        )  # fmt: skip
        self.boxes = self._heads(w[2:], max(64, w[2] // 4), 64)
        self.scores = self._heads(w[2:], max(w[2], min(classes, 100)), classes)

    @staticmethod
    def _heads(widths: Sequence[int], between: int, after: int) -> nn.ModuleList:
        return nn.ModuleList(
            nn.Sequential(
                _conv(width, between, 3), _conv(between, between, 3), nn.Conv2d(between, after, 1)
            )
            for width in widths
        )

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.stem(image)]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        top = self.pyramid(levels[4])
        middle = self.up[0](torch.cat((_twice(top), levels[3]), 1))
        fine = self.up[1](torch.cat((_twice(middle), levels[2]), 1))
        middle = self.down[0](torch.cat((self.shrink[0](fine), middle), 1))
        top = self.down[1](torch.cat((self.shrink[1](middle), top), 1))
        found = []
        for level, (x, boxes, scores) in enumerate(
            zip((fine, middle, top), self.boxes, self.scores, strict=True)
        ):
            corners = self._decode(boxes(x)) * 2 ** (3 + level)
            found.append(torch.cat((corners, scores(x).sigmoid()), 1).flatten(2))
        return torch.cat(found, 2)

    @staticmethod
    def _decode(sides: Tensor) -> Tensor:
        """Distances of a box's sides as distributions [N, 64, H, W] to its middle and size."""
        height, width = sides.shape[2:]
        bins = torch.arange(16, device=sides.device, dtype=sides.dtype)
        distances = sides.unflatten(1, (4, 16)).softmax(2).mul(bins[:, None, None]).sum(2)
        y, x = torch.meshgrid(
            *(
                torch.arange(n, device=sides.device, dtype=sides.dtype) + 0.5
                for n in (height, width)
            ),
            indexing="ij",
        )
        place = torch.stack((x, y))
        low, high = place - distances[:, :2], place + distances[:, 2:]
        return torch.cat(((low + high) / 2, high - low), 1)


def _twice(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def yolov8_s() -> Model:
    return ready(YOLO(), (1, 3, 640, 640))


def yolov8_m() -> Model:
    return ready(YOLO((48, 96, 192, 384, 576), depth=2), (1, 3, 640, 640))
