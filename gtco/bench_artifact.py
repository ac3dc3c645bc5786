"""Time a saved artifact: alone, since the model that its peers would need is not in it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from gtco.bench import (
    INPUT_KINDS,
    BenchResult,
    CudaClock,
    Inputs,
    NoGpu,
    Tell,
    WrongAnswer,
    fresh_inputs,
    one_after_another,
    poison,
    profile_kernels,
    time_rounds,
)
from gtco.check import Precision, judge
from gtco.frontend.torch_export import Captured
from gtco.graph import TensorSpec
from gtco.interpreter import interpret
from gtco.runtime.artifact import Artifact, read
from gtco.runtime.library import library_precision
from gtco.runtime.module import CompiledModule


def bench_artifact(
    path: str | os.PathLike[str],
    *,
    rounds: int = 5,
    calls: int = 100,
    tell: Tell = lambda message: None,
) -> BenchResult:
    """Check a saved module's answers against its own graph in torch, then time it.

    Args:
        path: what `CompiledModule.save` wrote.
        rounds: how often it has its turn.
        calls: single calls, and calls back to back, of one turn.
        tell: called with a line of progress.

    Raises:
        ArtifactError: the file is damaged or not for this gtco.
        NoGpu: there is none.
        TargetError: the GPU is not the one that it was made for.
        WrongAnswer: its answer is wrong; nothing is timed then.
    """
    artifact = read(path)
    if not torch.cuda.is_available():
        raise NoGpu("gtco bench times kernels and finds no CUDA GPU; `gtco inspect` needs none")
    plan, captured = artifact.plan, artifact.captured
    compiled = CompiledModule(plan, captured, dict(artifact.kernels))
    tell("loading its kernels")
    device = compiled.prepare().device
    like = example_inputs(captured, device)
    result = BenchResult(launches=len(plan.launches))
    with torch.no_grad(), library_precision(plan.options.precision):
        tell("checking answers")
        _check_answers(result, compiled, artifact, like)
        inputs = [fresh_inputs(like, "normal", seed) for seed in range(4)]
        contestants = {"gtco": compiled}
        result.timings = time_rounds(contestants, inputs, CudaClock(), rounds, calls, tell)
        tell("profiling its kernels")  # last: the profiler slows later launches down
        result.kernels = profile_kernels(one_after_another(compiled), inputs[0])
    return result


def example_inputs(captured: Captured, device: torch.device) -> Inputs:
    """Arguments of the right structure, shapes and dtypes: zeros, and masks that let all pass."""

    def example(spec: TensorSpec) -> Tensor:
        return torch.full(spec.sizes, spec.dtype == torch.bool, dtype=spec.dtype, device=device)

    return captured.arguments([example(spec) for spec in captured.graph.inputs.values()])


def _check_answers(
    result: BenchResult, compiled: CompiledModule, artifact: Artifact, like: Inputs
) -> None:
    captured, fused = artifact.captured, artifact.plan.fused
    for seed, kind in enumerate(INPUT_KINDS):
        args, kwargs = fresh_inputs(like, kind, 100 + seed)
        tensors = captured.flatten(args, kwargs)
        torch_answer = captured.unflatten(interpret(fused, tensors))
        try:
            exact = interpret(fused, tensors, dtype=torch.float64)
        except RuntimeError:  # one of its operators has no fp64
            exact = interpret(fused, tensors, dtype=torch.float32)
        answer = compiled(*args, **kwargs)
        verdict = judge(answer, torch_answer, captured.unflatten(exact), _precision(artifact))
        result.verdicts.setdefault("gtco", {})[kind] = verdict
        poison(answer)
        if not verdict.ok:
            raise WrongAnswer(f"the artifact's answer for {kind} inputs is {verdict}")


def _precision(artifact: Artifact) -> Precision:
    """The key of `gtco.check.BOUNDS` for what the module computes in."""
    if artifact.plan.options.precision == "tf32":
        return "tf32"
    dtypes = {spec.dtype for spec in artifact.plan.graph.specs.values()}
    narrow = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes]
    return narrow[0] if narrow else torch.float32
