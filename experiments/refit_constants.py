"""Which constants make the draft model say what was measured? Fits `gtco.constants` to records.

    python -m experiments.refit_constants [RECORDS.jsonl|POOL ...] [--device NAME] [--rounds 3]

POOL is a folder that `experiments.measure_pools` wrote.

Each number in turn is made larger and smaller, and stays where the draft's error over the records
of the device is the least: the root mean square of log(predicted / measured). Every fifth workload
is held out. Prints the table for `gtco/constants.py`, what changed, and the errors of both before
and after; a number that no record depends on stays as it is. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from gtco.constants import Constants
from gtco.cost_model.knowledge import Standing, is_of_arch, standing
from gtco.cost_model.model import draft_us
from gtco.cost_model.pool import PoolError, PoolTask, read_pool
from gtco.cost_model.record import (
    LIBRARY,
    PLAN,
    DatabaseError,
    TuningRecord,
    read_jsonl,
    shipped_records,
)
from gtco.cost_model.work import Work
from gtco.target import CARDS, Target

FACTORS = (0.7, 0.85, 0.95, 0.98, 1.02, 1.05, 1.18, 1.4)
"""Tried of each number in each round."""
LEAST_GAIN = 1e-4
"""Of the error: less moves no number."""
HELD_OUT = 5
"""Of so many workloads one."""
KEPT = (
    *("version", "card", "cluster_share", "largest_clusters"),
    *("fixed_boundaries", "matmul_efficiency", "slow_weights", "l2_share"),
)
"""Counts, and what the draft of one program does not read."""


@dataclass(frozen=True)
class Sample:
    """What a program does, and what it took."""

    workload: str
    work: Work
    run_us: float


def samples_of(records: Iterable[TuningRecord], device: str, arch: str) -> list[Sample]:
    """Those of generated kernels whose time counts on `device`."""
    found = []
    for record in records:
        if record.sketch in (LIBRARY, PLAN) or record.run_us is None or not record.work:
            continue
        if is_of_arch(record, arch) and standing(record, device) is Standing.OWN:
            work = Work.of_numbers(record.sketch, record.schedule, record.work)
            found.append(Sample(record.workload, work, record.run_us))
    return found


def samples_of_pool(tasks: Iterable[PoolTask], device: str, arch: str) -> list[Sample]:
    """Those of a measured pool's programs that ran on `device`."""
    return [
        Sample(task.workload, entry.work, entry.run_us)
        for task in tasks
        if (task.device, task.arch) == (device, arch)
        for entry in task.entries
        if entry.run_us is not None
    ]


def error(samples: Sequence[Sample], target: Target) -> float:
    """The root mean square of log(predicted / measured)."""
    squares = [math.log(draft_us(each.work, target) / each.run_us) ** 2 for each in samples]
    return math.sqrt(sum(squares) / max(1, len(squares)))


def refit(samples: Sequence[Sample], target: Target, rounds: int) -> Constants:
    """The constants with which the draft errs the least over `samples`."""
    best, least = target.constants, error(samples, target)
    for _ in range(rounds):
        before = least
        for name in (each.name for each in fields(Constants) if each.name not in KEPT):
            for tried in list(variants(best, name)):
                now = error(samples, replace(target, constants=tried))
                if now < least - LEAST_GAIN:
                    best, least = tried, now
        if least == before:
            break
    return best


def variants(constants: Constants, name: str) -> Iterable[Constants]:
    """`constants` with other values of one field, or of one entry of it."""
    value = getattr(constants, name)
    for factor in FACTORS:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                yield replace(constants, **{name: {**value, key: _rounded(entry * factor)}})
        else:
            yield replace(constants, **{name: _rounded(value * factor)})


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="the shipped ones by default")
    parser.add_argument("--arch", default="sm_90a", choices=CARDS)
    parser.add_argument("--device", help="its name in records; the architecture's usual card")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    card = CARDS[given.arch]
    name, target = given.device or card.name, card.target
    samples = [] if given.records else samples_of(shipped_records(), name, given.arch)
    try:
        for path in given.records:
            if path.is_dir():
                samples += samples_of_pool(read_pool(path), name, given.arch)
            else:
                samples += samples_of(read_jsonl(path), name, given.arch)
    except (DatabaseError, PoolError) as damage:
        parser.error(str(damage))
    if not samples:
        parser.error(f"no record of {name} whose time counts")
    held = [each for each in samples if zlib.crc32(each.workload.encode()) % HELD_OUT == 0]
    fitted = [each for each in samples if zlib.crc32(each.workload.encode()) % HELD_OUT]
    found = refit(fitted, target, given.rounds)
    after = replace(target, constants=found)
    moved = replace(found, version=target.constants.version + 1, card=name)
    print("Constants(")
    for field, value in asdict(moved).items():
        old = getattr(target.constants, field)
        print(f"    {field}={value!r}," + (f"  # was {old!r}" if value != old else ""))
    print(")")
    for what, part in (("fitted", fitted), ("held out", held)):
        print(
            f"{what}: {len(part)} programs, {error(part, target):.3f} -> {error(part, after):.3f}"
        )


if __name__ == "__main__":
    main()
