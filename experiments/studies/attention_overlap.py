"""Is attention on `wgmma` faster where values are multiplied beside the next tile's softmax?

    python -m experiments.studies.attention_overlap OUT.json [--programs N] [--quick]

Of each workload the sketch's first N schedules of several tiles, and what records name of SETR, run
in both orders wherever the registers allow it, also where that leaves room for fewer blocks. Each
is judged on random inputs and timed in interleaved rounds, in chains of twelve dependent launches.

With --quick small workloads run on the CPU, in the host build: a rehearsal that claims no times.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.op_rivals import alternated, said
from experiments.publish import markdown, microseconds, provenance, publish
from experiments.studies.attention_copies import (
    Clock,
    Clocks,
    Workload,
    clock_on_cpu,
    clock_on_gpu,
)
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal, Schedule
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.runtime.device import resolve_device
from gtco.target import HOST, Target

APART, OVERLAPPED = "apart", "overlapped"
SETR: Schedule = {"block_q": 64, "block_k": 192, "parts": 1, "stages": 2}
"""What records name of SETR's attention."""
WORKLOADS: Mapping[str, Workload] = {
    "setr": Workload((1, 16), 576, 576, 64, packed=True),
    "detr_encoder": Workload((1, 8), 1050, 1050, 32),
    "vit_h": Workload((1, 16), 257, 257, 80, packed=True),
    "vit_b_384": Workload((1, 12), 577, 577, 64, packed=True),
    "diffusion_64": Workload((2, 8), 4096, 4096, 40),
    "diffusion_32": Workload((2, 8), 1024, 1024, 80),
    "video": Workload((1, 12), 1568, 1568, 64, packed=True),
}


class Apart(AttentionWgmma):
    """Never overlaps."""

    def overlaps(self, schedule: Schedule) -> bool:
        return False


class Overlapped(AttentionWgmma):
    """Overlaps whatever it costs."""

    def overlaps(self, schedule: Schedule) -> bool:
        return schedule["block_k"] < self.keys


KINDS: Mapping[str, type[AttentionWgmma]] = {APART: Apart, OVERLAPPED: Overlapped}
Row = dict[str, Any]


def label_of(kind: str, schedule: Schedule) -> str:
    """The order and the knobs."""
    return f"{kind}: " + " ".join(f"{knob}={value}" for knob, value in schedule.items())


def row(name: str, workload: Workload, target: Target, programs: int, clocks: Clocks) -> Row:
    """The result of one workload, ready for JSON."""
    group = workload.group()
    rule = AttentionWgmma(group, target)
    several = (each for each in rule.defaults() if each["block_k"] < rule.keys)
    chosen = [*itertools.islice(several, programs), *([SETR] if workload.keys > 192 else [])]
    timed: dict[str, Clock] = {}
    errors: dict[str, str] = {}
    found: list[Row] = []
    for schedule in chosen:
        said_by_rule = OVERLAPPED if rule.overlaps(schedule) else APART
        found.append({"schedule": dict(schedule), "rule": said_by_rule})
        for kind, sketch_of in KINDS.items():
            label = label_of(kind, schedule)
            try:
                sketch = sketch_of(group, target)
                clock = clocks(Candidate(sketch, sketch.emit(schedule)), group)
            except Illegal as refusal:
                errors[label] = str(refusal)
                continue
            except Exception as error:  # a program that fails spoils no other
                errors[label] = said(error)
                continue
            if clock is not None:
                timed[label] = clock
    rounds_us = alternated(timed)
    for each in found:
        for kind in KINDS:
            rounds = rounds_us.get(label_of(kind, each["schedule"]))
            each[f"{kind}_us"] = statistics.median(rounds) if rounds else None
    return {"workload": name, "sizes": str(workload), "programs": found, "errors": errors}


def table(rows: list[Row]) -> str:
    """A line a program."""
    cells = [
        (
            each["workload"],
            " ".join(map(str, program["schedule"].values())),
            program["rule"],
            *(microseconds(program[f"{kind}_us"]) for kind in KINDS),
        )
        for each in rows
        for program in each["programs"]
    ]
    knobs = "queries, keys, parts, stages"
    return markdown(("workload", knobs, "the rule says", *(f"{kind}, us" for kind in KINDS)), cells)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=4, help="schedules of each; 4")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU of sm_90a; --quick rehearses without one")
    device = resolve_device(HOST if given.quick else None)
    begun = time.monotonic()
    clocks: Clocks = clock_on_cpu
    if not given.quick:
        clocks = clock_on_gpu(torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for name, workload in WORKLOADS.items():
        sized = workload.small() if given.quick else workload
        rows.append(row(name, sized, device.target, given.programs, clocks))
    seconds = time.monotonic() - begun
    result = {"experiment": "attention_overlap", **provenance("studies.attention_overlap")}
    result |= {"device": device.name, "seconds": seconds, "rows": rows}
    publish(given.out, result, table(rows), lambda: None)


if __name__ == "__main__":
    main()
