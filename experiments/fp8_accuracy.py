"""How far off ViTs in 8 bits are on a CPU, with weights rounded to the nearest and compensated.

    python -m experiments.fp8_accuracy OUT.json [--models vit_s16,vit_b16] [--inputs 200]
        [--precision int8]

The graph that `precision="fp8"` (or "int8") makes is interpreted in fp32, in which its operands in
8 bits and their products are exact: what remains is the error of rounding. Weights and images are
those of `experiments.fp8`; calibration sees 32 other images. The reference is the model's own graph
in fp32, whose distance from fp64 is given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gtco
from experiments.fp8 import CALIBRATED_ON, CLASSES, images, like_trained, relative
from experiments.models import vit
from experiments.publish import markdown, provenance
from gtco.calibration import Calibration
from gtco.calibrator import MEASURED, Calibrator
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline

AGAINST_FP64 = 4
"""Images."""
UNLIKE = 1.0
"""Deviation of the noise of images unlike those of calibration, which have 0.2."""


def to_the_nearest(
    graph: Graph, calibration: Calibration, measured: Sequence[Tensor]
) -> Calibration:
    """As `calibration`, of weights rounded to the nearest, and `measured` on the same images."""
    layers = tuple(replace(each, rounded="", error=None) for each in calibration.layers)
    calibrator = Calibrator(graph, calibration.precision, None)
    calibrator.state = replace(calibration, layers=layers, error=None, weights={})
    for _ in calibrator.measure([(image,) for image in measured]):
        pass
    return calibrator.state


def answers(graph: Graph, given: Iterator[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """A row of logits for each image."""
    constants = {  # widened once, and not for each image
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in graph.constants.items()
    }
    wide = replace(graph, constants=constants)
    with torch.no_grad():
        return torch.cat([interpret(wide, (x,), dtype=dtype)[0].double().flatten(1) for x in given])


def measure(
    model: nn.Module, image: Tensor, inputs: int, budget: float, precision: str
) -> dict[str, Any]:
    """Errors and agreement of one model, by how weights are rounded and by what is in 8 bits."""
    others = [images(CLASSES + number, image) for number in range(CALIBRATED_ON)]
    graph = run_pipeline(gtco.capture(model, (image,)))
    compensated = gtco.calibrate(model, others, precision=precision)
    roundings = {
        "nearest": to_the_nearest(graph, compensated, others[-MEASURED:]),
        "compensated": compensated,
    }

    def like(count: int, noise: float) -> Iterator[Tensor]:
        return (images(number % CLASSES, image, noise, number) for number in range(count))

    sets = {"like calibration's": (inputs, 0.2), "unlike": (max(1, inputs // 5), UNLIKE)}
    exact = {name: answers(graph, like(*which)) for name, which in sets.items()}
    count = min(AGAINST_FP64, inputs)
    wide = answers(graph, like(count, 0.2), torch.float64)
    narrow = exact["like calibration's"][:count]
    result: dict[str, Any] = {
        "linears": len(compensated.layers),
        "compensated": len(compensated.weights),
        "images": {name: count for name, (count, _) in sets.items()},
        "reference_from_fp64": float((narrow - wide).norm() / wide.norm()),
        "classes_named": int(exact["like calibration's"].argmax(1).unique().numel()),
    }
    for rounding, calibration in roundings.items():
        for share, chosen in {
            "all": calibration.layers,
            "budget": calibration.chosen(budget),
        }.items():
            changed = calibration.changed(graph, chosen, calibration.scales(graph))
            facts: dict[str, Any] = {
                "in_8_bits": len(chosen),
                "work_in_8_bits": sum(x.work for x in chosen)
                / sum(x.work for x in compensated.layers),
                "calibration_says": calibration.error if share == "all" else None,
            }
            for name, which in sets.items():
                found = answers(changed, like(*which))
                errors = relative(found, exact[name])
                same = found.argmax(1) == exact[name].argmax(1)
                facts[name] = {
                    "error": float((found - exact[name]).norm() / exact[name].norm()),
                    "largest": float(errors.max()),
                    "top1_agreement": float(same.double().mean()),
                }
            result[f"{rounding}, {share}"] = facts
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="vit_s16,vit_b16")
    parser.add_argument("--weights", default="as drawn,like trained")
    parser.add_argument("--inputs", type=int, default=200)
    parser.add_argument("--classes", type=int, default=CLASSES, help="of heads like trained ones")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--precision", default="fp8", choices=("fp8", "int8"))
    given = parser.parse_args()
    result: dict[str, Any] = {**provenance("fp8_accuracy"), "budget": given.budget, "models": {}}
    for name in given.models.split(","):
        for kind in given.weights.split(","):
            model, (image,) = getattr(vit, name)()
            if kind == "like trained":
                model.head = nn.Linear(model.head.in_features, given.classes)
                model = like_trained(model, image)
            found = measure(model, image, given.inputs, given.budget, given.precision)
            result["models"][f"{name}, {kind}"] = found
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            print(table(result), flush=True)


def table(result: dict[str, Any]) -> str:
    """For people."""
    rows = []
    for model, found in result["models"].items():
        for key, facts in found.items():
            if isinstance(facts, dict) and "in_8_bits" in facts:
                near, far = facts["like calibration's"], facts["unlike"]
                rows.append([
                    model, key, f"{facts['in_8_bits']} of {found['linears']}",
                    f"{facts['work_in_8_bits']:.0%}", f"{near['error']:.2%}",
                    f"{near['top1_agreement']:.1%}", f"{far['error']:.2%}",
                    f"{far['top1_agreement']:.1%}",
                ])  # fmt: skip
    header = ["model", "weights, linears", "in 8 bits", "work", "error", "same class",
              "error of unlike images", "same class of these"]  # fmt: skip
    return markdown(header, rows)


if __name__ == "__main__":
    main()
