"""The tuner itself is killed, shares its database, or finds it damaged or the disk full.

Nothing but the trial in flight is lost, and nothing wrong is installed.
"""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.sampler import Candidate, schedule_key
from gtco.cost_model import measure
from gtco.cost_model.database import Database
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.trials import Trials
from gtco.tuning.result import TuneResult, TuneStatus
from tests.processes import environment

pytestmark = pytest.mark.compiler

TUNE = """
import sys, torch, gtco
from tests.faults.test_tuner_kills import ARGS, Model
gtco.tune(Model(), ARGS, trials=int(sys.argv[2]), seed=int(sys.argv[3]), database=sys.argv[1],
          target="host")
"""
MARK = "GTCO_TEST_MARK"
ARGS = (torch.linspace(-2, 2, 256).view(4, 64).half(),)


class Model(nn.Module):
    """One pointwise kernel of many schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x + 1)


def tune(database: Path, trials: int, **more: object) -> TuneResult:
    return gtco.tune(Model(), ARGS, trials=trials, database=database, target="host", **more)


def start(database: Path, trials: int, seed: int = 0, **more: str) -> subprocess.Popen[str]:
    """A tuner in a process of its own with `more` in its environment."""
    return subprocess.Popen(
        [sys.executable, "-c", TUNE, str(database), str(trials), str(seed)],
        env=environment(**more),
        stderr=subprocess.PIPE,
        text=True,
    )


def records(database: Path) -> list[TuningRecord]:
    with Database(database) as opened:
        assert opened.verify() == []
        return list(opened.records())


def marked(mark: str) -> list[int]:
    """Processes that a marked tuner started, itself included."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def is_right(result: TuneResult) -> bool:
    with torch.no_grad():
        expected = Model()(*ARGS)
    return torch.allclose(result.compiled(*ARGS), expected, atol=2e-3, rtol=2e-3)


def watch_programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """The programs that later calls of `Trials.run` measure."""
    seen: list[tuple[str, object]] = []
    run = Trials.run

    def watched(
        self: Trials, subject: Subject, candidate: Candidate | None, *, final: bool = False
    ) -> object:
        seen.append((subject.key, (LIBRARY, ()) if candidate is None else candidate.key))
        return run(self, subject, candidate, final=final)

    monkeypatch.setattr(Trials, "run", watched)
    return seen


def test_a_tuner_that_is_killed_loses_no_record_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.sqlite"
    mark = str(tmp_path)
    cold = str(tmp_path / "cache")  # with kernels at hand it would be done before it is killed
    killed = start(path, 500, XDG_CACHE_HOME=cold, **{MARK: mark})
    known: list[TuningRecord] = []
    until = time.monotonic() + 200
    while len(known) < 3 and time.monotonic() < until:
        time.sleep(0.3)
        known = records(path) if path.exists() else []
    killed.kill()
    killed.communicate()
    assert len(known) >= 3, "nothing was measured"
    until = time.monotonic() + 30
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.3)
    assert not marked(mark), "a process outlives the tuner"
    kept = records(path)
    assert {_program(each) for each in known} <= {_program(each) for each in kept}
    seen = watch_programs(monkeypatch)
    result = tune(path, 2)
    assert result.trials == 2 and is_right(result)
    assert not {_program(each) for each in kept} & set(seen), "a known program ran again"
    assert len(records(path)) >= len(kept) + 2
    assert {launch.source for launch in result.compiled.launches} == {"tuned here"}


def _program(record: TuningRecord) -> tuple[str, object]:
    return record.workload, schedule_key(record.sketch, record.schedule)


def test_workers_that_are_killed_cost_no_program(tmp_path: Path) -> None:
    kills: list[int] = []

    def kill(status: TuneStatus) -> None:
        for worker in measure._all:
            child = worker._child
            if child is not None and len(kills) < 2 and status.trials >= len(kills):
                child.process.kill()
                kills.append(status.trials)

    result = tune(tmp_path / "tuning.sqlite", 5, watch=kill)
    assert len(kills) == 2
    assert (result.trials, result.failures) == (5, 0) and is_right(result)


def test_an_interrupt_keeps_the_best(tmp_path: Path) -> None:
    pressed: list[int] = []

    def interrupt(status: TuneStatus) -> None:
        if status.trials >= 1 and not pressed:
            pressed.append(status.trials)
            raise KeyboardInterrupt

    result = tune(tmp_path / "tuning.sqlite", 100, watch=interrupt)
    assert result.stopped == "interrupted" and 1 <= result.trials < 100 and is_right(result)
    assert {launch.source for launch in result.compiled.launches} == {"tuned here"}
    assert len(records(tmp_path / "tuning.sqlite")) >= result.trials


def test_two_tuners_share_a_database(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    both = [start(path, 3, seed) for seed in (1, 2)]
    for each in both:
        _, errors = each.communicate(timeout=400)
        assert each.returncode == 0, errors
    kept = records(path)
    assert len([each for each in kept if each.sketch != LIBRARY]) >= 3
    assert all(each.run_us is not None for each in kept)
    assert [each.source for each in gtco.compile(Model(), ARGS, target="host", database=path)
            .launches] == ["tuned here"]  # fmt: skip


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_a_damaged_database_is_tuned_on(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "tuning.sqlite"
    assert is_right(tune(path, 2))
    data = bytearray(path.read_bytes())
    if damage == "torn":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0x10
        data[40] ^= 0x10
    path.write_bytes(data)
    compiled = gtco.compile(Model(), ARGS, target="host", database=path)
    assert {launch.source for launch in compiled.launches} <= {"tuned here", "default"}
    result = tune(path, 1)
    assert is_right(result) and result.trials == 1
    assert records(path)


def test_a_full_disk_loses_nothing_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.sqlite"
    with Database(path):
        pass
    adding = Database.add

    def add(self: Database, records: Iterable[TuningRecord]) -> None:
        """With no room for another page: files may not grow past one."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            adding(self, records)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "gtco"):
        patch.setattr(Database, "add", add)
        result = tune(path, 2)
    assert result.trials == 2 and is_right(result)
    assert {launch.source for launch in result.compiled.launches} == {"tuned here"}
    assert "cannot keep records" in caplog.text and "could not be kept" in caplog.text
    assert records(path) == []
    assert tune(path, 1).trials == 1 and len(records(path)) == 2
