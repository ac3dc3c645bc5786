"""What fp8 and int8 need to know of a model: what its products read, and what rounding them costs.

`calibrate` runs the rewritten graph in fp32 on batches that a user gives and keeps how large the
values are that each product reads. It rounds the weights of each by what it reads
(`gtco.rounding`). Then it takes one product at a time to 8 bits, and all of them, and keeps by how
much the model's outputs change. `Calibration.chosen` takes as much work into 8 bits as fits a
budget of that error; the other products stay in 16 bits.

Products are linears, and for int8 convolutions too. For int8 a sum of two large images counts as
one more, if one of them is rounded for a product anyway: it may read that.

calibration.json                what was found, and the sha256 of the tensors beside it
calibration.json.safetensors    weights in 8 bits that are not rounded to the nearest, and for int8
                                what each channel of the values was seen to be
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.passes.quantize import (
    quantizable,
    quantize,
    scales_of_fp8,
    scales_of_int8,
    sums,
)
from gtco.passes.scales import FP8, Scales
from gtco.runtime.cache_files import publish

FORMAT = "gtco calibration 3"
TYPES = {"fp8": FP8, "int8": torch.int8}
"""By precision, what is multiplied."""
BYTE = 256
"""Multiplications and additions that take as long as a byte of device memory, of a card with tensor
cores, roughly: what a sum saves counts as work by it."""
MARGIN = 0.9
"""Part of the budget that is spent: other inputs may cost more than the few that errors were
measured on (up to 7% more of a ViT-S/16, experiments/notes/23-fp8.md)."""


class CalibrationError(ValueError):
    """A calibration that cannot be made, read, or used for this model."""


@dataclass(frozen=True)
class Layer:
    """One product of the rewritten graph, or a sum that may read integers.

    Args:
        name: of its node.
        source: the user's module that it came from.
        weight: the largest magnitude of its weights, by which another model is noticed; 0 of a sum.
        work: its multiplications and additions.
        largest: the largest magnitude that it read.
        rounded: the sha256 of its weights in 8 bits; "" where they are the nearest, None until
            known.
        error: of the model's outputs, relative, with this one alone in 8 bits; None until measured.
        seen: the sha256 of what was seen of each channel that it reads; "" of fp8 and of sums.
    """

    name: str
    source: str
    weight: float
    work: int
    largest: float = 0.0
    rounded: str | None = None
    error: float | None = None
    seen: str = ""


@dataclass(frozen=True)
class Calibration:
    """What `gtco.calibrate` found; `print` shows the error of each product.

    Args:
        layers: every linear that could multiply in fp8; or every product that could in int8, and
            the sums with what they read.
        precision: "fp8" or "int8".
        batches: how many were run.
        error: of the model's outputs, relative, with all of them in 8 bits; None until measured.
        weights: by the name of a linear, in 8 bits, where they are not rounded to the nearest.
        seen: for int8, by the name of a product, of what it reads (`seen_in` of passes.scales).
    """

    layers: tuple[Layer, ...]
    precision: str = "fp8"
    batches: int = 0
    error: float | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    seen: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def finished(self) -> bool:
        return self.error is not None

    @property
    def kind(self) -> str:
        """What `layers` are, in a word or two."""
        return "linears" if self.precision == "fp8" else "products and sums"

    def chosen(self, budget: float) -> tuple[Layer, ...]:
        """The products that take most work into 8 bits within `budget`, the relative error of the
        model's outputs. Errors of several add up as independent ones do, times what all of them
        together were off by."""
        errors = {layer.name: layer.error or 0.0 for layer in self.layers}
        alone = math.sqrt(sum(error**2 for error in errors.values()))
        together = max(1.0, (self.error or 0.0) / alone) if alone else 1.0
        taken, spent = [], 0.0
        for layer in sorted(self.layers, key=lambda each: errors[each.name] ** 2 / each.work):
            more = spent + (errors[layer.name] * together) ** 2
            if more <= (MARGIN * budget) ** 2:
                taken.append(layer)
                spent = more
        return tuple(taken)

    def quantized(self, graph: Graph, budget: float) -> Graph:
        """`graph`, as the passes leave it, with `chosen` in 8 bits.

        Raises:
            CalibrationError: it is not of this model, or not finished.
        """
        if not self.finished:
            raise CalibrationError(
                "the calibration is not finished: call gtco.calibrate again with the same path"
            )
        found = {layer.name: layer for layer in layers_of(graph, self.precision)}
        known = [layer for layer in self.layers if layer.name in found]
        products = quantizable(graph, TYPES[self.precision])
        sizes = {node.name: graph.specs[node.inputs[1]].sizes for node in products}
        channels = {name: (3, size[-1]) for name, size in sizes.items() if self.precision == "int8"}
        strange = [
            layer
            for layer in known
            if layer.weight != found[layer.name].weight
            or (layer.rounded and self.weights[layer.name].shape != sizes[layer.name])
            or (layer.name in channels and _shape(self.seen, layer) != channels[layer.name])
        ]
        if strange or (found and not known):
            which = (
                f"%{strange[0].name} has other weights"
                if strange
                else "none of its products is known"
            )
            raise CalibrationError(
                f"the calibration is of another model ({which}): call gtco.calibrate for this one"
            )
        chosen = {each.name: each for each in self.chosen(budget) if each.name in found}
        read = {node.inputs[0] for node in products if node.name in chosen}
        for name, (value, _) in sums(graph).items():
            if value not in read:  # which nothing rounds
                chosen.pop(name, None)
        return self.changed(graph, chosen.values(), self.scales(graph))

    def changed(self, graph: Graph, layers: Iterable[Layer], scales: Mapping[str, Scales]) -> Graph:
        """`graph` with `layers` in 8 bits, by `scales` of all its products."""
        names = [each.name for each in layers]
        of_sums = {
            name: scales[reader] for name, (_, reader) in sums(graph).items() if name in names
        }
        products = {name: scales[name] for name in names if name not in of_sums}
        return quantize(graph, products, self.weights, of_sums)

    def scales(self, graph: Graph) -> dict[str, Scales]:
        """How the operands of each product of `graph` are rounded."""
        products = {node.name for node in quantizable(graph, TYPES[self.precision])}
        known = [each for each in self.layers if each.name in products]
        if self.precision == "int8":
            return scales_of_int8(graph, {each.name: self.seen[each.name] for each in known})
        return scales_of_fp8(graph, {each.name: each.largest for each in known})

    def facts(self) -> dict[str, Any]:
        """All but the tensors, as JSON has it."""
        layers = [asdict(layer) for layer in self.layers]
        facts = {"layers": layers, "batches": self.batches, "error": self.error}
        return {"precision": self.precision, **facts}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, each file whole or not at all."""
        if tensors := {**self.weights, **{f"{name}{_SEEN}": x for name, x in self.seen.items()}}:
            publish(_beside(path), safetensors.torch.save(tensors))
        self.save_facts(path)

    def save_facts(self, path: str | os.PathLike[str]) -> None:
        """Write it beside the tensors that are there."""
        content = {"format": FORMAT, **self.facts()}
        publish(Path(path), (json.dumps(content, indent=1) + "\n").encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """The one in the file at `path`.

        Raises:
            CalibrationError: there is none, or it is damaged.
        """
        try:
            found = _decoded(json.loads(Path(path).read_text()))
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CalibrationError(
                f"{path} is no calibration ({error}): delete it and call gtco.calibrate again"
            ) from None
        weights, seen = _tensors(found, path)
        return replace(found, weights=weights, seen=seen)

    def __str__(self) -> str:
        rows = [f"{'product':<32}{'module':<44}{'largest':>10}{'error':>10}"]
        for layer in sorted(self.layers, key=lambda each: -(each.error or 0.0)):
            error = "not yet" if layer.error is None else f"{layer.error:.2%}"
            rows.append(f"{layer.name:<32}{layer.source:<44}{layer.largest:>10.3g}{error:>10}")
        whole = "not yet measured" if self.error is None else f"{self.error:.2%}"
        compensated = f"the weights of {len(self.weights)} rounded with compensation"
        rows.append(
            f"{len(self.layers)} {self.kind} in {self.batches} batches, {compensated}; "
            f"all in {self.precision}: {whole}"
        )
        return "\n".join(rows)


def _beside(path: str | os.PathLike[str]) -> Path:
    """The file with the tensors of the calibration at `path`."""
    return Path(f"{os.fspath(path)}.safetensors")


def _shape(tensors: Mapping[str, Tensor], layer: Layer) -> tuple[int, ...]:
    """Of the one of `layer`; none of them has no dimension."""
    return tuple(tensors[layer.name].shape) if layer.name in tensors else ()


_SEEN = ".seen"
"""Behind the name of a product, of what was seen of what it reads."""


def digest(tensor: Tensor) -> str:
    """The sha256 of its bytes."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _tensors(
    found: Calibration, path: str | os.PathLike[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and what was seen, that `found` says the file beside `path` holds.

    Raises:
        CalibrationError: it does not.
    """
    dtype = TYPES[found.precision]
    weights = {x.name: (x.rounded, dtype) for x in found.layers if x.rounded}
    seen = {f"{x.name}{_SEEN}": (x.seen, torch.float32) for x in found.layers if x.seen}
    wanted = {**weights, **seen}
    if not wanted:
        return {}, {}
    try:
        with safe_open(_beside(path), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{_beside(path)}, which holds the tensors of {path}, cannot be read ({error}): put it "
            "back, or delete both and call gtco.calibrate again"
        ) from None
    for name, (sha256, kind) in wanted.items():
        if tensors[name].dtype != kind or digest(tensors[name]) != sha256:
            raise CalibrationError(
                f"{_beside(path)} has another tensor {name} than {path} names: put the right file "
                "back, or delete both and call gtco.calibrate again"
            )
    return {name: tensors[name] for name in weights}, {
        name.removesuffix(_SEEN): tensors[name] for name in seen
    }


def _decoded(content: Mapping[str, Any]) -> Calibration:
    if content.pop("format") != FORMAT:  # type: ignore[attr-defined]
        raise ValueError("its format is another")
    layers = []
    for each in content["layers"]:
        layer = Layer(**each)
        numbers = (layer.weight, layer.largest, layer.error or 0.0)
        if not (isinstance(layer.name, str) and isinstance(layer.source, str)):
            raise ValueError("a layer without a name")
        if not all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in numbers):
            raise ValueError(f"{layer.name} has a value that is no magnitude")
        if not isinstance(layer.work, int) or layer.work < 1:
            raise ValueError(f"{layer.name} has no work")
        if not isinstance(layer.seen, str):
            raise ValueError(f"{layer.name} was seen without a sha256")
        if not isinstance(layer.rounded, (str, NoneType)):
            raise ValueError(f"{layer.name} has weights without a sha256")
        layers.append(layer)
    if set(content) != {"layers", "precision", "batches", "error"}:
        raise ValueError("a field is missing, or one too many")
    error, batches, precision = content["error"], content["batches"], content["precision"]
    if precision not in TYPES:
        raise ValueError(f"its precision is {precision!r}")
    if error is not None and not 0 <= float(error) < math.inf:
        raise ValueError("its error is no magnitude")
    if not isinstance(batches, int) or batches < 0:
        raise ValueError("its batches are no number")
    if error is not None and any(None in (layer.rounded, layer.error) for layer in layers):
        raise ValueError("a layer's weights or its error are missing")
    return Calibration(tuple(layers), precision, batches, error)


def layers_of(graph: Graph, precision: str) -> tuple[Layer, ...]:
    """What can be calibrated of `graph`, as the passes leave it, for "fp8" or "int8"."""

    def product(node: Node) -> Layer:
        weights = graph.constants[node.inputs[1]]
        specs = [graph.specs[name] for name in node.inputs]
        work = node.definition.flops(specs, node.outputs, node.attrs)
        return Layer(node.name, node.source, float(weights.float().abs().amax()), work)

    def total(node: Node) -> Layer:
        saved = node.outputs[0].numel * (node.outputs[0].dtype.itemsize - 1)
        return Layer(node.name, node.source, 0.0, BYTE * saved)

    found = [product(node) for node in quantizable(graph, TYPES[precision])]
    if precision == "int8":
        totals = sums(graph)
        found += [total(node) for node in graph.nodes if node.name in totals]
    return tuple(found)
