"""What card is here, asked of the driver."""

from __future__ import annotations

import torch
from cuda.bindings import driver

from gtco.runtime.driver import check
from gtco.target import Device, target_of_capability


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
