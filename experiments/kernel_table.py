"""What did tuning gain, kernel by kernel? A model's tasks: default, best random, tuned, library.

    python -m experiments.kernel_table MODEL OUT.json [--db PATH] [--programs N]

The plan and the tuned schedules are those of the database and the shipped records, as `gtco
compile` takes them. Measured here, in one chain of copies each: N programs drawn at random; then,
all anew and longer, while nothing compiles, the default (what runs where nothing was measured), the
fastest of the random ones, the tuned one and the library's calls, so that what stands in a row was
timed within seconds. No clock saw "draft", the price that the fusion pass would take, nor "floor":
the weights at the rate of device memory, all bytes at L2's or the products at the matmul rate,
whichever is most.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.publish import markdown, microseconds, provenance, publish, save_bars
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.compiler import capture_for, fuse_known, rewritten
from gtco.cost_model.knowledge import Knowledge, known_on
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.model import roofline_us
from gtco.cost_model.plans import group_floor_us
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.search import candidate_of
from gtco.cost_model.trials import Trials
from gtco.locate import Located, locate
from gtco.options import Options
from gtco.passes.legality import family
from gtco.passes.tasks import Task, tasks
from gtco.runtime.device import resolve_device
from gtco.selection import first_choice
from gtco.target import HOST, Target

AGAIN = 3
"""Random programs that are timed again: one time of many is the least by luck."""
COLUMNS = ("default", "random", "tuned", "library")
UNTIMED = ("draft", "floor")


@dataclass(frozen=True)
class Row:
    """One task of the model.

    Args:
        name: its first group's.
        ops: its operators.
        weight: launches of it in one call of the model.
        times_us: by the names of `COLUMNS`; None where nothing ran, or nothing was tuned.
        draft_us: the draft price.
        floor_us: what the bytes or the products take alone.
        schedules: of those that have one: the sketch and its knobs.
        random_programs: how many were drawn, and how many of them ran.
    """

    name: str
    ops: str
    weight: int
    times_us: Mapping[str, float | None]
    draft_us: float
    floor_us: float
    schedules: Mapping[str, Mapping[str, Any]]
    random_programs: tuple[int, int]


class Contest:
    """The programs of one task that stand in its row.

    Args:
        task: the task.
        known: what was tuned.
        target: of the task.
        runner: measures.
        programs: how many to draw at random.
    """

    def __init__(
        self, task: Task, known: Knowledge, target: Target, runner: Trials, programs: int
    ) -> None:
        self._task = task
        self._target = target
        self._runner = runner
        self._subject = Subject(task.key, task.group)
        derivation = derive(task.group, family(task.group), target)
        default, _ = first_choice(derivation)
        self._default = [] if default is None else [default]
        best = [record for record in known.best(task.key) if record.sketch != LIBRARY][:1]
        adopted = [candidate_of(task, record, target) for record in best]
        self._tuned = [candidate for candidate in adopted if candidate is not None]
        drawn = Sampler(derivation.sketches, seed=0).random(programs)
        self._drawn = [(each, runner.run(self._subject, each)) for each in drawn]
        self._ran: list[tuple[float, Candidate]] = []
        self._final: dict[str, list[Future[TuningRecord]]] = {}
        self._records: dict[str, TuningRecord] = {}

    def land(self) -> None:
        """Wait for the random programs."""
        for candidate, future in self._drawn:
            run_us = future.result().run_us
            if run_us is not None:
                self._ran.append((run_us, candidate))

    def time_again(self) -> None:
        """Begin to time what stands in the row."""
        fastest = [each for _, each in sorted(self._ran, key=lambda pair: pair[0])[:AGAIN]]
        chosen: dict[str, Sequence[Candidate | None]] = {
            "default": self._default,
            "random": fastest,
            "tuned": self._tuned,
            "library": [None],
        }
        for name, candidates in chosen.items():
            self._final[name] = [
                self._runner.run(self._subject, each, final=True) for each in candidates
            ]

    def finish(self) -> None:
        """Wait for that."""
        for name, futures in self._final.items():
            ran = [each for each in (f.result() for f in futures) if each.run_us is not None]
            if ran:
                self._records[name] = min(ran, key=lambda record: record.run_us or math.inf)

    @property
    def row(self) -> Row:
        found = self._records
        return Row(
            self._task.group.name,
            " -> ".join(node.op for node in self._task.group.compute),
            self._task.weight,
            {name: found[name].run_us if name in found else None for name in COLUMNS},
            roofline_us(self._task.group, self._target),
            group_floor_us(self._task.group, self._target),
            {
                name: {"sketch": record.sketch, **record.schedule}
                for name, record in found.items()
                if record.sketch != LIBRARY
            },
            (len(self._drawn), len(self._ran)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--db", type=Path, help="what `gtco tune` kept; the user's by default")
    parser.add_argument("--programs", type=int, default=64, help="drawn at random of each task")
    parser.add_argument("--target", help='"host" measures on the CPU: a rehearsal')
    given = parser.parse_args()
    options = Options.of(target=given.target)
    found = measured(locate(given.model), options, given.db, given.programs)
    result = {"experiment": "kernel_table", **provenance("kernel_table"), **found}
    publish(given.out, result, table(result), lambda: plot(result, given.out.with_suffix(".png")))


def measured(
    model: Located, options: Options, database: Path | None, programs: int
) -> dict[str, Any]:
    """The rows of `model`, dearest first, ready for JSON; tasks that cannot be measured are named.

    Args:
        model: what to compile.
        options: how.
        database: what `gtco tune` kept.
        programs: drawn at random of each task.
    """
    device = resolve_device(options.target)
    target = device.target
    captured = capture_for(model.module, model.args, model.kwargs, options)
    known = known_on(device, database)
    fused = fuse_known(known, rewritten(captured, options, target), target)
    left_out: dict[str, str] = {}
    with Trials(host=options.target == HOST) as runner:
        contests = {
            task.group.name: Contest(task, known, target, runner, programs)
            for task in tasks(fused, target)
        }
        for step in (Contest.land, Contest.time_again, Contest.finish):
            for name, contest in contests.items():
                try:
                    if name not in left_out:
                        step(contest)
                except MeasureError as error:
                    left_out[name] = str(error)
                    print(error, file=sys.stderr)
    rows = [contest.row for name, contest in contests.items() if name not in left_out]
    rows.sort(key=lambda row: -row.weight * min(filter(None, row.times_us.values()), default=0.0))
    return {
        "model": model.name,
        "device": known.device,
        "rows": [asdict(row) for row in rows],
        "left_out": left_out,
    }


def table(result: Mapping[str, Any]) -> str:
    """The rows as Markdown, and what all launches take together where each of them has a time."""
    header = ("task", "operators", "launches", *(f"{name}, us" for name in (*COLUMNS, *UNTIMED)))
    cells = []
    totals: dict[str, float] = dict.fromkeys((*COLUMNS, *UNTIMED), 0.0)
    for row in result["rows"]:
        times = {**row["times_us"], **{name: row[f"{name}_us"] for name in UNTIMED}}
        for name, time_us in times.items():
            totals[name] += row["weight"] * (float("nan") if time_us is None else time_us)
        shown = [microseconds(time_us) for time_us in times.values()]
        cells.append((row["name"], row["ops"], str(row["weight"]), *shown))
    sums = ["" if total != total else f"{total:.1f}" for total in totals.values()]
    launches = sum(row["weight"] for row in result["rows"])
    cells.append(("all", "", str(launches), *sums))
    return markdown(header, cells)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """A group of bars a task: what each of `COLUMNS` takes in one call of the model.

    The library's bars are cut off where they would leave no room for the others, and say how long
    they are.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    kernels = [
        row["weight"] * (row["times_us"][name] or 0.0) for row in rows for name in COLUMNS[:-1]
    ]
    edge = 1.3 * max(kernels, default=1.0)
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.6 * len(rows)))
    for number, name in enumerate(COLUMNS):
        places = [place + 0.2 * (number - 1.5) for place in range(len(rows))]
        widths = [row["weight"] * (row["times_us"][name] or 0.0) for row in rows]
        axis.barh(places, [min(width, edge) for width in widths], 0.2, label=name)
        for place, width in zip(places, widths, strict=True):
            if width > edge:
                text = f"{width:.0f} "
                axis.text(edge, place, text, ha="right", va="center", fontsize=6, color="white")
    for place, row in enumerate(rows):
        for name, style in zip(UNTIMED, ("k-", "k:"), strict=True):
            at = row["weight"] * row[f"{name}_us"]
            axis.plot([at, at], [place - 0.4, place + 0.4], style, linewidth=1)
    labels = [f"{row['name']}, {row['weight']} launches\n{row['ops'][:44]}" for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.set_xlim(0, edge)
    axis.set_xlabel("us in one call of the model; drawn through the draft price, dotted the floor")
    save_bars(figure, axis, result, path)


if __name__ == "__main__":
    main()
