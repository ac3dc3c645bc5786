"""GEMM, attention and convolution alone: generated kernels against cuBLAS, SDPA, cuDNN and Triton.

    python -m experiments.op_table OUT.json [--models vit_b16,resnet50] [--programs N] [--db PATH]

The GEMMs and the attention of a layer of each transformer, and each convolution of the others,
fp16, fused as the passes fuse them. N programs of each sketch, half of them its first defaults, the
others drawn at random, are checked and timed. Then the best of each, the best that the database and
the shipped records know and the peers are judged on fresh inputs and timed in interleaved runs, in
chains of twelve launches with weights of their own. The peers do less than the fused kernels:
cuBLAS (torch's addmm) and a Triton GEMM add a bias alone; SDPA, with its fastest backend, and a
Triton attention read q, k and v contiguous; cuDNN (torch's conv2d, channels last, the choice of its
own benchmark) adds a bias alone.
OUT.json, and OUT.md with the tables, are written after each operator.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import op_convolutions, op_rivals
from experiments.op_convolutions import CONVOLUTIONAL
from experiments.op_convolutions import operators as convolutions
from experiments.op_rivals import Maker, Rival, alternated, fastest, outcomes, said
from experiments.op_shapes import CONVOLUTION, MODELS, PEAK_TFLOPS, Operator, Sizes, operators
from experiments.publish import markdown, provenance, publish, save_bars
from gtco import codegen
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.codegen.sketch import Sketch
from gtco.cost_model.knowledge import Knowledge, known_on
from gtco.cost_model.measure import Subject
from gtco.cost_model.record import LIBRARY, TuningRecord
from gtco.cost_model.search import candidate_of
from gtco.cost_model.trials import Trials
from gtco.passes.legality import family
from gtco.passes.tasks import Task, workload_key
from gtco.runtime.device import resolve_device
from gtco.target import Target

Peer = Callable[[Operator, torch.device], Mapping[str, Maker]]


def _by_sizes(make: Callable[[Sizes, torch.device], Mapping[str, Maker]]) -> Peer:
    return lambda operator, device: make(operator.sizes, device)


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "gemm": {
        "cuBLAS": _by_sizes(op_rivals.cublas),
        "Triton": _by_sizes(op_rivals.triton_linear),
    },
    "attention": {
        "SDPA": _by_sizes(op_rivals.sdpa),
        "Triton": _by_sizes(op_rivals.triton_attention),
    },
    CONVOLUTION: {"cuDNN": op_convolutions.cudnn},
}
"""By the kind of operator, torch's own first."""
LIBRARIES = ("cuBLAS", "cuDNN")
ENOUGH = 0.9
"""Of a library's speed: generated products that are slower are named."""
RECORD = ", record"
"""Follows the sketch's name where the program comes from the records."""
LEGEND = f"""\
Microseconds a launch, TFLOP/s (the share of the peak, {PEAK_TFLOPS:g}). A peer's "1.50x" means that
it takes 1.5 times as long as the generated kernel, and it does less: no norm, GELU or residual. The
floor is every byte once at the rate of device memory, or all FLOPs at the peak. Lines are neither
blank nor comments: the sketch with those it imports, the device headers that it includes.
"""

# -- searching -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The best program of one sketch for one operator.

    Args:
        best: None where none ran right.
        run_us: its time while searching.
        drawn, ran: programs.
        errors: of those that did not run, each once.
    """

    best: Candidate | None
    run_us: float | None
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


class Search:
    """The programs of one operator, on their way to the device.

    Args:
        operator: what they compute.
        target: of them.
        runner: measures them.
        known: the records.
        programs: how many of each sketch.

    Attributes:
        record: the fastest program of the records, or None.
        recorded: the sketch that the records prefer, "library" or "".
    """

    def __init__(
        self, operator: Operator, target: Target, runner: Trials, known: Knowledge, programs: int
    ) -> None:
        group, key = operator.group, workload_key(operator.group, target)
        records, task = known.best(key), Task(key, group, (group,))
        adopted = (candidate_of(task, each, target) for each in records if each.sketch != LIBRARY)
        self.record = next(filter(None, adopted), None)
        self.recorded = records[0].sketch if records else ""
        subject = Subject(key, group)
        self._asked: dict[str, list[tuple[Candidate, Future[TuningRecord]]]] = {
            sketch.name: [(each, runner.run(subject, each)) for each in drawn(sketch, programs)]
            for sketch in derive(group, family(group), target).sketches
        }

    def found(self) -> dict[str, Found]:
        """The best program of each sketch; waits for the device."""
        return {name: _best(asked) for name, asked in self._asked.items()}


def _best(asked: Sequence[tuple[Candidate, Future[TuningRecord]]]) -> Found:
    ran: list[tuple[float, Candidate]] = []
    errors: set[str] = set()
    for candidate, time_us, error in outcomes(asked):
        if time_us is None:
            errors.add(error)
        else:
            ran.append((time_us, candidate))
    run_us, best = min(ran, key=lambda pair: pair[0], default=(None, None))
    return Found(best, run_us, len(asked), len(ran), tuple(sorted(errors)))


# -- timing ----------------------------------------------------------------------------------------


def finalists(record: Candidate | None, found: Mapping[str, Found]) -> dict[str, Candidate]:
    """The best program of each sketch, and that of the records if it is another one."""
    best = {name: each.best for name, each in found.items() if each.best is not None}
    if record is not None and record.key not in {each.key for each in best.values()}:
        best[record.sketch.name + RECORD] = record
    return best


def measured(
    operator: Operator, search: Search, target: Target, device: torch.device
) -> dict[str, Any]:
    """The row of one operator, ready for JSON; what fails is noted and spoils nothing else."""
    found = search.found()
    programs = finalists(search.record, found)
    entrants: dict[str, Callable[[], Mapping[str, Maker]]] = {
        name: partial(op_rivals.generated, each.program, operator.group, device)
        for name, each in programs.items()
    }
    for name, peer in PEERS[operator.kind].items():
        entrants[name] = partial(peer, operator, device)
    notes = {name: "; ".join(each.errors) for name, each in found.items() if each.best is None}
    rivals: dict[str, Rival] = {}
    configurations: dict[str, str] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    for name, enter in entrants.items():
        try:
            configurations[name], rivals[name], left_out[name] = fastest(enter())
        except Exception as error:
            notes[name] = said(error)
    rounds_us: dict[str, list[float]] = {}
    try:
        rounds_us = alternated({name: rival.time_us for name, rival in rivals.items()})
    except Exception as error:
        notes["timing"] = said(error)
    run_us = {name: statistics.median(times) for name, times in rounds_us.items()}
    generated = [name for name in programs if name in run_us]
    return {
        "model": operator.model,
        "operator": operator.name,
        "kind": operator.kind,
        "batch": operator.batch,
        "times": operator.times,
        "sizes": operator.sizes,
        "flops": operator.flops,
        "floor_us": operator.floor_us(target),
        "generated": min(generated, key=run_us.__getitem__, default=None),
        "run_us": run_us,
        "tflops": {name: operator.tflops(time_us) for name, time_us in run_us.items()},
        "rounds_us": rounds_us,
        "configurations": configurations,
        "left_out": {name: reasons for name, reasons in left_out.items() if reasons},
        "recorded": search.recorded,
        "search": {
            name: {
                "run_us": each.run_us,
                "drawn": each.drawn,
                "ran": each.ran,
                "errors": each.errors,
            }
            for name, each in found.items()
        },
        "lines": {name: lines_of(each) for name, each in programs.items()},
        "notes": notes,
    }


# -- lines of code ---------------------------------------------------------------------------------


def lines_of(candidate: Candidate) -> dict[str, int]:
    """Lines of a program's sketch and of the device code that it uses."""
    python = sketch_files(type(candidate.sketch))
    device = device_headers(candidate.program.source)
    return {"python": sum(map(code_lines, python)), "device": sum(map(code_lines, device))}


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank nor a comment alone; docstrings count."""
    comment = "#" if path.suffix == ".py" else "//"
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith(comment) for line in lines)


def sketch_files(kind: type[Sketch]) -> set[Path]:
    """A sketch's module and the sketches' modules that it imports; the emitter is everyone's."""
    package = "gtco.codegen.sketches."
    folder = Path(codegen.__file__).parent / "sketches"

    def named(modules: set[str]) -> set[Path]:
        own = {name.removeprefix(package) for name in modules if name.startswith(package)}
        return {folder / f"{name}.py" for name in own}

    def imported(path: Path) -> set[Path]:
        nodes = ast.walk(ast.parse(path.read_text()))
        return named({node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)})

    return _reached(named({kind.__module__}), imported)


def device_headers(source: str) -> set[Path]:
    """The headers of the tile library that a generated source includes, and those they include."""

    def included(text: str) -> set[Path]:
        return {codegen.DEVICE_HEADERS / name for name in re.findall(r'#include "(.+?)"', text)}

    return _reached(included(source), lambda path: included(path.read_text()))


def _reached(begin: set[Path], reads: Callable[[Path], set[Path]]) -> set[Path]:
    """`begin`, what these files read, what those read, and so on."""
    found: set[Path] = set()
    while begin:
        found |= begin
        begin = {other for path in begin for other in reads(path)} - found
    return found


# -- the report ------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> str:
    """The operators, the sketches, what is slow beside its library, and what failed."""
    rows = result["rows"]
    slow = [
        f"{row['model']} {row['operator']} ({ratio:.0%})"
        for row in rows
        for library in LIBRARIES
        if (ratio := _ratio(row, library)) is not None and ratio < ENOUGH
    ]
    failed = Counter(f"{name}: {text}" for row in rows for name, text in row["notes"].items())
    failed.update(f"{name}: {text}" for name, text in result["left_out"].items())
    lines = [
        f"Generated products below {ENOUGH:.0%} of the library's speed: "
        f"{', '.join(slow) or 'none'}.\n"
    ]
    lines += [f"Not timed ({times}): {text}\n" for text, times in failed.items()]
    return "\n".join((operator_table(rows), sketch_table(sketches(rows)), LEGEND, *lines))


def operator_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line an operator; `LEGEND` says what its cells are."""
    header = ["model", "operator", "sizes", "sketch", "us, TFLOP/s (of the peak)", "floor, us"]
    cells = []
    for row in rows:
        best, run_us = row["generated"], row["run_us"]
        floor = ""
        if best is not None and row["batch"] == 1:
            floor = f"{row['floor_us']:.2f} ({row['floor_us'] / run_us[best]:.0%})"
        sizes = " x ".join(map(str, row["sizes"]))
        own = (row["model"], row["operator"], sizes, best or "", _cell(row, best), floor)
        library, *triton = (_cell(row, name) for name in PEERS[row["kind"]])
        cells.append((*own, library, *(triton or ("",))))
    return markdown((*header, "cuBLAS, SDPA or cuDNN", "Triton"), cells)


def _cell(row: Mapping[str, Any], name: str | None) -> str:
    if name is None or name not in row["run_us"]:
        return ""
    tflops, ratio = row["tflops"][name], _ratio(row, name)
    text = f"{row['run_us'][name]:.2f}"
    if tflops:  # no matrix product otherwise
        text += f", {tflops:.0f} ({tflops / PEAK_TFLOPS:.0%})"
    return text if ratio is None or name == row["generated"] else f"{text}, {ratio:.2f}x"


def _ratio(row: Mapping[str, Any], name: str) -> float | None:
    """How long `name` takes in units of the generated kernel, if both were timed."""
    run_us, best = row["run_us"], row["generated"]
    return run_us[name] / run_us[best] if best is not None and name in run_us else None


def sketches(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each sketch its best rate, where, and the lines of code that it takes."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in row["lines"].keys() & row["tflops"].keys():
            sketch, tflops = name.removesuffix(RECORD), row["tflops"][name]
            if sketch not in found or tflops > found[sketch]["tflops"]:
                at = f"{row['model']} {row['operator']}"
                found[sketch] = {"tflops": tflops, "at": at, **row["lines"][name]}
    for each in found.values():
        each["tflops_a_line"] = each["tflops"] / (each["python"] + each["device"])
    return dict(sorted(found.items()))


def sketch_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a sketch."""
    header = ("sketch", "best TFLOP/s", "at", "lines of sketch", "of device code", "TFLOP/s a line")
    cells = [
        (
            name,
            f"{each['tflops']:.0f}",
            each["at"],
            str(each["python"]),
            str(each["device"]),
            f"{each['tflops_a_line']:.3f}",
        )
        for name, each in found.items()
    ]
    return markdown(header, cells)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """A group of bars an operator: the rates of the generated kernel and of its peers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.5 * len(rows)))
    ways = [(row["generated"], *PEERS[row["kind"]]) for row in rows]
    for number, label in enumerate(("generated", "cuBLAS, SDPA or cuDNN", "Triton")):
        places = [place + 0.27 * (number - 1) for place in range(len(rows))]
        widths = [
            row["tflops"].get(names[number], 0.0) if number < len(names) else 0.0
            for row, names in zip(rows, ways, strict=True)
        ]
        axis.barh(places, widths, 0.27, label=label)
    axis.set_yticks(
        range(len(rows)), [f"{row['model']} {row['operator']}" for row in rows], fontsize=7
    )
    axis.set_xlabel(f"TFLOP/s; the peak is {PEAK_TFLOPS:.0f}")
    save_bars(figure, axis, {**result, "model": "operators alone"}, path)


# -- the command -----------------------------------------------------------------------------------


def model_names(text: str) -> tuple[str, ...]:
    """The models named in a comma-separated list."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in (*MODELS, *CONVOLUTIONAL):
            there = ", ".join((*MODELS, *CONVOLUTIONAL))
            raise argparse.ArgumentTypeError(f"takes {there}; it knows no {name!r}")
    return names


def searched(
    names: Sequence[str],
    target: Target,
    device: torch.device,
    runner: Trials,
    known: Knowledge,
    programs: int,
) -> tuple[list[tuple[Operator, Search]], dict[str, str]]:
    """The searches of the named models, all done, and the models that were left out, and why."""
    searches: list[tuple[Operator, Search]] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            layer = name in MODELS
            found = operators(name, target) if layer else convolutions(name, target, known)
            for operator in found:
                search = Search(operator, target, runner, known, programs)
                searches.append((operator, search))
        except Exception as error:
            left_out[name] = said(error)
    widths = {each.sizes[-1] for each, _ in searches if each.kind == "attention"}
    op_rivals.warm_triton(widths, device)  # while programs are compiled in other processes
    for _, search in searches:
        search.found()
    return searches, left_out


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write what is known so far."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(result))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--models", type=model_names, default=(*MODELS, *CONVOLUTIONAL), help="by commas"
    )
    parser.add_argument("--programs", type=int, default=32, help="of each sketch and operator")
    parser.add_argument("--db", type=Path, help="what `gtco tune` kept; the user's by default")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    card = resolve_device(None)
    target = card.target
    device = torch.device("cuda", torch.cuda.current_device())
    known = known_on(card, given.db)
    begun = time.monotonic()
    with Trials() as runner:
        found = searched(given.models, target, device, runner, known, given.programs)
    searches, left_out = found
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "experiment": "op_table",
        **provenance("op_table"),
        "device": known.device,
        "peak_tflops": PEAK_TFLOPS,
        "search_s": time.monotonic() - begun,
        "rows": rows,
        "left_out": left_out,
    }
    for operator, search in searches:
        rows.append(measured(operator, search, target, device))
        result["sketches"] = sketches(rows)
        result["all_s"] = time.monotonic() - begun
        save(result, given.out)
    publish(given.out, result, report(result), lambda: plot(result, given.out.with_suffix(".png")))


if __name__ == "__main__":
    main()
