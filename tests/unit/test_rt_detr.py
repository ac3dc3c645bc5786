"""RT-DETR, which picks its queries by the scores of an encoder's pixels, runs in kernels alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.cost_model.knowledge import Knowledge
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.selection import select
from gtco.target import CARDS, TARGETS

H100 = TARGETS["sm_90a"]


class Detector(nn.Module):
    """A small one, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

        sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
        backbone = RTDetrResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])
        config = RTDetrConfig(
            backbone_config=backbone, anchor_image_size=None, num_labels=7, num_queries=30,
            d_model=32, encoder_hidden_dim=32, encoder_in_channels=[32, 32, 64],
            encoder_ffn_dim=64, encoder_attention_heads=4, encoder_layers=1,
            decoder_layers=2, decoder_ffn_dim=64, decoder_attention_heads=4,
            decoder_in_channels=[32, 32, 32],
        )  # fmt: skip
        self.model = RTDetrForObjectDetection(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.model(x)
        return result.logits, result.pred_boxes


def test_an_rt_detr_has_kernels_alone() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, x = Detector().eval().double(), torch.randn(2, 3, 128, 96, dtype=torch.float64)
    graph = run_pipeline(capture(model, (x,)).graph)
    with torch.no_grad():
        expected = model(x)
    for found, right in zip(interpret(graph, (x,)), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    half = gtco.capture(model.half(), (x.half(),))
    launches = select(gtco.fuse(half, target=H100), H100, Knowledge(CARDS["sm_90a"].name))
    assert not [launch.reason for launch in launches if launch.program is None]
    assert [launch.family for launch in launches].count("topk") == 1
