"""What `gtco.tuner` keeps of its limits and of each task."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from gtco.codegen.sampler import Candidate
from gtco.cost_model.measure import Subject
from gtco.cost_model.search import Search
from gtco.passes.tasks import Task
from gtco.tune_result import TaskRow

FINISH_S, FINISH_PART = 30.0, 0.4
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
        finals: the final timing of each task's best.
        plans: replaying other plans.
        end: trying schedules in the whole graph, and with it everything.
    """

    finals: float = math.inf
    plans: float = math.inf
    end: float = math.inf

    @staticmethod
    def of(searched: float, seconds: float) -> Finish:
        """What follows a search that was given `seconds` and ended at `searched`."""
        finish_s = max(FINISH_S, FINISH_PART * seconds)
        return Finish(searched + 0.3 * finish_s, searched + 0.4 * finish_s, searched + finish_s)


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
