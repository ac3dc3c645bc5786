"""`gtco tune`: a live table of the tasks on stderr, the summary on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gtco.locate import Located, UsageError
from gtco.options import Options
from gtco.tuning.result import TaskRow, TuneResult, TuneStatus
from gtco.tuning.state import FINISH_PART, FINISH_S
from gtco.tuning.tuner import tune

Db = Annotated[
    Path | None,
    typer.Option("--db", metavar="PATH", help="database of tuning records; the user's by default"),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=f"how long to search; the final timing takes {FINISH_PART:.0%} of that on top, "
        f"{FINISH_S:.0f} s at least",
    ),
]
TrialsFlag = Annotated[int | None, typer.Option(min=1, help="how many programs to measure at most")]
Seed = Annotated[int, typer.Option(help="seed of the search")]

Watch = Callable[[TuneStatus], None]
_LINES_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


def run(
    found: Located,
    options: Options,
    *,
    seconds: float | None,
    trials: int | None,
    database: Path | None,
    seed: int,
    err: Console,
) -> TuneResult:
    """Tune a located model, showing progress on `err`.

    Raises:
        UsageError: neither `seconds` nor `trials` is given.
    """
    if seconds is None and trials is None:
        raise UsageError("say when to stop tuning: --seconds 480, --trials 2000 or both")
    with _watching(err) as watch:
        return tune(
            found.module,
            found.args,
            found.kwargs,
            seconds=seconds,
            trials=trials,
            database=database,
            seed=seed,
            watch=watch,
            **options.keywords(),
        )


def show(out: Console, model: str, result: TuneResult, *, host: bool = False) -> None:
    """Print what tuning found, on a GPU or by the host build."""
    out.print(task_table(model, result.rows))
    phases = ", ".join(f"{name} {spent:.1f} s" for name, spent in result.phases.items())
    ran_out = {"seconds": "the time was up", "trials": "the trials were used up"}
    out.print(
        f"{result.trials} programs measured in {result.seconds:.0f} s, {result.failures} of them "
        f"failed; ended because {ran_out.get(result.stopped, result.stopped)}; then "
        f"{result.finish_seconds:.0f} s to time the best programs again, and whole plans"
    )
    out.print(f"in the measuring processes: {phases or 'nothing'}")
    if result.plans_us:
        replayed = ", ".join(f"{us:.1f}" for us in result.plans_us)
        out.print(f"whole plans replayed, us: {replayed}")
    if host:
        out.print("all of this was measured on the host build: it says nothing about a GPU")
        return
    before_us, after_us = result.replayed_us or (result.before_us, result.after_us)
    what = "the whole graph" if result.replayed_us else "predicted latency"
    out.print(f"{what}: {before_us:.1f} us before, {after_us:.1f} us now")


def task_table(title: str, rows: Sequence[TaskRow]) -> Table:
    """A row a task, those that take most of the model's time first."""
    table = Table(title=title, title_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("operators", max_width=40, no_wrap=True)
    for name in ("MFLOP", "weight", "best us", "from", "ATen us", "peak", "trials", "failures"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda each: -each.weight * (each.best_us or 0.0)):
        table.add_row(
            row.name,
            row.ops,
            f"{row.flops / 1e6:.1f}",
            str(row.weight) if row.weight else "other plan",
            _us(row.best_us),
            row.best,
            _us(row.library_us),
            "" if row.peak is None else f"{row.peak:.0%}",
            str(row.trials),
            str(row.failures),
        )
    return table


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:.2f}"


@contextmanager
def _watching(err: Console) -> Iterator[Watch]:
    """A live table on a terminal, a line now and then elsewhere."""
    if err.is_terminal:
        with Live(console=err, refresh_per_second=4, transient=True) as live:
            yield lambda status: live.update(task_table(_line(status), status.rows))
        return
    last = -_LINES_EVERY_S

    def tell(status: TuneStatus) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINES_EVERY_S:
            last = time.monotonic()
            err.print(_line(status), markup=False, highlight=False)

    yield tell


def _line(status: TuneStatus) -> str:
    known = [row.best_us for row in status.rows if row.best_us is not None]
    return (
        f"{status.phase}: {status.seconds:.0f} s, {status.trials} programs, "
        f"{len(known)} of {len(status.rows)} tasks measured"
    )
