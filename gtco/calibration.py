"""What fp8 needs to know of a model: what its linears read, and what rounding them costs.

`calibrate` runs the rewritten graph in fp32 on batches that a user gives and keeps the largest
magnitude that each linear reads. It rounds the weights of each by what it reads (`gtco.rounding`).
Then it takes one linear at a time to fp8, and all of them, and keeps by how much the model's
outputs change. `Calibration.chosen` takes as much work into fp8 as fits a budget of that error; the
other linears stay in 16 bits.

calibration.json                what was found, and the sha256 of the weights in fp8
calibration.json.safetensors    these weights, of linears whose are not rounded to the nearest
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
from gtco.passes.quantize import FP8, quantizable, quantize
from gtco.rounding import Batch, held_out, rounded
from gtco.runtime.cache_files import publish

FORMAT = "gtco calibration 2"
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
    """One linear of the rewritten graph.

    Args:
        name: of its node.
        source: the user's module that it came from.
        weight: the largest magnitude of its weights, by which another model is noticed.
        work: its multiplications and additions.
        largest: the largest magnitude that it read.
        rounded: the sha256 of its weights in fp8; "" where they are the nearest, None until known.
        error: of the model's outputs, relative, with this linear alone in fp8; None until measured.
    """

    name: str
    source: str
    weight: float
    work: int
    largest: float = 0.0
    rounded: str | None = None
    error: float | None = None


@dataclass(frozen=True)
class Calibration:
    """What `gtco.calibrate` found; `print` shows the error of each linear.

    Args:
        layers: every linear that could multiply in fp8.
        batches: how many were run.
        error: of the model's outputs, relative, with all of them in fp8; None until measured.
        weights: by the name of a linear, in fp8, where they are not rounded to the nearest.
    """

    layers: tuple[Layer, ...]
    batches: int = 0
    error: float | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def finished(self) -> bool:
        return self.error is not None

    def chosen(self, budget: float) -> tuple[Layer, ...]:
        """The linears that take most work into fp8 within `budget`, the relative error of the
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
        """`graph`, as the passes leave it, with the linears of `chosen` in fp8.

        Raises:
            CalibrationError: it is not of this model, or not finished.
        """
        if not self.finished:
            raise CalibrationError(
                "the calibration is not finished: call gtco.calibrate again with the same path"
            )
        found = {layer.name: layer for layer in layers_of(graph)}
        known = [layer for layer in self.layers if layer.name in found]
        sizes = {node.name: graph.specs[node.inputs[1]].sizes for node in quantizable(graph)}
        strange = [
            layer
            for layer in known
            if layer.weight != found[layer.name].weight
            or (layer.rounded and self.weights[layer.name].shape != sizes[layer.name])
        ]
        if strange or (found and not known):
            which = f"%{strange[0].name} has other weights" if strange else "no linear is known"
            raise CalibrationError(
                f"the calibration is of another model ({which}): call gtco.calibrate for this one"
            )
        chosen = [each for each in self.chosen(budget) if each.name in found]
        return self.changed(graph, chosen)

    def changed(self, graph: Graph, layers: Iterable[Layer]) -> Graph:
        """`graph` with `layers` in fp8."""
        return quantize(graph, {each.name: each.largest for each in layers}, self.weights)

    def facts(self) -> dict[str, Any]:
        """All but the weights, as JSON has it."""
        layers = [asdict(layer) for layer in self.layers]
        return {"layers": layers, "batches": self.batches, "error": self.error}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, each file whole or not at all."""
        if self.weights:
            publish(_beside(path), safetensors.torch.save(dict(self.weights)))
        self.save_facts(path)

    def save_facts(self, path: str | os.PathLike[str]) -> None:
        """Write it beside the weights that are there."""
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
        return replace(found, weights=_weights(found, path))

    def __str__(self) -> str:
        rows = [f"{'linear':<32}{'module':<44}{'largest':>10}{'error':>10}"]
        for layer in sorted(self.layers, key=lambda each: -(each.error or 0.0)):
            error = "not yet" if layer.error is None else f"{layer.error:.2%}"
            rows.append(f"{layer.name:<32}{layer.source:<44}{layer.largest:>10.3g}{error:>10}")
        whole = "not yet measured" if self.error is None else f"{self.error:.2%}"
        compensated = f"the weights of {len(self.weights)} rounded with compensation"
        rows.append(
            f"{len(self.layers)} linears in {self.batches} batches, {compensated}; "
            f"all in fp8: {whole}"
        )
        return "\n".join(rows)


def _beside(path: str | os.PathLike[str]) -> Path:
    """The file with the weights of the calibration at `path`."""
    return Path(f"{os.fspath(path)}.safetensors")


def _digest(weights: Tensor) -> str:
    data = weights.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _weights(found: Calibration, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """What `found` says that the file beside `path` holds.

    Raises:
        CalibrationError: it does not.
    """
    wanted = {layer.name: layer.rounded for layer in found.layers if layer.rounded}
    if not wanted:
        return {}
    try:
        with safe_open(_beside(path), framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{_beside(path)}, which holds the weights of {path}, cannot be read ({error}): put it "
            "back, or delete both and call gtco.calibrate again"
        ) from None
    for name, digest in wanted.items():
        if weights[name].dtype != FP8 or _digest(weights[name]) != digest:
            raise CalibrationError(
                f"{_beside(path)} has other weights of %{name} than {path} names: put the right "
                "file back, or delete both and call gtco.calibrate again"
            )
    return weights


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
        if not isinstance(layer.rounded, (str, NoneType)):
            raise ValueError(f"{layer.name} has weights without a sha256")
        layers.append(layer)
    if set(content) != {"layers", "batches", "error"}:
        raise ValueError("a field is missing, or one too many")
    error, batches = content["error"], content["batches"]
    if error is not None and not 0 <= float(error) < math.inf:
        raise ValueError("its error is no magnitude")
    if not isinstance(batches, int) or batches < 0:
        raise ValueError("its batches are no number")
    if error is not None and any(None in (layer.rounded, layer.error) for layer in layers):
        raise ValueError("a layer's weights or its error are missing")
    return Calibration(tuple(layers), batches, error)


def layers_of(graph: Graph) -> tuple[Layer, ...]:
    """What can be calibrated of `graph`, as the passes leave it."""

    def layer(node: Node) -> Layer:
        weights = graph.constants[node.inputs[1]]
        specs = [graph.specs[name] for name in node.inputs]
        work = node.definition.flops(specs, node.outputs, node.attrs)
        return Layer(node.name, node.source, float(weights.float().abs().amax()), work)

    return tuple(layer(node) for node in quantizable(graph))


class Calibrator:
    """Calibration of a rewritten graph, as far as it is.

    Args:
        graph: as the passes leave it.
        path: where it is kept; what is there already counts.

    Raises:
        CalibrationError: nothing of the graph can be quantized, or the file is of another.
    """

    def __init__(self, graph: Graph, path: Path | None) -> None:
        self.graph, self.path = graph, path
        self.state = Calibration(layers_of(graph))
        if not self.state.layers:
            raise CalibrationError(
                "the model has no linear of 16 rows and more in 16 bits: nothing to take into fp8"
            )
        if path is not None and path.exists():
            kept = Calibration.load(path)
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
        nodes = {node.name: node for node in self.graph.nodes}
        values = tuple(dict.fromkeys(nodes[x.name].inputs[0] for x in self.state.layers))
        found = interpret(replace(self.graph, outputs=values), tensors, dtype=torch.float32)
        largest = {name: float(x.abs().amax()) for name, x in zip(values, found, strict=True)}
        layers = []
        for layer in self.state.layers:
            seen = largest[nodes[layer.name].inputs[0]]
            if not math.isfinite(seen):
                raise CalibrationError(
                    f"%{layer.name} ({layer.source}) read {seen} in batch {self.state.batches}: "
                    "check the inputs"
                )
            most = max(layer.largest, seen)
            layers.append(replace(layer, largest=most, rounded=None, error=None))
        self._keep(Calibration(tuple(layers), self.state.batches + 1))

    def round(self, batches: Sequence[Batch]) -> Iterable[int]:
        """Round the weights by what linears read in `batches`; yields how many are left."""
        left = {each.name: each.largest for each in self.state.layers if each.rounded is None}
        yield len(left)
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
            left = {name: most for name, most in left.items() if name not in found}
            yield len(left)

    def measure(self, batches: Sequence[Batch]) -> Iterable[int]:
        """Measure what each linear costs, and all of them; yields how many are left."""
        exact = [interpret(self.graph, tensors, dtype=torch.float32) for tensors in batches]

        def error(layers: Iterable[Layer]) -> float:
            changed = self.state.changed(self.graph, layers)
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
            state.save_facts(self.path)


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


def run(graph: Graph, batches: Iterable[Batch], path: Path | None) -> Calibration:
    """The calibration of `graph` by `batches`, tensors for its inputs each, with a progress bar."""
    calibrator = Calibrator(graph, path)
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
            progress.update(bar, completed=count - left, description="weights of each linear")
        progress.update(bar, completed=0)
        for left in calibrator.measure(held_out(kept)[-MEASURED:]):
            progress.update(bar, completed=count - left, description="error of each linear")
    return calibrator.state
