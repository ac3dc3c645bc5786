"""What people read of the rows: times, waiting, gtco's own facts, what is missing and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.publish import markdown
from gtco.benchmarking.contestants import (
    CHANNELS_LAST,
    EAGER_CALLS,
    GTCO,
    TENSORRT,
    TORCHSCRIPT,
    UNTUNED,
)
from gtco.benchmarking.onnx_peer import OnnxRuntime

Result = Mapping[str, Any]

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "eager": (EAGER_CALLS,),
    "eager in a CUDA graph": ("eager", f"eager{CHANNELS_LAST}"),
    "TorchScript": (TORCHSCRIPT,),
    "Inductor reduce-overhead": tuple(
        f"inductor reduce-overhead{layout}" for layout in ("", CHANNELS_LAST)
    ),
    "Inductor max-autotune": tuple(
        f"inductor max-autotune{layout}" for layout in ("", CHANNELS_LAST)
    ),
    "ONNX Runtime CUDA": ("onnxruntime (CUDA)", OnnxRuntime.name),
    "ONNX Runtime TensorRT": ("onnxruntime (TensorRT)",),
    "TensorRT": (TENSORRT,),
    "gtco untuned": (UNTUNED,),
    "gtco tuned": (GTCO,),
}
"""A column's contestants, of which the fastest right one counts."""
OWN = ("gtco untuned", "gtco tuned")
DASH = "–"  # noqa: RUF001
REHEARSED = "ran"
LEGEND = """\
Microseconds. Back to back: a call within a long run of calls that nobody waits for, the clocks
settled, the median of the rounds. Synchronised: single calls with a synchronisation after each.
"cl" is with channels last, where that is faster. TensorRT and Inductor hand out memory that their
next call overwrites; everyone else gives fresh outputs. "wrong" stands for no peer. gtco untuned
knows no record at all. The floor is every weight, input and output once at the rate of device
memory, or all products at the peak, whichever takes longer. Compile seconds begin with empty caches
and include the first calls; memory is what a contestant holds of the GPU's, the weights included:
by how much less of it is free afterwards, which other processes disturb (a dash where they did).
"""


def report(results: Sequence[Result]) -> str:
    """All tables, as Markdown."""
    right = [each for each in results if "error" not in each]
    parts = [
        heading(results),
        "## Back to back\n\n" + back_to_back(results),
        "## Synchronised: p50, p90, p99\n\n" + synchronised(right),
        "## Plans and costs\n\n" + costs(right),
    ]
    if any(each["published"] for each in right):
        parts.append("## Beside what AutoGTCO published\n\n" + published(right))
    parts.append("## The card meanwhile\n\n" + card(right))
    parts.append(LEGEND)
    parts.append("## Dashes\n\n" + dashes(results))
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


def heading(results: Sequence[Result]) -> str:
    """On what it ran, or that it claims nothing."""
    if any(each.get("rehearsal") for each in results):
        return "**A rehearsal on a CPU with small relatives of the models: no speed is claimed.**\n"
    return f"On {devices(results)}.\n"


def devices(results: Sequence[Result]) -> str:
    """The GPUs' names."""
    found = {gpu["name"] for each in results for gpu in each.get("environment", {}).get("gpus", ())}
    return ", ".join(sorted(found)) or "no GPU"


def back_to_back(results: Sequence[Result]) -> str:
    """A line a model."""
    header = ("model", *COLUMNS, "best peer / gtco", "x floor")
    rows = []
    for each in results:
        times = best_ratio(each)
        cells = [cell(each, column) for column in COLUMNS]
        floor_us = each.get("floor_us")
        ours = us(each, GTCO)
        floor = f"{ours / floor_us:.2f}" if ours and floor_us and not _rehearsed(each) else DASH
        best = DASH if times is None or _rehearsed(each) else f"{times:.2f}"
        rows.append((_title(each), *cells, best, floor))
    return markdown(header, rows)


def cell(result: Result, column: str) -> str:
    """The time of the one who counts; what else is to be said of it."""
    name = standing(result, column)
    if name is None:
        if column == "TensorRT" and "trtexec" in result:
            return f"{result['trtexec']['us']['p50']:.0f} (trtexec, not judged)"
        return DASH
    notes = []
    if CHANNELS_LAST in name:
        notes.append("cl")
    if name == OnnxRuntime.name:
        notes.append("on the CPU")
    if name == TENSORRT:
        notes.append(result["facts"]["version"])
    if not is_right(result, name):
        notes.append("wrong")
    time = REHEARSED if _rehearsed(result) else f"{us(result, name):.0f}"
    return f"{time} ({', '.join(notes)})" if notes else time


def standing(result: Result, column: str) -> str | None:
    """The fastest right contestant of a column, else the fastest; None if none was timed."""
    timed = [name for name in COLUMNS[column] if name in result.get("timings", {})]
    return min(timed, key=lambda name: (not is_right(result, name), us(result, name)), default=None)


def is_right(result: Result, name: str) -> bool:
    """Whether all of its answers are."""
    return all(verdict["ok"] for verdict in result["verdicts"][name].values())


def us(result: Result, name: str) -> float:
    """Back to back; 0 where it was not timed."""
    timing = result.get("timings", {}).get(name)
    return 0.0 if timing is None else float(timing["back_to_back_us"])


def best_ratio(result: Result) -> float | None:
    """How many times as long as gtco the fastest right peer takes, the median of the rounds."""
    peers = [standing(result, column) for column in COLUMNS if column not in OWN]
    right = [name for name in peers if name is not None and is_right(result, name)]
    if not right:
        return None
    ours = result["timings"][GTCO]["rounds_us"]
    best = result["timings"][min(right, key=lambda name: us(result, name))]["rounds_us"]
    ratios = sorted(theirs / mine for theirs, mine in zip(best, ours, strict=True))
    middle = len(ratios) // 2
    return (ratios[middle] + ratios[~middle]) / 2


def synchronised(results: Sequence[Result]) -> str:
    """A line a model."""
    rows = []
    for each in results:
        cells = []
        for column in COLUMNS:
            name = standing(each, column)
            if name is None:
                cells.append(DASH)
            elif _rehearsed(each):
                cells.append(REHEARSED)
            else:
                single = each["timings"][name]["single_us"]
                cells.append(", ".join(f"{single[key]:.0f}" for key in ("p50", "p90", "p99")))
        rows.append((_title(each), *cells))
    return markdown(("model", *COLUMNS), rows)


def costs(results: Sequence[Result]) -> str:
    """A line a model: what gtco's plan is, and what it and the peers cost."""
    timed = ("gtco tuned", "Inductor reduce-overhead", "Inductor max-autotune", "TensorRT")
    held = ("gtco tuned", "eager in a CUDA graph", "Inductor reduce-overhead", "TensorRT")
    header = (
        "model",
        "launches",
        "generated",
        *(f"compile s: {column}" for column in timed),
        *(f"MB: {column}" for column in held),
        "RMSE (eager's)",
    )
    rows = []
    for each in results:
        share = each["generated_share"]
        verdict = each["verdicts"][GTCO]["normal"]
        rows.append(
            (
                _title(each),
                str(each["launches"]),
                DASH if share is None else f"{share:.1%}",
                *(_seconds(each, column) for column in timed),
                *(_megabytes(each, column) for column in held),
                f"{verdict['rmse']:.1e} ({verdict['eager_rmse']:.1e})",
            )
        )
    return markdown(header, rows)


def _seconds(result: Result, column: str) -> str:
    name = standing(result, column)
    if name is None or _rehearsed(result):
        return DASH
    if name == TENSORRT:
        built = result["facts"]["build_s"]
        return f"{built:.0f}" if built else "built before"
    return f"{result['costs'][name]['seconds']:.1f}"


def _megabytes(result: Result, column: str) -> str:
    """What was taken while it was made ready; torch's peers run on the model's own weights, but for
    copies in another layout."""
    name = standing(result, column)
    if name is None:
        return DASH
    taken = result["costs"][name]["memory_bytes"]
    if name == TENSORRT:
        taken = None if _rehearsed(result) else result["facts"]["memory_bytes"]
    if taken is None:
        return DASH
    shared = name.startswith(("eager", "inductor")) and CHANNELS_LAST not in name
    held = taken + shared * result["weight_bytes"]
    return f"{held / 1e6:.0f}" if held >= 0 else DASH  # another process let go of some meanwhile


def published(results: Sequence[Result]) -> str:
    """Ratios as published on an RTX 2080 Ti, and the same here; never milliseconds."""
    header = (
        "model",
        "TensorRT 7 / AutoGTCO, published",
        "TensorRT / gtco, here",
        "Ansor / AutoGTCO, published",
        "JIT / AutoGTCO, published",
        "TorchScript / gtco, here",
    )
    rows = []
    for each in results:
        source = each["published"]
        if source is not None:
            rows.append(
                (
                    _title(each),
                    f"{source['tensorrt'] / source['autogtco']:.2f}",
                    ratio(each, TENSORRT),
                    f"{source['ansor'] / source['autogtco']:.2f}",
                    f"{source['jit'] / source['autogtco']:.2f}",
                    ratio(each, TORCHSCRIPT),
                )
            )
    return markdown(header, rows)


def ratio(result: Result, name: str) -> str:
    """How many times as long as gtco it takes; a dash where that is not known or it is wrong."""
    theirs, ours = us(result, name), us(result, GTCO)
    if not theirs or not ours or _rehearsed(result) or not is_right(result, name):
        return DASH
    return f"{theirs / ours:.2f}"


def card(results: Sequence[Result]) -> str:
    """A line a model: clocks, power and temperature, least to most."""
    names = {"clocks.sm": "SM MHz", "clocks.mem": "memory MHz", "power.draw": "W"}
    names["temperature.gpu"] = "degrees C"
    rows = []
    for each in results:
        seen = each["card"]
        cells = [
            f"{seen[name]['least']:.0f}, {seen[name]['median']:.0f}, {seen[name]['most']:.0f}"
            if name in seen
            else DASH
            for name in names
        ]
        rows.append((_title(each), seen.get("driver_version", DASH), *cells))
    return markdown(
        ("model", "driver", *(f"{name}: least, median, most" for name in names.values())), rows
    )


def dashes(results: Sequence[Result]) -> str:
    """Why who is missing; alike reasons once."""
    models: dict[str, list[str]] = {}
    for each in results:
        if "error" in each:
            models.setdefault(f"the whole row: {each['error']}", []).append(_title(each))
        for name, reason in each.get("failures", {}).items():
            models.setdefault(f"{name}: {reason}", []).append(_title(each))
    lines = [
        f"- {reason} ({'every model' if len(titles) == len(results) > 1 else ', '.join(titles)})\n"
        for reason, titles in models.items()
    ]
    return "".join(lines) or "None.\n"


def _title(result: Result) -> str:
    return str(result["title"])


def _rehearsed(result: Result) -> bool:
    return bool(result.get("rehearsal"))
