"""Tuning records: lines of JSON that say where they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gtco.cost_model.knowledge import VERSIONS
from gtco.cost_model.record import LIBRARY, DatabaseError, TuningRecord, read_jsonl, shipped_records
from tests.records import key

RECORD = TuningRecord(
    workload=key("linear"),
    device="NVIDIA H100 80GB HBM3",
    sketch="gemm_wgmma",
    version=2,
    schedule={"swap": 1, "block_p": 64},
    run_us=3.25,
    versions={"nvrtc": "13.3"},
)
FAILED = replace(RECORD, run_us=None, error="wrong answer: %y has an RMSE of 1")


def test_a_record_survives_the_round_trip() -> None:
    for record in (RECORD, FAILED, replace(RECORD, sketch=LIBRARY, schedule={}, versions={})):
        line = record.to_json()
        assert "\n" not in line
        assert TuningRecord.from_json(line) == record


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{RECORD.to_json()}\n{FAILED.to_json()}\n")
    assert list(read_jsonl(path)) == [RECORD, FAILED]


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(RECORD.to_json()), **fields})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "rubbish",
        "[1, 2]",
        "null",
        RECORD.to_json()[:-20],
        changed(colour="red"),
        changed(schedule=[1, 2]),
        changed(schedule={"swap": "yes"}),
        json.dumps({"workload": "w"}),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{RECORD.to_json()}\n{line}\n{RECORD.to_json()}\n")
    found = read_jsonl(path)
    assert next(found) == RECORD
    with pytest.raises(DatabaseError, match=r"records\.jsonl:2: no tuning record"):
        next(found)


@pytest.fixture
def ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """`ships({name: text})` makes these the package's records."""

    def install(files: dict[str, str]) -> None:
        folder = tmp_path / "records"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)

    return install


def test_shipped_records_are_all_jsonl_files(ships: Callable[[dict[str, str]], None]) -> None:
    line = RECORD.to_json()
    other = replace(RECORD, device="other")
    ships({"b.jsonl": f"{other.to_json()}\n", "a.jsonl": f"{line}\n{line}\n", "README.md": "no"})
    assert shipped_records() == (RECORD, RECORD, other)


def test_a_package_without_records_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert shipped_records() == ()


def test_what_ships_is_sound() -> None:
    for record in shipped_records():
        assert json.loads(record.workload)["arch"] in ("sm_80", "sm_90a")
        assert record.run_us is not None and record.run_us > 0 and not record.error
        assert record.sketch == LIBRARY or record.version <= VERSIONS[record.sketch]
