"""Is attention on `mma.sync` faster where TMA brings its operands than by `cp.async`?

    python -m experiments.studies.attention_copies OUT.json [--workloads A,B] [--programs N]
        [--quick]

Of each workload N tiles, half of them the sketch's first defaults and the others drawn at random,
are tried with both copies. Every program is judged against fp64 before it is timed. The best few of
each copy, the same tiles with the other copy and the best default of `attention_wgmma` are judged
again on fresh inputs and timed in interleaved rounds, in chains of twelve dependent launches.

With --quick small workloads run on the CPU, in the host build: a rehearsal that claims no times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.op_rivals import SEED, alternated, generated, outcomes, said
from experiments.publish import markdown, microseconds, provenance, publish
from gtco.codegen.sampler import Candidate, Key, Sampler
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.cost_model.judge import Judge, random_values
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import TuningRecord
from gtco.cost_model.trials import Trials
from gtco.ir.graph import Group
from gtco.passes.tasks import workload_key
from gtco.runtime.device import resolve_device
from gtco.runtime.host import run_on_host
from gtco.target import HOST, Target
from tests.attention_groups import F16, cross, packed

CP_ASYNC, TMA, WGMMA = "cp.async", "TMA", "attention_wgmma"
FINALISTS = 4
"""Of each copy."""
WGMMA_PROGRAMS = 6
"""First defaults of `attention_wgmma` that are tried."""
QUICK_PROGRAMS = 2


@dataclass(frozen=True)
class Workload:
    """One attention, in fp16.

    Args:
        lead: images and heads.
        queries, keys, width: of a head.
        packed: q, k and v are parts of one tensor, as a product makes them.
        mask: one for each image and head.
    """

    lead: tuple[int, int]
    queries: int
    keys: int
    width: int
    packed: bool = False
    mask: bool = False

    def group(self) -> Group:
        """What is computed."""
        images, heads = self.lead
        if self.packed:
            return packed(self.keys, heads, self.width, batch=images)
        kind = F16 if self.mask else None
        mask_lead = self.lead if self.mask else ()
        return cross(self.lead, self.queries, self.keys, self.width, mask=kind, mask_lead=mask_lead)

    def small(self) -> Workload:
        """Of few heads and keys, none a multiple of a tile."""
        lead, keys = (min(2, self.lead[0]), min(2, self.lead[1])), min(self.keys, 70)
        return replace(self, lead=lead, queries=keys if self.packed else 37, keys=keys)

    def __str__(self) -> str:
        images, heads = self.lead
        text = f"{images} x {heads} x {self.queries} x {self.keys}, heads of {self.width}"
        return f"{text}, a mask" if self.mask else text


WORKLOADS: Mapping[str, Workload] = {
    "detr_encoder": Workload((1, 8), 1050, 1050, 32),
    "detr_cross": Workload((1, 8), 100, 1050, 32),
    "swin_stage1": Workload((64, 3), 49, 49, 32, mask=True),
    "cvt_stage3": Workload((1, 6), 197, 197, 64),
    "cvt_stage3_strided": Workload((1, 6), 197, 50, 64),
    "vit_b": Workload((1, 12), 197, 197, 64, packed=True),
}


def copy_of(candidate: Candidate) -> str:
    """How a program gets its operands, or the sketch that has one way."""
    if candidate.sketch.name == AttentionWgmma.name:
        return WGMMA
    return TMA if candidate.program.schedule["tma"] else CP_ASYNC


Tile = tuple[tuple[str, int], ...]


def tile_of(schedule: Mapping[str, int]) -> Tile:
    """The knobs that both copies have."""
    return tuple(knob for knob in schedule.items() if knob[0] not in ("copy_warps", "tma"))


def name_of(candidate: Candidate) -> str:
    """The copy and the knobs."""
    knobs = " ".join(f"{knob}={value}" for knob, value in candidate.program.schedule.items())
    return f"{copy_of(candidate)}: {knobs}"


def drawn(group: Group, target: Target, programs: int) -> list[Candidate]:
    """`programs` tiles, each with both copies where both are legal."""
    sampler = Sampler((Attention(group, target),), seed=0)
    (sketch,) = sampler.sketches
    first = reversed(sampler.defaults(programs // 2))
    chosen = {tile_of(each.program.schedule): each for each in first}
    for each in sampler.random(4 * programs):
        if len(chosen) < programs:
            chosen.setdefault(tile_of(each.program.schedule), each)
    found: dict[object, Candidate] = {}
    for each in chosen.values():
        twin = sampler.make(sketch, {**each.program.schedule, "copy_warps": 0, "tma": 1})
        copied = sampler.make(sketch, {**each.program.schedule, "tma": 0})
        found |= {one.key: one for one in (copied, twin) if one is not None}
    try:
        best = Sampler((AttentionWgmma(group, target),), seed=0).defaults(WGMMA_PROGRAMS)
    except Illegal:
        best = []
    return [*found.values(), *best[: programs // 2]]


def finalists(ran: Iterable[tuple[float, Candidate]]) -> list[Candidate]:
    """The best of each copy, what else ran of their tiles, and the best of the other sketch."""
    ranked = [candidate for _, candidate in sorted(ran, key=lambda pair: pair[0])]
    best = [
        candidate
        for way in (CP_ASYNC, TMA)
        for candidate in [each for each in ranked if copy_of(each) == way][:FINALISTS]
    ]
    tiles = {tile_of(each.program.schedule) for each in best}
    both = [each for each in ranked if copy_of(each) != WGMMA]
    twins = [each for each in both if tile_of(each.program.schedule) in tiles]
    other = [each for each in ranked if copy_of(each) == WGMMA][:1]
    return list({each.key: each for each in (*best, *twins, *other)}.values())


Clock = Callable[[], float]
Clocks = Callable[[Candidate, Group], Clock | None]
"""Makes what times a program, when its answer is right; None for a rehearsal."""


def clock_on_gpu(device: torch.device) -> Clocks:
    def make(candidate: Candidate, group: Group) -> Clock:
        (maker,) = generated(candidate.program, group, device).values()
        return maker().time_us

    return make


def clock_on_cpu(candidate: Candidate, group: Group) -> None:
    values = random_values(group, torch.device("cpu"), SEED)
    if verdict := Judge(group, values)(run_on_host(candidate.program, group, values)):
        raise RuntimeError(verdict)


def medians_us(candidates: Iterable[Candidate], group: Group, clocks: Clocks) -> dict[Key, float]:
    """The time of each program, judged again and then timed in interleaved rounds; {} in a
    rehearsal."""
    timed: dict[Key, Clock] = {}
    for each in candidates:
        clock = clocks(each, group)
        if clock is not None:
            timed[each.key] = clock
    return {key: statistics.median(times) for key, times in alternated(timed).items()}


def row(
    name: str,
    workload: Workload,
    asked: Iterable[tuple[Candidate, Future[TuningRecord]]],
    clocks: Clocks,
) -> dict[str, Any]:
    """The result of one workload, ready for JSON; waits for the search."""
    group = workload.group()
    ran: list[tuple[float, Candidate]] = []
    errors: dict[str, str] = {}
    asked = list(asked)
    for candidate, time_us, wrong in outcomes(asked):
        if time_us is None:
            errors[name_of(candidate)] = wrong
        else:
            ran.append((time_us, candidate))
    last = {name_of(each): each for each in finalists(ran)}
    timed: dict[str, Clock] = {}
    for label, candidate in last.items():
        try:
            clock = clocks(candidate, group)
        except Exception as error:  # a program that fails spoils no other
            errors[label] = said(error)
            continue
        if clock is not None:
            timed[label] = clock
    rounds_us = alternated(timed)
    programs: list[dict[str, Any]] = [
        {
            "copy": copy_of(candidate),
            "schedule": dict(candidate.program.schedule),
            "rounds_us": rounds_us.get(label),
            "run_us": statistics.median(rounds_us[label]) if label in rounds_us else None,
        }
        for label, candidate in last.items()
    ]
    return {
        "workload": name,
        "sizes": str(workload),
        "tried": len(asked),
        "right": len(ran),
        "errors": errors,
        "programs": programs,
        "best_us": {
            way: min(
                (each["run_us"] for each in programs if each["copy"] == way and each["run_us"]),
                default=None,
            )
            for way in (CP_ASYNC, TMA, WGMMA)
        },
        "same_tile": same_tile(programs),
    }


def same_tile(programs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Times of both copies, for each tile that has both; of `cp.async` with the best copy warps."""
    times: dict[Tile, dict[str, float]] = {}
    for each in programs:
        if each["run_us"] is None or each["copy"] == WGMMA:
            continue
        found = times.setdefault(tile_of(each["schedule"]), {})
        found[each["copy"]] = min(each["run_us"], found.get(each["copy"], each["run_us"]))
    return [{"tile": dict(tile), **us} for tile, us in times.items() if len(us) == 2]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a workload."""
    header = ("workload", "sizes", "right, of", "cp.async, us", "TMA, us", "ratio", "wgmma, us",
              "ratios at the same tile")  # fmt: skip
    cells = []
    for each in rows:
        best = each["best_us"]
        copied, mapped = best[CP_ASYNC], best[TMA]
        cells.append(
            (
                each["workload"],
                each["sizes"],
                f"{each['right']} of {each['tried']}",
                microseconds(copied),
                microseconds(mapped),
                f"{mapped / copied:.3f}" if copied and mapped else "",
                microseconds(best[WGMMA]),
                ", ".join(f"{us[TMA] / us[CP_ASYNC]:.3f}" for us in each["same_tile"]),
            )
        )
    return markdown(header, cells)


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads a comma-separated list of some of `known`."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"takes {', '.join(known)}; not {name!r}")
        return names

    return read


def measured(names: Iterable[str], programs: int, quick: bool) -> dict[str, Any]:
    """The rows of these workloads, ready for JSON.

    Args:
        names: of `WORKLOADS`.
        programs: tiles of each.
        quick: on the CPU, small and without times.
    """
    device = resolve_device(HOST if quick else None)
    begun = time.monotonic()
    chosen = {name: WORKLOADS[name].small() if quick else WORKLOADS[name] for name in names}
    clocks: Clocks = clock_on_cpu
    if not quick:
        clocks = clock_on_gpu(torch.device("cuda", torch.cuda.current_device()))
    asked = {}
    with Trials(host=quick) as runner:
        for name, workload in chosen.items():
            group = workload.group()
            subject = Subject(workload_key(group, device.target), group)
            asked[name] = [
                (each, runner.run(subject, each)) for each in drawn(group, device.target, programs)
            ]
        for futures in asked.values():  # all, so that no other process uses the GPU behind this
            for _, future in futures:
                future.exception()
    rows = [row(name, workload, asked[name], clocks) for name, workload in chosen.items()]
    return {"device": device.name, "seconds": time.monotonic() - begun, "rows": rows}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", type=names_of(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--programs", type=int, help="tiles of each; 16, with --quick 2")
    parser.add_argument("--quick", action="store_true", help="a rehearsal on the CPU, no times")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU of sm_90a; --quick rehearses without one")
    programs = given.programs or (QUICK_PROGRAMS if given.quick else 16)
    found = measured(given.workloads, programs, given.quick)
    result = {"experiment": "attention_copies", **provenance("studies.attention_copies"), **found}
    publish(given.out, result, table(result["rows"]), lambda: None)


if __name__ == "__main__":
    main()
