"""The user's database: nothing that `add` returned from is lost, nothing damaged is believed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gtco.cost_model import database as module
from gtco.cost_model.database import Database, database_path
from gtco.cost_model.record import LIBRARY, DatabaseError, TuningRecord, read_jsonl, write_jsonl
from tests.processes import environment
from tests.records import key

H100 = "NVIDIA H100 80GB HBM3"


def record(number: int, run_us: float | None = 1.0, workload: str = "w", **fields: object):
    """Of the workload of one operator called `workload`."""
    made = TuningRecord(
        key(workload),
        H100,
        "gemm_wgmma",
        2,
        {"block_p": 64, "number": number},
        run_us,
        "" if run_us else "wrong answer",
        {"nvrtc": "13.0"},
        {"blocks": 108, "threads": 256},
    )
    return replace(made, **fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gtco" / "tuning.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with Database(path) as opened:
        yield opened


def test_what_was_added_is_there_when_it_is_opened_again(path: Path) -> None:
    kept = [record(0, 3.25), record(1, None), record(2, 2, work={}, versions={})]
    with Database(path) as database:
        database.add(kept)
        assert list(database.records()) == kept
    with Database(path) as database:
        assert list(database.records()) == kept
        assert database.verify() == []
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_one_row_a_key_and_the_newest_wins(database: Database) -> None:
    database.add([record(0, 3.0)])
    database.add([record(0, 2.0), record(0, 2.5)])
    assert list(database.records()) == [record(0, 2.5)]
    others = [
        record(0, workload="v"),
        record(0, device="A100"),
        record(0, sketch="gemm_mma"),
        record(0, version=3),
        record(1),
    ]
    database.add(others)
    assert list(database.records()) == [record(0, 2.5), *others]


def test_merging_keeps_what_is_here(database: Database, tmp_path: Path) -> None:
    database.add([record(0, 3.0)])
    assert database.merge([record(0, 1.0), record(1, 2.0)]) == 1
    assert list(database.records()) == [record(0, 3.0), record(1, 2.0)]


def test_export_and_import_are_a_round_trip(database: Database, tmp_path: Path) -> None:
    kept = [record(0), record(1, None), record(2, sketch=LIBRARY, schedule={})]
    database.add(kept)
    lines = tmp_path / "out.jsonl"
    assert write_jsonl(lines, database.records()) == 3
    assert list(read_jsonl(lines)) == kept
    with Database(tmp_path / "other.sqlite") as other:
        assert other.import_jsonl(lines) == 3
        assert other.import_jsonl(lines) == 0
        assert list(other.records()) == kept


def test_a_damaged_line_is_named_and_costs_no_other(database: Database, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(f"{record(0).to_json()}\nrubbish\n{record(1).to_json()}\n")
    with pytest.raises(DatabaseError, match=r"added 2 records, and left 1 lines out:\n.*jsonl:2: "):
        database.import_jsonl(lines)
    assert list(database.records()) == [record(0), record(1)]
    with pytest.raises(DatabaseError, match="cannot read"):
        database.import_jsonl(tmp_path / "missing.jsonl")
    with pytest.raises(DatabaseError, match="cannot write"):
        write_jsonl(tmp_path / "no" / "out.jsonl", database.records())


def test_a_record_that_fails_to_arrive_leaves_none_behind(database: Database) -> None:
    broken = replace(record(1), device=None)  # type: ignore[arg-type]
    with pytest.raises(DatabaseError, match="cannot keep records"):
        database.add([record(0), broken])
    assert list(database.records()) == []


def test_the_default_path_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert database_path() == tmp_path / "gtco" / "tuning.sqlite"
    with Database() as database:
        database.add([record(0)])
    assert database_path().exists()


# -- faults ----------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from gtco.cost_model.database import Database
from gtco.cost_model.record import TuningRecord
path, name, count, workload = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
with Database(path) as database:
    for number in range(count):
        database.add([TuningRecord(workload, name, "s", 1, {"n": number}, 1.0)])
        print(number, flush=True)
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count), key("w")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_kill_9_loses_nothing_that_was_added(path: Path) -> None:
    chosen = random.Random(0)
    for round_number in range(3):
        process = writer(path, f"device{round_number}", 10**6)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chosen.uniform(0.01, 0.2))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        with Database(path) as database:
            assert database.verify() == []
            kept = {
                r.schedule["n"] for r in database.records() if r.device.endswith(f"{round_number}")
            }
        assert kept >= {0, *said}
        assert len(kept) <= 2 + max(said, default=0)  # at most the one in flight


def test_two_writers_at_once_lose_nothing(path: Path) -> None:
    count = 60
    processes = [writer(path, name, count) for name in ("one", "two")]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with Database(path) as database:
        assert len(list(database.records())) == 2 * count


@pytest.fixture
def many(path: Path) -> list[TuningRecord]:
    kept = [record(number, 1.0 + number, f"workload {number % 7} " * 40) for number in range(300)]
    with Database(path) as database:
        database.add(kept)
    return kept


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_byte_makes_no_wrong_record(
    path: Path, many: list[TuningRecord], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = random.Random(seed)
    data = bytearray(path.read_bytes())
    at = chosen.randrange(len(data)) if seed else 20
    data[at] ^= 1 << chosen.randrange(8)
    path.write_bytes(data)
    with Database(path) as database:
        kept = list(database.records())
        assert all(each in many for each in kept)
        assert len(kept) >= len(many) // 2, f"byte {at} cost {len(many) - len(kept)} records"
        if len(kept) < len(many):
            assert caplog.records or database.verify()
        database.add([record(10**6)])
        assert record(10**6) in list(database.records())


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_torn_file_is_moved_aside(
    path: Path, many: list[TuningRecord], part: float, caplog: pytest.LogCaptureFixture
) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with Database(path) as database:
        assert all(each in many for each in database.records())
        database.add([record(10**6)])
    if part:
        (aside,) = path.parent.glob("*.damaged-1")
        assert str(aside) in caplog.text
    with Database(path) as database:
        assert database.verify() == []


def test_a_file_of_rubbish_is_moved_aside_each_time(path: Path) -> None:
    for number in (1, 2):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"rubbish" * 1000)
        with Database(path) as database:
            assert list(database.records()) == []
        assert path.with_name(f"{path.name}.damaged-{number}").read_bytes() == b"rubbish" * 1000


def test_a_tuner_goes_on_in_the_new_file_when_another_moved_the_damaged_one(path: Path) -> None:
    with Database(path) as database:
        database.add([record(0)])
        database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path.write_bytes(b"rubbish" * 1000)
        with Database(path) as other:
            other.add([record(1)])
        assert list(path.parent.glob("*.damaged-1"))
        database.add([record(2)])
    with Database(path) as database:
        assert {each.schedule["number"] for each in database.records()} >= {1, 2}


def test_verify_sees_a_changed_row(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    database.add([record(0, 3.0), record(1, 4.0)])
    with sqlite3.connect(database.path) as other:
        other.execute("UPDATE records SET run_us = 0.1 WHERE id = 1")
    assert database.verify() == ["record 1: its checksum differs"]
    assert list(database.records()) == [record(1, 4.0)]
    assert "left a damaged record out" in caplog.text


def test_a_full_disk_is_one_message_and_loses_nothing(database: Database) -> None:
    database.add([record(0)])
    (pages,) = database._connection.execute("PRAGMA page_count").fetchone()
    database._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DatabaseError, match=r"cannot keep records in .*full"):
        database.add([record(number, workload="w" * 5000) for number in range(1, 9)])
    assert list(database.records()) == [record(0)]
    assert database.verify() == []


def test_a_newer_format_is_refused(path: Path) -> None:
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(DatabaseError, match="has format 99, this gtco reads 1"):
        Database(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="cannot make the folder of"):
        Database(tmp_path / "file" / "tuning.sqlite")
    with pytest.raises(DatabaseError, match="cannot open the database"):
        Database(tmp_path)


def test_a_locked_file_is_one_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_S", 0.05)
    with Database(path) as one, Database(path) as two:
        one._connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="locked"):
            two.add([record(0)])
        with pytest.raises(DatabaseError, match=r"cannot open the database .*locked"):
            Database(path)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Permissions bind: they do not for root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.mark.parametrize("folder_mode", [0o555, 0o755])
def test_a_read_only_database_reads(folder_mode: int, request: pytest.FixtureRequest) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "tuning.sqlite"
        with Database(path) as database:
            database.add([record(0)])
        path.chmod(0o444)
        folder.chmod(folder_mode)
        request.getfixturevalue("unprivileged")
        with Database(path) as database:
            assert database.read_only
            assert list(database.records()) == [record(0)]
            with pytest.raises(DatabaseError, match="is read-only, so nothing can be kept"):
                database.add([record(1)])
        os.seteuid(os.getuid())
        folder.chmod(0o755)
