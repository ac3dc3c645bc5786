"""The models of the tables: as many parameters as published, and sane values in fp16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gtco
from experiments.models import (
    autogtco,
    convolutional,
    diffusion,
    dit,
    floats,
    heads,
    images,
    recurrent,
    spectral,
    volumes,
    yolo,
)
from experiments.models.transformers_zoo import randomize
from gtco.ir.interpreter import interpret

PARAMETERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "DETR-E3": (lambda: autogtco.detr_module(3), 37_579_552),
    "DETR-E6": (lambda: autogtco.detr_module(6), 41_524_768),
    "DETR-E12": (lambda: autogtco.detr_module(12), 49_415_200),
    "SETR-Naive-Base": (lambda: autogtco.Setr(*autogtco.BASE, autogtco.Naive), 86_324_886),
    "SETR-Naive": (lambda: autogtco.Setr(*autogtco.LARGE, autogtco.Naive), 303_990_166),
    "SETR-PUP": (lambda: autogtco.Setr(*autogtco.LARGE, autogtco.Progressive), 307_859_094),
    "CvT-13": (lambda: convolutional.cvt_module("13"), 19_997_480),
    "CvT-21": (lambda: convolutional.cvt_module("21"), 31_622_696),
    "CvT-W24": (lambda: convolutional.cvt_module("w24"), 277_196_392),
    "SE-ResNet9": (convolutional.SEResNet9, 4_938_256),
    "ResNet-50": (convolutional.resnet50_module, 25_557_032),
    "R3D-18": (lambda: volumes.ClipResNet(factored=False), 33_371_472),
    "X3D-S": (volumes.X3D, 3_794_274),
    "the decoder of Stable Diffusion": (diffusion.Decoder, 49_490_199),
    "the U-Net of Stable Diffusion 1": (diffusion.Denoiser, 859_520_964),
    "DiT-XL/2": (lambda: dit.DiT(32), 675_129_632),
    "Stable Diffusion 3's transformer, of 512 pixels": (lambda: dit.MMDiT(64), 2_029_900_864),
    "YOLOv8-s, without what its 16 distances are": (yolo.YOLO, 11_166_544),
    "CycleGAN's generator": (images.Translator, 11_378_179),
    "SRResNet": (images.SRResNet, 1_547_350),
    "ESRGAN's generator": (images.RRDBNet, 16_697_987),
    "NAFNet": (images.NAFNet, 29_159_715),
    "DeepLabV3's head": (heads.AtrousPyramid, 16_130_837),
    "a feature pyramid": (heads.FeaturePyramid, 3_344_384),
    "RetinaNet's heads": (heads.DetectionHead, 6_691_415),
    "a U-Net's step up": (heads.UpBlock, 2_360_320),
    "CenterNet's head": (heads.KeypointHead, 3_260_389),
    "SegNet": (heads.SegNet, 29_442_008),
    "CRNN": (recurrent.CRNN, 8_331_301),
    "GFNet-S": (spectral.GlobalFilterNet, 24_869_608),
    "LaMa's generator": (spectral.Inpainter, 27_048_835),
    "R(2+1)D-18": (lambda: volumes.ClipResNet(factored=True), 31_505_325),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    make, count = PARAMETERS[name]
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == count


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "SETR-Naive": (
        lambda: autogtco.Setr(64, 2, 2, 96, autogtco.Naive, image=48),
        ((1, 3, 48, 48),),
    ),
    "SETR-PUP": (
        lambda: autogtco.Setr(64, 1, 2, 96, autogtco.Progressive, image=48),
        ((1, 3, 48, 48),),
    ),
    "SE-ResNet9": (lambda: convolutional.SEResNet9(1), ((3, 1, 64, 64),)),
    "U-Net": (lambda: convolutional.UNet(8), ((1, 3, 24, 40),)),
    "a latent's noise": (
        lambda: diffusion.Denoiser((32, 64), 2, 24),
        ((2, 4, 8, 6), (2,), (2, 7, 24)),
    ),
    "diffusion block": (lambda: convolutional.ResidualBlock(64, 2), ((2, 64, 6, 5),)),
    "a translator": (lambda: images.Translator(1, 8), ((2, 3, 16, 20),)),
    "four times as large": (lambda: images.SRResNet(1, 8), ((1, 3, 7, 9),)),
    "dense blocks": (lambda: images.RRDBNet(1, 8, 4), ((2, 3, 6, 5),)),
    "a detector": (lambda: yolo.YOLO((8, 16, 24, 32, 40), 1, 5), ((2, 3, 64, 96),)),
    "dilations": (lambda: heads.AtrousPyramid(24, 8, 5), ((2, 24, 6, 7),)),
    "places of maxima": (lambda: heads.SegNet((8, 16), (1, 2), 5), ((1, 3, 12, 20),)),
    "global filters": (lambda: spectral.GlobalFilterNet(16, 2, 7, 96), ((2, 3, 96, 96),)),
    "inpainting": (lambda: spectral.Inpainter(1, 8), ((1, 4, 48, 40),)),
    "a step up": (lambda: heads.UpBlock(24, 16), ((2, 24, 5, 4), (2, 16, 10, 8))),
    "restoration": (lambda: images.NAFNet(8, (1, 1), 1, (1, 1)), ((2, 3, 12, 16),)),
    "encoder layer": (lambda: autogtco.EncoderLayer(64, 96), ((1, 21, 64),) * 2),
    "decoder layer": (
        lambda: autogtco.DecoderLayer(64, 96),
        ((1, 7, 64), (1, 7, 64), (1, 21, 64), (1, 21, 64)),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_are_captured_and_fused_right(name: str) -> None:
    make, shapes = SMALL[name]
    torch.manual_seed(0)
    model = make().eval()
    randomize(model)
    args = tuple(torch.randn(shape) for shape in shapes)
    fused = gtco.fuse(gtco.capture(model, args))
    (result,) = interpret(fused.graph, args)
    with torch.no_grad():
        expected = model(*args)
    assert expected.std() > 1e-2 and expected.abs().max() < 1e4
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def test_a_model_of_any_family_in_fp32() -> None:
    module, args = floats.se_resnet9_grey()
    assert {each.dtype for each in (*module.parameters(), *args)} == {torch.float32}


def test_what_is_no_model_has_no_fp32() -> None:
    with pytest.raises(AttributeError, match="no model 'resnet51' to have in fp32"):
        floats.resnet51  # noqa: B018
