"""Which program of a task to measure next.

Evolution proposes, the draft model prunes, the ranker orders, the device decides. The worker that
measures is elsewhere: `propose` and `observe` are all that it needs.

    search = search_task(task, target, records, ranker, seed=0)
    while trials are left:
        found = search.propose(16)          # [] when the space is exhausted
        search.observe(measure(found))      # one TuningRecord each, failures too
    search.best                             # the fastest record, the library's included

The library candidate has no schedule: measure it once and hand its record (`sketch="library"`) to
`observe` like any other; it may win, and is never a parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from gtco.codegen.sampler import Candidate
from gtco.cost_model.database import TuningRecord
from gtco.cost_model.ranker import Ranker
from gtco.passes.tasks import Task
from gtco.target import Target


class Strategy(Enum):
    """How candidates are chosen: the arms of the experiment, each with all that the last has."""

    RANDOM = "random"
    EVOLUTION = "evolution"
    MODEL = "cost model"
    DRAFT_MODEL = "draft + cost model"


class Search:
    """One task's search; made by `search_task`."""

    def propose(self, count: int) -> list[Candidate]:
        """Up to `count` programs that were never proposed; [] when there are no more.

        The first proposals are the best known schedules of this and of similar tasks and the
        sketches' defaults.
        """
        raise NotImplementedError

    def observe(self, records: Iterable[TuningRecord]) -> None:
        """What measuring said of proposed programs, failures included, or of the library."""
        raise NotImplementedError

    @property
    def best(self) -> TuningRecord | None:
        """The fastest record so far, known ones of this device and version included."""
        raise NotImplementedError


def search_task(
    task: Task,
    target: Target,
    records: Sequence[TuningRecord] = (),
    ranker: Ranker | None = None,
    *,
    seed: int = 0,
    strategy: Strategy = Strategy.DRAFT_MODEL,
) -> Search:
    """A search of `task`'s programs.

    Args:
        task: the workload.
        target: its architecture.
        records: what is known of this task and of others on this device; fresh records of this
            task count as measured, others lend their schedules.
        ranker: a trained cost model; without one the draft model alone orders.
        seed: equal seeds and observations propose the same.
        strategy: which parts take part.
    """
    raise NotImplementedError
