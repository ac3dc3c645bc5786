"""What is known of programs on one device: the shipped records, and the user's own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping

from gtco.codegen.rules import SKETCHES, derive
from gtco.codegen.sampler import Key, schedule_key
from gtco.cost_model.database import is_fresh
from gtco.cost_model.model import roofline_us
from gtco.cost_model.record import LIBRARY, PLAN, TuningRecord
from gtco.graph import Group
from gtco.passes.legality import family
from gtco.passes.tasks import Task, workload_key
from gtco.target import HOST, Target

VERSIONS = {sketch.name: sketch.version for sketch in SKETCHES}
"""The version of each sketch's generated code now."""
_RINGS = {sketch.name: sketch.ring for sketch in SKETCHES}
# A plan was replayed with the kernels of then, of six sketches at first; a new one moves none.
VERSIONS[PLAN] = 6 + sum(sketch.version - 1 for sketch in SKETCHES)
CHAIN, FINAL, HOST_CLOCK = "chain", "chain, median of 11", "host clock"
"""How a record's time was taken: `versions["timed"]`; without it, in a chain."""
REPLAYED = "replayed whole"
"""The same of a plan."""
FINALISTS = 8
"""Programs of a task that are timed again and longer in the end."""


CHOSEN = {"chosen": "in the whole graph"}
"""In `versions` of a task's record with which the whole graph was fastest."""


def is_chosen(record: TuningRecord) -> bool:
    """Whether a whole graph was fastest with it: that counts for more than its time in a chain."""
    return record.versions.items() >= CHOSEN.items()


class Knowledge:
    """Records of one device by workload, newer ones in place of older ones of the same program.

    Args:
        device: the records' device; those of others, and of older code, are left out.
        shipped: what came with the package.
        own: what was measured here: the user's database.

    Attributes:
        stale: those left out, whose schedules a search may still begin with.
    """

    def __init__(
        self, device: str, shipped: Iterable[TuningRecord] = (), own: Iterable[TuningRecord] = ()
    ) -> None:
        self.device = device
        self.stale: list[TuningRecord] = []
        self._records: dict[str, dict[Key, TuningRecord]] = {}
        self._own: set[tuple[str, Key]] = set()
        self._leaders: tuple[TuningRecord, ...] | None = None
        for record in shipped:
            self._keep(record)
        for record in own:
            self.add(record)

    def add(self, record: TuningRecord) -> None:
        """Learn what was measured here."""
        if self._keep(record):
            self._own.add((record.workload, schedule_key(record.sketch, record.schedule)))

    def _keep(self, record: TuningRecord) -> bool:
        if not is_fresh(record, self.device, VERSIONS):
            self.stale.append(record)
            return False
        programs = self._records.setdefault(record.workload, {})
        programs[schedule_key(record.sketch, record.schedule)] = record
        self._leaders = None
        return True

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
        known = self.records(workload)
        if self.device == HOST or all(record.sketch == LIBRARY for record in known):
            known = tuple(record for record in known if record.sketch != LIBRARY)
        ran = [record for record in known if record.run_us is not None]
        return tuple(sorted(ran, key=lambda each: (not is_chosen(each), each.run_us)))

    def leaders(self) -> tuple[TuningRecord, ...]:
        """The best program of each workload that has one."""
        if self._leaders is None:
            best = (self.best(workload) for workload in self._records)
            self._leaders = tuple(each[0] for each in best if each)
        return self._leaders

    def once_chosen(self, workload: str) -> TuningRecord | None:
        """The program that a whole graph chose before kernels changed, if it was measured since."""
        for record in self.stale:
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

    @property
    def has_plans(self) -> bool:
        """Whether any whole model's fastest plan is known."""
        return any(record.sketch == PLAN for record in self.all())

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
            for record in self.best(task.key)[:1]:
                ratio = (record.run_us or math.inf) / roofline_us(task.group, target)
                ratios.setdefault(family(task.group), []).append(ratio)
        everything = [ratio for each in ratios.values() for ratio in each] or [1.0]
        other = statistics.median(everything) if explore else max(everything)
        scales = {name: statistics.median(each) for name, each in ratios.items() if explore}

        def price_of(group: Group) -> float:
            key, kind = workload_key(group, target), family(group)
            for record in self.best(key)[:1]:
                return record.run_us or math.inf
            library_us = self.library_us(key)
            if library_us is not None and not derive(group, kind, target).sketches:
                return library_us  # the only way that it runs
            return roofline_us(group, target) * scales.get(kind, other)

        return price_of


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
