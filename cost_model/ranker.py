"""The learned cost model: xgboost ranks the programs of one task.

Times of two tasks are not compared, so it learns from pairs within a workload (`rank:pairwise`,
groups are workloads) and ranks programs of workloads that it never saw. A failure counts as slower
than any program that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gtco.cost_model.database import TuningRecord
from gtco.cost_model.work import Work
from gtco.target import Target


class RankerError(RuntimeError):
    """xgboost is missing, or a model's file does not fit; the message says what to do."""


class Ranker:
    """A trained model."""

    def scores(self, works: Sequence[Work], target: Target) -> list[float]:
        """One number for each program of one task; higher is predicted faster."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write the model as UBJ, its feature version inside."""
        raise NotImplementedError

    @staticmethod
    def load(path: Path) -> Ranker:
        """What `save` wrote.

        Raises:
            RankerError: without xgboost, or if the file is damaged or of other features.
        """
        raise NotImplementedError


def train(records: Sequence[TuningRecord], target: Target, *, seed: int = 0) -> Ranker:
    """Learn from all records that have `work` (see `gtco.cost_model.features`).

    Raises:
        RankerError: without xgboost, or with fewer than two programs of one workload.
    """
    raise NotImplementedError


def shipped_ranker(target: Target) -> Ranker | None:
    """The model that comes with the package; None (and one log line) without it or xgboost."""
    raise NotImplementedError
