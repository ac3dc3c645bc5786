"""torchvision's models by their names: `gtco bench experiments.models.torchvision_zoo:raft_large`.

In fp16 with seeded random weights and one random input, or as many as the name ends in
(`vgg16_batch32`); on the GPU if there is one. Segmenters give their output alone, detectors what
their heads say of each location: how many boxes are left after that varies with the image. Optical
flow takes two frames, gives each of its twelve estimates, and is in fp32: its coordinates are,
whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torchvision
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, by_name, ready

SIZES: Mapping[str, tuple[int, ...]] = {
    "inception_v3": (3, 299, 299),
    "swin_v2_t": (3, 256, 256),
    "efficientnet_v2_s": (3, 384, 384),
    "mc3_18": (3, 16, 112, 112),
    "r3d_18": (3, 16, 112, 112),
    "r2plus1d_18": (3, 16, 112, 112),
    "s3d": (3, 16, 224, 224),
    "mvit_v1_b": (3, 16, 224, 224),
    "mvit_v2_s": (3, 16, 224, 224),
    "swin3d_t": (3, 16, 224, 224),
    "raft_small": (3, 440, 1024),
    "raft_large": (3, 440, 1024),
    "ssd300_vgg16": (3, 300, 300),
    "ssdlite320_mobilenet_v3_large": (3, 320, 320),
    "retinanet_resnet50_fpn": (3, 800, 1344),
    "retinanet_resnet50_fpn_v2": (3, 800, 1344),
    "fcos_resnet50_fpn": (3, 800, 1344),
}
"""What a model takes where that is no image of 224 pixels; segmenters take 520."""


class _Segmented(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.model(image)["out"]
        return result


class _Detected(nn.Module):
    """The maps of a detector's backbone through its heads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.head(list(self.backbone(image).values())).values())


def __getattr__(name: str) -> Callable[[], Model]:
    return by_name(name, torchvision, torchvision.models.list_models().__contains__, _build)


def _build(name: str, batch: int) -> Model:
    kind = torchvision.models.get_model_builder(name).__module__
    whole = {"weights_backbone": None} if "segmentation" in kind or "detection" in kind else {}
    module = torchvision.models.get_model(name, weights=None, **whole)
    size = SIZES.get(name, (3, 520, 520) if "segmentation" in kind else (3, 224, 224))
    if "segmentation" in kind:
        module = _Segmented(module)
    elif "detection" in kind:
        module = _Detected(module)
    flows = "optical_flow" in kind
    model, (image,) = ready(module, (batch, *size), dtype=torch.float32 if flows else torch.float16)
    return model, (image, image.roll(3, -1)) if flows else (image,)
