"""Samplings at points of a grid: right inside, outside and at the border, captured without ATen."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gtco
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.grid_sample import GridSample
from gtco.cost_model.model import roofline_us
from gtco.cost_model.work import gathered_bytes, work_of
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.references import grid_sample
from gtco.ir.spec import TensorSpec
from gtco.passes import run_pipeline
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import stencil_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs
from tests.pass_checks import captured, check, ops, random

H100 = TARGETS["sm_90a"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", stencil_groups.SAMPLES)
def test_right_on_the_host_build(case: str) -> None:
    group = stencil_groups.SAMPLES[case]()
    for program in sample(GridSample(group, H100), 1):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


def test_heads_are_read_where_they_lie() -> None:
    sketch = GridSample(stencil_groups.SAMPLES["bilinear_heads"](), H100)
    assert sketch.vector == 8
    source = next(iter(sample(sketch, 0))).source
    assert "load_packed<2>" in source


@pytest.mark.compiler
@pytest.mark.parametrize("share", [1, 2, 4])
def test_neighbours_may_share_the_points_of_a_row(share: int) -> None:
    group = stencil_groups.SAMPLES["sum_of_heads"]()
    sketch = GridSample(group, H100)
    for vector, repeat in ((8, 2), (2, 1)):
        schedule = {"vector": vector, "repeat": repeat, "threads": 64, "share": share}
        program = sketch.emit(schedule)
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)
    with pytest.raises(Illegal, match="8 is no value of the knob share"):
        sketch.emit({"vector": 8, "repeat": 1, "threads": 64, "share": 8})


def test_few_rows_are_shared_before_vectors_are_narrow() -> None:
    def first(rows: int) -> tuple[int, int]:
        group = stencil_groups.summed(8, 32, rows, ((100, 134, 4), (50, 67, 4)), heads=True)
        schedule = next(iter(GridSample(group, H100).defaults()))
        return schedule["vector"], schedule["share"]

    assert [first(rows) for rows in (20000, 1500, 300)] == [(8, 1), (8, 2), (4, 4)]


@pytest.mark.parametrize("share", [1, 2, 4])
def test_every_pixel_that_is_read_is_priced(share: int) -> None:
    def group(points: int) -> Group:
        return stencil_groups.summed(8, 32, 1024, ((20, 30, points), (10, 15, points)), heads=True)

    sketch = GridSample(group(4), H100)
    program = sketch.emit({"vector": 8, "repeat": 1, "threads": 128, "share": share})
    work = work_of(Candidate(sketch, program))
    bytes_of_pixels = 8 * 1024 * 8 * 4 * 32 * 2  # images, rows, points, neighbours, channels
    assert (
        work.blocks * work.block.l2_bytes == gathered_bytes(sketch.group.graph) == bytes_of_pixels
    )
    assert work.block.steps == 8 // share
    prices = [roofline_us(group(points), H100) for points in (1, 4, 16)]
    assert prices[0] < prices[1] < prices[2]


@pytest.mark.compiler
@pytest.mark.parametrize(("mode", "border", "align"), stencil_groups.KINDS)
@pytest.mark.parametrize("size", [(4, 8), (1, 2)])
def test_hard_points(mode: str, border: bool, align: bool, size: tuple[int, int]) -> None:
    """Sizes are powers of two, where the places are exact; two pixels are no numbers."""
    image = random(1, 3, *size, dtype=torch.float32)
    image[0, 1, 0, 1], image[0, 2, -1, 0] = math.nan, math.inf
    grid = stencil_groups.hard_points(*size, align)
    padding = "border" if border else "zeros"

    def model(m: object, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, mode, padding, align)

    graph, args = captured(model, image, grid)
    (expected,) = interpret(graph, args)
    compiled = gtco.compile(_Module(mode, padding, align), args, target="host")
    torch.testing.assert_close(compiled(*args), expected, equal_nan=True)
    # torch's own, where its kernels for CPUs and GPUs do not differ.
    numbers = grid.isfinite().all(-1)[:, None] & (grid.abs() < 1e30).all(-1)[:, None]
    at_numbers = numbers.expand_as(expected)
    eager = F.grid_sample(image, grid, mode, padding, align)
    torch.testing.assert_close(expected[at_numbers], eager[at_numbers], equal_nan=True)
    if not border:
        none = ~grid.isfinite().all(-1)[:, None].expand_as(expected)
        assert none.any() and not expected[none].any()


class _Module(torch.nn.Module):
    def __init__(self, mode: str, padding: str, align: bool) -> None:
        super().__init__()
        self.given = (mode, padding, align)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, *self.given)


@pytest.mark.parametrize(("mode", "border", "align"), stencil_groups.KINDS)
def test_the_reference_is_torchs(mode: str, border: bool, align: bool) -> None:
    x, grid = random(2, 3, 5, 7), random(2, 4, 6, 2, seed=1)
    padding = "border" if border else "zeros"
    eager = F.grid_sample(x, grid, mode, padding, align)
    given = {"mode": mode, "border": border, "align_corners": align}
    mine = grid_sample(x.permute(0, 2, 3, 1), grid, **given)
    torch.testing.assert_close(mine.permute(0, 3, 1, 2), eager)
    halves = [t.half() for t in (x.permute(0, 2, 3, 1), grid)]
    wide = grid_sample(*(t.float() for t in halves), **given)
    assert torch.equal(grid_sample(*halves, **given), wide.half()), "coordinates lose digits"


@pytest.mark.parametrize(("mode", "border", "align"), stencil_groups.KINDS)
def test_samplings_are_captured(mode: str, border: bool, align: bool) -> None:
    padding = "border" if border else "zeros"
    graph, args = captured(
        lambda m, x, grid: F.grid_sample(x, grid, mode, padding, align) * 2,
        random(2, 3, 6, 7),
        random(2, 4, 5, 2, seed=1),
    )
    assert ops(check(lambda g, log: run_pipeline(g, log=log), graph, args)) == {
        "grid_sample": 1,
        "mul": 1,
    }


def test_bicubic_stays_torchs_by_name() -> None:
    graph, _ = captured(
        lambda m, x, grid: F.grid_sample(x, grid, "bicubic", "zeros", False),
        random(1, 3, 6, 7),
        random(1, 4, 5, 2, seed=1),
    )
    (node,) = (node for node in graph.nodes if node.op == "aten")
    assert node.attrs["target"].startswith("aten.grid_sampler")


def test_images_of_two_types_are_refused() -> None:
    b, points = GraphBuilder(), TensorSpec((1, 3, 2, 2), torch.float32)
    operands = [
        b.input("x", TensorSpec((1, 4, 4, 8), torch.float16)),
        b.input("near", points),
        b.input("y", TensorSpec((1, 2, 2, 8), torch.float32)),
        b.input("far", points),
        b.input("weights", TensorSpec((1, 3, 4), torch.float32)),
    ]
    y = b.add("sample_sum", *operands, mode="bilinear", border=False, align_corners=False)
    with pytest.raises(Illegal, match=r"%y is torch.float32, and another image torch.float16"):
        GridSample(Group("mixed", b.build([y])), H100)


@pytest.mark.parametrize(("case", "share"), [("bilinear_heads", 1), ("sum_of_heads", 4)])
def test_source(golden: Callable[[str, object], None], case: str, share: int) -> None:
    sketch = GridSample(stencil_groups.SAMPLES[case](), H100)
    schedule = {"vector": 8, "repeat": 1, "threads": 128, "share": share}
    golden(f"grid_sample_{case}.cu", sketch.emit(schedule).code)


def test_kernels_compile_without_spills() -> None:
    for case in ("bilinear", "bilinear_heads", "nearest_border", "sum_of_heads"):
        group = stencil_groups.SAMPLES[case]()
        assert not list(compile_for_all(lambda target, group=group: GridSample(group, target)))
