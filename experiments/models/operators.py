"""Single operators by their size, and ViT-B/16 with the weights of a Hugging Face state dict.

On the GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, Outputs, randomize


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class MatmulGelu(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(x @ y)


class Matmul(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


class Patches(nn.Module):
    """16 x 16 pixels to one token each."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, 16, 16)

    def forward(self, image: Tensor) -> Tensor:
        tokens: Tensor = self.proj(image).flatten(2).transpose(1, 2)
        return tokens


def _ready(module: nn.Module, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Model:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    randomize(module)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return module.eval().to(device, dtype), tuple(inputs)


def add(size: int) -> Model:
    """fp16, `size` squared."""
    return _ready(Add(), torch.float16, (size, size), (size, size))


def layer_norm(rows: int) -> Model:
    """fp32, `rows` of 768."""
    return _ready(nn.LayerNorm(768), torch.float32, (rows, 768))


def matmul_gelu(size: int) -> Model:
    """fp16, all three extents `size`."""
    return _ready(MatmulGelu(), torch.float16, (size, size), (size, size))


def batched_matmul(size: int) -> Model:
    """fp16, four of them, all three extents `size`."""
    return _ready(Matmul(), torch.float16, (4, size, size), (4, size, size))


def softmax(columns: int, rows: int = 4096) -> Model:
    """fp16, 4 x `rows` of `columns`."""
    return _ready(nn.Softmax(-1), torch.float16, (4, rows, columns))


def patches(batch: int, side: int = 224) -> Model:
    """fp16, `batch` images."""
    return _ready(Patches(), torch.float16, (batch, 3, side, side))


# -- a Hugging Face state dict ---------------------------------------------------------------------


def random_state_dict(**config: Any) -> dict[str, Tensor]:
    """A state dict as `ViTModel.from_pretrained("google/vit-base-patch16-224").state_dict()` is, of
    random numbers."""
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(**config))
    randomize(model)
    return dict(model.state_dict())


def vit_of(state: Mapping[str, Tensor], batch: int, **config: Any) -> Model:
    """transformers' `ViTModel` in fp16 with these weights, and random images.

    Args:
        state: of a `ViTModel` of the same configuration, by its names of today or those of
            published checkpoints, which transformers knows.
        batch: images.
        config: of `ViTConfig`; by default ViT-B/16.

    Raises:
        ValueError: weights are missing.
    """
    from transformers import ViTConfig, ViTModel

    settings = ViTConfig(**config)
    model, found = ViTModel.from_pretrained(
        None, config=settings, state_dict=dict(state), output_loading_info=True
    )
    if found["missing_keys"]:
        raise ValueError(f"the state dict has no {', '.join(sorted(found['missing_keys']))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (batch, 3, settings.image_size, settings.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    module = Outputs(model, "last_hidden_state", "pooler_output").eval()
    return module.to(device, torch.float16), (images.to(device, torch.float16),)


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 4,
}


def hugging_face_vit(batch: int) -> Model:
    """ViT-B/16 at a batch."""
    return vit_of(random_state_dict(), batch)


def small_hugging_face_vit(batch: int) -> Model:
    return vit_of(random_state_dict(**SMALL), batch, **SMALL)
