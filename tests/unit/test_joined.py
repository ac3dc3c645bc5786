"""Which concats a product reads in pieces, and which groups may therefore hold them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from gtco.cost_model.model import roofline_us
from gtco.ir.graph import Graph, GraphBuilder, Node
from gtco.ir.spec import TensorSpec
from gtco.passes.dataflow import Flow, make_group, materialize_views
from gtco.passes.fusion import fuse
from gtco.passes.joined import MOST_PIECES, joined_by
from gtco.passes.legality import explain, family
from gtco.target import TARGETS
from tests import groups

F16, F32 = torch.float16, torch.float32
H100 = TARGETS["sm_90a"]


class Case:
    """A builder of concats and what reads them."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.add = self.b.add

    def input(self, *shape: int, dtype: torch.dtype = F16) -> str:
        return self.b.input("in", TensorSpec(shape, dtype))

    def weights(self, *shape: int, dtype: torch.dtype = F16) -> str:
        return self.b.constant("w", torch.zeros(shape, dtype=dtype))

    def images(self, *widths: int, dtype: torch.dtype = F16) -> list[str]:
        return [self.input(2, 5, 6, width, dtype=dtype) for width in widths]

    def concat(self, *pieces: str, dim: int = -1) -> str:
        return self.add("concat", *pieces, dim=dim)

    def linear(self, x: str, columns: int = 16, dtype: torch.dtype = F16) -> str:
        return self.add("linear", x, self.weights(columns, self.depth(x), dtype=dtype))

    def conv(self, x: str, columns: int = 16, groups: int = 1) -> str:
        ones = {name: (1, 1) for name in ("stride", "before", "after", "dilation")}
        w = self.weights(columns, 3, 3, self.depth(x) // groups)
        if groups > 1:
            return self.add("grouped_conv", x, w, **ones, groups=groups)
        return self.add("conv", x, w, **ones)

    def depthwise(self, x: str) -> str:
        ones = {name: (1, 1) for name in ("stride", "before", "after", "dilation")}
        return self.add("depthwise_conv", x, self.weights(3, 3, self.depth(x)), **ones)

    def depth(self, x: str) -> int:
        return self.b.specs[x].sizes[-1]


def build(case: Callable[[Case], list[str]]) -> Graph:
    c = Case()
    return materialize_views(c.b.build(case(c)))


def product_of(graph: Graph) -> Node:
    """The last contraction."""
    return [node for node in graph.nodes if node.definition.family == "gemm"][-1]


def concat_of(graph: Graph) -> Node:
    """The first concat."""
    return next(node for node in graph.nodes if node.op == "concat")


def one_seen_as_rows(c: Case) -> list[str]:
    x = c.add("reshape", c.concat(*c.images(8, 16)), shape=(60, 24))
    return [c.linear(x)]


def rows_seen_as_an_image(c: Case) -> list[str]:
    x = c.concat(c.input(60, 8), c.input(60, 16))
    return [c.conv(c.add("reshape", x, shape=(2, 5, 6, 24)))]


def with_a_slice(c: Case) -> list[str]:
    whole = c.input(2, 5, 6, 48)
    part = c.add("slice", whole, dim=3, start=16, end=40)
    return [c.conv(c.concat(part, *c.images(8)))]


def everything_behind(c: Case) -> list[str]:
    x = c.concat(*c.images(8, 16))
    y = c.add("add", c.linear(x, 64), c.input(64))
    y = c.add("add", c.add("gelu", y, approximate="none"), c.input(2, 5, 6, 64))
    return [y, c.add("row_stats", y)]


def of_rows_with_old_statistics(c: Case) -> list[str]:
    stats = c.input(2, 5, 6, 1, 2, dtype=F32)
    _, rstd = c.b.node("merge_stats", (stats,), {"columns": 24, "eps": 1e-5})
    return [c.add("mul", c.linear(c.concat(*c.images(8, 16))), rstd)]


TAKEN: dict[str, Callable[[Case], list[str]]] = {
    "a linear": lambda c: [c.linear(c.concat(*c.images(8, 16)))],
    "a convolution": lambda c: [c.conv(c.concat(*c.images(8, 16, 24)))],
    "as many pieces as there are pointers": lambda c: [
        c.linear(c.concat(*c.images(*[8] * MOST_PIECES)))
    ],
    "the last dimension by its number": lambda c: [c.linear(c.concat(*c.images(8, 8), dim=3))],
    "one value twice": lambda c: [c.linear(c.concat(*c.images(8) * 2))],
    "fp32 in runs of four": lambda c: [c.linear(c.concat(*c.images(4, 12, dtype=F32)), dtype=F32)],
    "computed weights": lambda c: [
        c.add(
            "linear", c.concat(*c.images(8, 8)), c.add("reshape", c.input(1, 9, 16), shape=(9, 16))
        )
    ],
    "rows of images": one_seen_as_rows,
    "images of rows": rows_seen_as_an_image,
    "a slice": with_a_slice,
    "bias, GELU, residual and statistics": everything_behind,
    "values of rows": of_rows_with_old_statistics,
}


@pytest.mark.parametrize("case", TAKEN)
def test_taken(case: str) -> None:
    graph = build(TAKEN[case])
    flow = Flow(graph)
    assert joined_by(graph, product_of(graph)) is concat_of(graph)
    assert explain(graph, flow.compute) is None
    assert family(make_group(flow, flow.compute)) == "gemm"


def test_the_whole_group_is_the_cheapest_plan() -> None:
    graph = build(everything_behind)
    (group,) = fuse(graph, lambda group: roofline_us(group, H100))
    assert next(node.op for node in group.compute) == "concat"


NO_OPERAND: dict[str, Callable[[Case], list[str]]] = {
    "rows behind rows": lambda c: [c.linear(c.concat(*c.images(8, 8), dim=0))],
    "columns of an image": lambda c: [c.conv(c.concat(*c.images(8, 8), dim=2))],
    "channels that no copy of 16 bytes divides": lambda c: [c.linear(c.concat(*c.images(8, 12)))],
    "fp32 that no copy divides": lambda c: [
        c.linear(c.concat(*c.images(4, 6, dtype=F32)), dtype=F32)
    ],
    "a slice that begins between copies": lambda c: [
        c.linear(
            c.concat(c.add("slice", c.input(2, 5, 6, 24), dim=3, start=4, end=12), *c.images(8))
        )
    ],
    "pixels that lie between copies": lambda c: [
        c.linear(
            c.concat(c.add("slice", c.input(2, 5, 6, 12), dim=3, start=0, end=8), *c.images(8))
        )
    ],
    "planes": lambda c: [
        c.linear(c.concat(c.add("permute", c.input(2, 8, 5, 6), dims=(0, 2, 3, 1)), *c.images(8)))
    ],
    "one piece": lambda c: [c.linear(c.concat(*c.images(8)))],
    "more pieces than there are pointers": lambda c: [
        c.linear(c.concat(*c.images(*[8] * (MOST_PIECES + 1))))
    ],
    "a convolution in groups": lambda c: [c.conv(c.concat(*c.images(8, 8)), groups=2)],
    "each channel by itself": lambda c: [c.depthwise(c.concat(*c.images(8, 8)))],
    "two activations": lambda c: [c.add("matmul", c.concat(*c.images(8, 8)), c.input(2, 5, 16, 8))],
    "the weights": lambda c: [
        c.add("linear", c.input(5, 16), c.concat(c.input(7, 8), c.input(7, 8)))
    ],
    "mixed types": lambda c: [c.linear(c.concat(*c.images(8), *c.images(8, dtype=F32)), dtype=F32)],
    "fp8": lambda c: [
        c.linear(c.concat(*c.images(16, 16, dtype=torch.float8_e4m3fn)), dtype=torch.float8_e4m3fn)
    ],
    "fp64": lambda c: [
        c.linear(c.concat(*c.images(8, 8, dtype=torch.float64)), dtype=torch.float64)
    ],
    "channels that are pixels to the product": lambda c: [
        c.linear(c.add("reshape", c.concat(*c.images(8, 8)), shape=(2, 5, 96)))
    ],
    "another order of pixels": lambda c: [
        c.conv(c.add("permute", c.concat(*c.images(8, 8)), dims=(0, 2, 1, 3)))
    ],
    "a part of the concat": lambda c: [
        c.linear(c.add("slice", c.concat(*c.images(8, 8)), dim=1, start=0, end=2))
    ],
    "something between": lambda c: [c.linear(c.add("relu", c.concat(*c.images(8, 8))))],
}


@pytest.mark.parametrize("case", NO_OPERAND)
def test_no_operand(case: str) -> None:
    """Neither `joined_by` nor a group takes it; each node alone is a group."""
    graph = build(NO_OPERAND[case])
    flow = Flow(graph)
    for node in flow.compute:
        assert joined_by(graph, node) is None
        assert explain(graph, [node]) is None
    assert explain(graph, flow.compute) is not None


REFUSED: dict[str, tuple[Callable[[Case], list[str]], str]] = {
    "read by another node": (
        lambda c: [c.linear(x := c.concat(*c.images(8, 8))), c.add("relu", x)],
        "copied to shared memory unchanged: %concat must be stored first",
    ),
    "read by another product": (
        lambda c: [c.linear(x := c.concat(*c.images(8, 8))), c.conv(x)],
        "copied to shared memory unchanged: %concat must be stored first",
    ),
    "read by the epilogue": (
        lambda c: [
            c.add(
                "add",
                c.linear(x := c.concat(*c.images(8, 8))),
                c.add("reshape", x, shape=(2, 5, 6, 16)),
            )
        ],
        "copied to shared memory unchanged: %concat must be stored first",
    ),
    "read as weights too": (
        lambda c: [c.add("linear", x := c.concat(c.input(16, 8), c.input(16, 8)), x)],
        "copied to shared memory unchanged: %concat must be stored first",
    ),
    "given back": (
        lambda c: [c.linear(x := c.concat(*c.images(8, 8))), x],
        "copied to shared memory unchanged: %concat must be stored first",
    ),
    "given back in another form": (
        lambda c: [
            c.linear(x := c.concat(*c.images(8, 8))),
            c.add("permute", x, dims=(3, 0, 1, 2)),
        ],
        "copied to shared memory unchanged: %concat must be stored first",
    ),
    "a piece that is made in the kernel": (
        lambda c: [c.linear(c.concat(c.add("relu", c.input(5, 8)), c.input(5, 8)), 8)],
        "concat reads stored values only, and %relu is computed here",
    ),
    "a piece that another product makes": (
        lambda c: [c.linear(c.concat(c.linear(c.input(5, 8)), c.input(5, 16)))],
        "concat reads stored values only|two contractions",
    ),
    "a piece that a stencil makes": (
        lambda c: [c.conv(c.concat(c.depthwise(x := c.input(2, 5, 6, 8)), x), 8)],
        "depthwise_conv and conv are two contractions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, reason = REFUSED[case]
    graph = build(make)
    flow = Flow(graph)
    refusal = explain(graph, flow.compute)
    assert refusal is not None and re.search(reason, refusal)


def test_what_is_computed_from_a_stencil_is_stored_ahead_of_a_product() -> None:
    """A stencil's kernel may store its part of a concat; a product's has no part to store."""
    graph = build(
        lambda c: [c.linear(c.concat(c.add("relu", c.depthwise(x := c.input(2, 5, 6, 8))), x), 8)]
    )
    stencil, relu, concat, linear = Flow(graph).compute
    assert explain(graph, [stencil, relu, concat]) is None
    assert explain(graph, [concat, linear]) is None
    refusal = explain(graph, [relu, concat, linear])
    assert refusal == "%relu, which %concat reads, must be stored"


def test_statistics_of_the_result_go_with_what_prepares_the_operand() -> None:
    """Of concats and of products by channel; those of the operand itself do not."""
    for make in (groups.JOINED_CASES["joined_stats"], groups.SCALED_CASES["scaled_bf16"]):
        group = make()
        assert explain(group.graph, group.compute) is None
    graph = build(lambda c: [c.linear(x := c.concat(*c.images(32, 32))), x, c.add("row_stats", x)])
    assert explain(graph, Flow(graph).compute) is not None


def test_each_launch_alone_where_two_read_a_concat() -> None:
    graph = build(lambda c: [c.linear(x := c.concat(*c.images(8, 8))), c.conv(x)])
    fused = fuse(graph, lambda group: roofline_us(group, H100))
    assert [[node.op for node in group.compute] for group in fused] == [
        ["concat"],
        ["linear"],
        ["conv"],
    ]
