"""The experiment's arithmetic, and the whole chain on a synthetic pool."""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import measure_pools, replay_searches, train_ranker
from experiments.replay_searches import at, ranking, reached, replay, spearman, table
from gtco.codegen.rules import Derivation, derive
from gtco.codegen.sampler import Candidate
from gtco.cost_model.database import Database
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.pool import SUFFIX, PoolTask, read_pool, write_pool
from gtco.cost_model.ranker import Ranker
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.search import Strategy
from gtco.ir.graph import Group
from gtco.target import Target, find_target
from tests.pools import synthetic_pool
from tests.records import key

CURVE = [(3, 9.0), (7, 5.0), (20, 4.0), (32, 4.0)]


def test_curves_are_read_by_trial_and_by_time() -> None:
    assert [at(CURVE, trial) for trial in (1, 3, 6, 7, 32)] == [math.inf, 9, 9, 5, 4]
    assert [reached(CURVE, us) for us in (10, 5, 4.5, 3)] == [3, 7, 20, None]


def test_spearman() -> None:
    assert spearman([(3, 1.0), (2, 5.0), (1, 6.0)]) == pytest.approx(1)
    assert spearman([(1, 1.0), (2, 5.0), (3, 6.0)]) == pytest.approx(-1)
    assert spearman([(1, 9.0), (1, 5.0), (3, 2.0), (4, 3.0)]) == pytest.approx(0.73786, abs=1e-4)
    assert math.isnan(spearman([(1, 1.0)]))


def test_a_perfect_and_a_backward_ranking() -> None:
    task = synthetic_pool()[0]
    perfect = [-(each.run_us or 1e9) for each in task.entries]
    found = ranking(task, perfect)
    assert (found.rank_all, found.rank_near, found.regret) == (
        pytest.approx(1),
        pytest.approx(1),
        0,
    )
    worst = ranking(task, [-score for score in perfect])
    assert worst.rank_all == pytest.approx(-1) and worst.regret > 1


def test_the_chain_on_a_synthetic_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgboost")
    folder = tmp_path / "pool"
    folder.mkdir()
    for task in synthetic_pool():
        write_pool(folder / f"{task.name}{SUFFIX}", task)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["x", str(folder), str(out), "--seeds", "1", "--trials", "96"])
    replay_searches.main()
    results = json.loads((out / "searches.json").read_text())
    assert set(results["tasks"]) == {task.name for task in synthetic_pool()}
    needed = results["summary"]["trials_to_random"]
    assert needed[Strategy.DRAFT_MODEL.value] <= 24 < needed[Strategy.RANDOM.value]
    ranks = results["summary"]["ranking"]
    assert ranks["cost model"]["rank_near"] > ranks["draft"]["rank_near"]
    assert results["summary"]["worst_regret"] < 0.2
    shown = capsys.readouterr().out
    assert "a-qkv" in shown and "median" in shown


def test_the_shipped_model_is_trained_on_all_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgboost")
    folder, out = tmp_path / "pool", tmp_path / "sm_90a.ubj"
    folder.mkdir()
    for task in synthetic_pool():
        write_pool(folder / f"{task.name}{SUFFIX}", task)
    task = synthetic_pool()[0]
    records = [
        replace(task.record(entry), workload=key("another"), work=entry.work.numbers())
        for entry in task.entries[:50]
    ]
    (tmp_path / "r.jsonl").write_text("".join(f"{each.to_json()}\n" for each in records))
    arguments = [str(folder), str(out), "--records", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    train_ranker.main()
    assert "from 1250 programs of 5 tasks, sm_90a" in capsys.readouterr().out
    ranker = Ranker.load(out, find_target("sm_90a"))
    assert ranking(task, ranker.scores([each.work for each in task.entries])).rank_all > 0.95


def test_a_model_that_ranks_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgboost")
    monkeypatch.setattr(
        replay_searches.Ranker, "scores", lambda self, works: [hash(id(w)) % 97 for w in works]
    )
    results = replay(synthetic_pool(), 1, 32)
    assert abs(results["summary"]["ranking"]["cost model"]["rank_all"]) < 0.3
    assert table(results)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("xgboost")
    replay_searches.plot(replay(synthetic_pool(), 1, 32), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"searches.png", "ranking.png"}


# -- measuring -------------------------------------------------------------------------------------

TINY = "tests.pools:tiny"


def test_the_heaviest_tasks_with_enough_programs_are_drawn() -> None:
    target = find_target("sm_90a")
    (draw,) = measure_pools.draws([TINY], target, 1, 40)
    assert draw.model == "tiny" and draw.name.startswith("tiny-gemm")
    assert len({each.key for each in draw.programs}) == 40
    assert draw.programs[0].program.schedule == next(iter(draw.programs[0].sketch.defaults()))
    assert len(list(measure_pools.draws([TINY, TINY], target, 9, 40))) == len(
        list(measure_pools.draws([TINY], target, 9, 40))
    )
    assert list(measure_pools.draws([TINY], target, 1, 40, "attention")) == []


def test_tasks_with_few_programs_are_drawn_by_family_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(group: Group, family: str, target: Target) -> Derivation:
        """The last sketch, whose schedules are few enough to list."""
        return Derivation(derive(group, family, target).sketches[-1:], ())

    monkeypatch.setattr(measure_pools, "derive", least)
    target = find_target("sm_90a")
    assert list(measure_pools.draws([TINY], target, 1, 10**5)) == []
    (draw,) = measure_pools.draws([TINY], target, 1, 40)
    (small,) = measure_pools.draws([TINY], target, 1, 10**5, "gemm")
    assert small.task.key == draw.task.key and 40 < len(small.programs) < 10**5


class Later:
    """In place of `Trials`: a program's future is done once somebody waits for it."""

    host, device = False, "imaginary"

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.begun: list[str] = []

    def run(self, subject: Subject, candidate: Candidate | None) -> Future[TuningRecord]:
        self.begun.append(subject.group.name)
        found: Future[TuningRecord] = Future()
        if subject.group.name == self.broken:
            found.set_exception(MeasureError("it cannot be made ready"))
        else:
            found.set_result(TuningRecord(subject.key, self.device, "any", 1, {}, 5.0))
        return found


def two_draws() -> list[measure_pools.Draw]:
    (draw,) = measure_pools.draws([TINY], find_target("sm_90a"), 1, 10)
    tasks = [replace(draw.task, group=replace(draw.task.group, name=name)) for name in "ab"]
    return [replace(draw, name=task.group.name, task=task) for task in tasks]


def test_the_next_task_begins_while_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_pools, "AHEAD", 6)
    trials = Later()
    kept: list[TuningRecord] = []
    found = measure_pools.measured(
        two_draws(),
        find_target("sm_90a"),
        trials,  # type: ignore[arg-type]
        kept.append,
    )
    draw, pool = next(found)
    assert isinstance(pool, PoolTask) and (draw.name, len(pool.entries)) == ("a", 10)
    assert trials.begun == ["a"] * 11 + ["b"] * 6
    assert all(each.default for each in pool.entries), "the defaults come first"
    ((draw, pool),) = found
    assert isinstance(pool, PoolTask) and (draw.name, len(pool.entries)) == ("b", 10)
    assert pool.library_us == 5.0 and len(kept) == 22


def test_a_task_that_cannot_be_measured_is_named_once_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_pools, "AHEAD", 3)
    trials = Later(broken="a")
    (first, error), (second, pool) = measure_pools.measured(
        two_draws(),
        find_target("sm_90a"),
        trials,  # type: ignore[arg-type]
        lambda record: None,
    )
    assert first.name == "a" and isinstance(error, MeasureError)
    assert second.name == "b" and isinstance(pool, PoolTask) and len(pool.entries) == 10
    assert trials.begun == ["a"] * 4 + ["b"] * 11


@pytest.mark.compiler
def test_a_pool_measured_on_the_host_is_kept_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "known.sqlite"
    arguments = [str(tmp_path), TINY, "--groups", "1", "--programs", "3", "--target", "host"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments, "--db", str(known)])
    measure_pools.main()
    (task,) = read_pool(tmp_path)
    assert len(task.entries) == 3 and task.device == "host" and task.model == "tiny"
    assert all(each.run_us or each.error for each in task.entries)
    assert any(each.run_us for each in task.entries)
    with Database(known) as database:
        times = {record.run_us for record in database.records() if record.sketch != LIBRARY}
    assert times == {each.run_us for each in task.entries}
    measure_pools.main()
    assert f"{task.name}: is there" in capsys.readouterr().out
