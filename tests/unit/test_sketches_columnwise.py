"""The columnwise sketch: what it takes, how wide it reads, what it costs, meaning on the CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.codegen.columns import column_spaces
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.columnwise import Columnwise
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.cost_model.model import draft_us
from gtco.cost_model.work import Work, work_of
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.selection import first_choice
from gtco.target import TARGETS
from tests import column_groups, tile_groups
from tests.faults.templates import check_caught, planted, verdicts
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]
F16, F32 = torch.float16, torch.float32
CASES = column_groups.COLUMNWISE


@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str) -> None:
    group = CASES[case]()
    assert not list(compile_for_all(lambda target: Columnwise(group, target)))


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_is_right_on_the_cpu(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group)
    for program in sample(Columnwise(group, H100), 3, seed=1):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("case", ["channels_of_f32", "groups_of_4", "stored_sum"])
def test_a_large_mean_and_an_outlier_keep_the_variance(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group)
    values["x"] = values["x"] + 1000
    values["x"][0, 0] = -1000  # the first rows of all, which others are merged with
    for program in sample(Columnwise(group, H100), 2):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_not_a_number_reaches_its_own_columns_alone_whatever_the_order() -> None:
    group = tile_groups.pool("amax", 40, 24, dims=(0,), keepdim=False, dtype=F16)
    values = inputs_of(group)
    values["x"][33, 2] = float("nan")
    for program in sample(Columnwise(group, H100), 2):
        assert not wrong_outputs(program, group, values, run_on_host)
        first, second = (run_on_host(program, group, values, order) for order in (0, 1))
        assert all(torch.equal(first[n].nan_to_num(), second[n].nan_to_num()) for n in first)


FAULTS: dict[str, tuple[str, str, str]] = {
    "rows of others count": ("mean_54", "active(s, first) ? combine(", "true ? combine("),
    "a row is skipped": ("mean_54", "first_ = first + STEP;", "first_ = first + STEP + 1;"),
    "the lower threads are lost": ("gated", "if (down_ + from < n) take", "if (false) take"),
    "the mean of what is apart": ("channels", "origin[i] + mean,", "mean,"),
    "a spread around the first row": (
        "channels_of_f32", "squares[i] - total[i] * mean", "squares[i]",
    ),
    "one column of a result": ("groups_of_3", "i < C::DEPTH; ++i) mean +=", "i < 1; ++i) mean +="),
    "columns that are apart": (
        "groups_of_3", "fmaf(C::LENGTH * apart, apart,", "fmaf(0.0f, apart,",
    ),
    "the first piece": ("mean_of_frames", "f(piece_ * C::LENGTH + row,", "f(row,"),
    "the first slab": ("gated", "col_ = slab_ * SPAN + ", "col_ = "),
}  # fmt: skip


@pytest.mark.compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str) -> None:
    case, old, new = FAULTS[fault]
    group = CASES[case]()
    sketch = Columnwise(group, H100)
    lanes = min(sketch.knobs()[0].choices)
    program = sketch.emit({"lanes": lanes, "threads": 64, "vectors": 1})
    assert verdicts(program, group) == []
    check_caught(planted(program, old, new), group)


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = Columnwise(column_groups.gated_mean(1, 13, 20, 20, 54), H100)
    golden("columnwise_gated_mean.cu", sketch.emit(next(iter(sketch.defaults()))).source)


# -- what it takes ---------------------------------------------------------------------------------


def refusal(group: Group) -> str:
    with pytest.raises(Illegal) as caught:
        Columnwise(group, H100)
    return str(caught.value)


def test_refusals_say_why() -> None:
    row = tile_groups.pool("mean", 3, 40, dims=(1,), keepdim=True, dtype=F16)
    assert "side by side" in refusal(row)
    turns = tile_groups.pool("sum", 3, 4, 5, 6, dims=(0, 2), keepdim=True, dtype=F16)
    assert "by turns" in refusal(turns)
    assert "whole rows" in refusal(tile_groups.softmax(3, 13, 40, dim=1))
    assert "reductions" in refusal(tile_groups.standardize(37, 24, dims=(0,)))
    assert "none" in refusal(tile_groups.merge_stats(9, 200))
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 30, 8), F16))
    apart = b.add("sub", x, b.add("mean", x, dims=(1,), keepdim=True))
    assert "again" in refusal(Group("g", b.build([apart])))


def test_the_spaces_of_a_shape() -> None:
    spaces = column_spaces((2, 5, 64, 32, 4), (2, 4))  # statistics of groups
    space = spaces[0]
    assert (space.rows, space.columns, space.length, space.depth) == (2 * 5 * 64, 128, 64, 4)
    assert (space.pieces, space.results) == (10, 320)
    assert (1,) in [each.across for each in column_spaces((2, 40, 7, 9), (2, 3))]
    assert not column_spaces((4, 5), (0, 1)) and not column_spaces((4, 1), (1,))


# -- what it chooses -------------------------------------------------------------------------------


def choice(group: Group) -> tuple[Candidate, Work]:
    best, reason = first_choice(derive(group, "rowwise", H100))
    assert best is not None, reason
    return best, work_of(best)


def mean(*shape: int, dims: tuple[int, ...], dtype: torch.dtype = F16) -> Group:
    return tile_groups.pool("mean", *shape, dims=dims, keepdim=True, dtype=dtype)


def statistics(*shape: int, groups: int, chunks: int) -> Group:
    return column_groups.statistics(*shape, groups=groups, chunks=chunks)


WIDE: dict[str, Callable[[], Group]] = {
    "a volume": lambda: statistics(1, 64, 128, 128, 32, groups=32, chunks=64),
    "a smaller one": lambda: statistics(1, 32, 64, 64, 64, groups=64, chunks=32),
    "images": lambda: statistics(1, 512, 512, 64, groups=64, chunks=32),
    "groups of two": lambda: statistics(1, 256, 256, 64, groups=32, chunks=32),
    "groups of four": lambda: statistics(1, 512, 512, 128, groups=32, chunks=16),
}


@pytest.mark.parametrize("case", WIDE)
def test_few_channels_are_read_side_by_side_by_a_block_for_each_multiprocessor(case: str) -> None:
    group = WIDE[case]()
    best, work = choice(group)
    assert best.sketch.name == "columnwise"
    assert best.sketch.vector == 8, "16 bytes a thread"  # type: ignore[attr-defined]
    assert 120 <= work.blocks <= 2 * H100.sm_count
    rows = Rowwise(group, H100)
    for schedule in itertools.islice(rows.defaults(), 1):  # none where a row fits no registers
        one = Candidate(rows, rows.emit(schedule))
        assert draft_us(work_of(one), H100) > 1.3 * draft_us(work, H100)


@pytest.mark.parametrize(("channels", "vector"), [(54, 2), (56, 8), (45, 1), (108, 4), (12, 4)])
def test_vectors_are_as_wide_as_the_rows_allow(channels: int, vector: int) -> None:
    sketch = Columnwise(mean(2, 40, 40, channels, dims=(1, 2)), H100)
    assert sketch.vector == vector
    least = min(sketch.knobs()[0].choices)
    assert min(32, channels * 2) <= least * vector * 2 <= channels * 2, "whole sectors"


# Columns that lie apart: the schedule, and microseconds in a model on an H100.
MEASURED: dict[str, tuple[Callable[[], Group], tuple[int, int, int, int], float]] = {
    "volume of 32": (WIDE["a volume"], (32, 16, 1, 0), 298.2),
    "volume of 64": (
        lambda: statistics(1, 32, 64, 64, 64, groups=64, chunks=8), (32, 16, 1, 0), 74.2,
    ),
    "volume of 128": (
        lambda: statistics(1, 16, 32, 32, 128, groups=128, chunks=4), (32, 8, 1, 0), 18.6,
    ),
    "clip of 54": (lambda: mean(1, 13, 40, 40, 54, dims=(1, 2, 3)), (32, 16, 1, 0), 22.5),
    "clip of 108": (lambda: mean(1, 13, 20, 20, 108, dims=(1, 2, 3)), (32, 16, 1, 0), 6.9),
    "clip of 216": (lambda: mean(1, 13, 10, 10, 216, dims=(1, 2, 3)), (4, 8, 1, 1), 2.7),
    "image of 32": (lambda: mean(1, 112, 112, 32, dims=(1, 2)), (32, 16, 1, 0), 14.6),
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED)
def test_the_draft_knows_what_narrow_reads_cost(case: str) -> None:
    make, values, us = MEASURED[case]
    sketch = Rowwise(make(), H100)
    names = ("lanes", "warps_per_row", "row_warps", "rows_first")
    work = work_of(Candidate(sketch, sketch.emit(dict(zip(names, values, strict=True)))))
    requests = work.block.requests * max(1.0, work.blocks / H100.sm_count)
    assert 1.5 + requests * H100.constants.request_us == pytest.approx(us, rel=0.25)
    assert 0.9 * us < draft_us(work, H100) < 1.6 * us  # which has whole blocks a multiprocessor


def test_requests_do_not_slow_what_is_read_in_whole_lines() -> None:
    sketch = Rowwise(tile_groups.layer_norm(1, 1970, 768), H100)
    work = work_of(Candidate(sketch, sketch.emit(next(iter(sketch.defaults())))))
    none = replace(work, block=replace(work.block, requests=0))
    assert work.block.requests > 0 and draft_us(work, H100) == draft_us(none, H100)


def test_many_images_of_few_channels_a_group_are_read_row_after_row() -> None:
    """As one kernel, whose rows stay in registers: each of its blocks has several groups."""
    few, many = (tile_groups.group_norm(n, 16, 16, 128, groups=32) for n in (1, 32))
    assert next(iter(Rowwise(few, H100).defaults()))["rows_first"] == 0, "more blocks"
    assert next(iter(Rowwise(many, H100).defaults()))["rows_first"] == 1


# -- whole models ----------------------------------------------------------------------------------


class Norms(nn.Module):
    """Instance norm and a norm of groups of two channels, and the mean of all pixels."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, norm = {2: (nn.Conv2d, nn.InstanceNorm2d), 3: (nn.Conv3d, nn.InstanceNorm3d)}[dims]
        self.first, self.second = conv(3, 10, 1), conv(10, 10, 1)
        self.channels, self.groups = norm(10, affine=True), nn.GroupNorm(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.channels(self.first(x)), 0.01)
        x = F.silu(self.groups(self.second(x)))
        return x.mean(tuple(range(2, x.dim())))


@pytest.mark.compiler
@pytest.mark.parametrize("pixels", [(67, 81), (7, 21, 37)], ids=["images", "volumes"])
def test_models_are_right_on_the_host(pixels: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Norms(len(pixels)).half().eval()
    x = (torch.randn(1, 3, *pixels) + 3).half()
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    launches = [each.program for each in compiled._plan.launches if each.family == "rowwise"]
    assert [each.sketch for each in launches if each].count("columnwise") >= 2
    exact = copy.deepcopy(model).double()(x.double())
    off = (compiled(x).double() - exact).square().mean().sqrt()
    eager = (model(x).double() - exact).square().mean().sqrt()
    assert off < 3 * eager + 1e-3 * exact.square().mean().sqrt()
