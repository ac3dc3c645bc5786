"""A Chrome trace of one call, launch by launch: each launch in a range that names it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
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
    on_gpu = plan.options.target != HOST
    nvtx = torch.cuda.nvtx.range if on_gpu else nullcontext

    def visit(launch: Launch, values: dict[str, Tensor], run: Callable[[], object]) -> None:
        with record_function(label(launch)), nvtx(label(launch)):
            run()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        walk(visit)
    content = _exported(profiler)
    content["gtco"] = _describe(plan, GPU_TIMES if on_gpu else HOST_TIMES)
    with open(path, "w") as file:
        json.dump(content, file)


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
