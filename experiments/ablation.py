"""What does fusion gain, and what does measuring add to it? One model fused in four ways.

    python -m experiments.ablation MODEL OUT.json [--programs N] [--seconds S] [--db PATH]

    no fusion             each compute node is a kernel; the rewrite passes stay on
    greedy                the largest legal group first (`experiments.partitions`)
    DP, draft prices      the cheapest plan by the roofline
    DP, measured prices   the cheapest plan by what this run measured, decided again and again

All begin with no records at all, and the first three are timed as they are then: untuned. Each is
tuned alike: every distinct kernel of every arm is the
best of the same number of programs, which the same search proposes from the same seed, and the best
of them are timed again. A kernel that arms share is searched once and runs alike in them, so the
arms differ by their fusion and not by luck. What the last arm costs more is searching the kernels
of plans that are not chosen in the end; the result counts them. The tuner's last step, trying
schedules in the whole graph, is left out for every arm.

Then every arm's answer is judged, and the whole graphs are replayed in interleaved runs in this
process. With --db the measurements are kept, and the same command goes on after the last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.partitions import greedy, unfused
from experiments.publish import markdown, microseconds, provenance, publish, save_bars
from gtco.benchmarking.answers import compute_precision, references
from gtco.benchmarking.rounds import Tell
from gtco.check import judge
from gtco.codegen.sampler import Candidate
from gtco.compiler import capture_for, fuse_with, plan_with, rewritten
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import Knowledge, finalists
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.model import roofline_us
from gtco.cost_model.ranker import Ranker, shipped_ranker
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.search import Search, candidate_of, search_task
from gtco.cost_model.trials import Trials
from gtco.ir.graph import FusedGraph, Graph, Group
from gtco.locate import Located, locate
from gtco.options import Options
from gtco.passes.tasks import Task, tasks, workload_key
from gtco.runtime.device import resolve_device
from gtco.runtime.module import CompiledModule
from gtco.target import HOST, Target
from gtco.tuning.measuring import BATCH
from gtco.tuning.replay import clock, in_turns
from gtco.tuning.tuner import PLANS

NONE, GREEDY, DRAFT, MEASURED = "no fusion", "greedy", "DP, draft prices", "DP, measured prices"
UNTUNED = ", untuned"
"""Behind the name of an arm whose kernels are their sketches' defaults."""
ROUNDS = 15
"""Interleaved runs of each arm when whole graphs are replayed."""
REPLANS = 4
"""How often, at most, the last arm's plan may bring kernels that were not measured yet."""


@dataclass
class Tried:
    """A task that some arm has, and what was tried of it."""

    task: Task
    subject: Subject
    search: Search[Candidate]
    asked_library: bool = False
    ended: bool = False


class Tuning:
    """Measures the programs of all arms' tasks, of each as many.

    Args:
        known: takes what was measured.
        target: of all tasks.
        runner: measures.
        database: keeps what was measured, if there is one.
        ranker: the learned cost model, if there is one.
    """

    def __init__(
        self,
        known: Knowledge,
        target: Target,
        runner: Trials,
        database: Database | None,
        ranker: Ranker | None,
    ) -> None:
        self.tried: dict[str, Tried] = {}
        self._known = known
        self._target = target
        self._runner = runner
        self._database = database
        self._ranker = ranker

    def add(self, plans: Iterable[FusedGraph]) -> None:
        """Let the tasks of `plans` be measured from now on."""
        for fused in plans:
            for task in tasks(fused, self._target):
                if task.key not in self.tried:
                    own = self._known.records(task.key)
                    alone = Knowledge(self._known.device, own)
                    search = search_task(task, self._target, alone, self._ranker)
                    asked = any(record.sketch == LIBRARY for record in own)
                    subject = Subject(task.key, task.group)
                    self.tried[task.key] = Tried(task, subject, search, asked)

    def measure(self, programs: int) -> None:
        """Bring every task to `programs` programs, or to all that it has."""
        while flying := self._propose(programs):
            self._land(flying)

    def _propose(self, programs: int) -> dict[Future[TuningRecord], Tried]:
        flying: dict[Future[TuningRecord], Tried] = {}
        for each in self.tried.values():
            missing = min(BATCH, programs - each.search.trials)
            if each.ended or missing <= 0:
                continue
            if not each.asked_library:
                flying[self._runner.run(each.subject, None)] = each
                each.asked_library = True
            found = each.search.propose(missing)
            each.ended = not found
            flying |= {self._runner.run(each.subject, program): each for program in found}
        return flying

    def finish(self, plans: Iterable[FusedGraph]) -> None:
        """Time the best of the tasks of `plans` again and longer."""
        flying: dict[Future[TuningRecord], Tried] = {}
        for key in {task.key for fused in plans for task in tasks(fused, self._target)}:
            each = self.tried[key]
            for record in finalists(self._known, key):
                candidate = candidate_of(each.task, record, self._target)
                if candidate is not None or record.sketch == LIBRARY:
                    flying[self._runner.run(each.subject, candidate, final=True)] = each
        self._land(flying)

    def _land(self, flying: dict[Future[TuningRecord], Tried]) -> None:
        for future, each in flying.items():
            try:
                record = future.result()
            except CancelledError:
                continue
            except MeasureError as error:
                print(f"{each.task.group}: {error}", file=sys.stderr)
                each.ended = True
                for other in (other for other, owner in flying.items() if owner is each):
                    other.cancel()
                continue
            each.search.observe([record])
            self._known.add(record)
            if self._database is not None:
                self._database.add([record])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=64, help="measured of each task")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no round of programs after that"
    )
    parser.add_argument(
        "--db", type=Path, help="keeps the measurements; new, or of a run like this"
    )
    parser.add_argument("--target", help='"host" measures on the CPU: a rehearsal')
    given = parser.parse_args()
    opened = nullcontext() if given.db is None else Database(given.db)
    with torch.no_grad(), opened as database:
        found = ablate(
            locate(given.model),
            Options.of(target=given.target),
            given.programs,
            given.seconds,
            database,
        )
    result = {"experiment": "ablation", **provenance("ablation"), **found}
    publish(
        given.out,
        result,
        tables(result) + "\n",
        lambda: plot(result, given.out.with_suffix(".png")),
    )


def say(message: str) -> None:
    """Progress, for people."""
    print(message, file=sys.stderr, flush=True)


def ablate(
    model: Located,
    options: Options,
    programs: int,
    seconds: float = float("inf"),
    database: Database | None = None,
    rounds: int = ROUNDS,
    tell: Tell = say,
) -> dict[str, Any]:
    """The arms of `model`, tuned and not, and replayed, ready for JSON.

    Args:
        model: on the GPU, if there is one.
        options: of all arms.
        programs: measured of each task.
        seconds: after which every task keeps as many programs as all others have by then.
        database: keeps what is measured.
        rounds: turns of each arm when whole graphs are replayed.
        tell: called with a line of progress.

    Raises:
        RuntimeError: an arm's answer is wrong.
    """
    begin = time.monotonic()
    target = resolve_device(options.target).target
    captured = capture_for(model.module, model.args, model.kwargs, options)
    graph = rewritten(captured, options, target)
    with Trials(host=options.target == HOST) as runner:
        own = [] if database is None else list(database.records())
        known = Knowledge(runner.device, own=own)
        tuning = Tuning(known, target, runner, database, shipped_ranker(target))
        arms = tuned_arms(graph, target, known, tuning, programs, begin + seconds, tell)
        measuring = dict(runner.seconds)
    tuned = time.monotonic()
    searched = {key: each.search.trials for key, each in tuning.tried.items()}
    untuned = {f"{name}{UNTUNED}": arms[name] for name in (NONE, GREEDY, DRAFT)}
    nothing = Knowledge(known.device)
    plans = {name: plan_with(nothing, fused, target, options) for name, fused in untuned.items()}
    plans |= {name: plan_with(known, fused, target, options) for name, fused in arms.items()}
    modules = {name: CompiledModule(plan, captured) for name, plan in plans.items()}
    verdicts = judged(modules, model, options)
    turns = in_turns([clock(module) for module in modules.values()], rounds)
    return {
        "model": model.name,
        "device": known.device,
        "programs_of_a_task": programs,
        "programs": sum(searched.values()),
        "tasks": len(searched),
        "tune_seconds": tuned - begin,
        "measuring_seconds": measuring,
        "seconds": time.monotonic() - begin,
        "arms": {
            name: {
                "launches": len(module.launches),
                "generated": sum(each.kernel != "aten" for each in module.launches),
                "tasks": len(tasks(module.graph, target)),
                "programs": sum(searched[task.key] for task in tasks(module.graph, target))
                if name in arms
                else 0,
                "draft_us": sum(roofline_us(group, target) for group in module.graph),
                "predicted_us": sum(each.predicted_us or 0.0 for each in module.launches),
                "median_us": statistics.median(times),
                "rounds_us": times,
                "verdict": verdicts[name],
            }
            for (name, module), times in zip(modules.items(), turns, strict=True)
        },
        "differences": {
            f"{first} | {second}": differences(arms[first], arms[second], known, target)
            for first, second in ((GREEDY, DRAFT), (GREEDY, MEASURED), (DRAFT, MEASURED))
        },
    }


def tuned_arms(
    graph: Graph,
    target: Target,
    known: Knowledge,
    tuning: Tuning,
    programs: int,
    until: float,
    tell: Tell = say,
) -> dict[str, FusedGraph]:
    """The arms of `graph`, with `programs` programs measured of each of their tasks.

    Args:
        graph: after the rewrite passes.
        target: what it is fused for.
        known: what `tuning` measures.
        tuning: measures.
        programs: of each task.
        until: of the monotonic clock, when all tasks have to do with as many as they have.
        tell: called with a line of progress.
    """
    (draft,) = fuse_with(Knowledge(known.device), graph, target)
    arms = {NONE: unfused(graph), GREEDY: greedy(graph), DRAFT: draft}
    tuning.add(arms.values())
    reached = 0
    while reached < programs and time.monotonic() < until:
        reached = min(reached + BATCH, programs)
        tuning.add(fuse_with(known, graph, target, PLANS, explore=True))
        tuning.measure(reached)
        tell(f"{len(tuning.tried)} tasks, {reached} programs each")
    for _ in range(REPLANS):
        (plan,) = fuse_with(known, graph, target)
        if MEASURED in arms and str(plan) == str(arms[MEASURED]):
            break
        arms[MEASURED] = plan
        tuning.add([plan])
        tuning.measure(reached)
        tuning.finish(arms.values())
    return arms


def judged(
    modules: Mapping[str, CompiledModule], model: Located, options: Options
) -> dict[str, dict[str, Any]]:
    """The judge's word on each module's answer.

    Raises:
        RuntimeError: one is wrong.
    """
    truth = references(model, options.precision)
    eager = truth.judged((model.args, model.kwargs))
    exact = truth.exact((model.args, model.kwargs))
    precision = compute_precision(model, options.precision)
    verdicts = {}
    for name, module in modules.items():
        found = judge(module(*model.args, **model.kwargs), eager, exact, precision)
        if not found.ok:
            raise RuntimeError(f"the answer of {name!r} is {found}")
        verdicts[name] = found.to_dict()
    return verdicts


# -- plans side by side ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One group of a plan: its operators, its draft price, and its measured time if there is."""

    ops: str
    draft_us: float
    measured_us: float | None


def differences(
    first: FusedGraph, second: FusedGraph, known: Knowledge, target: Target
) -> list[dict[str, Any]]:
    """Where two plans cut the same nodes otherwise: each place once, with how often it occurs.

    "rejected" says that `first` has a larger group there than any of `second`, and that the clock
    is against it: the kernels of `second` were measured to take less time together.

    Args:
        first, second: plans of one graph.
        known: what was measured.
        target: of both.
    """
    found: dict[tuple[tuple[str, ...], ...], dict[str, Any]] = {}
    for pair in _places(first, second):
        key = tuple(tuple(workload_key(group, target) for group in side) for side in pair)
        if key not in found:
            sides = [[_kernel(group, known, target) for group in side] for side in pair]
            sums = [_sum_us(side) for side in sides]
            found[key] = {
                "times": 0,
                "first": [asdict(kernel) for kernel in sides[0]],
                "second": [asdict(kernel) for kernel in sides[1]],
                "measured_us": sums,
                "rejected": _largest(pair[0]) > _largest(pair[1])
                and None not in sums
                and (sums[1] or 0.0) < (sums[0] or 0.0),
            }
        found[key]["times"] += 1
    return list(found.values())


def _places(first: FusedGraph, second: FusedGraph) -> Iterator[tuple[list[Group], list[Group]]]:
    """The smallest sets of groups of either plan that hold the same nodes, where they differ."""
    ours, theirs = ({_names(group): group for group in fused} for fused in (first, second))
    for names in ours.keys() & theirs.keys():
        del ours[names], theirs[names]
    for names in list(ours):
        if names not in ours:
            continue
        covered, grown = frozenset[str](), names
        while grown != covered:
            covered = grown
            grown = covered.union(*(each for each in (*ours, *theirs) if each & covered))
        yield (
            [ours.pop(each) for each in list(ours) if each <= covered],
            [theirs.pop(each) for each in list(theirs) if each <= covered],
        )


def _largest(groups: Sequence[Group]) -> int:
    return max(len(group.compute) for group in groups)


def _names(group: Group) -> frozenset[str]:
    return frozenset(node.name for node in group.compute)


def _kernel(group: Group, known: Knowledge, target: Target) -> Kernel:
    ops = " -> ".join(node.op for node in group.compute)
    best = known.best(workload_key(group, target))
    return Kernel(ops, roofline_us(group, target), best[0].run_us if best else None)


def _sum_us(kernels: Sequence[Kernel]) -> float | None:
    times = [kernel.measured_us for kernel in kernels if kernel.measured_us is not None]
    return sum(times) if len(times) == len(kernels) else None


# -- what people read ------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> str:
    """The arms, then the places where plans differ, as Markdown."""
    arms = result["arms"]
    base = arms[MEASURED]["median_us"]
    rows = []
    for name, arm in arms.items():
        low, _, high = statistics.quantiles(arm["rounds_us"], n=4)
        rows.append(
            (
                name,
                str(arm["launches"]),
                str(arm["tasks"]),
                f"{arm['predicted_us']:.1f}",
                f"{arm['median_us']:.1f}",
                f"{low:.1f} to {high:.1f}",
                f"{arm['median_us'] / base:.2f}x",
            )
        )
    head = ("arm", "launches", "distinct", "sum of kernels, us", "whole graph, us", "quartiles", "")
    text = f"{result['model']} on {result['device']}: {result['programs_of_a_task']} programs of "
    text += f"each task, {result['programs']} in all, {result['seconds']:.0f} s\n\n"
    text += markdown(head, rows)
    for pair, places in result["differences"].items():
        first, second = pair.split(" | ")
        text += f"\n{first} against {second}: "
        text += f"{len(places)} places differ\n" if places else "the same plan\n"
        if places:
            header = ("times", first, "us", second, "us", "")
            text += "\n" + markdown(header, (_place(place) for place in places))
    return text


def _place(place: dict[str, Any]) -> tuple[str, ...]:
    cells = [str(place["times"])]
    for side, total in zip(("first", "second"), place["measured_us"], strict=True):
        kernels = [
            f"{each['ops']} ({microseconds(each['measured_us']) or 'not measured'}; "
            f"draft {each['draft_us']:.2f})"
            for each in place[side]
        ]
        cells += ["<br>".join(kernels), microseconds(total)]
    return (*cells, "a larger fusion rejected by the clock" if place["rejected"] else "")


def plot(result: dict[str, Any], path: Path) -> None:
    """A bar an arm: the whole graph's time, and what its kernels took one by one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = result["arms"]
    figure, axis = pyplot.subplots(figsize=(8, 3))
    heights = [arm["median_us"] for arm in arms.values()]
    spread = [
        [abs(edge(arm["rounds_us"]) - arm["median_us"]) for arm in arms.values()]
        for edge in (min, max)
    ]
    axis.barh(range(len(arms)), heights, xerr=spread, label="whole graph, least to most")
    sums = [arm["predicted_us"] for arm in arms.values()]
    axis.plot(sums, range(len(arms)), "k|", markersize=18, label="sum of its kernels in chains")
    labels = [f"{name}\n{arm['launches']} launches" for name, arm in arms.items()]
    axis.set_yticks(range(len(arms)), labels)
    axis.set_xlabel("us")
    save_bars(figure, axis, result, path)


if __name__ == "__main__":
    main()
