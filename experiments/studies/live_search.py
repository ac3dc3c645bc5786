"""Does a search on the device go as its replay on a pool says? Two strategies, live, from one seed.

    python -m experiments.studies.live_search MODEL POOL OUT.json TASK... [--trials N] [--seed N]

TASK is a name in POOL (of `experiments.measure_pools`) and a task of MODEL, which is named as for
the command line. "random" and "draft + cost model" search all programs of the task, not the pool's
alone; the learned model is trained on the pool's other models, as in
`experiments.replay_searches`, whose curves of the same seed stand beside.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gtco
from experiments.publish import markdown, microseconds, provenance, publish
from experiments.replay_searches import Curve, at, curve, reached, replayed
from gtco.codegen.sampler import Candidate
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.measure import Subject
from gtco.cost_model.pool import PoolTask, read_pool
from gtco.cost_model.ranker import Ranker, train
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.search import Strategy, search_task
from gtco.cost_model.trials import Trials
from gtco.locate import Located, UsageError, locate
from gtco.passes.tasks import Task, tasks
from gtco.target import HOST, Target, find_target

STRATEGIES = (Strategy.RANDOM, Strategy.DRAFT_MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("pool", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--trials", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target", default="sm_90a", help='"host" measures on the CPU: a rehearsal'
    )
    given = parser.parse_args()
    target = find_target(given.target)
    pool = read_pool(given.pool)
    chosen = [task for task in pool if task.name in given.tasks]
    found = named(chosen, given.tasks, locate(given.model), target)
    others = [task.measured() for task in pool if task.model not in {t.model for t in chosen}]
    ranker = train(others, target)
    with Trials(host=given.target == HOST) as runner:
        live = searched(found, target, runner, ranker, given.trials, given.seed)
    result = {
        "experiment": "live_search",
        **provenance("live_search"),
        "model": given.model,
        "device": runner.device,
        "trials": given.trials,
        "seed": given.seed,
        "tasks": {
            task.name: {
                "pool_best_us": task.best_us,
                "live": live[task.name],
                "replayed": {
                    each.value: replayed(task, target, each, ranker, given.seed, given.trials)
                    for each in STRATEGIES
                },
            }
            for task in chosen
        },
    }
    publish(given.out, result, table(result), lambda: plot(result, given.out.with_suffix(".png")))


def named(
    chosen: Sequence[PoolTask], names: Sequence[str], model: Located, target: Target
) -> dict[str, Task]:
    """The task of `model` that each of the pool's `chosen` ones is.

    Raises:
        UsageError: one of `names` is not in the pool, or is of another model.
    """
    missing = set(names) - {task.name for task in chosen}
    fused = gtco.fuse(gtco.capture(model.module, model.args, model.kwargs), target=target)
    ours = {task.key: task for task in tasks(fused, target)}
    strange = [task.name for task in chosen if task.workload not in ours]
    if missing or strange:
        raise UsageError(
            f"not in the pool: {', '.join(sorted(missing)) or 'none'}; of another model than "
            f"{model.name}, or of other code: {', '.join(strange) or 'none'}"
        )
    return {task.name: ours[task.workload] for task in chosen}


def searched(
    found: dict[str, Task], target: Target, runner: Trials, ranker: Ranker, trials: int, seed: int
) -> dict[str, dict[str, Curve]]:
    """The curve of each task and strategy; they share the device round by round."""

    def search(task: Task, strategy: Strategy) -> Curve:
        subject = Subject(task.key, task.group)

        def measure(programs: Sequence[Candidate]) -> list[TuningRecord]:
            return [each.result() for each in [runner.run(subject, one) for one in programs]]

        nothing = Knowledge(runner.device)
        space = search_task(task, target, nothing, ranker, strategy=strategy, seed=seed)
        return curve(space, measure, trials)

    with ThreadPoolExecutor(len(found) * len(STRATEGIES)) as threads:
        futures = {
            name: {each.value: threads.submit(search, task, each) for each in STRATEGIES}
            for name, task in found.items()
        }
        return {
            name: {strategy: future.result() for strategy, future in each.items()}
            for name, each in futures.items()
        }


def table(result: dict[str, Any]) -> str:
    """A row a task, live and replayed: what random ends with, and when the model is as fast."""
    rows = []
    for name, task in result["tasks"].items():
        for where in ("live", "replayed"):
            blind, model = (task[where][each.value] for each in STRATEGIES)
            goal = at(blind, result["trials"])
            trial = reached(model, goal)
            rows.append(
                (
                    name,
                    where,
                    microseconds(goal),
                    "never" if trial is None else str(trial),
                    microseconds(at(model, result["trials"])),
                )
            )
    trials = result["trials"]
    header = ("task", "", f"random's best of {trials}, us", "the model's trials to it")
    return markdown((*header, f"the model's best of {trials}, us"), rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Best time over trials: live drawn through, replayed dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = result["tasks"]
    figure, axes = pyplot.subplots(1, len(found), figsize=(5 * len(found), 3.5), squeeze=False)
    for axis, (name, task) in zip(axes.flat, found.items(), strict=True):
        for where, style in (("live", "-"), ("replayed", "--")):
            for color, (strategy, points) in zip(("C0", "C3"), task[where].items(), strict=True):
                trials, times = zip(*points, strict=True)
                axis.step(
                    trials, times, style, color=color, where="post", label=f"{strategy}, {where}"
                )
        axis.axhline(task["pool_best_us"], color="gray", linewidth=0.5)
        axis.set_ylim(0.98 * task["pool_best_us"], 1.6 * task["pool_best_us"])
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("trials")
    axes[0, 0].set_ylabel("best so far, us")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
