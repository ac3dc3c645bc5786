"""ViTs in 8 bits beside fp16: time, error against fp64, and whether they name the same class.

    python -m experiments.fp8 OUT.json [--models vit_b16,vit_l16,vit_h14] [--inputs 1000]
                                       [--precision int8] [--budgets 0.05,0.02] [--quick]

Weights are random as timm draws them, or made like those of trained models (`like_trained`). Inputs
are structured images: waves, a patch and noise (`images`). Each model is calibrated on 32 others.
A model is calibrated and tuned once, and compiled for each error budget. Times are of calls back to
back, in alternating rounds, of fp16 and of fp8 (or int8) with the same records.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gtco
from experiments.models import small, vit
from experiments.publish import markdown, provenance
from gtco.benchmarking.rounds import CudaClock, time_rounds

MODELS: dict[str, Callable[[], Any]] = {
    "vit_b16": vit.vit_b16,
    "vit_l16": vit.vit_l16,
    "vit_h14": vit.vit_h14,
}
CLASSES = 1000
CALIBRATED_ON = 32
CHUNK = 20
"""Images of one call of the model as it is."""
OUTLIERS = 6
"""Channels of the residual stream that are far larger than the others, as ViTs learn."""


def images(seed: int, like: Tensor, noise: float = 0.2, noise_seed: int = 0) -> Tensor:
    """A structured image of the shape of `like`: three waves in a direction and colour each, a
    patch of one colour, and noise, which alone depends on `noise_seed`."""
    generator = torch.Generator().manual_seed(seed)
    _, channels, height, width = like.shape
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    image = torch.zeros(channels, height, width)
    for _ in range(3):
        kx, ky, phase = (float(each) for each in torch.randn(3, generator=generator) * 12)
        colour = torch.randn(channels, 1, 1, generator=generator)
        image += colour * torch.cos(kx * x + ky * y + phase)
    top, left = (
        int(torch.randint(0, side // 2, (), generator=generator)) for side in (height, width)
    )
    image[:, top : top + height // 3, left : left + width // 3] = torch.randn(
        channels, 1, 1, generator=generator
    )
    drawn = torch.Generator().manual_seed(1_000_000 + noise_seed)
    image += noise * torch.randn(image.shape, generator=drawn)
    return image[None].to(like.device, like.dtype)


def like_trained(model: nn.Module, image: Tensor) -> nn.Module:
    """`model` with weights like those of trained ViTs.

    Products have heavy tails (Student's t with 4 degrees of freedom, of the deviation that they
    had). Scales of layer norms are log-normal. `OUTLIERS` channels of the residual stream have a
    constant 30 times the others' size, are written to 6 times as strongly, and scaled down by each
    norm. The head has a prototype for each class: what its image's features are beyond the mean, so
    that classes have margins as a trained head's have.
    """
    model = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(7)
    width = next(each for each in model.modules() if isinstance(each, nn.LayerNorm)).weight.numel()
    loud = torch.randperm(width, generator=generator)[:OUTLIERS]
    student = torch.distributions.StudentT(4.0)
    torch.manual_seed(7)
    with torch.no_grad():
        for each in model.modules():
            if isinstance(each, nn.Linear):
                drawn = student.sample(each.weight.shape) / 2**0.5
                each.weight.copy_(drawn * each.weight.float().std().cpu())
                if each.out_features == width:
                    each.weight[loud] *= 6
            elif isinstance(each, nn.LayerNorm):
                scale = torch.exp(0.4 * torch.randn(width, generator=generator))
                scale[loud] = 0.05
                each.weight.copy_(scale)
            elif isinstance(each, nn.Conv2d) and each.bias is not None:
                each.bias[loud.to(each.bias.device)] += 30 * each.weight.std() * 28
    features: list[Tensor] = []
    head = _head(model, width)
    hook = head.register_forward_pre_hook(lambda _, given: features.append(given[0].detach()))
    with torch.no_grad():
        for labels in torch.arange(head.out_features).split(CHUNK):
            model(torch.cat([images(int(label), image, 0.0).float() for label in labels]))
        hook.remove()
        own = torch.cat(features)
        mean = own.mean(0)
        away = own - mean
        away = away / away.square().sum(1, keepdim=True) * 10
        head.weight.copy_(away)
        head.bias.copy_(-(away @ mean))
    return model.to(image.dtype).eval()


def _head(model: nn.Module, width: int) -> nn.Linear:
    """The layer that classifies, a new one where there is none."""
    if not isinstance(getattr(model, "head", None), nn.Linear):
        device = next(model.parameters()).device
        model.head = nn.Linear(width, CLASSES, device=device)
    head = model.head
    assert isinstance(head, nn.Linear)
    return head


def logits(call: Callable[[Tensor], Tensor], given: Iterator[Tensor]) -> Tensor:
    """The answers of `call`, a row an image."""
    with torch.no_grad():
        return torch.cat([call(x).double().flatten(1) for x in given])


def relative(found: Tensor, exact: Tensor) -> Tensor:
    """The error of each row, in relation to its size."""
    return (found - exact).norm(dim=1) / exact.norm(dim=1)


def accuracy(
    model: nn.Module,
    half: Callable[..., Any],
    eights: Mapping[str, Callable[..., Any]],
    image: Tensor,
    count: int,
) -> dict[str, dict[str, Any]]:
    """Of `count` images, for each of `eights`: errors against fp64, and how often it names fp16's
    class."""
    given = torch.cat([images(number % CLASSES, image, 0.2, number) for number in range(count)])
    exact_model = copy.deepcopy(model).double()
    exact = logits(exact_model, (each.double() for each in given.split(CHUNK)))

    def errors_of(found: Tensor) -> dict[str, float]:
        errors = relative(found, exact)
        return {"error": float((found - exact).norm() / exact.norm()),
                "mean": float(errors.mean()), "largest": float(errors.max())}  # fmt: skip

    of_half = logits(half, iter(given.split(1)))
    classes = of_half.argmax(1)
    named = int(classes.unique().numel())
    shared = {"inputs": count, "classes_named": named, "fp16": errors_of(of_half)}
    facts: dict[str, dict[str, Any]] = {}
    for name, eight in eights.items():
        of_eight = logits(eight, iter(given.split(1)))
        same = float((classes == of_eight.argmax(1)).double().mean())
        facts[name] = {**shared, "fp8": errors_of(of_eight), "top1_agreement": same}
    return facts


def measure(
    model: nn.Module,
    image: Tensor,
    inputs: int,
    budgets: Sequence[str],
    tune: float,
    options: dict[str, Any],
    precision: str = "fp8",
) -> dict[str, Any]:
    """What 8 bits do for one model within each of `budgets`; tuned for the first."""
    others = (images(CLASSES + number, image) for number in range(CALIBRATED_ON))
    calibration = gtco.calibrate(model, others, precision=precision)
    fp8: dict[str, Any] = {"precision": precision, "calibration": calibration}
    if tune:
        gtco.tune(model, (image,), seconds=tune, error_budget=float(budgets[0]), **fp8)
    half = gtco.compile(model, (image,), **options)
    eights = {
        budget: gtco.compile(model, (image,), error_budget=float(budget), **fp8, **options)
        for budget in budgets
    }
    close = accuracy(model, half, eights, image, inputs)
    result: dict[str, Any] = {
        "linears": len(calibration.layers),
        "precision": precision,
        "error_of_all": calibration.error,
        "error_by_layer": {f"{x.name} {x.source}": x.error for x in calibration.layers},
        "budgets": {},
    }
    for budget in budgets:
        chosen = calibration.chosen(float(budget))
        result["budgets"][budget] = {
            "in_fp8": len(chosen),
            "work_in_fp8": sum(x.work for x in chosen) / sum(x.work for x in calibration.layers),
            "accuracy": close[budget],
        }
    if image.is_cuda:
        calls = {"fp16": half, **eights}
        calls["all in fp8"] = gtco.compile(model, (image,), error_budget=1.0, **fp8)
        given = [((images(number, image),), {}) for number in range(4)]
        timings = time_rounds(calls, given, CudaClock(), 5, 200)
        result["us"] = {name: timing.back_to_back_us for name, timing in timings.items()}
        result["rounds_us"] = {name: timing.rounds_us for name, timing in timings.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--weights", default="as drawn,like trained")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--budgets", default="0.05", help="error budgets, the first to tune for")
    parser.add_argument("--precision", default="fp8", choices=("fp8", "int8"))
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for the first weights")
    parser.add_argument("--quick", action="store_true", help="rehearse on the CPU, without times")
    given = parser.parse_args()
    options = {"target": "host"} if given.quick else {}
    budgets = given.budgets.split(",")
    result: dict[str, Any] = {**provenance("fp8"), "models": {}}
    for name in given.models.split(","):
        model, (image, *_) = getattr(small, name)() if given.quick else MODELS[name]()
        for number, kind in enumerate(given.weights.split(",")):
            changed = like_trained(model, image) if kind == "like trained" else model
            tune = 0.0 if number else given.tune
            count = 2 if given.quick else given.inputs
            found = measure(changed, image, count, budgets, tune, options, given.precision)
            result["models"][f"{name}, {kind}"] = found
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{name}, {kind}", {k: v for k, v in found.items() if k != "error_by_layer"},
                  flush=True)  # fmt: skip
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """A line for each budget of a model."""
    rows = []
    for name, found in result["models"].items():
        us = found.get("us", {})
        for budget, within in found["budgets"].items():
            close = within["accuracy"]
            rows.append([
                name, budget, f"{within['in_fp8']} of {found['linears']}",
                *(f"{us[each]:.1f}" if us else "" for each in ("fp16", budget)),
                f"{close['fp16']['error']:.2%}", f"{close['fp8']['error']:.2%}",
                f"{close['top1_agreement']:.1%}",
            ])  # fmt: skip
    header = [
        "model",
        "budget",
        "linears in fp8",
        "fp16 us",
        "fp8 us",
        "error of fp16",
        "of fp8",
        "same class",
    ]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
