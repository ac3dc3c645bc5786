"""What a call of `gtco.tune` keeps of its limits and of each task."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gtco.codegen.sampler import Candidate
from gtco.cost_model.knowledge import Knowledge, finalists
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import LIBRARY
from gtco.cost_model.search import Search, candidate_of, other_rings
from gtco.passes.tasks import Task
from gtco.target import Target
from gtco.tuning.result import TaskRow, peak_us

FINISH_S, FINISH_PART = 40.0, 0.4
"""For what follows a search that was given a time: seconds, or that part of it if it is more."""


@dataclass(frozen=True)
class Limits:
    """When to stop: `seconds` after `begun` (of the monotonic clock), or after `trials`."""

    begun: float
    seconds: float
    trials: float

    def reached(self, trials: int = 0) -> str:
        """Which limit was reached, or ""."""
        if time.monotonic() - self.begun >= self.seconds:
            return "seconds"
        return "trials" if trials >= self.trials else ""

    def part(self, part: float) -> Limits:
        """The limits of a round that ends after this part of both."""
        most = self.trials if self.trials == math.inf else math.ceil(part * self.trials)
        return replace(self, seconds=part * self.seconds, trials=most)


@dataclass(frozen=True)
class Finish:
    """When each part of what follows the search ends, of the monotonic clock.

    Most of it goes to the whole graph: it gains more there than the search in its last minute.

    Args:
        rings: other rings of the heaviest tasks' best.
        finals: the final timing of each task's best.
        plans: replaying other plans.
        end: trying schedules in the whole graph, and with it everything.
    """

    rings: float = math.inf
    finals: float = math.inf
    plans: float = math.inf
    end: float = math.inf

    @staticmethod
    def of(searched: float, seconds: float) -> Finish:
        """What follows a search that was given `seconds` and ended at `searched`."""
        finish_s = max(FINISH_S, FINISH_PART * seconds)
        return Finish(*(searched + part * finish_s for part in (0.2, 0.4, 0.5, 1.0)))


class TaskState:
    """A task under search.

    `saving_us` is what the model may gain by the best plan with this task, as far as hopeful prices
    say, and a little where they promise nothing.
    """

    def __init__(self, task: Task, row: TaskRow) -> None:
        self.task = task
        self.subject = Subject(task.key, task.group)
        self.row = row
        self.saving_us = 0.0
        self.search: Search[Candidate] | None = None
        self.asked_library = False
        self.broken = False

    def refresh(self, known: Knowledge, target: Target) -> None:
        """Show the best that is known of the task."""
        for record in known.best(self.task.key)[:1]:
            self.row.best_us, self.row.best = record.run_us, record.sketch
            self.row.peak = peak_us(self.task, target) / (record.run_us or math.inf)
        self.row.library_us = known.library_us(self.task.key)


Wanted = tuple[TaskState, Candidate | None]
"""A program of a task that is to be measured, or its ATen calls."""


def wanted_rings(states: Iterable[TaskState], known: Knowledge, target: Target) -> list[Wanted]:
    """What was not measured of the tile of each task's best."""
    return [(state, each) for state in states for each in other_rings(state.task, known, target)]


def wanted_finals(states: Iterable[TaskState], known: Knowledge, target: Target) -> list[Wanted]:
    """The fastest of each task, and its ATen calls, as far as they had no final timing."""
    found: list[Wanted] = []
    for state in states:
        for record in finalists(known, state.task.key):
            candidate = candidate_of(state.task, record, target)
            if candidate is not None or record.sketch == LIBRARY:
                found.append((state, candidate))
    return found
