"""`gtco bench`: gtco beside its peers, answers first, then times in alternating rounds."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
from gtco.benchmarking.onnx_peer import OnnxRuntime
from gtco.check import Verdict, judge
from gtco.cost_model.plans import floor_us
from gtco.locate import Located
from gtco.options import Options
from gtco.runtime.captured import capture
from gtco.runtime.executable import Executable
from gtco.runtime.module import CompiledModule

Tell = Callable[[str], None]

INDUCTOR_MODES = ("reduce-overhead", "max-autotune")
CHANNELS_LAST = ", channels last"
"""Behind the name of a contestant whose convolutions have their weights so: torch then keeps images
in that layout, which is the faster one of many models."""
PEERS: Mapping[str, tuple[str, ...]] = {
    "eager": ("eager",),
    "inductor": tuple(f"inductor {mode}" for mode in INDUCTOR_MODES),
    "eager-channels-last": (f"eager{CHANNELS_LAST}",),
    "inductor-channels-last": tuple(f"inductor {mode}{CHANNELS_LAST}" for mode in INDUCTOR_MODES),
    "onnxruntime": (OnnxRuntime.name,),
}
"""What `--against` takes, and the contestants that each name stands for."""


class WrongAnswer(RuntimeError):
    """The compiled module does not compute what the model does."""


class NoGpu(RuntimeError):
    """A GPU is needed and there is none."""


@dataclass(frozen=True)
class Timing:
    """Times of one contestant, in microseconds.

    Args:
        single_us: p50, p90 and p99 of single calls, each waited for.
        host_us: median time until a single call returns, the GPU being idle when it starts: the
            Python and CUDA calls of one call. `experiments/studies/host_cost.py` takes it apart.
        back_to_back_us: per call of a long run without waiting, once clocks have settled; the
            median of the rounds.
        rounds_us: `back_to_back_us` of each round.
    """

    single_us: Mapping[str, float]
    host_us: float
    back_to_back_us: float
    rounds_us: tuple[float, ...]


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
    """

    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    launches: int = 0
    floor_us: float | None = None
    kernels: tuple[KernelTime, ...] = ()

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
    rounds: int = 5,
    calls: int = 100,
    trace: Path | None = None,
    tell: Tell = lambda message: None,
) -> BenchResult:
    """Compile `model`, check its answers and time it in turn with its peers.

    Args:
        model: on a CUDA device, with its arguments.
        options: for `gtco.compile`.
        peers: keys of `PEERS`.
        rounds: how often every contestant has its turn.
        calls: single calls, and calls back to back, of one turn.
        trace: a file for a Chrome trace of one call of gtco's.
        tell: called with a line of progress.

    Raises:
        NoGpu: there is none, or the model is not on it.
        UsageError: ONNX Runtime is asked for and cannot run this model, or is not installed.
        WrongAnswer: gtco's answer is wrong; nothing is timed then.
    """
    runtime = OnnxRuntime(model) if "onnxruntime" in peers else None
    model = _on_gpu(model)
    result = BenchResult()
    with torch.no_grad(), float32_products(options.precision):
        tell("compiling with gtco")
        compiled = gtco.compile(model.module, model.args, model.kwargs, **asdict(options))
        result.launches = len(compiled.launches)
        result.floor_us = floor_us(compiled.prepare().plan)
        given = (model.args, model.kwargs)
        truth = references(model, options.precision)
        contestants: dict[str, Call] = {"gtco": compiled}
        for name in itertools.chain.from_iterable(PEERS[peer] for peer in peers):
            tell(f"preparing {name}")
            try:
                ours = runtime if runtime and name == runtime.name else None
                contestants[name] = ours or _prepare(name, truth.eager, given)
            except Exception as error:
                result.failures[name] = _one_line(error)
        tell("checking answers")
        check_answers(result, contestants, model, truth, options.precision)
        inputs = [fresh_inputs(given, "normal", seed) for seed in range(4)]
        result.timings = time_rounds(contestants, inputs, CudaClock(), rounds, calls, tell)
        tell("profiling gtco's kernels")  # last: the profiler slows later launches down
        result.kernels = profile_kernels(one_after_another(compiled), inputs[0])
        if trace is not None:
            compiled.trace(trace, *inputs[0][0], **inputs[0][1])
    compare(result, peers)
    return result


def _on_gpu(model: Located) -> Located:
    if not torch.cuda.is_available():
        raise NoGpu("gtco bench times kernels and finds no CUDA GPU; `gtco compile` needs none")
    model = model.file_on("cuda")
    tensors = [*model.module.parameters(), *pytree.tree_leaves((model.args, model.kwargs))]
    if not all(leaf.is_cuda for leaf in tensors if isinstance(leaf, Tensor)):
        raise NoGpu(f"{model.name} is not on the GPU: return module.cuda() and CUDA arguments")
    return model


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


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


# -- contestants ---------------------------------------------------------------------------------


class GraphedEager:
    """Torch eager in a CUDA graph captured by hand, as careful as gtco is.

    A call takes any inputs and gives fresh tensors, as gtco's does: it copies the inputs in and
    clones the outputs, since torch's graphs stay where they were captured. Inductor stands as torch
    gives it, which hands out its graph's own memory.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model  # the graph reads its weights and keeps none of them alive
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, inputs)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # lets cuBLAS and cuDNN choose and allocate before the capture
                model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        self.buffers = tensors_of((args, kwargs))
        self.graph = torch.cuda.CUDAGraph()

        def enqueue() -> None:
            self.outputs = model(*args, **kwargs)

        # Not by torch.cuda.graph: its one stream keeps a workspace of cuBLAS's that may be gone.
        torch.cuda.synchronize()
        capture(self.graph, side, enqueue)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = not kwargs and len(args) == len(self.buffers)  # as one would write it by hand
        self.copy_in(args if plain else tensors_of((args, kwargs)))
        self.graph.replay()
        return self.clone_out()

    def copy_in(self, given: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self.buffers, given, strict=True):
            mine.copy_(theirs)

    def clone_out(self) -> Any:
        if isinstance(self.outputs, Tensor):
            return self.outputs.clone()
        return pytree.tree_map_only(Tensor, torch.clone, self.outputs)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of `tree`, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _prepare(name: str, model: nn.Module, inputs: Inputs) -> Call:
    """The contestant `name`, warmed up: Inductor captures its own graphs in the first calls."""
    args, kwargs = inputs
    if name.endswith(CHANNELS_LAST):
        model = copy.deepcopy(model)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        name = name.removesuffix(CHANNELS_LAST)
    if name == "eager":
        call: Call = GraphedEager(model, inputs)
    else:
        call = torch.compile(model, mode=name.removeprefix("inductor "))
    for _ in range(3):
        call(*args, **kwargs)
    torch.cuda.synchronize()
    return call


# -- answers -------------------------------------------------------------------------------------


def check_answers(
    result: BenchResult,
    contestants: dict[str, Call],
    model: Located,
    truth: References,
    precision: str | None,
) -> None:
    """Judge every contestant on each kind of input; outputs are poisoned after each look."""
    for seed, kind in enumerate(INPUT_KINDS):
        args, kwargs = fresh_inputs((model.args, model.kwargs), kind, 100 + seed)
        reference, eager = truth.exact((args, kwargs)), truth.eager(*args, **kwargs)
        for name, call in contestants.items():
            answer = call(*args, **kwargs)
            verdict = judge(answer, eager, reference, compute_precision(model, precision))
            result.verdicts.setdefault(name, {})[kind] = verdict
            poison(answer)
            if name == "gtco" and not verdict.ok:
                raise WrongAnswer(f"gtco's answer for {kind} inputs is {verdict}")


# -- times ---------------------------------------------------------------------------------------


class Clock(Protocol):
    """How calls are timed."""

    def single(self, call: Call, inputs: Inputs) -> tuple[float, float]:
        """Microseconds until the answer is there, and until the call returned."""

    def back_to_back(self, call: Call, inputs: Sequence[Inputs], calls: int) -> float:
        """Microseconds per call of `calls` calls in a row."""


class CudaClock:
    """Wall time for single synchronised calls, events around many."""

    def single(self, call: Call, inputs: Inputs) -> tuple[float, float]:
        args, kwargs = inputs
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call(*args, **kwargs)
        returned = time.perf_counter_ns()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin) / 1e3, (returned - begin) / 1e3

    def back_to_back(self, call: Call, inputs: Sequence[Inputs], calls: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        for _, (args, kwargs) in zip(range(calls), itertools.cycle(inputs), strict=False):
            call(*args, **kwargs)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls


SETTLING_US = 200_000
"""How long calls run ahead of those whose time back to back counts. A GPU that was idle in between,
as it is when each call is waited for, is slower for a while: an H100's multiprocessors run at 1.77
GHz for up to 200 ms and at 1.87 then, and NVML says 1.98 of both
(experiments/notes/16-large_models.md)."""


def settle(clock: Clock, call: Call, inputs: Sequence[Inputs]) -> None:
    """Let clocks and caches settle, right ahead of calls of `call` back to back."""
    each_us = clock.back_to_back(call, inputs, 3)
    clock.back_to_back(call, inputs, math.ceil(SETTLING_US / each_us))


def time_rounds(
    contestants: Mapping[str, Call],
    inputs: Sequence[Inputs],
    clock: Clock,
    rounds: int,
    calls: int,
    tell: Tell = lambda message: None,
) -> dict[str, Timing]:
    """Time every contestant once a round, starting with another one each round.

    Args:
        contestants: name to call.
        inputs: argument sets that the calls take turns with.
        rounds: at least 1.
        calls: at least 2.
    """
    singles: dict[str, list[float]] = {name: [] for name in contestants}
    hosts: dict[str, list[float]] = {name: [] for name in contestants}
    chains: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            tell(f"round {turn + 1} of {rounds}: {name}")
            call = contestants[name]
            settle(clock, call, inputs)
            chains[name].append(clock.back_to_back(call, inputs, calls))
            for _, given in zip(range(calls), itertools.cycle(inputs), strict=False):
                total, host = clock.single(call, given)
                singles[name].append(total)
                hosts[name].append(host)
    return {
        name: Timing(
            percentiles(singles[name]),
            statistics.median(hosts[name]),
            statistics.median(chains[name]),
            tuple(chains[name]),
        )
        for name in names
    }


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of at least two samples."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


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
