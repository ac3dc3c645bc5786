"""Small relatives of the tables' models, by the same names, for rehearsals on a CPU.

As many kinds of layers and as few of each as there can be; fp16, random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.models import autogtco, convolutional
from experiments.models.transformers_zoo import Model, build, ready
from gtco.cli.demo import VisionTransformer, randomize


def vit(depth: int = 1, batch: int = 1) -> Model:
    model = VisionTransformer(patch=4, width=64, depth=depth, heads=4, image=16, classes=10)
    randomize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    return model.half().eval(), (torch.randn(batch, 3, 16, 16, generator=generator).half(),)


def vit_b16() -> Model:
    return vit()


def vit_l16() -> Model:
    return vit(2)


def vit_h14() -> Model:
    return vit(3)


def _detr(encoder_layers: int) -> Model:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone: Any = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = DetrConfig(
        encoder_layers=encoder_layers,
        decoder_layers=1,
        d_model=64,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=8,
        num_labels=7,
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
    )
    return build(DetrForObjectDetection(config), "logits", "pred_boxes", height=16, width=32)


def detr_e3() -> Model:
    return _detr(1)


def detr_e6() -> Model:
    return _detr(2)


def detr_e12() -> Model:
    return _detr(3)


_TOKENS, _QUERIES = (1, 24, 64), (1, 8, 64)


def detr_attention() -> Model:
    return ready(autogtco.Attention(64, 2), _TOKENS, _TOKENS, _TOKENS, _TOKENS)


def detr_encoder_layer() -> Model:
    return ready(autogtco.EncoderLayer(64, 96), _TOKENS, _TOKENS)


def detr_decoder_layer() -> Model:
    return ready(autogtco.DecoderLayer(64, 96), _QUERIES, _QUERIES, _TOKENS, _TOKENS)


def _setr(depth: int, head: Callable[..., nn.Module]) -> Model:
    model = autogtco.Setr(64, depth, 2, 96, partial(head, inner=16), image=32)
    return build(model, height=32, width=32)


def setr_naive_base() -> Model:
    return _setr(1, autogtco.Naive)


def setr_naive() -> Model:
    return _setr(2, autogtco.Naive)


def setr_pup() -> Model:
    return _setr(1, autogtco.Progressive)


def _cvt(depth: list[int]) -> Model:
    from transformers import CvtConfig, CvtForImageClassification

    config = CvtConfig(
        depth=depth,
        embed_dim=[16, 32, 64],
        num_heads=[1, 2, 4],
        drop_path_rate=[0.0] * 3,
        num_labels=10,
    )
    return build(CvtForImageClassification(config), "logits", height=32, width=32)


def cvt_13() -> Model:
    return _cvt([1, 2, 3])


def cvt_21() -> Model:
    return _cvt([1, 2, 4])


def cvt_w24() -> Model:
    return _cvt([2, 2, 3])


def se_resnet9() -> Model:
    return convolutional.se_resnet(3, width=16, batch=1, side=32)


def se_resnet9_grey() -> Model:
    return convolutional.se_resnet(1, width=16, batch=1, side=32)


def _resnet(batch: int) -> Model:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_labels=10)
    return build(ResNetForImageClassification(config), "logits", height=32, width=32, batch=batch)


def resnet50() -> Model:
    return _resnet(1)


def resnet50_batch32() -> Model:
    return _resnet(2)


def resnet50_batch128() -> Model:
    return _resnet(3)


def convnext_t() -> Model:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=10)
    return build(ConvNextForImageClassification(config), "logits", height=32, width=32)


def mobilenet_v2() -> Model:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.25, num_labels=10)
    return build(MobileNetV2ForImageClassification(config), "logits", height=32, width=32)


def unet() -> Model:
    return build(convolutional.UNet(8), height=16, width=16)


def diffusion_block() -> Model:
    return ready(convolutional.ResidualBlock(64, 2), (1, 64, 6, 6))
