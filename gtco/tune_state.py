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
