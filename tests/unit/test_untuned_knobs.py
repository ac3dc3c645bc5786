"""Knobs of a plan that was never replayed: those of the plan it borrows from, or a draft's."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

import gtco
from gtco.compiler import plan_with
from gtco.cost_model.knowledge import CHOSEN, VERSIONS, Knowledge
from gtco.cost_model.plans import plan_key, plan_knobs, plan_work
from gtco.cost_model.record import PLAN, TuningRecord
from gtco.ir.graph import Graph
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.tasks import Task, workload_digest, workload_key
from gtco.runtime.plan import Launch, PlanKnobs
from gtco.selection import launches_of
from gtco.target import TARGETS, Target
from tests.groups import norm_linear
from tests.perceptron import ARGS, DEVICE, Mlp

H100 = TARGETS["sm_90a"]
LINEAR = norm_linear(197, 768, 2304, torch.float16)  # 3.5 MB of weights, read in 1.25 us
KNOBS = PlanKnobs(1, 1, 0)


def launch(known: Knowledge, predicted_us: float = 100.0, workload: str = "") -> Launch:
    task = Task(workload_key(LINEAR, H100), LINEAR, (LINEAR,))
    (found,) = launches_of(task, H100, known)
    return replace(found, predicted_us=predicted_us, workload=workload or found.workload)


def plan(key: str, *workloads: str, knobs: PlanKnobs = KNOBS, run_us: float = 9.0) -> TuningRecord:
    schedule, work = asdict(knobs), dict.fromkeys(workloads, 1)
    return TuningRecord(key, DEVICE, PLAN, VERSIONS[PLAN], schedule, run_us, "", CHOSEN, work)


def knobs_of(launches: list[Launch], *plans: TuningRecord, target: Target = H100) -> PlanKnobs:
    return plan_knobs(Knowledge(DEVICE, plans), Graph({}, {}, (), ()), launches, target)


@pytest.mark.parametrize("borrowed, expected", [(10, KNOBS), (9, KNOBS), (8, PlanKnobs())])
def test_a_graph_that_borrows_nearly_all_from_one_plan_takes_its_knobs(
    borrowed: int, expected: PlanKnobs
) -> None:
    names = ["a", "b"] * 5
    launches = [launch(Knowledge(DEVICE), workload=name) for name in names[:borrowed]]
    launches += [launch(Knowledge(DEVICE))] * (10 - borrowed)
    assert knobs_of(launches, plan("p", "a", "b", "c")) == expected


def test_the_plan_that_lends_most_counts() -> None:
    launches = [launch(Knowledge(DEVICE), workload=name) for name in "aab"]
    other = PlanKnobs(2, 1, 1)
    plans = [plan("p", "a", run_us=1.0), plan("q", "a", "b", knobs=other), plan("r", "b")]
    assert knobs_of(launches, *plans) == other


def test_calls_of_the_library_borrow_nothing() -> None:
    known = Knowledge(DEVICE)
    aten = replace(launch(known, workload="c"), program=None)
    lent = launch(known, workload="a")
    assert knobs_of([lent, aten, aten], plan("p", "a")) == KNOBS
    assert knobs_of([aten, aten], plan("p", "c")) == PlanKnobs()
    assert knobs_of([], plan("p", "c")) == PlanKnobs()


def test_own_records_count_as_those_of_others() -> None:
    digest = workload_digest(workload_key(LINEAR, H100))
    made = launch(Knowledge(DEVICE))
    assert made.workload == "" and made.program is not None
    schedule = made.program.schedule
    key, sketch = workload_key(LINEAR, H100), made.program.sketch
    own = TuningRecord(key, DEVICE, sketch, VERSIONS[sketch], schedule, 3.0)
    known = Knowledge(DEVICE, [own])
    assert launch(known).workload == digest
    assert knobs_of([launch(known)], plan("p", digest)) == KNOBS


@pytest.mark.parametrize("predicted_us, distance", [(8.0, 2), (9.0, 0)])
def test_weights_that_take_long_to_read_are_fetched(predicted_us: float, distance: int) -> None:
    launches = [launch(Knowledge(DEVICE), predicted_us)] * 4
    assert knobs_of(launches) == PlanKnobs(fetch_distance=distance)


@pytest.mark.parametrize("l2_mib, distance", [(26, 2), (25, 0)])
def test_weights_that_would_push_each_other_out_are_not(l2_mib: int, distance: int) -> None:
    launches = [launch(Knowledge(DEVICE), 1.0)] * 4  # 10.6 MB are those of three launches
    target = replace(H100, l2_bytes=l2_mib << 20)
    assert knobs_of(launches, target=target) == PlanKnobs(fetch_distance=distance)


def test_a_replayed_graph_keeps_its_own() -> None:
    graph = run_pipeline(gtco.capture(Mlp(), ARGS))
    fused = gtco.fuse(graph)
    own = plan(plan_key(graph, H100), "of a partition of then", knobs=PlanKnobs(0, 0, 0))
    known = Knowledge(DEVICE, [own, plan("p", *plan_work(fused, H100), knobs=PlanKnobs(0, 0, 1))])
    options = Options(target="sm_90a")
    spread = plan_with(known, fused, H100, options, PlanKnobs(0, 0, 1))
    chosen, expected = (
        plan_with(known, fused, H100, options, knobs) for knobs in (None, PlanKnobs(0, 0, 0))
    )
    assert [each.program for each in chosen.launches] == [x.program for x in expected.launches]
    assert [each.program for each in chosen.launches] != [x.program for x in spread.launches]


def test_a_plan_whose_record_says_nonsense_lends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bad = plan("p", "a")
    bad = replace(bad, schedule={**bad.schedule, "fetch_distance": -1})
    assert knobs_of([launch(Knowledge(DEVICE), workload="a")], bad) == PlanKnobs()
    assert "-1 is no value of the plan's knob fetch_distance (of 0, 1, 2)" in caplog.text
