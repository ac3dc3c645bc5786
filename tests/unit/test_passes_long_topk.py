"""The first elements of a long row are found in parts of it."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

import gtco
from experiments.models.heads import Peaks
from gtco.compiler import make_plan
from gtco.ir.graph import Graph
from gtco.options import Options
from gtco.passes import long_topk
from gtco.passes.long_topk import LONG, split_long_topk
from tests.faults.test_pass_faults import planted
from tests.pass_checks import Function

H100 = Options.of(target="sm_90a")
CASES = {
    "even parts": (4, 8192 * 16),
    "filled up": (3, LONG + 3),
    "of more dimensions": (2, 2, 128, 1029),
}


def first(k: int, *, largest: bool, dims: int = 1) -> Function:
    return Function(
        lambda c, x: tuple(x.flatten(-dims).topk(k, largest=largest))  # type: ignore[arg-type,return-value]
    )


def of_ties(*shape: int, dtype: torch.dtype, largest: bool) -> Tensor:
    """Few different elements, among them such as fill rows up, which the last row has alone; what
    is ahead of all others in the first row is in its last part."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if dtype.is_floating_point:
        x[0, ..., 3] = math.nan
        last = -math.inf if largest else math.nan
    else:
        last = torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max
    x[0, ..., -2], x[-1] = last, last
    x[0, ..., -5] = 9 if largest else -9
    return x


def agrees(module: ModuleType, graph: Graph, x: Tensor) -> int:
    """How many topk the pass makes of `graph`, whose results stay to the last bit and place."""
    result = module.split_long_topk(graph)
    result.verify()
    for found, right in zip(gtco.interpret(result, (x,)), gtco.interpret(graph, (x,)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    return sum(node.op == "topk" for node in result.nodes)


@pytest.mark.parametrize("largest", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.int32, torch.int64))
@pytest.mark.parametrize("case", CASES)
def test_the_same_elements_in_the_same_order(case: str, dtype: torch.dtype, largest: bool) -> None:
    shape = CASES[case]
    x = of_ties(*shape, dtype=dtype, largest=largest)
    graph = gtco.capture(first(100, largest=largest, dims=len(shape) // 2), (x,))
    assert agrees(long_topk, graph, x) == 2


@pytest.mark.parametrize(
    ("columns", "k"),
    [(LONG, 10), (8192 * 16, 5000), (8192 * 16, 8193)],
    ids=["short", "half of the parts", "more than a part"],
)
def test_left_whole(columns: int, k: int) -> None:
    x = torch.zeros(1).expand(1, columns)
    graph = gtco.capture(first(k, largest=True), (x,))
    assert str(split_long_topk(graph)) == str(graph)


def test_parts_of_parts() -> None:
    """What the first parts leave may be long again."""
    x = torch.zeros(1).half().expand(1, 3_000_000)
    rows = [
        node.outputs[0].sizes
        for node in split_long_topk(gtco.capture(first(400, largest=True), (x,))).nodes
        if node.op == "topk"
    ]
    assert len(rows) == 3 and rows[-1] == (1, 400)


def test_a_detectors_peaks_have_kernels() -> None:
    """As CenterNet takes the best of all classes and pixels."""
    x = torch.zeros(1).half().expand(1, 80, 128, 128)
    plan, _ = make_plan(first(100, largest=True, dims=3), (x,), None, H100)
    assert all(launch.program is not None for launch in plan.launches)
    assert [len(launch.group.compute) for launch in plan.launches] == [1, 1, 3]


def test_what_lies_apart_is_copied_first() -> None:
    """Of a plan with a pool ahead, whose channels are last, neither stores nor loads pixel by
    pixel; rows that are whole in memory are read where they are."""
    model = Peaks()
    plan, _ = make_plan(model, (torch.zeros(1).half().expand(2, 80, 128, 128),), None, H100)
    steps = [launch.program for launch in plan.launches if launch.program is not None]
    names = [program.sketch for program in steps]
    assert names == ["transpose", "stencil", "transpose", "topk", "topk", "elementwise"]
    assert steps[1].schedule["vector"] == 8
    x = torch.randn(2, 40, 60, 50, generator=torch.Generator().manual_seed(4))
    for dims, copies in (((0, 2, 3, 1), 1), ((0, 1, 2, 3), 0)):
        function = Function(lambda c, x, dims=dims: tuple(x.permute(dims).flatten(1).topk(20)))  # type: ignore[misc]
        graph = gtco.capture(function, (x,))
        assert agrees(long_topk, graph, x) == 2
        assert sum(node.op == "copy" for node in split_long_topk(graph).nodes) == copies


@pytest.mark.compiler
def test_kernels_find_the_same() -> None:
    model, x = first(7, largest=True), of_ties(2, LONG + 3, dtype=torch.float32, largest=True)
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    graph = gtco.capture(model, (x,))
    for found, right in zip(compiled(x), gtco.interpret(graph, (x,)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def test_planted_faults_are_caught() -> None:
    for before, after in (
        ("-math.inf if largest else math.nan", "0.0"),
        ("-math.inf if largest else math.nan", "-math.inf if largest else math.inf"),
        ("info.min if largest else info.max", "0"),
        (".mul(length)", ".mul(length - 1)"),
        ('edit.add("gather", each, found', 'edit.add("gather", each, begins'),
    ):
        module, wrong = planted(long_topk, before, after), 0
        for dtype in (torch.float32, torch.int32):
            for largest in (True, False):
                x = of_ties(2, LONG + 3, dtype=dtype, largest=largest)
                graph = gtco.capture(first(9, largest=largest), (x,))
                try:
                    agrees(module, graph, x)
                except AssertionError:
                    wrong += 1
                else:
                    wrong += agrees(module, graph, x) == 1  # the rule raised
        assert wrong, before
