"""Ways to run one operator on a GPU, for `experiments.op_table` to time interleaved.

Each is a chain of twelve launches in a CUDA graph, and its answer is judged before it can be timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.op_shapes import Sizes
from gtco.check import judge
from gtco.codegen.program import KernelProgram
from gtco.codegen.sampler import Candidate
from gtco.cost_model.judge import random_values
from gtco.cost_model.record import TuningRecord
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.runtime.driver import BoundLaunch
from gtco.runtime.poison import poisoned
from gtco.runtime.run import Chain, load_program

COPIES = 12
"""Launches of a chain, each with weights of its own, as a model's layers have."""
ROUNDS, REPLAYS = 9, 10
"""Interleaved runs of each chain, and replays of it in a run."""
TRIES = 3
"""Runs of each configuration, of which the fastest is kept."""
SEED = 1234
"""Of inputs that no search has seen."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Tensors = Mapping[str, Tensor]
"""Of a GEMM x[rows, k], w[columns, k], bias[columns], y[rows, columns]; of attention q, k, v, y."""
Run = Callable[[Tensors], tuple[Tensor, ...]]
"""Computes and gives its results, in place or anew."""


class WrongAnswer(RuntimeError):
    """A kernel's answer is wrong; the message says by how much."""


@dataclass(frozen=True)
class References:
    """What an answer is held against.

    Args:
        eager: torch's answer in fp16.
        exact: the same in fp32.
    """

    eager: tuple[Tensor, ...]
    exact: tuple[Tensor, ...]

    def check(self, answer: tuple[Tensor, ...]) -> None:
        """Refuse an answer that `gtco.check` does not pass.

        Raises:
            WrongAnswer: it is wrong.
        """
        verdict = judge(answer, self.eager, self.exact, torch.float16)
        if not verdict.ok:
            raise WrongAnswer(verdict.reason)


class Rival:
    """A chain of launches that can be timed; it keeps what they use alive.

    Args:
        launches: of the chain; each enqueues on the stream with the given handle.
        tensors: that they read and write.
    """

    def __init__(self, launches: Sequence[Callable[[int], None]], tensors: Sequence[Tensors]):
        self._tensors = tensors
        self._chain = Chain(launches)

    def time_us(self) -> float:
        """Of one launch, from start to start."""
        return self._chain.times_us(1, REPLAYS)[0]


Name = TypeVar("Name", bound=Hashable)
Maker = Callable[[], Rival]
"""Makes a rival when it is called: one that cannot be made spoils no other."""


class Choice(NamedTuple):
    """The fastest of several configurations.

    Args:
        name: of the configuration.
        rival: its chain.
        left_out: those that failed, and why.
    """

    name: str
    rival: Rival
    left_out: tuple[str, ...]


def fastest(makers: Mapping[str, Maker]) -> Choice:
    """The fastest configuration of those that work.

    Raises:
        RuntimeError: none does; it has the reason of the first.
    """
    times: list[tuple[float, str, Rival]] = []
    reasons: list[str] = []
    for name, make in makers.items():
        try:
            rival = make()
            times.append((min(rival.time_us() for _ in range(TRIES)), name, rival))
        except Exception as error:  # of whatever kind: another configuration may do
            reasons.append(f"{name}: {said(error)}")
    if not times:
        raise RuntimeError(reasons[0])
    _, name, rival = min(times, key=lambda each: each[0])
    return Choice(name, rival, tuple(reasons))


def said(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def outcomes(
    asked: Iterable[tuple[Candidate, Future[TuningRecord]]],
) -> Iterator[tuple[Candidate, float | None, str]]:
    """Each program with its time while searching, or else with what is wrong; waits for them."""
    for candidate, future in asked:
        try:
            record = future.result()
        except Exception as error:  # nothing of the operator can be measured
            yield candidate, None, said(error)
        else:
            yield candidate, record.run_us, record.error


def alternated(clocks: Mapping[Name, Callable[[], float]]) -> dict[Name, list[float]]:
    """The times of each clock, interleaved."""
    times: dict[Name, list[float]] = {name: [] for name in clocks}
    for _ in range(ROUNDS):
        for name, clock in clocks.items():
            times[name].append(clock())
    return times


# -- generated kernels -----------------------------------------------------------------------------


def generated(program: KernelProgram, group: Group, device: torch.device) -> dict[str, Maker]:
    """The generated kernel, with dependent launch as in a model, by its schedule."""

    def make() -> Rival:
        graph = group.graph
        values = random_values(group, device, SEED)
        given = [values[name] for name in graph.inputs]
        exact = interpret(graph, given, dtype=torch.float32)
        references = References(interpret(graph, given), exact)
        outputs = {name: poisoned(graph.specs[name], device) for name in graph.outputs}
        weights = {name: values[name].contiguous() for name in graph.constants}
        copies = [
            {**values, **outputs, **{name: each.clone() for name, each in weights.items()}}
            for _ in range(COPIES)
        ]
        assert device.index is not None
        kernel = load_program(program, device.index)
        launches = [
            BoundLaunch(kernel, program, each, dependent=index > 0)
            for index, each in enumerate(copies)
        ]
        launches[0](torch.cuda.current_stream().cuda_stream)
        references.check(tuple(outputs.values()))
        return Rival(launches, copies)

    return {" ".join(f"{knob}={value}" for knob, value in program.schedule.items()): make}


# -- peers -----------------------------------------------------------------------------------------


def cublas(sizes: Sizes, device: torch.device) -> dict[str, Maker]:
    """torch's `addmm` of a transposed weight: the product and the bias, nothing else."""

    def run(tensors: Tensors) -> tuple[Tensor, ...]:
        x, w, bias, y = (tensors[name] for name in ("x", "w", "bias", "y"))
        return (torch.addmm(bias, x, w.t(), out=y),)

    return _linears(sizes, device, {"addmm": run})


def triton_linear(sizes: Sizes, device: torch.device) -> dict[str, Maker]:
    """The same in Triton, by tile."""
    from experiments import triton_peers

    def run(config: triton_peers.LinearConfig, tensors: Tensors) -> tuple[Tensor, ...]:
        x, w, bias, y = (tensors[name] for name in ("x", "w", "bias", "y"))
        triton_peers.linear(config, x, w, bias, y)
        return (y,)

    runs = {str(config): partial(run, config) for config in triton_peers.LINEAR}
    return _linears(sizes, device, runs)


def sdpa(sizes: Sizes, device: torch.device) -> dict[str, Maker]:
    """torch's `scaled_dot_product_attention` of contiguous operands, by backend."""

    def run(backend: SDPBackend, tensors: Tensors) -> tuple[Tensor, ...]:
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(tensors["q"], tensors["k"], tensors["v"]),)

    runs = {name: partial(run, backend) for name, backend in BACKENDS.items()}
    return _attentions(sizes, device, runs)


def triton_attention(sizes: Sizes, device: torch.device) -> dict[str, Maker]:
    """The same in Triton, by tile."""
    from experiments import triton_peers

    def run(config: triton_peers.AttentionConfig, tensors: Tensors) -> tuple[Tensor, ...]:
        q, k, v, y = (tensors[name] for name in ("q", "k", "v", "y"))
        triton_peers.attention(config, q, k, v, y)
        return (y,)

    runs = {str(config): partial(run, config) for config in triton_peers.ATTENTION}
    return _attentions(sizes, device, runs)


def _linears(sizes: Sizes, device: torch.device, runs: Mapping[str, Run]) -> dict[str, Maker]:
    rows, columns, k = sizes
    normal = random_halves(device)
    x, w, bias = normal(rows, k), normal(columns, k) * k**-0.5, normal(columns)
    exact = F.linear(x.float(), w.float(), bias.float())
    references = References((F.linear(x, w, bias),), (exact,))
    return peers(runs, {"x": x}, {"w": w, "bias": bias}, references)


def _attentions(sizes: Sizes, device: torch.device, runs: Mapping[str, Run]) -> dict[str, Maker]:
    normal = random_halves(device)
    q, k, v = (normal(*sizes) for _ in range(3))
    eager = F.scaled_dot_product_attention(q, k, v)
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    return peers(runs, {"q": q, "k": k, "v": v}, {}, References((eager,), (exact,)))


def peers(
    runs: Mapping[str, Run], shared: Tensors, weights: Tensors, references: References
) -> dict[str, Maker]:
    """Chains of torch's calls by name: each launch has a copy of `weights` of its own."""
    y = torch.empty_like(references.eager[0], memory_format=torch.contiguous_format)
    copies = [
        {**shared, "y": y, **{name: each.clone() for name, each in weights.items()}}
        for _ in range(COPIES)
    ]

    def make(run: Run) -> Rival:
        y.fill_(math.nan)
        references.check(run(copies[0]))
        return Rival([partial(_call, run, each) for each in copies], copies)

    return {name: partial(make, run) for name, run in runs.items()}


def _call(run: Run, tensors: Tensors, stream: int) -> None:
    """`run` in a chain, which makes its stream the current one; a fresh y is freed at once."""
    run(tensors)


def random_halves(device: torch.device) -> Callable[..., Tensor]:
    """Random fp16 tensors of given sizes, on `device`."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float16, device=device)

    return normal


def warm_triton(widths: set[int], device: torch.device) -> None:
    """Compile the Triton kernels for heads of these widths, if triton is here."""
    with suppress(ImportError):
        from experiments import triton_peers

        triton_peers.warm(device, widths)
