"""Depthwise convolutions of tiles in shared memory: right at every border, taken and refused."""

from __future__ import annotations

import pytest

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.stencil import Stencil
from gtco.codegen.sketches.stencil_tiles import StencilTiles
from gtco.cost_model.model import draft_us
from gtco.cost_model.work import work_of
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests.kernel_checks import (
    ARCHITECTURES,
    compile_for_all,
    inputs_of,
    sample,
    wrong_outputs,
    wrong_statistics,
)
from tests.pass_checks import Golden
from tests.stencil_groups import CASES, STATISTICS, TILES, depthwise

H100 = TARGETS["sm_90a"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", TILES)
def test_right_on_the_host_build(case: str) -> None:
    group = TILES[case]()
    for seed, program in enumerate(sample(StencilTiles(group, H100), 5, seed=3)):
        values = inputs_of(group, seed)
        outputs = run_on_host(program, group, values, seed)
        assert not wrong_outputs(program, group, values, lambda *_, made=outputs: made)
        assert not wrong_statistics(group, outputs)


@pytest.mark.parametrize("case", ["7x7", "dilated", "statistics of 96"])
def test_kernels_compile_without_spills(case: str) -> None:
    assert not list(compile_for_all(lambda target: StencilTiles(TILES[case](), target), 3))


def test_many_results_of_a_thread_do_not_spill() -> None:
    group = depthwise((4, 56, 56, 96), (7, 7), before=(3, 3), stats=True)
    for target in ARCHITECTURES:
        program = StencilTiles(group, target).emit(
            {"channels": 96, "rows": 4, "strip": 8, "down": 1, "across": 1, "threads": 128}
        )
        assert compile_uncached(program.code, program.name, target.arch).spill_bytes == 0


def test_source(golden: Golden) -> None:
    sketch = StencilTiles(depthwise((1, 14, 14, 384), (7, 7), before=(3, 3), stats=True), H100)
    golden("stencil_tiles.cu", sketch.emit(next(iter(sketch.defaults()))).source)


REFUSED = {
    "three_of_one_image": "3 ops with windows, of one",
    "max_3x3": "max_pool has no weights",
    "depthwise_3x3x3": "windows of volumes",
    "depthwise_odd": "not in runs of 16 bytes",
    "stats_130": "not in runs of 16 bytes",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    with pytest.raises(Illegal, match=REFUSED[case]):
        StencilTiles((CASES | STATISTICS)[case](), H100)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 4, "strip": 16}, "128 sums a thread, of 64"),
        ({"down": 14, "rows": 4}, "is twice the 12 x 15 results"),
        ({"down": 4, "rows": 2, "across": 8}, "is twice the 12 x 15 results"),
    ],
)
def test_schedules_are_refused(changes: dict[str, int], reason: str) -> None:
    sketch = StencilTiles(TILES["7x7"](), H100)
    schedule = {"channels": 16, "rows": 1, "strip": 4, "down": 1, "across": 1, "threads": 128}
    sketch.emit(schedule)
    with pytest.raises(Illegal, match=reason):
        sketch.emit(schedule | changes)


def test_a_tile_that_does_not_fit_is_refused() -> None:
    sketch = StencilTiles(depthwise((1, 112, 112, 128), (7, 7), before=(3, 3)), TARGETS["sm_89"])
    schedule = {"channels": 128, "rows": 4, "strip": 8, "down": 8, "across": 4, "threads": 256}
    with pytest.raises(Illegal, match=r"shared memory \d+ B, of 101376 B a block"):
        sketch.emit(schedule)


def test_row_statistics_take_whole_chunks_of_a_block() -> None:
    channels = {
        columns: StencilTiles(depthwise((1, 9, 9, columns), (3, 3), stats=True), H100).knobs()[0]
        for columns in (40, 96, 192, 384)
    }
    assert {columns: knob.choices for columns, knob in channels.items()} == {
        40: (40,), 96: (96,), 192: (64,), 384: (64, 128),
    }  # fmt: skip


@pytest.mark.parametrize("images", [1, 32])
def test_large_images_prefer_tiles(images: int) -> None:
    """Registers leave `stencil` few threads, and it reads each weight again and again."""
    group = depthwise((images, 56, 56, 96), (7, 7), before=(3, 3), stats=True)
    drafts = {
        sketch.name: draft_us(
            work_of(Candidate(sketch, sketch.emit(next(iter(sketch.defaults()))))), H100
        )
        for sketch in derive(group, "stencil", H100).sketches
    }
    assert set(drafts) == {Stencil.name, StencilTiles.name}
    assert drafts[StencilTiles.name] < drafts[Stencil.name]
