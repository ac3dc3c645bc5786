"""Times of contestants in alternating rounds, in which a peer may fail and spoils nothing else."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from gtco.benchmarking.answers import Call, Inputs
from gtco.benchmarking.contestants import GTCO

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Times of one contestant, in microseconds.

    Args:
        single_us: p50, p90 and p99 of single calls, each synchronised.
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


SETTLING_US = 200_000
"""How long calls run ahead of those whose time back to back counts. A GPU that was idle in between,
as it is when each call is synchronised, is slower for a while: an H100's multiprocessors run at
1.77 GHz for up to 200 ms and at 1.87 then, and NVML says 1.98 of both
(experiments/notes/16-large_models.md)."""


@runtime_checkable
class Clock(Protocol):
    """How calls are timed. A contestant of another process is its own clock."""

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


class HostClock:
    """Wall time on the CPU."""

    def single(self, call: Call, inputs: Inputs) -> tuple[float, float]:
        spent_us = self.back_to_back(call, [inputs], 1)
        return spent_us, spent_us

    def back_to_back(self, call: Call, inputs: Sequence[Inputs], calls: int) -> float:
        begin = time.perf_counter_ns()
        for _, (args, kwargs) in zip(range(calls), itertools.cycle(inputs), strict=False):
            call(*args, **kwargs)
        return (time.perf_counter_ns() - begin) / 1e3 / calls


def settle(clock: Clock, call: Call, inputs: Sequence[Inputs]) -> None:
    """Let clocks and caches settle, right ahead of calls of `call` back to back."""
    if isinstance(clock, HostClock):
        return
    each_us = clock.back_to_back(call, inputs, 3)
    clock.back_to_back(call, inputs, math.ceil(SETTLING_US / each_us))


def time_rounds(
    contestants: Mapping[str, Call],
    inputs: Sequence[Inputs],
    clock: Clock,
    rounds: int,
    calls: int,
    tell: Tell = lambda message: None,
    failures: dict[str, str] | None = None,
) -> dict[str, Timing]:
    """Time every contestant once a round, starting with another one each round.

    Args:
        contestants: name to call.
        inputs: argument sets that the calls use one after the other.
        clock: of all contestants that are none themselves.
        rounds: at least 1.
        calls: at least 2.
        tell: called with a line of progress.
        failures: takes who failed; they have no times.
    """
    failed: dict[str, str] = {} if failures is None else failures
    singles: dict[str, list[float]] = {name: [] for name in contestants}
    hosts: dict[str, list[float]] = {name: [] for name in contestants}
    chains: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            tell(f"round {turn + 1} of {rounds}: {name}")
            call = contestants[name]
            own = call if isinstance(call, Clock) else clock
            with may_fail(name, failed):
                settle(own, call, inputs)
                chains[name].append(own.back_to_back(call, inputs, calls))
                for _, given in zip(range(calls), itertools.cycle(inputs), strict=False):
                    total, host = own.single(call, given)
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
        if name not in failed
    }


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of at least two samples."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


# -- peers that fail ------------------------------------------------------------------------------


class Unusable(RuntimeError):
    """A peer failed and left a GPU on which nothing runs any more.

    Attributes:
        name: of the peer.
    """

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name} left the GPU unusable: {one_line(error)}")
        self.name = name


def one_line(error: Exception) -> str:
    """Type and first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


@contextmanager
def may_fail(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Note a peer's failure instead of raising it; gtco's own is raised.

    Raises:
        Unusable: nobody else can use the GPU any more.
    """
    try:
        yield
    except Exception as error:
        if name == GTCO:
            raise
        failures[name] = one_line(error)
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise Unusable(name, error) from error
