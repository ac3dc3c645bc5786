"""The search on synthetic pools whose best is known, and on a task's own sketches."""

from __future__ import annotations

import gzip
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.cost_model import ranker as ranker_module
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.model import draft_us
from gtco.cost_model.pool import Entry, PoolError, PoolSpace, PoolTask, read_pool, write_pool
from gtco.cost_model.ranker import Ranker, RankerError, by_workload, shipped_ranker, train
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.search import Search, Strategy, search_task
from gtco.cost_model.work import Work, work_of
from gtco.passes.legality import family
from gtco.passes.tasks import Task, workload_key
from gtco.selection import launches_of
from tests import groups
from tests.groups import GEMM_CASES
from tests.pools import DEVICE, H100, synthetic_pool

pytest.importorskip("xgboost")


@pytest.fixture(scope="module")
def pool() -> dict[str, PoolTask]:
    return {each.name: each for each in synthetic_pool()}


@pytest.fixture(scope="module")
def ranker(pool: dict[str, PoolTask]) -> Ranker:
    """Trained on model "a" alone."""
    return train([each.measured() for each in pool.values() if each.model == "a"], H100)


def replay(task: PoolTask, search: Search[Entry], trials: int, step: int = 16) -> list[float]:
    """The best time after each trial."""
    curve: list[float] = []
    while len(curve) < trials and (found := search.propose(min(step, trials - len(curve)))):
        for entry in found:
            search.observe([task.record(entry)])
            best = search.best
            curve.append(float("inf") if best is None or best.run_us is None else best.run_us)
    return curve


def search_of(
    task: PoolTask, strategy: Strategy, ranker: Ranker | None = None, seed: int = 0
) -> Search[Entry]:
    return Search(
        PoolSpace(task, seed), lambda e: e.work, H100, ranker, strategy=strategy, seed=seed
    )


# -- the ranker ------------------------------------------------------------------------------------


def agreement(scores: Sequence[float], times: Sequence[float]) -> float:
    """The part of pairs at least 2% apart that the scores put in the right order."""
    pairs = [
        (scores[i] > scores[j]) == (times[i] < times[j])
        for i in range(len(times))
        for j in range(i)
        if abs(times[i] / times[j] - 1) > 0.02
    ]
    return sum(pairs) / len(pairs)


def near(task: PoolTask) -> list[tuple[Work, float]]:
    """Programs that ran in at most three times the best."""
    return [(e.work, e.run_us) for e in task.entries if e.run_us and e.run_us < 3 * task.best_us]


def test_an_unseen_model_is_ranked_better_than_by_the_draft(
    pool: dict[str, PoolTask], ranker: Ranker
) -> None:
    # Near the best, where a search chooses: who is ten times slower is easy to tell.
    learned, drafted, backwards = [], [], []
    for name in ("b-fc1", "b-fc2"):
        ran = near(pool[name])
        works, times = [work for work, _ in ran], [us for _, us in ran]
        learned.append(agreement(ranker.scores(works), times))
        drafted.append(agreement([-draft_us(work, H100) for work in works], times))
        backwards.append(agreement([-score for score in ranker.scores(works)], times))
    assert sum(learned) > sum(drafted)
    assert min(learned) > 0.85 and max(backwards) < 0.15


def test_failures_rank_below_their_draft_price(pool: dict[str, PoolTask], ranker: Ranker) -> None:
    task = pool["b-fc2"]
    scores = ranker.scores([each.work for each in task.entries])
    drafts = [ranker_module.SHARPNESS * math.log(draft_us(e.work, H100)) for e in task.entries]
    learned = [score + draft for score, draft in zip(scores, drafts, strict=True)]
    failed = [x for x, each in zip(learned, task.entries, strict=True) if each.run_us is None]
    ran = sorted(x for x, each in zip(learned, task.entries, strict=True) if each.run_us)
    assert failed and sum(failed) / len(failed) < ran[len(ran) // 4]


def test_adapting_learns_the_task_and_leaves_the_model(
    pool: dict[str, PoolTask], ranker: Ranker
) -> None:
    works = [each.work for each in pool["b-fc1"].entries[:64]]
    before = ranker.scores(works)
    knobs = [work.schedule for work in works]
    times = [5.0 - 3 * each.get("swap", 0) + 0.1 * each.get("stages", 0) for each in knobs]
    adapted = ranker.adapted(list(zip(works, times, strict=True)))
    assert ranker.scores(works) == before
    assert agreement(adapted.scores(works), times) > agreement(before, times) + 0.1


@pytest.mark.parametrize("name", ["model.ubj", "model.json"])
def test_a_saved_model_says_the_same(tmp_path, pool, ranker: Ranker, name: str) -> None:
    works = [each.work for each in pool["b-fc1"].entries[:20]]
    ranker.save(tmp_path / name)
    assert Ranker.load(tmp_path / name, H100).scores(works) == ranker.scores(works)
    assert ranker.scores([]) == []


def test_a_model_of_other_features_or_damaged_is_refused(
    tmp_path, ranker: Ranker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.ubj"
    ranker.save(path)
    now = ranker_module.FEATURES_VERSION
    monkeypatch.setattr(ranker_module, "FEATURES_VERSION", 99)
    with pytest.raises(RankerError, match=rf"features of version {now}, not 99: train it again"):
        Ranker.load(path, H100)
    path.write_bytes(b"rubbish")
    with pytest.raises(RankerError, match="cannot read the cost model"):
        Ranker.load(path, H100)
    with pytest.raises(RankerError, match="cannot read the cost model"):
        Ranker.load(tmp_path / "missing.ubj", H100)


def test_without_xgboost_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, pool: dict[str, PoolTask], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgboost", None)
    with pytest.raises(RankerError, match=r"pip install 'gtco\[tune\]'"):
        train([pool["a-qkv"].measured()], H100)
    with caplog.at_level("INFO"):
        assert shipped_ranker(H100) is None
    assert "the draft model ranks" in caplog.text


def test_nothing_to_compare_is_an_error(pool: dict[str, PoolTask]) -> None:
    one = pool["a-qkv"].measured()[:1]
    for useless in ([], [one], [[(one[0][0], None)] * 3]):
        with pytest.raises(RankerError, match="no workload has two measured programs"):
            train(useless, H100)


def test_records_are_grouped_by_workload_and_device(pool: dict[str, PoolTask]) -> None:
    task = pool["a-qkv"]
    first, second = task.entries[:2]
    record = replace(task.record(first), work=first.work.numbers())
    found = by_workload(
        [
            record,
            replace(record, device="other"),
            replace(task.record(second), work=second.work.numbers()),
            replace(record, sketch=LIBRARY),
            replace(record, work={}),
        ]
    )
    assert found == [
        [(first.work, first.run_us), (second.work, second.run_us)],
        [(first.work, first.run_us)],
    ]


# -- the search ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", Strategy)
def test_each_program_is_proposed_once_until_none_is_left(
    pool: dict[str, PoolTask], ranker: Ranker, strategy: Strategy
) -> None:
    task = replace(pool["b-fc1"], entries=pool["b-fc1"].entries[:70])
    search = search_of(task, strategy, ranker)
    proposed = []
    while found := search.propose(16):
        assert len(found) <= 16
        proposed += [each.key for each in found]
        search.observe(task.record(each) for each in found)
    assert len(proposed) == len(set(proposed)) == 70
    assert search.trials == 70
    assert search.best is not None and search.best.run_us == task.best_us


def test_draft_and_model_need_a_quarter_of_randoms_trials(
    pool: dict[str, PoolTask], ranker: Ranker
) -> None:
    for name in ("b-fc1", "b-fc2"):
        task = pool[name]
        for seed in range(2):
            goal = replay(task, search_of(task, Strategy.RANDOM, seed=seed), 128)[-1]
            curve = replay(task, search_of(task, Strategy.DRAFT_MODEL, ranker, seed), 32)
            assert curve[-1] <= goal * 1.02


def test_evolution_without_a_model_learns_from_its_parents(pool: dict[str, PoolTask]) -> None:
    """One search alone may be lucky or not."""

    def later_median(strategy: Strategy, task: PoolTask, seed: int) -> float:
        search = search_of(task, strategy, seed=seed)
        times = []
        for _ in range(6):
            found = search.propose(16)
            search.observe(task.record(each) for each in found)
            times += [each.run_us or 1000 for each in found]
        return sorted(times[16:])[24]

    shares = [
        later_median(Strategy.EVOLUTION, task, seed) / later_median(Strategy.RANDOM, task, seed)
        for task in pool.values()
        for seed in range(4)
    ]
    assert statistics.geometric_mean(shares) < 0.96


def test_equal_seeds_propose_the_same(pool: dict[str, PoolTask], ranker: Ranker) -> None:
    task = pool["b-fc1"]
    first, again, other = (
        [e.key for e in search_of(task, Strategy.DRAFT_MODEL, ranker, seed).propose(24)]
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_without_a_ranker_the_draft_orders(pool: dict[str, PoolTask]) -> None:
    task = pool["b-fc2"]
    found = search_of(task, Strategy.DRAFT_MODEL).propose(24)
    drafts = sorted(draft_us(each.work, H100) for each in task.entries)
    proposed = sorted(draft_us(each.work, H100) for each in found)
    assert proposed[12] <= drafts[len(drafts) // 5]


def test_the_library_may_win_but_has_no_children(pool: dict[str, PoolTask]) -> None:
    task = pool["b-fc1"]
    search = search_of(task, Strategy.EVOLUTION)
    library = TuningRecord(task.workload, DEVICE, LIBRARY, 1, {}, 0.5)
    search.observe([library])
    assert search.best == library and search.trials == 0
    search.observe(task.record(each) for each in search.propose(16))
    assert search.best == library
    assert search.propose(16)


# -- a task's own sketches -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task() -> Task:
    group = GEMM_CASES["projection"]()
    return Task(workload_key(group, H100), group, (group,))


def measured(
    task: Task, candidates: Sequence[Candidate], run_us: float | None = 3.0, **fields
) -> list[TuningRecord]:
    return [
        replace(
            TuningRecord(
                task.key,
                DEVICE,
                each.sketch.name,
                each.sketch.version,
                each.program.schedule,
                run_us,
                work=work_of(each).numbers(),
            ),
            **fields,
        )
        for each in candidates
    ]


def test_a_search_begins_with_defaults(task: Task) -> None:
    search = search_task(task, H100, Knowledge(DEVICE))
    found = search.propose(16)
    assert len({each.key for each in found}) == 16
    first = next(iter(found[0].sketch.defaults()))
    assert found[0].program.schedule == first


def test_a_search_resumes_from_fresh_records(task: Task) -> None:
    search = search_task(task, H100, Knowledge(DEVICE))
    found = search.propose(16)
    records = measured(task, found[:8]) + measured(task, found[8:], None, error="hangs")
    again = search_task(task, H100, Knowledge(DEVICE, records))
    assert again.trials == 16
    assert again.best is not None and again.best.run_us == 3.0
    assert not {each.key for each in found} & {each.key for each in again.propose(32)}


def test_a_stale_record_lends_its_schedule_but_not_its_time(task: Task) -> None:
    space = search_task(task, H100, Knowledge(DEVICE), strategy=Strategy.RANDOM)
    odd = space.propose(20)[-1:]
    for fields in ({"version": 0}, {"device": "another"}):
        search = search_task(task, H100, Knowledge(DEVICE, measured(task, odd, 0.1, **fields)))
        assert search.best is None
        assert search.propose(8)[0].key == odd[0].key


def space_of(task: Task) -> Sampler:
    return Sampler(derive(task.group, family(task.group), H100).sketches, 0)


def test_similar_tasks_lend_their_best(task: Task) -> None:
    group = GEMM_CASES["fc2"]()
    other = Task(workload_key(group, H100), group, (group,))
    found = search_task(other, H100, Knowledge(DEVICE), strategy=Strategy.RANDOM).propose(20)
    wgmma = [each for each in found if each.sketch.name == "gemm_wgmma"][:2]
    records = measured(other, wgmma[:1], 9.0) + measured(other, wgmma[1:], 5.0)
    search = search_task(task, H100, Knowledge(DEVICE, records))
    proposed = search.propose(16)
    assert search.best is None
    begun = [each.key for each in space_of(task).defaults(8)]
    assert [each.key for each in proposed[: len(begun)]] == begun, "the defaults come first"
    lent = wgmma[1].program.schedule
    proposed += search.propose(16)
    alike = [each for each in proposed if each.sketch.name == "gemm_wgmma"]
    apart = [sum(each.program.schedule[n] != lent[n] for n in lent) for each in alike]
    assert min(apart[len(begun) :]) <= 1


def test_a_search_begins_with_what_runs_untuned() -> None:
    first, other = (
        Task(workload_key(group, H100), group, (group,))
        for group in (groups.residual_linear(rows, 768, 768, torch.float16) for rows in (197, 196))
    )
    odd = search_task(other, H100, Knowledge(DEVICE), strategy=Strategy.RANDOM).propose(20)
    records = measured(other, [each for each in odd if each.sketch.name == "gemm_wgmma"][-1:])
    search = search_task(first, H100, Knowledge(DEVICE, records))
    (launch,) = launches_of(first, H100, Knowledge(DEVICE, records))
    assert launch.source == "transferred" and launch.program is not None
    assert search.propose(8)[0].program == launch.program


def test_a_group_without_sketches_has_no_programs() -> None:
    group = groups.plain_linear(4, 64, 64, torch.float64)
    search = search_task(Task(workload_key(group, H100), group, (group,)), H100, Knowledge(DEVICE))
    assert search.propose(4) == [] and search.best is None


# -- the pool's files ------------------------------------------------------------------------------


def test_a_pool_survives_its_file(tmp_path, pool: dict[str, PoolTask]) -> None:
    for task in pool.values():
        write_pool(tmp_path / f"{task.name}.pool.jsonl.gz", task)
    for task in read_pool(tmp_path):
        kept = pool[task.name]
        assert replace(task, entries=()).__dict__ == replace(kept, entries=()).__dict__
        for one, two in zip(task.entries, kept.entries, strict=True):
            assert one.key == two.key and one.work.numbers() == two.work.numbers()
            assert (one.run_us, one.error, one.default) == (two.run_us, two.error, two.default)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 60 * sum(len(task.entries) for task in pool.values())
    assert len(list(tmp_path.iterdir())) == len(pool)


@pytest.mark.parametrize("damage", ["torn", "flipped", "rubbish", "no head"])
def test_a_damaged_pool_is_named(tmp_path, pool: dict[str, PoolTask], damage: str) -> None:
    path = tmp_path / "x.pool.jsonl.gz"
    write_pool(path, pool["a-qkv"])
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 16
    lines = gzip.decompress(data).split(b"\n", 1)
    path.write_bytes(
        {
            "torn": data[: len(data) // 2],
            "flipped": bytes(flipped),
            "rubbish": b"rubbish",
            "no head": gzip.compress(lines[1]),
        }[damage]
    )
    with pytest.raises(PoolError, match=r"x\.pool\.jsonl\.gz is no measured pool"):
        read_pool(tmp_path)


def test_a_pools_mutations_are_near(pool: dict[str, PoolTask]) -> None:
    task = pool["b-fc1"]
    space = PoolSpace(task, 0)
    start = task.entries[0]
    for _ in range(20):
        child = space.mutate(start)
        assert child is not None and child.key != start.key
        assert child.work.sketch == start.work.sketch
    other = next(each for each in task.entries if each.work.sketch != start.work.sketch)
    assert space.crossover(start, other) is None
    assert len(space.random(10**6)) == len(task.entries)
    assert space.defaults(3) == list(task.entries[:3])
