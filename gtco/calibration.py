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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

import safetensors.torch
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.interpreter import interpret
from gtco.passes.quantize import quantizable, quantize, scales_of_fp8, scales_of_int8, sums
from gtco.passes.scales import FP8, Scales, seen_in, seen_in_both
from gtco.rounding import Batch, held_out, rounded
from gtco.runtime.cache_files import publish

FORMAT = "gtco calibration 3"
TYPES = {"fp8": FP8, "int8": torch.int8}
"""By precision, what is multiplied."""
BYTE = 256
"""Multiplications and additions that take as long as a byte of device memory, of a card with tensor
cores, roughly: what a sum saves counts as work by it."""
KEPT = 64
"""Batches that weights are rounded by, the first; they are kept in memory."""
MEASURED = 4
"""Batches that errors are measured on, of those that no weights were rounded by, where there are as
many."""
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
        strange = [
            layer
            for layer in known
            if layer.weight != found[layer.name].weight
            or (layer.rounded and self.weights[layer.name].shape != sizes[layer.name])
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
        nodes = {node.name: node for node in graph.nodes}
        for name, (base, _) in sums(graph).items():  # that no product has rounded
            if all(nodes[each].inputs[0] != base for each in chosen if each not in sums(graph)):
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


_SEEN = ".seen"
"""Behind the name of a product, of what was seen of what it reads."""


def _digest(tensor: Tensor) -> str:
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
    weights = {each.name: (each.rounded, dtype) for each in found.layers if each.rounded}
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
    for name, (digest, kind) in wanted.items():
        if tensors[name].dtype != kind or _digest(tensors[name]) != digest:
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
        found += [total(node) for node in graph.nodes if node.name in sums(graph)]
    return tuple(found)


class Calibrator:
    """Calibration of a rewritten graph, as far as it is.

    Args:
        graph: as the passes leave it.
        precision: "fp8" or "int8".
        path: where it is kept; what is there already counts.

    Raises:
        CalibrationError: nothing of the graph can be quantized, or the file is of another.
    """

    def __init__(self, graph: Graph, precision: str, path: Path | None) -> None:
        self.graph, self.path = graph, path
        self.state = Calibration(layers_of(graph, precision), precision)
        if not self.state.layers:
            what = "linear" if precision == "fp8" else "linear or convolution"
            raise CalibrationError(
                f"the model has no {what} of 16 rows and more in 16 bits: nothing to take into "
                f"{precision}"
            )
        if path is not None and path.exists():
            kept = Calibration.load(path)
            if kept.precision != precision:
                raise CalibrationError(
                    f"{path} is a calibration for {kept.precision}, not for {precision}: name "
                    "another file"
                )
            if [(x.name, x.weight, x.work) for x in kept.layers] != [
                (x.name, x.weight, x.work) for x in self.state.layers
            ]:
                raise CalibrationError(
                    f"{path} is the calibration of another model, or of other sizes: delete it or "
                    "name another file"
                )
            self.state = kept

    def observe(self, tensors: tuple[Tensor, ...]) -> None:
        """Take one batch in."""
        nodes, totals = {node.name: node for node in self.graph.nodes}, sums(self.graph)
        read = {
            each.name: totals[each.name][0] if each.name in totals else nodes[each.name].inputs[0]
            for each in self.state.layers
        }
        values = tuple(dict.fromkeys(read.values()))
        found = interpret(replace(self.graph, outputs=values), tensors, dtype=torch.float32)
        largest = {name: float(x.abs().amax()) for name, x in zip(values, found, strict=True)}
        channels: dict[str, Tensor] = {}
        if self.state.precision == "int8":
            channels = {name: seen_in(x) for name, x in zip(values, found, strict=True)}
        layers, seen, batches = [], dict(self.state.seen), self.state.batches
        for layer in self.state.layers:
            now = largest[read[layer.name]]
            if not math.isfinite(now):
                raise CalibrationError(
                    f"%{layer.name} ({layer.source}) read {now} in batch {batches}: check the "
                    "inputs"
                )
            if channels and layer.name not in totals:
                new, old = channels[read[layer.name]], seen.get(layer.name)
                seen[layer.name] = new if old is None else seen_in_both(old, new, 1 / (batches + 1))
            digest = _digest(seen[layer.name]) if layer.name in seen else ""
            most = max(layer.largest, now)
            layers.append(replace(layer, largest=most, rounded=None, error=None, seen=digest))
        self._keep(Calibration(tuple(layers), self.state.precision, batches + 1, seen=seen))

    def round(self, batches: Sequence[Batch]) -> Iterable[int]:
        """Round the weights by what linears read in `batches`; yields how many are left."""
        scales = self.state.scales(self.graph)
        names = [each.name for each in self.state.layers if each.rounded is None]
        yield len(names)
        self.state = replace(  # sums have no weights
            self.state,
            layers=tuple(
                each if each.name in scales else replace(each, rounded="")
                for each in self.state.layers
            ),
        )
        left = {name: scales[name] for name in names if name in scales}
        for found in rounded(self.graph, left, batches):
            weights = {name: w.cpu() for name, w in found.items() if w is not None}
            digests = {name: "" for name in found} | {
                name: _digest(w) for name, w in weights.items()
            }
            self.state = replace(
                self.state,
                layers=tuple(
                    replace(each, rounded=digests.get(each.name, each.rounded))
                    for each in self.state.layers
                ),
                weights={**self.state.weights, **weights},
            )
            if self.path is not None:
                self.state.save(self.path)
            left = {name: each for name, each in left.items() if name not in found}
            yield len(left)

    def measure(self, batches: Sequence[Batch]) -> Iterable[int]:
        """Measure what each product costs, and all of them; yields how many are left."""
        exact = [interpret(self.graph, tensors, dtype=torch.float32) for tensors in batches]
        scales = self.state.scales(self.graph)

        def error(layers: Iterable[Layer]) -> float:
            changed = self.state.changed(self.graph, layers, scales)
            found = [interpret(changed, tensors, dtype=torch.float32) for tensors in batches]
            return _relative(found, exact)

        for place, layer in enumerate(self.state.layers):
            if layer.error is None:
                measured = replace(layer, error=error([layer]))
                layers = list(self.state.layers)
                layers[place] = measured
                self._keep(replace(self.state, layers=tuple(layers)))
            yield len(self.state.layers) - place
        if self.state.error is None:
            self._keep(replace(self.state, error=error(self.state.layers)))

    def _keep(self, state: Calibration) -> None:
        self.state = state
        if self.path is not None:
            (state.save if state.seen and not state.weights else state.save_facts)(self.path)


def _relative(found: Sequence[Batch], exact: Sequence[Batch]) -> float:
    """The largest error of an output, over all batches, in relation to its size; 0 without outputs
    of floats."""
    errors = [0.0]
    for mine, truth in zip(zip(*found, strict=True), zip(*exact, strict=True), strict=True):
        if truth[0].is_floating_point() and truth[0].numel():
            size = _norm(truth)
            off = _norm([a.double() - b.double() for a, b in zip(mine, truth, strict=True)])
            errors.append(off / size if size else float(off > 0))
    return max(errors)


def _norm(parts: Iterable[Tensor]) -> float:
    return math.hypot(*(float(each.double().norm()) for each in parts))


def run(graph: Graph, batches: Iterable[Batch], precision: str, path: Path | None) -> Calibration:
    """The calibration of `graph` for `precision` by `batches`, tensors for its inputs each, with a
    progress bar."""
    calibrator = Calibrator(graph, precision, path)
    count = len(calibrator.state.layers)
    console = Console(stderr=True)
    kept: list[Batch] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("batches", total=None)
        done = calibrator.state.batches
        for number, tensors in enumerate(batches):
            if len(kept) < KEPT:
                kept.append(tuple(each.clone() for each in tensors))  # its buffer may be reused
            if number >= done:
                calibrator.observe(tensors)
            progress.update(bar, advance=1, description=f"batch {number + 1}")
        if not kept:
            raise CalibrationError("no batch was given: pass some of the model's real inputs")
        progress.update(bar, total=count, completed=0)
        for left in calibrator.round(kept):
            progress.update(bar, completed=count - left, description="weights of each product")
        progress.update(bar, completed=0)
        for left in calibrator.measure(held_out(kept)[-MEASURED:]):
            progress.update(bar, completed=count - left, description="error of each product")
    return calibrator.state
