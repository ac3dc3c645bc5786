"""One tuning record, and files of them: a record a line of JSON.

Whatever a file says is checked before it is a record: `problem_of` knows what no measurement says.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

log = logging.getLogger("gtco.tune")

LIBRARY, PLAN = "library", "plan"
"""The `sketch` of a record of a group's ATen calls; of a whole model, whose `work` names groups."""
SHORTEST_US, LONGEST_US = 0.01, 1e10
"""Times that can be measured: a launch alone takes half a microsecond; the longest is hours."""
LONGEST_LINE = 1 << 24
"""Bytes: a record of a whole model has 100 KB."""
NAMED = 20
"""Lines of a file that a message names; of more it says how many."""
_LARGEST = {"version": 2**31 - 1, "schedule": 2**31 - 1, "work": 2**63 - 1}
_COUNTS = frozenset(
    ("blocks", "threads", "cluster", "steps", "stages", "tile_p", "tile_q", "split", "registers")
) | {"tiles", "consumers"}
"""Numbers of a program's `work` that are at least 1."""
_SPEC = re.compile(r"[a-z]\w*\[([0-9]+(,[0-9]+)*)?\]")


class DatabaseError(ValueError):
    """A record that cannot be read or kept; the message names the file, and the line."""


@dataclass(frozen=True)
class TuningRecord:
    """One measurement; failure is a result too.

    Args:
        workload: `gtco.passes.tasks.workload_key` of the group.
        device: the GPU's name, such as "NVIDIA H100 80GB HBM3".
        sketch: the sketch's name, "library" for the ATen call or "plan" for a whole model.
        version: the sketch's version when the record was made.
        schedule: knob name to value.
        run_us: microseconds from start to start in a chain, or None if it failed.
        error: why it failed, or "".
        versions: of gtco's generated code, driver and NVRTC: provenance.
        work: `gtco.cost_model.work.work_of(candidate).numbers()` to train on, or empty; of a plan,
            each group's `workload_digest` to how often it runs.
    """

    workload: str
    device: str
    sketch: str
    version: int
    schedule: Mapping[str, int]
    run_us: float | None
    error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    work: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> TuningRecord:
        """Parse one line.

        Raises:
            DatabaseError: it is no record; the message names the field.
        """
        try:
            data = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise DatabaseError(f"no tuning record: {_reason(error)}") from None
        if problem := _problem_of_fields(data):
            raise DatabaseError(f"no tuning record: {problem}")
        record = TuningRecord(**data)
        if problem := problem_of(record):
            raise DatabaseError(f"no tuning record: {problem}")
        return record


def problem_of(record: TuningRecord) -> str:
    """What is wrong with a record that was read, or ""; no `Database` keeps one that has a problem.

    A sketch, a knob or a version that this gtco does not know is no problem: another one may.
    """
    for name in ("workload", "device", "sketch", "error"):
        if problem := _problem_of_text(getattr(record, name)):
            return f"{name} {problem}"
    for name in ("device", "sketch"):
        if not getattr(record, name).isprintable() or not getattr(record, name):
            return f"{name} is {getattr(record, name)[:60]!r}, which is no name"
    if problem := _problem_of_number(record.version, _LARGEST["version"]):
        return f"version {problem}"
    for name in ("schedule", "work", "versions"):
        if not isinstance(found := getattr(record, name), Mapping):
            return f"{name} is {_shown(found)}, not an object"
        for key, value in found.items():
            if problem := _problem_of_text(key):
                return f"a name of {name} {problem}"
            of_text = name == "versions"
            problem = (
                _problem_of_text(value) if of_text else _problem_of_number(value, _LARGEST[name])
            )
            if problem:
                return f"{name}.{key[:60]} {problem}"
    for name in _COUNTS & record.work.keys() if record.sketch != PLAN else ():
        if record.work[name] < 1:
            return f"work.{name} is {record.work[name]}, not at least 1"
    if problem := _problem_of_time(record.run_us):
        return f"run_us {problem}"
    problem = _problem_of_workload(record.workload)
    return f"workload is no key of gtco's: {problem}" if problem else ""


def _problem_of_fields(data: Any) -> str:
    if not isinstance(data, dict):
        return f"{_shown(data)} is not an object"
    known = [each.name for each in fields(TuningRecord)]
    required = known[: known.index("error")]
    if missing := [name for name in required if name not in data]:
        return f"it lacks {', '.join(missing)}"
    if unknown := [name for name in data if name not in known]:
        return f"unknown field {unknown[0][:60]!r}"
    return ""


def _problem_of_text(value: Any) -> str:
    if not isinstance(value, str):
        return f"is {_shown(value)}, not text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "is no text that can be stored: half a surrogate pair"
    return "has a NUL" if "\0" in value else ""


def _problem_of_number(value: Any, largest: int) -> str:
    if type(value) is not int:  # a bool is an int too
        return f"is {_shown(value)}, not a whole number"
    return "" if 0 <= value <= largest else f"is {_shown(value)}, not from 0 to {largest}"


def _problem_of_time(value: Any) -> str:
    if value is None:
        return ""
    if type(value) not in (int, float):
        return f"is {_shown(value)}, not a number of microseconds"
    # NaN is in no range.
    if not SHORTEST_US <= value <= LONGEST_US:
        return f"is {_shown(value)}: no time from {SHORTEST_US} to {LONGEST_US:g} microseconds"
    return ""


@lru_cache(maxsize=1 << 14)
def _problem_of_workload(text: str) -> str:
    """What keeps `text` from being read as `gtco.passes.workload` writes it."""
    try:
        content = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return _reason(error)
    if not isinstance(content, dict) or not isinstance(content.get("arch"), str):
        return "it names no architecture"
    lists = [content.get(name) for name in ("externals", "nodes", "outputs")]
    if not all(isinstance(each, list) for each in lists):
        return "it has no lists of externals, nodes and outputs"
    externals, nodes, _ = lists
    for each in externals or ():
        if not (isinstance(each, list) and len(each) == 2 and _is_spec(each[0])):
            return f"external {_shown(each)}"
    return next((f"node {_shown(each)}" for each in nodes or () if not _is_node(each)), "")


def _is_node(value: Any) -> bool:
    """Operator, attributes, a spec an output, operands."""
    kinds = (str, dict, list, list)
    if not isinstance(value, list) or len(value) != len(kinds):
        return False
    if not all(isinstance(part, kind) for part, kind in zip(value, kinds, strict=True)):
        return False
    return bool(value[2]) and all(_is_spec(spec) for spec in value[2])


def _is_spec(value: Any) -> bool:
    return isinstance(value, str) and _SPEC.fullmatch(value) is not None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _shown(value: Any) -> str:
    """The value in a few words: what is in a container does not matter, and may be endless."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number without bound" if math.isinf(value) else "not a number"
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number of more than 18 digits"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value if not isinstance(value, str) else value[:60])


# -- files ---------------------------------------------------------------------------------------


def scan_jsonl(path: Path) -> Iterator[TuningRecord | DatabaseError]:
    """Of each line of a JSONL file its record, or why it is none, by file and line.

    Raises:
        DatabaseError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(LONGEST_LINE):
                number += 1
                try:
                    if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                        while (rest := stream.readline(LONGEST_LINE)) and rest[-1:] != b"\n":
                            pass
                        raise DatabaseError(f"no tuning record: more than {LONGEST_LINE} bytes")
                    yield TuningRecord.from_json(line.decode())
                except UnicodeDecodeError as error:
                    yield DatabaseError(f"{path}:{number}: no tuning record: {error}")
                except DatabaseError as error:
                    yield DatabaseError(f"{path}:{number}: {error}")
    except OSError as error:
        raise DatabaseError(f"cannot read {path}: {error}") from None


def read_jsonl(path: Path) -> Iterator[TuningRecord]:
    """The records of a JSONL file.

    Raises:
        DatabaseError: naming the file and the line that is damaged.
    """
    for found in scan_jsonl(path):
        if isinstance(found, DatabaseError):
            raise found
        yield found


def write_jsonl(path: Path, records: Iterable[TuningRecord]) -> int:
    """Write `records` as lines of `path`, all or none; how many they were, or a `DatabaseError`."""
    lines = [record.to_json() + "\n" for record in records]
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text("".join(lines))
        temporary.replace(path)
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(lines)


def shipped_records() -> tuple[TuningRecord, ...]:
    """The records that come with the package; a damaged line is left out, with a warning."""
    folder = resources.files("gtco.cost_model") / "records"
    found: list[TuningRecord] = []
    if folder.is_dir():
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.name.endswith(".jsonl"):
                with resources.as_file(entry) as path:
                    for each in scan_jsonl(path):
                        if isinstance(each, TuningRecord):
                            found.append(each)
                        else:
                            log.warning("left out of the shipped records: %s", each)
    return tuple(found)
