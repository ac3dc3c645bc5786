"""Tuning records: what was measured, where, and with which schedule.

A record is one line of JSON. Records made on an H100 ship with the package, so that a first compile
needs no search. A key is the whole workload text, so a hit is always compared in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path

LIBRARY = "library"
"""The `sketch` of a record that timed the ATen calls of a group."""


class DatabaseError(ValueError):
    """A record that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class TuningRecord:
    """One measurement; failure is a result too.

    Args:
        workload: `gtco.passes.tasks.workload_key` of the group.
        device: the GPU's name, such as "NVIDIA H100 80GB HBM3".
        sketch: the sketch's name, or "library" for the ATen call.
        version: the sketch's version when the record was made; an older one is stale.
        schedule: knob name to value.
        run_us: microseconds from start to start in a chain, or None if it failed.
        error: why it failed, or "".
        versions: of gtco's generated code, driver and NVRTC: provenance.
        work: the program in numbers, `gtco.cost_model.features.work_of(candidate).to_dict()`: what
            the learned model is trained on; empty in records that nothing can be learned from.
    """

    workload: str
    device: str
    sketch: str
    version: int
    schedule: Mapping[str, int]
    run_us: float | None
    error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    work: Mapping[str, float | str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> TuningRecord:
        """Parse one line.

        Raises:
            DatabaseError: it is no record.
        """
        try:
            data = json.loads(text)
            record = TuningRecord(**data)
            schedule = {str(name): int(value) for name, value in record.schedule.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise DatabaseError(f"no tuning record: {error}") from None
        return TuningRecord(**{**data, "schedule": schedule})


def read_jsonl(path: Path) -> Iterator[TuningRecord]:
    """The records of a JSONL file.

    Raises:
        DatabaseError: naming the file and the line that is damaged.
    """
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield TuningRecord.from_json(line)
            except DatabaseError as error:
                raise DatabaseError(f"{path}:{number}: {error}") from None


def shipped_records() -> tuple[TuningRecord, ...]:
    """The records that come with the package."""
    folder = resources.files("gtco.cost_model") / "records"
    found: list[TuningRecord] = []
    if folder.is_dir():
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.name.endswith(".jsonl"):
                with resources.as_file(entry) as path:
                    found.extend(read_jsonl(path))
    return tuple(found)


class RecordTable:
    """Records by workload, fastest first."""

    def __init__(self, records: Iterable[TuningRecord]) -> None:
        self._by_workload: dict[str, list[TuningRecord]] = {}
        for record in records:
            if record.run_us is not None:
                self._by_workload.setdefault(record.workload, []).append(record)
        for found in self._by_workload.values():
            found.sort(key=lambda record: record.run_us or 0.0)

    def lookup(self, workload: str) -> tuple[TuningRecord, ...]:
        """Successful records of this workload, fastest first."""
        return tuple(self._by_workload.get(workload, ()))


class Database:
    """The user's records: SQLite with a write-ahead log, one row a record.

    Each `add` is one transaction: kill -9 loses nothing that `add` returned from. Several processes
    may write at once. A damaged file is reported, moved aside, and what can be read of it kept.

    Args:
        path: the file; made, with its folder (mode 0700), if missing. None: `database_path()`.

    Raises:
        DatabaseError: the file cannot be opened, with the cause and what to do.
    """

    def __init__(self, path: Path | None = None) -> None:
        raise NotImplementedError

    def add(self, records: Iterable[TuningRecord]) -> None:
        """Keep `records` in one transaction; one of the same key (workload, device, sketch,
        version, schedule) replaces the older.

        Raises:
            DatabaseError: the file is read-only, the disk is full, or it stayed locked.
        """
        raise NotImplementedError

    def lookup(self, workload: str) -> tuple[TuningRecord, ...]:
        """All records of this workload, of any device and version, fastest first, failures last.

        `is_fresh` says whose time counts; the others only offer their schedule.
        """
        raise NotImplementedError

    def records(self) -> Iterator[TuningRecord]:
        """Every record, oldest first."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file; using the database as a context manager does it too."""
        raise NotImplementedError


def database_path() -> Path:
    """Where the user's database is: `tuning.sqlite` in the user's data folder."""
    raise NotImplementedError


def is_fresh(record: TuningRecord, device: str, versions: Mapping[str, int]) -> bool:
    """Whether the time of `record` counts on `device`; a stale one only offers its schedule.

    Args:
        record: of any device and version.
        device: the GPU's name.
        versions: the version of each sketch now (`gtco.codegen.rules.SKETCHES`).
    """
    raise NotImplementedError
