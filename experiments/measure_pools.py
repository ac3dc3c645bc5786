"""What does the space look like? Measure a pool of programs of several models' tasks, once.

    python -m experiments.measure_pools FOLDER MODEL... [--groups N] [--programs N] [--seconds S]
        [--family NAME] [--db PATH]

MODEL is `module:function` as for the command line. Of each model, the N heaviest tasks (weight
times draft price) whose sketches have enough programs are measured: the default schedules first,
then random ones. These are GEMMs; --family takes tasks of one family, such as "attention", however
few programs they have, for the cost model to learn from (in a folder of their own: a search of so
few says nothing). Every program is compiled ahead in processes, checked, and timed in a chain of
twelve. A task is one file in FOLDER, written when it is done: the same command goes on after the
last. --db keeps the records in a database of the tuner's as well, which then knows the programs.
`experiments.replay_searches` replays searches on the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import CHAIN, HOST_CLOCK
from gtco.cost_model.measure import MeasureError, Subject
from gtco.cost_model.model import roofline_us
from gtco.cost_model.pool import SUFFIX, Entry, PoolTask, write_pool
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.cost_model.work import work_of
from gtco.locate import locate
from gtco.passes.legality import family
from gtco.passes.tasks import Task, tasks
from gtco.target import HOST, Target, find_target

AHEAD = 512
"""Programs under way: enough to compile and measure while the next task's are drawn."""
DEFAULTS = 32
"""Default schedules of the preferred sketch in each pool."""
SEED = 0


@dataclass(frozen=True)
class Draw:
    """A task of a model and the programs to measure of it, the defaults first."""

    name: str
    model: str
    task: Task
    programs: tuple[Candidate, ...]
    defaults: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--groups", type=int, default=3, help="tasks of each model")
    parser.add_argument("--programs", type=int, default=1100, help="programs of each task")
    parser.add_argument("--family", help="of the tasks, which may then have fewer programs")
    parser.add_argument("--seconds", type=float, help="begin no task after so long")
    parser.add_argument("--db", type=Path, help="a database that keeps the records too")
    parser.add_argument(
        "--target", default="sm_90a", help='"host" measures on the CPU: a rehearsal'
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    target = find_target(options.target)
    begin = time.monotonic()

    def wanted() -> Iterator[Draw]:
        limits = (options.groups, options.programs, options.family)
        for draw in draws(options.models, target, *limits):
            if path_of(draw).exists():
                print(f"{draw.name}: is there", flush=True)
            elif options.seconds and time.monotonic() - begin > options.seconds:
                print(f"{draw.name}: out of time; the same command goes on here", flush=True)
                return
            else:
                yield draw

    def path_of(draw: Draw) -> Path:
        return Path(options.folder / f"{draw.name}{SUFFIX}")

    with Trials(host=options.target == HOST) as trials, ExitStack() as stack:
        database = stack.enter_context(Database(options.db)) if options.db else None

        def keep(record: TuningRecord) -> None:
            if database is not None:
                database.add([record])

        for draw, pool in measured(wanted(), target, trials, keep):
            spent = f"{time.monotonic() - begin:.0f} s since the start"
            if isinstance(pool, MeasureError):
                print(f"{draw.name}: {pool}, {spent}", flush=True)
                continue
            write_pool(path_of(draw), pool)
            right = [each.run_us for each in pool.entries if each.run_us is not None]
            fastest = f"{min(right):.2f} us" if right else "nothing ran"
            print(
                f"{draw.name}: {len(right)} of {len(pool.entries)} ran, best {fastest}, library "
                f"{pool.library_us or float('nan'):.2f} us, {spent}",
                flush=True,
            )


def draws(
    models: Iterable[str], target: Target, groups: int, programs: int, kind: str | None = None
) -> Iterator[Draw]:
    """The heaviest tasks of each model that have `programs` programs; no workload twice.

    With `kind`, those of that family alone, with as many of the programs as there are.
    """
    seen: set[str] = set()
    for model in models:
        located = locate(model)
        fused = gtco.fuse(gtco.capture(located.module, located.args, located.kwargs), target=target)
        name = model.rpartition(":")[2].rpartition("/")[2].removesuffix(".onnx")
        heaviest = sorted(
            tasks(fused, target), key=lambda task: -task.weight * roofline_us(task.group, target)
        )
        found = 0
        for task in heaviest:
            if found == groups:
                break
            if task.key in seen or (kind and family(task.group) != kind):
                continue
            sampler = Sampler(derive(task.group, family(task.group), target).sketches, SEED)
            defaults = sampler.defaults(DEFAULTS)
            drawn = {each.key: each for each in [*defaults, *sampler.random(programs)]}
            if len(drawn) < (1 if kind else programs):
                print(f"{name} {task.group}: only {len(drawn)} programs", file=sys.stderr)
                continue
            seen.add(task.key)
            found += 1
            chosen = tuple(drawn.values())[:programs]
            yield Draw(f"{name}-{task.group.name}", name, task, chosen, len(defaults))


def measured(
    wanted: Iterable[Draw], target: Target, trials: Trials, keep: Callable[[TuningRecord], None]
) -> Iterator[tuple[Draw, PoolTask | MeasureError]]:
    """Compile, check and time every program of each draw, and the library beside them.

    While the last programs of a task are measured, the next one's compile. `keep` is called with
    each record.
    """
    broken: dict[str, MeasureError] = {}
    entries: list[Entry] = []
    library_us: float | None = None
    for draw, candidate, future in _under_way(wanted, trials, broken):
        try:
            record = future.result()
        except MeasureError as error:
            if draw.name not in broken:
                broken[draw.name] = error
                yield draw, error
            continue
        keep(record)
        if candidate is None:
            entries, library_us = [], record.run_us
            continue
        default = len(entries) < draw.defaults
        entries.append(Entry(work_of(candidate), record.run_us, record.error, default))
        if len(entries) % 200 == 0:
            print(f"{draw.name}: {len(entries)}", file=sys.stderr, flush=True)
        if len(entries) == len(draw.programs):
            yield (
                draw,
                PoolTask(
                    draw.name,
                    draw.model,
                    target.arch,
                    trials.device,
                    HOST_CLOCK if trials.host else CHAIN,
                    draw.task.key,
                    draw.task.weight,
                    library_us,
                    tuple(entries),
                ),
            )


def _under_way(
    wanted: Iterable[Draw], trials: Trials, broken: Container[str]
) -> Iterator[tuple[Draw, Candidate | None, Future[TuningRecord]]]:
    """The trials of every draw in order, its library's (None) first, begun `AHEAD` ahead.

    Nothing more is begun of a draw that is found `broken`.
    """
    waiting: deque[tuple[Draw, Candidate | None, Future[TuningRecord]]] = deque()
    for draw in wanted:
        subject = Subject(draw.task.key, draw.task.group)
        for program in (None, *draw.programs):
            if draw.name in broken:
                break
            waiting.append((draw, program, trials.run(subject, program)))
            if len(waiting) > AHEAD:
                yield waiting.popleft()
    yield from waiting


if __name__ == "__main__":
    main()
