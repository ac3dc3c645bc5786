"""How many trials does each search need, and does the learned model rank what it never saw?

    python -m experiments.replay_searches POOL OUT [--seeds N] [--trials N]

Replays every strategy on the pools of `experiments.measure_pools`. The learned model of a task is
trained on the tasks of all other models. OUT gets `searches.json` and, with matplotlib, plots of
the best time over trials and of the ranking.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.publish import provenance, publish
from gtco.cost_model.model import draft_us
from gtco.cost_model.pool import Entry, PoolSpace, PoolTask, read_pool
from gtco.cost_model.ranker import Ranker, train
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.search import P, Search, Strategy
from gtco.target import Target, find_target

STEP = 16
"""Programs of a round: what is proposed before anything is learned of them."""
NEAR = 2.0
"""Programs within this factor of the best are the ones that matter."""
TOP = 10

Curve = list[tuple[int, float]]
"""(trial, best time so far) wherever it fell; the last entry is the last trial."""


@dataclass(frozen=True)
class Ranking:
    """How well scores order the programs of one task that ran.

    Args:
        rank_all: Spearman's correlation over all.
        rank_near: the same over those within `NEAR` of the best.
        regret: the best of the `TOP` highest scores over the pool's best, less one.
    """

    rank_all: float
    rank_near: float
    regret: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pool", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=256)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        "experiment": "replay_searches",
        **provenance("replay_searches"),
        **replay(read_pool(options.pool), options.seeds, options.trials),
    }
    publish(
        options.out / "searches.json",
        results,
        table(results) + "\n",
        lambda: plot(results, options.out),
    )


def replay(pool: Sequence[PoolTask], seeds: int, trials: int) -> dict[str, Any]:
    """Every task's ranking and curves, and the summary over all, ready for JSON."""
    found: dict[str, Any] = {}
    for model in dict.fromkeys(task.model for task in pool):
        held_out = [task for task in pool if task.model == model]
        target = find_target(held_out[0].arch)
        ranker = train([task.measured() for task in pool if task.model != model], target)
        for task in held_out:
            curves = {
                strategy.value: [
                    replayed(task, target, strategy, ranker, seed, trials) for seed in range(seeds)
                ]
                for strategy in Strategy
            }
            works = [each.work for each in task.entries]
            found[task.name] = {
                "model": model,
                "device": task.device,
                "timed": task.timed,
                "programs": len(task.entries),
                "failures": sum(each.run_us is None for each in task.entries),
                "best_us": task.best_us,
                "library_us": task.library_us,
                "ranking": {
                    "cost model": asdict(ranking(task, ranker.scores(works))),
                    "draft": asdict(ranking(task, [-draft_us(work, target) for work in works])),
                },
                "trials_to_random": trials_to_random(curves, trials),
                "curves": curves,
            }
            print(f"{task.name}: replayed", flush=True)
    return {"seeds": seeds, "trials": trials, "summary": summary(found), "tasks": found}


def replayed(
    task: PoolTask, target: Target, strategy: Strategy, ranker: Ranker, seed: int, trials: int
) -> Curve:
    """One search of `trials` programs of a pool."""
    search: Search[Entry] = Search(
        PoolSpace(task, seed),
        lambda entry: entry.work,
        target,
        ranker,
        strategy=strategy,
        seed=seed,
    )
    return curve(search, lambda found: [task.record(entry) for entry in found], trials)


def curve(
    search: Search[P], measure: Callable[[Sequence[P]], Sequence[TuningRecord]], trials: int
) -> Curve:
    """What `search` finds in `trials` programs, which `measure` times round by round."""
    points: Curve = []
    done = 0
    best = float("inf")
    while done < trials and (found := search.propose(min(STEP, trials - done))):
        records = measure(found)
        for record in records:
            done += 1
            if record.run_us is not None and record.run_us < best:
                best = record.run_us
                points.append((done, best))
        search.observe(records)
    points.append((done, best))
    return points


def reached(points: Curve, goal_us: float) -> int | None:
    """The trial at which a search was as fast as `goal_us`, None if it never was."""
    return next((trial for trial, us in points if us <= goal_us), None)


def at(points: Curve, trial: int) -> float:
    """The best time after `trial` trials."""
    return min((us for when, us in points if when <= trial), default=float("inf"))


def trials_to_random(curves: dict[str, list[Curve]], trials: int) -> dict[str, float]:
    """Median trials, over the seeds, until a strategy is as fast as random's median end.

    A search that never is counts as having taken all trials and one more.
    """
    goal = statistics.median(at(points, trials) for points in curves[Strategy.RANDOM.value])
    return {
        name: statistics.median(reached(points, goal) or trials + 1 for points in each)
        for name, each in curves.items()
    }


def ranking(task: PoolTask, scores: Sequence[float]) -> Ranking:
    """How well `scores`, one an entry and higher for faster, order those that ran."""
    pairs = [
        (score, each.run_us)
        for score, each in zip(scores, task.entries, strict=True)
        if each.run_us is not None
    ]
    near = [(score, us) for score, us in pairs if us <= NEAR * task.best_us]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:TOP]
    times = [us for index in order if (us := task.entries[index].run_us) is not None]
    return Ranking(
        spearman(pairs), spearman(near), min(times, default=float("inf")) / task.best_us - 1
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of scores and speeds, 1 for the same order; NaN for fewer than two."""
    if len(pairs) < 2:
        return float("nan")
    scores, times = np.array(pairs).T
    return float(np.corrcoef(_ranks(scores), _ranks(-times))[0, 1])


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions in ascending order; equal values share their mean position."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: np.ndarray[Any, Any] = (last - (counts - 1) / 2)[inverse]
    return middle


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the tasks."""

    def median(*path: str) -> float:
        values = []
        for task in found.values():
            value = task
            for key in path:
                value = value[key]
            values.append(value)
        return float(statistics.median(values))

    return {
        "trials_to_random": {s.value: median("trials_to_random", s.value) for s in Strategy},
        "ranking": {
            who: {what: median("ranking", who, what) for what in Ranking.__dataclass_fields__}
            for who in ("cost model", "draft")
        },
        "worst_regret": max(task["ranking"]["cost model"]["regret"] for task in found.values()),
    }


def table(results: dict[str, Any]) -> str:
    """The results as text, a line a task."""
    names = [strategy.value for strategy in Strategy]
    rows = [["task", "best us", *names, "rank", "near", "regret", "(draft)", "near", "regret"]]
    everything = {**results["tasks"], "median": {**results["summary"], "best_us": float("nan")}}
    for name, task in everything.items():
        ranks = [
            f"{task['ranking'][who][what]:.3f}"
            for who in ("cost model", "draft")
            for what in Ranking.__dataclass_fields__
        ]
        needed = [f"{task['trials_to_random'][strategy]:g}" for strategy in names]
        rows.append([name, f"{task['best_us']:.2f}", *needed, *ranks])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([f"trials to random's best of {results['trials']}, and ranking:", *lines])


def plot(results: dict[str, Any], out: Path) -> None:
    """`searches.png` and `ranking.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found, trials = results["tasks"], results["trials"]
    columns = 4
    rows = -(-len(found) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False, sharex=True
    )
    steps = range(1, trials + 1)
    for axis, (name, task) in zip(axes.flat, found.items(), strict=False):
        for strategy, curves in task["curves"].items():
            levels = np.array([[at(points, step) for step in steps] for points in curves])
            levels /= task["best_us"]
            (line,) = axis.plot(steps, np.median(levels, axis=0), label=strategy)
            axis.fill_between(
                steps, levels.min(axis=0), levels.max(axis=0), color=line.get_color(), alpha=0.15
            )
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0.99, 1.6)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        axis.set_xlabel("trials")
    for axis in axes[:, 0]:
        axis.set_ylabel("best so far / pool's best")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "searches.png", dpi=110)

    figure, pair = pyplot.subplots(1, 2, figsize=(12, 4), sharey=True)
    for axis, what, title in zip(
        pair, ("rank_all", "rank_near"), ("all programs", "within 2x of the best"), strict=True
    ):
        for offset, who in ((-0.2, "draft"), (0.2, "cost model")):
            heights = [task["ranking"][who][what] for task in found.values()]
            axis.bar(np.arange(len(found)) + offset, heights, 0.4, label=who)
        axis.set_xticks(range(len(found)), list(found), rotation=60, ha="right", fontsize=7)
        axis.set_title(f"rank correlation, {title}, models held out", fontsize=10)
    pair[0].legend()
    figure.tight_layout()
    figure.savefig(out / "ranking.png", dpi=110)


if __name__ == "__main__":
    main()
