"""How much of transformers' vision models gtco takes: classifiers, detectors, segmenters, depth,
video and the towers of multimodal models, one small member of each family.

    python -m experiments.transformers_breadth OUT.json [FAMILY...]

Sizes are the configurations' own but for depth, of which two layers or a few tell all.
`experiments.breadth` says what is asked of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.breadth import run

TWO = {"num_hidden_layers": 2}
DETR = {
    "use_timm_backbone": False, "backbone": None, "encoder_layers": 2, "decoder_layers": 2,
    "backbone_config": ("ResNetConfig", {"out_features": ["stage4"]}),
}  # fmt: skip
LEVELS = {"out_features": ["stage2", "stage3", "stage4"]}
SWIN = ("SwinConfig", {"out_features": ["stage1", "stage2", "stage3", "stage4"]})
SMALL = {"hidden_size": 384, "num_attention_heads": 6}
TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
BEIT = ("BeitConfig", {
    **TINY, "num_hidden_layers": 4, "image_size": 384, "reshape_hidden_states": False,
    "out_features": ["stage1", "stage2", "stage3", "stage4"], "use_relative_position_bias": True,
})  # fmt: skip
SAM = {**SMALL, "num_hidden_layers": 3, "global_attn_indexes": [1]}

Family = tuple[str, str, dict[str, Any], tuple[int, ...]]
"""A model's class, its configuration's, what differs from its defaults, and the input's shape. A
pair of a configuration's class and its arguments among them is that configuration."""


def _image(*size: int) -> tuple[int, ...]:
    return (1, 3, *(size or (224, 224)))


FAMILIES: Mapping[str, Family] = {
    # Classifiers and features
    "vit": ("ViTForImageClassification", "ViTConfig", TWO, _image()),
    "deit": ("DeiTForImageClassification", "DeiTConfig", TWO, _image()),
    "beit": ("BeitForImageClassification", "BeitConfig",
             {**TWO, "use_relative_position_bias": True}, _image()),
    "data2vec": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", TWO, _image()),
    "vit_msn": ("ViTMSNForImageClassification", "ViTMSNConfig", TWO, _image()),
    "ijepa": ("IJepaModel", "IJepaConfig", TWO, _image()),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config",
               {**TWO, "image_size": 224}, _image()),
    "dinov2_registers": ("Dinov2WithRegistersForImageClassification",
                         "Dinov2WithRegistersConfig", {**TWO, "image_size": 224}, _image()),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", TWO, _image()),
    "dinov3_convnext": ("DINOv3ConvNextModel", "DINOv3ConvNextConfig", {}, _image()),
    "hiera": ("HieraForImageClassification", "HieraConfig", {}, _image()),
    "swin": ("SwinForImageClassification", "SwinConfig", {}, _image()),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config",
               {"image_size": 256, "window_size": 8}, _image(256, 256)),
    "donut_swin": ("DonutSwinModel", "DonutSwinConfig", {}, _image()),
    "swiftformer": ("SwiftFormerForImageClassification", "SwiftFormerConfig", {}, _image()),
    "focalnet": ("FocalNetForImageClassification", "FocalNetConfig", {}, _image()),
    "pvt": ("PvtForImageClassification", "PvtConfig", {}, _image()),
    "pvt_v2": ("PvtV2ForImageClassification", "PvtV2Config", {}, _image()),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig", {}, _image()),
    "mobilevit": ("MobileViTForImageClassification", "MobileViTConfig", {}, _image(256, 256)),
    "mobilevitv2": ("MobileViTV2ForImageClassification", "MobileViTV2Config", {},
                    _image(256, 256)),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", "MobileNetV1Config", {}, _image()),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", {}, _image()),
    "efficientnet": ("EfficientNetForImageClassification", "EfficientNetConfig",
                     {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
                     _image()),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {}, _image()),
    "regnet": ("RegNetForImageClassification", "RegNetConfig", {}, _image()),
    "bit": ("BitForImageClassification", "BitConfig", {}, _image()),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {}, _image()),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", {}, _image()),
    "levit": ("LevitForImageClassification", "LevitConfig", {}, _image()),
    "cvt": ("CvtForImageClassification", "CvtConfig", {}, _image()),
    "hgnet_v2": ("HGNetV2ForImageClassification", "HGNetV2Config", {}, _image()),
    "textnet": ("TextNetForImageClassification", "TextNetConfig", {}, _image()),
    "pp_lcnet": ("PPLCNetForImageClassification", "PPLCNetConfig", {}, _image()),
    "xclip": ("XCLIPVisionModel", "XCLIPVisionConfig", TWO, (8, 3, 224, 224)),
    "pixio": ("PixioModel", "PixioConfig", TWO, _image(256, 256)),
    "oneformer_swin": ("MaskFormerSwinModel", "MaskFormerSwinConfig", {}, _image()),
    "omdet_swin": ("SwinBackbone", "SwinConfig", {"out_features": ["stage2", "stage3", "stage4"]},
                   _image()),
    "pp_lcnet_v3": ("PPLCNetV3Backbone", "PPLCNetV3Config", {}, _image()),
    "pp_lcnet_v4": ("PPLCNetV4Backbone", "PPLCNetV4Config", {}, _image()),
    # Segmentation, depth, matting, restoration, keypoints
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", {}, _image(512, 512)),
    "beit_segmentation": ("BeitForSemanticSegmentation", "BeitConfig",
                          {**TINY, "out_indices": [3, 5, 7, 11]}, _image()),
    "mobilevit_segmentation": ("MobileViTForSemanticSegmentation", "MobileViTConfig", {},
                               _image(512, 512)),
    "mobilenet_segmentation": ("MobileNetV2ForSemanticSegmentation", "MobileNetV2Config", {},
                               _image(512, 512)),
    "dpt": ("DPTForDepthEstimation", "DPTConfig",
            {**TINY, "num_hidden_layers": 12, "backbone_out_indices": [2, 5, 8, 11]},
            _image(384, 384)),
    "glpn": ("GLPNForDepthEstimation", "GLPNConfig", {}, _image(480, 640)),
    "maskformer": ("MaskFormerForInstanceSegmentation", "MaskFormerConfig", {}, _image(384, 384)),
    "mask2former": ("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig", {},
                    _image(384, 384)),
    "eomt": ("EomtForUniversalSegmentation", "EomtConfig",
             {**SMALL, "num_hidden_layers": 6, "num_blocks": 2, "image_size": 256},
             _image(256, 256)),
    "swin2sr": ("Swin2SRForImageSuperResolution", "Swin2SRConfig",
                {"depths": [2, 2], "num_heads": [6, 6]}, _image(64, 64)),
    "superpoint": ("SuperPointForKeypointDetection", "SuperPointConfig", {}, _image(240, 320)),
    "vitpose": ("VitPoseForPoseEstimation", "VitPoseConfig",
                {"backbone_config": ("VitPoseBackboneConfig",
                                     {**TWO, "image_size": [256, 192], "out_indices": [2]})},
                _image(256, 192)),
    "vitdet": ("VitDetModel", "VitDetConfig",
               {**TWO, "window_block_indices": [0], "window_size": 14,
                "use_relative_position_embeddings": True}, _image()),
    "sam": ("SamVisionModel", "SamVisionConfig", SAM, _image(1024, 1024)),
    "sam_hq": ("SamHQVisionModel", "SamHQVisionConfig", SAM, _image(1024, 1024)),
    "sam2": ("Sam2VisionModel", "Sam2VisionConfig", {}, _image(512, 512)),
    "sam3": ("Sam3VisionModel", "Sam3VisionConfig",
             {"backbone_config": ("Sam3ViTConfig", {**TWO, "global_attn_indexes": [1]})},
             _image(1008, 1008)),
    "upernet": ("UperNetForSemanticSegmentation", "UperNetConfig", {"backbone_config": SWIN},
                _image(512, 512)),
    "zoedepth": ("ZoeDepthForDepthEstimation", "ZoeDepthConfig", {"backbone_config": BEIT},
                 _image(384, 384)),
    "depth_anything": ("DepthAnythingForDepthEstimation", "DepthAnythingConfig", {},
                       _image(518, 518)),
    "prompt_depth": ("PromptDepthAnythingForDepthEstimation", "PromptDepthAnythingConfig", {},
                     _image(518, 518)),
    "chmv2": ("CHMv2ForDepthEstimation", "CHMv2Config", {}, _image(416, 416)),
    "tipsv2_dpt": ("Tipsv2DptForDepthEstimation", "Tipsv2DptConfig", {}, _image()),
    "sapiens2": ("Sapiens2Model", "Sapiens2Config", {**TWO}, _image(512, 384)),
    "efficientloftr": ("EfficientLoFTRModel", "EfficientLoFTRConfig", {}, (1, 2, 3, 480, 640)),
    # Detection
    "detr": ("DetrForObjectDetection", "DetrConfig", DETR, _image(480, 640)),
    "table_transformer": ("TableTransformerForObjectDetection", "TableTransformerConfig", DETR,
                          _image(480, 640)),
    "conditional_detr": ("ConditionalDetrForObjectDetection", "ConditionalDetrConfig", DETR,
                         _image(480, 640)),
    "dab_detr": ("DabDetrForObjectDetection", "DabDetrConfig", DETR, _image(480, 640)),
    "deformable_detr": ("DeformableDetrForObjectDetection", "DeformableDetrConfig",
                        {**DETR, "backbone_config": ("ResNetConfig", LEVELS),
                         "disable_custom_kernels": True}, _image(480, 640)),
    "yolos": ("YolosForObjectDetection", "YolosConfig",
              {**TINY, "num_hidden_layers": 4, "image_size": [512, 512]}, _image(512, 512)),
    "rt_detr": ("RTDetrForObjectDetection", "RTDetrConfig", {"anchor_image_size": None},
                _image(640, 640)),
    "rt_detr_v2": ("RTDetrV2ForObjectDetection", "RTDetrV2Config", {}, _image(640, 640)),
    "d_fine": ("DFineForObjectDetection", "DFineConfig", {}, _image(640, 640)),
    "deimv2": ("Deimv2ForObjectDetection", "Deimv2Config", {}, _image(640, 640)),
    "pp_doclayout": ("PPDocLayoutV4ForObjectDetection", "PPDocLayoutV4Config", {},
                     _image(800, 800)),
    "rf_detr": ("RfDetrForObjectDetection", "RfDetrConfig", {}, _image(560, 560)),
    "conditional_detr_dc5": ("ConditionalDetrForObjectDetection", "ConditionalDetrConfig",
                             {**DETR, "dilation": True}, _image(480, 640)),
    "pp_ocrv5_mobile_det": ("PPOCRV5MobileDetForObjectDetection", "PPOCRV5MobileDetConfig", {},
                            _image(480, 640)),
    "pp_ocrv5_mobile_rec": ("PPOCRV5MobileRecForTextRecognition", "PPOCRV5MobileRecConfig", {},
                            _image(96, 320)),
    "pp_ocrv6_small_rec": ("PPOCRV6SmallRecForTextRecognition", "PPOCRV6SmallRecConfig", {},
                           _image(48, 320)),
    # Towers of multimodal models
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", TWO, _image()),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", TWO, _image()),
    "aimv2": ("Aimv2VisionModel", "Aimv2VisionConfig", TWO, _image()),
    "mlcd": ("MLCDVisionModel", "MLCDVisionConfig", TWO, _image(336, 336)),
    "altclip": ("AltCLIPVisionModel", "AltCLIPVisionConfig", TWO, _image()),
    "blip": ("BlipVisionModel", "BlipVisionConfig", {**TWO, "image_size": 384},
             _image(384, 384)),
    "groupvit": ("GroupViTVisionModel", "GroupViTVisionConfig", {}, _image()),
    "owlvit": ("OwlViTVisionModel", "OwlViTVisionConfig", TWO, _image(768, 768)),
    "owlv2": ("Owlv2VisionModel", "Owlv2VisionConfig", TWO, _image(768, 768)),
    "radio": ("RadioModel", "RadioConfig", TWO, _image(512, 512)),
    "pixtral": ("PixtralVisionModel", "PixtralVisionConfig", TWO, _image(1024, 1024)),
    "align": ("AlignVisionModel", "AlignVisionConfig", {}, _image(600, 600)),
    "internvl": ("InternVLVisionModel", "InternVLVisionConfig", TWO, _image(448, 448)),
    "blip2": ("Blip2VisionModel", "Blip2VisionConfig", TWO, _image()),
    "chinese_clip": ("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", TWO, _image()),
    "clipseg": ("CLIPSegVisionModel", "CLIPSegVisionConfig", TWO, _image()),
    "metaclip_2": ("MetaClip2VisionModel", "MetaClip2VisionConfig", TWO, _image()),
    "git": ("GitVisionModel", "GitVisionConfig", TWO, _image()),
    "instructblip": ("InstructBlipVisionModel", "InstructBlipVisionConfig", TWO, _image()),
    "janus": ("JanusVisionModel", "JanusVisionConfig", {**TWO, "image_size": 384},
              _image(384, 384)),
    "tipsv2": ("Tipsv2VisionModel", "Tipsv2VisionConfig", TWO, _image()),
    "florence2": ("Florence2VisionBackbone", "Florence2VisionConfig", {"depths": [1, 1, 1, 1]},
                  _image(768, 768)),
    # Video
    "videomae": ("VideoMAEForVideoClassification", "VideoMAEConfig", TWO, (1, 16, 3, 224, 224)),
    "timesformer": ("TimesformerForVideoClassification", "TimesformerConfig", TWO,
                    (1, 8, 3, 224, 224)),
    "vivit": ("VivitForVideoClassification", "VivitConfig", TWO, (1, 32, 3, 224, 224)),
    "vjepa2": ("VJEPA2Model", "VJEPA2Config",
               {**TWO, **SMALL, "pred_num_hidden_layers": 2, "frames_per_clip": 8},
               (1, 8, 3, 256, 256)),
    "videoprism": ("VideoPrismVisionModel", "VideoPrismVisionConfig",
                   {"num_spatial_layers": 2, "num_temporal_layers": 2}, (1, 16, 3, 288, 288)),
}  # fmt: skip


class Tensors(nn.Module):
    """`model` with all tensors of its result, in order, as a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tensors_of(self.model(image))


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """All tensors of what a model of transformers gives, in order."""
    found: list[Tensor] = []
    pending = [result if isinstance(result, Tensor) else result.to_tuple()]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            pending.extend(reversed(item))
    return tuple(found)


def _config(name: str, changes: Mapping[str, Any]) -> Any:
    import transformers

    made = {
        key: _config(*value) if isinstance(value, tuple) else value
        for key, value in changes.items()
    }
    return getattr(transformers, name)(**made)


def make(family: Family) -> nn.Module:
    """The model, with the weights that transformers draws; a tuple of tensors is its result."""
    import transformers

    model, config, changes, _ = family
    return Tensors(getattr(transformers, model)(_config(config, changes)))


def _build(name: str) -> tuple[nn.Module, Tensor]:
    return make(FAMILIES[name]), torch.randn(FAMILIES[name][-1])


if __name__ == "__main__":
    run(
        "transformers_breadth",
        __doc__,
        {family: (model, partial(_build, family)) for family, (model, *_) in FAMILIES.items()},
    )
