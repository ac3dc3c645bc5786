"""Models whose linears and convolutions are rounded to int8 beside fp16: time and error.

    python -m experiments.int8 OUT.json [--cases MODULE:NAME,...] [--tune SECONDS] [--quick]

Each layer rounds its input by one scale, and its weights by one of each row, and residuals are
rounded like the layers that read the same, as TensorRT's toolkits do:
`torch.fake_quantize_per_tensor_affine` and `_per_channel_affine`, scales from the largest values of
a few inputs. gtco multiplies that in int8. `precision="int8"` calibrates the model itself on the
same inputs. The peers run the model in fp16 as it was: gtco, and Inductor in its usual mode with
CUDA graphs, for convolutions with channels last too. Answers are judged by those of torch, of the
same rounded layers; the error is the answer's against the model's own in fp64. Times are of calls
back to back, in alternating rounds, on fresh inputs.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gtco
from experiments.publish import provenance
from gtco.benchmarking.answers import Inputs, fresh_inputs
from gtco.benchmarking.contestants import Setting, prepare
from gtco.benchmarking.rounds import CudaClock, one_line, time_rounds
from gtco.check import judge
from gtco.locate import Located, locate
from gtco.options import Options

CASES = (
    "convolutional:resnet50",
    "convolutional:resnet50_batch32",
    "convolutional:resnet50_batch128",
    "vit:vit_b16",
    "vit:vit_l16",
)
QUICK = "small:resnet50"
SEEN, FRESH = 4, 3
LARGEST = 127
INDUCTOR = ("inductor reduce-overhead", "inductor reduce-overhead, channels last")


class Rounds(nn.Module):
    """Rounds to int8 what is no larger than `largest`."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.scale = max(largest, 1e-6) / LARGEST

    def forward(self, x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, self.scale, 0, -LARGEST - 1, LARGEST)


class Rounded(nn.Module):
    """A linear or a convolution whose operands are rounded to int8; `largest` is what it reads."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, largest: float) -> None:
        super().__init__()
        self.layer, self.rounds = layer, Rounds(largest)
        scales = layer.weight.detach().float().abs().flatten(1).amax(1).clamp_min(1e-6) / LARGEST
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros_like(scales, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.rounds(x)
        w = torch.fake_quantize_per_channel_affine(
            self.layer.weight, self.scales.float(), self.zeros, 0, -LARGEST, LARGEST
        )
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, w, self.layer.bias)
        return self.layer._conv_forward(x, w, self.layer.bias)


def rounded(model: nn.Module, inputs: list[Inputs]) -> nn.Module:
    """A copy of `model` with its linears and its convolutions of one group in int8, by what they
    read of `inputs`, and ResNets' residuals too."""
    model = copy.deepcopy(model)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
        or (name.endswith(".shortcut") and isinstance(layer, nn.Identity))
    }
    largest = dict.fromkeys(layers, 0.0)

    def seen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            largest[name] = max(largest[name], float(args[0].abs().amax()))

        return hook

    hooks = [layer.register_forward_pre_hook(seen(name)) for name, layer in layers.items()]
    with torch.no_grad():
        for args, kwargs in inputs:
            model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        most, skip = largest[name], isinstance(layer, nn.Identity)  # a residual on its way
        setattr(model.get_submodule(parent), own, Rounds(most) if skip else Rounded(layer, most))
    return model


def logits(answer: Any) -> Tensor:
    """The only tensor of an answer."""
    (found,) = pytree.tree_leaves(answer)
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def measure(case: str, seconds: float, quick: bool, folder: Path) -> dict[str, Any]:
    """Verdicts, errors and microseconds of one model."""
    plain = locate(f"experiments.models.{case}")
    example: Inputs = (plain.args, plain.kwargs)
    short = rounded(plain.module, [fresh_inputs(example, "normal", seed) for seed in range(SEEN)])
    target: dict[str, Any] = {"target": "host"} if quick else {}
    seen = [fresh_inputs(example, "normal", seed)[0] for seed in range(SEEN)]
    calibration = gtco.calibrate(plain.module, seen, precision="int8")
    own = {"precision": "int8", "calibration": calibration}
    if seconds:
        gtco.tune(short, *example, seconds=seconds)
        gtco.tune(plain.module, *example, seconds=seconds, **own)
    calls: dict[str, Any] = {
        "gtco int8": gtco.compile(short, *example, **target),
        "gtco int8, calibrated": gtco.compile(plain.module, *example, **own, **target),
        "gtco fp16": gtco.compile(plain.module, *example, **target),
    }
    given = [fresh_inputs(example, "normal", 100 + seed) for seed in range(FRESH)]
    facts: dict[str, Any] = {"launches": {n: len(call.launches) for n, call in calls.items()}}
    budget = Options().error_budget
    facts["calibration"] = {
        "products_and_sums": len(calibration.layers),
        "in_int8": len(calibration.chosen(budget)),
        "error": calibration.error,
    }
    with torch.no_grad():
        (args, kwargs), double = given[0], copy.deepcopy(plain.module).double()
        wide = [x.double() if isinstance(x, Tensor) else x for x in args]
        exact = logits(double(*wide, **kwargs))
        eager = logits(short(*args, **kwargs))
        truth = logits(copy.deepcopy(short).double()(*wide, **kwargs))
        found = {name: logits(call(*args, **kwargs)).clone() for name, call in calls.items()}
    facts["verdict"] = str(judge(found["gtco int8"], eager, truth, args[0].dtype))
    facts["error"] = {name: relative(answer, exact) for name, answer in found.items()}
    facts["error"]["eager int8"] = relative(eager, exact)
    if quick:
        return facts
    facts |= times(plain, calls, given, folder)
    return facts


def times(
    plain: Located, calls: dict[str, Any], given: list[Inputs], folder: Path
) -> dict[str, Any]:
    """Microseconds of the calls and of Inductor's, and why one of those could not run."""
    failures: dict[str, str] = {}
    images = any(isinstance(layer, nn.Conv2d) and layer.kernel_size != layer.stride
                 for layer in plain.module.modules())  # fmt: skip
    with ExitStack() as stack, torch.no_grad():
        setting = Setting(plain, plain.module, Options(), folder, stack)
        for name in INDUCTOR[: 2 if images else 1]:
            try:
                calls = {**calls, name: prepare(name, setting)}
            except Exception as error:
                failures[name] = one_line(error)
        timed = time_rounds(calls, given, CudaClock(), 5, 100, failures=failures)
    return {
        "us": {name: timing.back_to_back_us for name, timing in timed.items()},
        "rounds_us": {name: timing.rounds_us for name, timing in timed.items()},
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--cases", default=",".join(CASES), help="MODULE:NAME of experiments.models"
    )
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for each in int8")
    parser.add_argument("--quick", action="store_true", help="rehearse on the CPU, without times")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in (QUICK,) if options.quick else options.cases.split(","):
            facts = found[case] = measure(case, options.tune, options.quick, Path(folder))
            print(
                case, json.dumps({k: v for k, v in facts.items() if k != "rounds_us"}), flush=True
            )
            result = {**provenance("int8"), "models": found}
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
