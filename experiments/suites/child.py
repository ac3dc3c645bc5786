"""One row, in a process of its own: nothing that it does can spoil another.

    python -m experiments.suites.child '{"suite": "experiments.e2e", "row": "vit_b16", ...}'

Prints JSON lines: {"tell": progress} and at the end {"result"} or {"error"}.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from experiments.publish import surroundings
from experiments.suites.card import watched
from experiments.suites.row import AnyRow
from gtco.benchmarking.bench import bench
from gtco.benchmarking.rounds import Tell, Unusable, one_line
from gtco.benchmarking.tensorrt_peer import TensorRTPlace
from gtco.cli.base import plain
from gtco.locate import Located
from gtco.options import Options
from gtco.target import HOST


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a child is to do.

    Args:
        suite: the module that has its row, in its `SUITE`.
        row: its name.
        quick: rehearse a small relative on the CPU.
        rounds, calls: as for `bench`.
        left_out: contestants that do not take part.
        database: the user's records; None: where they usually are.
        python: has TensorRT; None: nobody does.
        engines: keeps TensorRT's engines.
    """

    suite: str
    row: str
    quick: bool
    rounds: int
    calls: int
    left_out: tuple[str, ...] = ()
    database: str | None = None
    python: str | None = None
    engines: str | None = None


def run(asked: Asked) -> dict[str, Any]:
    """The row's result, ready for JSON; of several sizes, those are its "points"."""
    suite = importlib.import_module(asked.suite).SUITE
    row = suite.row(asked.row)
    measure = suite.measure or partial(benched, row=row)
    started = time.time()
    points: dict[str, dict[str, Any]] = {}
    with watched() as card:
        for size, make in row.cases(asked.quick).items():
            say(tell=f"making {row.name} {size}".strip())
            try:
                points[size] = measure(make(), asked=asked, tell=lambda told: say(tell=told))
            except Unusable:
                raise
            except Exception as error:
                if not size:
                    raise
                points[size] = {"error": one_line(error)}
            gc.collect()  # the next one's memory is its own
    return {
        **points.get("", {"points": points, "failures": {}}),
        "rehearsal": asked.quick,
        "rounds": asked.rounds,
        "calls": asked.calls,
        "card": card,
        "environment": surroundings(),
        "seconds": time.time() - started,
    }


def benched(model: Located, row: AnyRow, asked: Asked, tell: Tell) -> dict[str, Any]:
    """`bench` of one model, ready for JSON."""
    options = Options.of(target=HOST if asked.quick else None)
    place = None
    if asked.python is not None:
        place = TensorRTPlace(Path(asked.python), Path(asked.engines) if asked.engines else None)
    found = bench(
        model,
        options,
        row.peers(asked.quick),
        without=asked.left_out,
        rounds=asked.rounds,
        calls=asked.calls,
        database=asked.database,
        tensorrt=place,
        tell=tell,
    )
    return {"options": dataclasses.asdict(options), **found.to_dict()}


def say(**content: Any) -> None:
    print(json.dumps(plain(content)), file=_REPLIES, flush=True)


_REPLIES = sys.stdout


def main() -> None:
    given = json.loads(sys.argv[1])
    asked = Asked(**{**given, "left_out": tuple(given["left_out"])})
    sys.stdout = sys.stderr  # whatever a library prints is no reply
    try:
        say(result=run(asked))
    except Exception as error:
        blamed = error.name if isinstance(error, Unusable) else None
        say(error=one_line(error), blamed=blamed)


if __name__ == "__main__":
    main()
