"""Models of transformers that answer for each patch or pixel of a large image: towers of SAM and
ViTDet, depth, super-resolution.

In fp16 with seeded random weights, and one random image; on the GPU if there is one.
"""

from __future__ import annotations

from experiments.models.transformers_zoo import Model, build


def sam() -> Model:
    """The image tower of SAM ViT-B, 1024 by 1024: windows of 14 and relative positions."""
    from transformers import SamVisionConfig, SamVisionModel

    return build(SamVisionModel(SamVisionConfig()), "last_hidden_state", height=1024, width=1024)


def vitdet() -> Model:
    """ViTDet-B, 1024 by 1024: SAM's tower ahead of its neck, its attention spelled out."""
    from transformers import VitDetConfig, VitDetModel

    config = VitDetConfig(
        image_size=1024,
        pretrain_image_size=224,
        window_block_indices=[0, 1, 3, 4, 6, 7, 9, 10],
        window_size=14,
        use_relative_position_embeddings=True,
    )
    return build(VitDetModel(config), "last_hidden_state", height=1024, width=1024)


def depth_anything() -> Model:
    """Depth Anything with a ViT-S of 1370 tokens, 518 by 518."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation

    model = DepthAnythingForDepthEstimation(DepthAnythingConfig())
    return build(model, "predicted_depth", height=518, width=518)


def dpt() -> Model:
    """DPT with a ViT-B, 384 by 384."""
    from transformers import DPTConfig, DPTForDepthEstimation

    return build(DPTForDepthEstimation(DPTConfig()), "predicted_depth", height=384, width=384)


def swin2sr() -> Model:
    """Swin2SR: an image of 64 by 64 twice as large. Heads of 30 elements."""
    from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

    model = Swin2SRForImageSuperResolution(Swin2SRConfig())
    return build(model, "reconstruction", height=64, width=64)
