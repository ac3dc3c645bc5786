"""Residuals in `gemm_persistent`: read from device memory by the epilogue, or copied ahead.

    python -m experiments.studies.epilogue_copies OUT.json [--programs N] [--quick]

Of each product the N first defaults are judged and timed in chains, each with its residual copied
and not. With --quick small ones run on the CPU, in the host build: a rehearsal without times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.op_rivals import outcomes
from experiments.publish import markdown, microseconds, provenance, publish
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.cost_model.measure import Subject
from gtco.cost_model.model import draft_us
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.cost_model.work import work_of
from gtco.ir.graph import Group
from gtco.passes.tasks import workload_key
from gtco.runtime.device import resolve_device
from gtco.target import HOST, Target
from tests.groups import convolution, residual_linear

F16 = torch.float16
LINEARS: Mapping[str, tuple[int, int, int, bool]] = {
    "ResNet-50's first stage, batch 32": (100352, 64, 256, False),
    "the second, batch 32": (25088, 128, 512, False),
    "the third, batch 32": (6272, 256, 1024, False),
    "the first, batch 128": (401408, 64, 256, False),
    "the second, batch 128": (100352, 128, 512, False),
    "the third, batch 128": (25088, 256, 1024, False),
    "ViT-B's projection, batch 8": (1576, 768, 768, True),
    "its FC2, batch 8": (1576, 3072, 768, True),
    "its projection, batch 32": (6304, 768, 768, True),
    "its FC2, batch 32": (6304, 3072, 768, True),
    "SAM's FC2": (4096, 3072, 768, True),
    "a denoiser's projection": (8192, 320, 320, True),
}
"""Name to rows, K, columns and whether the next norm's statistics are made."""
DECODER = "a decoder's last, 3 x 3"


def group_of(name: str, quick: bool) -> Group:
    """What is computed: a product, its bias and an image that is added."""
    if name == DECODER:
        side = 17 if quick else 512
        return convolution((1, side, side, 128), 128, (3, 3), F16)
    rows, k, columns, stats = LINEARS[name]
    return residual_linear(300 if quick else rows, k, columns, F16, stats=stats)


def drawn(group: Group, target: Target, programs: int) -> list[Candidate]:
    """The first defaults, each with its image copied and not."""
    sketch = GemmPersistent(group, target)
    tiles = [schedule for schedule in sketch.defaults() if schedule["copies"]]
    return [
        Candidate(sketch, sketch.emit({**schedule, "copies": copies}))
        for schedule in tiles[:programs]
        for copies in (0, 1)
    ]


def row(
    name: str, target: Target, asked: Iterable[tuple[Candidate, Future[TuningRecord]]]
) -> dict[str, Any]:
    """The result of one product, ready for JSON; waits for the search."""
    programs, errors = [], {}
    for candidate, time_us, wrong in outcomes(asked):
        schedule = dict(candidate.program.schedule)
        if time_us is None:
            errors[str(schedule)] = wrong
            continue
        drafted = draft_us(work_of(candidate), target)
        programs.append({"schedule": schedule, "run_us": time_us, "draft_us": drafted})
    return {"product": name, "errors": errors, "programs": programs}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a product."""
    cells = []
    for each in rows:
        found = [
            [one for one in each["programs"] if one["schedule"]["copies"] == copies]
            for copies in (0, 1)
        ]
        if not all(found):
            continue
        best = [min(of, key=lambda one: one["run_us"]) for of in found]
        times = [microseconds(one["run_us"]) for one in (found[0][0], found[1][0], *best)]
        schedule = " ".join(f"{knob}={value}" for knob, value in best[1]["schedule"].items())
        cells.append((each["product"], *times, microseconds(best[1]["draft_us"]), schedule))
    header = ("product", "first default, read, us", "copied", "best, read", "copied", "drafted")
    return markdown((*header, "of"), cells)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=6, help="with and without copies")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    device = resolve_device(HOST if given.quick else None)
    target = replace(device.target, sm_count=2) if given.quick else device.target
    begun, asked = time.monotonic(), {}
    with Trials(host=given.quick) as runner:
        for name in (*LINEARS, DECODER):
            group = group_of(name, given.quick)
            subject = Subject(workload_key(group, target), group)
            candidates = drawn(group, target, given.programs)
            asked[name] = [(each, runner.run(subject, each)) for each in candidates]
        rows = [row(name, target, futures) for name, futures in asked.items()]
    found = {"device": device.name, "seconds": time.monotonic() - begun, "rows": rows}
    result = {"experiment": "epilogue_copies", **provenance("studies.epilogue_copies"), **found}
    publish(given.out, result, table(rows), lambda: None)


if __name__ == "__main__":
    main()
