"""The ablation, the table of kernels and the live search: what they decide, and on the host."""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtco
from experiments import ablation, kernel_table, measure_pools
from experiments.ablation import DRAFT, GREEDY, MEASURED, NONE, Tuning, differences, tuned_arms
from experiments.partitions import unfused
from experiments.publish import provenance
from experiments.studies import (
    attention_copies,
    attention_projection,
    attention_split,
    live_search,
)
from gtco.codegen.sampler import Candidate
from gtco.compiler import fuse_with
from gtco.cost_model.knowledge import CHAIN, FINAL, Knowledge
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.pool import SUFFIX, Entry, PoolTask, write_pool
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.work import work_of
from gtco.locate import UsageError
from gtco.passes import run_pipeline
from gtco.passes.tasks import tasks
from gtco.target import TARGETS
from tests.pools import synthetic_pool

H100 = TARGETS["sm_90a"]
DEVICE = "imaginary"
TINY = "tests.pools:tiny"


class Device:
    """In place of `Trials`: every kernel takes 10 us, those of the groups in `slow` 100."""

    def __init__(self, slow: tuple[str, ...] = (), broken: str = "none is") -> None:
        self.slow, self.broken = slow, broken
        self.ran: list[tuple[str, object, bool]] = []

    def run(
        self, subject: Subject, candidate: Candidate | None, *, final: bool = False
    ) -> Future[TuningRecord]:
        found: Future[TuningRecord] = Future()
        ops = " ".join(node.op for node in subject.group.compute)
        key = LIBRARY if candidate is None else candidate.key
        self.ran.append((ops, key, final))
        if self.broken in ops:
            found.set_exception(MeasureError("it cannot be made ready"))
            return found
        sketch, version = (LIBRARY, 1)
        if candidate is not None:
            sketch, version = candidate.sketch.name, candidate.sketch.version
        schedule = {} if candidate is None else dict(candidate.program.schedule)
        run_us = 900.0 if candidate is None else 100.0 if ops in self.slow else 10.0
        timed = {"timed": FINAL if final else CHAIN}
        found.set_result(
            TuningRecord(subject.key, DEVICE, sketch, version, schedule, run_us, "", timed)
        )
        return found


def mlp_graph() -> gtco.Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).half().eval()
    return run_pipeline(gtco.capture(model, (torch.zeros(32, 64).half(),)))


def ablated(device: Device, programs: int = 20) -> tuple[Knowledge, dict[str, gtco.FusedGraph]]:
    known = Knowledge(DEVICE)
    tuning = Tuning(known, H100, device, None, None)  # type: ignore[arg-type]
    return known, tuned_arms(mlp_graph(), H100, known, tuning, programs, math.inf)


def ops(fused: gtco.FusedGraph) -> list[str]:
    return [" ".join(node.op for node in group.compute) for group in fused]


def test_each_task_of_each_arm_has_as_many_programs_and_the_best_are_timed_again() -> None:
    device = Device()
    known, arms = ablated(device)
    assert list(arms) == [NONE, GREEDY, DRAFT, MEASURED]
    assert ops(arms[NONE]) == ["linear", "gelu", "linear"]
    for fused in arms.values():
        for task in tasks(fused, H100):
            name = " ".join(node.op for node in task.group.compute)
            records = [r for r in known.records(task.key) if r.sketch != LIBRARY]
            assert len(records) == (9 if name == "gelu" else 20), "gelu has no more programs"
            finals = [key for ran, key, final in device.ran if ran == name and final]
            assert LIBRARY in finals and len(finals) > 8
    searched = [each for each in device.ran if not each[2]]
    assert sum(key == LIBRARY for _, key, _ in searched) == len(
        {task.key for fused in arms.values() for task in tasks(fused, H100)}
    )


def test_a_larger_fusion_that_the_clock_rejects_is_named() -> None:
    known, arms = ablated(Device(slow=("linear gelu",)))
    assert ops(arms[GREEDY]) == ops(arms[DRAFT]) == ["linear gelu", "linear"]
    assert ops(arms[MEASURED]) == ["linear", "gelu", "linear"]
    (place,) = differences(arms[GREEDY], arms[MEASURED], known, H100)
    assert place["rejected"] and place["times"] == 1
    assert [each["ops"] for each in place["first"]] == ["linear -> gelu"]
    assert [each["ops"] for each in place["second"]] == ["linear", "gelu"]
    assert place["measured_us"] == [100.0, 20.0]
    (back,) = differences(arms[MEASURED], arms[GREEDY], known, H100)
    assert not back["rejected"]


def test_plans_that_agree_differ_nowhere_and_alike_places_count_together() -> None:
    known, arms = ablated(Device())
    assert differences(arms[GREEDY], arms[DRAFT], known, H100) == []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    graph = run_pipeline(gtco.capture(model.half().eval(), (torch.zeros(32, 64).half(),)))
    (draft,) = fuse_with(known, graph, H100)
    (place,) = differences(draft, unfused(graph), known, H100)
    assert place["times"] == 3 and place["measured_us"] == [None, None] and not place["rejected"]


def test_a_task_that_cannot_be_measured_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    device = Device(broken="gelu")
    ablated(device)
    assert "it cannot be made ready" in capsys.readouterr().err
    assert not any(final for name, _, final in device.ran if "gelu" in name)


# -- end to end ------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, module: object, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, words), "--target", "host"])
    module.main()  # type: ignore[attr-defined]


@pytest.mark.compiler
def test_the_ablation_and_the_table_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, db = tmp_path / "o.json", tmp_path / "o.sqlite"
    run(monkeypatch, ablation, TINY, out, "--db", db, "--programs", 1)
    result = json.loads(out.read_text())
    launches = {name: arm["launches"] for name, arm in result["arms"].items()}
    assert launches[NONE] == launches[f"{NONE}{ablation.UNTUNED}"] == 2
    assert result["arms"][f"{GREEDY}{ablation.UNTUNED}"]["programs"] == 0
    assert all(arm["verdict"]["ok"] for arm in result["arms"].values())
    assert all(len(arm["rounds_us"]) == ablation.ROUNDS for arm in result["arms"].values())
    assert result["programs"] == result["tasks"] == 3
    assert str(tmp_path) not in out.read_text()
    shown = capsys.readouterr().out
    assert "| no fusion | 2 |" in shown and "greedy against DP, draft prices: the same" in shown

    run(monkeypatch, kernel_table, TINY, out, "--db", db, "--programs", 1)
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert sum(row["weight"] for row in rows) in (1, 2) and not result["left_out"]
    for row in rows:
        assert all(row["times_us"][name] > 0 for name in kernel_table.COLUMNS)
        assert set(row["schedules"]) == {"default", "random", "tuned"}
        assert row["random_programs"] == [1, 1]
    assert "| all |  |" in capsys.readouterr().out


@pytest.mark.compiler
def test_attention_with_its_projection_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.json"
    model = "tests.pools:tiny_vit"
    run(monkeypatch, attention_projection, model, out, "--programs", 2)
    rows = json.loads(out.read_text())["rows"]
    assert [row["weight"] for row in rows] == [1, 1]
    for row in rows:
        assert row["ops"] == "attention -> linear -> add -> row_stats"
        attention, projection = (each["sketch"] for each in row["apart"])
        assert attention == "attention" and projection.startswith("gemm_")
        assert len(row["programs"]) == 2 and not any(each["error"] for each in row["programs"])
        assert row["saved_us"] == pytest.approx(sum(row["apart_us"]) - row["joined_us"])
    assert "| saved, us |" in capsys.readouterr().out


def test_a_wrong_answer_ends_the_ablation() -> None:
    model, args = nn.Linear(8, 8).eval(), (torch.randn(2, 8),)
    located = gtco.locate.Located("linear", model, args, {})

    def wrong(x: Tensor) -> Tensor:
        return model(x) * 1.1

    options = gtco.Options.of(target="host")
    with torch.no_grad():
        assert ablation.judged({"right": model}, located, options)["right"]["ok"]  # type: ignore[dict-item]
        with pytest.raises(RuntimeError, match="the answer of 'wrong' is wrong"):
            ablation.judged({"wrong": wrong}, located, options)  # type: ignore[dict-item]


def test_the_table_leaves_no_sum_where_a_time_is_missing() -> None:
    times = {"default": 3.0, "random": 2.0, "tuned": None, "library": 9.0}
    row = {"name": "a", "ops": "linear", "weight": 12, "times_us": times}
    row |= {"draft_us": 1.5, "floor_us": 0.5}
    last = kernel_table.table({"rows": [row]}).splitlines()[-1]
    assert last == "| all |  | 12 | 36.0 | 24.0 |  | 108.0 | 18.0 | 6.0 |"


@pytest.mark.compiler
def test_a_live_search_beside_its_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgboost")
    (draw,) = measure_pools.draws([TINY], H100, 1, 12)
    entries = tuple(Entry(work_of(each), 5.0 + n) for n, each in enumerate(draw.programs))
    own = PoolTask(draw.name, "tiny", H100.arch, DEVICE, CHAIN, draw.task.key, 1, 9.0, entries)
    for task in (own, *synthetic_pool()[:2]):
        write_pool(tmp_path / f"{task.name}{SUFFIX}", task)
    out = tmp_path / "live.json"
    run(monkeypatch, live_search, TINY, tmp_path, out, draw.name, "--trials", 2)
    (task,) = json.loads(out.read_text())["tasks"].values()
    for where in ("live", "replayed"):
        assert set(task[where]) == {"random", "draft + cost model"}
        assert all(points[-1][0] == 2 for points in task[where].values())
    assert f"| {draw.name} | live |" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"not in the pool: nobody; .*: a-qkv"):
        run(monkeypatch, live_search, TINY, tmp_path, out, "a-qkv", "nobody")


@pytest.mark.compiler
def test_both_copies_of_attention_are_rehearsed_without_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copies.json"
    words = ["--quick", "--workloads", "swin_stage1"]
    monkeypatch.setattr(sys, "argv", ["attention_copies", str(out), *words])
    attention_copies.main()
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert result["device"] == "host" and "torch" in result["environment"]["packages"]
    assert result["command"].startswith(
        "python -m experiments.studies.attention_copies copies.json"
    )
    assert row["right"] == row["tried"] >= 4 and not row["errors"]
    assert {each["copy"] for each in row["programs"]} == {"cp.async", "TMA", "attention_wgmma"}
    assert all(each["run_us"] is None for each in row["programs"])
    assert "swin_stage1" in capsys.readouterr().out


@pytest.mark.compiler
def test_cuts_of_attention_are_rehearsed_without_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "split.json"
    words = ["--quick", "--workloads", "detr_cross", "--kinds", "mma,2,rest", "--programs", "1"]
    monkeypatch.setattr(sys, "argv", ["attention_split", str(out), *words])
    attention_split.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["right"] == 3 and {each["kind"] for each in row["tried"]} == {"mma", "2", "rest"}
    assert set(row["best_us"].values()) == {None}
    assert "detr_cross" in capsys.readouterr().out


def test_copies_of_attention_are_compared_at_one_tile() -> None:
    def program(
        copy: str, block_q: int, run_us: float | None, copy_warps: int = 0
    ) -> dict[str, object]:
        tma = int(copy == attention_copies.TMA)
        knobs = {"block_q": block_q, "copy_warps": copy_warps, "tma": tma}
        return {"copy": copy, "schedule": knobs, "run_us": run_us}

    programs = [
        program(attention_copies.CP_ASYNC, 16, 4.0),
        program(attention_copies.CP_ASYNC, 16, 3.0, copy_warps=6),
        program(attention_copies.TMA, 16, 2.0),
        program(attention_copies.TMA, 32, 1.0),
        program(attention_copies.CP_ASYNC, 32, None),
        program(attention_copies.WGMMA, 32, 0.5),
    ]
    found = attention_copies.same_tile(programs)
    assert found == [{"tile": {"block_q": 16}, "cp.async": 3.0, "TMA": 2.0}]


def test_a_result_says_where_it_came_from_but_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "a.b:c", "/home/me/out.json", "--seconds", "3"])
    found = provenance("ablation")
    assert found["command"] == "python -m experiments.ablation a.b:c out.json --seconds 3"
    assert "torch" in found["environment"]["packages"] and "/home" not in json.dumps(found)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arm = {"launches": 2, "median_us": 5.0, "rounds_us": [4.0, 6.0], "predicted_us": 4.5}
    arms = {name: arm for name in (NONE, MEASURED)}
    ablation.plot({"model": "m", "device": DEVICE, "arms": arms}, tmp_path / "a.png")
    curves = {"random": [(1, 9.0), (4, 7.0)], "draft + cost model": [(2, 6.0), (4, 6.0)]}
    task = {"pool_best_us": 5.5, "live": curves, "replayed": curves}
    live_search.plot({"tasks": {"t": task}}, tmp_path / "b.png")
    times = {"default": 3.0, "random": 2.0, "tuned": None, "library": 9.0}
    row = {"name": "a", "ops": "linear", "weight": 12, "times_us": times}
    row |= {"draft_us": 1.5, "floor_us": 0.5}
    kernel_table.plot({"model": "m", "device": DEVICE, "rows": [row]}, tmp_path / "c.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png", "c.png"}
