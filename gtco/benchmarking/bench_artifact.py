"""Time a saved artifact: alone, since the model that its peers would need is not in it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gtco.benchmarking.answers import (
    INPUT_KINDS,
    Inputs,
    Interpreted,
    example_inputs,
    fresh_inputs,
    plan_precision,
    poison,
)
from gtco.benchmarking.bench import BenchResult, WrongAnswer, one_after_another, profile_kernels
from gtco.benchmarking.contestants import NoGpu
from gtco.benchmarking.rounds import CudaClock, Tell, time_rounds
from gtco.check import judge
from gtco.cost_model.plans import floor_us
from gtco.runtime.artifact import Artifact, read
from gtco.runtime.library import library_precision
from gtco.runtime.module import CompiledModule


def bench_artifact(
    path: str | os.PathLike[str],
    *,
    rounds: int = 5,
    calls: int = 100,
    trace: Path | None = None,
    tell: Tell = lambda message: None,
) -> BenchResult:
    """Check a saved module's answers against its own graph in torch, then time it.

    Args:
        path: what `CompiledModule.save` wrote.
        rounds: how often it is timed.
        calls: single calls, and calls back to back, of one round.
        trace: a file for a Chrome trace of one call.
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
    result = BenchResult(launches=len(plan.launches), floor_us=floor_us(plan))
    with torch.no_grad(), library_precision(plan.options.precision):
        tell("checking answers")
        _check_answers(result, compiled, artifact, like)
        inputs = [fresh_inputs(like, "normal", seed) for seed in range(4)]
        contestants = {"gtco": compiled}
        result.timings = time_rounds(contestants, inputs, CudaClock(), rounds, calls, tell)
        tell("profiling its kernels")  # last: the profiler slows later launches down
        result.kernels = profile_kernels(one_after_another(compiled), inputs[0])
        if trace is not None:
            compiled.trace(trace, *inputs[0][0], **inputs[0][1])
    return result


def _check_answers(
    result: BenchResult, compiled: CompiledModule, artifact: Artifact, like: Inputs
) -> None:
    graph = Interpreted(artifact.captured, artifact.plan.fused)
    for seed, kind in enumerate(INPUT_KINDS):
        args, kwargs = fresh_inputs(like, kind, 100 + seed)
        torch_answer, exact = graph(*args, **kwargs), graph.exact((args, kwargs))
        answer = compiled(*args, **kwargs)
        verdict = judge(answer, torch_answer, exact, plan_precision(artifact.plan))
        result.verdicts.setdefault("gtco", {})[kind] = verdict
        poison(answer)
        if not verdict.ok:
            raise WrongAnswer(f"the artifact's answer for {kind} inputs is {verdict}")
