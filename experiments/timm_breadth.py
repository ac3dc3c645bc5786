"""How much of timm gtco takes: a small member of each of 41 transformer-like families.

    python -m experiments.timm_breadth OUT.json [FAMILY...]

`experiments.breadth` says what is asked of each.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from experiments.breadth import run

FAMILIES = {
    "beit": "beit_base_patch16_224",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convnext": "convnext_atto",
    "crossvit": "crossvit_tiny_240",
    "davit": "davit_tiny",
    "deit": "deit_tiny_distilled_patch16_224",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "eva02_tiny_patch14_224",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "hiera": "hiera_tiny_224",
    "levit": "levit_128s",
    "maxxvit": "maxvit_tiny_tf_224",
    "metaformer": "poolformer_s12",
    "mlp_mixer": "mixer_s32_224",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "pit": "pit_ti_224",
    "pvt_v2": "pvt_v2_b0",
    "repvit": "repvit_m0_9",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "twins": "twins_pcpvt_small",
    "visformer": "visformer_tiny",
    "vision_transformer": "vit_tiny_patch16_224",
    "vision_transformer_relpos": "vit_relpos_small_patch16_224",
    "volo": "volo_d1_224",
    "xcit": "xcit_nano_12_p16_224",
}
"""A timm module and the model of it that is tried."""


def _build(name: str) -> tuple[nn.Module, Tensor]:
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, torch.randn(1, *model.pretrained_cfg["input_size"])


if __name__ == "__main__":
    families = {family: (name, partial(_build, name)) for family, name in FAMILIES.items()}
    run("timm_breadth", __doc__, families)
