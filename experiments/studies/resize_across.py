"""Is a bilinear resize faster where a thread has several pixels side by side (`across`)?

    python -m experiments.studies.resize_across OUT.json [--programs N] [--quick]

Of each resize N programs are judged and timed in chains, one after the other, and the best of each
`across` stands beside the others. With --quick small ones run on the CPU, in the host build: a
rehearsal that claims no times.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from experiments.op_rivals import outcomes
from experiments.publish import markdown, microseconds, provenance, publish
from experiments.studies.attention_copies import (
    Clocks,
    clock_on_cpu,
    clock_on_gpu,
    medians_us,
)
from gtco.codegen.sampler import Candidate, Key, Sampler
from gtco.codegen.sketches.resize import ACROSS, Resize
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.tasks import workload_key
from gtco.runtime.device import resolve_device
from gtco.target import HOST, Target

F16 = torch.float16
RESIZES: Mapping[str, tuple[tuple[int, ...], tuple[int, int], bool]] = {
    "SETR-PUP's first": ((1, 24, 24, 256), (48, 48), False),
    "SETR-PUP's second": ((1, 48, 48, 256), (96, 96), False),
    "SETR-PUP's third": ((1, 96, 96, 256), (192, 192), False),
    "SETR-PUP's last": ((1, 192, 192, 160), (384, 384), False),
    "SegFormer's heads": ((1, 16, 16, 256), (128, 128), False),
    "SegFormer's classes": ((1, 128, 128, 160), (512, 512), False),
    "DeepLab's classes": ((1, 65, 65, 24), (520, 520), False),
    "a depth head": ((1, 148, 148, 128), (296, 296), True),
    "a pyramid's step": ((8, 20, 20, 256), (40, 40), False),
    "a matte, one channel": ((1, 256, 256, 1), (1024, 1024), False),
}
"""Name to the image, the size of the result, and whether corners are aligned."""
FINALISTS = 3
"""Of each `across`."""


def group_of(name: str, quick: bool) -> Group:
    """What is computed: a resize alone."""
    image, size, align = RESIZES[name]
    if quick:
        image, size = (1, 5, 6, image[-1]), (11, 12)
    b = GraphBuilder()
    given = {"mode": "bilinear", "align_corners": align, "scales": (None, None)}
    return Group(
        "resize",
        b.build([b.add("resize", b.input("x", TensorSpec(image, F16)), size=size, **given)]),
    )


def across_of(candidate: Candidate) -> int:
    return candidate.program.schedule["across"]


def drawn(group: Group, target: Target, programs: int) -> list[Candidate]:
    """The first default and up to `programs` schedules of each `across`."""
    sketch = Resize(group, target)
    sampler = Sampler((sketch,), seed=0)
    default = dict(next(iter(sketch.defaults())))
    vectors, repeats, threads, across = (each.choices for each in sketch.knobs())
    first = sampler.make(sketch, default)
    assert first is not None, "a default is legal"
    found: dict[Key, Candidate] = {first.key: first}
    for pixels in across:
        made = []
        for knobs in ({}, *map(dict, _rest(vectors, repeats, threads))):
            schedule = {**default, **knobs, "across": pixels}
            if pixels > 1:
                schedule["repeat"] = 1
            candidate = sampler.make(sketch, schedule)
            if candidate is not None and candidate.key not in found:
                found[candidate.key] = candidate
                made.append(candidate)
            if len(made) == programs:
                break
    return list(found.values())


def _rest(*choices: Iterable[int]) -> Iterable[Iterable[tuple[str, int]]]:
    """Widest vectors first."""
    vectors, repeats, threads = (sorted(each, reverse=True) for each in choices)
    for vector, thread, repeat in itertools.product(vectors, threads, reversed(repeats)):
        yield (("vector", vector), ("repeat", repeat), ("threads", thread))


def row(
    name: str,
    group: Group,
    asked: list[tuple[Candidate, Future[TuningRecord]]],
    clocks: Clocks,
) -> dict[str, Any]:
    """The result of one resize, ready for JSON; waits for the search."""
    done = list(outcomes(asked))
    errors = [wrong for _, time_us, wrong in done if time_us is None]
    ran = sorted(
        (time_us, i, each) for i, (each, time_us, _) in enumerate(done) if time_us is not None
    )
    last = [
        each
        for pixels in ACROSS
        for each in [each for *_, each in ran if across_of(each) == pixels][:FINALISTS]
    ]
    first = asked[0][0]
    last = list({each.key: each for each in (first, *last)}.values())
    run_us = medians_us(last, group, clocks)
    best = {
        pixels: min(
            (run_us[each.key] for each in last if run_us and across_of(each) == pixels),
            default=None,
        )
        for pixels in ACROSS
    }
    finalists = [
        {"schedule": dict(each.program.schedule), "run_us": run_us.get(each.key)} for each in last
    ]
    return {
        "resize": name,
        "right": len(ran),
        "errors": errors,
        "default_us": run_us.get(first.key),
        "best_us": best,
        "finalists": finalists,
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a resize."""
    cells = [
        (
            each["resize"],
            f"{each['right']}, {len(each['errors'])}",
            microseconds(each["default_us"]),
            *(microseconds(each["best_us"][pixels]) for pixels in ACROSS),
        )
        for each in rows
    ]
    pixels = [f"{pixels} across, us" for pixels in ACROSS]
    return markdown(("resize", "right, wrong", "default, us", *pixels), cells)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=12, help="of each number of pixels")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --quick rehearses without one")
    device = resolve_device(HOST if given.quick else None)
    clocks: Clocks = clock_on_cpu
    if not given.quick:
        clocks = clock_on_gpu(torch.device("cuda", torch.cuda.current_device()))
    programs = min(given.programs, 2) if given.quick else given.programs
    begun, rows = time.monotonic(), []
    with Trials(host=given.quick) as runner:
        for name in RESIZES:
            group = group_of(name, given.quick)
            subject = Subject(workload_key(group, device.target), group)
            asked = [
                (each, runner.run(subject, each)) for each in drawn(group, device.target, programs)
            ]
            rows.append(row(name, group, asked, clocks))
    found = {"device": device.name, "seconds": time.monotonic() - begun, "rows": rows}
    result = {"experiment": "resize_across", **provenance("studies.resize_across"), **found}
    publish(given.out, result, table(rows), lambda: None)


if __name__ == "__main__":
    main()
