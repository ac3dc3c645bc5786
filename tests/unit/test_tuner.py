"""What `gtco.tune` measures, keeps and decides; a runner without kernels stands in for the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler, schedule_key
from gtco.compiler import fuse_with
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import (
    CHAIN,
    FINAL,
    FINALISTS,
    VERSIONS,
    Knowledge,
    is_chosen,
    known_on,
)
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.model import roofline_us
from gtco.cost_model.plans import plan_knobs
from gtco.cost_model.record import LIBRARY, PLAN, TuningRecord
from gtco.frontend.torch_export import Captured
from gtco.ir.graph import Graph
from gtco.options import OptionError
from gtco.passes import run_pipeline
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.passes.tasks import tasks
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Plan, PlanKnobs
from gtco.target import TargetError
from gtco.tuning import measuring, replay, tuner
from gtco.tuning.result import TuneResult, TuneStatus, row_of
from gtco.tuning.state import TaskState, wanted_rings
from tests.perceptron import ARGS, CARD, DEVICE, H100, Mlp, mlp, record

# -- a runner without kernels ----------------------------------------------------------------------


class Runner:
    """Answers at once, with times that final timing orders otherwise than the first."""

    host = False
    device = DEVICE
    library_us = 900.0
    broken: str = ""
    slow: tuple[str, ...] = ()
    """Operators: a task with all of them takes three times as long."""

    def __init__(self, **_: object) -> None:
        self.seconds: dict[str, float] = {"load": 1.0}
        self.ran: list[tuple[str, object, bool]] = []
        self.closed = False
        RUNNERS.append(self)

    def run(
        self, subject: Subject, candidate: Candidate | None, *, final: bool = False
    ) -> Future[TuningRecord]:
        found: Future[TuningRecord] = Future()
        key = (LIBRARY, ()) if candidate is None else candidate.key
        self.ran.append((subject.key, key, final))
        if self.broken and self.broken in subject.key:
            found.set_exception(MeasureError("it cannot be made ready"))
            return found
        time_us: float | None = self.library_us
        if candidate is not None:
            time_us = self.time_us(candidate, final)
            if time_us is not None and self.slow and all(op in subject.key for op in self.slow):
                time_us *= 3
        found.set_result(
            TuningRecord(
                subject.key,
                self.device,
                str(key[0]),
                1 if candidate is None else candidate.sketch.version,
                {} if candidate is None else dict(candidate.program.schedule),
                time_us,
                "" if time_us is not None else "wrong answer",
                {"timed": FINAL if final else CHAIN},
            )
        )
        return found

    def time_us(self, candidate: Candidate, final: bool) -> float | None:
        number = sum(candidate.program.schedule.values())
        if candidate.program.schedule.get("stages") == 3:
            return None
        return 500.0 - number % 97 if final else 600.0 + number % 97

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


RUNNERS: list[Runner] = []
REPLAYED_US = (3.0, 2.0)


def first_of_each(
    variants: replay.Variants, captured: object, knobs: PlanKnobs, until: float
) -> tuple[replay.Choices, int]:
    best = {task.key: variants.known.best(task.key)[:1] for task in variants.found}
    return {key: record for key, records in best.items() for record in records}, knobs


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Runner]]:
    RUNNERS.clear()

    class Fresh(Runner):
        pass

    monkeypatch.setattr(tuner, "Trials", Fresh)
    monkeypatch.setattr(tuner, "_device_here", lambda options: CARD)
    monkeypatch.setattr(tuner, "shipped_ranker", lambda target: None)
    monkeypatch.setattr(tuner, "refine", first_of_each)  # no GPU replays a graph here
    monkeypatch.setattr(tuner, "before_and_after", lambda before, after: REPLAYED_US)
    monkeypatch.setattr(tuner, "whole_us", lambda module: REPLAYED_US[1])
    yield Fresh


def tune(path: Path, **more: object) -> TuneResult:
    return gtco.tune(Mlp(), ARGS, database=path, target="sm_90a", **more)


def kept(path: Path) -> list[TuningRecord]:
    with Database(path) as opened:
        return list(opened.records())


def test_every_task_and_its_library_are_measured_and_kept(
    runner: type[Runner], tmp_path: Path
) -> None:
    path = tmp_path / "t.sqlite"
    seen: list[TuneStatus] = []
    result = tune(path, trials=60, watch=seen.append)
    (used,) = RUNNERS
    assert used.closed and result.trials == 60 and result.stopped == "trials"
    tried = [row for row in result.rows if row.trials]
    searched = [each for each in used.ran if not each[2]]
    programs = [each for each in searched if each[1] != (LIBRARY, ())]
    assert len(programs) == len(set(programs)) == 60
    libraries = [each for each in searched if each[1] == (LIBRARY, ())]
    assert len(libraries) == len(set(libraries)) == len(tried) >= 2
    assert all(row.library_us == 900.0 for row in tried)
    assert all(row.trials > 0 for row in result.rows if row.weight)
    assert sum(row.failures for row in result.rows) == result.failures > 0
    records = kept(path)
    assert len(records) == 60 + len(libraries) + 1, "and the plan"
    assert sum(record.run_us is None for record in records) == result.failures
    assert json.dumps(result.to_dict()) and {each.phase for each in seen} >= {"searching"}


def test_the_best_are_timed_again_in_the_end(runner: type[Runner], tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    result = tune(path, trials=120)
    records = [each for each in kept(path) if each.sketch != PLAN]
    assert len({each.workload for each in records}) == sum(row.trials > 0 for row in result.rows)
    for workload in {each.workload for each in records}:
        ours = [each for each in records if each.workload == workload]
        final = [each for each in ours if each.versions["timed"] == FINAL]
        programs = [each for each in final if each.sketch != LIBRARY]
        assert len(programs) == FINALISTS == len(final) - 1
        fastest = min(each.run_us for each in programs if each.run_us is not None)
        assert fastest < 500 and fastest in [row.best_us for row in result.rows]
        (chosen,) = [each for each in ours if is_chosen(each)]
        assert chosen.run_us == min(each.run_us for each in final if each.run_us)
        others = [each.run_us for each in ours if each.versions["timed"] == CHAIN]
        assert all(us is None or us >= 600 for us in others)
    assert all(each.source == "tuned here" for each in result.compiled.launches)
    assert result.after_us == sum(row.best_us or 0 for row in result.rows if row.weight)


def test_other_rings_of_the_best_are_measured_in_the_end(
    runner: type[Runner], tmp_path: Path
) -> None:
    phases: list[str] = []
    result = tune(
        tmp_path / "t.sqlite", seconds=1, watch=lambda status: phases.append(status.phase)
    )
    assert "trying other rings" in phases
    (used,) = RUNNERS
    programs = {each for each in used.ran if not each[2] and each[1] != (LIBRARY, ())}
    assert result.trials == len(programs) == sum(row.trials for row in result.rows)


def test_only_what_nobody_measured_of_the_bests_tile_is_wanted() -> None:
    _, joined = mlp()
    known = Knowledge(DEVICE)
    state = TaskState(joined, row_of(joined))
    assert wanted_rings([state], known, H100) == []
    best = {"swap": 1, "block_p": 64, "block_q": 32, "stages": 2, "split": 1, "multicast": 1}
    rings = [{"atoms": atoms, "depth": 0, "cluster_q": 1} for atoms in (1, 2)]
    for slower, ring in enumerate(rings):
        made = record(5.0 + slower, workload=joined.key, schedule={**best, **ring})
        known.add(replace(made, sketch="gemm_wgmma", version=VERSIONS["gemm_wgmma"]))
    wanted = [each for _, each in wanted_rings([state], known, H100) if each is not None]
    measured = {schedule_key("gemm_wgmma", {**best, **ring}) for ring in rings}
    assert len(wanted) > 4 and not measured & {each.key for each in wanted}
    for each in wanted:
        tile = {k: v for k, v in each.program.schedule.items() if k not in each.sketch.ring}
        assert tile == {k: v for k, v in best.items() if k != "stages"}


def test_the_first_batch_has_the_defaults(runner: type[Runner], tmp_path: Path) -> None:
    result = tune(tmp_path / "t.sqlite", trials=200)
    (used,) = RUNNERS
    graph = run_pipeline(gtco.capture(Mlp(), ARGS))
    for task in tasks(fuse_with(Knowledge(DEVICE), graph, H100)[0], H100):
        sampler = Sampler(derive(task.group, family(task.group), H100).sketches, 0)
        first = [key for workload, key, _ in used.ran if workload == task.key][: measuring.BATCH]
        assert {each.key for each in sampler.defaults(8)} <= set(first)
    assert result.trials == 200


def test_the_best_plans_tasks_come_first(runner: type[Runner], tmp_path: Path) -> None:
    result = tune(tmp_path / "t.sqlite", trials=80)
    (used,) = RUNNERS
    best = {each.workload for each in kept(tmp_path / "t.sqlite") if each.sketch == PLAN}
    assert len(best) == 1, "one plan is kept, the last"
    searched = [workload for workload, _, final in used.ran if not final]
    graph = run_pipeline(gtco.capture(Mlp(), ARGS))
    ours = {task.key for task in tasks(fuse_with(Knowledge(DEVICE), graph, H100)[0], H100)}
    assert set(searched[:32]) <= ours and len(result.rows) > len(ours)


def test_the_same_call_again_measures_nothing_twice(runner: type[Runner], tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    first = tune(path, trials=40)
    second = tune(path, trials=40)
    before, after = ({each for each in used.ran} for used in RUNNERS)
    assert not before & after
    assert second.after_us <= first.after_us == second.before_us
    compiled = gtco.compile(Mlp(), ARGS, target="sm_90a", database=path)
    assert [(each.kernel, each.source) for each in compiled.launches] == [
        (each.kernel, "tuned here") for each in second.compiled.launches
    ]
    other = gtco.compile(Mlp(), ARGS, target="sm_90a", database=tmp_path / "none.sqlite")
    assert all(each.source == "default" for each in other.launches)


def test_before_is_replayed_only_if_all_its_kernels_were_judged(
    runner: type[Runner], tmp_path: Path
) -> None:
    assert tune(tmp_path / "short.sqlite", trials=1).replayed_us is None
    assert tune(tmp_path / "long.sqlite", trials=40).replayed_us == REPLAYED_US


def test_a_model_that_was_faster_stays_as_it_was(
    runner: type[Runner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "t.sqlite"
    first = tune(path, trials=60)

    def chosen() -> set[tuple[str, object]]:
        return {
            (r.workload, schedule_key(r.sketch, r.schedule)) for r in kept(path) if is_chosen(r)
        }

    def others(variants: replay.Variants, *rest: Any) -> Any:
        best = {task.key: variants.known.best(task.key)[1] for task in variants.found}
        return best, PlanKnobs(2, 1, 0)

    before = chosen()
    monkeypatch.setattr(tuner, "refine", others)
    monkeypatch.setattr(tuner, "before_and_after", lambda before, after: (2.0, 2.1))
    with caplog.at_level("INFO", "gtco.tune"):
        second = tune(path, trials=20)
    assert "takes 2.0 us, would take 2.1, and stays" in caplog.text
    assert second.replayed_us == (2.0, 2.0)
    assert [x.kernel for x in second.compiled.launches] == [
        x.kernel for x in first.compiled.launches
    ]
    assert chosen() == before
    monkeypatch.setattr(tuner, "before_and_after", lambda before, after: (2.1, 2.0))
    assert tune(path, trials=20).replayed_us == (2.1, 2.0)
    assert not chosen() & before


def test_the_knobs_of_the_fastest_plan_are_kept(
    runner: type[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, graph = tmp_path / "t.sqlite", run_pipeline(gtco.capture(Mlp(), ARGS))
    began: list[PlanKnobs] = []

    def nearer(variants: replay.Variants, *rest: Any) -> Any:
        began.append(rest[1])
        knobs = replace(rest[1], fetch_distance=rest[1].fetch_distance + 1, late_trigger=1)
        return first_of_each(variants, *rest)[0], knobs

    monkeypatch.setattr(tuner, "refine", nearer)
    for _ in range(2):
        tune(path, trials=20)
    assert began == [PlanKnobs(), PlanKnobs(1, 1)]
    plans = [record for record in kept(path) if record.sketch == PLAN]
    assert [dict(record.schedule) for record in plans if is_chosen(record)] == [
        {"fetch_distance": 2, "late_trigger": 1, "spread": 1}
    ]
    assert plan_knobs(known_on(CARD, path), graph, (), H100) == PlanKnobs(2, 1)
    assert plan_knobs(Knowledge(DEVICE), graph, (), H100) == PlanKnobs()


def test_a_faster_library_is_chosen(runner: type[Runner], tmp_path: Path) -> None:
    runner.library_us = 1.0
    result = tune(tmp_path / "t.sqlite", trials=20)
    assert {each.kernel for each in result.compiled.launches} == {"aten"}
    assert {row.best for row in result.rows if row.weight} == {LIBRARY}


def test_plans_of_measured_kernels_alone_are_replayed(
    runner: type[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Plan] = []

    def last(
        plans: Sequence[Plan], captured: Captured, until: float
    ) -> tuple[CompiledModule, tuple[float, ...]]:
        replayed.extend(plans)
        return CompiledModule(plans[-1], captured), (2.0, 1.0)

    monkeypatch.setattr(tuner, "fastest", last)
    monkeypatch.setattr(tuner, "WORTH_REPLAYING", 100.0)
    monkeypatch.setattr(tuner, "LONGSHOT", 1.0)
    runner.library_us, runner.slow = 9000.0, ("linear", "gelu")
    result = tune(tmp_path / "t.sqlite", trials=120)
    assert len(replayed) >= 2 and result.plans_us == (2.0, 1.0)
    assert len({str(each.fused) for each in replayed}) == len(replayed)
    for plan in replayed:
        assert all(launch.source != "default" for launch in plan.launches)
    assert result.compiled.graph is replayed[-1].fused
    later = gtco.compile(Mlp(), ARGS, target="sm_90a", database=tmp_path / "t.sqlite")
    assert str(later.graph) == str(replayed[-1].fused) != str(replayed[0].fused)
    monkeypatch.setattr(tuner, "WORTH_REPLAYING", 1.0)
    replayed.clear()
    tune(tmp_path / "t.sqlite", trials=1)
    assert str(replayed[0].fused) == str(later.graph), "the plan that won is not asked again"


def test_time_ends_the_search(runner: type[Runner], tmp_path: Path) -> None:
    result = tune(tmp_path / "t.sqlite", seconds=0)
    assert (result.trials, result.stopped) == (0, "seconds")
    assert all(each.source == "default" for each in result.compiled.launches)


def test_a_task_that_cannot_be_measured_is_left_alone(
    runner: type[Runner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner.broken = "gelu"
    result = tune(tmp_path / "t.sqlite", trials=20)
    assert result.trials == 20
    (used,) = RUNNERS
    broken = {key for key, _, _ in used.ran if "gelu" in key}
    assert caplog.text.count("it cannot be made ready") == len(broken) > 0
    sources = {each.ops: each.source for each in result.compiled.launches}
    assert set(sources.values()) == {"default", "tuned here"}


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="seconds=480"):
        gtco.tune(Mlp(), ARGS, target="host")
    if not torch.cuda.is_available():
        with pytest.raises(TargetError, match='no CUDA GPU is here; target="host"'):
            gtco.tune(Mlp(), ARGS, trials=1, target="sm_90a", database=tmp_path / "t.sqlite")
    assert not list(tmp_path.iterdir())


# -- what is known ---------------------------------------------------------------------------------


def test_own_records_replace_shipped_ones() -> None:
    first = record(5.0, schedule={"a": 1})
    second = record(4.0, schedule={"a": 2}, versions={"timed": FINAL})
    library = record(3.0, sketch=LIBRARY, version=1, schedule={})
    failed = record(None, schedule={"a": 3}, error="it hangs")
    stale = record(1.0, schedule={"a": 4}, version=0)
    elsewhere = record(1.0, schedule={"a": 5}, device="another")
    known = Knowledge(DEVICE, [first, stale], [second, library, failed, elsewhere])
    assert known.best("w") == (library, second, first)
    assert known.records("w") == tuple(known.all()) == (first, second, library, failed)
    assert [known.is_own(each) for each in known.best("w")] == [True, True, False]
    again = record(6.0, schedule={"a": 1})
    known.add(again)
    assert known.best("w")[2] == again and known.is_own(again)
    host = Knowledge("host", [record(9.0, device="host"), record(1.0, device="host",
                     sketch=LIBRARY, version=1, schedule={})])  # fmt: skip
    assert [each.sketch for each in host.best("w")] == ["gemm_mma"]


def ops(graph: Graph, known: Knowledge, explore: bool = False) -> list[str]:
    (fused,) = fuse_with(known, graph, H100, explore=explore)
    return [" ".join(node.op for node in group.compute) for group in fused]


def test_a_measured_price_rejects_a_fusion_only_for_what_was_measured() -> None:
    graph, joined = mlp()
    assert ops(graph, Knowledge(DEVICE)) == ["linear gelu", "linear"]
    slow = record(100 * roofline_us(joined.group, H100), workload=joined.key)
    known = Knowledge(DEVICE, own=[slow])
    assert ops(graph, known) == ["linear gelu", "linear"], "a guess beat a measurement"
    price = known.price(H100, [joined])
    (other,) = [t for t in tasks(fuse_with(known, graph, H100)[0], H100) if t.key != joined.key]
    assert price(other.group) == pytest.approx(100 * roofline_us(other.group, H100))
    for task in tasks(fuse(graph, lambda group: 1.0, max_group=1), H100):
        known.add(record(1.0, workload=task.key))
    assert ops(graph, known) == ["linear", "gelu", "linear"]
    known.add(record(0.5, workload=joined.key, schedule={"a": 2}))
    assert ops(graph, known) == ["linear gelu", "linear"]


def test_a_library_alone_is_a_price_only_where_nothing_else_runs() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logcumsumexp(x, 1).relu()

    found = tasks(gtco.fuse(gtco.capture(Sums().eval(), (torch.ones(4, 8),))), H100)
    library = [record(7.0, workload=t.key, sketch=LIBRARY, version=1, schedule={}) for t in found]
    known = Knowledge(DEVICE, own=library)
    assert not any(known.best(task.key) for task in found)
    prices = {t.group.compute[0].op: known.price(H100, found)(t.group) for t in found}
    assert prices["aten"] == 7.0 != prices["relu"] > 0
