"""Layouts against torch's own views, element by element."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.ir.views import Layout, NotAView, resolve, store_layout


def position(layout: Layout, index: tuple[int, ...]) -> int:
    """The element's place in the buffer, by the definition of a hierarchical dimension."""
    at = layout.offset
    for axis, i in zip(layout.dims, index, strict=True):
        for extent, stride in reversed(axis):
            at += i % extent * stride
            i //= extent
    return at


def elements(layout: Layout) -> list[int]:
    return [position(layout, i) for i in itertools.product(*(range(n) for n in layout.shape))]


@pytest.mark.parametrize("seed", range(60))
def test_random_view_chains_match_torch(seed: int) -> None:
    chosen = random.Random(seed)
    shape = tuple(chosen.choice((1, 2, 3, 4, 6)) for _ in range(chosen.randint(1, 4)))
    builder = GraphBuilder()
    base = value = builder.input("x", TensorSpec(shape, torch.float32))
    for _ in range(chosen.randint(1, 5)):
        sizes = builder.specs[value].sizes
        match chosen.choice(("permute", "slice", "reshape", "expand")):
            case "permute":
                value = builder.add(
                    "permute", value, dims=chosen.sample(range(len(sizes)), len(sizes))
                )
            case "slice":
                dim = chosen.randrange(len(sizes))
                start = chosen.randrange(sizes[dim])
                end = chosen.randint(start + 1, sizes[dim])
                value = builder.add("slice", value, dim=dim, start=start, end=end)
            case "reshape":
                flat = [
                    factor
                    for size in sizes
                    for factor in ((2, size // 2) if size % 2 == 0 else (size,))
                ]
                value = builder.add("reshape", value, shape=tuple(flat))
            case "expand":
                value = builder.add("expand", value, shape=(2, *sizes))
    graph = builder.build([value])
    data = torch.arange(graph.specs[base].numel).reshape(shape)
    from gtco.ir.interpreter import interpret

    (expected,) = interpret(graph, [data])
    try:
        root, layout = resolve(graph, value)
    except NotAView:
        return
    assert root == base
    assert layout.shape == tuple(expected.shape)
    assert elements(layout) == expected.flatten().tolist()


def test_a_reshape_that_cuts_a_stride_is_no_view() -> None:
    layout = Layout.contiguous((2, 3)).permute((1, 0))
    with pytest.raises(NotAView, match="cuts"):
        layout.reshape((2, 3))


def test_patches_of_an_image_are_a_view() -> None:
    layout = Layout.contiguous((3, 14, 16, 14, 16)).permute((1, 3, 0, 2, 4)).reshape((196, 768))
    assert layout.dims == (((14, 3584), (14, 16)), ((3, 50176), (16, 224), (16, 1)))
    assert layout.vector(8) == 8


@pytest.mark.parametrize(
    ("layout", "width"),
    [
        (Layout.contiguous((197, 768)), 8),
        (Layout.contiguous((197, 1000)), 8),
        (Layout.contiguous((5, 91)), 1),
        (Layout.contiguous((5, 12)), 4),
        (Layout.contiguous((5, 64)).slice(1, 4, 12), 4),
        (Layout.contiguous((5, 64)).slice(1, 1, 9), 1),
    ],
)
def test_vectors_are_aligned(layout: Layout, width: int) -> None:
    assert layout.vector(8) == width


def test_store_layout_puts_heads_beside_each_other() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorSpec((2, 3, 5, 4), torch.float32))
    value = builder.add("relu", x)
    stored = builder.add("permute", value, dims=(0, 2, 1, 3))
    stored = builder.add("reshape", stored, shape=(2, 5, 12))
    graph = builder.build([stored])
    layout = store_layout(graph, value, stored)
    data = torch.arange(120).reshape(2, 3, 5, 4)
    buffer = torch.empty(120, dtype=torch.long)
    buffer[torch.tensor(elements(layout))] = data.flatten()
    assert torch.equal(buffer.reshape(2, 5, 12), data.permute(0, 2, 1, 3).reshape(2, 5, 12))


def even_columns(columns: int, start: int = 0, again: int = 1) -> tuple[Graph, str, str]:
    """[3, columns] of which one of each pair is stored by heads of two, and both values."""
    builder = GraphBuilder()
    value = stored = builder.add(
        "relu", builder.input("x", TensorSpec((3, columns), torch.float32))
    )
    for _ in range(again):
        stored = builder.add("slice", stored, dim=1, start=start, end=columns, step=2)
    rows, left = builder.specs[stored].sizes
    stored = builder.add("reshape", stored, shape=(rows, left // 2, 2))
    stored = builder.add("permute", stored, dims=(1, 0, 2))
    return builder.build([stored]), value, stored


def test_one_of_each_pair_is_stored() -> None:
    graph, value, stored = even_columns(12)
    layout = store_layout(graph, value, stored)
    data, buffer = torch.arange(36).reshape(3, 12), torch.empty(18, dtype=torch.long)
    assert layout.even is not None and layout.even.shape == (3, 6)
    assert layout.even.vector(8) == 2
    buffer[torch.tensor(elements(layout.even))] = data[:, ::2].flatten()
    assert torch.equal(buffer.reshape(3, 3, 2), data[:, ::2].reshape(3, 3, 2).permute(1, 0, 2))
    assert Layout.contiguous((3, 12)).even is None


@pytest.mark.parametrize(("start", "again"), [(1, 1), (0, 2)])
def test_nothing_else_is_dropped(start: int, again: int) -> None:
    with pytest.raises(NotAView, match="slice drops or repeats elements"):
        store_layout(*even_columns(16, start, again))
