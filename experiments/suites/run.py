"""The command of a table: one process a row, and it goes on where it stopped.

    python -m experiments.e2e OUT.jsonl [--rows vit_b16,detr_e6] [--quick] [--tensorrt-python PATH]

Each row runs in a process of its own, contestants in alternating rounds within it, answers judged
first (`gtco bench`), with empty caches. A contestant that fails, hangs or takes its process along
is a dash with its reason, and the row runs again without it. OUT.jsonl gets a line a row; the same
command goes on after the last, and tries failed rows again. OUT.md is the table, OUT.png its plot.

--quick rehearses all of it on the CPU with small relatives of the models and claims no speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.publish import command
from experiments.suites.child import Asked
from experiments.suites.row import AnyRow
from gtco.benchmarking.contestants import GTCO, TENSORRT
from gtco.benchmarking.rounds import percentiles
from gtco.benchmarking.tensorrt_peer import read_trtexec
from gtco.cli.base import err
from gtco.locate import Located

NAMED = re.compile(r"(?:preparing|checking|round \d+ of \d+:) (.+)")
"""Lines of progress that end with a contestant's name: whom to blame for what comes next."""
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
Tell = Callable[[str], None]
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A table.

    Args:
        module: that has it under the name `SUITE`, and is its command.
        rows: in the order in which people see them.
        report: makes Markdown of the results.
        plot: draws them to a file, with matplotlib.
        rounds, calls: as for `bench`, by default.
        measure: makes a row's result in place of `bench`.
    """

    module: str
    rows: tuple[AnyRow, ...]
    report: Callable[[Sequence[Result]], str]
    plot: Callable[[Sequence[Result], Path], None] | None = None
    rounds: int = 5
    calls: int = 100
    measure: Callable[[Located, Asked, Tell], Result] | None = None

    def row(self, name: str) -> AnyRow:
        """The row called `name`."""
        return next(row for row in self.rows if row.name == name)


def run_row(row: AnyRow, asked: Asked, patience: float, tell: Tell) -> Result:
    """The result of `row`, of as many contestants as there is one; with "error" if there is none.

    Args:
        row: what to run.
        asked: how; leaves out what the row does, at least.
        patience: seconds that a contestant may take without a word.
        tell: called with progress.
    """
    without = {name: row.left_out.get(name, "left out") for name in asked.left_out}
    with tempfile.TemporaryDirectory() as folder:
        own = NO_GPU if asked.quick else dict.fromkeys(CACHES, folder)
        attempts = 0
        while True:
            attempts += 1
            found, blamed = ask_child(asked, own, patience, tell)
            if "error" not in found or blamed in (None, GTCO, *without):
                break
            without[blamed] = f"ended the process: {found['error']}"
            asked = dataclasses.replace(asked, left_out=tuple(without))
    if "error" not in found:
        found["failures"] |= without
        found["attempts"] = attempts  # caches are empty at the first alone
    return {"row": row.name, "title": row.title, **row.facts(asked.quick), **found}


def ask_child(
    asked: Asked, environment: Mapping[str, str], patience: float, tell: Tell
) -> tuple[Result, str | None]:
    """What a child says at last, and the contestant that it was at when it ended badly."""
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.suites.child", json.dumps(dataclasses.asdict(asked))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    said: deque[str] = deque(maxlen=3)
    lines: queue.Queue[str | None] = queue.Queue()
    readers = [
        threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, said.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    at: str | None = None
    try:
        while (line := lines.get(timeout=patience)) is not None:
            content = json.loads(line)
            if "result" in content:
                return content["result"], None
            if "error" in content:
                return {"error": content["error"]}, content["blamed"]
            tell(content["tell"])
            named = NAMED.fullmatch(content["tell"])
            at = named[1] if named else at
    except queue.Empty:
        return {"error": f"no word of {at} for {patience:.0f} s"}, at
    finally:
        process.kill()
        code = process.wait()
        readers[1].join(timeout=1)
    last = f": {' '.join(each for each in said if each)[:300]}" if said else ""
    return {"error": f"the process ended with {code}{last}"}, at


def _read(pipe: Any, take: Callable[[str | None], object]) -> None:
    with pipe:
        for line in pipe:
            take(line.strip())
    take(None)


def finished(out: Path) -> dict[str, Result]:
    """The last result of each row that is there."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {found["row"]: found for found in map(json.loads, lines)}


def main(suite: Suite, words: Sequence[str] | None = None) -> None:
    """Run the command of `suite`."""
    name = suite.module.rpartition(".")[2]
    rows = {row.name: row for row in suite.rows}
    given = arguments(suite, words)
    there = finished(given.out)
    if given.report:
        given.rows = []
    with progress(len(given.rows)) as bar, given.out.open("a") as lines:
        for each in given.rows:
            if each not in there or "error" in there[each]:
                asked = asked_of(given, suite, rows[each])
                found = run_row(rows[each], asked, given.patience, bar.tell)
                found["command"] = command(name)
                if given.trtexec is not None:
                    found |= of_trtexec(given.trtexec / f"{each}.json")
                there[each] = found
                lines.write(json.dumps(found) + "\n")
                lines.flush()
            bar.done(each)
    results = [there[each] for each in rows if each in there]
    text = suite.report(results)
    given.out.with_suffix(".md").write_text(text)
    print(text, end="")
    if suite.plot is not None and not given.quick:  # a rehearsal has no times to show
        try:
            suite.plot(results, given.out.with_suffix(".png"))
        except ImportError:
            print("no plot without matplotlib: pip install 'gtco[experiments]'", file=sys.stderr)


def arguments(suite: Suite, words: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says; ends the process where it makes no sense."""
    names = [row.name for row in suite.rows]
    parser = argparse.ArgumentParser(
        prog=f"python -m {suite.module}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--rounds", type=int, help=f"of each contestant: {suite.rounds}")
    parser.add_argument("--calls", type=int, help=f"of a turn: {suite.calls}")
    parser.add_argument("--db", help="records of tuning; by default the user's")
    parser.add_argument("--tensorrt-python", help="an interpreter that imports tensorrt")
    parser.add_argument("--engines", help="a folder that keeps TensorRT's engines")
    parser.add_argument("--trtexec", type=Path, help="a folder of ROW.json of --exportTimes")
    parser.add_argument("--every-mode", action="store_true", help="of Inductor, layouts included")
    parser.add_argument("--without", action="append", default=[], help="a contestant (repeat)")
    parser.add_argument("--patience", type=float, default=420.0, help="seconds for a contestant")
    parser.add_argument("--quick", action="store_true", help="rehearse on the CPU")
    parser.add_argument("--report", action="store_true", help="run nothing: table what is there")
    given = parser.parse_args(words)
    given.rows = [each.strip() for each in given.rows.split(",")] if given.rows else names
    if unknown := [each for each in given.rows if each not in names]:
        parser.error(f"--rows: there is no {', '.join(unknown)}; there are {', '.join(names)}")
    there = finished(given.out).values()
    if any(found.get("rehearsal", given.quick) != given.quick for found in there):
        parser.error(f"{given.out} holds rehearsals or is to: name another file")
    return given


def asked_of(given: argparse.Namespace, suite: Suite, row: AnyRow) -> Asked:
    """What a child is told to do."""
    left_out = () if given.every_mode or given.quick else tuple(row.left_out)
    return Asked(
        suite.module,
        row.name,
        given.quick,
        given.rounds or (1 if given.quick else suite.rounds),
        given.calls or (2 if given.quick else row.calls or suite.calls),
        tuple(dict.fromkeys((*left_out, *given.without))),
        given.db,
        given.tensorrt_python,
        given.engines,
    )


def of_trtexec(file: Path) -> Result:
    """What `trtexec` measured of a row, if it did; its answers were judged by nobody."""
    if not file.exists():
        return {}
    times = read_trtexec(file)
    return {"trtexec": {"calls": len(times), "us": percentiles(times), "contestant": TENSORRT}}


class progress:
    """A bar of rows on stderr, or a line a message where that is no terminal."""

    def __init__(self, rows: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal
        )
        self._task = self._bar.add_task("rows", total=rows)

    def __enter__(self) -> progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, message: str) -> None:
        if err.is_terminal:
            self._bar.update(self._task, description=message)
        else:
            err.print(message, markup=False, highlight=False)

    def done(self, name: str) -> None:
        self.tell(f"{name} is there")
        self._bar.advance(self._task)
