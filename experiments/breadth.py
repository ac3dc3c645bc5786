"""How much of a library of models gtco takes, one small member of each family.

Each is captured in fp16, fused and planned for sm_90a, which needs no GPU; the rewritten graph,
interpreted in fp64, may be off from the module in fp64 as far as the module in fp32 is (some are
chaotic with random weights). A family that fails is written with its error. The file holds the
distinct operators, the failures and what runs with ATen and why; if it is there already, families
that it holds stay as they are unless they are named.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.models.transformers_zoo import randomize
from experiments.publish import provenance
from gtco import compiler
from gtco.check import judge
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import run_pipeline

Build = Callable[[], tuple[nn.Module, Tensor]]
"""A model in fp32 and its input; the model gives one tensor or a tuple of tensors."""


def examine(build: Build) -> dict[str, Any]:
    """What becomes of a model."""
    torch.manual_seed(0)
    model, image = build()
    randomize(model.eval())
    half = copy.deepcopy(model).half()  # ahead of calls, whose biases some models keep
    with torch.no_grad():
        single = capture(model, (image,))
        found = interpret(run_pipeline(single.graph), (image,), dtype=torch.float64)
        eager = _floats(model(image))
        try:
            exact = _floats(copy.deepcopy(model).double()(image.double()))
        except RuntimeError:  # it makes tensors of fp32 itself
            exact = _floats(interpret(single.graph, (image,), dtype=torch.float64))
    floats = [each.float() for each in found if each.is_floating_point()]
    verdict = judge(floats, eager, exact, torch.float32)
    options = Options.of(target="sm_90a")
    plan, captured = compiler.make_plan(half, (image.half(),), None, options)
    aten = Counter(
        (" -> ".join(node.attrs.get("target", node.op) for node in launch.group.compute),
         launch.source, launch.reason)
        for launch in plan.launches if launch.program is None
    )  # fmt: skip
    parts = Counter(node.op for launch in plan.launches for node in launch.group.compute)
    return {
        "operators": sorted(
            {str(node.attrs.get("target", node.op)) for node in captured.graph.nodes}
        ),
        "launches": len(plan.launches),
        "generated": sum(launch.program is not None for launch in plan.launches),
        "attention": parts["attention"],
        "softmax": parts["softmax"],
        "aten": [
            {"operators": operators, "source": source, "reason": reason, "launches": count}
            for (operators, source, reason), count in aten.most_common()
        ],
        "verdict": verdict.to_dict(),
    }


def _floats(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    tensors = [result] if isinstance(result, Tensor) else result
    return [each for each in tensors if each.is_floating_point()]


def run(
    experiment: str, description: str | None, families: Mapping[str, tuple[str, Build]]
) -> None:
    """Examine `families`, each the name of a model and how to make it, as the command line says."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if given.out.exists():
        found = json.loads(given.out.read_text())["families"]
    for family in given.families or [name for name in families if name not in found]:
        name, build = families[family]
        try:
            found[family] = {"model": name, **examine(build)}
        except Exception as error:
            found[family] = {"model": name, "error": f"{type(error).__name__}: {error}"}
        print(family, _summary(found[family]), flush=True)
        operators = sorted({op for each in found.values() for op in each.get("operators", ())})
        failures = {name: each["error"] for name, each in found.items() if "error" in each}
        wrong = [
            name for name, each in found.items() if not each.get("verdict", {}).get("ok", True)
        ]
        result = {
            "distinct_operators": operators,
            "failures": failures,
            "wrong": wrong,
            "families": found,
            **provenance(experiment),
        }
        given.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"{len(operators)} distinct operators, {len(failures)} failures, {len(wrong)} wrong")


def _summary(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[:300]
    aten = ", ".join(f"{each['launches']} {each['operators']}" for each in found["aten"])
    return (
        f"{found['launches']} launches, {found['generated']} generated; ATen: {aten or 'none'}; "
        f"{'right' if found['verdict']['ok'] else 'WRONG'}"
    )
