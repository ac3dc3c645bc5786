"""`GTCO_LOGS=+fusion,codegen`: which of gtco's loggers speak, on the standard `logging`.

Each area has a logger `gtco.AREA`. A name in the list shows its messages of level INFO, a name with
a plus those of level DEBUG as well; without the variable only warnings are shown.
"""

from __future__ import annotations

import difflib
import logging
import os

from gtco.options import OptionError

AREAS = {
    "frontend": "what was captured, and when torch.compile compiles again",
    "fusion": "what each pass did, how the graph was cut and grouped",
    "codegen": "each workload's schedule, each kernel's compilation and the cubin cache",
    "runtime": "memory, CUDA graphs and artifacts",
    "tune": "measurements and records",
}
"""The loggers, as `gtco.AREA`, and what they tell."""


def configure() -> None:
    """Set the levels that `GTCO_LOGS` asks for; without the variable nothing changes.

    Messages go to the handlers that the program has set up, else to stderr.

    Raises:
        OptionError: an area that gtco does not have.
    """
    levels = parse(os.environ.get("GTCO_LOGS", ""))
    for area, level in levels.items():
        logging.getLogger(f"gtco.{area}").setLevel(level)
    root = logging.getLogger("gtco")
    if levels and not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)


def parse(text: str) -> dict[str, int]:
    """Area to level from a comma-separated list.

    Raises:
        OptionError: an area that gtco does not have, with the closest one.
    """
    levels = {}
    for word in filter(None, (each.strip() for each in text.split(","))):
        area = word.removeprefix("+")
        if area not in AREAS:
            close = difflib.get_close_matches(area, AREAS, 1, 0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(AREAS)}"
            raise OptionError(f"GTCO_LOGS has no area {area!r}; {hint}")
        levels[area] = logging.DEBUG if word.startswith("+") else logging.INFO
    return levels
