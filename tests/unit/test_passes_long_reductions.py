"""A reduction of all pixels of few channels becomes two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.compiler import make_plan
from gtco.ir.graph import Graph
from gtco.options import Options
from gtco.passes import long_reductions
from gtco.passes.long_reductions import split_long_reductions
from tests.faults.test_pass_faults import planted
from tests.pass_checks import Function, captured, check, random

F16, F32 = torch.float16, torch.float32


def reduced(op: str, *shape: int, keepdim: bool = True, dtype: torch.dtype = F32) -> Graph:
    def run(c: nn.Module, x: Tensor) -> Tensor:
        return getattr(x, op)((1, 2), keepdim=keepdim)  # type: ignore[no-any-return]

    return captured(run, random(*shape, dtype=dtype))[0]


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("op", ["mean", "sum", "amax"])
def test_rows_of_pixels_come_first(op: str, keepdim: bool, dtype: torch.dtype) -> None:
    graph = reduced(op, 2, 48, 56, 5, keepdim=keepdim, dtype=dtype)
    result = check(split_long_reductions, graph, (random(2, 48, 56, 5, dtype=dtype, seed=3),))
    steps = [node for node in result.nodes if node.op == op]
    assert [node.outputs[0].sizes for node in steps] == [(2, 48, 1, 5), (2, 1, 1, 5)]
    assert all(node.outputs[0].dtype == F32 for node in steps)


@pytest.mark.parametrize(
    ("shape", "dims", "parts"),
    [
        ((1, 13, 40, 40, 54), (1, 2, 3), 50),
        ((2, 1, 4096, 5), (1, 2), 64),
        ((2, 4096, 1, 5), (1, 2), 64),
        ((3, 4100, 24), (1,), 50),
        ((1, 7, 9, 56, 100), (1, 2, 3), 63),
        ((48, 48, 48, 3), (0, 1, 2), 128),
        ((2, 3, 3, 2000, 4), (2, 3), 24),
    ],
    ids=["volumes", "one row", "one column", "tokens", "a cut", "all pixels", "frames"],
)
def test_as_many_parts_as_there_are_blocks_for(
    shape: tuple[int, ...], dims: tuple[int, ...], parts: int
) -> None:
    graph, args = captured(lambda c, x: x.mean(dims, keepdim=True), random(*shape, dtype=F16))
    result = check(split_long_reductions, graph, args)
    steps = [node.outputs[0].sizes for node in result.nodes if node.op == "mean"]
    ahead, behind = shape[: dims[0]], shape[dims[-1] + 1 :]
    assert steps == [(*ahead, parts, 1, *behind), (*ahead, 1, 1, *behind)]


@pytest.mark.parametrize(
    ("height", "width", "parts"), [(102, 30, 100), (52, 82, 200), (52, 85, None)]
)
def test_a_slice_is_cut_where_strides_express_it(
    height: int, width: int, parts: int | None
) -> None:
    """Any other reshape would copy it first: 83 pixels of a row fall into no parts."""
    x = random(1, height, width, 8, dtype=F32)
    graph, args = captured(lambda c, x: x[:, 1:-1, 1:-1].sum((1, 2)), x)
    result = check(split_long_reductions, graph, args)
    steps = [node.outputs[0].sizes for node in result.nodes if node.op == "sum"]
    assert steps == ([(1, parts, 1, 8), (1, 1, 1, 8)] if parts else [(1, 8)])


@pytest.mark.parametrize(
    "shape",
    [(2, 32, 56, 5), (64, 48, 56, 24), (2, 43, 43, 2048), (1, 1, 4099, 5)],
    ids=["few pixels", "enough blocks", "enough channels", "no parts"],
)
def test_others_stay(shape: tuple[int, ...]) -> None:
    graph = reduced("mean", *shape)
    assert str(check(split_long_reductions, graph, (random(*shape, dtype=F32),))) == str(graph)


@pytest.mark.parametrize(
    ("shape", "dims", "parts"),
    [
        ((4, 40000), (1,), 32),
        ((300, 200, 200), (1, 2), 10),
        ((2, 3, 65536), (-1,), 32),
        ((1, 3 * 2**15), (1,), 128),
        ((4, 2**14), (1,), None),
        ((4, 65537), (1,), None),
    ],
    ids=["rows", "maps", "a few", "one row", "a block has it", "a prime"],
)
@pytest.mark.parametrize("op", ["sum", "amax"])
def test_rows_that_no_block_has_registers_for(
    op: str, shape: tuple[int, ...], dims: tuple[int, ...], parts: int | None
) -> None:
    x = random(*shape, dtype=F16)
    graph, args = captured(lambda c, x: getattr(x, op)(dims), x)
    result = check(split_long_reductions, graph, args)
    made = [node.outputs[0].numel for node in result.nodes if node.op == op]
    rows = result.nodes[-1].outputs[0].numel
    assert made == ([rows * parts, rows] if parts else [rows])
    plan, _ = make_plan(Function(lambda c, x: getattr(x, op)(dims)).eval(), args, None,
                        Options.of(target="sm_90a"))  # fmt: skip
    assert all(each.program is not None for each in plan.launches) == (shape != (4, 65537))


@pytest.mark.parametrize("dims", [(0, 1), (1, 3), (2, 3), (1,), (0, 1, 2)])
def test_which_dimensions(dims: tuple[int, ...]) -> None:
    x = random(48, 48, 48, 3, dtype=F32)
    graph, args = captured(lambda c, x: x.sum(dims), x)
    result = check(split_long_reductions, graph, args)
    assert (str(result) == str(graph)) == (dims not in ((0, 1), (0, 1, 2))), "the last is kept"


def test_the_mean_of_a_wide_gate_is_two_kernels() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return x * x.mean((2, 3), keepdim=True).sigmoid()

    fused = gtco.fuse(gtco.capture(Gate().half().eval(), (torch.zeros(1, 8, 64, 64).half(),)))
    assert sum(any(node.op == "mean" for node in group.compute) for group in fused) == 2


def test_planted_faults_are_caught() -> None:
    for before, after in (
        ("(match.first + 1,), keepdim=True", "(match.first,), keepdim=True"),
        ('value = edit.add("cast", value, dtype=kept)', "pass"),
        ("dims[-1] == rank - 1", "False"),
        ("pixels > MAX_COLUMNS", "pixels > 0"),
    ):
        module = planted(long_reductions, before, after)
        with pytest.raises(Exception):  # noqa: B017
            for shape, dims in (((2, 48, 56, 5), (1, 2)), ((2, 5, 48, 56), (2, 3))):
                graph, args = captured(
                    lambda c, x, dims=dims: x.mean(dims, keepdim=True), random(*shape, dtype=F16)
                )
                result = check(module.split_long_reductions, graph, args)
                means = [node.outputs[0].sizes for node in result.nodes if node.op == "mean"]
                assert dims != (1, 2) or means == [(2, 48, 1, 5), (2, 1, 1, 5)]
                assert dims == (1, 2) or len(means) == 1
