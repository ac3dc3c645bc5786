"""Models of skips and branches, whose concats one product reads or several do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import randomize_batch_norm


def conv(channels: int, columns: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution, its norm and ReLU."""
    inner = nn.Conv2d(channels, columns, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(inner, nn.BatchNorm2d(columns), nn.ReLU())


class Skip(nn.Module):
    """One level of a U-Net: the skip lies behind what comes from below, which is `enlarged` or goes
    through a transposed convolution."""

    def __init__(self, enlarged: bool) -> None:
        super().__init__()
        self.stem, self.down = conv(3, 16), conv(16, 32, stride=2)
        self.wide = nn.Upsample(scale_factor=2) if enlarged else nn.ConvTranspose2d(32, 32, 2, 2)
        self.up, self.last = conv(48, 24), nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(self.up(torch.cat((self.wide(self.down(x)), x), 1)))


class Branches(nn.Module):
    """A CSP block as YOLOv8 has it: `count` results behind one another, then a 1x1 convolution."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem, self.first = conv(3, 16), conv(16, 24, 1)
        self.blocks = nn.ModuleList(conv(24, 24) for _ in range(count - 1))
        self.last = conv(24 * count, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(self.stem(x))]
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Split(nn.Module):
    """The same of the halves of one convolution: a piece of the concat is a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = conv(3, 32), conv(16, 16)
        self.last = conv(48, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, 1)
        return self.last(torch.cat((a, b, self.block(b)), 1))


class Tokens(nn.Module):
    """A long skip of U-ViT, joined by a linear, whose result is normalized."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.skip, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.last = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        a = F.gelu(self.inner[0](x))
        b = F.gelu(self.inner[1](a))
        y = self.skip(torch.cat((b, a), -1)) + b
        return self.last(self.norm(y))


class Volume(nn.Module):
    """A skip of a 3D U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv3d(1, 16, 3, 1, 1), nn.Conv3d(16, 24, 3, 2, 1)
        self.wide, self.up = nn.ConvTranspose3d(24, 24, 2, 2), nn.Conv3d(40, 16, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.up(torch.cat((x, self.wide(self.down(x).relu())), 1)).relu()


class Inception(nn.Module):
    """Branches whose concat several read: the next block's, or a pooling beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16)
        self.first = nn.ModuleList((conv(16, 16, 1), conv(16, 24, 3), conv(16, 8, 5)))
        self.second = nn.ModuleList((conv(48, 16, 1), conv(48, 24, 3)))
        self.pooled = conv(48, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([branch(x) for branch in self.first], 1)
        pooled = self.pooled(F.max_pool2d(x, 3, 1, 1))
        return torch.cat([*(branch(x) for branch in self.second), pooled], 1)


class Returned(nn.Module):
    """A concat that the model gives back beside what a convolution makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = conv(3, 16), conv(3, 24), conv(40, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((self.a(x), self.b(x)), 1)
        return x, self.last(x)


IMAGE = (2, 3, 12, 10)
Model = tuple[type[nn.Module], tuple[Any, ...], tuple[int, ...]]
"""With its arguments and the sizes of its input."""
JOINED: dict[str, Model] = {
    "a U-Net's skip": (Skip, (False,), IMAGE),
    "two branches": (Branches, (2,), IMAGE),
    "three branches": (Branches, (3,), IMAGE),
    "halves of a convolution": (Split, (), IMAGE),
    "tokens": (Tokens, (), (2, 17, 64)),
    "a volume's skip": (Volume, (), (1, 1, 4, 6, 8)),
}
"""One launch reads the pieces of the one concat that each of them has."""
STORED: dict[str, Model] = {
    "Inception": (Inception, (), IMAGE),
    "what is given back": (Returned, (), IMAGE),
}
"""Others read the concats."""
ENLARGED: Model = (Skip, (True,), IMAGE)
"""Either the resize or the convolution may have the concat in its kernel."""


def made(case: Model, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """The model of `case` and an input, of `dtype`."""
    kind, given, sizes = case
    torch.manual_seed(0)
    model = kind(*given).eval()
    randomize_batch_norm(model)
    return model.to(dtype), torch.randn(sizes).to(dtype)
