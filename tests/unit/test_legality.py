from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.passes.dataflow import Flow, make_group, materialize_views
from gtco.passes.legality import explain, family

F16, F32 = torch.float16, torch.float32


class Case:
    """A builder with the operands that the cases share."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.add = self.b.add
        self.x = self.input(6, 8)
        self.w = self.b.constant("w", torch.zeros(8, 8, dtype=F16))

    def input(self, *shape: int, dtype: torch.dtype = F16) -> str:
        return self.b.input("in", TensorSpec(shape, dtype))

    def merge(self, *rows: int) -> tuple[str, ...]:
        stats = self.input(*rows, 1, 2, dtype=F32)
        return self.b.node("merge_stats", (stats,), {"columns": 8, "eps": 1e-5})

    def linear(self) -> str:
        return self.add("linear", self.x, self.w)


def build(case: Callable[[Case], list[str]]) -> Graph:
    c = Case()
    return materialize_views(c.b.build(case(c)))


def verdict(graph: Graph) -> str | None:
    """The verdict on all compute nodes as one group."""
    return explain(graph, Flow(graph).compute)


def gemm_with_everything(c: Case) -> list[str]:
    mean, rstd = c.merge(6)
    y = c.add("linear", c.x, c.w, out_dtype=F32)
    y = c.add("mul", c.add("sub", y, c.add("mul", mean, c.input(8, dtype=F32))), rstd)
    y = c.add("add", c.add("cast", y, dtype=F16), c.input(6, 8))
    return [y, c.add("row_stats", y)]


def gemm_reshaped(c: Case) -> list[str]:
    y = c.add("reshape", c.linear(), shape=(2, 3, 8))
    return [c.add("add", y, c.input(2, 3, 8)), y]


def gemm_row_value_of_reshaped_rows(c: Case) -> list[str]:
    _, rstd = c.merge(2, 3)
    return [c.add("mul", c.add("reshape", c.linear(), shape=(2, 3, 8)), rstd)]


def attention_epilogue(c: Case) -> list[str]:
    q = c.input(1, 2, 6, 8)
    return [c.add("relu", c.add("attention", q, q, q, c.input(6, 6, dtype=torch.bool), scale=1.0))]


def projected(c: Case, heads: int = 2, columns: int = 128) -> str:
    q = c.input(2, heads, 6, 16)
    y = c.add("permute", c.add("attention", q, q, q, scale=0.25), dims=(0, 2, 1, 3))
    y = c.add("reshape", y, shape=(2, 6, 16 * heads))
    w = c.b.constant("v", torch.zeros(columns, 16 * heads, dtype=F16))
    return c.add("linear", y, w)


def attention_projection(c: Case) -> list[str]:
    _, rstd = c.merge(2, 6)
    y = c.add("mul", projected(c), rstd)
    y = c.add("add", c.add("cast", y, dtype=F16), c.input(2, 6, 128))
    return [y, c.add("row_stats", y)]


def depthwise(c: Case, image: str, stride: int = 1) -> str:
    """depthwise_conv(image) + bias, of a 3x3 kernel."""
    channels = c.b.specs[image].sizes[3]
    w = c.b.constant(f"w{stride}", torch.zeros(3, 3, channels, dtype=F16))
    border = {"before": (1, 1), "after": (1, 1), "dilation": (1, 1)}
    y = c.add("depthwise_conv", image, w, stride=(stride, stride), **border)
    return c.add("add", y, c.input(channels))


def stencil_then_statistics(c: Case) -> list[str]:
    y = depthwise(c, c.input(1, 5, 6, 96))
    rows = c.add("reshape", y, shape=(30, 96))
    residual = c.add("add", rows, c.input(30, 96))
    return [residual, c.add("row_stats", rows), y, c.add("row_stats", residual)]


def pooling_then_statistics(c: Case) -> list[str]:
    given = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "ceil_mode": False}
    y = c.add("max_pool", c.input(2, 4, 6, 10), dilation=(1, 1), **given)
    return [y, c.add("row_stats", y)]


def two_stencils_with_statistics(c: Case) -> list[str]:
    image = c.input(1, 5, 6, 8)
    both = [depthwise(c, image), depthwise(c, image)]
    return [*both, *(c.add("row_stats", y) for y in both)]


def spelled_out_softmax(c: Case) -> list[str]:
    y = c.add("mul", c.x, other=0.5)
    e = c.add("exp", c.add("sub", y, c.add("amax", y, dims=(1,), keepdim=True)))
    return [c.add("div", e, c.add("sum", e, dims=(-1,), keepdim=True))]


def reduced_row_through_a_reshape(c: Case) -> list[str]:
    mean = c.add("reshape", c.add("mean", c.x, dims=(1,), keepdim=False), shape=(6, 1))
    return [c.add("sub", c.x, mean)]


def concat_then_statistics(c: Case) -> list[str]:
    y = c.add("add", c.add("concat", c.input(1, 8), c.x, dim=0), c.input(7, 8))
    return [y, c.add("row_stats", y), c.add("softmax", y, dim=1)]


def pad_then_statistics(c: Case) -> list[str]:
    y = c.add("relu", c.add("pad", c.x, before=(1, 0), after=(0, 0)))
    return [y, c.add("row_stats", y)]


def groups_of_channels(c: Case) -> list[str]:
    x = c.add("add", c.input(2, 3, 8), c.input(8))
    y = c.add("group_norm", x, c.input(8), c.input(8), groups=2, eps=1.0)
    return [x, c.add("add", c.add("silu", y), c.input(2, 1, 8))]


def statistics_of_groups(c: Case) -> list[str]:
    x = c.add("add", c.input(2, 6, 8), c.input(2, 1, 8))
    return [x, c.add("group_stats", x, groups=2, chunks=3)]


def normalized_groups(c: Case) -> list[str]:
    x, stats = c.add("add", c.input(2, 6, 8), c.input(8)), c.input(2, 3, 4, 2, dtype=F32)
    return [c.add("silu", c.add("normalize_groups", x, stats, c.input(8), eps=1.0))]


def softmax_over_rows(c: Case) -> list[str]:
    return [c.add("exp", c.add("softmax", c.add("relu", c.x), dim=0))]


def statistics_of_rows(c: Case) -> list[str]:
    mean, rstd = c.merge(6)
    return [c.add("mul", mean, rstd)]


def integers(c: Case) -> list[str]:
    i = c.input(6, 8, dtype=torch.int64)
    return [c.add("where", c.add("eq", i, other=0), c.add("cast", i, dtype=F16), c.x)]


LEGAL = {
    gemm_with_everything: "gemm",
    gemm_reshaped: "gemm",
    gemm_row_value_of_reshaped_rows: "gemm",
    attention_epilogue: "attention",
    attention_projection: "attention",
    spelled_out_softmax: "rowwise",
    reduced_row_through_a_reshape: "rowwise",
    concat_then_statistics: "rowwise",
    pad_then_statistics: "rowwise",
    statistics_of_rows: "rowwise",
    integers: "elementwise",
    groups_of_channels: "rowwise",
    statistics_of_groups: "rowwise",
    normalized_groups: "elementwise",
    softmax_over_rows: "rowwise",
    stencil_then_statistics: "stencil",
    pooling_then_statistics: "stencil",
    two_stencils_with_statistics: "stencil",
}


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.__name__)
def test_legal(case: Callable[[Case], list[str]]) -> None:
    graph = build(case)
    assert verdict(graph) is None
    flow = Flow(graph)
    assert family(make_group(flow, flow.compute)) == LEGAL[case]


REFUSED: dict[str, tuple[Callable[[Case], list[str]], str]] = {
    "prologue": (
        lambda c: [c.add("linear", c.add("relu", c.x), c.w)],
        "copied to shared memory unchanged",
    ),
    "computed bias": (
        lambda c: [c.add("linear", c.x, c.w, c.add("relu", c.input(8)))],
        "the bias %relu must be stored first",
    ),
    "two contractions": (
        lambda c: [c.add("add", c.linear(), c.linear())],
        "linear and linear are two contractions",
    ),
    "two attentions and a projection": (
        lambda c: [
            y := projected(c),
            c.add("add", y, c.add("attention", *[c.input(2, 6, 128)] * 3, scale=1.0)),
        ],
        "linear and attention are two contractions",
    ),
    "a projection that is not alone": (
        lambda c: [projected(c), c.b.nodes[-4].name],  # the attention's result, too
        "%attention is read by others than a projection",
    ),
    "a projection of one head": (
        lambda c: [projected(c, 1)],
        "1 heads of a batch item, a cluster has 2 to 16",
    ),
    "columns that heads do not share": (
        lambda c: [projected(c, 3, 64)],
        "64 columns are no multiple of 16 for each of 3 heads",
    ),
    "statistics of a head's columns": (
        lambda c: [y := projected(c, 4), c.add("row_stats", y)],
        "32 columns of a head's block cut the chunks",
    ),
    "softmax of the projection": (
        lambda c: [c.add("softmax", projected(c), dim=-1)],
        "softmax needs whole rows",
    ),
    "permute inside": (
        lambda c: [c.add("relu", c.add("permute", c.linear(), dims=(1, 0)))],
        r"a permute \(%permute\) lies between",
    ),
    "slice inside": (
        lambda c: [c.add("relu", c.add("slice", c.add("exp", c.x), dim=0, start=0, end=2))],
        r"a slice \(%slice\) lies between",
    ),
    "softmax of a tile": (
        lambda c: [c.add("softmax", c.linear(), dim=1)],
        "softmax needs whole rows",
    ),
    "concat in an epilogue": (
        lambda c: [c.add("concat", c.linear(), c.x, dim=0)],
        "concat",
    ),
    "pad in an epilogue": (
        lambda c: [c.add("pad", c.linear(), before=(1, 0), after=(0, 0))],
        "pad",
    ),
    "statistics read in their kernel": (
        lambda c: [
            c.b.node("merge_stats", (c.add("row_stats", c.x),), {"columns": 8, "eps": 1.0})[0]
        ],
        "complete only after the last tile",
    ),
    "statistics of a value nobody stores": (
        lambda c: [c.add("row_stats", c.linear())],
        "nobody stores %linear",
    ),
    "statistics of odd columns": (
        lambda c: [y := c.add("linear", c.x, c.input(7, 8)), c.add("row_stats", y)],
        "7 is odd",
    ),
    "statistics of a resize": (
        lambda c: [
            y := c.add(
                "resize",
                c.input(1, 4, 4, 8),
                size=(8, 8),
                mode="bilinear",
                align_corners=False,
                scales=(None, None),
            ),
            c.add("row_stats", y),
        ],
        "the epilogue of resize has no row statistics",
    ),
    "statistics of a stencil that nobody stores": (
        lambda c: [c.add("row_stats", depthwise(c, c.input(1, 4, 4, 8)))],
        "nobody stores %add",
    ),
    "statistics of more than the channels": (
        lambda c: [
            y := depthwise(c, c.input(1, 4, 4, 8)),
            c.add("row_stats", c.add("reshape", y, shape=(8, 16))),
        ],
        "does not run along the 8 columns",
    ),
    "statistics of pixels in another order": (
        lambda c: [
            y := depthwise(c, c.input(1, 4, 4, 8)),
            c.add("row_stats", c.add("permute", y, dims=(0, 2, 1, 3))),
        ],
        r"a permute \(%permute\) lies between",
    ),
    "statistics of odd channels": (
        lambda c: [y := depthwise(c, c.input(1, 4, 4, 7)), c.add("row_stats", y)],
        "7 is odd",
    ),
    "statistics of an image of planes": (
        lambda c: [
            y := depthwise(c, c.add("permute", c.input(1, 8, 4, 4), dims=(0, 2, 3, 1))),
            c.add("row_stats", y),
        ],
        "those of %permute lie apart",
    ),
    "statistics of windows of several sizes": (
        lambda c: [
            y := depthwise(c, (image := c.input(1, 4, 4, 8))),
            c.add("row_stats", y),
            z := depthwise(c, image, 2),
            c.add("row_stats", z),
        ],
        "does not run along|walks",
    ),
    "a stored row value": (
        lambda c: [c.add("mul", c.linear(), (rstd := c.merge(6)[1])), rstd],
        "no one block of a GEMM stores it",
    ),
    "a row value that broadcasts along columns": (
        lambda c: [
            c.add(
                "mul",
                c.add("linear", c.input(8, 8), c.w),
                c.add("reshape", c.merge(8)[1], shape=(1, 8)),
            )
        ],
        "no row value",
    ),
    "rows of another matrix": (
        lambda c: [c.add("mul", c.linear(), c.add("relu", c.input(1, 8)))],
        r"walks \[6, 8\] or \[6, 1\]",
    ),
    "five reductions": (
        lambda c: [
            c.add("softmax", (y := c.add("relu", c.x)), dim=1),
            *(c.add("sum", y, dims=(1,), keepdim=True) for _ in range(4)),
        ],
        "5 reductions are more than 4",
    ),
    "other dimensions": (
        lambda c: [
            c.add("sum", (y := c.add("relu", c.x)), dims=(0,), keepdim=True),
            c.add("sum", y, dims=(1,), keepdim=True),
        ],
        "do not reduce the same rows",
    ),
    "a reduced value without its dimension": (
        lambda c: [c.add("relu", c.add("sum", c.x, dims=(1,), keepdim=False))],
        "walks",
    ),
    "a long row": (
        lambda c: [c.add("softmax", c.add("relu", c.input(2, 20000)), dim=1)],
        "does not fit the registers",
    ),
    "statistics of groups read in their kernel": (
        lambda c: [
            s := c.add("group_stats", c.input(1, 8, 8), groups=2, chunks=2),
            c.add("normalize_groups", c.b.nodes[-1].inputs[0], s, eps=1.0),
        ],
        "reads its statistics whole",
    ),
    "groups in an epilogue": (
        lambda c: [
            c.add(
                "normalize_groups",
                c.add("reshape", c.linear(), shape=(1, 6, 8)),
                c.input(1, 2, 4, 2, dtype=F32),
                eps=1.0,
            )
        ],
        "no place in the epilogue",
    ),
    "two normalized groups": (
        lambda c: [
            c.add(
                "add",
                *(
                    c.add(
                        "normalize_groups",
                        c.input(1, 6, 8),
                        c.input(1, 2, 4, 2, dtype=F32),
                        eps=1.0,
                    )
                    for _ in range(2)
                ),
            )
        ],
        "the same shared memory",
    ),
    "old and new statistics": (
        lambda c: [
            y := c.add("mul", c.x, c.merge(6)[1]),
            c.add("row_stats", y),
        ],
        "two kernels",
    ),
    "two iteration shapes": (
        lambda c: [c.add("add", c.x, c.add("relu", c.input(8)))],
        "two iteration shapes",
    ),
    "concat of computed values": (
        lambda c: [c.add("concat", c.add("relu", c.x), c.x, dim=0)],
        "concat reads stored values only",
    ),
    "pad of computed values": (
        lambda c: [c.add("pad", c.add("relu", c.x), before=(1, 0), after=(0, 0))],
        "pad reads stored values only",
    ),
    "library": (
        lambda c: [
            c.add(
                "relu",
                c.add(
                    "conv2d",
                    c.input(1, 3, 4, 4),
                    c.input(2, 3, 2, 2),
                    stride=(1, 1),
                    padding=(0, 0),
                    dilation=(1, 1),
                    groups=1,
                ),
            )
        ],
        "conv2d is a library call",
    ),
    "double precision": (
        lambda c: [c.add("exp", c.add("relu", c.input(3, dtype=torch.float64)))],
        r"f64\[3\] has no generated kernel",
    ),
    "integer sum": (
        lambda c: [
            c.add("relu", c.add("sum", c.input(3, 4, dtype=torch.int64), dims=(1,), keepdim=True))
        ],
        "has no generated kernel",
    ),
    "not connected": (
        lambda c: [c.add("relu", c.x), c.add("exp", c.x)],
        "not connected",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    case, reason = REFUSED[name]
    graph = build(case)
    refusal = verdict(graph)
    assert refusal is not None
    assert re.search(reason, refusal)
    for node in Flow(graph).compute:
        assert explain(graph, [node]) is None  # any node alone is a group


def test_a_group_is_convex_and_has_at_most_max_group_nodes() -> None:
    c = Case()
    first = c.add("relu", c.x)
    middle = c.add("exp", first)
    graph = c.b.build([c.add("add", first, middle)])
    one, two, three = graph.nodes
    assert "outside the group" in (explain(graph, [one, three]) or "")
    assert explain(graph, [one, two, three]) is None
    assert "more than the 2" in (explain(graph, [one, two, three], max_group=2) or "")
