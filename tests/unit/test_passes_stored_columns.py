"""Columns of a product come in the order in which what they become is stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes.stored_columns import order_stored_columns
from tests.pass_checks import check, random

F64 = torch.float64


def shuffled(
    order: tuple[int, ...] = (0, 1, 4, 2, 5, 3),
    *,
    op: str = "conv",
    parts: tuple[int, ...] = (5, 2, 3),
    known: bool = True,
    twice: bool = False,
    groups: int = 1,
) -> tuple[Graph, tuple[Tensor, ...]]:
    """Shuffled pixels of a product of 30 columns, with a bias and a slope of each."""
    b, columns = GraphBuilder(), 30
    x = b.input("x", TensorSpec((2, 4, 6, 8), F64))
    shape = (columns, 3, 3, 8 // groups) if op == "conv" else (columns, 8)
    w = b.constant("w", random(*shape)) if known else b.input("w", TensorSpec(shape, F64))
    if op == "conv":
        one, attrs = (1, 1), {"groups": groups} if groups > 1 else {}
        kind = "grouped_conv" if groups > 1 else op
        y = b.add(kind, x, w, stride=one, before=one, after=one, dilation=one, **attrs)
    else:
        y = b.add("linear", x, w, b.constant("first", random(columns, seed=3)))
    y = b.add("add", y, b.constant("bias", random(columns, seed=1)))
    r = b.add("prelu", y, b.constant("slope", random(1, 1, 1, columns, seed=2)))
    cut = b.add("permute", b.add("reshape", r, shape=(2, 4, 6, *parts)), dims=order)
    n, *sides, last = ((2, 4, 6, *parts)[dim] for dim in order)
    image = b.add("reshape", cut, shape=(n, sides[0] * sides[1], sides[2] * sides[3], last))
    outputs = [b.add("tanh", image)]
    if twice:
        outputs.append(b.add("tanh", r))
    args = (random(2, 4, 6, 8, seed=5), *(() if known else (random(*shape),)))
    return b.build(outputs), args


def weights(graph: Graph) -> Tensor:
    """Of the product of `graph`."""
    (product,) = (node for node in graph.nodes if node.definition.family == "gemm")
    return graph.constants[product.inputs[1]]


@pytest.mark.parametrize("op", ["conv", "linear"])
def test_rows_of_weights_come_as_pixels_are_stored(op: str) -> None:
    graph, args = shuffled(op=op)
    found = check(order_stored_columns, graph, args)
    order = torch.arange(30).reshape(5, 2, 3).permute(1, 2, 0).reshape(-1)
    assert torch.equal(weights(found), weights(graph)[order])
    again = order_stored_columns(found)
    assert torch.equal(weights(again), weights(found))


def test_columns_that_are_stored_side_by_side_stay() -> None:
    graph, _ = shuffled((0, 3, 1, 4, 2, 5), parts=(2, 3, 5))  # the last part stays the last
    assert str(order_stored_columns(graph)) == str(graph)


def test_columns_that_go_on_in_the_next_pixel() -> None:
    """Both parts of 15 values, one part of all pixels after the other."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 3, 8), F64))
    y = b.add("tanh", b.add("linear", x, b.constant("w", random(30, 8))))
    parts = b.add("permute", b.add("reshape", y, shape=(2, 3, 15, 2)), dims=(3, 0, 1, 2))
    graph = b.build([b.add("exp", b.add("reshape", parts, shape=(4, 45)))])
    found = check(order_stored_columns, graph, (random(2, 3, 8, seed=1),))
    order = torch.arange(30).reshape(15, 2).t().reshape(-1)
    assert torch.equal(weights(found), weights(graph)[order])


@pytest.mark.parametrize("attrs", [{"known": False}, {"twice": True}, {"groups": 2}])
def test_what_is_read_otherwise_stays(attrs: dict[str, bool]) -> None:
    graph, _ = shuffled(**attrs)
    assert str(order_stored_columns(graph)) == str(graph)


def test_images_with_channels_first_stay() -> None:
    graph, _ = shuffled((0, 3, 1, 4, 2, 5))  # a row of pixels, of every channel
    assert str(order_stored_columns(graph)) == str(graph)


class Enlarger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.last = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(x))  # type: ignore[no-any-return]


def test_a_model_stores_the_pixels_of_a_shuffle_whole() -> None:
    model, x = Enlarger().half().eval(), random(1, 16, 12, 20).half()
    plan, _ = make_plan(model, (x,), {}, Options.of(target="sm_90a"))
    sources = [each.program.source for each in plan.launches if each.program is not None]
    stores = [line for source in sources for line in source.splitlines() if "store<" in line]
    assert stores and all("store<V>" in line for line in stores)
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-3)
