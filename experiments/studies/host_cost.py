"""What one call costs the host, part by part: gtco beside a CUDA graph captured by hand.

    python -m experiments.studies.host_cost MODEL [--samples N] [--json]

MODEL is `module:function` as for the command line. Each part is timed until it returns, once with
an idle GPU and once with a busy one (a replay is under way). "besides the GPU" is a single call
that is waited for, less the GPU's own time for a replay, which events around many replays give;
the floor is what one small copy costs that way. Events around many calls show what is not hidden
behind the GPU's work: with the same tensors each time, and with others by turns, which gtco's
kernels have to be told of. Medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import gtco
from experiments.publish import provenance
from gtco.benchmarking.answers import Inputs
from gtco.benchmarking.contestants import GraphedEager, tensors_of
from gtco.benchmarking.rounds import CudaClock, settle
from gtco.locate import Located, locate
from gtco.runtime.executable import Executable, compile_programs
from gtco.runtime.inputs import input_checks

Part = Callable[[], object]
RUNS = 100


@dataclass(frozen=True)
class Contestant:
    """A way to run a model: a whole call, one with other inputs, and the parts that it is made
    of."""

    call: Part
    other_call: Part
    replay: Part
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class Cost:
    """Microseconds.

    Args:
        gpu_us: the GPU's own time for a replay, back to back.
        same_inputs_us: a call, back to back.
        other_inputs_us: likewise, each with other inputs than the one before.
        single_us: a call that is waited for.
        replay_us: a replay that is waited for.
        besides_gpu_us: `single_us` less `gpu_us`.
        idle_us: until a part returns, the GPU being idle; "rest" is the call less its
            parts: the module, its signature, locks and streams, and the kernels' new arguments.
        busy_us: likewise while a replay is under way.
    """

    gpu_us: float
    same_inputs_us: float
    other_inputs_us: float
    single_us: float
    replay_us: float
    besides_gpu_us: float
    idle_us: Mapping[str, float]
    busy_us: Mapping[str, float]


def contestants(model: Located) -> dict[str, Contestant]:
    """gtco's module, its executable without dependent launch, and torch eager."""
    compiled = gtco.compile(model.module, model.args, model.kwargs)
    ours = compiled.prepare()
    assert isinstance(ours, Executable), "the host build has no GPU to wait for"
    plan = replace(ours.plan, dependent_launch=False)
    apart = Executable(plan, ours.device, compile_programs(plan))
    given = tensors_of((model.args, model.kwargs))
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (model.args, model.kwargs))
    others = tensors_of((args, kwargs))
    checks = input_checks(ours.plan.graph)
    eager = GraphedEager(model.module, (model.args, model.kwargs))

    def check() -> None:
        for each, tensor in zip(checks, given, strict=True):
            each(tensor, ours.device, torch.is_grad_enabled())

    return {
        "gtco": Contestant(
            lambda: compiled(*model.args, **model.kwargs),
            lambda: compiled(*args, **kwargs),
            ours.enqueue,
            {"check": check, **executable_parts(ours, given)},
        ),
        "gtco without dependent launch": Contestant(
            lambda: apart(given, static_outputs=False),
            lambda: apart(others, static_outputs=False),
            apart.enqueue,
            executable_parts(apart, given),
        ),
        "eager": Contestant(
            lambda: eager(*model.args, **model.kwargs),
            lambda: eager(*args, **kwargs),
            eager.graph.replay,
            {
                "copy in": lambda: eager.copy_in(given),
                "replay": eager.graph.replay,
                "clone out": eager.clone_out,
            },
        ),
    }


def executable_parts(executable: Executable, given: list[Tensor]) -> dict[str, Part]:
    """What a call does besides pointing kernels at its tensors, which counts as "rest"."""
    outputs, cloned = executable.outputs, executable.copied_outputs
    fresh = [output for index, output in enumerate(outputs) if index not in cloned]
    return {
        "copy in": lambda: [executable.inputs[i].copy_(given[i]) for i in executable.copied_inputs],
        "allocate": lambda: [torch.empty_like(output) for output in fresh],
        "replay": executable.enqueue,
        "clone out": lambda: [outputs[index].clone() for index in cloned],
    }


def cost(contestant: Contestant, samples: int) -> Cost:
    idle = returned_us(contestant, lambda: None, samples)
    busy = returned_us(contestant, contestant.replay, samples)
    gpu, same = many_us([contestant.replay]), many_us([contestant.call])
    other = many_us([contestant.call, contestant.other_call])
    single = waited_us(contestant.call, samples)
    replay = waited_us(contestant.replay, samples)
    return Cost(gpu, same, other, single, replay, single - gpu, idle, busy)


def returned_us(contestant: Contestant, before: Part, samples: int) -> dict[str, float]:
    """Medians for each part, for what no part covers ("rest") and for the whole call."""
    parts = {name: host_us(part, before, samples) for name, part in contestant.parts.items()}
    call = host_us(contestant.call, before, samples)
    return {**parts, "rest": call - sum(parts.values()), "call": call}


def host_us(part: Part, before: Part, samples: int) -> float:
    """Median time until `part` returns, right after `before` on a GPU that was idle."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        before()
        begin = time.perf_counter_ns()
        part()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def waited_us(part: Part, samples: int) -> float:
    """Median time until what `part` enqueues has run, on a GPU that was idle."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        part()
        torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def many_us(parts: Sequence[Part], repeat: int = 5) -> float:
    """The GPU's time from one to the next of many runs of `parts` by turns, once clocks have
    settled: the median of `repeat` measurements."""
    clock = CudaClock()
    turns: list[Inputs] = [((part,), {}) for part in parts]

    def call(part: Part) -> None:
        part()

    settle(clock, call, turns)
    return statistics.median(clock.back_to_back(call, turns, RUNS) for _ in range(repeat))


def show(costs: Mapping[str, Cost], floor: float) -> None:
    print(f"floor: one small copy that is waited for, {floor:.1f} us")
    for name, each in costs.items():
        print(
            f"{name}: a call {each.single_us:.1f} us, the GPU's own time {each.gpu_us:.1f}, "
            f"besides the GPU {each.besides_gpu_us:.1f} "
            f"(a replay alone {each.replay_us - each.gpu_us:.1f}), "
            f"back to back {each.same_inputs_us:.1f}, with other inputs {each.other_inputs_us:.1f}"
        )
        print(f"    {'until it returns':16} {'GPU idle':>8} {'GPU busy':>8}")
        for part, idle in each.idle_us.items():
            print(f"    {part:16} {idle:8.1f} {each.busy_us[part]:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = locate(options.model)
    small = torch.zeros(1, device="cuda")
    with torch.no_grad():
        ways = contestants(model)
        for way in ways.values():
            waited_us(way.call, 100)  # clocks and caches settle
        floor = waited_us(lambda: small.copy_(small), options.samples)
        costs = {name: cost(way, options.samples) for name, way in ways.items()}
    if not options.json:
        show(costs, floor)
        return
    result: dict[str, Any] = {"model": options.model, "floor_us": floor}
    result["costs"] = {name: asdict(each) for name, each in costs.items()}
    print(json.dumps({**result, **provenance("host_cost")}, indent=2))


if __name__ == "__main__":
    main()
