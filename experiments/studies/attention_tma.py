"""What TMA brings to attention on `mma.sync`, in the whole graph.

    python -m experiments.studies.attention_tma OUT.json MODEL...

Each model runs as it is planned, and with queries, keys and values by TMA wherever that kernel
stands with `cp.async` and the same tile can have it. Both are called in turns, after their answers
were compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from experiments.publish import provenance
from gtco.benchmarking.answers import fresh_inputs
from gtco.benchmarking.rounds import CudaClock, time_rounds
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal
from gtco.compiler import make_plan
from gtco.locate import locate
from gtco.options import Options
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Launch
from gtco.target import Target

ROUNDS, CALLS = 11, 200


def by_tma(launch: Launch, target: Target) -> Launch:
    """The launch with TMA in its tile; as it is where that is illegal, or another kernel's."""
    program = launch.program
    if program is None or program.sketch != "attention":
        return launch
    sketches = derive(launch.group, launch.family, target).sketches
    sketch = next(each for each in sketches if each.name == program.sketch)
    try:
        changed = sketch.emit({**program.schedule, "copy_warps": 0, "tma": 1})
    except Illegal:
        return launch
    return replace(launch, program=changed)


def measure(name: str) -> dict[str, Any]:
    model = locate(name)
    plan, captured = make_plan(model.module, model.args, model.kwargs, Options.of())
    launches = tuple(by_tma(each, plan.target) for each in plan.launches)
    changed = sum(a is not b for a, b in zip(plan.launches, launches, strict=True))
    calls = {
        "as planned": CompiledModule(plan, captured),
        "tma": CompiledModule(replace(plan, launches=launches), captured),
    }
    inputs = [fresh_inputs((model.args, model.kwargs), "normal", seed) for seed in range(4)]
    args, kwargs = inputs[0]
    answers = [pytree.tree_leaves(call(*args, **kwargs)) for call in calls.values()]
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*answers, strict=True))
    timings = time_rounds(calls, inputs, CudaClock(), ROUNDS, CALLS)
    rounds = (timings[key].rounds_us for key in ("tma", "as planned"))
    ratios = [a / b for a, b in zip(*rounds, strict=True)]
    return {
        "changed launches": changed,
        "us": {key: timing.back_to_back_us for key, timing in timings.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "relative difference of the answers": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    given = parser.parse_args()
    result: dict[str, Any] = {**provenance("studies.attention_tma"), "models": {}}
    for name in given.models:
        result["models"][name] = found = measure(name)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, {key: value for key, value in found.items() if key != "ratios"}, flush=True)


if __name__ == "__main__":
    main()
