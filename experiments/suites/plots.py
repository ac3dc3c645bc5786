"""Plots of the tables; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.suites.table import COLUMNS, devices, is_right, standing, us


def canvas(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure for a file, and its axes, row by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False)
    return figure, axes.flat


def save(figure: Any, path: Path) -> None:
    """Write it and let go of it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def throughput(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Calls a second of every column, a group a row, on a logarithmic axis."""
    right = [each for each in results if "error" not in each]
    shown = [name for name in COLUMNS if any(standing(each, name) for each in right)]
    figure, (axis,) = canvas(3 + 2.5 * len(right), 4)
    width = 0.8 / max(len(shown), 1)
    for number, column in enumerate(shown):
        places, heights = [], []
        for place, each in enumerate(right):
            name = standing(each, column)
            if name is not None and is_right(each, name):
                places.append(place + (number - (len(shown) - 1) / 2) * width)
                heights.append(1e6 / us(each, name))
        axis.bar(places, heights, width, label=column)
    axis.set_yscale("log")
    axis.set_ylabel("calls a second")
    axis.set_xticks(range(len(right)), [each["title"] for each in right])
    axis.set_title(devices(right), fontsize=9)
    axis.legend(fontsize=7, ncols=2)
    save(figure, path)
