"""ViT-S/16, B/16, L/16 and H/14 for `gtco bench experiments.models.vit:vit_b16`.

timm's models with random weights, or gtco's own ViT of the same layout where timm is missing. They
are on the GPU if there is one. The plain names are fp16 at batch 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gtco.cli.demo import VisionTransformer, randomize

SIZES = {
    "vit_small_patch16_224": {"patch": 16, "width": 384, "depth": 12, "heads": 6},
    "vit_base_patch16_224": {"patch": 16, "width": 768, "depth": 12, "heads": 12},
    "vit_base_patch16_384": {"image": 384, "patch": 16, "width": 768, "depth": 12, "heads": 12},
    "vit_large_patch16_224": {"patch": 16, "width": 1024, "depth": 24, "heads": 16},
    "vit_huge_patch14_224": {"patch": 14, "width": 1280, "depth": 32, "heads": 16, "classes": 0},
}
"""timm's largest comes without a head."""

Model = tuple[nn.Module, tuple[Tensor, ...]]


def build(name: str, dtype: torch.dtype = torch.float16, batch: int = 1) -> Model:
    """timm's model `name` in eval mode, with seeded random weights, and one random image batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # which draws its first weights faster than a CPU does
        try:
            import timm
        except ModuleNotFoundError:
            model: nn.Module = VisionTransformer(**SIZES[name])
        else:
            model = timm.create_model(name, pretrained=False)
    randomize(model, seed=0)
    side = int(name.rpartition("_")[2])
    image = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))
    return model.eval().to(dtype), (image.to(device, dtype),)


def vit_s16() -> Model:
    return build("vit_small_patch16_224")


def vit_b16() -> Model:
    return build("vit_base_patch16_224")


def vit_l16() -> Model:
    return build("vit_large_patch16_224")


def vit_h14() -> Model:
    return build("vit_huge_patch14_224")


def vit_b16_batch2() -> Model:
    return build("vit_base_patch16_224", batch=2)


def vit_b16_batch4() -> Model:
    return build("vit_base_patch16_224", batch=4)


def vit_b16_batch8() -> Model:
    return build("vit_base_patch16_224", batch=8)


def vit_b16_batch16() -> Model:
    return build("vit_base_patch16_224", batch=16)


def vit_b16_batch32() -> Model:
    return build("vit_base_patch16_224", batch=32)


def vit_b16_384() -> Model:
    """Of 384 x 384 pixels: 577 tokens."""
    return build("vit_base_patch16_384")


def vit_l16_batch8() -> Model:
    return build("vit_large_patch16_224", batch=8)


def vit_h14_batch8() -> Model:
    return build("vit_huge_patch14_224", batch=8)


def vit_b16_bf16() -> Model:
    return build("vit_base_patch16_224", torch.bfloat16)


def vit_b16_fp32() -> Model:
    """Also the model for `--precision tf32`."""
    return build("vit_base_patch16_224", torch.float32)
