"""The learned cost model: xgboost corrects the draft model's ranking of one task's programs.

Times of two tasks are not compared: it learns from pairs within a workload (`rank:pairwise`, groups
are workloads) and ranks programs of workloads that it never saw, starting from the draft price. A
program that failed ranks below all that ran. xgboost is imported when a ranker is trained or
loaded, and only then.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.cost_model.features import FEATURES, FEATURES_VERSION, features
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.work import Work
from gtco.target import Target

log = logging.getLogger("gtco.tune")

SHARPNESS = 10.0
"""Score of a factor e in the draft price: a tenth faster is worth odds of about e to one."""
ROUNDS = 80
"""Rounds of trees that learn the order of all programs."""
TOP_ROUNDS = 60
"""Rounds after them that learn who is first, which is what a search asks."""
ADAPT_ROUNDS = 30
"""Rounds that `Ranker.adapted` adds."""
_VERSION = "gtco_features_version"
_PARAMETERS = {
    "objective": "rank:pairwise",
    "eta": 0.1,
    "max_depth": 6,
    "min_child_weight": 1.0,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "num_parallel_tree": 4,  # of a round: what the seed draws decides less
    "verbosity": 0,
}

_ANY_PAIRS = {"lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 8}
_TOP_PAIRS = {"lambdarank_pair_method": "topk", "lambdarank_num_pair_per_sample": 32}
"""Pairs of any programs of a task, and of each program with those that rank best."""

Measured = tuple[Work, float | None]
"""A program and its microseconds, None if it failed."""


class RankerError(RuntimeError):
    """xgboost is missing, or there is no model to be had; the message says what to do."""


class Ranker:
    """A trained model of the programs of one target; made by `train` or `Ranker.load`."""

    def __init__(self, booster: Any, target: Target) -> None:
        booster.set_param({"nthread": 1})  # threads cost more than a few hundred rows do
        self._booster = booster
        self._target = target

    def scores(self, works: Sequence[Work]) -> list[float]:
        """One number for each program of one task; the higher, the faster it is predicted."""
        if not works:
            return []
        rows = _rows(works, self._target)
        scores = self._booster.inplace_predict(rows, base_margin=_margins(rows))
        return [float(score) for score in scores]

    def adapted(self, measured: Sequence[Measured]) -> Ranker:
        """This model and a few trees more, learned from measured programs of the task at hand."""
        data = _data([measured], self._target)
        booster = _fit(data, ADAPT_ROUNDS, _ANY_PAIRS, 0, self._booster)
        return Ranker(booster, self._target)

    def save(self, path: Path) -> None:
        """Write the model as UBJ (or JSON, if `path` ends so)."""
        self._booster.set_attr(**{_VERSION: str(FEATURES_VERSION)})
        self._booster.save_model(path)

    @staticmethod
    def load(path: Path, target: Target) -> Ranker:
        """What `save` wrote.

        Raises:
            RankerError: without xgboost, or if the file is missing, damaged or of other features.
        """
        xgboost = _xgboost()
        booster = xgboost.Booster()
        try:
            booster.load_model(path)
        except (xgboost.core.XGBoostError, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise RankerError(f"cannot read the cost model {path}: {reason}") from None
        version = booster.attr(_VERSION)
        if version != str(FEATURES_VERSION) or booster.num_features() != len(FEATURES):
            raise RankerError(
                f"the cost model {path} has features of version {version}, not "
                f"{FEATURES_VERSION}: train it again"
            )
        return Ranker(booster, target)


def train(groups: Iterable[Sequence[Measured]], target: Target, *, seed: int = 0) -> Ranker:
    """Learn from the measured programs of several tasks.

    Args:
        groups: the programs of one task each; `by_workload` makes them of records.
        target: of all of them.
        seed: of the sampling of rows, features and pairs.

    Raises:
        RankerError: without xgboost, or if no group has two programs to compare.
    """
    usable = [list(group) for group in groups if len({run_us for _, run_us in group}) > 1]
    if not usable:
        raise RankerError("no workload has two measured programs to learn from: tune one first")
    data = _data(usable, target)
    booster = _fit(data, ROUNDS, _ANY_PAIRS, seed, None)
    return Ranker(_fit(data, TOP_ROUNDS, _TOP_PAIRS, seed, booster), target)


def by_workload(records: Iterable[TuningRecord]) -> list[list[Measured]]:
    """The programs of `records` that say what they do (`work`), a list a workload and device."""
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for record in records:
        if record.sketch == LIBRARY:
            continue
        try:
            work = Work.of_numbers(record.sketch, record.schedule, record.work)
        except KeyError:
            continue
        groups[record.workload, record.device].append((work, record.run_us))
    return list(groups.values())


def shipped_ranker(target: Target) -> Ranker | None:
    """The model that comes with the package; None, and a line in the log, if it cannot be used."""
    path = resources.files("gtco.cost_model") / "records" / f"{target.arch}.ubj"
    try:
        with resources.as_file(path) as file:
            return Ranker.load(file, target)
    except (RankerError, OSError) as error:
        log.info("no learned cost model, the draft model ranks: %s", error)
        return None


def _xgboost() -> Any:
    try:
        import xgboost
    except ImportError:
        raise RankerError(
            "the learned cost model needs xgboost: pip install 'gtco[tune]'"
        ) from None
    return xgboost


def _rows(works: Sequence[Work], target: Target) -> NDArray[np.float32]:
    """(programs, features)"""
    return np.array([[*features(work, target).values()] for work in works], dtype=np.float32)


def _margins(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Where the trees start: the draft model's opinion, as a score of each program."""
    drafts = rows[:, list(FEATURES).index("draft_us")]
    return (-SHARPNESS * np.log(drafts)).astype(np.float32)


def _data(groups: Sequence[Sequence[Measured]], target: Target) -> Any:
    """The programs of several tasks as xgboost takes them."""
    labels: list[float] = []
    for group in groups:
        fastest = min((run_us for _, run_us in group if run_us is not None), default=1.0)
        labels += [0.0 if run_us is None else fastest / run_us for _, run_us in group]
    rows = _rows([work for group in groups for work, _ in group], target)
    data = _xgboost().DMatrix(rows, np.array(labels, dtype=np.float32), base_margin=_margins(rows))
    data.set_group([len(group) for group in groups])
    return data


def _fit(data: Any, rounds: int, pairs: Mapping[str, Any], seed: int, base: Any) -> Any:
    """A booster trained on `data`, continuing `base` if there is one."""
    threads = max(1, min(len(os.sched_getaffinity(0)), data.num_row() // 2000))
    parameters = {**_PARAMETERS, **pairs, "seed": seed, "nthread": threads}
    return _xgboost().train(parameters, data, rounds, xgb_model=base)
