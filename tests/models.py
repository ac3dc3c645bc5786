"""A zoo of small vision models with random weights, for tests.

Everything is built from a config: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FunctionOfTwo(nn.Module):
    """A function of two tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


class Attention(nn.Module):
    """Multi-head self-attention with one linear for q, k and v, as timm writes it."""

    def __init__(self, width: int, heads: int, *, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
            y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, hidden: int, *, fused: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, fused=fused)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """Patches, positions and layers; with or without a class token."""

    def __init__(
        self,
        image: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        *,
        class_token: bool = True,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02) if class_token else None
        tokens = (image // patch) ** 2 + class_token
        self.pos_embed = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, fused=fused) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VisionTransformer(nn.Module):
    """A classifier, as timm writes it."""

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.norm.normalized_shape[0], classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.encoder(image)[:, 0])


class SegmentationTransformer(nn.Module):
    """SETR, naive head: 1x1 convolutions on the token map, then bilinear to the image."""

    def __init__(self, encoder: Encoder, channels: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.conv1 = nn.Conv2d(encoder.norm.normalized_shape[0], channels, 1)
        self.bn = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.encoder(image)
        side = int(x.shape[1] ** 0.5)
        x = x.transpose(1, 2).reshape(x.shape[0], x.shape[2], side, side)
        x = self.conv2(F.relu(self.bn(self.conv1(x))))
        return F.interpolate(x, size=image.shape[-2:], mode="bilinear", align_corners=False)


def vit(
    image: int = 32,
    patch: int = 8,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    classes: int = 10,
    *,
    fused: bool = True,
) -> nn.Module:
    encoder = Encoder(image, patch, width, depth, heads, fused=fused)
    return VisionTransformer(encoder, classes).eval()


def vit_spelled_out(**changes: Any) -> nn.Module:
    """A ViT whose attention is written with matmul and softmax."""
    return vit(fused=False, **changes)


def setr(
    image: int = 32, patch: int = 8, width: int = 64, depth: int = 2, heads: int = 4,
    channels: int = 32, classes: int = 16,
) -> nn.Module:  # fmt: skip
    encoder = Encoder(image, patch, width, depth, heads, class_token=False)
    return randomize_batch_norm(SegmentationTransformer(encoder, channels, classes).eval())


def randomize_batch_norm(model: nn.Module) -> nn.Module:
    """Give batch norms, frozen ones too, statistics that do something."""
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


# -- transformers, from tiny configs -------------------------------------------------------------

_TINY = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
             image_size=32, patch_size=8)  # fmt: skip


def hf_vit(**changes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**{**_TINY, **changes}), add_pooling_layer=False).eval()


def hf_vit_classifier(**changes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**{**_TINY, "num_labels": 10, **changes})).eval()


def hf_deit() -> nn.Module:
    from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

    return DeiTForImageClassificationWithTeacher(DeiTConfig(**_TINY, num_labels=10)).eval()


def hf_dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**_TINY, mlp_ratio=2)).eval()


def hf_beit() -> nn.Module:
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(**_TINY, num_labels=10, use_relative_position_bias=True)
    return BeitForImageClassification(config).eval()


def hf_clip_vision() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**_TINY)).eval()


def hf_clip() -> nn.Module:
    """Both towers: called with token ids [batch, 16] of a vocabulary of 99, then images."""
    from transformers import CLIPConfig, CLIPModel

    text = {key: value for key, value in _TINY.items() if key not in ("image_size", "patch_size")}
    limits = {"vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98}
    config = CLIPConfig(text_config={**text, **limits}, vision_config=_TINY, projection_dim=32)
    return CLIPModel(config).eval()


def hf_siglip_vision() -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**_TINY)).eval()


def hf_swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4],
                        window_size=4, num_labels=10)  # fmt: skip
    return SwinForImageClassification(config).eval()


def hf_convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, image_size=32,
                            num_labels=10)  # fmt: skip
    return ConvNextForImageClassification(config).eval()


def hf_segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 32, 64],
                             num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32,
                             num_labels=8)  # fmt: skip
    return randomize_batch_norm(SegformerForSemanticSegmentation(config).eval())


def hf_detr(encoder_layers: int = 1, decoder_layers: int = 2, **backbone: Any) -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    shape = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
    config = DetrConfig(
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=12,
        num_labels=7,
        use_timm_backbone=False,
        backbone=None,
        backbone_config=ResNetConfig(out_features=["stage4"], **{**shape, **backbone}),
    )
    return randomize_batch_norm(DetrForObjectDetection(config).eval())


def hf_cvt() -> nn.Module:
    from transformers import CvtConfig, CvtForImageClassification

    config = CvtConfig(embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3], num_labels=10)
    return randomize_batch_norm(CvtForImageClassification(config).eval())


IMAGE_SIZES = {
    vit: 32,
    vit_spelled_out: 32,
    setr: 32,
    hf_vit: 32,
    hf_vit_classifier: 32,
    hf_deit: 32,
    hf_dinov2: 32,
    hf_beit: 32,
    hf_clip_vision: 32,
    hf_siglip_vision: 32,
    hf_swin: 32,
    hf_convnext: 32,
    hf_segformer: 64,
    hf_detr: 64,
    hf_cvt: 64,
}
"""Each model of the zoo and the side of the image it takes."""
