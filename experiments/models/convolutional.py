"""Models of convolutions: CvT, SE-ResNet9 and what people bring besides.

Random weights, fp16, on the GPU if there is one.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, build, ready

# -- CvT -------------------------------------------------------------------------------------------

CVT = {
    "13": {"depth": [1, 2, 10], "embed_dim": [64, 192, 384], "num_heads": [1, 3, 6]},
    "21": {"depth": [1, 4, 16], "embed_dim": [64, 192, 384], "num_heads": [1, 3, 6]},
    "w24": {"depth": [2, 2, 20], "embed_dim": [192, 768, 1024], "num_heads": [3, 12, 16]},
}


def cvt_module(name: str) -> nn.Module:
    """transformers' CvT classifier of 1000 classes; `name` is a key of `CVT`."""
    from transformers import CvtConfig, CvtForImageClassification

    return CvtForImageClassification(CvtConfig(**CVT[name], num_labels=1000))


def cvt_13() -> Model:
    return build(cvt_module("13"), "logits")


def cvt_21() -> Model:
    return build(cvt_module("21"), "logits")


def cvt_w24() -> Model:
    return build(cvt_module("w24"), "logits", height=384, width=384)


# -- SE-ResNet9 with Fixup -------------------------------------------------------------------------


class Block(nn.Module):
    """Two 3x3 convolutions between scalar biases, squeeze-and-excite, and a residual.

    The bias ahead of a convolution with zero padding is no bias of the convolution: at the border
    it meets fewer pixels.
    """

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.same = stride == 1 and before == channels
        self.shortcut = None if self.same else nn.Conv2d(before, channels, 1, bias=False)
        self.stride = stride
        for name in ("b1a", "b1b", "b2a", "b2b", "scale"):
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))
        self.squeeze = nn.Linear(channels, channels // 16)
        self.excite = nn.Linear(channels // 16, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x + self.b1a) + self.b1b)
        y = self.conv2(y + self.b2a) * self.scale + self.b2b
        if self.shortcut is not None:
            x = self.shortcut(F.avg_pool2d(x + self.b1a, 3, self.stride, 1))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return F.relu(y * gate[:, :, None, None] + x)


class SEResNet9(nn.Module):
    """A small ResNet with Fixup scalars in place of batch norms: 64 x 64 pixels to 2 x 2 x 512."""

    def __init__(self, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels * 16, width, 1, bias=False)
        sizes = ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2))
        self.blocks = nn.Sequential(
            *(Block(before * width, after * width, stride) for before, after, stride in sizes)
        )

    def forward(self, image: Tensor) -> Tensor:
        n, c, h, w = image.shape
        x = image.view(n, c, h // 4, 4, w // 4, 4).permute(0, 3, 5, 1, 2, 4)
        x = x.reshape(n, 16 * c, h // 4, w // 4)
        result: Tensor = self.blocks(F.relu(self.stem(x)))
        return result


def se_resnet(channels: int, width: int = 64, batch: int = 128, side: int = 64) -> Model:
    """The network with random weights, and images of `side` pixels."""
    model, inputs = ready(SEResNet9(channels, width), (batch, channels, side, side))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.numel() == 1:  # no bias or scale is zero, so that a wrong border shows
            value = torch.rand(1, generator=generator) + (0.5 if "scale" in name else 0.1)
            parameter.data.copy_(value)
    return model, inputs


def se_resnet9() -> Model:
    """At batch 128, three channels."""
    return se_resnet(3)


def se_resnet9_grey() -> Model:
    """At batch 128, one channel."""
    return se_resnet(1)


# -- what people bring -----------------------------------------------------------------------------


def resnet50_module() -> nn.Module:
    """transformers' ResNet-50 of 1000 classes: torchvision's, which strides in its 3x3."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def _resnet50(batch: int) -> Model:
    return build(resnet50_module(), "logits", batch=batch)


def resnet50() -> Model:
    return build(resnet50_module(), "logits")


def resnet50_batch32() -> Model:
    return _resnet50(32)


def resnet50_batch128() -> Model:
    return _resnet50(128)


def convnext_t() -> Model:
    from experiments.models.transformers_zoo import convnext

    return convnext()


def mobilenet_v2() -> Model:
    """MobileNetV2 as TensorFlow pads it: more zeros behind than ahead."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return build(MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000)), "logits")


class UNet(nn.Module):
    """Three levels down and up, with skips by concatenation and bilinear upsampling."""

    def __init__(self, width: int = 64, classes: int = 21) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Module:
            layers: list[nn.Module] = []
            for depth in (before, after):
                layers += [nn.Conv2d(depth, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            return nn.Sequential(*layers)

        widths = [width << level for level in range(4)]
        self.first = twice(3, width)
        self.down = nn.ModuleList(twice(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(
            twice(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = [self.first(image)]
        for level in self.down:
            skips.append(level(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = level(torch.cat((skips.pop(), x), 1))
        result: Tensor = self.classify(x)
        return result


def unet() -> Model:
    return build(UNet(), height=256, width=256)


class ResidualBlock(nn.Module):
    """A diffusion model's: group norm, SiLU and 3x3 twice, then attention over the pixels."""

    def __init__(self, width: int = 320, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(32, width) for _ in range(3))
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        x = x + self.conv2(F.silu(self.norm2(y)))
        parts = self.qkv(self.norm3(x)).flatten(2).unflatten(1, (3, self.heads, -1))
        y = F.scaled_dot_product_attention(*parts.permute(1, 0, 2, 4, 3).unbind(0))
        result: Tensor = x + self.out(y.transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:]))
        return result


def diffusion_block() -> Model:
    return ready(ResidualBlock(), (1, 320, 32, 32))
