"""What gtco runs on: versions, GPU, driver, folders. `gtco env` prints it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from typing import Any

import torch

from gtco.cost_model.knowledge import known_on
from gtco.runtime.cubin import cache_folder, user_cache
from gtco.runtime.device import device_at
from gtco.runtime.nvrtc import CompileError, nvrtc_version
from gtco.target import TargetError, target_of_capability

_PACKAGES = ("gtco", "torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


def environment() -> dict[str, Any]:
    """Versions, GPUs and folders as plain values, ready for JSON."""
    cache = user_cache()
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "nvrtc": _nvrtc(),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cache": {
            "folder": str(cache_folder()),
            "used": cache.folder is not None,
            "writable": cache.writable,
        },
    }


def records_here() -> list[dict[str, Any]]:
    """How much is known of each GPU here, a row each: the `Knowledge.counts` of the shipped records
    and of the user's, by the GPU's name. One that gtco has no target for has no row."""
    rows = []
    for index in range(torch.cuda.device_count()):
        with contextlib.suppress(TargetError):
            device = device_at(index)
            known = known_on(device)
            kin = [each.device for each in known.kin]
            rows.append({"gpu": device.name, **known.counts(device.arch), "kin_devices": kin})
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvrtc() -> str | None:
    try:
        return nvrtc_version()
    except (CompileError, RuntimeError):  # the bindings raise RuntimeError without the library
        return None


def _driver_version() -> str | None:
    """The newest CUDA version that the driver speaks, such as "13.0"; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from cuda.bindings import driver  # needs the driver's library

    _, version = driver.cuDriverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    try:
        target: str | None = target_of_capability(properties.major, properties.minor).arch
    except TargetError:
        target = None
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "target": target,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }
