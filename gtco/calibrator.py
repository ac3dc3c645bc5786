"""Calibration of a rewritten graph by batches of real inputs: what its products read, how their
weights are rounded, and what each of them costs (`gtco.calibration`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from gtco.calibration import (
    Calibration,
    CalibrationError,
    Layer,
    digest,
    layers_of,
)
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes.quantize import sums
from gtco.passes.scales import seen_in, seen_in_both
from gtco.rounding import Batch, held_out, rounded

KEPT = 64
"""Batches that weights are rounded by, the first; they are kept in memory."""
MEASURED = 4
"""Batches that errors are measured on, of those that no weights were rounded by, where there are as
many."""


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
            sha256 = digest(seen[layer.name]) if layer.name in seen else ""
            most = max(layer.largest, now)
            layers.append(replace(layer, largest=most, rounded=None, error=None, seen=sha256))
        self._keep(Calibration(tuple(layers), self.state.precision, batches + 1, seen=seen))

    def round(self, batches: Sequence[Batch]) -> Iterable[int]:
        """Round the weights by what linears read in `batches`; yields how many are left."""
        names = [each.name for each in self.state.layers if each.rounded is None]
        yield len(names)
        totals = sums(self.graph)
        self.state = replace(
            self.state,
            layers=tuple(
                replace(each, rounded="") if each.name in totals else each  # sums have no weights
                for each in self.state.layers
            ),
        )
        scales = self.state.scales(self.graph)
        left = {name: scales[name] for name in names if name in scales}
        for found in rounded(self.graph, left, batches):
            weights = {name: w.cpu() for name, w in found.items() if w is not None}
            digests = {name: "" for name in found} | {
                name: digest(w) for name, w in weights.items()
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
