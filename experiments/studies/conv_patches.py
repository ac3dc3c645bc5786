"""Convolutions of patches (`conv_mma`, `conv_wgmma`) beside the sketches whose rows are windows.

    python -m experiments.studies.conv_patches OUT.json [--programs N] [--quick]

Of each convolution N programs of each sketch, half of them its first defaults and the others drawn
at random, are judged and timed in chains, one after the other; the best of each sketch stands
beside its first default and what the draft model predicts of both. With --quick small ones run on
the CPU, in the host build: a rehearsal that claims no times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.op_rivals import outcomes
from experiments.publish import markdown, microseconds, provenance, publish
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.cost_model.measure import Subject
from gtco.cost_model.model import draft_us
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.cost_model.work import work_of
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.passes.tasks import workload_key
from gtco.runtime.device import resolve_device
from gtco.target import HOST, Target
from tests.groups import convolution

F16 = torch.float16
CONVOLUTIONS: Mapping[str, tuple[tuple[int, ...], int, int]] = {
    "a scan, 32 to 32": ((1, 64, 128, 128, 32), 32, 1),
    "a scan, 64 to 32": ((1, 64, 128, 128, 64), 32, 1),
    "a scan, 8 to 32": ((1, 64, 128, 128, 8), 32, 1),
    "a scan, 64 to 64": ((1, 32, 64, 64, 64), 64, 1),
    "a detector's first, 32 to 32": ((1, 320, 320, 32), 32, 1),
    "32 to 64": ((1, 320, 320, 32), 64, 1),
    "a U-Net's first, 64 to 64": ((1, 256, 256, 64), 64, 1),
    "a decoder's last, 128 to 128": ((1, 512, 512, 128), 128, 1),
    "a decoder's first, 512 to 512": ((1, 128, 128, 512), 512, 1),
    "ResNet's first stage": ((1, 56, 56, 64), 64, 1),
    "the same, batch 32": ((32, 56, 56, 64), 64, 1),
    "MobileNet's first": ((1, 225, 225, 16), 32, 2),
    "SegFormer's second, in steps": ((1, 128, 128, 32), 64, 2),
    "HRNet, 32 to 32": ((1, 56, 56, 32), 32, 1),
}
"""Name to the image, the columns and the stride; all kernels are 3 wide along each axis."""
SMALL = 9


def group_of(name: str, quick: bool) -> Group:
    """What is computed: a convolution, its bias and relu."""
    image, columns, stride = CONVOLUTIONS[name]
    axes = len(image) - 2
    if quick:
        image = (1, *(SMALL,) * axes, image[-1])
    given = {"stride": (stride,) * axes, "residual": False}
    return convolution(image, columns, (3,) * axes, F16, **given)


def drawn(group: Group, target: Target, programs: int) -> list[Candidate]:
    """The programs of each sketch, the first default ahead."""
    found: list[Candidate] = []
    for sketch in derive(group, family(group), target).sketches:
        sampler = Sampler((sketch,), seed=0)
        first = list(reversed(sampler.defaults(max(1, programs // 2))))
        found += [*reversed(first), *sampler.random(programs - len(first))]
    return list({each.key: each for each in found}.values())


def row(
    name: str, target: Target, asked: Iterable[tuple[Candidate, Future[TuningRecord]]]
) -> dict[str, Any]:
    """The result of one convolution, ready for JSON; waits for the search."""
    sketches: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for candidate, time_us, wrong in outcomes(asked):
        schedule = dict(candidate.program.schedule)
        if time_us is None:
            errors[f"{candidate.sketch.name} {schedule}"] = wrong
            continue
        drafted = draft_us(work_of(candidate), target)
        program = {"schedule": schedule, "run_us": time_us, "draft_us": drafted}
        of = sketches.setdefault(candidate.sketch.name, {"programs": []})
        of["programs"].append(program)
        of.setdefault("first", program)
        of["best"] = min((of.get("best", program), program), key=lambda each: each["run_us"])
    return {"convolution": name, "errors": errors, "sketches": sketches}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a sketch of a convolution."""
    cells = [
        (
            each["convolution"],
            sketch,
            microseconds(found["first"]["run_us"]),
            microseconds(found["first"]["draft_us"]),
            microseconds(found["best"]["run_us"]),
            microseconds(found["best"]["draft_us"]),
            " ".join(f"{knob}={value}" for knob, value in found["best"]["schedule"].items()),
        )
        for each in rows
        for sketch, found in each["sketches"].items()
    ]
    header = ("convolution", "sketch", "first default, us", "drafted", "best, us", "drafted", "of")
    return markdown(header, cells)


@torch.no_grad()
def study(
    experiment: str, doc: str | None, groups: Callable[[bool], Mapping[str, Callable[[], Group]]]
) -> None:
    """Measure `groups(quick)`, by name, as the command line of this module says."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=8, help="of each sketch")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    device = resolve_device(HOST if given.quick else None)
    # So few that small groups give each of them work.
    target = replace(device.target, sm_count=2) if given.quick else device.target
    begun, asked = time.monotonic(), {}
    with Trials(host=given.quick) as runner:
        for name, make in groups(given.quick).items():
            group = make()
            subject = Subject(workload_key(group, target), group)
            candidates = drawn(group, target, given.programs)
            asked[name] = [(each, runner.run(subject, each)) for each in candidates]
        rows = [row(name, target, futures) for name, futures in asked.items()]
    found = {"device": device.name, "seconds": time.monotonic() - begun, "rows": rows}
    result = {"experiment": experiment, **provenance(f"studies.{experiment}"), **found}
    publish(given.out, result, table(rows), lambda: None)


if __name__ == "__main__":
    study(
        "conv_patches",
        __doc__,
        lambda quick: {name: partial(group_of, name, quick) for name in CONVOLUTIONS},
    )
