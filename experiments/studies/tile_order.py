"""What it saves that kernels walk over large values to and fro.

    python -m experiments.studies.tile_order OUT.json MODEL... [--rounds N] [--quick]

A MODEL is `module:function`. Each is planned once; of its launches some go backward
(`gtco.runtime.turning`), and in a second module all go forward. Both must give the same bits on
fresh inputs, and are timed in turn within one process. With --quick on the CPU, in the host build,
as if L2 kept nothing: a rehearsal that claims no times.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from experiments.publish import markdown, provenance
from gtco.benchmarking.answers import INPUT_KINDS, fresh_inputs, poison
from gtco.benchmarking.rounds import CudaClock, HostClock, time_rounds
from gtco.compiler import make_plan
from gtco.locate import Located, locate
from gtco.options import Options
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import Plan
from gtco.runtime.turning import turn
from gtco.target import HOST

TO_AND_FRO, FORWARD = "to and fro", "forward"
CALLS = 50


def both_plans(plan: Plan, quick: bool) -> dict[str, Plan]:
    """The plan whose launches go where it pays, and the same with all of them forward."""
    launches = [
        replace(each, program=each.program and replace(each.program, backward=False))
        for each in plan.launches
    ]
    target = replace(plan.target, l2_bytes=0) if quick else plan.target
    return {
        TO_AND_FRO: replace(plan, launches=turn(launches, target)),
        FORWARD: replace(plan, launches=tuple(launches)),
    }


def bits(answer: Any) -> list[Tensor]:
    """Of every tensor of an answer, which the next call may overwrite."""
    leaves = (leaf.contiguous().flatten() for leaf in pytree.tree_leaves(answer))
    return [leaf.view(torch.uint8).clone() for leaf in leaves]


def differing(modules: dict[str, CompiledModule], model: Located) -> list[str]:
    """The kinds of input on which the answers are not of the same bits."""
    found = []
    for seed, kind in enumerate(INPUT_KINDS):
        args, kwargs = fresh_inputs((model.args, model.kwargs), kind, seed)
        answers = []
        for module in modules.values():
            poison(module(*args, **kwargs))  # what the next call forgets to write is seen
            answers.append(bits(module(*args, **kwargs)))
        if not all(torch.equal(ours, theirs) for ours, theirs in zip(*answers, strict=True)):
            found.append(kind)
    return found


def study(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """One model's row."""
    model = locate(name)
    options = Options.of(static_outputs=True, target=HOST if quick else None)
    plan, captured = make_plan(model.module, model.args, model.kwargs, options)
    plans = both_plans(plan, quick)
    modules = {which: CompiledModule(each, captured) for which, each in plans.items()}
    clock, calls = (HostClock(), 2) if quick else (CudaClock(), CALLS)
    given = [fresh_inputs((model.args, model.kwargs), "normal", seed) for seed in (7, 8)]
    programs = {w: [x.program for x in each.launches if x.program] for w, each in plans.items()}
    return {
        "model": name,
        "launches": len(plan.launches),
        "backward": [each.name for each in programs[TO_AND_FRO] if each.backward],
        "kernels": {which: len({x.name for x in each}) for which, each in programs.items()},
        "differs_on": differing(modules, model),
        "times": {
            which: asdict(timing)
            for which, timing in time_rounds(modules, given, clock, rounds, calls).items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    result = {"experiment": "tile_order", "rehearsal": given.quick, "models": []}
    result |= provenance("studies.tile_order")
    rows = []
    for name in given.models:
        found = study(name, given.rounds, given.quick)
        result["models"].append(found)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        us = {which: each["back_to_back_us"] for which, each in found["times"].items()}
        turned = f"{len(found['backward'])} of {found['launches']}"
        same = "no: " + ", ".join(found["differs_on"]) if found["differs_on"] else "yes"
        rows.append((name, turned, f"{us[FORWARD]:.1f}", f"{us[TO_AND_FRO]:.1f}", same))
    header = ("model", "backward", "forward, us", "to and fro, us", "same bits")
    print(markdown(header, rows), end="")


if __name__ == "__main__":
    main()
