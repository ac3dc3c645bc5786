"""What a test's child process needs to import this gtco, wherever it is installed."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(*ahead: Path, **more: str) -> dict[str, str]:
    """This process's, with `ahead` and this checkout first on the path, and `more`."""
    paths = [*map(str, ahead), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}
