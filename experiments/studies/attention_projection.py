"""Is attention with its projection faster as one kernel? Chain times of both ways, for a model.

    python -m experiments.studies.attention_projection MODEL OUT.json [--db PATH] [--programs N]

A row is one attention whose projection one kernel may hold. Its kernels apart run with their best
known schedules, else with the first default; as one, N legal schedules are timed, the first
defaults and then random ones, and the fastest again and longer, in turn with the kernels apart.
"clusters" is how many clusters of that program a GPU holds at a time, and how many it has: with
more heads than a GPC has room for twice, few fit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.publish import markdown, microseconds, provenance, publish
from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.compiler import capture_for
from gtco.cost_model.knowledge import Knowledge, known_on
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.search import candidate_of
from gtco.cost_model.trials import Trials
from gtco.ir.graph import Graph, Group
from gtco.locate import Located, locate
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.dataflow import Flow, make_group
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.passes.tasks import Task, tasks, workload_key
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.device import resolve_device
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import HOST, Target

AGAIN = 4
"""Programs that are timed again: one time of many is the least by luck."""
DEFAULTS = 12
"""Of the schedules as one kernel, those that come before random ones."""


@dataclass(frozen=True)
class Row:
    """One attention and its projection.

    Args:
        ops: of both.
        weight: how often they run in one call of the model.
        apart_us: of attention, and of the projection with what follows it; None where it failed.
        apart: their sketches and knobs.
        joined_us: of the fastest program as one kernel, timed as long.
        joined: its knobs.
        programs: of each schedule that was tried, its knobs, the first time and why it failed.
        clusters: of the fastest, how many fit the GPU and how many there are; None without a GPU.
    """

    ops: str
    weight: int
    apart_us: tuple[float | None, float | None]
    apart: tuple[Mapping[str, Any], Mapping[str, Any]]
    joined_us: float | None
    joined: Mapping[str, Any]
    programs: tuple[Mapping[str, Any], ...]
    clusters: tuple[int, int] | None

    @property
    def saved_us(self) -> float | None:
        """Of one call of the model."""
        if self.joined_us is None or None in self.apart_us:
            return None
        return self.weight * (sum(filter(None, self.apart_us)) - self.joined_us)


def projected_tasks(graph: Graph, target: Target) -> list[Task]:
    """Attention with its projection and all that may follow it, as tasks of the rewritten graph."""

    def price(group: Group) -> float:
        return -float(len(group.compute)) if _is_joined(group) else 0.0

    return [
        task
        for task in tasks(fuse(graph, price), target)
        if _is_joined(task.group) and derive(task.group, "attention", target).sketches
    ]


def _is_joined(group: Group) -> bool:
    return {"attention", "linear"} <= {node.op for node in group.compute}


def apart(task: Task, target: Target) -> tuple[Task, Task]:
    """The two tasks that `task` would be."""
    flow = Flow(task.group.graph)
    first = [node for node in flow.compute if node.op == "attention"]
    rest = [node for node in flow.compute if node.op != "attention"]
    one, two = (make_group(flow, nodes) for nodes in (first, rest))
    return (
        Task(workload_key(one, target), one, (one,)),
        Task(workload_key(two, target), two, (two,)),
    )


def best_known(task: Task, known: Knowledge, target: Target) -> Candidate:
    """The best known program of `task`, else its first default."""
    for record in known.best(task.key):
        if record.sketch != LIBRARY and (found := candidate_of(task, record, target)) is not None:
            return found
    sampler = Sampler(derive(task.group, family(task.group), target).sketches, seed=0)
    return sampler.defaults(1)[0]


class Contest:
    """The programs of one row.

    Args:
        task: as one kernel.
        known: what was tuned.
        target: of the task.
        runner: measures.
        programs: how many schedules to try as one kernel.
    """

    def __init__(
        self, task: Task, known: Knowledge, target: Target, runner: Trials, programs: int
    ) -> None:
        self._task, self._runner = task, runner
        self._subject = Subject(task.key, task.group)
        self._apart = [
            (Subject(each.key, each.group), best_known(each, known, target))
            for each in apart(task, target)
        ]
        sampler = Sampler(derive(task.group, "attention", target).sketches, seed=0)
        chosen = {each.key: each for each in sampler.defaults(min(programs, DEFAULTS))}
        chosen |= {each.key: each for each in sampler.random(programs)}
        drawn = list(chosen.values())[:programs]
        self._tried = [(each, runner.run(self._subject, each)) for each in drawn]

    def finish(self) -> Row:
        """Wait for the first times, take the last ones, and give the row."""
        records = [(candidate, future.result()) for candidate, future in self._tried]
        ran = [(candidate, record) for candidate, record in records if record.run_us is not None]
        ran.sort(key=lambda pair: pair[1].run_us or math.inf)
        last = [
            (each, self._runner.run(self._subject, each, final=True)) for each, _ in ran[:AGAIN]
        ]
        alone = [
            self._runner.run(subject, candidate, final=True) for subject, candidate in self._apart
        ]
        fastest = min(_timed(last), key=lambda pair: pair[0], default=None)
        one, two = (future.result().run_us for future in alone)
        first, second = (_knobs(candidate) for _, candidate in self._apart)
        return Row(
            " -> ".join(node.op for node in self._task.group.compute),
            self._task.weight,
            (one, two),
            (first, second),
            None if fastest is None else fastest[0],
            {} if fastest is None else _knobs(fastest[1]),
            tuple(
                {**_knobs(candidate), "run_us": record.run_us, "error": record.error}
                for candidate, record in records
            ),
            None if fastest is None else _clusters(fastest[1].program),
        )


def _timed(
    last: Iterable[tuple[Candidate, Future[TuningRecord]]],
) -> list[tuple[float, Candidate]]:
    times = [(future.result().run_us, candidate) for candidate, future in last]
    return [(run_us, candidate) for run_us, candidate in times if run_us is not None]


def _knobs(candidate: Candidate) -> dict[str, Any]:
    return {"sketch": candidate.sketch.name, **candidate.program.schedule}


def _clusters(program: KernelProgram) -> tuple[int, int] | None:
    """How many clusters of `program` this machine's GPU holds, and how many there are."""
    import torch

    if not torch.cuda.is_available():
        return None
    compiled = compile_uncached(program.code, program.name, program.arch)
    return clusters_at_once(compiled, program), math.prod(program.grid) // program.cluster[0]


def clusters_at_once(compiled: CompiledKernel, program: KernelProgram) -> int:
    """How many clusters of `program` the current GPU holds at a time, as its driver says."""
    import torch
    from cuda.bindings import driver

    from gtco.runtime.driver import LoadedKernel, check

    kernel = LoadedKernel(compiled, torch.cuda.current_device())
    kernel.allow(program.smem_bytes, math.prod(program.cluster))
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims = cluster.value.clusterDim
    dims.x, dims.y, dims.z = program.cluster
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = program.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = program.block, 1, 1
    config.sharedMemBytes = program.smem_bytes
    config.attrs, config.numAttrs = [cluster], 1
    found = driver.cuOccupancyMaxActiveClusters(kernel.handle, config)
    return int(check(found, f"the clusters of {program.name}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--db", type=Path, help="what `gtco tune` kept; the user's by default")
    parser.add_argument("--programs", type=int, default=48, help="schedules as one kernel")
    parser.add_argument("--target", help='"host" measures on the CPU: a rehearsal')
    given = parser.parse_args()
    options = Options.of(target=given.target)
    found = measured(locate(given.model), options, given.db, given.programs)
    result = {"experiment": "attention_projection", **provenance("attention_projection"), **found}
    publish(given.out, result, table(result["rows"]), lambda: None)


def measured(
    model: Located, options: Options, database: Path | None, programs: int
) -> dict[str, Any]:
    """The rows of `model`, ready for JSON.

    Args:
        model: what to compile.
        options: how.
        database: what `gtco tune` kept.
        programs: schedules to try as one kernel.
    """
    device = resolve_device(options.target)
    target = device.target
    captured = capture_for(model.module, model.args, model.kwargs, options)
    known = known_on(device, database)
    found = projected_tasks(run_pipeline(captured.graph), target)
    with Trials(host=options.target == HOST) as runner:
        contests = [Contest(task, known, target, runner, programs) for task in found]
        rows = [contest.finish() for contest in contests]
    return {
        "model": model.name,
        "device": known.device,
        "rows": [{**asdict(row), "saved_us": row.saved_us} for row in rows],
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    header = ("operators", "launches", "attention, us", "projection, us", "as one, us", "saved, us",
              "clusters at once", "fastest")  # fmt: skip
    cells = [
        (
            row["ops"],
            str(row["weight"]),
            *(microseconds(time_us) for time_us in row["apart_us"]),
            microseconds(row["joined_us"]),
            microseconds(row["saved_us"]),
            "" if row["clusters"] is None else "{} of {}".format(*row["clusters"]),
            ", ".join(f"{name} {value}" for name, value in row["joined"].items()),
        )
        for row in rows
    ]
    return markdown(header, cells)


if __name__ == "__main__":
    main()
