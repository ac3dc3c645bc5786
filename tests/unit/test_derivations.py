"""Which sketches a group has and why not the others, as a golden file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gtco.codegen.rules import derive
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.target import TARGETS
from tests import (
    attention_groups,
    back_to_back_groups,
    groups,
    projection_groups,
    squeeze_groups,
    tile_groups,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


CASES: dict[str, Callable[[], Group]] = {
    "norm + QKV": lambda: groups.norm_linear(197, 768, 2304, F16),
    "norm + FC1 + gelu": lambda: groups.norm_linear(197, 768, 3072, BF16, gelu=True),
    "norm + FC1 + gelu, many rows": lambda: groups.norm_linear(1576, 768, 3072, F16, gelu=True),
    "projection + residual + stats": lambda: groups.residual_linear(197, 768, 768, F16),
    "patch embedding": lambda: groups.patch_embedding(224, 16, 768, F16),
    "head": lambda: groups.plain_linear(1, 768, 1000, F16),
    "linear of odd rows": lambda: groups.plain_linear(16, 75, 64, F16),
    "fp32 linear": lambda: groups.plain_linear(197, 768, 768, F32),
    "batched matmul": lambda: groups.batched_matmul(2, 33, 64, 40, F16),
    "transposed matmul": lambda: groups.batched_matmul(2, 65, 64, 72, F16, transposed=True),
    "attention": lambda: attention_groups.packed(197, 12, 64),
    "attention, masked": lambda: attention_groups.cross((2,), 70, 130, 32, mask=F16),
    "attention, fp32": lambda: attention_groups.cross((1,), 16, 16, 64, dtype=F32),
    "attention, odd heads": lambda: attention_groups.cross((1,), 16, 16, 20),
    "attention, wide heads": lambda: attention_groups.cross((1,), 16, 16, 256),
    "attention + projection": projection_groups.LARGE["vit_b"],
    "attention + projection, heads of 80": lambda: projection_groups.projected(16, 257, 80, 1280),
    "bottleneck": lambda: back_to_back_groups.bottleneck(25088, (64, 256, 64), F16),
    "bottleneck of few rows": lambda: back_to_back_groups.bottleneck(3136, (64, 256, 64), F16),
    "perceptron": lambda: back_to_back_groups.perceptron(25088, (96, 384, 96), BF16),
    "squeeze and excitation": squeeze_groups.CASES["se_512"],
    "softmax": lambda: tile_groups.softmax(12, 197, 197),
    "layer norm": lambda: tile_groups.layer_norm(1, 197, 768, residual=True),
    "row statistics": lambda: tile_groups.row_stats(1, 197, 768),
    "merged statistics": lambda: tile_groups.merge_stats(197, 768),
    "pointwise": lambda: tile_groups.gelu_bias(1, 197, 3072),
    "class token": lambda: tile_groups.class_token(197, 768),
    "convolution": lambda: groups.convolution((1, 56, 56, 64), 64, (3, 3), F16),
    "convolution of an image": lambda: groups.convolution((1, 224, 224, 3), 64, (7, 7), F16),
    "convolution in groups": lambda: groups.convolution((1, 14, 14, 64), 64, (3, 3), F16, groups=2),
}  # fmt: skip


def derivations() -> Iterator[str]:
    for case, make in CASES.items():
        group = make()
        kind = family(group)
        yield f"{case}: {' '.join(node.op for node in group.nodes)}"
        for arch in ("sm_80", "sm_90a"):
            lines = str(derive(group, kind, TARGETS[arch])).splitlines()
            yield from (f"  {arch:6} {line}" for line in lines)
        yield ""


def test_derivations(golden: Callable[[str, object], None]) -> None:
    golden("derivations.txt", "\n".join(derivations()).rstrip())
