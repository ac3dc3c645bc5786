"""What is known of programs on one device: the shipped records, and the user's own.

A record of this device and this version of its sketch is `OWN`: its time and its schedule count.
One of another device of the architecture, or of an older version whose knobs mean the same, is
`KIN`: only its schedule counts. Times of two devices are never compared: a workload that ran on
this one takes what was the fastest here, another what was the fastest on the nearest kin.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from gtco.codegen.rules import SKETCHES, derive
from gtco.codegen.sampler import Key, schedule_key
from gtco.cost_model.database import Database, database_path
from gtco.cost_model.model import roofline_us
from gtco.cost_model.record import LIBRARY, PLAN, DatabaseError, TuningRecord, shipped_records
from gtco.ir.graph import Group
from gtco.options import database_file
from gtco.passes.legality import family
from gtco.passes.tasks import Task, workload_key
from gtco.target import CARDS, HOST, Device, Target

log = logging.getLogger("gtco.tune")

VERSIONS = {sketch.name: sketch.version for sketch in SKETCHES}
"""The version of each sketch's generated code now."""
MEANINGS = {sketch.name: sketch.schedule_version for sketch in SKETCHES}
"""The oldest version of each sketch whose knobs mean what they mean now."""
_RINGS = {sketch.name: sketch.ring for sketch in SKETCHES}
_LATER = {sketch.name: sketch.later_knobs for sketch in SKETCHES}
# They move with the knobs of plans alone: a plan names the sketches that it ran with.
VERSIONS[PLAN] = MEANINGS[PLAN] = 21
CHAIN, FINAL, HOST_CLOCK = "chain", "chain, median of 11", "host clock"
"""How a record's time was taken: `versions["timed"]`; without it, in a chain."""
REPLAYED = "replayed whole"
"""The same of a plan."""
FINALISTS = 8
"""Programs of a task that are timed again and longer in the end."""


CHOSEN = {"chosen": "in the whole graph"}
"""In `versions` of a task's record with which the whole graph was fastest."""


RAN_WITH = "sketches"
"""In `versions` of a plan's record: `ran_with` of its launches, so that it is known whose times its
own rests on."""


def ran_with(sketches: Iterable[str]) -> str:
    """Those sketches and their versions, such as "gemm_mma 1, gemm_wgmma 7"."""
    return ", ".join(f"{name} {VERSIONS.get(name, 0)}" for name in sorted(set(sketches)))


class Standing(enum.Enum):
    """What a record is worth on a device."""

    OWN = "time and schedule"
    KIN = "schedule"
    STALE = "neither: knobs changed their meaning, or it is of another architecture"


def standing(record: TuningRecord, device: str) -> Standing:
    """What `record` is worth on the device of this name, of the record's architecture."""
    now = record.version if record.sketch == LIBRARY else VERSIONS.get(record.sketch, -1)
    if not MEANINGS.get(record.sketch, 0) <= record.version <= now:
        return Standing.STALE
    same_code = record.version == now
    if record.sketch == PLAN:
        names = [each.rpartition(" ")[0] for each in record.versions.get(RAN_WITH, "").split(", ")]
        same_code = same_code and record.versions.get(RAN_WITH) == ran_with(names)
    return Standing.OWN if same_code and record.device == device else Standing.KIN


def is_chosen(record: TuningRecord) -> bool:
    """Whether a whole graph was fastest with it: that counts for more than its time in a chain."""
    return record.versions.items() >= CHOSEN.items()


def completed(record: TuningRecord) -> TuningRecord:
    """`record` with the knobs that came after it: its program is one of today's."""
    schedule = {**_LATER.get(record.sketch, {}), **record.schedule}
    return record if schedule == record.schedule else replace(record, schedule=schedule)


class Knowledge:
    """Records by workload, newer ones in place of older ones of the same program.

    Args:
        device: the name of the one whose times count.
        shipped: what came with the package, of any device.
        own: what was measured here: the user's database.
        kin: names of the devices whose schedules serve where this one has none, nearest first.

    Attributes:
        others: those whose time does not count, whose schedules a search may still begin with.
        kin: what is known on each of those devices.
    """

    def __init__(
        self,
        device: str,
        shipped: Iterable[TuningRecord] = (),
        own: Iterable[TuningRecord] = (),
        kin: Iterable[str] = (),
    ) -> None:
        shipped, own = list(shipped), list(own)
        self.device = device
        self.others: list[TuningRecord] = []
        self.kin = tuple(Knowledge(name, _of(name, shipped), _of(name, own)) for name in kin)
        self._records: dict[str, dict[Key, TuningRecord]] = {}
        self._older: dict[str, dict[Key, TuningRecord]] = {}
        self._own: set[tuple[str, Key]] = set()
        self._leaders: tuple[TuningRecord, ...] | None = None
        for record in shipped:
            self._keep(completed(record))
        for record in own:
            self.add(record)

    @staticmethod
    def on(
        device: Device, shipped: Iterable[TuningRecord], own: Iterable[TuningRecord]
    ) -> Knowledge:
        """What is known on `device`, with all others of its architecture as kin.

        The host has none: it is there to check kernels, and no GPU takes after it.
        """
        shipped, own = list(shipped), list(own)
        counts: dict[str, int] = {}
        for record in (*shipped, *own) if device.name != HOST else ():
            if record.device not in (device.name, HOST) and is_of_arch(record, device.arch):
                counts[record.device] = _sm_count(record) or counts.get(record.device, 0)
        nearest = sorted(counts, key=lambda name: (abs(counts[name] - device.sm_count), name))
        return Knowledge(device.name, shipped, own, nearest)

    def add(self, record: TuningRecord) -> None:
        """Learn what was measured here."""
        record = completed(record)
        if self._keep(record):
            self._own.add((record.workload, schedule_key(record.sketch, record.schedule)))

    def _keep(self, record: TuningRecord) -> bool:
        worth = standing(record, self.device)
        if worth is not Standing.OWN:
            self.others.append(record)
        if worth is Standing.STALE or record.device != self.device:
            return False
        kept = self._records if worth is Standing.OWN else self._older
        programs = kept.setdefault(record.workload, {})
        programs[schedule_key(record.sketch, record.schedule)] = record
        self._leaders = None
        return worth is Standing.OWN

    def records(self, workload: str) -> tuple[TuningRecord, ...]:
        """All that is known of a workload, failures too."""
        return tuple(self._records.get(workload, {}).values())

    def all(self) -> Iterator[TuningRecord]:
        """Every record."""
        for programs in self._records.values():
            yield from programs.values()

    def best(self, workload: str) -> tuple[TuningRecord, ...]:
        """The programs that ran: the one that a whole graph chose, then the fastest first.

        On the host the ATen calls are left out: it is there to check kernels, not to be fast. So
        are they where no kernel was tried beside them, or not since it changed: nothing says which
        is faster.
        """
        return self._ranked(self.records(workload))

    def _ranked(self, known: Iterable[TuningRecord]) -> tuple[TuningRecord, ...]:
        known = tuple(known)
        if self.device == HOST or all(record.sketch == LIBRARY for record in known):
            known = tuple(record for record in known if record.sketch != LIBRARY)
        ran = [record for record in known if record.run_us is not None]
        return tuple(sorted(ran, key=lambda each: (not is_chosen(each), each.run_us)))

    def _on_this_device(self, workload: str) -> tuple[TuningRecord, ...]:
        """As `best`, with older code's records of the sketches that have none of today's: on one
        device an old time still says which schedule is the best."""
        known = self.records(workload)
        today = {record.sketch for record in known}
        older = self._older.get(workload, {}).values()
        return self._ranked((*known, *(each for each in older if each.sketch not in today)))

    def serving(self, workload: str) -> tuple[TuningRecord, ...]:
        """What to run, best first: this device's programs, else those of the nearest kin that has
        any, but for what failed here. `time_us` and `source` say what a record is worth."""
        programs = self._records.get(workload, {})
        failed = {name for name, record in programs.items() if record.run_us is None}
        for known in self.sources:
            ranked = known._on_this_device(workload)
            found = tuple(r for r in ranked if schedule_key(r.sketch, r.schedule) not in failed)
            if found:
                return found
        return ()

    @property
    def sources(self) -> tuple[Knowledge, ...]:
        """This device and its kin, nearest first: who has an answer first gives it, alone."""
        return (self, *self.kin)

    def where(self, record: TuningRecord) -> Knowledge:
        """That of the record's device, which can compare its time."""
        return next((each for each in self.sources if each.device == record.device), self)

    def has_times(self, workloads: Iterable[str]) -> bool:
        """Whether any of these ran on this device."""
        return any(self._on_this_device(workload) for workload in workloads)

    def time_us(self, record: TuningRecord) -> float | None:
        """What the program of a record takes here; None if only its schedule counts."""
        return record.run_us if standing(record, self.device) is Standing.OWN else None

    def source(self, record: TuningRecord) -> str:
        """Where a record comes from, for reports."""
        if record.device != self.device:
            return f"from {record.device}"
        if standing(record, self.device) is not Standing.OWN:
            return "from older code"
        return "tuned here" if self.is_own(record) else "record"

    def leaders(self) -> tuple[TuningRecord, ...]:
        """The best program on this device of each workload that has one."""
        if self._leaders is None:
            workloads = dict.fromkeys((*self._records, *self._older))
            best = (self._on_this_device(workload) for workload in workloads)
            self._leaders = tuple(each[0] for each in best if each)
        return self._leaders

    def once_chosen(self, workload: str) -> TuningRecord | None:
        """The program that a whole graph chose before kernels changed, if it was measured since."""
        for record in self.others:
            if record.workload == workload and record.device == self.device and is_chosen(record):
                again = self.record(workload, record.sketch, record.schedule)
                if again is not None and again.run_us is not None:
                    return again
        return None

    def record(
        self, workload: str, sketch: str, schedule: Mapping[str, int]
    ) -> TuningRecord | None:
        """What is known of one program."""
        return self._records.get(workload, {}).get(schedule_key(sketch, schedule))

    def library_us(self, workload: str) -> float | None:
        """Microseconds of the ATen calls, if they were measured."""
        times = (record.run_us for record in self.records(workload) if record.sketch == LIBRARY)
        return next(times, None)

    def counts(self, arch: str) -> dict[str, int]:
        """How many records there are of this architecture: `own` of which time and schedule count
        here, `kin` of which the schedule does, `stale`, and the `library_times` among the own."""
        found = Counter(
            standing(each, self.device) for each in self.others if is_of_arch(each, arch)
        )
        return {
            "own": sum(1 for _ in self.all()),
            "kin": found[Standing.KIN],
            "stale": found[Standing.STALE],
            "library_times": sum(each.sketch == LIBRARY for each in self.all()),
        }

    @property
    def has_plans(self) -> bool:
        """Whether any whole model's fastest plan is known on this device."""
        return any(record.sketch == PLAN for record in self.leaders())

    def is_own(self, record: TuningRecord) -> bool:
        """Whether the record was measured here."""
        return (record.workload, schedule_key(record.sketch, record.schedule)) in self._own

    def price(
        self, target: Target, known: Iterable[Task], *, explore: bool = False
    ) -> Callable[[Group], float]:
        """Microseconds of a group: measured, else the roofline, scaled.

        A roofline is a bound, and beside measured groups the others would look cheap. So it is
        scaled by the most that any measured group took of its own, and a plan of what was measured
        is not given up for a guess. To explore, it is scaled by what is usual in the family.

        Args:
            target: the architecture.
            known: tasks to learn those scales from; unmeasured ones do not count.
            explore: be hopeful of what was not measured, to find what is worth measuring.
        """
        ratios: dict[str, list[float]] = {}
        for task in known:
            for record in self._on_this_device(task.key)[:1]:
                ratio = (record.run_us or math.inf) / roofline_us(task.group, target)
                ratios.setdefault(family(task.group), []).append(ratio)
        everything = [ratio for each in ratios.values() for ratio in each] or [1.0]
        other = statistics.median(everything) if explore else max(everything)
        scales = {name: statistics.median(each) for name, each in ratios.items() if explore}

        def price_of(group: Group) -> float:
            key, kind = workload_key(group, target), family(group)
            for record in self._on_this_device(key)[:1]:
                return record.run_us or math.inf
            library_us = self.library_us(key)
            if library_us is not None and not derive(group, kind, target).sketches:
                return library_us  # the only way that it runs
            return roofline_us(group, target) * scales.get(kind, other)

        return price_of


def is_of_arch(record: TuningRecord, arch: str) -> bool:
    """Whether the record's workload is of this architecture, which a key has first."""
    return record.workload.startswith(f'{{"arch":"{arch}",')


def _of(device: str, records: Iterable[TuningRecord]) -> list[TuningRecord]:
    return [record for record in records if record.device == device]


def _sm_count(record: TuningRecord) -> int:
    """Multiprocessors of the record's device; 0 if nothing says so."""
    told = record.versions.get("sm_count", "")
    known = {card.name: card.sm_count for card in CARDS.values()}
    return int(told) if told.isdecimal() and len(told) < 6 else known.get(record.device, 0)


def same_tile(a: TuningRecord, b: TuningRecord) -> bool:
    """Whether two programs of a task differ in nothing but the knobs of their rings."""
    ring = _RINGS.get(a.sketch, frozenset())
    fixed = [{k: v for k, v in each.schedule.items() if k not in ring} for each in (a, b)]
    return a.sketch == b.sketch and fixed[0] == fixed[1]


def finalists(known: Knowledge, workload: str) -> list[TuningRecord]:
    """The fastest programs of a task, and its library, as far as they had no final timing."""
    ran = [record for record in known.records(workload) if record.run_us is not None]
    library = [record for record in ran if record.sketch == LIBRARY]
    programs = sorted(
        (record for record in ran if record.sketch != LIBRARY),
        key=lambda record: record.run_us or math.inf,
    )
    best = (*programs[:FINALISTS], *library)
    return [record for record in best if record.versions.get("timed") != FINAL]


def known_on(device: Device, database: str | os.PathLike[str] | None = None) -> Knowledge:
    """What the shipped records and the user's database (if there is one) know of `device`, and of
    its kin.

    A database that cannot be read is named in a warning: the user can still compile.
    """
    path = database_file(database) or database_path()
    own: list[TuningRecord] = []
    if path.exists():
        try:
            with Database(path) as opened:
                own = list(opened.records())
        except DatabaseError as error:
            log.warning("compiling without the user's tuning records: %s", error)
    elif database is not None:
        log.warning("there is no database %s: compiling with the shipped records alone", path)
    return Knowledge.on(device, _shipped(), own)


@cache
def _shipped() -> tuple[TuningRecord, ...]:
    """The shipped records, read once: a process may compile many graphs."""
    return shipped_records()
