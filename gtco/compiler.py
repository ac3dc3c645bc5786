"""The whole way from a model to a compiled module, top to bottom."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtco import logs
from gtco.calibration import TYPES, Calibration
from gtco.cost_model.knowledge import Knowledge, known_on
from gtco.cost_model.model import programmed_us, roofline_us
from gtco.cost_model.plans import plan_knobs, plan_work, replayed
from gtco.frontend.torch_export import Captured
from gtco.frontend.torch_export import capture as capture_torch
from gtco.ir.graph import FusedGraph, Graph, Group
from gtco.ir.spec import GraphError
from gtco.models import accepted
from gtco.options import OptionError, Options
from gtco.passes import fusion, run_pipeline
from gtco.passes.channels_together import gather_channels
from gtco.passes.expand_attention import expand_attention
from gtco.passes.long_reductions import split_long_reductions
from gtco.passes.long_topk import split_long_topk
from gtco.passes.patches import copy_patches
from gtco.passes.precision import fp32_products, lower_precision, lower_products
from gtco.passes.quantized_pairs import multiply_pairs
from gtco.passes.rewrite import Log
from gtco.passes.tasks import tasks, workload_digest, workload_key
from gtco.passes.whole_means import whole_means
from gtco.passes.whole_pixels import copy_whole_pixels
from gtco.reporting import dump
from gtco.reporting.fallbacks import fallback_kinds, precision_hint
from gtco.runtime.device import resolve_device
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch, Plan, PlanKnobs
from gtco.runtime.turning import turn
from gtco.selection import refusal, select
from gtco.target import TARGETS, Target, TargetError, find_target

frontend_log = logging.getLogger("gtco.frontend")
fusion_log = logging.getLogger("gtco.fusion")
codegen_log = logging.getLogger("gtco.codegen")
tune_log = logging.getLogger("gtco.tune")

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class FallbackError(RuntimeError):
    """`fallback="error"` was asked for and a part of the model has no generated kernel."""


def compile(
    model: Any,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    database: str | os.PathLike[str] | None = None,
    **options: Any,
) -> CompiledModule:
    """Compile `model` for a GPU.

    Args:
        model: an `nn.Module` in eval mode, an `ExportedProgram`, an fx `GraphModule` or the path
            of an .onnx file.
        args: example positional arguments, or the only one, a tensor; their shapes and dtypes are
            what is compiled for, and the order in which their elements lie in memory, such as
            `torch.channels_last`: others are copied. For an .onnx file whose inputs all have
            fixed sizes they may be left out.
        kwargs: example keyword arguments.
        shapes: of an .onnx file with axes of no fixed size, the sizes to compile for, by input,
            such as `{"x": (1, 3, 224, 224)}`.
        database: the file in which `gtco.tune` kept its records; the user's own by default. What
            it knows counts beside the records that ship with the package.
        **options: the fields of `gtco.Options`.

    Returns:
        A module with the signature and the output structure of `model`; dataclasses among the
        arguments and results are registered with torch's pytree. Its weights are those of now:
        compile again after changing the model's.

    Raises:
        CaptureError: the model cannot be exported; its kind `OnnxError`: an .onnx file cannot be
            read, or uses what gtco does not support.
        OptionError: an unknown option or value.
        TargetError: the target is unknown, too old, or no GPU is there and none was named.
        FallbackError: `fallback="error"` and an operator has no kernel.
    """
    logs.configure()
    chosen, folder = Options.of(**options), dump.environment_folder()
    module, args, kwargs = accepted(model, args, kwargs, shapes)
    plan, captured = make_plan(module, args, kwargs, chosen, database, folder)
    compiled = CompiledModule(plan, captured)
    if folder is not None:
        dump.write_kernels(folder, plan, compiled.compile_kernels())
    return compiled


def compile_captured(captured: Captured, options: Options) -> CompiledModule:
    """Compile what `dump.read_captured` read."""
    return CompiledModule(plan_captured(captured, options), captured)


def make_plan(
    model: Any,
    args: Sequence[Any] | Tensor,
    kwargs: Mapping[str, Any] | None,
    options: Options,
    database: str | os.PathLike[str] | None = None,
    folder: Path | None = None,
) -> tuple[Plan, Captured]:
    """What `compile` would run, and the model's signature; no kernel is compiled, no GPU used.

    Args:
        model: as for `compile`.
        args: likewise.
        kwargs: likewise.
        options: how to compile.
        database: as for `compile`.
        folder: takes what `gtco.reporting.dump` knows of a plan.

    Raises:
        CaptureError, TargetError, FallbackError: as for `compile`.
        OSError: the folder takes no files.
    """
    resolve_device(options.target)  # ahead of the capture, which takes longer
    with _no_garbage_collection():
        captured = capture_for(model, args, kwargs, options)
        plan = plan_captured(captured, options, database, folder)
    if folder is not None:
        dump.write_plan(folder, plan)
        dump.write_repro(folder, plan, captured)
    return plan, captured


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing looks for cycles meanwhile: an export makes millions of objects that stay, and
    looking through them again and again takes an eighth of a compilation."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def plan_captured(
    captured: Captured,
    options: Options,
    database: str | os.PathLike[str] | None = None,
    folder: Path | None = None,
) -> Plan:
    """How `captured` runs; the graph after each pass goes to `folder`."""
    device = resolve_device(options.target)
    target, known = device.target, known_on(device, database)
    graph = rewritten(captured, options, target, folder)
    fused = fuse_known(known, graph, target)
    fusion_log.info("%d nodes became %d groups", len(captured.graph.nodes), len(fused.groups))
    for producer, consumer, reason in fused.refusals:
        fusion_log.debug("%%%s -> %%%s apart: %s", producer, consumer, reason)
    plan = plan_with(known, fused, target, options)
    _tell_fallbacks(plan)
    return plan


def capture_for(
    model: Any, args: Sequence[Any] | Tensor, kwargs: Mapping[str, Any] | None, options: Options
) -> Captured:
    """The model's graph in the precision that the options ask for, and its signature.

    Raises:
        CaptureError: the model cannot be exported.
    """
    captured = _capture(model, args, kwargs)
    graph = multiply_pairs(captured.graph, fp8=_has_fp8(options))
    captured, precision = replace(captured, graph=graph), options.precision
    if precision == "tf32":
        return replace(captured, graph=lower_products(graph, "tf32"))
    if precision in TYPES and any(fp32_products(node, graph) for node in graph.nodes):
        precision = "fp16"  # what is not in 8 bits
    if precision not in PRECISIONS:
        return captured
    return replace(captured, graph=lower_precision(graph, PRECISIONS[precision]))


def _has_fp8(options: Options) -> bool:
    """Whether the target multiplies fp8; no GPU that is not there does."""
    try:
        return resolve_device(options.target).target.has_fp8
    except TargetError:
        return False


def rewritten(
    captured: Captured, options: Options, target: Target, folder: Path | None = None
) -> Graph:
    """The graph of `captured` after the passes, in 8 bits what the model or the options ask for.

    Raises:
        TargetError: fp8 for a target that gtco does not multiply it on.
        OptionError: fp8 or int8 without a calibration, or with one for the other.
        CalibrationError: it cannot be read, or is of another model.
    """
    graph = run_pipeline(captured.graph, folder)
    precision = options.precision
    if precision not in TYPES:
        return _expanded(graph, target)
    if precision == "fp8" and not target.has_fp8:
        able = ", ".join(arch for arch, each in TARGETS.items() if each.has_fp8)
        raise TargetError(
            f'gtco multiplies fp8 on {able}, not on {target.arch}: use precision="fp16" or "int8"'
        )
    of = "" if precision == "fp8" else f', precision="{precision}"'
    call = f"calibration=gtco.calibrate(model, batches{of}), or the file that keeps it"
    known = options.calibration
    if known is None:
        raise OptionError(f'precision="{precision}" needs the sizes of the values: pass {call}')
    known = Calibration.load(known) if isinstance(known, str) else known
    if not isinstance(known, Calibration):
        raise OptionError(
            f"calibration is what gtco.calibrate returned, or its file, not {known!r:.80}"
        )
    if known.precision != precision:
        raise OptionError(
            f"the calibration is for {known.precision}, not for {precision}: pass {call}"
        )
    graph = known.quantized(graph, options.error_budget)
    count = len(known.chosen(options.error_budget))
    fusion_log.info("%d of %d %s in %s", count, len(known.layers), known.kind, precision)
    return _expanded(graph, target)


def _expanded(graph: Graph, target: Target) -> Graph:
    """`graph` without attention and means of boxes that `target` has no kernel for, and with copies
    of images that its kernels read faster."""
    log = Log()
    if target.has_wgmma:
        graph = copy_whole_pixels(graph, log)
    graph = gather_channels(graph, log)  # behind copies whose pixels are padded
    if target.has_wgmma:
        graph = copy_patches(graph, log)  # behind copies that all of an image's readers share
    of_target = partial(refusal, target=target)
    price = partial(programmed_us, target=target)
    graph = whole_means(graph, log, refusal=of_target, price=price)
    graph = split_long_reductions(graph, log)
    graph = split_long_topk(graph, log)  # behind all that would drop its copy again
    graph = expand_attention(graph, log, refusal=of_target)
    for refused in log.refusals:
        fusion_log.debug("%s", refused)
    return graph


def capture(
    model: Any,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Graph:
    """The graph of `model` before any rewrite; the arguments are those of `compile`.

    Raises:
        CaptureError: the model cannot be exported.
    """
    return _capture(*accepted(model, args, kwargs, shapes)).graph


def _capture(model: Any, args: Any, kwargs: Any) -> Captured:
    module, args, kwargs = accepted(model, args, kwargs)
    captured = capture_torch(module, args, kwargs)
    graph = captured.graph
    frontend_log.info(
        "captured %s: %d inputs, %d constants of %.1f MB, %d nodes",
        type(module).__name__,
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

    Raises:
        GraphError: `graph` is no graph.
        TargetError: the target is unknown or too old.
    """
    if not isinstance(graph, Graph):
        raise GraphError(
            f"graph is a {type(graph).__name__}, not a gtco.Graph; pass gtco.capture(model, args)"
        )
    chosen = target if isinstance(target, Target) else find_target(target)
    rewritten = _expanded(run_pipeline(graph), chosen)
    return fusion.fuse(rewritten, partial(roofline_us, target=chosen))


def fuse_with(
    known: Knowledge, graph: Graph, target: Target, count: int = 1, *, explore: bool = False
) -> tuple[FusedGraph, ...]:
    """The `count` cheapest partitions of `graph`, which the passes have rewritten.

    Groups that were measured cost what they took, the others what `Knowledge.price` says;
    `explore` is for its benefit.
    """
    return fusion.best_plans(graph, _price(known, graph, target, explore=explore), count)


def fuse_known(known: Knowledge, graph: Graph, target: Target) -> FusedGraph:
    """The partition that was the fastest when whole plans were replayed, else the cheapest."""
    record = replayed(known, graph, target)
    if record is not None:
        price = known.where(record).price(target, ())

        def price_of(group: Group) -> float:
            has = workload_digest(workload_key(group, target)) in record.work
            return price(group) if has else math.inf

        fused = fusion.fuse(graph, price_of)
        if plan_work(fused, target) == record.work:
            fusion_log.info("the plan that was fastest, %s", known.source(record))
            return fused
        tune_log.warning(
            "the fastest plan on record cannot be made any more: groups are chosen by predicted "
            "times; gtco tune finds another"
        )
    return fusion.fuse(graph, _price(known, graph, target))


def _price(
    known: Knowledge, graph: Graph, target: Target, *, explore: bool = False
) -> Callable[[Group], float]:
    draft = partial(roofline_us, target=target)
    found = tasks(fusion.fuse(graph, draft), target)
    keys = [task.key for task in found]
    source = next((each for each in known.sources if each.has_times(keys)), None)
    return draft if source is None else source.price(target, found, explore=explore)


def plan_with(
    known: Knowledge,
    fused: FusedGraph,
    target: Target,
    options: Options,
    knobs: PlanKnobs | None = None,
) -> Plan:
    """`fused` with the best known way to run each group and, if no others are given, the best known
    knobs; otherwise as `plan_of`."""
    launches = select(fused, target, known)
    knobs = knobs or plan_knobs(known, fused.graph, launches, target)
    return plan_of(fused, launches, target, options, knobs)


def plan_of(
    fused: FusedGraph,
    launches: Iterable[Launch],
    target: Target,
    options: Options,
    knobs: PlanKnobs,
) -> Plan:
    """The plan of `fused`.

    Args:
        fused: the groups.
        launches: of them all, in any order.
        target: the architecture.
        options: the user's.
        knobs: of all launches together.
    """
    order = {group.name: position for position, group in enumerate(fused.groups)}
    ordered = tuple(sorted(launches, key=lambda launch: order[launch.group.name]))
    ordered = turn(ordered, target)
    if target.has_dependent_launch:
        ordered = knobs.apply(ordered, target)
    return Plan(fused, ordered, target, options)


def _tell_fallbacks(plan: Plan) -> None:
    kinds = fallback_kinds(plan.launches)
    if kinds and plan.options.fallback == "error":
        raise FallbackError(
            f"{sum(len(kind.launches) for kind in kinds)} groups have no generated kernel:\n  "
            + "\n  ".join(map(str, kinds))
            + '\npass fallback="warn" to run them with ATen'
        )
    for kind in kinds:
        codegen_log.warning("runs with ATen: %s", kind)
    if hint := precision_hint(plan):
        codegen_log.warning("%s", hint)
