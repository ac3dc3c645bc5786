"""Schedules that one workload lends another, whose blocks do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Sketch
from gtco.cost_model.knowledge import CHOSEN, Knowledge
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.similar import transferred
from gtco.cost_model.work import work_of
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.passes.tasks import Task, workload_digest, workload_key
from gtco.runtime.plan import Launch
from gtco.selection import launches_of
from gtco.target import TARGETS
from tests.attention_groups import cross, packed
from tests.groups import norm_linear, plain_linear, residual_linear, tf32

H100 = TARGETS["sm_90a"]
DEVICE = "an H100"
F16, BF16 = torch.float16, torch.bfloat16
LENDER = norm_linear(197, 768, 2304, F16)


def sketches(group: Group) -> tuple[Sketch, ...]:
    return derive(group, family(group), H100).sketches


def record(
    group: Group,
    number: int = 3,
    run_us: float = 3.0,
    versions: Mapping[str, str] | None = None,
    sketch_name: str = "",
) -> TuningRecord:
    """Of the default schedule with this number, which is no first choice, of the first sketch or
    the one with this name."""
    sketch = next(each for each in sketches(group) if sketch_name in ("", each.name))
    candidate = Candidate(sketch, sketch.emit(list(sketch.defaults())[number]))
    return TuningRecord(
        workload_key(group, H100),
        DEVICE,
        sketch.name,
        sketch.version,
        candidate.program.schedule,
        run_us,
        versions=versions or {},
        work=work_of(candidate).numbers(),
    )


def launch(group: Group, *records: TuningRecord) -> Launch:
    task = Task(workload_key(group, H100), group, (group,))
    (found,) = launches_of(task, H100, Knowledge(DEVICE, records))
    return found


@pytest.mark.parametrize(
    "group",
    [
        norm_linear(196, 768, 2304, F16),
        norm_linear(198, 768, 2304, F16),
        norm_linear(197, 768, 2304, BF16),
        norm_linear(197, 768, 2304, F16, gelu=True),
        residual_linear(197, 768, 2304, F16),
    ],
    ids=["fewer rows", "more rows", "bf16", "an activation", "a residual"],
)
def test_a_workload_whose_blocks_do_the_same_lends_its_schedule(group: Group) -> None:
    lender = record(LENDER)
    found = launch(group, lender)
    assert found.program is not None
    assert (found.source, found.predicted_us) == ("transferred", 3.0)
    assert found.workload == workload_digest(lender.workload)
    assert (found.program.sketch, found.program.schedule) == (lender.sketch, lender.schedule)
    assert launch(group).source == "default"


@pytest.mark.parametrize(
    "group",
    [
        norm_linear(257, 768, 2304, F16),
        norm_linear(197, 1024, 2304, F16),
        norm_linear(197, 768, 768, F16),
        norm_linear(197, 768, 2304, F16, batch=2),
        norm_linear(591, 768, 768, F16),
    ],
    ids=["another tile of rows", "longer", "narrower", "more of them", "as many blocks"],
)
def test_no_other_workload_does(group: Group) -> None:
    known = Knowledge(DEVICE, [record(LENDER)])
    assert transferred(known, workload_key(group, H100), sketches(group)) is None


def test_what_was_measured_of_the_workload_itself_comes_first() -> None:
    group = norm_linear(196, 768, 2304, F16)
    own = record(group, number=30, run_us=9.0)
    found = launch(group, record(LENDER), own)
    assert found.program is not None
    assert (found.source, found.program.schedule) == ("record", own.schedule)


def test_the_most_alike_lends_and_of_equals_the_fastest() -> None:
    borrower = norm_linear(196, 768, 2304, F16)
    far = record(residual_linear(197, 768, 2304, F16), number=10, run_us=1.0)
    near = record(LENDER, number=20, run_us=3.0)
    nearer = record(norm_linear(198, 768, 2304, F16), number=30, run_us=2.0)

    def schedule(*records: TuningRecord) -> Mapping[str, int]:
        program = launch(borrower, *records).program
        assert program is not None
        return program.schedule

    assert schedule(far, near) == near.schedule
    assert schedule(near, nearer) == nearer.schedule
    assert schedule(near, replace(nearer, run_us=4.0)) == near.schedule
    chosen = record(LENDER, number=21, run_us=3.5, versions=CHOSEN)
    assert schedule(near, chosen) == chosen.schedule


def test_of_other_records_none_is_transferred() -> None:
    group = norm_linear(196, 768, 2304, F16)
    good = record(LENDER)
    library = replace(good, sketch=LIBRARY, schedule={}, run_us=1.0)
    for other in (
        (replace(good, work={}),),
        (replace(good, run_us=None, error="wrong answer"),),
        (replace(good, device="another"),),
        (replace(good, workload=good.workload.replace("sm_90a", "sm_80")),),
        (replace(good, schedule={**good.schedule, "block_q": 9}),),
        (replace(good, work={**good.work, "blocks": good.work["blocks"] + 1}),),
        (good, library),  # which was faster there
    ):
        assert launch(group, *other).source == "default"


def test_a_mask_and_a_causal_attention_are_other_work() -> None:
    lender = record(cross((1, 12), 197, 197, 64), number=1)
    assert (
        launch(packed(197, 12, 64), lender).source == "transferred"
    )  # other strides, another scale
    for other in (
        cross((1, 12), 197, 197, 64, mask=F16),
        cross((1, 12), 197, 197, 64, causal=True),
    ):
        assert launch(other, lender).source == "default"


def test_a_precision_lends_nothing_to_another() -> None:
    """The same blocks take three products for one: what is fast for tf32 says nothing of fp32."""
    group = plain_linear(200, 1000, 512, torch.float32)
    assert workload_key(group, H100) != workload_key(tf32(group), H100)
    for borrower, from_it in ((group, tf32(group)), (tf32(group), group)):
        loan = record(from_it, 0, sketch_name="gemm_mma")
        assert launch(from_it, loan).source == "record"
        assert launch(borrower, loan).source == "default"
