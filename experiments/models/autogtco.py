"""The models of AutoGTCO's evaluation besides ViT, at batch 1: DETR with its parts, and SETR.

Random weights, fp16 unless the name says fp32, on the GPU if there is one. ViT-B/16, L/16 and H/14
are in `vit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, build, ready

# -- DETR ------------------------------------------------------------------------------------------

DETR_IMAGE = (800, 1333)
DETR_TOKENS, DETR_QUERIES, DETR_WIDTH = 1050, 100, 256


def detr_module(encoder_layers: int) -> nn.Module:
    """transformers' DETR with its own ResNet-50, 91 classes and six decoder layers."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone: Any = ResNetConfig(out_features=["stage4"])
    return DetrForObjectDetection(
        DetrConfig(
            encoder_layers=encoder_layers,
            decoder_layers=6,
            num_labels=91,
            use_timm_backbone=False,
            backbone=None,
            backbone_config=backbone,
        )
    )


def _detr(encoder_layers: int, dtype: torch.dtype = torch.float16) -> Model:
    height, width = DETR_IMAGE
    module = detr_module(encoder_layers)
    return build(module, "logits", "pred_boxes", height=height, width=width, dtype=dtype)


def detr_e3() -> Model:
    return _detr(3)


def detr_e6() -> Model:
    return _detr(6)


def detr_e12() -> Model:
    return _detr(12)


def detr_e6_fp32() -> Model:
    """Also the model for `--precision tf32`."""
    return _detr(6, torch.float32)


class Attention(nn.Module):
    """DETR's attention: positions are added to queries and keys, not to values."""

    def __init__(self, width: int = DETR_WIDTH, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, where: Tensor, keys: Tensor, of_keys: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q(x + where)), split(self.k(keys + of_keys)), split(self.v(keys))
        y = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class EncoderLayer(nn.Module):
    """Post-norm, ReLU, 2048 wide."""

    def __init__(self, width: int = DETR_WIDTH, hidden: int = 2048) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, where, x, where))
        result: Tensor = self.norm2(x + self.fc2(F.relu(self.fc1(x))))
        return result


class DecoderLayer(nn.Module):
    """Attention among the queries, then to the encoder's tokens, then as the encoder."""

    def __init__(self, width: int = DETR_WIDTH, hidden: int = 2048) -> None:
        super().__init__()
        self.own, self.cross = Attention(width), Attention(width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, where: Tensor, memory: Tensor, of_memory: Tensor) -> Tensor:
        x = self.norm1(x + self.own(x, where, x, where))
        x = self.norm2(x + self.cross(x, where, memory, of_memory))
        result: Tensor = self.norm3(x + self.fc2(F.relu(self.fc1(x))))
        return result


_TOKENS = (1, DETR_TOKENS, DETR_WIDTH)
_QUERIES = (1, DETR_QUERIES, DETR_WIDTH)


def detr_attention() -> Model:
    """One attention of DETR's encoder, 1050 tokens."""
    return ready(Attention(), _TOKENS, _TOKENS, _TOKENS, _TOKENS)


def detr_encoder_layer() -> Model:
    return ready(EncoderLayer(), _TOKENS, _TOKENS)


def detr_decoder_layer() -> Model:
    return ready(DecoderLayer(), _QUERIES, _QUERIES, _TOKENS, _TOKENS)


# -- SETR ------------------------------------------------------------------------------------------

CLASSES = 150


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        result: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return result


def _upsampled(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class Naive(nn.Module):
    """1x1 convolution, batch norm, ReLU, 1x1 to the classes, bilinear to the image."""

    def __init__(self, width: int, inner: int = 256) -> None:
        super().__init__()
        self.reduce, self.norm = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner)
        self.classify = nn.Conv2d(inner, CLASSES, 1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return _upsampled(self.classify(F.relu(self.norm(self.reduce(x)))), size)


class Progressive(nn.Module):
    """Four 3x3 convolutions with batch norm and ReLU, twice the size after each but the last."""

    def __init__(self, width: int, inner: int = 256) -> None:
        super().__init__()
        widths = (width, inner, inner, inner)
        self.convs = nn.ModuleList(nn.Conv2d(depth, inner, 3, padding=1) for depth in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(inner) for _ in widths)
        self.classify = nn.Conv2d(inner, CLASSES, 1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)))
            if index < 3:
                x = _upsampled(x, (2 * x.shape[2], 2 * x.shape[3]))
        return _upsampled(self.classify(x), size)


class Setr(nn.Module):
    """A ViT without a class token, and a head that makes its tokens a map of classes."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        head: Callable[[int], nn.Module],
        image: int = 384,
    ) -> None:
        super().__init__()
        self.side = image // 16
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.empty(1, self.side**2, width))
        self.layers = nn.Sequential(*(Layer(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = head(width)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        x = self.norm(self.layers(x)).transpose(1, 2).unflatten(2, (self.side, self.side))
        result: Tensor = self.head(x, (image.shape[2], image.shape[3]))
        return result


BASE, LARGE = (768, 12, 12, 3072), (1024, 24, 16, 4096)


def setr_naive_base() -> Model:
    return build(Setr(*BASE, Naive), height=384, width=384)


def setr_naive() -> Model:
    return build(Setr(*LARGE, Naive), height=384, width=384)


def setr_pup() -> Model:
    return build(Setr(*LARGE, Progressive), height=384, width=384)


def setr_pup_fp32() -> Model:
    """Also the model for `--precision tf32`."""
    return build(Setr(*LARGE, Progressive), height=384, width=384, dtype=torch.float32)
