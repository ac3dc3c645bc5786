"""Which task to tune next: the one from which the whole model expects most.

Ansor's gradient (Zheng et al., OSDI 2020, section 6), in microseconds of the whole model a round:

    gain_i = weight_i (ALPHA past_i + (1 - ALPHA) max(best_i / rounds_i, best_i - BETA promise_i))

`past_i` is what each of the last `WINDOW` rounds gained, `best_i / rounds_i` the hope that more
rounds help as the first did, and `promise_i` the time that the task would take if it came as close
to its draft price as the best of the tasks like it. A round counts as soon as it begins, or the
rounds under way would all go to one task. A task without a round gains what its first one promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALPHA = 0.2
BETA = 2.0
WINDOW = 3
ALIKE = 0.5
"""Likeness from which two tasks share hope."""


@dataclass
class _Task:
    weight: int
    draft_us: float
    first_us: float
    best_us: list[float] = field(default_factory=list)
    ended: bool = False


class Budget:
    """Hands the rounds of a whole model's tuning to its tasks.

    Args:
        weights: how often each task runs in the model.
        drafts_us: the draft price of each task, such as `gtco.cost_model.model.roofline_us`.
        firsts_us: what the whole model may gain by the first round of each: infinite for a task
            that it runs now, less for one of another plan.
        likeness: likeness[i][j] of tasks i and j, 0 to 1 (`gtco.cost_model.similar.likeness`).
    """

    def __init__(
        self,
        weights: Sequence[int],
        drafts_us: Sequence[float],
        firsts_us: Sequence[float],
        likeness: Sequence[Sequence[float]],
    ) -> None:
        self._tasks = [_Task(*each) for each in zip(weights, drafts_us, firsts_us, strict=True)]
        self._alike = [
            [self._tasks[other] for other, like in enumerate(row) if like >= ALIKE]
            for row in likeness
        ]

    def next(self) -> int | None:
        """The task to give the next round; None when every task has ended.

        Of tasks with the same gain, such as those without a round, the one whose draft price weighs
        most comes first.
        """

        def merit(index: int) -> tuple[float, float]:
            task = self._tasks[index]
            return self.gain_us(index), task.weight * task.draft_us

        open_tasks = (index for index, task in enumerate(self._tasks) if not task.ended)
        return max(open_tasks, key=merit, default=None)

    def begin(self, task: int) -> None:
        """A round on `task` is under way."""
        found = self._tasks[task]
        found.best_us.append(found.best_us[-1] if found.best_us else BETA * found.draft_us)

    def observe(self, task: int, best_us: float | None) -> None:
        """What the rounds on `task` found so far: its best time, None if no program ran yet."""
        found = self._tasks[task]
        found.best_us[-1] = BETA * found.draft_us if best_us is None else best_us

    def end(self, task: int) -> None:
        """`task` has no more candidates."""
        self._tasks[task].ended = True

    def gain_us(self, task: int) -> float:
        """What the next round on `task` may gain the whole model."""
        found = self._tasks[task]
        if not found.best_us:
            return found.first_us
        best = found.best_us[-1]
        back = found.best_us[-1 - min(WINDOW, len(found.best_us) - 1)]
        past = max(0.0, back - best) / WINDOW
        ratios = [
            other.best_us[-1] / other.draft_us for other in self._alike[task] if other.best_us
        ]
        promise = found.draft_us * min(ratios, default=best / found.draft_us)
        hope = max(best / len(found.best_us), best - BETA * promise)
        return found.weight * (ALPHA * past + (1 - ALPHA) * hope)
