"""Measure the programs of a model's tasks: which come next, what they say, and where it is kept."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait

from gtco.codegen.sampler import Candidate
from gtco.cost_model.budget import Budget
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.measure import MeasureError
from gtco.cost_model.model import roofline_us
from gtco.cost_model.ranker import Ranker
from gtco.cost_model.record import LIBRARY, DatabaseError, TuningRecord
from gtco.cost_model.search import Search, search_task
from gtco.cost_model.similar import likeness
from gtco.cost_model.trials import Trials
from gtco.target import Target
from gtco.tuning.result import TuneStatus
from gtco.tuning.state import Limits, TaskState, Wanted

log = logging.getLogger("gtco.tune")

BATCH = 16
"""Programs of a task that are proposed at once."""
IN_FLIGHT = 3
"""Batches under way: while one is measured, the next ones compile."""
_POLL_S = 0.25


class Measuring:
    """The tasks under search, by key, and all that is measured of them.

    Args:
        target: what the programs are for.
        database: where every measurement goes.
        known: what is known so far, and grows with each measurement.
        runner: measures.
        limits: of the whole search.
        ranker: predicts which programs are fast, if there is one.
        seed: of the search.
        watch: shown the state several times a second.
    """

    def __init__(
        self,
        target: Target,
        database: Database,
        known: Knowledge,
        runner: Trials,
        limits: Limits,
        ranker: Ranker | None,
        seed: int,
        watch: Callable[[TuneStatus], None] | None,
    ) -> None:
        self.states: dict[str, TaskState] = {}
        self.trials = 0
        self._target = target
        self._database = database
        self._known = known
        self._runner = runner
        self._limits = limits
        self._ranker = ranker
        self._seed = seed
        self._watch = watch
        self._unsaved: list[TuningRecord] = []

    def search(self, limits: Limits) -> str:
        """Measure until a limit is reached; which it was, "" if no programs are left."""
        states = [state for state in self.states.values() if not state.broken]
        keys = [state.task.key for state in states]
        budget = Budget(
            [state.row.weight or 1 for state in states],
            [roofline_us(state.task.group, self._target) for state in states],
            [math.inf if state.row.weight else state.saving_us for state in states],
            [[likeness(key, other) for other in keys] for key in keys],
        )
        for index, state in enumerate(states):
            programs = [r for r in self._known.records(state.task.key) if r.sketch != LIBRARY]
            rounds = max(len(programs) // BATCH, int(state.row.trials > 0))
            for _ in range(rounds):
                budget.begin(index)
            if rounds:
                budget.observe(index, state.row.best_us)
        position = {state: index for index, state in enumerate(states)}
        flying: dict[Future[TuningRecord], TaskState] = {}
        while True:
            reached = limits.reached(self.trials + len(flying))
            while not reached and len(flying) <= BATCH * (IN_FLIGHT - 1):
                chosen = budget.next()
                if chosen is None:
                    break
                room = limits.trials - self.trials - len(flying)
                futures = self._propose(states[chosen], int(min(BATCH, room)))
                flying.update(dict.fromkeys(futures, states[chosen]))
                if futures:
                    budget.begin(chosen)
                else:
                    budget.end(chosen)
                reached = limits.reached(self.trials + len(flying))
            if not flying:
                return reached
            done, _ = wait(flying, _POLL_S, FIRST_COMPLETED)
            for state in self._collect(done, flying):
                budget.observe(position[state], state.row.best_us)
                if state.broken:
                    budget.end(position[state])
            self.show("searching")
            if self._limits.reached():  # a round's own limits let what flies land
                for future in flying:
                    future.cancel()
                return "seconds"

    def _search_of(self, state: TaskState) -> Search[Candidate]:
        if state.search is None:
            state.search = search_task(
                state.task, self._target, self._known, self._ranker, seed=self._seed
            )
        return state.search

    def _propose(self, state: TaskState, count: int) -> list[Future[TuningRecord]]:
        """Trials of a task's next programs, and of its ATen calls ahead of the first."""
        found: list[Future[TuningRecord]] = []
        known = self._known.records(state.task.key)
        if not state.asked_library and not any(record.sketch == LIBRARY for record in known):
            found.append(self._runner.run(state.subject, None))
        state.asked_library = True
        candidates = self._search_of(state).propose(count)
        return found + [self._runner.run(state.subject, each) for each in candidates]

    def _collect(
        self,
        done: Iterable[Future[TuningRecord]],
        flying: dict[Future[TuningRecord], TaskState],
        final: bool = False,
    ) -> Iterable[TaskState]:
        """Keep what finished; the tasks that something finished of. A final timing is no trial."""
        records: list[TuningRecord] = []
        touched: dict[TaskState, None] = {}
        for future in done:
            state = flying.pop(future)
            touched[state] = None
            try:
                record = future.result()
            except CancelledError:
                continue
            except MeasureError as error:
                if not state.broken:
                    log.warning("%s", error)
                state.broken = True
                continue
            records.append(record)
            if final:
                continue
            if state.search is not None:
                state.search.observe([record])
            if record.sketch != LIBRARY:
                self.trials += 1
                state.row.trials += 1
                state.row.failures += record.run_us is None
            if record.error:
                where = f"{state.row.name} {record.sketch} {dict(record.schedule)}"
                log.info("%s: %s", where, record.error)
        self.keep(records)
        return touched

    def keep(self, records: Iterable[TuningRecord]) -> None:
        """Remember `records`; what the database cannot take now is tried again with the next."""
        for record in records:
            self._known.add(record)
            if record.workload in self.states:
                self.states[record.workload].refresh(self._known, self._target)
            self._unsaved.append(record)
        if not self._unsaved:
            return
        try:
            self._database.add(self._unsaved)
        except DatabaseError as error:
            log.warning("%s (%d measurements are not kept yet)", error, len(self._unsaved))
        else:
            self._unsaved = []

    def warn_of_unsaved(self) -> None:
        """Say how many measurements the database did not take up to the end."""
        if self._unsaved:
            log.warning(
                "%d measurements could not be kept in %s", len(self._unsaved), self._database.path
            )

    def run_all(
        self, wanted: Iterable[Wanted], phase: str, until: float, final: bool = False
    ) -> None:
        """Run these programs and keep what they say; at `until` the rest is given up."""
        flying = {
            self._runner.run(state.subject, candidate, final=final): state
            for state, candidate in wanted
        }
        while flying:
            done, _ = wait(flying, _POLL_S, FIRST_COMPLETED)
            self._collect(done, flying, final)
            self.show(phase)
            if time.monotonic() > until:
                for future in flying:
                    future.cancel()
                return

    def show(self, phase: str) -> None:
        if self._watch is not None:
            rows = tuple(state.row for state in self.states.values())
            spent = time.monotonic() - self._limits.begun
            self._watch(TuneStatus(phase, spent, self.trials, rows))
