"""What card is here, asked of the driver, and which one to compile for."""

from __future__ import annotations

import torch
from cuda.bindings import driver

from gtco.runtime.driver import check
from gtco.target import (
    CARDS,
    HOST,
    HOST_DEVICE,
    Device,
    TargetError,
    find_target,
    target_of_capability,
)


def device_at(index: int | None = None) -> Device:
    """The GPU of this index among those that torch sees, the current one by default.

    Raises:
        TargetError: gtco has no target that runs on it.
        DriverError: the driver does not describe it.
    """
    at = torch.cuda.current_device() if index is None else index
    arch = target_of_capability(*torch.cuda.get_device_capability(at)).arch
    handle = check(driver.cuDeviceGet(at), f"GPU {at}")

    def ask(name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(which, handle), f"GPU {at}, {name.lower()}"))

    rated_gbps = 2 * ask("MEMORY_CLOCK_RATE") * ask("GLOBAL_MEMORY_BUS_WIDTH") / 8e6  # kHz, bits
    return Device(
        torch.cuda.get_device_name(at),
        arch,
        ask("MULTIPROCESSOR_COUNT"),
        ask("L2_CACHE_SIZE"),
        round(rated_gbps),
    )


def resolve_device(name: str | None) -> Device:
    """The card to compile for: the GPU that is here if `name` is None or the architecture of that,
    else the usual one of the architecture called `name`.

    Raises:
        TargetError: the name is unknown, or no GPU is here.
    """
    if name == HOST:
        return HOST_DEVICE
    if name is None:
        if not torch.cuda.is_available():
            raise TargetError(
                "no CUDA GPU is here and no target was named: to compile for one, pass "
                'target="sm_90a" (--target sm_90a); to run the kernels on the CPU, slowly, '
                'target="host"'
            )
        return device_at()
    target = find_target(name)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == target.capability:
        return device_at()
    return CARDS[target.arch]
