"""transformers' vision models at their published sizes, for `gtco bench`.

Built from configs with seeded random weights: nothing is downloaded. They are in fp16, and on the
GPU if there is one. Each takes one image and gives a tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Model = tuple[nn.Module, tuple[Tensor, ...]]


class Outputs(nn.Module):
    """`model` with a plain tuple of the named tensors as its result."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        result = self.model(image)
        return tuple(result[name] for name in self.names)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Seeded values of a trained model's size for weights, biases, norms and their statistics.

    Activations keep their size through any depth, and no parameter is at a zero or one that a
    kernel could leave out unseen.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(tensor: Tensor, mean: float, std: float) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False):
            if tensor.dim() > 1:
                weighs = isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)) and name == "weight"
                normal(tensor, 0.0, tensor[0].numel() ** -0.5 if weighs else 0.1)
            elif name.endswith("bias"):
                normal(tensor, 0.0, 0.05)
            elif "Norm" in type(module).__name__:
                normal(tensor, 1.0, 0.1)
            else:  # the scale of a layer's residual branch
                normal(tensor, 0.2, 0.05)
        for name, tensor in module.named_buffers(recurse=False):
            if name == "running_mean":
                normal(tensor, 0.0, 0.1)
            elif name == "running_var":
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def build(
    model: nn.Module,
    *outputs: str,
    height: int = 224,
    width: int = 224,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Model:
    """`model` with random weights, and images.

    Args:
        model: takes an image.
        outputs: the names of the tensors of its result; none where it gives a tensor by itself.
        height, width: of an image, in pixels.
        batch: how many images.
        dtype: of weights and images.
    """
    module = Outputs(model, *outputs) if outputs else model
    return ready(module, (batch, 3, height, width), dtype=dtype)


def ready(model: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Model:
    """`model` with random weights in `dtype`, on the GPU if there is one, and random inputs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    randomize(model)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    module = model.eval().to(device, dtype)
    return module, tuple(each.to(device, dtype) for each in inputs)


def by_name(
    name: str, library: ModuleType, knows: Callable[[str], bool], make: Callable[[str, int], Model]
) -> Callable[[], Model]:
    """`make` of the model and the number of inputs that a name such as `vgg16_batch32` says.

    Raises:
        AttributeError: `library` does not know the model.
    """
    model, _, batch = name.partition("_batch")
    if not knows(model) or not (batch or "1").isdecimal():
        version = library.__version__
        raise AttributeError(f"{library.__name__} {version} has no model {name!r}")
    return partial(make, model, int(batch or 1))


def vit() -> Model:
    """ViT-B/16, the classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    return build(ViTForImageClassification(ViTConfig(num_labels=1000)), "logits")


def deit() -> Model:
    """DeiT-B/16, distilled."""
    from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

    return build(DeiTForImageClassificationWithTeacher(DeiTConfig(num_labels=1000)), "logits")


def beit() -> Model:
    """BEiT-B/16: a relative position bias in each layer, no absolute positions.

    transformers keeps the index of that bias on the CPU, so that eager copies it to the GPU in each
    call and no CUDA graph can hold it. Here it lies where the model does.
    """
    from transformers import BeitConfig, BeitForImageClassification
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    config = BeitConfig(use_relative_position_bias=True, num_labels=1000)
    module, image = build(BeitForImageClassification(config), "logits")
    for bias in module.modules():
        if isinstance(bias, BeitRelativePositionBias):
            index = bias.generate_relative_position_index(bias.window_size)
            bias.register_buffer("index", index.to(image[0].device), persistent=False)
            bias.generate_relative_position_index = lambda window_size, bias=bias: bias.index
    return module, image


def dinov2() -> Model:
    """DINOv2-B/14 at 224 pixels, whose positions were trained at 518."""
    from transformers import Dinov2Config, Dinov2Model

    return build(Dinov2Model(Dinov2Config(image_size=518)), "last_hidden_state", "pooler_output")


def dinov3() -> Model:
    """DINOv3-B/16: rotary positions, a class token and four registers."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_register_tokens=4
    )
    return build(DINOv3ViTModel(config), "last_hidden_state", "pooler_output")


def clip() -> Model:
    """CLIP's ViT-B/32 vision tower."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return build(CLIPVisionModel(CLIPVisionConfig()), "last_hidden_state", "pooler_output")


def clip_l14() -> Model:
    """CLIP's ViT-L/14 vision tower: 257 tokens."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        patch_size=14,
    )
    return build(CLIPVisionModel(config), "last_hidden_state", "pooler_output")


def siglip() -> Model:
    """SigLIP-B/16's vision tower, with its attention pooling."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return build(SiglipVisionModel(SiglipVisionConfig()), "last_hidden_state", "pooler_output")


def swin() -> Model:
    """Swin-T, windows of 7."""
    from transformers import SwinConfig, SwinForImageClassification

    return build(SwinForImageClassification(SwinConfig(num_labels=1000)), "logits")


def swinv2() -> Model:
    """Swin V2-T, windows of 8: attention of normalised queries and keys."""
    from transformers import Swinv2Config, Swinv2ForImageClassification

    config = Swinv2Config(image_size=256, window_size=8, num_labels=1000)
    return build(Swinv2ForImageClassification(config), "logits", height=256, width=256)


def hiera() -> Model:
    """Hiera-B: tokens of a window lie together, and queries are pooled between stages."""
    from transformers import HieraConfig, HieraForImageClassification

    return build(HieraForImageClassification(HieraConfig(num_labels=1000)), "logits")


def mobilevitv2() -> Model:
    """MobileViTv2-1.0: attention whose scores belong to pixels, on images folded from patches."""
    from transformers import MobileViTV2Config, MobileViTV2ForImageClassification

    model = MobileViTV2ForImageClassification(MobileViTV2Config(num_labels=1000))
    return build(model, "logits", height=256, width=256)


def videomae() -> Model:
    """VideoMAE-B: 1568 tokens of 16 frames."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    model = VideoMAEForVideoClassification(VideoMAEConfig(num_labels=400))
    return ready(Outputs(model, "logits"), (1, 16, 3, 224, 224))


def convnext() -> Model:
    """ConvNeXt-T."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return build(ConvNextForImageClassification(ConvNextConfig(num_labels=1000)), "logits")


def convnextv2() -> Model:
    """ConvNeXt V2-T: global response normalization in each block."""
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    return build(ConvNextV2ForImageClassification(ConvNextV2Config(num_labels=1000)), "logits")


def efficientnet() -> Model:
    """EfficientNet-B0: squeeze-and-excitation ahead of each projection."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=224,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        num_labels=1000,
    )
    return build(EfficientNetForImageClassification(config), "logits")


def regnet() -> Model:
    """RegNetY-4GF: convolutions in groups, and squeeze-and-excitation."""
    from transformers import RegNetConfig, RegNetForImageClassification

    return build(RegNetForImageClassification(RegNetConfig(num_labels=1000)), "logits")


def segformer() -> Model:
    """SegFormer-B0 with its ADE20K head, 512 by 512."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=150))
    return build(model, "logits", height=512, width=512)


def detr() -> Model:
    """DETR with transformers' own ResNet-50, 800 by 1066."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone: Any = ResNetConfig(out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=backbone, num_labels=91
    )
    model = DetrForObjectDetection(config)
    return build(model, "logits", "pred_boxes", height=800, width=1066)


def deformable_detr() -> Model:
    """Deformable DETR with transformers' own ResNet-50, four levels, 800 by 1066."""
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    backbone: Any = ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    config = DeformableDetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        disable_custom_kernels=True,
        num_labels=91,
    )
    model = DeformableDetrForObjectDetection(config)
    return build(model, "logits", "pred_boxes", height=800, width=1066)


def rt_detr() -> Model:
    """RT-DETR with its ResNet-50, 640 by 640."""
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    config = RTDetrConfig(anchor_image_size=None, num_labels=80)
    return build(RTDetrForObjectDetection(config), "logits", "pred_boxes", height=640, width=640)
