"""The whole way from a model to a compiled module, top to bottom."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtco import dump, logs
from gtco.codegen.rules import Derivation, derive
from gtco.codegen.sketch import Illegal, Schedule, Sketch, check
from gtco.cost_model.database import LIBRARY, RecordTable, shipped_records
from gtco.cost_model.model import roofline_us
from gtco.frontend.onnx import load_onnx
from gtco.frontend.torch_export import Captured
from gtco.frontend.torch_export import capture as capture_torch
from gtco.graph import FusedGraph, Graph
from gtco.options import Options
from gtco.passes import fusion, run_pipeline
from gtco.passes.legality import family
from gtco.passes.precision import lower_precision
from gtco.passes.tasks import Task, tasks
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch, Plan, fetch_ahead
from gtco.target import Target, TargetError, find_target, target_of_capability

frontend_log = logging.getLogger("gtco.frontend")
fusion_log = logging.getLogger("gtco.fusion")
log = logging.getLogger("gtco.codegen")
tune_log = logging.getLogger("gtco.tune")

FETCH_DISTANCE = 2
"""Launches between a kernel and the one that brings its weights to L2 (experiments.plan_variants)."""
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
DEVICES = {"sm_90a": "NVIDIA H100 80GB HBM3"}
"""The card whose shipped records serve an architecture when no GPU is there to ask."""


class FallbackError(RuntimeError):
    """`fallback="error"` was asked for and a part of the model has no generated kernel."""


def compile(
    model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
) -> CompiledModule:
    """Compile `model` for a GPU.

    Args:
        model: an `nn.Module` in eval mode, an `ExportedProgram`, an fx `GraphModule` or the path
            of an .onnx file.
        args: example positional arguments; their shapes and dtypes are what is compiled for. For
            an .onnx file whose inputs all have fixed sizes they may be left out.
        kwargs: example keyword arguments.
        **options: the fields of `gtco.Options`.

    Returns:
        A module with the signature and the output structure of `model`. Its weights are those of
        now: compile again after changing the model's.

    Raises:
        CaptureError: the model cannot be exported; its kind `OnnxError`: an .onnx file cannot be
            read, or uses what gtco does not support.
        OptionError: an unknown option or value, or an unknown area in `GTCO_LOGS`.
        TargetError: the target is unknown, too old, or no GPU is there and none was named.
        FallbackError: `fallback="error"` and an operator has no kernel.
    """
    logs.configure()
    folder = dump.environment_folder()
    plan, captured = make_plan(model, args, kwargs, Options.of(**options), folder)
    compiled = CompiledModule(plan, captured)
    if folder is not None:
        dump.write_kernels(folder, plan, compiled.compile_kernels())
    return compiled


def compile_captured(captured: Captured, options: Options) -> CompiledModule:
    """Compile what `dump.read_captured` read."""
    return CompiledModule(plan_captured(captured, options), captured)


def make_plan(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    folder: Path | None = None,
) -> tuple[Plan, Captured]:
    """What `compile` would run, and the model's signature; no kernel is compiled, no GPU used.

    Args:
        model: as for `compile`.
        args: likewise.
        kwargs: likewise.
        options: how to compile.
        folder: takes what `gtco.dump` knows of a plan.

    Raises:
        CaptureError, TargetError, FallbackError: as for `compile`.
        OSError: the folder takes no files.
    """
    _resolve_target(options.target)  # ahead of the capture, which takes longer
    captured = _capture(model, args, kwargs)
    if options.precision in PRECISIONS:
        lowered = lower_precision(captured.graph, PRECISIONS[options.precision])
        captured = replace(captured, graph=lowered)
    plan = plan_captured(captured, options, folder)
    if folder is not None:
        dump.write_plan(folder, plan)
        dump.write_repro(folder, plan, captured)
    return plan, captured


def plan_captured(captured: Captured, options: Options, folder: Path | None = None) -> Plan:
    """How `captured` runs; the graph after each pass goes to `folder`."""
    target = _resolve_target(options.target)
    fused = _fuse(captured.graph, target, folder)
    launches = select(fused, target)
    _refuse_fallbacks(launches, options.fallback)
    if target.has_dependent_launch:
        launches = fetch_ahead(launches, FETCH_DISTANCE)
    return Plan(fused, launches, target, options)


def capture(model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Graph:
    """The graph of `model` before any rewrite.

    Raises:
        CaptureError: the model cannot be exported.
    """
    return _capture(model, args, kwargs).graph


def _capture(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Captured:
    if isinstance(model, (str, os.PathLike)):
        model = load_onnx(model)
        args = args or model.example()
        model.to(next((each.device for each in args if isinstance(each, Tensor)), "cpu"))
    captured = capture_torch(model, tuple(args), dict(kwargs or {}))
    graph = captured.graph
    frontend_log.info(
        "captured %s: %d inputs, %d constants of %.1f MB, %d nodes",
        type(model).__name__,
        len(graph.inputs),
        len(graph.constants),
        sum(graph.specs[name].nbytes for name in graph.constants) / 1e6,
        len(graph.nodes),
    )
    for op, count in Counter(node.op for node in graph.nodes).most_common():
        frontend_log.debug("%d %s", count, op)
    return captured


def fuse(graph: Graph, *, target: str | Target = "sm_90a") -> FusedGraph:
    """Rewrite `graph` and partition it into groups by dynamic programming.

    Args:
        graph: from `capture`.
        target: the architecture whose limits and rates decide.
    """
    return _fuse(graph, find_target(target) if isinstance(target, str) else target)


def _fuse(graph: Graph, target: Target, folder: Path | None = None) -> FusedGraph:
    fused = fusion.fuse(run_pipeline(graph, folder), partial(roofline_us, target=target))
    fusion_log.info("%d nodes became %d groups", len(graph.nodes), len(fused.groups))
    for producer, consumer, reason in fused.refusals:
        fusion_log.debug("%%%s -> %%%s apart: %s", producer, consumer, reason)
    return fused


@dataclass(frozen=True)
class _Choice:
    """How a workload runs: a sketch and its schedule, or ATen (`sketch` is None)."""

    sketch: type[Sketch] | None
    schedule: Schedule
    source: str
    reason: str = ""
    run_us: float | None = None


def select(fused: FusedGraph, target: Target) -> tuple[Launch, ...]:
    """How each group runs: the fastest schedule on record, else a sketch's first default.

    Equal workloads are decided once. A group that no sketch takes, or for which the library was
    measured faster, becomes a call of its operators in ATen.
    """
    records = _records(_device_name(target))
    launches = []
    for task in tasks(fused, target):
        kind = family(task.group)
        choice = _choose(task, derive(task.group, kind, target), records)
        log.debug(
            "%s, %d times: %s %s (%s)",
            task.group.name,
            len(task.groups),
            "aten" if choice.sketch is None else choice.sketch.name,
            dict(choice.schedule),
            choice.reason or choice.source,
        )
        for group in task.groups:
            program = None
            if choice.sketch is not None:
                program = choice.sketch(group, target).emit(choice.schedule)
            predicted = choice.run_us or roofline_us(group, target)
            launches.append(Launch(group, kind, program, choice.source, choice.reason, predicted))
    generated = sum(launch.program is not None for launch in launches)
    log.info("%d groups for %s, %d of them generated", len(launches), target.arch, generated)
    order = {group.name: position for position, group in enumerate(fused.groups)}
    return tuple(sorted(launches, key=lambda launch: order[launch.group.name]))


def _choose(task: Task, derivation: Derivation, records: RecordTable) -> _Choice:
    sketches = {sketch.name: sketch for sketch in derivation.sketches}
    for record in records.lookup(task.key):
        if record.sketch == LIBRARY:
            reason = "the library was measured faster"
            return _Choice(None, {}, "record", reason, record.run_us)
        sketch = sketches.get(record.sketch)
        if sketch is None or sketch.version != record.version:
            continue
        try:
            _check_knobs(sketch, record.schedule)
            sketch.emit(record.schedule)
        except Illegal as error:
            tune_log.warning("a record for %s is no longer legal: %s", task.group, error)
        else:
            return _Choice(type(sketch), record.schedule, "record", run_us=record.run_us)
    reasons = [derivation.reason] if derivation.refusals else []
    for sketch in derivation.sketches:
        refusal = "it has no schedule for these shapes"
        for schedule in sketch.defaults():
            try:
                sketch.emit(schedule)
            except Illegal as error:
                refusal = str(error)
            else:
                return _Choice(type(sketch), schedule, "default")
        reasons.append(f"{sketch.name}: {refusal}")
    return _Choice(None, {}, "fallback", "; ".join(reasons))


def _check_knobs(sketch: Sketch, schedule: Schedule) -> None:
    """Refuse a schedule of other knobs than the sketch's."""
    names = {knob.name for knob in sketch.knobs()}
    check(set(schedule) == names, f"{sketch.name} has the knobs {', '.join(sorted(names))}")


def _refuse_fallbacks(launches: Sequence[Launch], fallback: str) -> None:
    missing = [launch for launch in launches if launch.source == "fallback"]
    if not missing:
        return
    lines = [f"{launch.group}: {launch.reason}" for launch in missing]
    if fallback == "error":
        raise FallbackError(
            f"{len(missing)} groups have no generated kernel:\n  "
            + "\n  ".join(lines)
            + '\npass fallback="warn" to run them with ATen'
        )
    for line in dict.fromkeys(lines):
        log.warning("runs with ATen: %s", line)


def _resolve_target(name: str | None) -> Target:
    if name is not None:
        return find_target(name)
    if not torch.cuda.is_available():
        raise TargetError(
            "no CUDA GPU is here and no target was named: to compile for one, pass "
            'target="sm_90a" (--target sm_90a)'
        )
    return target_of_capability(*torch.cuda.get_device_capability())


def _device_name(target: Target) -> str:
    if torch.cuda.is_available():
        here = torch.cuda.get_device_capability()
        if target.capability == here:
            return torch.cuda.get_device_name()
    return DEVICES.get(target.arch, target.arch)


@cache
def _records(device: str) -> RecordTable:
    return RecordTable(record for record in shipped_records() if record.device == device)
