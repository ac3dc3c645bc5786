"""Tensors of more elements than 32 bits count: torch runs what has them, and the plan says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtco import compiler
from gtco.codegen.rules import derive
from gtco.codegen.sketch import LARGEST
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes.legality import family
from gtco.target import TARGETS

H100 = TARGETS["sm_90a"]
SIZE = 1024
MOST = LARGEST // (SIZE * SIZE * 64)
"""Images of 64 channels, 1024 pixels wide and high, that 32 bits count."""


def _image(b: GraphBuilder, images: int, size: int = SIZE) -> str:
    return b.input("x", TensorSpec((images, size, size, 64), torch.float16))


def _convolved(b: GraphBuilder, op: str, images: int) -> str:
    weight = torch.ones((3, 3, 64) if op == "depthwise_conv" else (64, 3, 3, 64)).half()
    border: dict[str, Any] = {name: (1, 1) for name in ("stride", "before", "after", "dilation")}
    return b.add(op, _image(b, images), b.constant("w", weight), **border)


def _linear(b: GraphBuilder, images: int, columns: int) -> str:
    x = b.input("x", TensorSpec((images * SIZE * SIZE, columns), torch.float16))
    return b.add("linear", x, b.constant("w", torch.ones(64, columns).half()))


def _scores(b: GraphBuilder, images: int) -> str:
    tokens = TensorSpec((images, 8192, 64), torch.float16)
    keys = b.add("permute", b.input("y", tokens), dims=(0, 2, 1))
    return b.add("matmul", b.input("x", tokens), keys)


def _resized(b: GraphBuilder, images: int) -> str:
    given = {"size": (SIZE, SIZE), "mode": "bilinear", "align_corners": False}
    return b.add("resize", _image(b, images, SIZE // 2), **given, scales=(None, None))


OPS: dict[str, Callable[[GraphBuilder, int], str]] = {
    "convolution": lambda b, n: _convolved(b, "conv", n),
    "depthwise convolution": lambda b, n: _convolved(b, "depthwise_conv", n),
    "linear": lambda b, n: _linear(b, n, 64),
    "linear of a small matrix": lambda b, n: _linear(b, n, 8),
    "matmul": _scores,
    "resize": _resized,
    "pointwise": lambda b, n: b.add("relu", _image(b, n)),
    "softmax": lambda b, n: b.add("softmax", _image(b, n), dim=3),
    "mean": lambda b, n: b.add("mean", _image(b, n), dims=(1, 2), keepdim=False),
    "turned": lambda b, n: b.add("copy", b.add("permute", _image(b, n), dims=(0, 3, 1, 2))),
}


@pytest.mark.parametrize("op", OPS)
def test_no_sketch_takes_more_than_an_index_counts(op: str) -> None:
    for images, taken in ((MOST, True), (MOST + 1, False)):
        b = GraphBuilder()
        group = Group("large", b.build([OPS[op](b, images)]))
        found = derive(group, family(group), H100)
        assert bool(found.sketches) == taken, found
        if not taken:
            assert "elements, and kernels count to 2,147,483,647" in found.reason


def test_a_model_runs_them_with_torch_and_the_rest_with_kernels() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 64, 3, padding=1)
            self.down = nn.Conv2d(64, 32, 3, stride=4, padding=1)
            self.last = nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.down(self.stem(x).relu()).relu()).relu()

    x = torch.zeros(1).half().expand(MOST + 1, 3, SIZE, SIZE)
    plan, _ = compiler.make_plan(Model().eval().half(), (x,), None, Options.of(target="sm_90a"))
    by_torch = [launch for launch in plan.launches if launch.program is None]
    assert 0 < len(by_torch) < len(plan.launches)
    for launch in by_torch:
        assert "smaller batches have kernels" in launch.reason
        assert launch.reason.count("kernels count to") == 1, launch.reason
        assert any(spec.numel > LARGEST for spec in launch.group.graph.specs.values()), (
            launch.reason
        )
