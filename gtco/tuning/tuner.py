"""Tune a model: search the programs of its tasks on the device, then decide the fusion again."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gtco.compiler import capture_for, fuse_known, fuse_with, plan_with, rewritten
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import (
    CHOSEN,
    HOST_CLOCK,
    RAN_WITH,
    REPLAYED,
    VERSIONS,
    Knowledge,
    known_on,
    ran_with,
)
from gtco.cost_model.plans import plan_key, plan_knobs, plan_work
from gtco.cost_model.ranker import shipped_ranker
from gtco.cost_model.record import PLAN, DatabaseError, TuningRecord
from gtco.cost_model.trials import Trials
from gtco.frontend.torch_export import Captured
from gtco.ir.graph import FusedGraph
from gtco.models import accepted
from gtco.options import OptionError, Options, database_file
from gtco.passes.tasks import Task, tasks
from gtco.runtime.device import resolve_device
from gtco.runtime.executable import GpuMemoryError
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Plan, PlanKnobs
from gtco.selection import select
from gtco.target import HOST, Device, Target, TargetError
from gtco.tuning.measuring import Measuring
from gtco.tuning.replay import (
    Variants,
    before_and_after,
    choices_of,
    fastest,
    marked,
    refine,
    whole_us,
)
from gtco.tuning.result import TuneResult, TuneStatus, row_of
from gtco.tuning.state import Finish, Limits, TaskState, wanted_finals, wanted_rings

log = logging.getLogger("gtco.tune")

ROUNDS = (0.4, 0.7, 1.0)
"""Parts of the time and of the trials after which the fusion is decided again: measured prices may
prefer groups that were no task so far."""
PLANS = 16
"""Plans whose tasks are tuned, and that may be replayed whole."""
WORTH_REPLAYING = 1.15
"""Predicted times the best plan's, up to which a plan is replayed."""
HEAVIEST = 6
"""Tasks of which other rings than the best's are measured in the end."""
LONGSHOT = 0.01
"""Part of the model's time that a task of another plan may save although its price says no."""


def tune(
    model: Any,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seconds: float | None = None,
    trials: int | None = None,
    database: str | os.PathLike[str] | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    watch: Callable[[TuneStatus], None] | None = None,
    **options: Any,
) -> TuneResult:
    """Search for fast programs of `model` on the GPU here, and remember what was measured.

    Every program is checked before it is timed. Ctrl-C ends the search and keeps the best; the
    same call again goes on where this one ended.

    Args:
        model, args, kwargs, shapes: as for `gtco.compile`.
        seconds: when to end the search, counted from when the model is captured; two fifths of
            it, or 40, more go to final timing and whole graphs. None for no limit but `trials`.
        trials: how many programs to measure at most; None for no limit but `seconds`.
        database: the file that keeps the records; the user's own by default.
        seed: of the search.
        executor: where `gtco.cost_model.measure.measure` runs; by default in a process for each
            GPU of this machine.
        watch: called several times a second.
        **options: the fields of `gtco.Options`. With target="host" the host build is measured:
            that checks the tuner, and says nothing of a GPU.

    Raises:
        CaptureError, OptionError: as for `gtco.compile`.
        OptionError: neither `seconds` nor `trials` is given, or one is below 0.
        TargetError: no GPU is here, or not the target's.
        DatabaseError: the database cannot be opened or written to.
    """
    if seconds is None and trials is None:
        raise OptionError("say when to stop tuning: seconds=480, trials=2000 or both")
    for name, limit in (("seconds", seconds), ("trials", trials)):
        if limit is not None and not (isinstance(limit, (int, float)) and limit >= 0):
            raise OptionError(f"{name} is a limit, not {limit!r}; pass a number from 0 on")
    chosen = Options.of(**options)
    device = _device_here(chosen)
    module, args, kwargs = accepted(model, args, kwargs, shapes)
    with Database(database_file(database)) as opened:
        if opened.read_only:
            raise DatabaseError(
                f"{opened.path} is read-only, and what tuning finds could not be kept: make it "
                "writable, or name another file with database= (--db)"
            )
        known = known_on(device, opened.path)
        with Trials(host=chosen.target == HOST, executor=executor) as runner:  # starts processes
            captured = capture_for(module, args, kwargs, chosen)
            limits = Limits(
                time.monotonic(),
                math.inf if seconds is None else seconds,
                math.inf if trials is None else trials,
            )
            ranker = shipped_ranker(device.target)
            measuring = Measuring(device.target, opened, known, runner, limits, ranker, seed, watch)
            tuner = _Tuner(captured, device.target, chosen, known, runner, limits, measuring)
            return tuner.run()


def _device_here(options: Options) -> Device:
    """The card to tune for.

    Raises:
        TargetError: it cannot be measured here.
    """
    if options.target != HOST and not torch.cuda.is_available():
        raise TargetError(
            "tuning measures on the GPU that it is for, and no CUDA GPU is here; "
            'target="host" (--target host) tries the tuner on the CPU'
        )
    device = resolve_device(options.target)
    if options.target != HOST and torch.cuda.get_device_capability() != device.target.capability:
        raise TargetError(f"the GPU here is not {device.arch}: tune without target=")
    return device


class _Tuner:
    """One call of `tune`."""

    def __init__(
        self,
        captured: Captured,
        target: Target,
        options: Options,
        known: Knowledge,
        runner: Trials,
        limits: Limits,
        measuring: Measuring,
    ) -> None:
        self._captured = captured
        self._graph = rewritten(captured, options, target)
        self._target = target
        self._options = options
        self._known = known
        self._runner = runner
        self._limits = limits
        self._finish = Finish()
        self._measuring = measuring

    def run(self) -> TuneResult:
        (before,) = self._plans([self._plan()])
        knobs_before = self._knobs(before.fused)
        stopped = ""
        try:
            for number, part in enumerate(ROUNDS):
                if number:
                    self._plan()
                stopped = self._measuring.search(self._limits.part(part))
        except KeyboardInterrupt:
            stopped = "interrupted"
        searched = time.monotonic()
        if self._limits.seconds < math.inf:
            self._finish = Finish.of(searched, self._limits.seconds)
        try:
            if stopped != "interrupted":
                self._plan()
                self._final()
        except KeyboardInterrupt:
            stopped = "interrupted"
        replayed = None
        self._measuring.show("deciding the fusion")
        plans = self._worth_replaying()
        self._runner.close()  # nothing else may run while whole plans are timed
        best, plans_us = fastest(plans, self._captured, self._finish.plans)
        if stopped != "interrupted" and not self._runner.host:  # whose times say little
            best, replayed = self._decided(before, knobs_before, best.graph)
        elif plans_us:
            self._remember(best.graph, self._knobs(best.graph), min(plans_us))
        self._adopt(best.graph)
        self._measuring.warn_of_unsaved()
        rows = tuple(state.row for state in self._measuring.states.values())
        return TuneResult(
            compiled=best,
            rows=rows,
            before_us=_predicted(before),
            after_us=_predicted(best),
            replayed_us=replayed,
            plans_us=plans_us,
            trials=self._measuring.trials,
            failures=sum(row.failures for row in rows),
            seconds=searched - self._limits.begun,
            finish_seconds=time.monotonic() - searched,
            phases=dict(self._runner.seconds),
            stopped=stopped or "no more programs",
        )

    # -- plans and tasks ---------------------------------------------------------------------------

    def _plan(self) -> FusedGraph:
        """The best plan by what is known now; its tasks, and those worth a try, are searched."""
        best = fuse_known(self._known, self._graph, self._target)
        hopes = fuse_with(self._known, self._graph, self._target, PLANS, explore=True)
        self._adopt(best, hopes)
        self._hope(best, hopes)
        return best

    def _hope(self, best: FusedGraph, hopes: Sequence[FusedGraph]) -> None:
        """What each task may save if the best plan with it takes the place of `best`."""
        every = [state.task for state in self._measuring.states.values()]
        price = self._known.price(self._target, every, explore=True)
        prices = {task.key: price(task.group) for task in every}

        def cost_us(found: Sequence[Task]) -> float:
            return sum(task.weight * prices[task.key] for task in found)

        now_us = cost_us(tasks(best, self._target))
        for state in self._measuring.states.values():
            state.saving_us = LONGSHOT * now_us
        for hope in hopes:
            found = tasks(hope, self._target)
            saving_us = now_us - cost_us(found)
            for task in found:
                state = self._measuring.states[task.key]
                state.saving_us = max(state.saving_us, saving_us)

    def _adopt(self, best: FusedGraph, others: Iterable[FusedGraph] = ()) -> None:
        """Make sure that each task of these plans has a state; weights are those of the best."""
        for state in self._measuring.states.values():
            state.row.weight = 0
        for fused in (best, *others):
            for task in tasks(fused, self._target):
                if task.key not in self._measuring.states:
                    self._measuring.states[task.key] = TaskState(task, row_of(task))
                if fused is best:
                    self._measuring.states[task.key].row.weight = task.weight
        for state in self._measuring.states.values():
            state.refresh(self._known, self._target)

    def _worth_replaying(self) -> list[Plan]:
        """The best plan, and others close to it in which no kernel runs that was not judged."""
        best = fuse_known(self._known, self._graph, self._target)
        others = fuse_with(self._known, self._graph, self._target, PLANS)
        fused = {str(each): each for each in (best, *others)}.values()
        found = self._plans(fused)
        limit = WORTH_REPLAYING * min(map(_predicted, found))
        close = [each for each in found[1:] if _predicted(each) <= limit]
        return [found[0], *(each for each in close if not _unmeasured(each))]

    def _plans(self, partitions: Iterable[FusedGraph]) -> list[Plan]:
        """Each with the best known way to run its groups."""
        return [plan_with(self._known, fused, self._target, self._options) for fused in partitions]

    def _knobs(self, fused: FusedGraph) -> PlanKnobs:
        launches = select(fused, self._target, self._known)
        return plan_knobs(self._known, self._graph, launches, self._target)

    def _decided(
        self, before: Plan, knobs_before: PlanKnobs, fused: FusedGraph
    ) -> tuple[CompiledModule, tuple[float, float] | None]:
        """`fused` as it is fastest in the whole graph, unless the model was faster `before`; kept
        for a later `gtco.compile`. And what both take, if that can be said."""
        self._measuring.show("trying schedules in the whole graph")
        variants = Variants(fused, self._target, self._options, self._known)
        begin = self._knobs(fused)
        chosen, knobs = refine(variants, self._captured, begin, self._finish.end)
        best = CompiledModule(variants(chosen, knobs), self._captured)
        replayed, chosen_before = None, choices_of(before, self._known)
        if chosen_before is not None and (compared := self._compared(before, best)) is not None:
            was, replayed = compared
            if replayed[0] <= replayed[1]:
                log.info("the whole graph takes %.1f us, would take %.1f, and stays", *replayed)
                best, chosen, knobs = was, chosen_before, knobs_before
                replayed = (replayed[0], replayed[0])
        self._measuring.keep(list(marked(self._known, chosen)))
        self._remember(best.graph, knobs, replayed[1] if replayed else whole_us(best))
        return best, replayed

    def _compared(
        self, before: Plan, best: CompiledModule
    ) -> tuple[CompiledModule, tuple[float, float]] | None:
        """The model as it was, and what both take; None if they do not fit the GPU together."""
        try:
            was = CompiledModule(before, self._captured)
            return was, before_and_after(was, best)
        except GpuMemoryError as error:
            log.warning("before and after are not compared: %s", error)
            return None

    def _remember(self, best: FusedGraph, knobs: PlanKnobs, run_us: float) -> None:
        """Let a later `gtco.compile` take the plan that was the fastest."""
        key, work = plan_key(self._graph, self._target), plan_work(best, self._target)
        programs = [launch.program for launch in select(best, self._target, self._known)]
        sketches = ran_with(program.sketch for program in programs if program is not None)
        timed = HOST_CLOCK if self._runner.host else REPLAYED
        how = {"timed": timed, RAN_WITH: sketches, **CHOSEN}
        schedule, version = asdict(knobs), VERSIONS[PLAN]
        plan = TuningRecord(key, self._known.device, PLAN, version, schedule, run_us, "", how, work)
        self._measuring.keep([plan])
        self._measuring.keep(list(marked(self._known, {key: plan})))

    # -- the final timing --------------------------------------------------------------------------

    def _final(self) -> None:
        """Try other rings of the best of the heaviest tasks, then time the best of each task again
        and longer, heaviest first, until it is late."""
        if self._runner.host:
            return
        order = sorted(
            (state for state in self._measuring.states.values() if not state.broken),
            key=lambda state: -state.row.weight * (state.row.best_us or 0.0),
        )
        rings = wanted_rings(order[:HEAVIEST], self._known, self._target)
        room = int(min(self._limits.trials - self._measuring.trials, len(rings)))
        self._measuring.run_all(rings[:room], "trying other rings", self._finish.rings)
        best = wanted_finals(order, self._known, self._target)
        self._measuring.run_all(best, "timing the best again", self._finish.finals, final=True)


def _predicted(plan: Plan | CompiledModule) -> float:
    return sum(launch.predicted_us or 0.0 for launch in plan.launches)


def _unmeasured(plan: Plan) -> bool:
    """Whether some launch has a schedule that nobody measured of its workload."""
    return any(
        launch.source.startswith(("transferred", "from", "default")) for launch in plan.launches
    )
