"""The rowwise sketch: derivation, compilation for two architectures, meaning on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal, Schedule
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.cost_model.model import draft_us
from gtco.cost_model.work import work_of
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.selection import first_choice
from gtco.target import TARGETS
from tests import tile_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("case", tile_groups.ROWWISE)
def test_compiles(case: str) -> None:
    group = tile_groups.ROWWISE[case]()
    assert not list(compile_for_all(lambda target: Rowwise(group, target)))


SMALL = [case for case in tile_groups.ROWWISE if case != "softmax_197"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", SMALL)
def test_is_right_on_the_cpu(case: str) -> None:
    group = tile_groups.ROWWISE[case]()
    values = inputs_of(group)
    for program in sample(Rowwise(group, H100), 1, seed=1):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_large_mean_keeps_its_variance() -> None:
    group = tile_groups.layer_norm(3, 200, dtype=torch.float32)
    values = inputs_of(group)
    values["x"] = values["x"] + 1000
    program = sample(Rowwise(group, H100), 0)[0]
    assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_amax_keeps_nan_and_row_order_does_not_matter() -> None:
    group = tile_groups.pool("amax", 4, 35, dims=(1,), keepdim=False, dtype=torch.float16)
    values = inputs_of(group)
    values["x"][2, 33] = float("nan")
    program = sample(Rowwise(group, H100), 0)[0]
    assert not wrong_outputs(program, group, values, run_on_host)
    first, second = (run_on_host(program, group, values, order) for order in (0, 1))
    assert all(torch.equal(first[n].nan_to_num(), second[n].nan_to_num()) for n in first)


@pytest.mark.compiler
def test_the_largest_element_is_the_first_and_nan_is_larger() -> None:
    group = tile_groups.argmax(5, 70, dim=1, dtype=torch.float32)
    values = inputs_of(group)
    x = values["x"] = values["x"].clamp(-1, 1)
    x[1, 40], x[2], x[3] = torch.nan, 0.0, torch.inf
    x[2, ::2] = -0.0
    for program in sample(Rowwise(group, H100), 3):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_groups_of_a_large_mean_keep_their_variance() -> None:
    group = tile_groups.group_norm(2, 9, 9, 40, groups=5, dtype=torch.float32)
    values = inputs_of(group)
    values["x"] = values["x"] + 1000
    program = sample(Rowwise(group, H100), 0)[0]
    assert not wrong_outputs(program, group, values, run_on_host)


def schedule_of(lanes: int, warps_per_row: int, row_warps: int, rows_first: int) -> Schedule:
    return {
        "lanes": lanes,
        "warps_per_row": warps_per_row,
        "row_warps": row_warps,
        "rows_first": rows_first,
    }


# Few elements of a middle dimension, which one thread reduces; odd sizes around them.
FEW: dict[str, Callable[[], Group]] = {
    "sum of 2": lambda: tile_groups.pool("sum", 3, 2, 37, dims=(1,), keepdim=True, dtype=F16),
    "mean of 3": lambda: tile_groups.pool("mean", 2, 3, 7, 19, dims=(1,), keepdim=False, dtype=F32),
    "amax of 4": tile_groups.ROWWISE["amax_of_4"],
    "amax of 16 bytes": lambda: tile_groups.pool(
        "amax", 16, 77, dims=(0,), keepdim=False, dtype=torch.int8
    ),
    "sum of 2 and 3": lambda: tile_groups.pool(
        "sum", 5, 2, 3, 33, dims=(1, 2), keepdim=False, dtype=BF16
    ),
    "argmax of 5": lambda: tile_groups.argmax(3, 5, 41, dim=1),
    "cumsum of 7": lambda: tile_groups.cumsum(2, 7, 35, dim=1, dtype=F32),
    "softmax of 9": lambda: tile_groups.softmax(2, 9, 37, dim=1),
    "standardized 3": lambda: tile_groups.standardize(4, 3, 45, dims=(1,), dtype=F16),
    "gated": tile_groups.ROWWISE["gated_sum_of_2"],
}


@pytest.mark.compiler
@pytest.mark.parametrize("case", FEW)
def test_a_thread_takes_a_whole_row_of_few_elements(case: str) -> None:
    group = FEW[case]()
    values = inputs_of(group)
    for row_warps in (1, 8):
        program = Rowwise(group, H100).emit(schedule_of(1, 1, row_warps, 1))
        assert not wrong_outputs(program, group, values, run_on_host)


# Short rows that lie side by side, of which several share a warp.
SHORT: dict[str, Callable[[], Group]] = {
    "units of 30": lambda: tile_groups.unit_rows(3, 23, 30),
    "units of 9": lambda: tile_groups.unit_rows(71, 9, dtype=BF16),
    "softmax of 9": lambda: tile_groups.softmax(7, 9, 9),
    "softmax of 48": lambda: tile_groups.softmax(37, 48, dtype=F32),
    "norm of 30": lambda: tile_groups.layer_norm(67, 30, residual=True),
    "argmax of 11": lambda: tile_groups.argmax(69, 11, dim=1, dtype=F32),
    "cumsum of 13": lambda: tile_groups.cumsum(70, 13, dim=1, dtype=BF16),
    "standardized 6": lambda: tile_groups.standardize(65, 6, dims=(-1,)),
}


@pytest.mark.compiler
@pytest.mark.parametrize("lanes", (1, 2, 4, 8))
@pytest.mark.parametrize("case", SHORT)
def test_short_rows_share_a_warp(case: str, lanes: int) -> None:
    group = SHORT[case]()
    program = Rowwise(group, H100).emit(schedule_of(lanes, 1, 8, 0))
    assert not wrong_outputs(program, group, inputs_of(group), run_on_host)


def chosen(group: Group) -> tuple[str, tuple[int, ...], float]:
    """The sketch, the values of its knobs, microseconds of the draft."""
    best, reason = first_choice(derive(group, "rowwise", H100))
    assert best is not None, reason
    return best.sketch.name, tuple(best.program.schedule.values()), draft_us(work_of(best), H100)


def test_more_short_rows_than_threads_have_two_vectors_a_lane() -> None:
    sketch, schedule, us = chosen(tile_groups.unit_rows(64, 6, 64, 30))
    assert (sketch, schedule) == ("rowwise", (8, 1, 8, 0)) and us < 3
    assert chosen(tile_groups.unit_rows(64, 30))[1] == (16, 1, 1, 0), "as many lanes as vectors"
    assert chosen(tile_groups.softmax(1, 6, 196, 9, 9))[2] < 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: tile_groups.pool("sum", 1, 2, 64, 56, 56, dims=(1,), keepdim=False, dtype=F16),
        lambda: tile_groups.gated_sum(1, 2, 128, 56, 56),
        lambda: tile_groups.pool("amax", 1, 2, 49, 4, 16, 96, dims=(3,), keepdim=False, dtype=F16),
        lambda: tile_groups.pool("mean", 1, 13, 200_000, dims=(1,), keepdim=False, dtype=F32),
    ],
)
def test_few_elements_of_a_middle_dimension_are_one_threads(make: Callable[[], Group]) -> None:
    sketch, schedule, us = chosen(make())
    assert (sketch, schedule) == ("rowwise", (1, 1, 8, 1)) and us < 3


def test_rows_that_fill_warps_keep_their_schedules() -> None:
    for shape, schedule in {
        (197, 768): (32, 2, 1, 0),
        (784, 384): (32, 1, 1, 0),
        (3136, 96): (16, 1, 4, 0),
    }.items():
        assert chosen(tile_groups.layer_norm(*shape))[1] == schedule
    pixels = tile_groups.pool("mean", 1, 7, 7, 2048, dims=(1, 2), keepdim=True, dtype=F16)
    assert chosen(pixels)[1] == (1, 8, 1, 1)


def test_rows_of_less_than_a_line_share_the_lines_that_a_warp_asks_for() -> None:
    sketch = Rowwise(tile_groups.softmax(4096, 9, dtype=F32), H100)

    def requests(lanes: int) -> int:
        program = sketch.emit(schedule_of(lanes, 1, 1, 0))
        return work_of(Candidate(sketch, program)).block.requests

    assert 32 * 36 / 128 * 9 <= requests(1) < 1.2 * 32 * 36 / 128 * 9, "nine loads of nine lines"
    assert requests(16) < 3, "a load of two rows"


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = Rowwise(tile_groups.layer_norm(1, 197, 768, residual=True), H100)
    golden("rowwise_layer_norm.cu", sketch.emit(next(iter(sketch.defaults()))).source)


@pytest.mark.parametrize("columns", (1, 7, 64, 197, 768, 1000, 4096, 12672, 16384))
def test_any_number_of_columns_has_a_default(columns: int) -> None:
    for group in (
        tile_groups.layer_norm(3, columns, residual=True),
        tile_groups.layer_norm(1000, columns, residual=True),
        tile_groups.softmax(3, columns),
    ):
        for target in TARGETS.values():
            assert next(iter(Rowwise(group, target).defaults()))


def test_columns_that_are_not_contiguous_put_neighbouring_rows_in_a_warp() -> None:
    group = tile_groups.pool("mean", 2, 197, 96, dims=(1,), keepdim=False, dtype=torch.float16)
    schedule = next(iter(Rowwise(group, H100).defaults()))
    assert schedule["rows_first"] == 1


@pytest.mark.parametrize(("times", "first"), [(1, 1), (2, 1), (4, 1), (64, 0)])
def test_a_load_of_a_few_rows_at_once_counts_as_one_of_each(times: int, first: int) -> None:
    """RAFT's weights of nine neighbours, which both parts of its flow are multiplied by."""
    b = GraphBuilder()
    weights = b.input("weights", TensorSpec((1, 9, 640), F32))
    flow = b.input("flow", TensorSpec((times, 640, 9), F32))
    turned = b.add("permute", flow, dims=(0, 2, 1))
    total = b.add("sum", b.add("mul", weights, turned), dims=(1,), keepdim=False)
    group = Group("weighted", b.build([total]))
    schedule = next(iter(Rowwise(group, H100).defaults()))
    assert schedule["rows_first"] == first


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (197, 768, (32, 2, 1)),
        (4096, 768, (32, 1, 4)),
        (128, 12544, (32, 16, 1)),
        (1024, 12544, (32, 8, 1)),  # two blocks a multiprocessor
        (6304, 768, (32, 1, 8)),
        (6304, 2048, (32, 2, 4)),
        (4096, 384, (16, 1, 4)),
        (66_800, 256, (8, 1, 8)),
        (16384, 192, (16, 1, 8)),
        (4096, 100, (32, 1, 8)),
    ],
)
def test_many_rows_have_few_threads_each(
    rows: int, columns: int, expected: tuple[int, int, int]
) -> None:
    """A default's lanes, warps of a row and such sets of warps of a block."""
    sketch = Rowwise(tile_groups.softmax(rows, columns), H100)
    lanes, warps, row_warps, _ = next(iter(sketch.defaults())).values()
    assert (lanes, warps, row_warps) == expected


def test_refuses_reductions_of_different_rows() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 8), torch.float32))
    outputs = [b.add("sum", x, dims=(dim,), keepdim=True) for dim in (0, 1)]
    with pytest.raises(Illegal, match="same dimensions"):
        Rowwise(Group("g", b.build(outputs)), H100)


def test_says_which_limit_broke() -> None:
    sketch = Rowwise(tile_groups.softmax(3, 4096), H100)
    schedule = {"lanes": 1, "warps_per_row": 1, "row_warps": 1, "rows_first": 0}
    with pytest.raises(Illegal, match="4096 elements of a row a thread"):
        sketch.emit(schedule)
    with pytest.raises(Illegal, match="threads"):
        sketch.emit({**schedule, "lanes": 32, "warps_per_row": 16, "row_warps": 8})
