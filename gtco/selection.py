"""How each group of a plan runs: with which sketch and schedule, or with ATen, and why."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from gtco.codegen.rules import Derivation, derive, sketch_of
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal, Schedule, Sketch
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.model import draft_us, roofline_us
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.similar import transferred
from gtco.cost_model.work import work_of
from gtco.ir.graph import FusedGraph, Group
from gtco.passes.legality import family
from gtco.passes.precision import fp32_products
from gtco.passes.tasks import Task, tasks, workload_digest
from gtco.runtime.plan import Launch
from gtco.target import Target

log = logging.getLogger("gtco.codegen")
tune_log = logging.getLogger("gtco.tune")

TRUSTED = 1.25
"""A schedule is transferred unless it took this many times as long there as the draft model
predicts of a default here: another workload's best may be slow for reasons of its own, such as
operands that have to be gathered."""


@dataclass(frozen=True)
class _Choice:
    """How a workload runs: a sketch and its schedule, or ATen (`sketch` is None)."""

    sketch: type[Sketch] | None
    schedule: Schedule
    source: str
    reason: str = ""
    run_us: float | None = None
    workload: str = ""


def select(fused: FusedGraph, target: Target, known: Knowledge) -> tuple[Launch, ...]:
    """How each group runs: the fastest schedule that is known on this device, else on its nearest
    kin, else that of a workload whose blocks do the same, else the sketches' first default for
    which the draft model predicts the least.

    Equal workloads are decided once. A group that no sketch takes, or for which the library was
    measured faster, becomes a call of its operators in ATen.
    """
    found = tasks(fused, target)
    launches = [launch for task in found for launch in launches_of(task, target, known)]
    generated = sum(launch.program is not None for launch in launches)
    log.info("%d groups for %s, %d of them generated", len(launches), target.arch, generated)
    return tuple(launches)


def launches_of(
    task: Task, target: Target, known: Knowledge, record: TuningRecord | None = None
) -> tuple[Launch, ...]:
    """How the groups of one task run: as `record` says, else as is best known."""
    kind = family(task.group)
    ranked = known.serving(task.key) if record is None else (record,)
    choice = _choose(task, derive(task.group, kind, target), known, ranked)
    log.debug(
        "%s, %d times: %s %s (%s)",
        task.group.name,
        len(task.groups),
        "aten" if choice.sketch is None else choice.sketch.name,
        dict(choice.schedule),
        choice.reason or choice.source,
    )
    launches = []
    for group in task.groups:
        program = None
        if choice.sketch is not None:
            program = sketch_of(choice.sketch, group, target).emit(choice.schedule)
        predicted = choice.run_us or roofline_us(group, target)
        launches.append(
            Launch(group, kind, program, choice.source, choice.reason, predicted, choice.workload)
        )
    return tuple(launches)


def _choose(
    task: Task, derivation: Derivation, known: Knowledge, ranked: Iterable[TuningRecord]
) -> _Choice:
    sketches = {sketch.name: sketch for sketch in derivation.sketches}
    workload = workload_digest(task.key)
    for record in ranked:
        source, run_us = known.source(record), known.time_us(record)
        if record.sketch == LIBRARY:
            reason = "the library was measured faster"
            return _Choice(None, {}, source, reason, run_us, workload)
        sketch = sketches.get(record.sketch)
        if sketch is None:
            continue
        try:
            sketch.emit(record.schedule)
        except Illegal as error:
            tune_log.warning("a record for %s is no longer legal: %s", task.group, error)
        else:
            return _Choice(type(sketch), record.schedule, source, "", run_us, workload)
    best, reason = first_choice(derivation)
    limit_us = TRUSTED * _draft_us(best) if best else math.inf
    near = transferred(known, task.key, derivation.sketches, limit_us)
    if near is not None:
        workload = workload_digest(near.workload)
        sketch = sketches[near.sketch]
        run_us = known.time_us(near)
        source = "transferred" + (f", {known.source(near)}" if run_us is None else "")
        return _Choice(type(sketch), near.schedule, source, "", run_us, workload)
    if best is None:
        return _Choice(None, {}, "fallback", reason, known.library_us(task.key))
    if _suits_the_library(task.group, best.sketch.target):
        reason = f"fp32 is predicted faster in the library than as tf32 on {best.program.arch}"
        return _Choice(None, {}, "default", reason, known.library_us(task.key))
    return _Choice(type(best.sketch), best.program.schedule, "default")


def first_choice(derivation: Derivation) -> tuple[Candidate | None, str]:
    """What runs where nothing was measured; where no sketch has it, None and why.

    The draft model decides between the first default of each sketch.
    """
    reasons = [derivation.reason] if derivation.refusals else []
    defaults: list[Candidate] = []
    for sketch in derivation.sketches:
        refusal = "it has no schedule for these shapes"
        for schedule in sketch.defaults():
            try:
                defaults.append(Candidate(sketch, sketch.emit(schedule)))
                break
            except Illegal as error:
                refusal = str(error)
        else:
            reasons.append(f"{sketch.name}: {refusal}")
    best = min(defaults, key=_draft_us, default=None)
    return best, "" if best else "; ".join(reasons)


def refusal(group: Group, target: Target) -> str | None:
    """Why no kernel is generated for `group`, or None if one is."""
    best, reason = first_choice(derive(group, family(group), target))
    return reason if best is None else None


def _draft_us(candidate: Candidate) -> float:
    return draft_us(work_of(candidate), candidate.sketch.target)


def _suits_the_library(group: Group, target: Target) -> bool:
    """Whether products of `group` are fp32, which `target` multiplies faster than parts of them."""
    return not target.splits_fp32 and any(fp32_products(node, group.graph) for node in group.nodes)
