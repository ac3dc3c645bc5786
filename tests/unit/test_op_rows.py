"""What passes, sketches and models know of an operator stands in its row: under another name it is
carried by the same families, at the same price, in the same code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.cost_model.model import roofline_us
from gtco.cost_model.work import group_work
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.ops import OPS, Pattern
from gtco.ir.spec import TensorSpec
from gtco.passes.dataflow import Flow
from gtco.passes.legality import Legality, family
from gtco.target import TARGETS
from tests import (
    attention_groups,
    back_to_back_groups,
    groups,
    projection_groups,
    squeeze_groups,
    stencil_groups,
)
from tests import tile_groups as tiles

H100 = TARGETS["sm_90a"]
F16 = torch.float16

BY_NAME = {
    **dict.fromkeys(("reshape", "permute", "expand", "unfold", "slice"), "how it strides"),
    **dict.fromkeys(
        ("concat", "pad", "extend", "roll", "gather", "space_to_depth"), "where it reads"
    ),
    **dict.fromkeys(("row_stats", "merge_stats", "group_stats", "normalize_groups"), "statistics"),
    **dict.fromkeys(("box_means", "box_moments", "merge_moments"), "statistics"),
    "cast": "a conversion of C++",
}
"""Operators with code of their own in a kernel, which no other one can share."""


def simple() -> Group:
    """The pointwise operators and the sum that no other case has."""
    b = GraphBuilder()
    x, y = (b.input(name, TensorSpec((6, 64), F16)) for name in "xy")
    found = [b.add(op, x, y) for op in ("ge", "gt", "le", "ne", "minimum", "prelu")]
    return Group("g", b.build([*found, b.add("round", x)]))


def summed() -> Group:
    b = GraphBuilder()
    return Group("g", b.build([b.add("sum", b.input("x", TensorSpec((6, 64), F16)),
                                     dims=(1,), keepdim=False)]))  # fmt: skip


def scaled() -> Group:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((6, 64), F16))
    scale = b.input("scale", TensorSpec((), torch.float32))
    integers = b.add("quantize_int8", x, scale, scale, low=-128, high=127)
    steps = b.add("quantize_affine", x, scale, scale)
    return Group("g", b.build([b.add("quantize", x, scale), integers, steps]))


CASES: tuple[Callable[[], Group], ...] = (
    lambda: groups.norm_linear(197, 768, 3072, F16, gelu=True),
    lambda: groups.residual_linear(197, 768, 768, F16),
    lambda: groups.rotary_linear(37, 128, 3, 2, 64, F16),
    lambda: groups.batched_matmul(2, 33, 64, 40, F16),
    lambda: groups.convolution((1, 56, 56, 64), 64, (3, 3), F16),
    lambda: groups.convolution((1, 14, 14, 64), 64, (3, 3), F16, groups=2),
    lambda: attention_groups.packed(197, 12, 64),
    lambda: attention_groups.cross((2,), 70, 130, 32, mask=F16),
    projection_groups.LARGE["vit_b"],
    lambda: back_to_back_groups.bottleneck(8448, (64, 256, 64), F16),
    lambda: back_to_back_groups.perceptron(8448, (96, 384, 96), F16),
    squeeze_groups.CASES["se_512"],
    *stencil_groups.CASES.values(),
    *stencil_groups.RESIZES.values(),
    *stencil_groups.SAMPLES.values(),
    lambda: tiles.softmax(12, 197, 197),
    lambda: tiles.layer_norm(1, 197, 768, residual=True),
    lambda: tiles.standardize(8, 96, dims=(1,)),
    lambda: tiles.group_norm(2, 6, 6, 32, groups=4),
    lambda: tiles.argmax(4, 64, dim=1),
    lambda: tiles.cumsum(4, 64, dim=1),
    lambda: tiles.cumsum(4, 64, dim=1, op="cumprod"),
    lambda: tiles.pool("amax", 4, 8, 16, dims=(1,), keepdim=True, dtype=F16),
    lambda: tiles.functions(F16),
    lambda: tiles.more_functions(F16),
    lambda: tiles.divisions(F16),
    tiles.integers,
    simple,
    summed,
    scaled,
)
MADE = [make() for make in CASES]


def renamed(graph: Graph, op: str) -> Graph:
    nodes = [replace(node, op=f"twin_{op}") if node.op == op else node for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def told(group: Group) -> list[str]:
    """All that passes, sketches and models say of a group, and its first programs."""
    derivation = derive(group, family(group), H100)
    legality = Legality(Flow(group.graph), 64)
    programs = [sketch.emit(next(iter(sketch.defaults()))) for sketch in derivation.sketches]
    said = (
        family(group),
        legality.explain(group.compute),
        [legality.lone(node) for node in group.compute],
        roofline_us(group, H100),
        group_work(group),
        derivation,
        *(program.source for program in programs),
    )
    return [str(each).replace("twin_", "") for each in said]


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, op in list(OPS.items()):
        monkeypatch.setitem(OPS, f"twin_{name}", replace(op, name=f"twin_{name}"))  # type: ignore[arg-type]


CARRIED = [
    name for name, op in OPS.items() if op.pattern is not Pattern.OPAQUE and name not in BY_NAME
]


@pytest.mark.parametrize("op", CARRIED)
def test_a_name_says_nothing_that_the_row_does_not(op: str) -> None:
    having = [group for group in MADE if any(node.op == op for node in group.nodes)]
    if op == "mean":  # the kernel of squeeze and excitation begins with one
        having = [group for group in having if family(group) != "squeeze"]
    assert having, "no case has it"
    for group in having[:3]:
        assert told(Group(group.name, renamed(group.graph, op))) == told(group)


@pytest.mark.parametrize("op", ["row_stats", "merge_stats", "cast"])
def test_the_comparison_sees_what_is_asked_of_a_name(op: str) -> None:
    group = next(group for group in MADE if any(node.op == op for node in group.nodes))
    try:
        other = told(Group(group.name, renamed(group.graph, op)))
    except KeyError:
        return
    assert other != told(group)
