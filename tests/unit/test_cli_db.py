"""`gtco db` on files: what it prints, what it moves, its exit codes."""

from __future__ import annotations

import json
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gtco.cli import main as cli
from gtco.cli.db import describe, summarize
from gtco.codegen.rules import SKETCHES
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import RAN_WITH, VERSIONS, ran_with
from gtco.cost_model.record import LIBRARY, PLAN, TuningRecord, read_jsonl
from gtco.passes.tasks import workload_key
from gtco.target import TARGETS
from tests.groups import GEMM_CASES
from tests.records import key

WORKLOAD = workload_key(GEMM_CASES["projection"](), TARGETS["sm_90a"])
VERSION = {kind.name: kind.version for kind in SKETCHES}["gemm_wgmma"]
RECORD = TuningRecord(WORKLOAD, "H100", "gemm_wgmma", VERSION, {"swap": 1}, 3.5)
RECORDS = [
    RECORD,
    replace(RECORD, schedule={"swap": 0}, run_us=None, error="hangs"),
    replace(RECORD, version=VERSION - 1, run_us=1.0),
    replace(RECORD, sketch=LIBRARY, version=1, schedule={}, run_us=4.0),
    replace(RECORD, device="A100", run_us=9.0),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tuning.sqlite"
    with Database(found) as database:
        database.add(RECORDS)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gtco", "db", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_show_of_an_empty_database_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Database(tmp_path / "new.sqlite").close()
    assert run(monkeypatch, "show", "--db", tmp_path / "new.sqlite") == 0
    assert "new.sqlite holds no records; gtco tune makes them" in capsys.readouterr().out


def test_show_is_a_row_a_workload_and_device(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "show", "--db", path, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    first, second = shown["workloads"]
    assert first == {
        "work": "linear add row_stats of f16[1,197,768], f16[768,768]",
        "device": "H100",
        "records": 4,
        "failures": 1,
        "stale": 1,
        "best_us": 3.5,
        "best": "gemm_wgmma",
    }
    assert (second["device"], second["best_us"]) == ("A100", 9.0)
    assert run(monkeypatch, "show", "--db", path) == 0
    assert "5 records" in capsys.readouterr().out


def test_a_workload_that_is_no_json_is_shown_as_it_is() -> None:
    assert describe("rubbish") == "rubbish"
    assert describe('{"scope":"plan","nodes":[0,0]}') == "a whole model of 2 operators"
    (row,) = summarize([replace(RECORD, workload="w", run_us=None)])
    assert (row.best_us, row.best) == (None, "")


def test_records_move_between_databases(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, other = tmp_path / "out.jsonl", tmp_path / "other.sqlite"
    assert run(monkeypatch, "export", lines, "--db", path) == 0
    assert run(monkeypatch, "import", lines, "--db", other) == 0
    assert run(monkeypatch, "merge", path, "--db", other) == 0
    said = capsys.readouterr().out
    assert "wrote 5" in said and "added 5" in said and "added 0" in said
    with Database(other) as database:
        assert list(database.records()) == RECORDS
    third = tmp_path / "third.sqlite"
    assert run(monkeypatch, "merge", path, "--db", third) == 0
    assert "added 5" in capsys.readouterr().out


def test_what_ships_is_the_best_of_each_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = [replace(RECORD, schedule={"swap": 1, "a": n}, run_us=5.0 + n) for n in range(4)]
    plan = replace(RECORD, workload=key("m"), sketch=PLAN, version=VERSIONS[PLAN], work={"d": 12})
    plan = replace(plan, versions={RAN_WITH: ran_with(["gemm_wgmma"])})
    old_plan = replace(plan, workload=key("n"), version=VERSIONS[PLAN] - 1)
    path, lines = tmp_path / "tuning.sqlite", tmp_path / "out.jsonl"
    with Database(path) as database:
        database.add([*slower, *RECORDS, plan, old_plan])
    assert run(monkeypatch, "export", lines, "--best", 2, "--db", path) == 0
    assert "wrote 5" in capsys.readouterr().out
    assert list(read_jsonl(lines)) == [slower[0], RECORD, RECORDS[3], RECORDS[4], plan]


def test_verify_says_what_is_wrong_with_exit_code_1(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "verify", "--db", path) == 0
    assert "is sound: 5 records" in capsys.readouterr().out
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET run_us = 0.1 WHERE id = 2")
    assert run(monkeypatch, "verify", "--db", path) == 1
    assert "record 2: its checksum differs" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("show",), ("verify",), ("export", "x"), ("merge",)])
def test_looking_at_what_is_not_there_is_a_usage_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    missing = tmp_path / "none.sqlite"
    arguments = (*command, missing) if command == ("merge",) else (*command, "--db", missing)
    assert run(monkeypatch, *arguments) == 2
    assert "there is no database" in capsys.readouterr().err
    assert not missing.exists()


def test_a_damaged_import_is_one_message(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.jsonl").write_text("rubbish\n")
    assert run(monkeypatch, "import", tmp_path / "bad.jsonl", "--db", path) == 1
    assert "bad.jsonl:1: no tuning record" in capsys.readouterr().err
