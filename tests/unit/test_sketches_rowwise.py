"""The rowwise sketch: derivation, compilation for two architectures, meaning on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import tile_groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]


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


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = Rowwise(tile_groups.layer_norm(1, 197, 768, residual=True), H100)
    golden("rowwise_layer_norm.cu", sketch.emit(next(iter(sketch.defaults()))).source)


@pytest.mark.parametrize("columns", (1, 7, 64, 197, 768, 1000, 4096, 12672, 16384))
def test_any_number_of_columns_has_a_default(columns: int) -> None:
    for group in (
        tile_groups.layer_norm(3, columns, residual=True),
        tile_groups.softmax(3, columns),
    ):
        for target in TARGETS.values():
            assert next(iter(Rowwise(group, target).defaults()))


def test_columns_that_are_not_contiguous_put_neighbouring_rows_in_a_warp() -> None:
    group = tile_groups.pool("mean", 2, 197, 96, dims=(1,), keepdim=False, dtype=torch.float16)
    schedule = next(iter(Rowwise(group, H100).defaults()))
    assert schedule["rows_first"] == 1


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (197, 768, (32, 2, 1)),
        (4096, 768, (32, 1, 4)),
        (6304, 768, (32, 1, 8)),
        (6304, 2048, (32, 2, 4)),
        (4096, 384, (16, 1, 4)),
        (16384, 192, (8, 1, 4)),
        (4096, 100, (16, 1, 4)),
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
