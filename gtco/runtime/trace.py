"""A Chrome trace of one call, launch by launch: each launch in a range that names it."""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from gtco.runtime.plan import Launch, Plan, Visit
from gtco.target import HOST

HOST_TIMES = (
    "of the host: the kernels ran on the CPU through a C++ compiler, to be checked; they say "
    "nothing of a GPU"
)
GPU_TIMES = (
    "of one call whose launches were enqueued one by one, outside the CUDA graph: a kernel's own "
    "span is the GPU's, the gaps between kernels are the host's and not those of a call"
)


def label(launch: Launch) -> str:
    """The name of a launch's range: its group, and the user's modules that it computes."""
    return f"{launch.group.name}: {', '.join(launch.modules) or 'no module'}"


def write_trace(path: str | os.PathLike[str], plan: Plan, walk: Callable[[Visit], object]) -> None:
    """Profile one walk through `plan` and write it as Chrome's JSON.

    Args:
        path: the file to write.
        plan: what runs.
        walk: runs it once, with a visit of each launch.

    Raises:
        OSError: the file cannot be written.
    """
    content = _profiled(plan, walk)
    content["gtco"] = _describe(plan, HOST_TIMES if plan.options.target == HOST else GPU_TIMES)
    with open(path, "w") as file:
        json.dump(content, file)


def launch_times(plan: Plan, walk: Callable[[Visit], object]) -> tuple[float | None, ...]:
    """Microseconds of each launch on the GPU in one walk through `plan`, as `write_trace` takes it:
    the sum of its kernels' and copies' own spans; None of a launch of which the profiler saw none.
    """
    return device_spans(_profiled(plan, walk)["traceEvents"], [label(x) for x in plan.launches])


def device_spans(
    events: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> tuple[float | None, ...]:
    """Microseconds on the GPU of what was enqueued within each range.

    Args:
        events: of a Chrome trace by torch's profiler.
        labels: names of the ranges, in the order in which they were entered.

    Returns:
        The times in the same order; all None if the ranges are not those.
    """
    named = [each for each in events if each.get("cat") == "user_annotation"]
    ranges = sorted((each for each in named if each["name"] in set(labels)), key=_begin)
    if [each["name"] for each in ranges] != list(labels):
        return (None,) * len(labels)
    begins = [float(each["ts"]) for each in ranges]
    ends = [float(each["ts"]) + float(each["dur"]) for each in ranges]
    home: dict[int, int] = {}
    for each in events:
        if each.get("cat") in ("cuda_runtime", "cuda_driver"):
            at = bisect_right(begins, float(each["ts"])) - 1
            if at >= 0 and float(each["ts"]) <= ends[at]:
                home[each["args"]["correlation"]] = at
    spent: list[float | None] = [None] * len(labels)
    for each in events:
        if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            at = home.get(each["args"]["correlation"], -1)
            if at >= 0:
                spent[at] = (spent[at] or 0.0) + float(each["dur"])
    return tuple(spent)


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _profiled(plan: Plan, walk: Callable[[Visit], object]) -> dict[str, Any]:
    """One walk in torch's profiler, each launch in a range of its label."""
    on_gpu = plan.options.target != HOST
    nvtx = torch.cuda.nvtx.range if on_gpu else nullcontext

    def visit(launch: Launch, values: dict[str, Tensor], run: Callable[[], object]) -> None:
        with record_function(label(launch)), nvtx(label(launch)):
            run()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        walk(visit)
    return _exported(profiler)


def _exported(profiler: profile) -> dict[str, Any]:
    """The profiler's own Chrome JSON, which it only writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            content: dict[str, Any] = json.load(file)
    return content


def _describe(plan: Plan, times: str) -> dict[str, Any]:
    """What the times are and what each range ran."""
    return {
        "times": times,
        "target": plan.options.target or plan.target.arch,
        "launches": [
            {
                "group": launch.group.name,
                "range": label(launch),
                "kernel": launch.program.name if launch.program else "aten",
                "ops": [node.op for node in launch.group.compute],
            }
            for launch in plan.launches
        ],
    }
