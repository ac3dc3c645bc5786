"""The GEMMs and the attention of one layer of each model, for `experiments.op_table`.

They are groups as the passes make them of a captured layer, so the records of those models know
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.cli.demo import Block, randomize
from gtco.codegen.sketches.gemm import analyse
from gtco.cost_model.model import roofline_us
from gtco.cost_model.work import group_work
from gtco.ir.graph import Group, Node
from gtco.passes import run_pipeline
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.target import Target

PEAK_TFLOPS = 989.4
"""Dense fp16 of an H100 SXM at its boost clock, from its data sheet."""
KINDS = ("gemm", "attention")
"""The families of groups that count."""
CONVOLUTION = "convolution"
"""The kind of operators whose peer is cuDNN, whatever the family of their group."""

Sizes = tuple[int, ...]
"""Of a GEMM (rows, columns, k), of attention (batch, heads, tokens, width), of a convolution the
image's (N, H, W, C)."""


class DetrLayer(nn.Module):
    """A layer of DETR's encoder: norms come last, positions go into queries and keys."""

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.reshape(*y.shape[:2], self.heads, -1).transpose(1, 2)

        placed = x + self.positions
        q, k, v = split(self.q(placed)), split(self.k(placed)), split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = self.norm1(x + self.proj(y.reshape(x.shape)))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Model:
    """What is known of a model's layers.

    Args:
        batch, tokens, width: of their activations [batch, tokens, width].
        layer: makes one.
        operators: GEMMs and attention of a layer, in the order in which they run.
    """

    batch: int
    tokens: int
    width: int
    layer: Callable[[], nn.Module]
    operators: tuple[str, ...]


def vit(batch: int, tokens: int, width: int, heads: int) -> Model:
    names = ("QKV", "attention", "projection", "FC1", "FC2")
    return Model(batch, tokens, width, partial(Block, width, heads), names)


def detr(batch: int, tokens: int, width: int, heads: int) -> Model:
    names = ("Q and K", "V", "attention", "projection", "FC1", "FC2")
    return Model(batch, tokens, width, partial(DetrLayer, tokens, width, heads), names)


MODELS = {
    "vit_b16": vit(1, 197, 768, 12),
    "vit_b16_batch8": vit(8, 197, 768, 12),
    "vit_b16_batch32": vit(32, 197, 768, 12),
    "vit_l16": vit(1, 197, 1024, 16),
    "vit_l16_batch8": vit(8, 197, 1024, 16),
    "vit_h14": vit(1, 257, 1280, 16),
    "vit_b16_384": vit(1, 577, 768, 12),
    "detr": detr(1, 1050, 256, 8),
}


def convolves(node: Node) -> bool:
    """Whether it is a convolution that the passes did not make a linear."""
    return node.definition.convolves or node.op == "depthwise_conv"


@dataclass(frozen=True, eq=False)
class Operator:
    """One fused GEMM or attention of a model's layer, or one convolution of a model.

    Args:
        model: its name.
        name: of the operator in the layer.
        batch: of the model.
        group: what a generated kernel computes.
        times: how often the model, or the layer, has it.
    """

    model: str
    name: str
    batch: int
    group: Group
    times: int = 1

    @property
    def kind(self) -> str:
        """One of `KINDS`, or `CONVOLUTION`."""
        return CONVOLUTION if self.convolutions else family(self.group)

    @property
    def convolutions(self) -> tuple[Node, ...]:
        """Those of the group: one, or several depthwise ones of one image."""
        return tuple(node for node in self.group.nodes if convolves(node))

    @property
    def sizes(self) -> Sizes:
        for node in self.convolutions:
            return self.group.graph.specs[node.inputs[0]].sizes
        if self.kind == "gemm":
            problem = analyse(self.group, scales=True, joins=True)
            return problem.rows, problem.columns, problem.k
        (anchor,) = (node for node in self.group.nodes if node.op == "attention")
        return self.group.graph.specs[anchor.inputs[0]].sizes

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        return group_work(self.group).matmul_flops

    def tflops(self, run_us: float) -> float:
        return self.flops / run_us * 1e-6

    def floor_us(self, target: Target) -> float:
        """All bytes once at the rate of device memory, or all FLOPs at the peak: the longer."""
        work = group_work(self.group)
        moved = work.weight_bytes + work.read_bytes + work.written_bytes
        return max(moved / (target.dram_gbps * 1e3), self.flops / (PEAK_TFLOPS * 1e6))


def operators(name: str, target: Target) -> tuple[Operator, ...]:
    """The GEMMs and the attention of a layer of the model called `name`.

    Raises:
        RuntimeError: the passes no longer fuse its layers as its `operators` say.
    """
    model = MODELS[name]
    layers = nn.Sequential(model.layer(), model.layer())  # what follows one follows most of them
    randomize(layers, seed=0)
    example = torch.zeros(model.batch, model.tokens, model.width, dtype=torch.float16)

    def price(group: Group) -> float:
        """The draft price, but attention and its projection are rows of their own here."""
        ops = {node.op for node in group.compute}
        return math.inf if {"attention", "linear"} <= ops else roofline_us(group, target)

    fused = fuse(run_pipeline(gtco.capture(layers.half().eval(), (example,))), price)
    groups = [group for group in fused if family(group) in KINDS]
    kinds = ["attention" if each == "attention" else "gemm" for each in model.operators]
    if [family(group) for group in groups] != 2 * kinds:
        found = ", ".join(group.name for group in groups)
        raise RuntimeError(f"two layers of {name} are fused into {found}: name its operators anew")
    return tuple(
        Operator(name, each, model.batch, group)
        for each, group in zip(model.operators, groups, strict=False)
    )
