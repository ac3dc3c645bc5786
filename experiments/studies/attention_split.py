"""Is attention on `wgmma` faster where the blocks of a cluster share the keys, or where a block has
a rest of queries beside those of its warpgroups?

    python -m experiments.studies.attention_split OUT.json [--workloads A,B] [--kinds A,B]
        [--programs N] [--quick]

Of each workload the sketch's first N schedules of each kind are tried: of attention on `mma.sync`,
of so many blocks that share the keys (1: no other), of blocks with a rest. Every program is judged
against fp64 before it is timed. The best few of each kind are judged again on fresh inputs and
timed in interleaved rounds, in chains of dependent launches.

With --quick small workloads run on the CPU, in the host build: a rehearsal that claims no times.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from experiments.op_rivals import outcomes
from experiments.publish import markdown, microseconds, provenance, publish
from experiments.studies.attention_copies import (
    Clocks,
    Workload,
    clock_on_cpu,
    clock_on_gpu,
    medians_us,
    names_of,
)
from gtco.codegen.sampler import Candidate, Sampler
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_wgmma import SPLITS, AttentionWgmma
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.ir.graph import Group
from gtco.passes.tasks import workload_key
from gtco.runtime.device import resolve_device
from gtco.target import HOST, Target

FINALISTS = 4
"""Of each kind."""
MMA = "mma"
REST = "rest"
KINDS = (MMA, *map(str, SPLITS), REST)
MOST_DRAWN = 2000
"""Schedules of a workload that are looked at."""

WORKLOADS: Mapping[str, Workload] = {
    "vit_l": Workload((1, 16), 197, 197, 64, packed=True),
    "vit_b_batch_32": Workload((32, 12), 197, 197, 64, packed=True),
    "vit_h": Workload((1, 16), 257, 257, 80, packed=True),
    "setr": Workload((1, 16), 576, 576, 64, packed=True),
    "dit_xl": Workload((2, 16), 256, 256, 72, packed=True),
    "radio": Workload((1, 16), 1029, 1029, 80, packed=True),
    "glm": Workload((1, 12), 1536, 1536, 128),
    "qwen3_vl": Workload((1, 16), 1344, 1344, 72),
    "owlv2": Workload((1, 12), 2305, 2305, 64),
    "dinov2_l": Workload((1, 16), 1370, 1370, 64),
    "vit_b_512": Workload((1, 12), 1025, 1025, 64, packed=True),
    "detr_encoder": Workload((1, 8), 1050, 1050, 32),
    "detr_cross": Workload((1, 8), 100, 1050, 32),
    "sam_decoder": Workload((1, 8), 7, 4096, 16),
    "pooling_head": Workload((1, 12), 1, 576, 64),
    "denoiser": Workload((2, 8), 4096, 4096, 40),
    "sd3": Workload((1, 24), 4250, 4250, 64),
}


def kind_of(candidate: Candidate) -> str:
    """One of `KINDS`."""
    if candidate.sketch.name != AttentionWgmma.name:
        return MMA
    schedule = candidate.program.schedule
    return REST if schedule["rest"] else str(schedule["split"])


def drawn(group: Group, target: Target, programs: int, kinds: Iterable[str]) -> list[Candidate]:
    """The first `programs` schedules of each kind."""
    every: list[Candidate] = []
    for sketch in (Attention, AttentionWgmma):
        every += Sampler((sketch(group, target),), seed=0).defaults(MOST_DRAWN)
    return [
        each
        for kind in kinds
        for each in itertools.islice((each for each in every if kind_of(each) == kind), programs)
    ]


def row(
    name: str,
    workload: Workload,
    asked: list[tuple[Candidate, Future[TuningRecord]]],
    clocks: Clocks,
) -> dict[str, Any]:
    """The result of one workload, ready for JSON; waits for the search."""
    group = workload.group()
    tried = [
        {
            "kind": kind_of(each),
            "schedule": dict(each.program.schedule),
            "run_us": time_us,
            "error": wrong,
        }
        for each, time_us, wrong in outcomes(asked)
    ]
    ran = sorted(
        ((time_us, i) for i, (_, time_us, _) in enumerate(outcomes(asked)) if time_us is not None)
    )
    last: list[Candidate] = []
    for kind in KINDS:
        of_kind = [asked[i][0] for _, i in ran if kind_of(asked[i][0]) == kind]
        last += of_kind[:FINALISTS]
    run_us = medians_us(last, group, clocks)
    finalists = [
        {
            "kind": kind_of(each),
            "schedule": dict(each.program.schedule),
            "run_us": run_us[each.key],
        }
        for each in last
        if run_us
    ]
    best = {
        kind: min((each["run_us"] for each in finalists if each["kind"] == kind), default=None)
        for kind in KINDS
    }
    return {
        "workload": name,
        "sizes": str(workload),
        "tried": tried,
        "right": len(ran),
        "finalists": finalists,
        "best_us": best,
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a workload."""
    kinds = [f"{kind}, us" for kind in KINDS]
    cells = []
    for each in rows:
        times = [microseconds(each["best_us"][kind]) for kind in KINDS]
        right = f"{each['right']} of {len(each['tried'])}"
        cells.append((each["workload"], each["sizes"], right, *times))
    return markdown(("workload", "sizes", "right, of", *kinds), cells)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", type=names_of(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--kinds", type=names_of(KINDS), default=KINDS)
    parser.add_argument("--programs", type=int, default=12, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU of sm_90a; --quick rehearses without one")
    device = resolve_device(HOST if given.quick else None)
    clocks: Clocks = clock_on_cpu
    if not given.quick:
        clocks = clock_on_gpu(torch.device("cuda", torch.cuda.current_device()))
    programs = min(given.programs, 2) if given.quick else given.programs
    rows = []
    for name in given.workloads:
        workload = WORKLOADS[name].small() if given.quick else WORKLOADS[name]
        group = workload.group()
        with Trials(host=given.quick) as runner:
            subject = Subject(workload_key(group, device.target), group)
            asked = [
                (each, runner.run(subject, each))
                for each in drawn(group, device.target, programs, given.kinds)
            ]
            for _, future in asked:
                future.exception()
        rows.append(row(name, workload, asked, clocks))
        result = {
            "experiment": "attention_split",
            **provenance("studies.attention_split"),
            "device": device.name,
            "rows": rows,
        }
        publish(given.out, result, table(rows), lambda: None)


if __name__ == "__main__":
    main()
