"""Which of several plans or schedules of one model is fastest, by replaying it whole."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from gtco.codegen.sampler import Key, schedule_key
from gtco.compiler import plan_of
from gtco.cost_model.judge import random_values
from gtco.cost_model.knowledge import CHOSEN, Knowledge, is_chosen, same_tile
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.frontend.torch_export import Captured
from gtco.ir.graph import FusedGraph, Group
from gtco.options import Options
from gtco.passes.tasks import Task, tasks, workload_key
from gtco.runtime.executable import Executable, compile_programs
from gtco.runtime.host import HostExecutable
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch, Plan, PlanKnobs
from gtco.selection import launches_of
from gtco.target import Target

ROUNDS = 7
FEWEST = 2
"""Rounds after which a challenger is given up that took more than `HOPELESS` times as long in
each."""
HOPELESS = 1.01
REPLAYS = 20
ROOMS = (0.4, 0.5, 0.6, 1.0)
"""Parts of a multiprocessor's shared memory: schedules whose blocks take as much at most, and more
than the part before, count as one kind. What room one leaves decides which neighbour begins early
beside it."""
TRIED = 3
"""Schedules of each kind that the whole graph tries of a task."""
RINGS = 8
"""Schedules of the first one's tile that it tries besides, which differ in how the loop is fed: a
chain, half of whose weights lie in L2, says little of that."""
WITHIN = 1.25
"""Times the fastest's in a chain, up to which a schedule is tried."""
HOPE = 0.05
"""Part of its time that a task may save in the whole graph beyond what its chain says."""
MARGIN = 0.003
"""Part of the whole graph's time that another schedule has to save: less is noise."""

T = TypeVar("T")
Choices = Mapping[str, TuningRecord]
"""How each task runs, by its key."""


def fastest(
    plans: Iterable[Plan], captured: Captured, until: float = math.inf
) -> tuple[CompiledModule, tuple[float, ...]]:
    """The fastest of `plans` made ready, and the microseconds of each; () if there is one alone.

    Each challenger runs interleaved with the best so far, so no more than two are in memory, and
    for fewer rounds if it is hopeless; a time is scaled to the first plan's, whatever the clocks
    did between.

    Args:
        plans: of one model, the likely best first.
        captured: its signature.
        until: of the monotonic clock, when no other plan is begun.
    """
    rest = iter(plans)
    best = CompiledModule(next(rest), captured)
    times: list[float] = []
    best_us = 0.0
    while time.monotonic() < until and (plan := next(rest, None)) is not None:
        challenger = CompiledModule(plan, captured)
        ours, theirs = _interleaved(clock(best), clock(challenger))
        if not times:
            best_us = ours
            times.append(ours)
        times.append(best_us * theirs / ours)
        if theirs < ours:
            best, best_us = challenger, times[-1]
    return best, tuple(times)


class Variants:
    """Plans of one partition that differ in the schedules of its tasks.

    Args:
        fused: the partition.
        target: the architecture.
        options: the user's.
        known: what was measured: what there is to choose from.

    Attributes:
        found: the partition's tasks.
    """

    def __init__(
        self, fused: FusedGraph, target: Target, options: Options, known: Knowledge
    ) -> None:
        self.target = target
        self.known = known
        self.found = tasks(fused, target)
        self._fused = fused
        self._options = options
        self._made: dict[tuple[str, Key | None], tuple[Launch, ...]] = {}

    def __call__(self, choices: Choices, knobs: PlanKnobs) -> Plan:
        """The plan with these schedules and knobs."""
        every = [each for task in self.found for each in self._launches(task, choices)]
        return plan_of(self._fused, every, self.target, self._options, knobs)

    def compile(self, plans: Iterable[Plan]) -> None:
        """Put the kernels of `plans` into the cache: one plan after the other takes longer."""
        compile_programs(*plans)

    def _launches(self, task: Task, choices: Choices) -> tuple[Launch, ...]:
        """Made once of each record: a plan differs from the one before in few."""
        record = choices.get(task.key)
        key = (task.key, schedule_key(record.sketch, record.schedule) if record else None)
        if key not in self._made:
            self._made[key] = launches_of(task, self.target, self.known, record)
        return self._made[key]


def refine(
    variants: Variants, captured: Captured, knobs: PlanKnobs, until: float = math.inf
) -> tuple[Choices, PlanKnobs]:
    """The schedule of each task, and the plan's knobs, with which it is fastest.

    A kernel's neighbours differ from it: whether the next one's prologue finds room beside it, and
    what it leaves in L2, no chain of its copies shows. So the whole graph tries first all the
    schedules that it chose before kernels changed; then, of each task, the most hopeful first, the
    fastest schedules of each kind of room, and other rings of the tile that it has; and then the
    knobs, one after the other. Once more, if anything changed.

    Args:
        variants: of one partition.
        captured: the model's signature.
        knobs: to begin with.
        until: of the monotonic clock, when no other schedule is tried.
    """
    found, target = variants.found, variants.target
    ranked = {task.key: _contenders(variants.known.best(task.key), target) for task in found}
    chosen = {key: records[0] for key, records in ranked.items() if records}
    once = {key: each for key in chosen if (each := variants.known.once_chosen(key)) is not None}
    order = sorted(
        (task for task in found if task.key in chosen),
        key=lambda task: -task.weight * _hope_us(ranked[task.key]),
    )

    def with_record(key: str, record: TuningRecord) -> Plan:
        return variants({**chosen, key: record}, knobs)

    def with_knobs(knobs: PlanKnobs) -> Plan:
        return variants(chosen, knobs)

    def best_of(choices: Sequence[T], plan_with: Callable[[T], Plan]) -> T:
        """The first, unless another is clearly faster, of all and then of the two: of many, the
        luckiest leads."""

        def leader(of: Sequence[T]) -> T:
            _, times = fastest(map(plan_with, of), captured, until)
            ahead = bool(times) and min(times) < (1 - MARGIN) * times[0]
            return of[times.index(min(times))] if ahead else of[0]

        first = leader(choices)
        return first if first is choices[0] else leader([choices[0], first])

    if any(chosen[key] != each for key, each in once.items()):
        starts: list[Choices] = [chosen, {**chosen, **once}]
        faster = best_of(starts, lambda start: variants(start, knobs))
        chosen = dict(faster)
    compiled: PlanKnobs | None = None
    changed = True
    while changed and time.monotonic() < until:
        before = (dict(chosen), knobs)
        if knobs != compiled:
            variants.compile(with_record(task.key, r) for task in order for r in ranked[task.key])
            compiled = knobs
        for task in order:
            now = chosen[task.key]
            records = [now, *(each for each in ranked[task.key] if each != now)]
            if len(records) > 1:
                chosen[task.key] = best_of(records, partial(with_record, task.key))
        for name, values in PlanKnobs.CHOICES.items():
            others = (replace(knobs, **{name: value}) for value in values)
            knobs = best_of([knobs, *(each for each in others if each != knobs)], with_knobs)
        changed = before != (chosen, knobs)
    return chosen, knobs


def _hope_us(contenders: Sequence[TuningRecord]) -> float:
    """Microseconds that a task may save: what its fastest contender saves in a chain, and a part of
    what it takes, whatever a chain says."""
    now_us = contenders[0].run_us or 0.0
    return now_us - min(each.run_us or now_us for each in contenders) + HOPE * now_us


def _contenders(ranked: Sequence[TuningRecord], target: Target) -> list[TuningRecord]:
    """Of a task's records, those to try in the whole graph; the best first."""
    limit_us = WITHIN * min((record.run_us or math.inf for record in ranked), default=0.0)
    found: list[TuningRecord] = []
    left, rings = dict.fromkeys(ROOMS, TRIED), RINGS
    for record in ranked:
        taken = record.work.get("smem_bytes", 0) / target.smem_per_sm
        room = next(part for part in ROOMS if taken <= part)
        if found and (record.run_us or math.inf) > limit_us:
            continue
        if not found or left[room]:
            found.append(record)
            left[room] -= 1
        elif rings and same_tile(record, found[0]):
            found.append(record)
            rings -= 1
    return found


def choices_of(plan: Plan, known: Knowledge) -> Choices | None:
    """The records of what `plan` runs; None if a kernel of it was never judged, which could hang.

    ATen's calls may be without a record.
    """
    found = {}
    for launch in plan.launches:
        key, program = workload_key(launch.group, plan.target), launch.program
        how = (program.sketch, program.schedule) if program else (LIBRARY, {})
        record = known.record(key, *how)
        if record is not None and record.run_us is not None:
            found[key] = record
        elif program is not None:
            return None
    return found


def marked(known: Knowledge, chosen: Choices) -> Iterator[TuningRecord]:
    """The records that change if these are the ones that the whole graph chose."""
    for key, choice in chosen.items():
        for record in known.records(key):
            if record == choice and not is_chosen(record):
                yield replace(record, versions={**record.versions, **CHOSEN})
            elif record != choice and is_chosen(record):
                kept = {name: each for name, each in record.versions.items() if name not in CHOSEN}
                yield replace(record, versions=kept)


def before_and_after(before: CompiledModule, after: CompiledModule) -> tuple[float, float]:
    """Microseconds of a run of each, interleaved: a model as it was and what has become of it."""
    return _interleaved(clock(before), clock(after))


def whole_us(module: CompiledModule) -> float:
    """Microseconds of a run."""
    (times,) = in_turns([clock(module)])
    return statistics.median(times)


def _interleaved(best: Callable[[], float], challenger: Callable[[], float]) -> tuple[float, float]:
    """Microseconds of both in interleaved runs, fewer of them if the challenger is hopeless.

    Each of the challenger's runs counts as a part of the best's ahead of it and behind it: at the
    limit of its power a GPU changes its clock by a quarter within a tenth of a second. Medians of
    both were up to 7% off there, this is within 0.3% (experiments/notes/16-large_models.md).
    """
    for each in (best, challenger):
        each()  # in vain
    ours = [best()]
    parts: list[float] = []
    while len(parts) < ROUNDS and not (len(parts) == FEWEST and min(parts) > HOPELESS):
        their_us = challenger()
        ours.append(best())
        parts.append(2 * their_us / (ours[-2] + ours[-1]))
    our_us = statistics.median(ours)
    return our_us, our_us * statistics.median(parts)


def in_turns(clocks: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[list[float]]:
    """What each of `clocks` says in `rounds` alternating rounds; ahead of them, once in vain."""
    turns = [[each() for each in clocks] for _ in range(rounds + 1)]
    return [list(each) for each in zip(*turns[1:], strict=True)]


def clock(module: CompiledModule) -> Callable[[], float]:
    """Runs a module once (on the host) or many times; microseconds a run."""
    ready = module.prepare()
    if isinstance(ready, HostExecutable):
        values = random_values(Group("model", ready.plan.graph), torch.device("cpu"), seed=0)
        inputs = [values[name] for name in ready.plan.graph.inputs]

        def on_host() -> float:
            begin = time.perf_counter()
            ready(inputs, static_outputs=True)
            return (time.perf_counter() - begin) * 1e6

        return on_host
    return lambda: _replay_us(ready)


def _replay_us(ready: Executable) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPLAYS):
        ready.enqueue()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / REPLAYS
