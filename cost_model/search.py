"""Which programs of a task to measure next.

Evolution proposes, the draft model prunes, the ranker orders, the device decides. Whoever measures
needs no more than this:

    search = search_task(task, target, device, records, ranker)
    while trials are left and (found := search.propose(16)):
        search.observe(measured(found))     # a TuningRecord each, failures too
    search.best                             # the fastest record, the library's included

The library candidate has no schedule: measure it once and hand its record (sketch "library") to
`observe` like any other. It may win, and is nobody's parent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Generic, Protocol, TypeVar

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Key, Sampler, schedule_key
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.model import draft_us
from gtco.cost_model.ranker import Measured, Ranker
from gtco.cost_model.record import LIBRARY, PLAN, TuningRecord
from gtco.cost_model.similar import likeness, transferred
from gtco.cost_model.work import Work, work_of
from gtco.passes.legality import family
from gtco.passes.tasks import Task
from gtco.target import Target

MUTATION = 0.85
"""Part of the children that are mutations; the others are crossings."""
EPSILON = 0.05
"""Part of the proposals that are drawn at random, whatever the models say."""
POPULATION = 128
"""Random programs that join the parents, and children of each generation."""
GENERATIONS = 4
"""Generations that the models judge between two rounds of measuring."""
PARENTS = 16
"""Measured programs that have children."""
PRUNE = 1.5
"""A program whose draft price is more than this times the least is ranked behind all others."""
DEFAULTS = 8
"""Default schedules that a search begins with."""
SIMILAR = 8
"""Schedules of older code that it begins with, and of similar tasks that it tries next."""
ALIKE = 0.05
"""Least likeness of a task whose schedules are tried."""
ADAPT = 16
"""Measured programs from which the ranker is adapted to the task."""


class Strategy(Enum):
    """How programs are chosen: the arms of the experiment, each with all that the last has."""

    RANDOM = "random"
    EVOLUTION = "evolution"
    MODEL = "cost model"
    DRAFT_MODEL = "draft + cost model"


class Keyed(Protocol):
    """A program that can be told from others."""

    @property
    def key(self) -> Key: ...


P = TypeVar("P", bound=Keyed)


class Space(Protocol[P]):
    """Where programs come from: `gtco.codegen.sampler.Sampler`, or a measured pool."""

    def defaults(self, count: int) -> list[P]: ...
    def random(self, count: int) -> list[P]: ...
    def mutate(self, candidate: P) -> P | None: ...
    def crossover(self, first: P, second: P) -> P | None: ...


class Search(Generic[P]):
    """The search of one task's programs; `search_task` makes one of a task.

    Args:
        space: of all programs.
        describe: a program in numbers.
        target: of the task.
        ranker: a trained cost model; without one the draft model alone orders.
        strategy: which parts take part.
        seed: equal seeds and observations propose the same.
        first: programs to begin with, best first, ahead of the defaults.
        transferred: programs to try beside what the models choose, once those were proposed.
    """

    def __init__(
        self,
        space: Space[P],
        describe: Callable[[P], Work],
        target: Target,
        ranker: Ranker | None = None,
        *,
        strategy: Strategy = Strategy.DRAFT_MODEL,
        seed: int = 0,
        first: Sequence[P] = (),
        transferred: Sequence[P] = (),
    ) -> None:
        self._space = space
        self._describe = describe
        self._target = target
        self._ranker = self._adapted = ranker
        self._strategy = strategy
        self._random = random.Random(seed)
        blind = strategy is Strategy.RANDOM
        self._first = [] if blind else [*first, *space.defaults(DEFAULTS)]
        self._transferred = [] if blind else list(transferred)
        self._programs: dict[Key, P] = {
            each.key: each for each in [*self._first, *self._transferred]
        }
        self._known: set[Key] = set()
        self._measured: dict[Key, TuningRecord] = {}
        self._library: TuningRecord | None = None
        self._judged: dict[Key, tuple[float, float]] = {}  # draft price and score

    def propose(self, count: int) -> list[P]:
        """Up to `count` programs that were not proposed before; [] when no more are found."""
        chosen: dict[Key, P] = {}

        def take(candidates: Iterable[P], most: int) -> None:
            for each in candidates:
                if len(chosen) >= most:
                    return
                if each.key not in self._known:
                    chosen.setdefault(each.key, each)

        take(self._first, count)
        take(self._transferred, max(len(chosen), count // 2))
        if self._strategy is not Strategy.RANDOM:
            strange = sum(self._random.random() < EPSILON for _ in range(count))
            take(self._evolved(count), count - strange)
        for drawn in (count, POPULATION * GENERATIONS):  # the second finds the last of a space
            if len(chosen) < count:
                take(self._space.random(drawn), count)
        self._programs.update(chosen)
        self._known.update(chosen)
        return list(chosen.values())

    def observe(self, records: Iterable[TuningRecord]) -> None:
        """What measuring said of this task's programs, failures included, or of the library."""
        for record in records:
            if record.sketch == LIBRARY:
                self._library = record
            else:
                self._measured[schedule_key(record.sketch, record.schedule)] = record
        self._known.update(self._measured)
        self._adapted = None
        self._judged.clear()

    @property
    def best(self) -> TuningRecord | None:
        """The fastest record that was observed, None if nothing ran."""
        found = [*self._measured.values(), *([self._library] if self._library else [])]
        ran = [record for record in found if record.run_us is not None]
        return min(ran, key=_time, default=None)

    @property
    def trials(self) -> int:
        """How many programs were observed."""
        return len(self._measured)

    @property
    def _blind(self) -> bool:
        """Whether no model judges."""
        return self._strategy in (Strategy.RANDOM, Strategy.EVOLUTION)

    def _evolved(self, count: int) -> list[P]:
        """Children of the best measured programs that were not proposed yet, best first."""
        parents = self._best_measured()
        if self._blind:
            return self._children(parents, 4 * count)
        population = {each.key: each for each in [*parents, *self._space.random(POPULATION)]}
        for _ in range(GENERATIONS):
            ranked = self._rank(list(population.values()))
            population |= {c.key: c for c in self._children(ranked[: 2 * PARENTS], POPULATION)}
        return self._rank([each for key, each in population.items() if key not in self._known])

    def _best_measured(self) -> list[P]:
        ran = [
            (record.run_us, key)
            for key, record in self._measured.items()
            if record.run_us is not None and key in self._programs
        ]
        return [self._programs[key] for _, key in sorted(ran)[:PARENTS]]

    def _children(self, parents: Sequence[P], count: int) -> list[P]:
        """Up to `count` mutations and crossings; the first parents have the most."""
        if not parents:
            return []
        weights = [1 / (2 + rank) for rank in range(len(parents))]
        found = []
        for _ in range(count):
            first, second = self._random.choices(parents, weights, k=2)
            if self._random.random() < MUTATION:
                child = self._space.mutate(first)
            else:
                child = self._space.crossover(first, second)
            if child is not None:
                found.append(child)
        return found

    def _rank(self, candidates: Sequence[P]) -> list[P]:
        """`candidates` by what the models predict, best first."""
        if not candidates:
            return []
        new = {each.key: each for each in candidates if each.key not in self._judged}
        works = [self._describe(each) for each in new.values()]
        drafts = [draft_us(work, self._target) for work in works]
        ranker = self._current_ranker()
        scores = [-us for us in drafts] if ranker is None else ranker.scores(works)
        self._judged.update(zip(new, zip(drafts, scores, strict=True), strict=True))
        limit = PRUNE * min(self._judged[each.key][0] for each in candidates)
        prunes = self._strategy is Strategy.DRAFT_MODEL

        def merit(candidate: P) -> tuple[bool, float]:
            draft, score = self._judged[candidate.key]
            return (prunes and draft > limit, -score)

        return sorted(candidates, key=merit)

    def _current_ranker(self) -> Ranker | None:
        """The ranker, adapted to what was measured."""
        if self._ranker is None:
            return None
        if self._adapted is None:
            self._adapted = self._ranker
            measured: list[Measured] = [
                (self._describe(self._programs[key]), record.run_us)
                for key, record in self._measured.items()
                if key in self._programs
            ]
            if len(measured) >= ADAPT:
                self._adapted = self._ranker.adapted(measured)
        return self._adapted


def search_task(
    task: Task,
    target: Target,
    known: Knowledge,
    ranker: Ranker | None = None,
    *,
    strategy: Strategy = Strategy.DRAFT_MODEL,
    seed: int = 0,
) -> Search[Candidate]:
    """A search of `task`'s programs.

    Args:
        task: the workload.
        target: its architecture.
        known: of this task and of others: fresh records of this task count as measured, all others
            give their schedules to try, this task's first, then the one that would run untuned.
        ranker: as for `Search`; `gtco.cost_model.ranker.shipped_ranker` has one.
        strategy, seed: as for `Search`.
    """
    sketches = derive(task.group, family(task.group), target).sketches
    sampler = Sampler(sketches, seed)
    fresh = known.records(task.key)
    old = (record for record in known.others if record.workload == task.key)
    first = [*fresh, *sorted(old, key=_time)[:SIMILAR]]
    if (near := transferred(known, task.key, sketches)) is not None:
        first.append(near)

    def adopted(records: Iterable[TuningRecord]) -> list[Candidate]:
        made = (sampler.adopt(r.sketch, r.schedule) for r in records if r.run_us is not None)
        return [candidate for candidate in made if candidate is not None]

    search = Search(
        sampler,
        work_of,
        target,
        ranker,
        strategy=strategy,
        seed=seed,
        first=adopted(first),
        transferred=adopted(_alike(task, [*known.all(), *known.others])),
    )
    search.observe(fresh)
    return search


def candidate_of(task: Task, record: TuningRecord, target: Target) -> Candidate | None:
    """The program of a task's record; None for the library, or if it is no longer legal."""
    for sketch in derive(task.group, family(task.group), target).sketches:
        if sketch.name == record.sketch:
            return Sampler((sketch,), 0).make(sketch, record.schedule)
    return None


def other_rings(task: Task, known: Knowledge, target: Target) -> list[Candidate]:
    """Programs that were not measured, of the tile of the task's best."""
    records = known.best(task.key)
    best = candidate_of(task, records[0], target) if records else None
    if best is None:
        return []
    rings = Sampler((best.sketch,), 0).rings(best)
    measured = {schedule_key(each.sketch, each.schedule) for each in known.records(task.key)}
    return [candidate for candidate in rings if candidate.key not in measured]


def _alike(task: Task, records: Iterable[TuningRecord]) -> list[TuningRecord]:
    """The fastest record of each of the tasks most like this one, most alike first."""
    fastest: dict[tuple[str, str], TuningRecord] = {}
    for record in records:
        if record.workload == task.key or record.run_us is None:
            continue
        if record.sketch in (LIBRARY, PLAN):
            continue
        place = (record.workload, record.device)
        if place not in fastest or record.run_us < _time(fastest[place]):
            fastest[place] = record
    alike = sorted(
        ((likeness(task.key, record.workload), record) for record in fastest.values()),
        key=lambda pair: -pair[0],
    )
    return [record for like, record in alike[:SIMILAR] if like >= ALIKE]


def _time(record: TuningRecord) -> float:
    return float("inf") if record.run_us is None else record.run_us
