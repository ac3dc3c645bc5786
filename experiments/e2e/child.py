"""One row, in a process of its own: nothing that it does can spoil another.

    python -m experiments.e2e.child '{"row": "vit_b16", ...}'

Prints JSON lines: {"tell": progress} and at the end {"result"} or {"error"}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from experiments.e2e.card import watched
from experiments.e2e.rows import BY_NAME
from experiments.publish import surroundings
from gtco.benchmarking.bench import bench
from gtco.benchmarking.rounds import Unusable, one_line
from gtco.benchmarking.tensorrt_peer import TensorRTPlace
from gtco.cli.base import plain
from gtco.locate import locate
from gtco.options import Options
from gtco.target import HOST


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a child is to do.

    Args:
        row: its name.
        quick: rehearse a small relative on the CPU.
        rounds, calls: as for `bench`.
        left_out: contestants that do not take part.
        database: the user's records; None: where they usually are.
        python: has TensorRT; None: nobody does.
        engines: keeps TensorRT's engines.
    """

    row: str
    quick: bool
    rounds: int
    calls: int
    left_out: tuple[str, ...] = ()
    database: str | None = None
    python: str | None = None
    engines: str | None = None


def run(asked: Asked) -> dict[str, Any]:
    """The row's result, ready for JSON."""
    row = BY_NAME[asked.row]
    name, options = row.model(asked.quick), Options.of(target=HOST if asked.quick else None)
    started = time.time()
    say(tell="making the model")
    model = locate(name)
    place = None
    if asked.python is not None:
        place = TensorRTPlace(Path(asked.python), Path(asked.engines) if asked.engines else None)
    with watched() as card:
        result = bench(
            model,
            options,
            row.peers(asked.quick),
            without=asked.left_out,
            rounds=asked.rounds,
            calls=asked.calls,
            database=asked.database,
            tensorrt=place,
            tell=lambda message: say(tell=message),
        )
    return {
        "row": row.name,
        "model": name,
        "options": dataclasses.asdict(options),
        **result.to_dict(),
        "rounds": asked.rounds,
        "calls": asked.calls,
        "card": card,
        "environment": surroundings(),
        "seconds": time.time() - started,
    }


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
