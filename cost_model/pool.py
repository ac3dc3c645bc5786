"""A measured pool: many programs of a task with their times, so that searches can be replayed.

A task is one gzip'd JSONL file: a head line with what all programs share, then a line a program.

    {"name": "vit_b16-gemm_1", "knobs": {"gemm_wgmma": ["swap", ...]}, "numbers": ["blocks", ...]}
    ["gemm_wgmma", [1, 64, ...], [108, 384, ...], 5.62, 1]         knobs, numbers, us, default
    ["gemm_wgmma", [0, 64, ...], [108, 384, ...], null, 0, "why"]  a failure
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.sampler import Key, schedule_key
from gtco.codegen.sketch import Schedule
from gtco.cost_model.ranker import Measured
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.work import Work

SUFFIX = ".pool.jsonl.gz"
_HEAD = ("name", "model", "arch", "device", "timed", "workload", "weight", "library_us")


class PoolError(ValueError):
    """A pool that cannot be read; the message names the file."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One measured program.

    Args:
        work: what it does; sketch and schedule are in it.
        run_us: its time, None if it failed.
        error: why it failed, or "".
        default: whether it is a default schedule of its sketch.
    """

    work: Work
    run_us: float | None
    error: str = ""
    default: bool = False

    @cached_property
    def key(self) -> Key:
        return schedule_key(self.work.sketch, self.work.schedule)


@dataclass(frozen=True, eq=False)
class PoolTask:
    """One task and its programs.

    Args:
        name: unique in the pool, such as "vit_b16-gemm_1".
        model: the model it is from: what is held out together.
        arch: what the programs were compiled for.
        device: the GPU's name.
        timed: how, as `gtco.cost_model.knowledge` names it.
        workload: the task's key.
        weight: how often it runs in the model.
        library_us: of the ATen calls, None if they could not be timed.
        entries: the programs, the defaults first.
    """

    name: str
    model: str
    arch: str
    device: str
    timed: str
    workload: str
    weight: int
    library_us: float | None
    entries: tuple[Entry, ...]

    @property
    def best_us(self) -> float:
        """Of the fastest program."""
        return min(each.run_us for each in self.entries if each.run_us is not None)

    def measured(self) -> list[Measured]:
        """For `gtco.cost_model.ranker.train`."""
        return [(each.work, each.run_us) for each in self.entries]

    def record(self, entry: Entry) -> TuningRecord:
        """What measuring `entry` said."""
        work = entry.work
        return TuningRecord(
            self.workload,
            self.device,
            work.sketch,
            1,
            work.schedule,
            entry.run_us,
            entry.error,
        )


def write_pool(path: Path, task: PoolTask) -> None:
    """Write one task's file, whole or not at all.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    first = task.entries[0].work
    knobs = {each.work.sketch: list(each.work.schedule) for each in task.entries}
    shared = asdict(first.group)
    numbers = [name for name in first.numbers() if name not in shared]
    fields = {name: getattr(task, name) for name in _HEAD}
    lines: list[Any] = [{**fields, "knobs": knobs, "group": shared, "numbers": numbers}]
    for each in task.entries:
        sketch, every = each.work.sketch, each.work.numbers()
        values = [each.work.schedule[name] for name in knobs[sketch]]
        line = [sketch, values, [every[name] for name in numbers], each.run_us, int(each.default)]
        lines.append([*line, each.error] if each.error else line)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_pool(folder: Path) -> list[PoolTask]:
    """The tasks whose files are in `folder`, by file name.

    Raises:
        PoolError: naming the file that is damaged.
    """
    return [_read_task(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _read_task(path: Path) -> PoolTask:
    try:
        with gzip.open(path, "rt") as lines:
            head, *rows = (json.loads(line) for line in lines)
        entries = []
        for sketch, knobs, numbers, run_us, default, *error in rows:
            schedule = dict(zip(head["knobs"][sketch], knobs, strict=True))
            own = dict(zip(head["numbers"], numbers, strict=True))
            work = Work.of_numbers(sketch, schedule, {**head["group"], **own})
            entries.append(Entry(work, run_us, "".join(error), bool(default)))
        return PoolTask(**{name: head[name] for name in _HEAD}, entries=tuple(entries))
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise PoolError(f"{path} is no measured pool: {error}; measure it again") from None


class PoolSpace:
    """The programs of a pool as a search draws them (`gtco.cost_model.search.Space`).

    A mutation is a measured program of the same sketch that differs in as many knobs as a mutation
    changes, or in as few more as there are; a crossing is the measured program nearest to one.

    Args:
        task: the pool.
        seed: two spaces of one seed that are asked the same draw the same.
    """

    def __init__(self, task: PoolTask, seed: int) -> None:
        self._entries = task.entries
        self._random = random.Random(seed)
        self._members: dict[str, list[Entry]] = {}
        for each in task.entries:
            self._members.setdefault(each.work.sketch, []).append(each)
        self._knobs = {
            sketch: np.array([_values(each.work.schedule) for each in members])
            for sketch, members in self._members.items()
        }

    def defaults(self, count: int) -> list[Entry]:
        """The first `count` default programs."""
        return [each for each in self._entries if each.default][:count]

    def random(self, count: int) -> list[Entry]:
        """Up to `count` different programs."""
        return self._random.sample(self._entries, min(count, len(self._entries)))

    def mutate(self, candidate: Entry) -> Entry | None:
        """A program that differs in one to three knobs; None if the sketch has no other."""
        (number,) = self._random.choices((1, 2, 3), (6, 3, 1))
        return self._near(candidate.work.sketch, _values(candidate.work.schedule), number)

    def crossover(self, first: Entry, second: Entry) -> Entry | None:
        """The program nearest to a crossing; None if the parents have two sketches."""
        if first.work.sketch != second.work.sketch:
            return None
        parents = (first.work.schedule, second.work.schedule)
        child = {name: self._random.choice(parents)[name] for name in parents[0]}
        return self._near(first.work.sketch, _values(child), 0)

    def _near(self, sketch: str, values: Sequence[int], least: int) -> Entry | None:
        """A program that differs from `values` in the fewest knobs, but at least in `least`."""
        apart = (self._knobs[sketch] != np.array(values)).sum(axis=1)
        far = apart[apart >= least]
        if not far.size:
            return None
        (found,) = np.nonzero(apart == far.min())
        return self._members[sketch][self._random.choice(found.tolist())]


def _values(schedule: Schedule) -> list[int]:
    """The knobs' values by name of the knob."""
    return [value for _, value in sorted(schedule.items())]
