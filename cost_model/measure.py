"""Measure schedules of one task on the GPU: right first, then how fast."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate
from gtco.codegen.sketch import Illegal
from gtco.cost_model.database import LIBRARY, TuningRecord
from gtco.graph import Group
from gtco.interpreter import interpret
from gtco.ops import OPS
from gtco.passes.legality import family
from gtco.passes.tasks import Task
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.nvrtc import CompileError, nvrtc_version
from gtco.runtime.run import run_group, time_library, time_program
from gtco.target import Target

log = logging.getLogger("gtco.tune")


def candidates(group: Group, target: Target, *, best: int, rest: int, seed: int) -> list[Candidate]:
    """The first `best` default schedules of the preferred sketch and `rest` random legal ones.

    Every other sketch that takes the group gets a sixth of that.
    """
    chosen = random.Random(seed)
    found: list[Candidate] = []
    for position, sketch in enumerate(derive(group, family(group), target).sketches):
        if position == 1:
            best, rest = -(-best // 6), -(-rest // 6)
        programs: dict[str, KernelProgram] = {}
        for schedule in sketch.defaults():
            if len(programs) == best:
                break
            try:
                program = sketch.emit(schedule)
            except Illegal:
                continue
            programs[program.name] = program
        knobs = sketch.knobs()
        for _ in range(rest * 20):
            if len(programs) >= best + rest:
                break
            try:
                program = sketch.emit({knob.name: chosen.choice(knob.choices) for knob in knobs})
            except Illegal:
                continue
            programs.setdefault(program.name, program)
        found.extend(Candidate(sketch, program) for program in programs.values())
    return found


def compile_candidates(found: Sequence[Candidate]) -> dict[str, str]:
    """Compile every candidate into the cache; entry point to error text of those that fail."""
    jobs = [CompileJob(c.program.code, c.program.name, c.program.arch) for c in found]
    results = compile_many(jobs)
    return {
        job.name: str(result)
        for job, result in zip(jobs, results, strict=True)
        if isinstance(result, CompileError)
    }


def random_values(group: Group, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Random tensors for all that the group reads; statistics are those of random rows."""
    generator = torch.Generator().manual_seed(seed)
    graph = group.graph
    merged = {node.inputs[0] for node in graph.nodes if node.op == "merge_stats"}
    values: dict[str, Tensor] = {}
    for name, spec in graph.inputs.items():
        if spec.dtype == torch.bool:
            tensor = torch.rand(spec.sizes, generator=generator) < 0.5
        elif not spec.dtype.is_floating_point:
            tensor = torch.randint(0, 8, spec.sizes, generator=generator)
        elif name in merged:
            rows = torch.randn((*spec.sizes[:-2], spec.sizes[-2] * 64), generator=generator)
            tensor = OPS["row_stats"].reference(rows)
        else:
            tensor = torch.randn(spec.sizes, generator=generator)
        values[name] = tensor.to(device, spec.dtype)
    values.update({name: tensor.to(device) for name, tensor in graph.constants.items()})
    return values


def wrong_outputs(
    group: Group, results: dict[str, Tensor], exact: Sequence[Tensor], eager: Sequence[Tensor]
) -> str:
    """Which output is wrong as DESIGN section 9 judges, or "" if all are right."""
    for name, reference, torch_eager in zip(group.graph.outputs, exact, eager, strict=True):
        error = _rmse(results[name], reference)
        allowed = 3 * _rmse(torch_eager, reference) + 1e-3 * _rmse(reference, 0 * reference)
        if not error <= allowed:  # NaN is wrong too
            return f"wrong answer: %{name} has an RMSE of {error:.3g}, allowed {allowed:.3g}"
    return ""


def _rmse(tensor: Tensor, reference: Tensor) -> float:
    return math.sqrt((tensor.double() - reference.double()).square().mean().item())


def measure_task(
    task: Task, target: Target, found: Sequence[Candidate], errors: dict[str, str]
) -> list[TuningRecord]:
    """Check and time every candidate of a task, and the library beside them.

    Args:
        task: the workload.
        target: the GPU's.
        found: what to measure, compiled by `compile_candidates`.
        errors: what that returned.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    group = task.group
    values = random_values(group, device, seed=len(task.key))
    args = [values[name] for name in group.graph.inputs]
    exact = interpret(group.graph, args, dtype=torch.float64)
    eager = interpret(group.graph, args)
    versions = {"nvrtc": nvrtc_version(), "torch": torch.__version__}
    name = torch.cuda.get_device_name(device)
    records: list[TuningRecord] = []
    for candidate in found:
        program = candidate.program
        run_us: float | None = None
        error = errors.get(program.name, "")
        if not error:
            error = wrong_outputs(group, run_group(program, group, values), exact, eager)
        if not error:
            run_us = time_program(program, group, values, repeat=5)
        records.append(
            TuningRecord(
                task.key,
                name,
                candidate.sketch.name,
                candidate.sketch.version,
                program.schedule,
                run_us,
                error,
                versions,
            )
        )
        if error:
            log.warning("%s %s: %s", program.sketch, dict(program.schedule), error)
    try:
        library_us, error = time_library(group, values, repeat=3), ""
    except RuntimeError as refusal:  # some ATen calls cannot be captured
        library_us, error = None, str(refusal).splitlines()[0]
    records.append(TuningRecord(task.key, name, LIBRARY, 1, {}, library_us, error, versions))
    return records
