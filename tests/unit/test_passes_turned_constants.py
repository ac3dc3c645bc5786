"""A known right operand of a product is turned where no copy takes its rows as they are."""

from __future__ import annotations

import pytest
import torch

import gtco
from gtco.check import judge
from gtco.ir.interpreter import interpret
from gtco.passes.turned_constants import turn_constants
from tests.pass_checks import captured, check, ops, random


@pytest.mark.parametrize(
    "shape, dtype, turned",
    [
        ((3, 16, 7), torch.float16, True),
        ((3, 16, 7), torch.bfloat16, True),
        ((3, 16, 8), torch.float16, False),
        ((3, 16, 14), torch.float16, False),
        ((3, 12, 7), torch.float16, False),
        ((3, 16, 7), torch.float32, False),
    ],
    ids=["odd rows", "of bf16", "whole copies", "copies of 4 bytes", "columns of no whole copies",
         "of fp32"],
)  # fmt: skip
def test_which(shape: tuple[int, ...], dtype: torch.dtype, turned: bool) -> None:
    x, table = random(3, 5, shape[1], dtype=dtype), random(*shape, seed=1, dtype=dtype)
    graph, args = captured(lambda c, x: x @ c.table, x, table=table)
    result = check(turn_constants, graph, args)
    assert ops(result) == {"matmul": 1}
    assert any(node.op == "permute" for node in result.nodes) == turned


@pytest.mark.parametrize(
    "shape, columns, dtype, longer",
    [
        ((5, 66), 8, torch.float32, 68),
        ((3, 5, 7), 16, torch.float16, 8),
        ((5, 64), 8, torch.float32, None),
        ((5, 66), 6, torch.float32, None),
    ],
    ids=["of fp32", "of each product", "whole copies", "an image of no whole copies"],
)
def test_rows_of_a_left_operand(
    shape: tuple[int, ...], columns: int, dtype: torch.dtype, longer: int | None
) -> None:
    x, table = random(3, shape[-1], columns, dtype=dtype), random(*shape, seed=1, dtype=dtype)
    graph, args = captured(lambda c, x: c.table @ x, x, table=table)
    result = check(turn_constants, graph, args)
    assert ops(result) == {"matmul": 1}
    sizes = [constant.shape[-1] for constant in result.constants.values()]
    assert sizes == [longer or shape[-1]]
    assert any(node.op == "slice" for node in result.nodes) == (longer is not None)
    assert str(turn_constants(result)) == str(result)


def test_two_values_stay() -> None:
    x, y = random(3, 5, 16).half(), random(3, 16, 7, seed=1).half()
    graph, args = captured(lambda c, x, y: x @ y, x, y)
    assert str(check(turn_constants, graph, args)) == str(graph)


@pytest.mark.compiler
def test_a_kernel_reads_it_as_weights() -> None:
    x, table = random(3, 37, 32).half(), random(3, 32, 7, seed=1).half()

    class Positions(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ table

    model = Positions()
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    (launch,) = compiled.launches
    assert "matmul" in launch.ops
    exact = interpret(gtco.capture(model, (x,)), [x], dtype=torch.float64)[0]
    verdict = judge(compiled(x), model(x), exact, torch.float16)
    assert verdict.ok, verdict
