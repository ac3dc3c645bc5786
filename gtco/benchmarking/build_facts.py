"""All that `gtco report` tells of a compiled module: planned, and on a GPU timed and checked."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, fields, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gtco.benchmarking.answers import (
    Inputs,
    Interpreted,
    compute_precision,
    example_inputs,
    fresh_inputs,
    own_references,
    plan_precision,
    references,
)
from gtco.benchmarking.compare import GroupCheck, NoReference, check_groups, judge_answers
from gtco.benchmarking.rounds import CudaClock, Tell, time_rounds
from gtco.calibration import TYPES, Calibration, Layer
from gtco.check import Verdict
from gtco.compiler import rewritten
from gtco.cost_model.plans import floor_us, group_floor_us
from gtco.cost_model.work import group_work
from gtco.frontend.torch_export import Captured
from gtco.locate import Located
from gtco.options import Options
from gtco.reporting.build import (
    BACK_TO_BACK,
    Answer,
    Apart,
    Build,
    Judged,
    KernelFacts,
    LaunchFacts,
    Layers,
    LinearFacts,
)
from gtco.reporting.report import make_report
from gtco.runtime.cubin import CompiledKernel
from gtco.runtime.executable import compile_programs
from gtco.runtime.library import library_precision
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch, Plan
from gtco.runtime.trace import launch_times
from gtco.target import HOST, TargetError

PREDICTED = (
    "No GPU ran this build: the times are predictions of the cost model, from start to start of "
    "launches in a chain. No answer was checked either, as it is on a GPU and for the target host."
)
ON_HOST = (
    "The kernels ran on the CPU, through a C++ compiler, to be checked. The times are predictions "
    "of the cost model, from start to start of launches in a chain."
)
MEASURED = (
    "The launches' times were measured one launch after the other, outside the CUDA graph, from "
    "the start of a kernel to its end, the median of some runs. In the CUDA graph the start of a "
    "kernel overlaps the end of the one ahead: a whole call takes less than their sum."
)
UNSEEN = (
    "Whole calls were timed on the GPU. The profiler did not see each launch, so that the times of "
    "launches are predictions of the cost model."
)
AGAINST_MODEL = (
    "Each output was held against the model itself in fp64, with fresh random inputs. It may be "
    "off by a few times as much as torch is in the same precision, and a little more."
)
AGAINST_GRAPH = (
    "Each output was held against the saved graph in fp64, with fresh random inputs: a saved "
    "artifact does not hold the model. It may be off by a few times as much as torch is when it "
    "runs that graph, and a little more."
)
_WALKS = 5


def build_facts(
    model: str,
    plan: Plan,
    captured: Captured,
    gtco_version: str,
    kernels: Mapping[str, CompiledKernel] | None = None,
    tell: Tell = lambda message: None,
    source: Located | None = None,
) -> Build:
    """What is known of `plan`.

    Where it can run, its answers are held against the model and each group against the
    interpreter; on a GPU whole calls and launches are timed as well.

    Args:
        model: its name.
        plan: what runs.
        captured: what it was made from.
        gtco_version: of the gtco that made it.
        kernels: the compiled ones by entry point; None compiles them.
        tell: called with a line of progress.
        source: the model and its arguments; the plan's own graph in torch stands in for none.

    Raises:
        CompileError: a kernel does not compile.
        HostCompilerError: for target "host", if there is no C++ compiler.
        GpuMemoryError: the GPU has too little memory.
    """
    on_host = plan.options.target == HOST
    if kernels is None:
        tell("compiling its kernels")
        kernels = {} if on_host else compile_programs(plan)
    compiled = CompiledModule(plan, captured, dict(kernels))
    try:
        ready = compiled.prepare()
    except TargetError:
        return planned_facts(model, plan, captured, gtco_version, kernels, PREDICTED)
    device = ready.device
    source = None if source is None else _on(source, device)
    like = example_inputs(captured, device) if source is None else (source.args, source.kwargs)
    with torch.no_grad(), library_precision(plan.options.precision):
        answers, reference = _answers(compiled, plan, captured, source, like, tell)
        checks = check_groups(compiled, fresh_inputs(like, "normal", 100), tell)
        facts = planned_facts(model, plan, captured, gtco_version, kernels, ON_HOST, checks)
        hints = (*facts.hints, *(f"not in the CUDA graph: {each}" for each in ready.uncaptured))
        facts = replace(facts, answers=answers, reference=reference, hints=hints)
        return facts if on_host else _timed(facts, plan, compiled, like, tell)


def _on(source: Located, device: torch.device) -> Located:
    """`source` where the kernels run; the user's own module is not moved."""
    tensors = pytree.tree_leaves((list(source.module.state_dict().values()), source.args))
    if all(each.device == device for each in tensors if isinstance(each, Tensor)):
        return source
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda each: each.to(device), (source.args, source.kwargs)
    )
    return replace(source, module=copy.deepcopy(source.module).to(device), args=args, kwargs=kwargs)


def _answers(
    compiled: CompiledModule,
    plan: Plan,
    captured: Captured,
    source: Located | None,
    like: Inputs,
    tell: Tell,
) -> tuple[tuple[Answer, ...], str]:
    """Each output for each kind of inputs, and what it was held against."""
    if source is None:
        graph = Interpreted(captured, plan.fused)
        truth, precision = own_references(graph), plan_precision(plan)
    else:
        truth = references(source, plan.options.precision)
        precision = compute_precision(source, plan.options.precision)
    try:
        found = judge_answers({"gtco": compiled}, truth, like, precision, tell)
    except NoReference as error:
        return (), f"The outputs of the whole model were not judged: {error}"
    answers = tuple(
        Answer(
            each.kind,
            each.output,
            _finite(each.verdict.eager_rmse),
            _judged(each.verdict, each.max_abs),
        )
        for each in found
    )
    return answers, AGAINST_GRAPH if source is None else AGAINST_MODEL


def planned_facts(
    model: str,
    plan: Plan,
    captured: Captured,
    gtco_version: str,
    kernels: Mapping[str, CompiledKernel],
    clock: str,
    checks: tuple[GroupCheck, ...] = (),
) -> Build:
    """What a plan and its compiled kernels say without a clock.

    Args:
        model: its name.
        plan: what runs.
        captured: what it was made from.
        gtco_version: of the gtco that made it.
        kernels: the compiled ones by entry point; may lack some.
        clock: what the times are, in a sentence.
        checks: of each group, or none.
    """
    graph = plan.graph
    made = {
        value: position
        for position, launch in enumerate(plan.launches)
        for value in launch.group.graph.outputs
    }
    made |= {name: -1 - number for number, name in enumerate(graph.inputs)}
    errors = {check.group: _judged(check.verdict, check.max_abs) for check in checks}
    report = make_report(plan, captured.graph)
    why = {name: kind.explanation for kind in report.fallback_kinds for name in kind.launches}
    return Build(
        model=model,
        gtco_version=gtco_version,
        target=plan.options.target or plan.target.arch,
        device="",
        options=_given(plan.options),
        summary=tuple(report.facts()),
        times={},
        clock=clock,
        floor_us=floor_us(plan),
        inputs=tuple(f"%{name}: {spec}" for name, spec in graph.given.items()),
        outputs=tuple(
            (f"%{name}: {graph.specs[name]}", made[base])
            for name, (base, _) in plan.outputs.items()
            if base in made
        ),
        launches=tuple(_launch(launch, plan, made, errors, why) for launch in plan.launches),
        kernels=_kernels(plan, kernels),
        layers=tuple(Layers(**asdict(each)) for each in plan.fused.repeats),
        apart=_apart(plan),
        answers=(),
        reference="",
        hints=(report.precision_hint,) if report.precision_hint else (),
        linears=_linears(plan, captured),
    )


def _given(options: Options) -> dict[str, str]:
    found = {}
    for field in fields(Options):
        value = getattr(options, field.name)
        if value != field.default:
            known = isinstance(value, Calibration)
            found[field.name] = f"of {len(value.layers)} linears" if known else str(value)
    return found


def _linears(plan: Plan, captured: Captured) -> tuple[LinearFacts, ...]:
    """What the calibration of `plan` says of each linear, the dearest first."""
    options = plan.options
    known = options.calibration
    if options.precision not in TYPES or known is None:
        return ()
    known = known if isinstance(known, Calibration) else Calibration.load(known)
    chosen = {layer.name for layer in known.chosen(options.error_budget)}
    graph = rewritten(captured, replace(options, precision=None), plan.target)
    nodes = {node.name: node for node in graph.nodes}

    def facts(layer: Layer) -> LinearFacts:
        node = nodes.get(layer.name)
        operands = [] if node is None else [str(graph.specs[name]) for name in node.inputs[:2]]
        kept = "" if layer.name in chosen else f"over the budget of {options.error_budget:.1%}"
        return LinearFacts(
            layer.name,
            layer.source,
            " x ".join(operands),
            layer.error or 0.0,
            kept,
            known.precision,
        )

    return tuple(facts(each) for each in sorted(known.layers, key=lambda x: -(x.error or 0.0)))


def _launch(
    launch: Launch,
    plan: Plan,
    made: dict[str, int],
    errors: dict[str, Judged],
    why: dict[str, str],
) -> LaunchFacts:
    group, program = launch.group, launch.program
    work = group_work(group)
    main = [node.source for node in group.compute if node.definition.multiplies and node.source]
    reads = [made[name] for name in group.graph.inputs if name in made]
    return LaunchFacts(
        name=group.name,
        layer=next(iter((*main, *launch.modules)), ""),
        modules=launch.modules,
        family=launch.family,
        ops=tuple(str(node.attrs.get("target", node.op)) for node in group.compute),
        kernel="aten" if program is None else program.name,
        sketch="" if program is None else program.sketch,
        schedule={} if program is None else dict(program.schedule),
        source=launch.source,
        reason=why.get(group.name, launch.reason),
        predicted_us=launch.predicted_us,
        measured_us=None,
        floor_us=group_floor_us(group, plan.target),
        nbytes=work.weight_bytes + work.read_bytes + work.written_bytes,
        reads=tuple(dict.fromkeys(reads)),
        error=errors.get(group.name),
    )


def _judged(verdict: Verdict, max_abs: float | None) -> Judged:
    rmse, limit, largest = map(_finite, (verdict.rmse, verdict.limit, max_abs))
    return Judged(verdict.ok, rmse, limit, largest, verdict.reason)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _kernels(plan: Plan, compiled: Mapping[str, CompiledKernel]) -> tuple[KernelFacts, ...]:
    programs = {each.program.name: each.program for each in plan.launches if each.program}
    found = []
    for name, program in programs.items():
        kernel = compiled.get(name)
        found.append(
            KernelFacts(
                name,
                None if kernel is None else kernel.registers,
                None if kernel is None else kernel.smem_bytes + program.smem_bytes,
                None if kernel is None else kernel.spill_bytes,
                None if kernel is None else len(kernel.cubin),
                program.code,
            )
        )
    return tuple(found)


def _apart(plan: Plan) -> tuple[Apart, ...]:
    home = {
        node.name: position
        for position, launch in enumerate(plan.launches)
        for node in launch.group.compute
    }
    return tuple(
        Apart(home[producer], home[consumer], f"%{producer} -> %{consumer}", reason)
        for producer, consumer, reason in plan.fused.refusals
        if producer in home and consumer in home
    )


# -- on a GPU --------------------------------------------------------------------------------------


def _timed(facts: Build, plan: Plan, compiled: CompiledModule, like: Inputs, tell: Tell) -> Build:
    inputs = [fresh_inputs(like, "normal", seed) for seed in range(4)]
    timing = time_rounds({"gtco": compiled}, inputs, CudaClock(), 3, 100, tell)["gtco"]
    tell("timing each launch")  # last: the profiler slows later launches down
    args, kwargs = inputs[0]
    walks = [
        launch_times(plan, lambda visit: compiled.walk(visit, *args, **kwargs))
        for _ in range(_WALKS)
    ]
    measured = [_median(each) for each in zip(*walks, strict=True)]
    launches = tuple(
        replace(launch, measured_us=us) for launch, us in zip(facts.launches, measured, strict=True)
    )
    times = {BACK_TO_BACK: timing.back_to_back_us}
    times |= {f"synchronised {name}": us for name, us in timing.single_us.items()}
    timed = replace(facts, device=torch.cuda.get_device_name(), times=times, launches=launches)
    return replace(timed, clock=MEASURED if timed.is_measured else UNSEEN)


def _median(samples: tuple[float | None, ...]) -> float | None:
    known = [each for each in samples if each is not None]
    return statistics.median(known) if len(known) == len(samples) else None
