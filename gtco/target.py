"""What gtco knows of a GPU architecture."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass


class TargetError(ValueError):
    """The target is unknown, too old or not there."""


@dataclass(frozen=True)
class Target:
    """Limits and rates of one architecture.

    The rates describe the architecture's usual card; they order plans before anything is measured.

    Args:
        arch: the name NVRTC takes, such as "sm_90a".
        sm_count: multiprocessors.
        smem_per_block: most bytes of shared memory a block may ask for.
        smem_per_sm: bytes of shared memory of a multiprocessor.
        l2_bytes: of the L2 cache.
        dram_gbps: device memory bandwidth, GB/s.
        l2_gbps: rate of filling all shared memories from L2, GB/s.
        matmul_tflops: dense fp16 rate with fp32 accumulation, TFLOP/s.
        fp32_tflops: FFMA rate, TFLOP/s.
        boundary_us: from one kernel's start to the next one's when neither does any work.
    """

    arch: str
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    dram_gbps: float
    l2_gbps: float
    matmul_tflops: float
    fp32_tflops: float
    boundary_us: float

    @property
    def capability(self) -> tuple[int, int]:
        digits = self.arch.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    @property
    def has_wgmma(self) -> bool:
        return self.arch == "sm_90a"

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= (9, 0)


PORTABLE_CLUSTER = 8
"""Blocks of the largest cluster that every GPU with clusters takes."""
TARGETS: Mapping[str, Target] = {
    target.arch: target
    for target in (
        Target("sm_80", 108, 163 * 1024, 164 * 1024, 40 << 20, 1555, 4000, 280, 19, 1.6),
        Target("sm_86", 84, 99 * 1024, 100 * 1024, 6 << 20, 760, 2500, 120, 30, 1.6),
        Target("sm_89", 128, 99 * 1024, 100 * 1024, 72 << 20, 900, 4500, 280, 70, 1.5),
        Target("sm_90a", 132, 227 * 1024, 228 * 1024, 50 << 20, 2840, 5500, 750, 55, 1.1),
    )
}


HOST = "host"
"""Not an architecture: sm_90a's kernels, run on the CPU by `gtco.runtime.host`."""


def find_target(name: str) -> Target:
    """The target called `name`; "host" is sm_90a, whose kernels the host build runs.

    Raises:
        TargetError: unknown, or older than sm_80.
    """
    if name == HOST:
        return TARGETS["sm_90a"]
    if name in TARGETS:
        return TARGETS[name]
    known = ", ".join((*TARGETS, HOST))
    digits = name.removeprefix("sm_").rstrip("a")
    if digits.isdigit() and int(digits) < 80:
        raise TargetError(
            f"target {name!r} is older than sm_80, which gtco needs; it knows {known}"
        )
    close = difflib.get_close_matches(name, TARGETS, 1, 0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise TargetError(f"unknown target {name!r}{hint} gtco knows {known}")


def target_of_capability(major: int, minor: int) -> Target:
    """The target that runs on a GPU of this compute capability.

    Raises:
        TargetError: no known target does.
    """
    if (major, minor) == (9, 0):
        return TARGETS["sm_90a"]
    for target in TARGETS.values():
        if target.capability == (major, minor):
            return target
    known = ", ".join(TARGETS)
    if (major, minor) < (8, 0):
        raise TargetError(f"this GPU is sm_{major}{minor}; gtco needs sm_80 or newer ({known})")
    raise TargetError(f"this GPU is sm_{major}{minor}, for which gtco has no target yet ({known})")
