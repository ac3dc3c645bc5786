"""`print(compiled.graph)` folds the layers of models of several kinds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import SwinConfig, SwinForImageClassification

import gtco
from gtco.runtime.module import CompiledModule


class Encoder(nn.Module):
    """Attention and a perceptron, as each layer of a ViT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(1, 16, 3, 2, 32).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(1, 16, 64))
        return x + self.mlp(self.norms[1](x))


class Bottleneck(nn.Module):
    """As in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.window = nn.Conv2d(64, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.norm = nn.Conv2d(16, 64, 1), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm(self.up(self.window(self.down(x).relu()).relu()))).relu()


def swin() -> nn.Module:
    torch.manual_seed(0)
    return SwinForImageClassification(
        SwinConfig(
            image_size=32, patch_size=2, embed_dim=32, depths=[2, 8], num_heads=[2, 4],
            window_size=4, num_labels=10,
        )
    )  # fmt: skip


def compiled(model: nn.Module, *shape: int) -> CompiledModule:
    args = (torch.randn(shape).half(),)
    return gtco.compile(model.eval().half(), args, target="sm_90a")


@pytest.mark.parametrize(
    ("model", "shape", "least"),
    [
        (lambda: nn.Sequential(*[Encoder() for _ in range(12)]), (1, 16, 64), 10),
        (lambda: nn.Sequential(*[Bottleneck() for _ in range(6)]), (1, 64, 8, 8), 4),
        (swin, (1, 3, 32, 32), 3),  # pairs of a plain and a shifted layer
    ],
    ids=["vit", "resnet", "swin"],
)
def test_repeated_layers_are_printed_once(
    model: Callable[[], nn.Module], shape: tuple[int, ...], least: int
) -> None:
    graph = compiled(model(), *shape).graph
    text, whole = str(graph), graph.text(fold=False)
    counts = [int(found) for found in re.findall(r"^x(\d+)", text, re.M)]
    assert max(counts, default=0) >= least, counts
    hidden = sum(repeat.period * (repeat.count - 1) for repeat in graph.repeats)
    shown = len(graph.groups) - hidden
    heads = re.compile(r"^ *\w+\([^)]*\) -> .*:$", re.M)
    assert len(heads.findall(whole)) == len(graph.groups)
    assert len(heads.findall(text)) == shown < len(graph.groups)
