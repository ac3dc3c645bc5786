"""`gtco bench`: gtco beside its peers, answers first, then times in alternating rounds."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import gtco
from gtco.benchmarking.answers import (
    INPUT_KINDS,
    Call,
    Inputs,
    References,
    compute_precision,
    fresh_inputs,
    poison,
    references,
)
from gtco.benchmarking.contestants import (
    GTCO,
    PEERS,
    Cost,
    NoGpu,
    Setting,
    costs,
    prepare,
    tensors_of,
)
from gtco.benchmarking.rounds import (
    CudaClock,
    HostClock,
    Tell,
    Timing,
    may_fail,
    time_rounds,
)
from gtco.benchmarking.tensorrt_peer import TensorRT, TensorRTPlace
from gtco.check import Verdict, judge
from gtco.cost_model.plans import floor_us
from gtco.locate import Located
from gtco.options import Options
from gtco.runtime.executable import Executable
from gtco.runtime.module import CompiledModule
from gtco.target import HOST


class WrongAnswer(RuntimeError):
    """The compiled module does not compute what the model does."""


@dataclass(frozen=True)
class KernelTime:
    """What the profiler saw of one kernel (or copy) in a call.

    Args:
        name: of the kernel.
        launches: of one call.
        mean_us: of a launch, from its start to its end, each after the one ahead has ended.
        share: of all launches' time, 0 to 1.
    """

    name: str
    launches: float
    mean_us: float
    share: float

    @property
    def generated(self) -> bool:
        """Whether gtco generated it."""
        return self.name.startswith("gtco_")


@dataclass
class BenchResult:
    """What one benchmark found.

    Args:
        verdicts: contestant to its verdict on each kind of input.
        timings: contestant to its times.
        best: peer to the contestant that stands for it, such as inductor to its better mode.
        failures: contestant to why it could not run.
        ratios: peer to how many times as long as gtco it takes, by kind of time.
        launches: of the compiled module.
        floor_us: what no plan of the model can be below (`gtco.cost_model.plans.floor_us`).
        kernels: what gtco's call runs on the GPU, the longest first; copies in and out as well.
        costs: contestant to what making it ready took.
        weight_bytes: of the model's own weights, on which torch's contestants run.
        facts: of TensorRT: its version, and how the engine was built.
        rehearsal: it ran on the CPU: its times say nothing of a GPU.
    """

    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    launches: int = 0
    floor_us: float | None = None
    kernels: tuple[KernelTime, ...] = ()
    costs: dict[str, Cost] = field(default_factory=dict)
    weight_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    rehearsal: bool = False

    @property
    def generated_share(self) -> float | None:
        """The share of GPU time in kernels that gtco generated; None if the profiler saw none."""
        if not self.kernels:
            return None
        return sum(kernel.share for kernel in self.kernels if kernel.generated)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        verdicts = {
            name: {kind: verdict.to_dict() for kind, verdict in kinds.items()}
            for name, kinds in self.verdicts.items()
        }
        share = self.generated_share
        return {**asdict(self), "verdicts": verdicts, "generated_share": share}


def bench(
    model: Located,
    options: Options,
    peers: Sequence[str] = ("eager", "inductor"),
    *,
    without: Collection[str] = (),
    rounds: int = 5,
    calls: int = 100,
    trace: Path | None = None,
    database: str | os.PathLike[str] | None = None,
    tensorrt: TensorRTPlace | None = None,
    tell: Tell = lambda message: None,
) -> BenchResult:
    """Compile `model`, check its answers and time it and its peers in interleaved rounds.

    A peer that fails, then or later, is among the result's failures and spoils nothing else. With
    the target "host" all of it is rehearsed on the CPU, with whichever peers run there.

    Args:
        model: on a CUDA device, with its arguments.
        options: for `gtco.compile`.
        peers: keys of `PEERS`.
        without: contestants of theirs that are left out.
        rounds: how often each contestant runs, interleaved with the others.
        calls: single calls, and calls back to back, of one round.
        trace: a file for a Chrome trace of one call of gtco's.
        database: as for `gtco.compile`.
        tensorrt: where TensorRT is, for the peer of that name.
        tell: called with a line of progress; it ends with the contestant's name.

    Raises:
        NoGpu: there is none, or the model is not on it.
        Unusable: a peer broke the GPU's context for everyone in this process.
        WrongAnswer: gtco's answer is wrong; nothing is timed then.
    """
    rehearsal = options.target == HOST
    model = model.file_on("cpu") if rehearsal else _on_gpu(model)
    result = BenchResult(rehearsal=rehearsal)
    given = (model.args, model.kwargs)
    with ExitStack() as stack, torch.no_grad(), float32_products(options.precision):
        tell(f"preparing {GTCO}")
        with costs(result.costs, GTCO):
            compiled = gtco.compile(model.module, *given, database=database, **options.keywords())
            ready = compiled.prepare()
            compiled(*model.args, **model.kwargs)
        result.launches = len(compiled.launches)
        result.floor_us = floor_us(ready.plan)
        truth = references(model, options.precision)
        result.weight_bytes = sum(each.nbytes for each in truth.eager.state_dict().values())
        contestants: dict[str, Call] = {GTCO: compiled}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setting = Setting(model, truth.eager, options, folder, stack, tensorrt)
        for name in itertools.chain.from_iterable(PEERS[peer] for peer in peers):
            if name in without:
                continue
            tell(f"preparing {name}")
            with may_fail(name, result.failures), costs(result.costs, name):
                contestants[name] = prepare(name, setting)
        result.facts = next((c.facts for c in contestants.values() if isinstance(c, TensorRT)), {})
        check_answers(result, contestants, model, truth, options.precision, tell)
        contestants = {n: each for n, each in contestants.items() if n not in result.failures}
        inputs = [fresh_inputs(given, "normal", seed) for seed in range(4)]
        clock = HostClock() if rehearsal else CudaClock()
        result.timings = time_rounds(
            contestants, inputs, clock, rounds, calls, tell, result.failures
        )
        if not rehearsal:
            tell(f"profiling {GTCO}")  # last: the profiler slows later launches down
            result.kernels = profile_kernels(one_after_another(compiled), inputs[0])
        if trace is not None:
            compiled.trace(trace, *inputs[0][0], **inputs[0][1])
    compare(result, peers)
    return result


def _on_gpu(model: Located) -> Located:
    if not torch.cuda.is_available():
        raise NoGpu("gtco bench times kernels and finds no CUDA GPU; `gtco compile` needs none")
    model = model.file_on("cuda")
    if not all(each.is_cuda for each in tensors_of([*model.module.parameters(), model.args])):
        raise NoGpu(f"{model.name} is not on the GPU: return module.cuda() and CUDA arguments")
    return model


@contextmanager
def float32_products(precision: str | None) -> Iterator[None]:
    """Let torch use tf32 in fp32 models exactly when gtco does, so that peers do equal work."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


# -- answers -------------------------------------------------------------------------------------


def check_answers(
    result: BenchResult,
    contestants: dict[str, Call],
    model: Located,
    truth: References,
    precision: str | None,
    tell: Tell = lambda message: None,
) -> None:
    """Judge every contestant on each kind of input; outputs are poisoned after each look."""
    for seed, kind in enumerate(INPUT_KINDS):
        args, kwargs = fresh_inputs((model.args, model.kwargs), kind, 100 + seed)
        reference, eager = truth.exact((args, kwargs)), truth.judged((args, kwargs))
        for name, call in contestants.items():
            if name in result.failures:
                continue
            tell(f"checking {name}")
            with may_fail(name, result.failures):
                answer = call(*args, **kwargs)
                verdict = judge(answer, eager, reference, compute_precision(model, precision))
                result.verdicts.setdefault(name, {})[kind] = verdict
                poison(answer)
                if name == GTCO and not verdict.ok:
                    raise WrongAnswer(f"gtco's answer for {kind} inputs is {verdict}")


# -- comparing and profiling ---------------------------------------------------------------------


def compare(result: BenchResult, peers: Sequence[str]) -> None:
    """Choose who stands for each peer and fill in the ratios; above 1 gtco is faster.

    Whose answer is wrong stands for nobody.
    """
    ours = result.timings["gtco"]
    right = {
        name
        for name, verdicts in result.verdicts.items()
        if all(verdict.ok for verdict in verdicts.values())
    }
    for peer in peers:
        running = [name for name in PEERS[peer] if name in result.timings and name in right]
        if not running:
            continue
        best = min(running, key=lambda name: result.timings[name].back_to_back_us)
        theirs = result.timings[best]
        paired = [b / a for a, b in zip(ours.rounds_us, theirs.rounds_us, strict=True)]
        result.best[peer] = best
        result.ratios[peer] = {
            "single_p50": theirs.single_us["p50"] / ours.single_us["p50"],
            "single_p99": theirs.single_us["p99"] / ours.single_us["p99"],
            "back_to_back": statistics.median(paired),
            "back_to_back_low": min(paired),
            "back_to_back_high": max(paired),
        }


def one_after_another(compiled: CompiledModule) -> Call:
    """`compiled` without dependent launch: overlapping launches would count their waiting."""
    ours = compiled.prepare()
    assert isinstance(ours, Executable), "only a GPU is profiled"
    plan = replace(ours.plan, dependent_launch=False)
    apart = Executable(plan, ours.device, ours.kernels)

    def call(*args: Any, **kwargs: Any) -> Any:
        return apart(tensors_of((args, kwargs)), static_outputs=True)

    return call


def profile_kernels(call: Call, inputs: Inputs, calls: int = 5) -> tuple[KernelTime, ...]:
    """What `call` runs on the GPU; nothing if the profiler sees nothing."""
    args, kwargs = inputs
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            call(*args, **kwargs)
        torch.cuda.synchronize()
    spans = [
        (event.name, float(event.time_range.elapsed_us()))
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return kernel_times(spans, calls)


def kernel_times(spans: Iterable[tuple[str, float]], calls: int) -> tuple[KernelTime, ...]:
    """The table of (kernel, microseconds) seen in `calls` calls, the longest share first."""
    times: dict[str, list[float]] = {}
    for name, spent in spans:
        times.setdefault(name, []).append(spent)
    total = sum(map(sum, times.values()))
    if not total:
        return ()
    table = [
        KernelTime(name, len(spent) / calls, statistics.fmean(spent), sum(spent) / total)
        for name, spent in times.items()
    ]
    return tuple(sorted(table, key=lambda kernel: -kernel.share))
