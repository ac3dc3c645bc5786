"""Tune a model: search the programs of its tasks on the device, then decide the fusion again."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gtco.codegen.sampler import Candidate
from gtco.compiler import (
    capture_for,
    fuse_known,
    fuse_with,
    known_on,
    plan_with,
    resolve_device,
    select,
)
from gtco.cost_model.budget import Budget
from gtco.cost_model.database import Database
from gtco.cost_model.knowledge import (
    CHOSEN,
    HOST_CLOCK,
    RAN_WITH,
    REPLAYED,
    VERSIONS,
    Knowledge,
    ran_with,
)
from gtco.cost_model.measure import MeasureError
from gtco.cost_model.model import roofline_us
from gtco.cost_model.plans import plan_key, plan_knobs, plan_work
from gtco.cost_model.ranker import shipped_ranker
from gtco.cost_model.record import LIBRARY, PLAN, DatabaseError, TuningRecord
from gtco.cost_model.search import Search, search_task
from gtco.cost_model.similar import likeness
from gtco.cost_model.trials import Trials
from gtco.frontend.torch_export import Captured
from gtco.ir.graph import FusedGraph
from gtco.models import accepted
from gtco.options import OptionError, Options, database_file
from gtco.passes import run_pipeline
from gtco.passes.tasks import Task, tasks
from gtco.runtime.executable import GpuMemoryError
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Plan, PlanKnobs
from gtco.target import HOST, Device, Target, TargetError
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
from gtco.tuning.state import Finish, Limits, TaskState, Wanted, wanted_finals, wanted_rings

log = logging.getLogger("gtco.tune")

BATCH = 16
"""Programs of a task that are proposed at once."""
IN_FLIGHT = 3
"""Batches under way: while one is measured, the next ones compile."""
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
_POLL_S = 0.25


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
                f"{opened.path} is read-only, and tuning would be forgotten: make it writable, or "
                "name another file with database= (--db)"
            )
        known = known_on(device, opened.path)
        with Trials(host=chosen.target == HOST, executor=executor) as runner:  # starts processes
            captured = capture_for(module, args, kwargs, chosen)
            limits = Limits(
                time.monotonic(),
                math.inf if seconds is None else seconds,
                math.inf if trials is None else trials,
            )
            tuner = _Tuner(
                captured, device.target, chosen, opened, known, runner, limits, seed, watch
            )
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
        database: Database,
        known: Knowledge,
        runner: Trials,
        limits: Limits,
        seed: int,
        watch: Callable[[TuneStatus], None] | None,
    ) -> None:
        self._captured = captured
        self._graph = run_pipeline(captured.graph)
        self._target = target
        self._options = options
        self._database = database
        self._known = known
        self._runner = runner
        self._limits = limits
        self._finish = Finish()
        self._seed = seed
        self._watch = watch
        self._states: dict[str, TaskState] = {}
        self._unsaved: list[TuningRecord] = []
        self._trials = 0
        self._ranker = shipped_ranker(target)

    def run(self) -> TuneResult:
        (before,) = self._plans([self._plan()])
        knobs_before = self._knobs(before.fused)
        stopped = ""
        try:
            for number, part in enumerate(ROUNDS):
                if number:
                    self._plan()
                stopped = self._search(self._limits.part(part))
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
        self._show("deciding the fusion")
        plans = self._worth_replaying()
        self._runner.close()  # nothing else may run while whole plans are timed
        best, plans_us = fastest(plans, self._captured, self._finish.plans)
        if stopped != "interrupted" and not self._runner.host:  # whose times say little
            best, replayed = self._decided(before, knobs_before, best.graph)
        elif plans_us:
            self._remember(best.graph, self._knobs(best.graph), min(plans_us))
        self._adopt(best.graph)
        if self._unsaved:
            log.warning(
                "%d measurements could not be kept in %s", len(self._unsaved), self._database.path
            )
        rows = tuple(state.row for state in self._states.values())
        return TuneResult(
            compiled=best,
            rows=rows,
            before_us=_predicted(before),
            after_us=_predicted(best),
            replayed_us=replayed,
            plans_us=plans_us,
            trials=self._trials,
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
        every = [state.task for state in self._states.values()]
        price = self._known.price(self._target, every, explore=True)
        prices = {task.key: price(task.group) for task in every}

        def cost_us(found: Sequence[Task]) -> float:
            return sum(task.weight * prices[task.key] for task in found)

        now_us = cost_us(tasks(best, self._target))
        for state in self._states.values():
            state.saving_us = LONGSHOT * now_us
        for hope in hopes:
            found = tasks(hope, self._target)
            saving_us = now_us - cost_us(found)
            for task in found:
                state = self._states[task.key]
                state.saving_us = max(state.saving_us, saving_us)

    def _adopt(self, best: FusedGraph, others: Iterable[FusedGraph] = ()) -> None:
        """Make sure that each task of these plans has a state; weights are those of the best."""
        for state in self._states.values():
            state.row.weight = 0
        for fused in (best, *others):
            for task in tasks(fused, self._target):
                if task.key not in self._states:
                    self._states[task.key] = TaskState(task, row_of(task))
                if fused is best:
                    self._states[task.key].row.weight = task.weight
        for state in self._states.values():
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
        self._show("trying schedules in the whole graph")
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
        self._keep(list(marked(self._known, chosen)))
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
        self._keep([plan])
        self._keep(list(marked(self._known, {key: plan})))

    def _search_of(self, state: TaskState) -> Search[Candidate]:
        if state.search is None:
            state.search = search_task(
                state.task, self._target, self._known, self._ranker, seed=self._seed
            )
        return state.search

    # -- the search --------------------------------------------------------------------------------

    def _search(self, limits: Limits) -> str:
        """Measure until a limit is reached; which it was, "" if no programs are left."""
        states = [state for state in self._states.values() if not state.broken]
        keys = [state.task.key for state in states]
        budget = Budget(
            [state.row.weight or 1 for state in states],
            [roofline_us(state.task.group, self._target) for state in states],
            [math.inf if state.row.weight else state.saving_us for state in states],
            [[likeness(key, other) for other in keys] for key in keys],
        )
        for index, state in enumerate(states):
            programs = [r for r in self._known.records(state.task.key) if r.sketch != LIBRARY]
            rounds = max(len(programs) // BATCH, int(state.row.trials > 0))
            for _ in range(rounds):
                budget.begin(index)
            if rounds:
                budget.observe(index, state.row.best_us)
        position = {state: index for index, state in enumerate(states)}
        flying: dict[Future[TuningRecord], TaskState] = {}
        while True:
            reached = limits.reached(self._trials + len(flying))
            while not reached and len(flying) <= BATCH * (IN_FLIGHT - 1):
                chosen = budget.next()
                if chosen is None:
                    break
                room = limits.trials - self._trials - len(flying)
                futures = self._propose(states[chosen], int(min(BATCH, room)))
                flying.update(dict.fromkeys(futures, states[chosen]))
                if futures:
                    budget.begin(chosen)
                else:
                    budget.end(chosen)
                reached = limits.reached(self._trials + len(flying))
            if not flying:
                return reached
            done, _ = wait(flying, _POLL_S, FIRST_COMPLETED)
            for state in self._collect(done, flying):
                budget.observe(position[state], state.row.best_us)
                if state.broken:
                    budget.end(position[state])
            self._show("searching")
            if self._limits.reached():  # a round's own limits let what flies land
                for future in flying:
                    future.cancel()
                return "seconds"

    def _propose(self, state: TaskState, count: int) -> list[Future[TuningRecord]]:
        """Trials of a task's next programs, and of its ATen calls ahead of the first."""
        found: list[Future[TuningRecord]] = []
        known = self._known.records(state.task.key)
        if not state.asked_library and not any(record.sketch == LIBRARY for record in known):
            found.append(self._runner.run(state.subject, None))
        state.asked_library = True
        candidates = self._search_of(state).propose(count)
        return found + [self._runner.run(state.subject, each) for each in candidates]

    def _collect(
        self,
        done: Iterable[Future[TuningRecord]],
        flying: dict[Future[TuningRecord], TaskState],
        final: bool = False,
    ) -> Iterable[TaskState]:
        """Keep what finished; the tasks that something finished of. A final timing is no trial."""
        records: list[TuningRecord] = []
        touched: dict[TaskState, None] = {}
        for future in done:
            state = flying.pop(future)
            touched[state] = None
            try:
                record = future.result()
            except CancelledError:
                continue
            except MeasureError as error:
                if not state.broken:
                    log.warning("%s", error)
                state.broken = True
                continue
            records.append(record)
            if final:
                continue
            if state.search is not None:
                state.search.observe([record])
            if record.sketch != LIBRARY:
                self._trials += 1
                state.row.trials += 1
                state.row.failures += record.run_us is None
            if record.error:
                where = f"{state.row.name} {record.sketch} {dict(record.schedule)}"
                log.info("%s: %s", where, record.error)
        self._keep(records)
        return touched

    def _keep(self, records: Iterable[TuningRecord]) -> None:
        """Remember `records`; what the database cannot take now is tried again with the next."""
        for record in records:
            self._known.add(record)
            if record.workload in self._states:
                self._states[record.workload].refresh(self._known, self._target)
            self._unsaved.append(record)
        if not self._unsaved:
            return
        try:
            self._database.add(self._unsaved)
        except DatabaseError as error:
            log.warning("%s (%d measurements wait)", error, len(self._unsaved))
        else:
            self._unsaved = []

    # -- the final timing --------------------------------------------------------------------------

    def _final(self) -> None:
        """Try other rings of the best of the heaviest tasks, then time the best of each task again
        and longer, heaviest first, until it is late."""
        if self._runner.host:
            return
        order = sorted(
            (state for state in self._states.values() if not state.broken),
            key=lambda state: -state.row.weight * (state.row.best_us or 0.0),
        )
        rings = wanted_rings(order[:HEAVIEST], self._known, self._target)
        room = int(min(self._limits.trials - self._trials, len(rings)))
        self._run_all(rings[:room], "trying other rings", self._finish.rings)
        best = wanted_finals(order, self._known, self._target)
        self._run_all(best, "timing the best again", self._finish.finals, final=True)

    def _run_all(
        self, wanted: Iterable[Wanted], phase: str, until: float, final: bool = False
    ) -> None:
        """Run these programs and keep what they say; at `until` the rest is given up."""
        flying = {
            self._runner.run(state.subject, candidate, final=final): state
            for state, candidate in wanted
        }
        while flying:
            done, _ = wait(flying, _POLL_S, FIRST_COMPLETED)
            self._collect(done, flying, final)
            self._show(phase)
            if time.monotonic() > until:
                for future in flying:
                    future.cancel()
                return

    def _show(self, phase: str) -> None:
        if self._watch is not None:
            rows = tuple(state.row for state in self._states.values())
            spent = time.monotonic() - self._limits.begun
            self._watch(TuneStatus(phase, spent, self._trials, rows))


def _predicted(plan: Plan | CompiledModule) -> float:
    return sum(launch.predicted_us or 0.0 for launch in plan.launches)


def _unmeasured(plan: Plan) -> bool:
    """Whether some launch has a schedule that nobody measured of its workload."""
    return any(
        launch.source.startswith(("transferred", "from", "default")) for launch in plan.launches
    )
