"""SE-ResNet9 with Fixup over 10,000 inferences at batch 128, beside every peer, with a bar plot.

    python -m experiments.resnet OUT.jsonl [--quick] [--tensorrt-python PATH]

Ten rounds of 1000 calls, interleaved with the others'; as many single calls are synchronised. How a
table is run: `experiments.suites.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.e2e import ROWS as MODELS
from experiments.suites.plots import canvas, save
from experiments.suites.run import Suite, main
from experiments.suites.table import COLUMNS, devices, is_right, report, standing, us

ROWS = tuple(row for row in MODELS if row.name.startswith("se_resnet9"))


def bars(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A plot a model: milliseconds of every column, with the least and the most of the rounds."""
    right = [each for each in results if "error" not in each]
    figure, axes = canvas(6 * max(len(right), 1), 4, max(len(right), 1))
    for axis, each in zip(axes, right, strict=False):
        names = {column: standing(each, column) for column in COLUMNS}
        shown = {c: name for c, name in names.items() if name is not None and is_right(each, name)}
        heights = [us(each, name) / 1e3 for name in shown.values()]
        rounds = [each["timings"][name]["rounds_us"] for name in shown.values()]
        spread = [
            [abs(edge(times) / 1e3 - height) for times, height in zip(rounds, heights, strict=True)]
            for edge in (min, max)
        ]
        drawn = axis.barh(range(len(shown)), heights, xerr=spread)
        axis.bar_label(drawn, [f" {height:.3f}" for height in heights], fontsize=8)
        axis.set_yticks(range(len(shown)), list(shown), fontsize=8)
        axis.margins(x=0.15)  # the longest bar has its label in the frame
        axis.invert_yaxis()
        axis.set_xlabel(f"ms a call, of {each['rounds'] * each['calls']:,}")
        axis.set_title(f"{each['title']}, {devices([each])}", fontsize=9)
    save(figure, path)


SUITE = Suite("experiments.resnet", ROWS, report, bars, rounds=10, calls=1000)

if __name__ == "__main__":
    main(SUITE)
