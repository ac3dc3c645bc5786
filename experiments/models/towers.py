"""Towers of vision language models, which read patches and the grids that they lie in:
`gtco bench experiments.models.towers:qwen3_vl`.

From transformers' configurations, in fp16 with seeded random weights; on the GPU if there is one.
One image of 448 x 672 pixels. A tower's shapes depend on what the grids say, so that they are
written out in the forward of a module around it, as people do who compile one for a fixed size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready
from experiments.transformers_breadth import tensors_of

PIXELS = 448, 672


class Gridded(nn.Module):
    """`model` of patches [patches, elements] of one image, a tuple of tensors as its result.

    Args:
        model: takes patches, and [1, 3] with the frames, rows and columns of them.
        rows, columns: of patches.
    """

    def __init__(self, model: nn.Module, rows: int, columns: int) -> None:
        super().__init__()
        self.model = model
        self.rows, self.columns = rows, columns

    def forward(self, patches: Tensor) -> tuple[Tensor, ...]:
        grid = torch.tensor([[1, self.rows, self.columns]], device=patches.device)
        return tensors_of(self.model(patches, grid))


def _tower(model: type[nn.Module], config: Any) -> Model:
    rows, columns = (side // config.patch_size for side in PIXELS)
    elements = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return ready(Gridded(model(config), rows, columns), (rows * columns, elements))


def qwen2_5_vl() -> Model:
    """Qwen 2.5 VL's, of 28 layers of windows and four of the whole image, as of its 7 B model."""
    from transformers import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    config = Qwen2_5_VLVisionConfig(hidden_size=1280, intermediate_size=3420)
    return _tower(Qwen2_5_VisionTransformerPretrainedModel, config)


def qwen3_vl() -> Model:
    """Qwen 3 VL's."""
    from transformers import Qwen3VLVisionConfig, Qwen3VLVisionModel

    return _tower(Qwen3VLVisionModel, Qwen3VLVisionConfig())


def glm4v() -> Model:
    """GLM-4.1V's."""
    from transformers import Glm4vVisionConfig, Glm4vVisionModel

    return _tower(Glm4vVisionModel, Glm4vVisionConfig())
