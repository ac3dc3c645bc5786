"""Which knobs of the whole plan pay: the same model with one knob changed.

    python -m experiments.studies.plan_variants MODEL [--json FILE]

A chain of copies of one kernel is not a model: its neighbours differ and its weights may stay in
L2. So the variants are judged by replaying the whole graph, in turn within one process: how far
ahead weights are fetched to L2, when the next kernel may begin, a knob of every wgmma GEMM, and
dependent launch; and, with wrong answers, what device memory costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gtco import compiler
from gtco.benchmarking.rounds import CudaClock
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal
from gtco.cost_model.knowledge import known_on
from gtco.cost_model.plans import plan_knobs
from gtco.frontend.torch_export import capture
from gtco.locate import locate
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.runtime.device import resolve_device
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch, Plan, PlanKnobs
from gtco.selection import select
from gtco.target import Target

Change = Callable[[Mapping[str, int]], dict[str, int]]

VARIANTS: dict[str, Change] = {
    "no multicast": lambda s: {**s, "multicast": 1},
    "one atom a stage": lambda s: {**s, "atoms": 1, "stages": s["stages"] * s["atoms"]},
    "one stage fewer": lambda s: {**s, "stages": max(2, s["stages"] - 1)},
}
AT_HAND = "all layers read the weights of the first: wrong answers"
DISTANCES = (0, 1, 2, 3, 5)
ROUNDS, CALLS = 7, 100


def changed(launch: Launch, change: Change, target: Target) -> Launch:
    program = launch.program
    if program is None or program.sketch != "gemm_wgmma":
        return launch
    sketches = derive(launch.group, launch.family, target).sketches
    sketch = next(each for each in sketches if each.name == program.sketch)
    try:
        return replace(launch, program=sketch.emit(change(program.schedule)))
    except Illegal:
        return launch


def with_weights_at_hand(plan: Plan) -> Plan:
    """The plan whose layers share their matrices, so that L2 has those of a small model."""
    first: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
    constants = {
        name: first.setdefault((each.shape, each.dtype), each) if each.dim() == 2 else each
        for name, each in plan.graph.constants.items()
    }
    return replace(plan, fused=replace(plan.fused, graph=replace(plan.graph, constants=constants)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = resolve_device(None)
    target = device.target
    located = locate(options.model)
    captured = capture(located.module, located.args, located.kwargs)
    known = known_on(device)
    graph = run_pipeline(captured.graph)
    fused = compiler.fuse_known(known, graph, target)
    launches = select(fused, target, known)
    usual = plan_knobs(known, graph, launches, target)
    settings = Options.of(static_outputs=True)

    def planned(launches: tuple[Launch, ...], knobs: PlanKnobs) -> Plan:
        return compiler.plan_of(fused, launches, target, settings, knobs)

    def compiled(
        launches: tuple[Launch, ...], knobs: PlanKnobs, dependent: bool = True
    ) -> CompiledModule:
        return CompiledModule(
            replace(planned(launches, knobs), dependent_launch=dependent), captured
        )

    modules = {
        f"fetch distance {distance}, trigger {'late' if late else 'early'}": compiled(
            launches, PlanKnobs(distance, late)
        )
        for distance in DISTANCES
        for late in (0, 1)
    }
    for name, change in VARIANTS.items():
        modules[name] = compiled(tuple(changed(x, change, target) for x in launches), usual)
    modules["no dependent launch"] = compiled(launches, usual, dependent=False)
    modules[AT_HAND] = CompiledModule(with_weights_at_hand(planned(launches, usual)), captured)
    expected = located.module(*located.args)
    times: dict[str, list[float]] = {name: [] for name in modules}
    clock = CudaClock()
    for _ in range(ROUNDS):
        for name, module in modules.items():
            result = module(*located.args)
            if name != AT_HAND:
                torch.testing.assert_close(result, expected, atol=3e-2, rtol=3e-2)
            times[name].append(clock.back_to_back(module, [(located.args, {})], CALLS))
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, us in medians.items():
        print(f"{us:9.1f} us  {name}")
    if options.json:
        result = {
            "experiment": "plan_variants",
            "model": options.model,
            "device": device.name,
            "torch": torch.__version__,
            "median_us": medians,
            "rounds_us": times,
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
