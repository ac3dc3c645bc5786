"""What every result file says of its run, and tables as people read them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gtco.cli.env import environment

PEERS_PACKAGES = ("triton", "transformers", "timm", "onnxruntime", "onnxruntime-gpu")


def provenance(experiment: str) -> dict[str, Any]:
    """The command, versions and GPUs of this run."""
    return {"command": command(experiment), "environment": surroundings()}


def command(experiment: str) -> str:
    """How this process was started; of paths the last name alone."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join([f"python -m experiments.{experiment}", *words])


def surroundings() -> dict[str, Any]:
    """What `gtco env` says of versions and GPUs, the versions of what peers are made of, and the
    day in UTC."""
    facts = {name: fact for name, fact in environment().items() if name != "cache"}
    found = dict(facts["packages"])
    for name in PEERS_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**facts, "packages": found, "date": datetime.now(UTC).date().isoformat()}


def publish(path: Path, result: Mapping[str, Any], table: str, plot: Callable[[], None]) -> None:
    """Write `result` as JSON, print its table and plot it if matplotlib is there."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table, end="")
    try:
        plot()
    except ImportError:
        print("no plots without matplotlib: pip install 'gtco[experiments]'")


def save_bars(figure: Any, axis: Any, result: Mapping[str, Any], path: Path) -> None:
    """Save horizontal bars, the first on top, under the name of the model and the device."""
    axis.invert_yaxis()
    axis.set_title(f"{result['model']}, {result['device']}", fontsize=9)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, a line a row."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def microseconds(time_us: float | None) -> str:
    """A cell; empty where nothing was timed."""
    return "" if time_us is None else f"{time_us:.2f}"
