"""Repeated layers are found and folded, and only what is one loop is."""

from __future__ import annotations

import pytest
import torch

from gtco.ir.fold import OUTSIDE, Item, Repeat, Source, find_repeats
from gtco.ir.graph import FusedGraph, Graph, GraphBuilder, Group, subgraph
from gtco.ir.spec import TensorSpec


def chain(forms: str) -> list[Item]:
    """Each item reads the one ahead of it."""
    return [Item(form, ((at - 1, 0 if at else "x"),)) for at, form in enumerate(forms)]


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        ("", []),
        ("abcd", []),
        ("aabb", []),  # would hide one item each
        ("aaa", [(0, 1, 3)]),
        ("abcbcbcd", [(1, 2, 3)]),
        ("xabcabcabcy", [(1, 3, 3)]),
        ("aabaabaab", [(0, 3, 3)]),  # the whole layer, not the pair in it
        ("aabababc", [(1, 2, 3)]),  # not the first pair
        ("abababxcdcd", [(0, 2, 3), (7, 2, 2)]),
    ],
)
def test_repeats_that_hide_the_most(forms: str, expected: list[tuple[int, int, int]]) -> None:
    assert find_repeats(chain(forms)) == tuple(Repeat(*each) for each in expected)


def layers(*residuals: Source) -> list[Item]:
    """A stem, then layers of two items; the second also reads what its residual says."""
    items = [Item("stem", ((OUTSIDE, "x"),))]
    for residual in residuals:
        at = len(items)
        items.append(Item("up", ((at - 1, 0),)))
        items.append(Item("down", ((at, 0), residual)))
    return items


def test_the_first_layer_reads_from_ahead_what_later_ones_read_from_the_one_before() -> None:
    stem, *rest = chain("sababab")
    aside = Item("aside", ((0, 0),))
    later = [Item(each.form, tuple((at + 1, v) for at, v in each.reads)) for each in rest[1:]]
    # The first layer's neighbour is not what it reads.
    assert find_repeats([stem, aside, rest[0], *later]) == (Repeat(2, 2, 3),)


def test_a_value_from_ahead_of_the_loop_may_be_one_for_all() -> None:
    assert find_repeats(layers(*[(0, 0)] * 4)) == (Repeat(1, 2, 4),)


def test_layers_that_read_elsewhere_are_no_loop() -> None:
    # The third layer's residual is the model's input; the fourth reads it as a loop would.
    items = layers((0, 0), (2, 0), (OUTSIDE, "x"), (6, 0))
    assert find_repeats(items) == (Repeat(1, 2, 2),)
    # All later layers read the first one's value: from inside the loop.
    assert find_repeats(layers((0, 0), (2, 0), (2, 0), (2, 0))) == (Repeat(3, 2, 3),)


def test_one_value_of_the_layer_before_stands_for_one_value_ahead() -> None:
    block = [("p", ((0, 0), (1, 0))), ("q", ((2, 0),)), ("p", ((3, 0), (3, 0))), ("q", ((4, 0),))]
    items = [Item("a", ()), Item("b", ()), *(Item(*each) for each in block)]
    assert find_repeats(items) == ()  # %a and %b cannot both be what the layer before gave


# -- in print --------------------------------------------------------------------------------------


def fused(graph: Graph) -> FusedGraph:
    """Each node a group."""
    groups = [
        Group(f"g{at}", subgraph(graph, [node], node.values)) for at, node in enumerate(graph.nodes)
    ]
    return FusedGraph(graph, tuple(groups))


def residual_layers(*, tapped: bool = False) -> FusedGraph:
    builder = GraphBuilder()
    x = last = builder.input("x", TensorSpec((2, 4), torch.float32))
    rows = builder.input("rows", TensorSpec((8, 4), torch.float32))
    middle = ""
    for number in range(3):
        up = builder.add("exp", x, hint=f"up{number}")
        part = builder.add("slice", rows, dim=0, start=2 * number, end=2 * number + 2)
        x = builder.add("add", up, part, hint=f"down{number}")
        middle = x if number == 1 else middle
    last = builder.add("relu", x, hint="last")
    return fused(builder.build([last, middle] if tapped else [last]))


def test_a_fused_graph_prints_the_first_of_its_layers() -> None:
    assert str(residual_layers()) == (
        "x3, where each later one reads %down0 of the one before in place of %x, and slices begin "
        "elsewhere:\n"
        "  g0(%x) -> %up0:\n"
        "    %up0: f32[2,4] = exp(%x)\n"
        "  g1(%rows) -> %slice:\n"
        "    %slice: f32[2,4] = slice(%rows, dim=0, end=2, start=0)\n"
        "  g2(%up0, %slice) -> %down0:\n"
        "    %down0: f32[2,4] = add(%up0, %slice)\n"
        "  read below: %down2, which is %down0 of the last\n"
        "g9(%down2) -> %last:\n"
        "  %last: f32[2,4] = relu(%down2)"
    )
    tapped = str(residual_layers(tapped=True))
    assert "  read below: %down1, which is %down0 of number 2\n" in tapped


def test_a_fused_graph_prints_whole_where_that_is_asked() -> None:
    text = residual_layers().text(fold=False)
    assert text.count("exp(") == 3 and "x3" not in text and text.startswith("g0(%x) -> %up0:\n")
