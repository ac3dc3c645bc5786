"""`gtco db`: look at the database of tuning records, move records, check the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gtco.cli.tune import Db
from gtco.cost_model.database import Database, database_path
from gtco.cost_model.knowledge import Knowledge, Standing, is_chosen, standing
from gtco.cost_model.record import LIBRARY, PLAN, TuningRecord, write_jsonl
from gtco.locate import UsageError

Best = Annotated[
    int | None,
    typer.Option(
        "--best",
        metavar="N",
        min=1,
        help="only each workload's N fastest programs, the library's time and the best plan",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


class DamageFound(RuntimeError):
    """`gtco db verify` found something wrong."""


@dataclass(frozen=True)
class Row:
    """The records of one workload on one device.

    Args:
        work: its operators and the first thing it reads.
        device: the GPU's name.
        records: how many there are.
        failures: those of programs that failed.
        stale: those whose time no longer counts: of older generated code.
        best_us: the fastest time that still counts, or None.
        best: what took it: a sketch's name or "library".
    """

    work: str
    device: str
    records: int
    failures: int
    stale: int
    best_us: float | None
    best: str


def make_app(out: Console, print_json: Callable[..., None]) -> typer.Typer:
    """The commands, which print on `out` or with `print_json`."""
    app = typer.Typer(no_args_is_help=True, help="Tuning records: show, move, check.")

    @app.command("show")
    def show(*, database: Db = None, as_json: Json = False) -> None:
        """The records by workload: how many, how many failed, the fastest."""
        with _existing(database) as opened:
            rows = summarize(list(opened.records()))
            path = opened.path
        if as_json:
            print_json(database=str(path), workloads=[asdict(row) for row in rows])
            return
        if not rows:
            _say(out, f"{path} holds no records; gtco tune makes them")
            return
        table = Table(title=f"{path}: {sum(row.records for row in rows)} records")
        for name in ("work", "device"):
            table.add_column(name, overflow="fold")
        for name in ("records", "failed", "stale", "best us"):
            table.add_column(name, justify="right")
        table.add_column("by")
        for row in rows:
            best = "" if row.best_us is None else f"{row.best_us:.2f}"
            numbers = (str(n) for n in (row.records, row.failures, row.stale))
            table.add_row(row.work, row.device, *numbers, best, row.best)
        out.print(table, markup=False)

    @app.command("export")
    def export(
        file: Annotated[Path, typer.Argument(help="JSONL file to write")],
        *,
        best: Best = None,
        database: Db = None,
    ) -> None:
        """Write the records as lines of JSON: all, or the best alone."""
        with _existing(database) as opened:
            records = opened.records()
            chosen = records if best is None else fastest(records, best)
            _say(out, f"wrote {write_jsonl(file, chosen)} records to {file}")

    @app.command("import")
    def import_(
        file: Annotated[Path, typer.Argument(help="JSONL file to read")], *, database: Db = None
    ) -> None:
        """Add the records of a JSONL file.

        Those that are there already stay as they are.
        """
        with Database(database) as opened:
            _say(out, f"added {opened.import_jsonl(file)} records to {opened.path}")

    @app.command("merge")
    def merge(
        other: Annotated[Path, typer.Argument(help="another database")], *, database: Db = None
    ) -> None:
        """Add the records of another database.

        Those that are there already stay as they are.
        """
        with _existing(other) as source, Database(database) as opened:
            _say(out, f"added {opened.merge(source.records())} records to {opened.path}")

    @app.command("verify")
    def verify(*, database: Db = None) -> None:
        """Check every page and every record's checksum.

        The exit code is 1 if something is wrong.
        """
        with _existing(database) as opened:
            problems = opened.verify()
            if problems:
                raise DamageFound("\n  ".join([f"{opened.path} is damaged:", *problems]))
            _say(out, f"{opened.path} is sound: {sum(1 for _ in opened.records())} records")

    return app


def fastest(records: Iterable[TuningRecord], count: int) -> list[TuningRecord]:
    """The records that a compile needs, in their order.

    Of each workload and device the program that a whole graph chose and the fastest others of the
    code of now, `count` in all, the library's time and the plan that was the fastest.
    """
    every = list(records)
    places: dict[tuple[str, str], list[TuningRecord]] = {}
    for record in every:
        if record.run_us is not None and standing(record, record.device) is Standing.OWN:
            places.setdefault((record.workload, record.device), []).append(record)
    kept: set[int] = set()
    for alike in places.values():
        programs = [record for record in alike if record.sketch not in (LIBRARY, PLAN)]
        programs.sort(key=lambda record: (not is_chosen(record), record.run_us))
        others = (record for record in alike if record.sketch in (LIBRARY, PLAN))
        kept.update(id(record) for record in (*programs[:count], *others))
    return [record for record in every if id(record) in kept]


def summarize(records: list[TuningRecord]) -> list[Row]:
    """A row a workload and device, the newest workload last."""
    found: dict[tuple[str, str], list[TuningRecord]] = {}
    for record in records:
        found.setdefault((record.workload, record.device), []).append(record)
    rows = []
    for (workload, device), alike in found.items():
        best = Knowledge(device, own=alike).best(workload)
        rows.append(
            Row(
                describe(workload),
                device,
                len(alike),
                sum(record.run_us is None for record in alike),
                sum(standing(r, device) is not Standing.OWN for r in alike),
                best[0].run_us if best else None,
                best[0].sketch if best else "",
            )
        )
    return rows


def describe(workload: str) -> str:
    """A workload in a line: its operators, and the shapes of what it reads."""
    try:
        content = json.loads(workload)
        if content.get("scope") == PLAN:
            return f"a whole model of {len(content['nodes'])} operators"
        ops = " ".join(node[0] for node in content["nodes"])
        shapes = ", ".join(re.sub(r"\s", "", spec) for spec, _ in content["externals"][:2])
        return f"{ops} of {shapes}"
    except (ValueError, LookupError, TypeError):
        return workload[:60]


def _existing(path: Path | None) -> Database:
    """A database that is there; looking at one does not make it.

    Raises:
        UsageError: it is not there.
    """
    chosen = database_path() if path is None else path
    if not chosen.exists():
        raise UsageError(f"there is no database {chosen}: `gtco tune` makes one")
    return Database(chosen)


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
