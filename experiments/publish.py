"""What every result file says of its run, and tables as people read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gtco.env import environment


def provenance(experiment: str) -> dict[str, Any]:
    """The command (of paths the last name alone), versions and GPUs of this run."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return {
        "command": " ".join([f"python -m experiments.{experiment}", *words]),
        "environment": {name: fact for name, fact in environment().items() if name != "cache"},
    }


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, a line a row."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def microseconds(time_us: float | None) -> str:
    """A cell; empty where nothing was timed."""
    return "" if time_us is None else f"{time_us:.2f}"
