"""Models given images and feature maps with their channels last in memory, beside channels first.

    python -m experiments.studies.channels_last OUT.json [--cases MODULE:NAME,...]

Each model is compiled for its inputs as they are and in `torch.channels_last`. Both are judged on
fresh inputs of a normal distribution and timed in alternating rounds, each with inputs as its
example lies in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import gtco
from experiments.publish import provenance
from gtco.benchmarking.answers import Inputs, compute_precision, fresh_inputs, references
from gtco.benchmarking.compare import judge_answers
from gtco.benchmarking.rounds import CudaClock, time_rounds
from gtco.locate import locate

CASES = (
    "heads:aspp",
    "heads:fpn",
    "heads:fpn_batch8",
    "heads:detection_head",
    "heads:up_block",
    "convolutional:resnet50_batch128",
)
ROUNDS, CALLS, FRESH = 5, 100, 3


def channels_last(tree: Any) -> Any:
    """The same tensors; those of four dimensions with channels last in memory."""

    def turned(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

    return pytree.tree_map_only(Tensor, turned, tree)


def measure(case: str) -> dict[str, Any]:
    """Launches, the worst verdict and microseconds of a call of each way."""
    model = locate(f"experiments.models.{case}")
    first: Inputs = (model.args, model.kwargs)
    last: Inputs = channels_last(first)
    as_first, as_last = (gtco.compile(model.module, *given) for given in (first, last))
    ways = {
        "channels first": (as_first, first),
        "channels last": (as_last, last),
        "channels last, compiled for first": (as_first, last),
    }
    truth, precision = references(model, None), compute_precision(model, None)
    facts: dict[str, Any] = {}
    calls: dict[str, Callable[[int], Any]] = {}
    for name, (compiled, given) in ways.items():
        errors = judge_answers({"gtco": compiled}, truth, given, precision)
        fresh = [fresh_inputs(given, "normal", seed) for seed in range(FRESH)]
        calls[name] = lambda number, call=compiled, fresh=fresh: call(
            *fresh[number][0], **fresh[number][1]
        )
        facts[name] = {
            "launches": len(compiled.launches),
            "wrong": [str(each.verdict) for each in errors if not each.verdict.ok],
        }
    turns: list[Inputs] = [((number,), {}) for number in range(FRESH)]
    for name, timing in time_rounds(calls, turns, CudaClock(), ROUNDS, CALLS).items():
        facts[name] |= {"us": timing.back_to_back_us, "rounds_us": timing.rounds_us}
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--cases", default=",".join(CASES), help="MODULE:NAME of experiments.models"
    )
    options = parser.parse_args()
    cases: dict[str, Any] = {}
    for case in options.cases.split(","):
        cases[case] = measure(case)
        for name, facts in cases[case].items():
            right = f"WRONG {facts['wrong'][:1]}" if facts["wrong"] else "right"
            launches = facts["launches"]
            print(f"{case:28} {name:34} {facts['us']:9.1f} us {launches:4} launches, {right}")
        result = {**provenance("studies.channels_last"), "cases": cases}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
