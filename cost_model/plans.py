"""What is known of whole plans: the fastest when replayed, knobs that others take, the floor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.record import PLAN, TuningRecord
from gtco.cost_model.work import group_work
from gtco.ir.graph import FusedGraph, Graph, Group
from gtco.passes.tasks import tasks, workload_digest
from gtco.passes.workload import describe
from gtco.runtime.plan import Launch, Plan, PlanError, PlanKnobs, weights_of
from gtco.target import Target

log = logging.getLogger("gtco.tune")

ALIKE = 0.9
"""Of the launches: those that a plan must share with another one to take its knobs."""
FETCHED_AHEAD = 2
"""Launches ahead, where nothing was measured and weights are worth fetching."""


def plan_key(graph: Graph, target: Target) -> str:
    """The `workload` of a record of a whole graph, which the passes have rewritten."""
    return describe(graph).text(arch=target.arch, scope=PLAN)


def plan_work(fused: FusedGraph, target: Target) -> dict[str, int]:
    """The `work` of such a record: `workload_digest` of each group to how often it runs."""
    return {workload_digest(task.key): task.weight for task in tasks(fused, target)}


def replayed(known: Knowledge, graph: Graph, target: Target) -> TuningRecord | None:
    """The plan with which the rewritten `graph` was fastest, if any is known: on this device, else
    on its nearest kin."""
    if not any(each.has_plans for each in known.sources):
        return None
    return next(iter(known.serving(plan_key(graph, target))), None)


def plan_knobs(
    known: Knowledge, graph: Graph, launches: Sequence[Launch], target: Target
) -> PlanKnobs:
    """Those with which the rewritten `graph` was fastest when replayed.

    A graph that never was takes those of the plan that ran the same workloads, or the workloads
    whose schedules were transferred to it; where there is none either, a draft decides. What was
    replayed on this device counts ahead of what was on its kin.

    Args:
        known: the records.
        graph: as the passes left it.
        launches: how its groups run.
        target: the architecture.
    """
    record = replayed(known, graph, target) or _alike(known, launches)
    if record is not None:
        try:
            knobs = PlanKnobs.of(record.schedule)
            log.info("knobs of the whole plan, %s: %s", known.source(record), knobs)
            return knobs
        except PlanError as error:
            log.warning("the record of a plan is not used: %s", error)
    return _draft(launches, target)


def _alike(known: Knowledge, launches: Sequence[Launch]) -> TuningRecord | None:
    """The plan that has the workloads of the most launches, if they are nearly all."""
    workloads = Counter(launch.workload for launch in launches if launch.program is not None)

    def shared(plan: TuningRecord) -> int:
        return sum(count for name, count in workloads.items() if name in plan.work)

    for device in known.sources:
        plans = [record for record in device.leaders() if record.sketch == PLAN]
        best = max(plans, key=shared, default=None)
        if best is not None and shared(best) >= ALIKE * max(1, workloads.total()):
            return best
    return None


def _draft(launches: Sequence[Launch], target: Target) -> PlanKnobs:
    """Without any measurement: fetch weights where they are a good part of the time, and fit."""
    nbytes = [found[1] if (found := weights_of(launch)) else 0 for launch in launches]
    reading_us = sum(nbytes) / target.dram_gbps / 1e3
    total_us = sum(launch.predicted_us or 0.0 for launch in launches)
    under_way = (sum(nbytes[at : at + FETCHED_AHEAD + 1]) for at in range(len(nbytes)))
    fits = max(under_way, default=0) <= target.kept_bytes
    pays = reading_us > target.constants.slow_weights * total_us
    return PlanKnobs(fetch_distance=FETCHED_AHEAD if fits and pays else 0)


FLOOR = "weights, inputs and outputs once from device memory, or the products alone"


def floor_us(plan: Plan) -> float:
    """Microseconds of what no plan of the same graph avoids.

    That is each constant that it reads, its inputs and its outputs once at the rate of the target's
    device memory, or its products at the peak rate of their precision, whichever takes longer.
    """
    target, graph = plan.target, plan.graph
    read = (graph.constants[name] for name in plan.constants)
    nbytes = sum({id(each): each.nbytes for each in read}.values())  # of tied weights one
    nbytes += sum(graph.specs[name].nbytes for name in {*graph.inputs, *graph.outputs})
    products_us = 0.0
    for work in (group_work(launch.group) for launch in plan.launches):
        products_us += work.matmul_flops / work.peak_tflops(target) / 1e6
    return max(nbytes / target.dram_gbps / 1e3, products_us)


def group_floor_us(group: Group, target: Target) -> float:
    """Microseconds that no kernel of `group` can be below: its weights from device memory, all that
    it moves through L2, or its products at the peak rate of their precision, each alone."""
    work = group_work(group)
    moved = work.weight_bytes + work.read_bytes + work.written_bytes
    return max(
        work.weight_bytes / target.dram_gbps / 1e3,
        moved / target.l2_gbps / 1e3,
        work.matmul_flops / work.peak_tflops(target) / 1e6,
    )
