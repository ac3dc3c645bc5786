"""Which task to tune next: the one from which the whole model expects most.

Ansor's gradient (OSDI 2020, section 6): the model takes sum of weight x best time over its tasks.
A trial of task i is expected to gain

    weight_i (alpha d_i + (1 - alpha) max(hope_i, likeness_i))

microseconds, where d_i is what its last `WINDOW` trials gained each, hope_i what it would gain if
it went on as it began (best / trials), and likeness_i how far it lies above `BETA` times the rate
that similar tasks reached. Tasks that were never tried come first, heaviest guess first.
"""

from __future__ import annotations

from collections.abc import Sequence

ALPHA = 0.2
BETA = 2.0
WINDOW = 3


class Budget:
    """Hands the trials of a whole model to its tasks.

    Args:
        weights: how often each task runs in the model.
        likeness: likeness[i][j] of two tasks, 0 to 1 (`gtco.cost_model.similar.likeness`).
    """

    def __init__(self, weights: Sequence[int], likeness: Sequence[Sequence[float]]) -> None:
        raise NotImplementedError

    def next(self) -> int | None:
        """The task to give the next round of trials; None when every task has ended."""
        raise NotImplementedError

    def observe(self, task: int, best_us: float | None, trials: int = 1) -> None:
        """After a round of `trials` on `task`: its best time so far, None if nothing ran."""
        raise NotImplementedError

    def end(self, task: int) -> None:
        """`task` has no more candidates."""
        raise NotImplementedError
