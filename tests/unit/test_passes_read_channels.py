"""A linear reads channels in the order in which they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gtco
from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes.read_channels import order_read_channels
from tests.pass_checks import check, random

F64 = torch.float64


def alternating(
    order: tuple[int, ...] = (1, 2, 4, 0, 3),
    *,
    sizes: tuple[int, ...] = (2, 3, 5, 2, 4),
    known: bool = True,
    twice: bool = False,
) -> tuple[Graph, tuple[Tensor, ...]]:
    """A linear of three dimensions of five, permuted, as its channels."""
    b = GraphBuilder()
    x = b.add("tanh", b.input("x", TensorSpec(sizes, F64)))
    moved = b.add("permute", x, dims=order)
    rows = [sizes[dim] for dim in order[:2]]
    channels = sizes[order[2]] * sizes[order[3]] * sizes[order[4]]
    value = b.add("reshape", moved, shape=(*rows, channels))
    shape = (6, channels)
    w = b.constant("w", random(*shape, seed=1)) if known else b.input("w", TensorSpec(shape, F64))
    outputs = [b.add("linear", value, w, b.constant("bias", random(6, seed=2)))]
    if twice:
        outputs.append(b.add("relu", value))
    return b.build(outputs), (random(*sizes), *(() if known else (random(*shape, seed=1),)))


def weights(graph: Graph) -> Tensor:
    (linear,) = (node for node in graph.nodes if node.op == "linear")
    return graph.constants[linear.inputs[1]]


@pytest.mark.parametrize("order", [(1, 2, 4, 0, 3), (1, 2, 4, 3, 0), (0, 1, 4, 2, 3)])
def test_columns_of_weights_come_as_channels_lie(order: tuple[int, ...]) -> None:
    graph, args = alternating(order)
    found = check(order_read_channels, graph, args)
    parts = [(2, 3, 5, 2, 4)[dim] for dim in order[2:]]
    lying = sorted(range(3), key=lambda at: order[2 + at])
    expected = weights(graph).reshape(6, *parts).permute(0, *(1 + at for at in lying))
    assert torch.equal(weights(found), expected.reshape(6, -1))
    assert str(order_read_channels(found)) == str(found)


@pytest.mark.parametrize("order", [(1, 2, 0, 3, 4), (0, 1, 3, 2, 4), (0, 4, 1, 2, 3)])
def test_channels_stay_whose_last_part_lies_side_by_side_or_lies_nowhere_so(
    order: tuple[int, ...],
) -> None:
    graph, _ = alternating(order)
    assert str(order_read_channels(graph)) == str(graph)


@pytest.mark.parametrize("attrs", [{"known": False}, {"twice": True}])
def test_what_is_read_otherwise_stays(attrs: dict[str, bool]) -> None:
    graph, _ = alternating(**attrs)
    assert str(order_read_channels(graph)) == str(graph)


class Frequencies(torch.nn.Module):
    """A 1x1 convolution of real and imaginary parts that alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfftn(x.float(), dim=(-2, -1), norm="ortho")
        parts = torch.stack((f.real, f.imag), 2).flatten(1, 2)
        y = self.mix(parts.to(x.dtype)).relu().unflatten(1, (-1, 2)).float()
        f = torch.complex(y[:, :, 0], y[:, :, 1])
        return torch.fft.irfftn(f, s=x.shape[-2:], dim=(-2, -1), norm="ortho").to(x.dtype)


def test_parts_of_a_transform_are_stored_in_rows_of_channels() -> None:
    """By the products themselves, on either side of the convolution, and in whole vectors."""
    x = random(1, 16, 32, 32).half()
    plan, _ = make_plan(Frequencies().half(), (x,), None, Options.of(target="sm_90a"))
    programs = [each.program for each in plan.launches if each.program is not None]
    products = [program for program in programs if program.family == "gemm"]
    assert len(products) == 5 and len(programs) == len(plan.launches) == 6
    assert all("VECTOR = 8" in program.source for program in products)


@pytest.mark.compiler
def test_a_model_of_parts_is_right() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 16, 6, 6)
    model = Frequencies()
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
