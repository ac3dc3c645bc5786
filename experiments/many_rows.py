"""Which GEMM is fastest with many rows: the wgmma sketch, the persistent one, or cuBLAS?

    python -m experiments.many_rows OUT.json [--programs N]

The four GEMMs of a layer of ViT-B/16 at batches 8 and 32 and of ViT-L/16 at batch 8, fp16, fused
as the passes fuse them. N programs of each sketch, half of them its first defaults, the others
drawn at random, are checked and timed; then the best of each and cuBLAS (torch's linear with its
bias alone, so it does less) are timed in turn, in chains of twelve launches with weights of their
own. Writes OUT.json and the same as a table to OUT.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.publish import markdown, microseconds, provenance
from gtco.codegen.program import KernelProgram
from gtco.codegen.sampler import Candidate, Sampler
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.database import TuningRecord
from gtco.cost_model.judge import random_values
from gtco.cost_model.measure import Subject
from gtco.cost_model.trials import Trials
from gtco.graph import Group
from gtco.passes.tasks import workload_key
from gtco.runtime.driver import BoundLaunch
from gtco.runtime.poison import poisoned
from gtco.runtime.run import Chain, load_program
from gtco.target import Target, target_of_capability
from tests import groups

PEAK_TFLOPS = 989.4
"""Dense fp16 of an H100 SXM at its boost clock, from its data sheet."""
SKETCHES: tuple[type[Sketch], ...] = (GemmWgmma, GemmPersistent)
CUBLAS = "cublas, bias alone"
COLUMNS = (*(kind.name for kind in SKETCHES), CUBLAS)
COPIES = 12
ROUNDS, REPLAYS = 9, 10
"""Turns of each chain, and replays of it in a turn."""


@dataclass(frozen=True)
class Shape:
    """One GEMM of one layer.

    Args:
        model: with its batch.
        name: "qkv", "projection", "fc1" or "fc2".
        rows, k, columns: of the product.
    """

    model: str
    name: str
    rows: int
    k: int
    columns: int

    @property
    def group(self) -> Group:
        sizes = (self.rows, self.k, self.columns, torch.float16)
        if self.name in ("qkv", "fc1"):
            return groups.norm_linear(*sizes, gelu=self.name == "fc1")
        return groups.residual_linear(*sizes)

    def tflops(self, run_us: float) -> float:
        return 2e-6 * self.rows * self.k * self.columns / run_us


def layer(model: str, rows: int, width: int) -> tuple[Shape, ...]:
    """The GEMMs of a transformer's layer."""
    return (
        Shape(model, "qkv", rows, width, 3 * width),
        Shape(model, "projection", rows, width, width),
        Shape(model, "fc1", rows, width, 4 * width),
        Shape(model, "fc2", rows, 4 * width, width),
    )


SHAPES = (
    *layer("ViT-B/16, batch 8", 8 * 197, 768),
    *layer("ViT-B/16, batch 32", 32 * 197, 768),
    *layer("ViT-L/16, batch 8", 8 * 197, 1024),
)


@dataclass(frozen=True)
class Found:
    """The best program of one sketch for one shape, and how many were drawn and ran right.

    Args:
        best: None where none ran.
        search_us: its time while searching.
        drawn, ran: programs.
        errors: of those that did not run, each once.
    """

    best: Candidate | None
    search_us: float | None
    drawn: int
    ran: int
    errors: tuple[str, ...]


def drawn(sketch: Sketch, programs: int) -> list[Candidate]:
    """`programs` of them: defaults first, the second half at random."""
    sampler = Sampler((sketch,), seed=0)
    found = {each.key: each for each in sampler.defaults(programs // 2)}
    for each in sampler.random(2 * programs):
        if len(found) < programs:
            found.setdefault(each.key, each)
    return list(found.values())


def searched(
    shapes: Sequence[Shape], target: Target, runner: Trials, programs: int
) -> dict[Shape, dict[str, Found]]:
    """The best program of each shape and sketch; shapes follow each other on the device."""
    asked: dict[Shape, dict[str, list[tuple[Candidate, Future[TuningRecord]]]]] = {}
    for shape in shapes:
        group = shape.group
        subject = Subject(workload_key(group, target), group)
        asked[shape] = {
            kind.name: [
                (each, runner.run(subject, each)) for each in drawn(kind(group, target), programs)
            ]
            for kind in SKETCHES
        }
    return {
        shape: {name: _best(pairs) for name, pairs in each.items()} for shape, each in asked.items()
    }


def _best(pairs: Sequence[tuple[Candidate, Future[TuningRecord]]]) -> Found:
    records = [(candidate, future.result()) for candidate, future in pairs]
    ran = [(record.run_us, candidate) for candidate, record in records if record.run_us is not None]
    errors = tuple(sorted({record.error for _, record in records if record.run_us is None}))
    run_us, best = min(ran, key=lambda pair: pair[0], default=(None, None))
    return Found(best, run_us, len(records), len(ran), errors)


class Rival:
    """A chain of launches that can be timed; it keeps what they use alive.

    Args:
        launches: of the chain.
        tensors: that they read and write.
    """

    def __init__(
        self, launches: Sequence[Callable[[int], None]], tensors: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._tensors = tensors
        self._chain = Chain(launches)

    def time_us(self) -> float:
        """Of one launch, from start to start."""
        return self._chain.times_us(1, REPLAYS)[0]


def generated(program: KernelProgram, group: Group, device: torch.device) -> Rival:
    """The chain of a generated kernel, dependent launch on."""
    graph = group.graph
    base = random_values(group, device, seed=1)
    base |= {name: poisoned(graph.specs[name], device) for name in graph.outputs}
    copies = [
        {**base, **{name: base[name].clone() for name in graph.constants}} for _ in range(COPIES)
    ]
    assert device.index is not None
    kernel = load_program(program, device.index)
    launches = [
        BoundLaunch(kernel, program, each, dependent=index > 0) for index, each in enumerate(copies)
    ]
    return Rival(launches, copies)


def cublas(shape: Shape, device: torch.device) -> Rival:
    """The chain of torch's linear, which is `addmm` of a transposed weight."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float16, device=device)

    shared = {"x": random(shape.rows, shape.k), "y": random(shape.rows, shape.columns)}
    copies = [
        {
            **shared,
            "w": random(shape.columns, shape.k) * shape.k**-0.5,
            "bias": random(shape.columns),
        }
        for _ in range(COPIES)
    ]

    def launch(tensors: Mapping[str, Tensor]) -> Callable[[int], None]:
        def call(stream: int) -> None:
            w, out = tensors["w"].t(), tensors["y"]
            torch.addmm(tensors["bias"], tensors["x"], w, out=out)

        return call

    return Rival([launch(each) for each in copies], copies)


def alternated(clocks: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The times of each clock, read in turn."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(ROUNDS):
        for name, clock in clocks.items():
            times[name].append(clock())
    return times


def row(
    shape: Shape, found: Mapping[str, Found], times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """A shape's part of the result."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        **asdict(shape),
        "run_us": medians,
        "rounds_us": dict(times),
        "tflops": {name: shape.tflops(run_us) for name, run_us in medians.items()},
        "sketches": {
            name: {
                "schedule": None if each.best is None else dict(each.best.program.schedule),
                "search_us": each.search_us,
                "drawn": each.drawn,
                "ran": each.ran,
                "errors": each.errors,
            }
            for name, each in found.items()
        },
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a shape: microseconds, TFLOP/s and the share of the peak of each."""
    cells = []
    for each in rows:
        shown = []
        for name in COLUMNS:
            run_us, tflops = each["run_us"].get(name), each["tflops"].get(name)
            rate = "" if tflops is None else f", {tflops:.0f} ({tflops / PEAK_TFLOPS:.0%})"
            shown.append(microseconds(run_us) + rate)
        sizes = f"{each['rows']} x {each['columns']} x {each['k']}"
        cells.append((each["model"], each["name"], sizes, *shown))
    header = ("model", "GEMM", "rows x columns x K", *(f"{name}: us, TFLOP/s" for name in COLUMNS))
    return markdown(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--programs", type=int, default=32, help="of each sketch and shape")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    target = target_of_capability(*torch.cuda.get_device_capability())
    device = torch.device("cuda", torch.cuda.current_device())
    begun = time.monotonic()
    with Trials() as runner:
        found = searched(SHAPES, target, runner, given.programs)
    search_s = time.monotonic() - begun
    rows = []
    for shape in SHAPES:
        rivals = {
            name: generated(each.best.program, shape.group, device)
            for name, each in found[shape].items()
            if each.best is not None
        }
        rivals[CUBLAS] = cublas(shape, device)
        clocks = {name: rival.time_us for name, rival in rivals.items()}
        rows.append(row(shape, found[shape], alternated(clocks)))
    result = {
        "experiment": "many_rows",
        **provenance("many_rows"),
        "device": torch.cuda.get_device_name(),
        "peak_tflops": PEAK_TFLOPS,
        "search_s": search_s,
        "all_s": time.monotonic() - begun,
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    text = table(rows)
    given.out.with_suffix(".md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
