"""What fusion and tuning gain, over AutoGTCO's nine models: `experiments.ablation` of each.

    python -m experiments.ablations OUT.jsonl [--rows vit_b16] [--quick] [--db RECORDS]

No fusion, greedy and dynamic programming, each with its sketches' defaults and tuned: of each
kernel as many programs, for a minute a model. With --db the measurements are kept, and a second run
goes on after them. How a table is run: `experiments.suites.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments import e2e
from experiments.ablation import DRAFT, GREEDY, MEASURED, NONE, ROUNDS, UNTUNED, ablate
from experiments.publish import markdown
from experiments.suites.child import Asked
from experiments.suites.plots import canvas, save
from experiments.suites.row import Row
from experiments.suites.run import Suite, main
from experiments.suites.table import DASH, dashes, devices, heading
from gtco.benchmarking.rounds import Tell
from gtco.cost_model.database import Database
from gtco.locate import Located
from gtco.options import Options
from gtco.target import HOST

PROGRAMS, SECONDS = 16, 60.0
"""Of each task, and of a model's search."""
ARMS = (*(f"{name}{UNTUNED}" for name in (NONE, GREEDY, DRAFT)), NONE, GREEDY, DRAFT, MEASURED)
ROWS = tuple(
    replace(row, left_out={}) for row in e2e.ROWS if isinstance(row, Row) and row.published
)


def measure(model: Located, asked: Asked, tell: Tell) -> dict[str, Any]:
    """The arms of one model; of a rehearsal one program a task."""
    tell(f"measuring the programs of {model.name}")
    options = Options.of(target=HOST if asked.quick else None)
    programs, rounds = (1, 2) if asked.quick else (PROGRAMS, ROUNDS)
    kept = nullcontext() if asked.database is None else Database(Path(asked.database))
    with torch.no_grad(), kept as database:
        found = ablate(model, options, programs, SECONDS, database, rounds, tell)
    return {**found, "failures": {}}


def report(results: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds of a replay of the whole graph, and launches; then the same as ratios."""
    right = [each for each in results if "error" not in each]
    parts = [heading(results), "## Microseconds, (launches)\n\n" + _times(right)]
    parts.append("## Times what dynamic programming by measured prices takes\n\n" + _ratios(right))
    return "\n".join([*parts, "## Dashes\n\n" + dashes(results)])


def _times(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in results:
        arms = [each["arms"][name] for name in ARMS]
        shown = ["ran" if each["rehearsal"] else f"{arm['median_us']:.0f}" for arm in arms]
        cells = [f"{time} ({arm['launches']})" for time, arm in zip(shown, arms, strict=True)]
        rows.append((each["title"], *cells))
    return markdown(("model", *ARMS), rows)


def _ratios(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in results:
        base = each["arms"][MEASURED]["median_us"]
        ratios = [each["arms"][name]["median_us"] / base for name in ARMS]
        cells = [DASH if each["rehearsal"] else f"{ratio:.2f}" for ratio in ratios]
        rows.append((each["title"], *cells))
    return markdown(("model", *ARMS), rows)


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A group of bars a model: each arm's time over that of the best plan."""
    right = [each for each in results if "error" not in each]
    figure, (axis,) = canvas(2 + 1.3 * len(right), 4)
    width = 0.8 / len(ARMS)
    for number, name in enumerate(ARMS):
        heights = [
            each["arms"][name]["median_us"] / each["arms"][MEASURED]["median_us"] for each in right
        ]
        places = [place + (number - (len(ARMS) - 1) / 2) * width for place in range(len(right))]
        axis.bar(places, heights, width, label=name)
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set_xticks(range(len(right)), [each["title"] for each in right], fontsize=7)
    axis.set_ylabel("times the best plan")
    axis.set_title(devices(right), fontsize=9)
    axis.legend(fontsize=7, ncols=2)
    save(figure, path)


SUITE = Suite("experiments.ablations", ROWS, report, plot, measure=measure)

if __name__ == "__main__":
    main(SUITE)
