"""Six operators at many sizes, and ViT-B/16 of a Hugging Face state dict at batches 1 to 256.

    python -m experiments.ops OUT.jsonl [--quick] [--rows add,softmax]

gtco beside torch: eager in a CUDA graph and Inductor. OUT.png has a plot a row. How a table is run:
`experiments.suites.run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.models import operators
from experiments.publish import markdown
from experiments.suites.plots import canvas, save
from experiments.suites.row import Sweep
from experiments.suites.run import Suite, main
from experiments.suites.table import DASH, dashes, devices, heading, is_right, us
from gtco.benchmarking.contestants import GTCO

ONE_MODE = {"inductor max-autotune": "one mode of Inductor: --every-mode runs both"}


def _by(step: int, *times: int) -> tuple[int, ...]:
    return tuple(step * each for each in times)


ROWS = tuple(
    replace(row, left_out=ONE_MODE)
    for row in (
        Sweep(
            "add",
            "add, fp16, size squared",
            _by(128, 1, 4, 8, 16, 32, 64),
            (32, 64),
            operators.add,
        ),
        Sweep(
            "layer_norm",
            "layer norm, fp32, rows of 768",
            _by(256, 1, 4, 8, 16, 32, 64),
            (4, 8),
            operators.layer_norm,
        ),
        Sweep(
            "matmul_gelu",
            "matmul + GELU, fp16, size cubed",
            _by(64, 1, 4, 8, 16, 32, 48, 64, 74),
            (32, 64),
            operators.matmul_gelu,
        ),
        Sweep(
            "batched_matmul",
            "4 matmuls, fp16, size cubed",
            _by(64, 1, 2, 4, 8, 16, 32),
            (32, 64),
            operators.batched_matmul,
        ),
        Sweep(
            "softmax",
            "softmax, fp16, 4 x 4096 of size",
            _by(128, 1, 4, 8, 16, 32, 64, 99),
            (64, 128),
            operators.softmax,
            partial(operators.softmax, rows=4),
        ),
        Sweep(
            "patches",
            "16 x 16 patches of 3 x 224 x 224, fp16, by batch",
            (1, 4, 16, 64),
            (1, 2),
            operators.patches,
            partial(operators.patches, side=32),
        ),
        Sweep(
            "vit",
            "ViT-B/16 of a Hugging Face state dict, fp16, by batch",
            (1, 2, 4, 8, 16, 32, 64, 128, 256),
            (1, 2),
            operators.hugging_face_vit,
            operators.small_hugging_face_vit,
            against=("eager-calls", "eager", "inductor"),
            calls=20,
        ),
    )
)


def report(results: Sequence[Mapping[str, Any]]) -> str:
    """A table a row, a line a size: microseconds back to back, and the ratio to gtco's."""
    parts = [heading(results)]
    for each in results:
        parts.append(f"## {each['title']}\n\n{_points(each)}")
    failed = [
        {**each, "failures": {name: why for point in points(each) for name, why in _failed(point)}}
        for each in results
    ]
    return "\n".join([*parts, "## Dashes\n\n" + dashes(failed)])


def points(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The benchmarks of a row, each with its size."""
    for size, point in result.get("points", {}).items():
        yield {"size": int(size), **point}


def _failed(point: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in point:
        yield f"size {point['size']}", point["error"]
    yield from point.get("failures", {}).items()


def _points(result: Mapping[str, Any]) -> str:
    names = timed(result)
    rows = []
    for point in points(result):
        cells = [_cell(point, name, bool(result.get("rehearsal"))) for name in names]
        rows.append((str(point["size"]), *cells, str(point.get("launches", DASH))))
    return markdown(("size", *names, "gtco's launches"), rows)


def timed(result: Mapping[str, Any]) -> list[str]:
    """Whoever has a time at some size, gtco first."""
    names = {name: None for point in points(result) for name in point.get("timings", {})}
    return [GTCO, *(name for name in names if name != GTCO)]


def _everyone(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for each in results for name in timed(each)))


def _cell(point: Mapping[str, Any], name: str, rehearsal: bool) -> str:
    if not us(point, name):
        return DASH
    if rehearsal:
        return "ran"
    text = f"{us(point, name):.1f}"
    if name != GTCO:
        text += f", {us(point, name) / us(point, GTCO):.2f}x"
    return text if is_right(point, name) else f"{text} (wrong)"


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A plot a row: microseconds over the size, both logarithmic."""
    columns = min(4, max(len(results), 1))
    rows = math.ceil(len(results) / columns) or 1
    figure, axes = canvas(4 * columns, 3.6 * rows, columns, rows)
    colours = {name: f"C{at}" for at, name in enumerate(_everyone(results))}
    for axis in axes[len(results) :]:
        axis.remove()
    for axis, each in zip(axes, results, strict=False):
        for name in timed(each):
            found = [(point["size"], us(point, name)) for point in points(each)]
            xs, ys = zip(*(pair for pair in found if pair[1]), strict=True)
            axis.plot(xs, ys, "o-", markersize=3, label=name, color=colours[name])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(each["title"], fontsize=8)
        axis.set_ylabel("us")
        axis.legend(fontsize=7)
    figure.suptitle(devices(results), fontsize=9)
    save(figure, path)


SUITE = Suite("experiments.ops", ROWS, report, plot, rounds=3)

if __name__ == "__main__":
    main(SUITE)
