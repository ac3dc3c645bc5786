"""Legality is closed: no sketch emits a schedule whose knobs are not its own, or whose values no
knob allows, wherever it comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import SKETCHES
from gtco.codegen.sketch import Illegal, Schedule, Sketch
from gtco.cost_model.record import shipped_records
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import (
    attention_groups,
    back_to_back_groups,
    column_groups,
    groups,
    projection_groups,
    squeeze_groups,
    stencil_groups,
    tile_groups,
    transpose_groups,
)
from tests.kernel_checks import defaults

H100 = TARGETS["sm_90a"]
LINEAR = groups.GEMM_CASES["fc1_huge"]
ATTENTION = attention_groups.CASES["vit_b"]
GROUPS: dict[str, Callable[[], Group]] = {
    "gemm_skinny": groups.GEMM_CASES["head"],
    "gemm_wgmma": LINEAR,
    "gemm_mma": LINEAR,
    "gemm_persistent": LINEAR,
    "conv_mma": groups.CONV_CASES["conv_3x3x3"],
    "conv_wgmma": groups.CONV_CASES["conv_3x3x3"],
    "attention": ATTENTION,
    "attention_wgmma": ATTENTION,
    "attention_projection": projection_groups.LARGE["vit_b"],
    "rowwise": tile_groups.ROWWISE["stats_197_768"],
    "rowwise of statistics": tile_groups.ROWWISE["merge"],
    "rowwise of groups": tile_groups.ROWWISE["group_norm"],
    "columnwise": column_groups.COLUMNWISE["mean_54"],
    "elementwise of groups": tile_groups.ELEMENTWISE["groups_320"],
    "elementwise": tile_groups.ELEMENTWISE["gelu_197"],
    "gemm_back_to_back": lambda: back_to_back_groups.bottleneck(
        8448, (64, 256, 64), back_to_back_groups.F16
    ),
    "squeeze": squeeze_groups.CASES["se_512"],
    "stencil": stencil_groups.CASES["depthwise_3x3"],
    "stencil_tiles": stencil_groups.TILES["7x7"],
    "resize": next(iter(stencil_groups.RESIZES.values())),
    "grid_sample": stencil_groups.SAMPLES["sum_of_heads"],
    "topk": tile_groups.TOPK["of_a_detector"],
    "transpose": transpose_groups.CASES["normalized"],
}
BY_NAME = {kind.name: kind for kind in SKETCHES}
WRONG = (0, -1, -64, 3, 5, 2**31, 2**70, 1.0, 0.5, True, "2", None, (2,))


def sketch_of(case: str) -> Sketch:
    return BY_NAME[case.split(" ")[0]](GROUPS[case](), H100)


def first(sketch: Sketch) -> KernelProgram:
    return next(defaults(sketch))


def test_every_sketch_is_here() -> None:
    assert {case.split(" ")[0] for case in GROUPS} == set(BY_NAME)


@pytest.mark.parametrize("case", GROUPS)
def test_no_knob_takes_what_is_not_its_own(case: str) -> None:
    sketch = sketch_of(case)
    good = first(sketch).schedule
    for knob in sketch.knobs():
        for value in WRONG:
            if knob.allows(value):
                continue
            bad: Schedule = {**good, knob.name: value}  # type: ignore[dict-item]
            with pytest.raises(Illegal, match=f"is no value of the knob {knob.name} "):
                sketch.emit(bad)
        less = {name: value for name, value in good.items() if name != knob.name}
        with pytest.raises(Illegal, match=f"lacks the knob {knob.name} "):
            sketch.emit(less)
    with pytest.raises(Illegal, match="the sketch has no knob 'unrol'"):
        sketch.emit({**good, "unrol": 1})


@pytest.mark.parametrize("case", GROUPS)
def test_what_the_sketch_itself_offers_is_allowed(case: str) -> None:
    sketch = sketch_of(case)
    knobs = {knob.name: knob for knob in sketch.knobs()}
    for name, value in first(sketch).schedule.items():
        assert knobs[name].allows(value)
    for knob in knobs.values():
        assert all(knob.allows(value) and value >= 0 for value in knob.choices)
        assert all(value > 0 for value in knob.legal[:1])


def test_values_of_shipped_records_are_allowed() -> None:
    """A search of another time, or of another group, may have found what none tries today."""
    cases = {"gemm_wgmma": 0, "attention": 0, "attention_wgmma": 0}
    for case in cases:
        sketch = sketch_of(case)
        legal = {knob.name: knob for knob in sketch.knobs()}
        for record in shipped_records():
            if record.sketch != case or record.version < sketch.schedule_version:
                continue
            cases[case] += 1
            for name, value in record.schedule.items():
                assert legal[name].allows(value), (record.schedule, str(legal[name]))
    assert all(cases.values())
