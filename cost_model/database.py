"""The user's tuning records: what was measured, where, and with which schedule.

Records made on an H100 ship with the package, so that a first compile needs no search; the user's
own are rows of a `Database`. A key is the whole workload text, so a hit is always compared in full.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from gtco.cost_model.record import (
    NAMED,
    DatabaseError,
    TuningRecord,
    problem_of,
    scan_jsonl,
)

log = logging.getLogger("gtco.tune")

BUSY_S = 60.0
"""How long a process waits for another that writes."""
SCHEMA_VERSION = 1
"""Moves whenever the tables change."""

_KEY = ("device", "sketch", "version", "schedule")
_VALUES = ("run_us", "error", "versions", "work", "digest")
_SCHEMA = (
    "CREATE TABLE workloads (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE)",
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY,
        workload INTEGER NOT NULL REFERENCES workloads (id),
        device TEXT NOT NULL, sketch TEXT NOT NULL, version INTEGER NOT NULL,
        schedule TEXT NOT NULL,  -- JSON, sorted
        run_us REAL, error TEXT NOT NULL,
        versions TEXT NOT NULL, work TEXT NOT NULL,  -- JSON
        digest BLOB NOT NULL,  -- of the record as a line of JSON
        UNIQUE (workload, device, sketch, version, schedule)
    )""",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_SELECT = f"""SELECT records.id, text, {", ".join(_KEY + _VALUES)} FROM records
    JOIN workloads ON workloads.id = records.workload"""


def database_path() -> Path:
    """Where the user's records are kept: in the user's data folder (`XDG_DATA_HOME` moves it)."""
    return Path(platformdirs.user_data_dir("gtco", appauthor=False)) / "tuning.sqlite"


class Database:
    """The user's records: SQLite with a write-ahead log, one row a record.

    Each `add` is one transaction: kill -9 loses nothing that `add` returned from. Several processes
    may write at once. Each row has a checksum, so that a flipped bit is seen and its row left out.
    A file that SQLite cannot read is moved aside to `<name>.damaged-N`, with a warning, and what
    can be read of it is kept.

    Args:
        path: the file, made with its folder (mode 0700) if missing; `database_path()` by default.

    Attributes:
        path: the file.
        read_only: whether `add` would fail because of the file's or the folder's permissions.

    Raises:
        DatabaseError: the file cannot be opened; the message has the cause and what to do.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = database_path() if path is None else path
        self.read_only = False
        self._connection = self._open_sound()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    # -- writing -------------------------------------------------------------------------------

    def add(self, records: Iterable[TuningRecord]) -> None:
        """Keep `records`, all or none; one of the same key replaces the older.

        The key is workload, device, sketch, version and schedule.

        Raises:
            DatabaseError: the file is read-only, the disk is full, it stayed locked, or no
                measurement says what one of the records does.
        """
        self._write(records, "DO UPDATE SET " + ", ".join(f"{n} = excluded.{n}" for n in _VALUES))

    def merge(self, records: Iterable[TuningRecord]) -> int:
        """Keep those of `records` whose key is not here yet, all or none; how many they were.

        Raises:
            DatabaseError: as for `add`.
        """
        return self._write(records, "DO NOTHING")

    def _write(self, records: Iterable[TuningRecord], on_conflict: str) -> int:
        rows = []
        for record in records:
            if problem := problem_of(record):
                raise DatabaseError(f"cannot keep records in {self.path}: {problem}")
            rows.append((record.workload, _row(record)))
        if self.read_only:
            raise DatabaseError(
                f"{self.path} is read-only, so nothing can be kept: make the file and its folder "
                "writable, or name another with --db"
            )
        if self._file != _file(self.path):  # another process found damage and moved it aside
            self.close()
            self._connection = self._open_sound()
        connection = self._connection
        count = 0
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                for workload, row in rows:
                    connection.execute(
                        "INSERT OR IGNORE INTO workloads (text) VALUES (?)", [workload]
                    )
                    count += connection.execute(
                        f"INSERT INTO records (workload, {', '.join(_KEY + _VALUES)}) VALUES "
                        "((SELECT id FROM workloads WHERE text = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                        f"ON CONFLICT (workload, {', '.join(_KEY)}) {on_conflict}",
                        [workload, *row],
                    ).rowcount
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise DatabaseError(f"cannot keep records in {self.path}: {error}") from None
        return count

    # -- reading -------------------------------------------------------------------------------

    def records(self) -> Iterator[TuningRecord]:
        """Every record, oldest first; `standing` says whose time counts."""
        try:
            for row in self._connection.execute(f"{_SELECT} ORDER BY records.id"):
                try:
                    yield _record(row)
                except DatabaseError as error:
                    log.warning("%s: left a damaged record out: %s", self.path, error)
        except sqlite3.Error as error:
            raise DatabaseError(
                f"cannot read {self.path}: {error}; `gtco db verify` looks at all of it"
            ) from None

    def verify(self) -> list[str]:
        """What is wrong with the file, a line each; nothing if it is sound.

        Looks at every page and at every row's checksum; changes nothing.
        """
        try:
            lines = [str(line) for (line,) in self._connection.execute("PRAGMA integrity_check")]
            problems = [line for line in lines if line != "ok"]
            for row in self._connection.execute(f"{_SELECT} ORDER BY records.id"):
                try:
                    _record(row)
                except DatabaseError as error:
                    problems.append(str(error))
        except sqlite3.Error as error:
            return [str(error)]
        return problems

    def import_jsonl(self, path: Path) -> int:
        """`merge` the records of a JSONL file; how many were new.

        Raises:
            DatabaseError: the file cannot be read; or lines of it are no records, which the message
                names with their causes: then all others are kept.
        """
        found = list(scan_jsonl(path))
        new = self.merge(each for each in found if isinstance(each, TuningRecord))
        problems = [str(each) for each in found if isinstance(each, DatabaseError)]
        if problems:
            more = [f"and {len(problems) - NAMED} more"] if len(problems) > NAMED else []
            raise DatabaseError(
                f"added {new} records, and left {len(problems)} lines out:\n  "
                + "\n  ".join([*problems[:NAMED], *more])
            )
        return new

    # -- opening -------------------------------------------------------------------------------

    def _open_sound(self) -> sqlite3.Connection:
        """A connection to the file, or to a new one if it is damaged."""
        try:
            return self._open()
        except _Damaged as damage:
            return self._rebuild(str(damage))

    def _open(self) -> sqlite3.Connection:
        """A checked connection.

        Raises:
            _Damaged: SQLite cannot read the file.
            DatabaseError: it cannot be opened, or a newer gtco made it.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(f"cannot make the folder of {self.path}: {error}") from None
        refusal: sqlite3.Error | None = None
        deadline = time.monotonic() + BUSY_S
        modes = ["ro&immutable=1", "ro", "rwc"]  # immutable: the folder takes no lock files
        while modes:
            mode = modes.pop()
            try:
                connection = self._connect(mode)
            except sqlite3.OperationalError as error:
                refusal = refusal or error
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    # SQLite itself does not wait to switch to the log.
                    modes = [mode] if time.monotonic() < deadline else []
                    time.sleep(0.01)
                continue
            except sqlite3.DatabaseError as error:
                raise _Damaged(str(error)) from None
            self.read_only = mode != "rwc"
            self._file = _file(self.path)
            return connection
        raise DatabaseError(f"cannot open the database {self.path}: {refusal}")

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}",
            timeout=BUSY_S,
            isolation_level=None,
            uri=True,
        )
        connection.text_factory = _decoded
        try:
            if mode == "rwc":
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("BEGIN IMMEDIATE")  # two processes may make the file at once
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _SCHEMA:
                        connection.execute(statement)
                connection.execute("COMMIT")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise DatabaseError(
                    f"{self.path} has format {version}, this gtco reads {SCHEMA_VERSION}: name "
                    "another with --db, or move this one away"
                )
            problems = connection.execute("PRAGMA quick_check(1)").fetchall()
            if problems != [("ok",)]:
                raise sqlite3.DatabaseError(problems[0][0])
        except BaseException:
            connection.close()
            raise
        return connection

    def _rebuild(self, damage: str) -> sqlite3.Connection:
        """Move the damaged file aside, keep what can be read of it, and open the new one."""
        with _locked(self.path.with_name(f"{self.path.name}.lock")):
            try:
                return self._open()  # another process was here first
            except _Damaged:
                pass
            aside = _free_name(self.path)
            try:
                for suffix in ("-wal", "-shm", ""):
                    part = self.path.with_name(self.path.name + suffix)
                    if part.exists():
                        part.rename(aside.with_name(aside.name + suffix))
            except OSError as error:
                raise DatabaseError(
                    f"{self.path} is damaged ({damage}) and cannot be moved away: {error}"
                ) from None
            saved = list(_salvage(aside))
            log.warning(
                "%s was damaged (%s): moved to %s, kept the %d records that could be read",
                self.path,
                damage,
                aside,
                len(saved),
            )
            self._connection = self._open()
            self.merge(saved)
            return self._connection


class _Damaged(Exception):
    """SQLite cannot read the file."""


def _row(record: TuningRecord) -> list[Any]:
    """The values of `_KEY` and `_VALUES`."""
    schedule, versions, work = (
        json.dumps(dict(each), sort_keys=True)
        for each in (record.schedule, record.versions, record.work)
    )
    key = [record.device, record.sketch, record.version, schedule]
    return [*key, record.run_us, record.error, versions, work, _digest(record)]


def _record(row: Sequence[Any]) -> TuningRecord:
    """The record of a row of `_SELECT`.

    Raises:
        DatabaseError: its checksum differs, or no measurement says so.
    """
    number, workload, device, sketch, version, schedule, run_us, error, versions, work, digest = row
    try:
        record = TuningRecord(
            workload,
            device,
            sketch,
            version,
            json.loads(schedule),
            run_us,
            error,
            json.loads(versions),
            json.loads(work),
        )
        sound = _digest(record) == digest
    except (TypeError, ValueError, RecursionError):
        sound = False
    if not sound:
        raise DatabaseError(f"record {number}: its checksum differs")
    if problem := problem_of(record):
        raise DatabaseError(f"record {number}: {problem}")
    return record


def _digest(record: TuningRecord) -> bytes:
    run_us = None if record.run_us is None else float(record.run_us)  # as SQLite gives it back
    return hashlib.sha256(replace(record, run_us=run_us).to_json().encode()).digest()


def _decoded(data: bytes) -> str:
    """Text, even where it is damaged: the checksum tells."""
    return data.decode(errors="replace")


def _salvage(path: Path) -> Iterator[TuningRecord]:
    """What can be read of a damaged file: its rows from the front, then from the back."""
    seen: set[int] = set()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.text_factory = _decoded
        for order in ("ASC", "DESC"):
            try:
                for row in connection.execute(f"{_SELECT} ORDER BY records.id {order}"):
                    if row[0] in seen:
                        break
                    seen.add(row[0])
                    with contextlib.suppress(DatabaseError):
                        yield _record(row)
            except sqlite3.Error:
                continue


def _file(path: Path) -> int | None:
    """Tells the file at `path` from another of that name."""
    return path.stat().st_ino if path.exists() else None


def _free_name(path: Path) -> Path:
    """The first `<path>.damaged-N` that does not exist."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DatabaseError(f"cannot lock {path}: {error}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
