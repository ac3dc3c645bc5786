"""What gtco knows of GPU architectures and of single cards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from gtco.constants import H100, TABLES, Constants


class TargetError(ValueError):
    """The target is unknown, too old or not there."""


@dataclass(frozen=True)
class Target:
    """Limits and rates of one card.

    Those in `TARGETS` are of each architecture's usual card; `Device.target` has those of another.
    They order plans before anything is measured.

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
        constants: of the draft model's formulas.
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
    constants: Constants = H100

    @property
    def capability(self) -> tuple[int, int]:
        digits = self.arch.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    def products_tflops(self, dtype: torch.dtype, products: str | None) -> float:
        """The dense rate of products of `dtype`, rounded to `products` ("tf32") if that is said."""
        if dtype.itemsize == 1:
            return 2 * self.matmul_tflops
        if dtype in (torch.float16, torch.bfloat16):
            return self.matmul_tflops
        tf32_tflops = self.matmul_tflops / 2
        return tf32_tflops if products == "tf32" else max(tf32_tflops / 3, self.fp32_tflops)

    @property
    def kept_bytes(self) -> float:
        """What L2 keeps for the next launch."""
        return self.constants.l2_share * self.l2_bytes

    @property
    def splits_fp32(self) -> bool:
        """Whether three products of tf32 are faster than one of FFMA's."""
        return self.matmul_tflops / 6 > self.fp32_tflops

    @property
    def has_fp8(self) -> bool:
        """Whether gtco multiplies fp8 on it. sm_100's `mma.sync` would be no faster than fp16: it
        becomes conversions and fp16's own instruction there."""
        return self.arch in ("sm_89", "sm_90a", "sm_120")

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
        Target("sm_87", 16, 163 * 1024, 164 * 1024, 4 << 20, 204, 600, 42, 5, 2.5),
        Target("sm_89", 128, 99 * 1024, 100 * 1024, 72 << 20, 900, 4500, 280, 70, 1.5),
        Target("sm_90a", 132, 227 * 1024, 228 * 1024, 50 << 20, 2840, 5500, 750, 55, 1.1),
        Target("sm_100", 148, 227 * 1024, 228 * 1024, 126 << 20, 6800, 7000, 1000, 75, 1.1),
        Target("sm_120", 170, 99 * 1024, 100 * 1024, 96 << 20, 1792, 6000, 210, 105, 1.3),
    )
}
"""sm_90a's rates were measured; of the others, rates of what `mma.sync` reaches stand for all."""


@dataclass(frozen=True)
class Device:
    """One card, as its driver describes it.

    Args:
        name: as records have it, such as "NVIDIA H100 80GB HBM3"; "host" for the CPU.
        arch: of `TARGETS`.
        sm_count: multiprocessors.
        l2_bytes: of the L2 cache.
        dram_gbps: rated bandwidth of the device memory, GB/s; 0 where the driver does not say.
    """

    name: str
    arch: str
    sm_count: int
    l2_bytes: int
    dram_gbps: float

    @property
    def target(self) -> Target:
        """What to plan and compile for: the architecture's limits, and rates for this card.

        Rates of arithmetic and of L2 go with the multiprocessors, those of device memory with what
        is rated.
        """
        usual, card = TARGETS[self.arch], CARDS[self.arch]
        if (self.name, self.sm_count) == (card.name, card.sm_count):
            return usual
        share = self.sm_count / usual.sm_count
        return replace(
            usual,
            sm_count=self.sm_count,
            l2_bytes=self.l2_bytes or usual.l2_bytes,
            dram_gbps=usual.dram_gbps * ((self.dram_gbps or card.dram_gbps) / card.dram_gbps),
            l2_gbps=usual.l2_gbps * share,
            matmul_tflops=usual.matmul_tflops * share,
            fp32_tflops=usual.fp32_tflops * share,
            constants=TABLES.get(self.name, usual.constants),
        )


CARDS: Mapping[str, Device] = {
    card.arch: card
    for card in (
        Device("NVIDIA A100-SXM4-40GB", "sm_80", 108, 40 << 20, 1555),
        Device("NVIDIA RTX A6000", "sm_86", 84, 6 << 20, 768),
        Device("Orin", "sm_87", 16, 4 << 20, 204),
        Device("NVIDIA GeForce RTX 4090", "sm_89", 128, 72 << 20, 1008),
        Device("NVIDIA H100 80GB HBM3", "sm_90a", 132, 50 << 20, 3352),
        Device("NVIDIA B200", "sm_100", 148, 126 << 20, 8000),
        Device("NVIDIA GeForce RTX 5090", "sm_120", 170, 96 << 20, 1792),
    )
}
"""Each architecture's usual card: whose records serve where none is there to ask."""


HOST = "host"
"""Not an architecture: sm_90a's kernels, run on the CPU by `gtco.runtime.host`."""
HOST_DEVICE = replace(CARDS["sm_90a"], name=HOST)


def find_target(name: str) -> Target:
    """The target called `name`; "host" is sm_90a, whose kernels the host build runs.

    Raises:
        TargetError: unknown, older than sm_80, or not served.
    """
    if not isinstance(name, str):
        raise TargetError(f"target is an architecture's name such as 'sm_90a', not {name!r}")
    if name == HOST:
        return TARGETS["sm_90a"]
    if name in TARGETS:
        return TARGETS[name]
    known = ", ".join((*TARGETS, HOST))
    spelled = re.fullmatch(r"(?:sm_?|compute_?)?([0-9]{2,3})[af]?", name.lower())
    if spelled is None:
        close = difflib.get_close_matches(name.lower(), (HOST,), 1, 0.5)
        hint = f"; did you mean {HOST!r}?" if close else ";"
        raise TargetError(f"unknown target {name!r}{hint} gtco knows {known}")
    number = int(spelled[1])
    for target in TARGETS.values():
        if target.capability == divmod(number, 10):
            raise TargetError(
                f"unknown target {name!r}; did you mean {target.arch!r}? gtco knows {known}"
            )
    if number < 80:
        raise TargetError(
            f"target {name!r} is older than sm_80, which gtco needs; it knows {known}"
        )
    raise TargetError(f"gtco has no kernels for the target {name!r} yet; it knows {known}")


def target_of_capability(major: int, minor: int) -> Target:
    """The target that runs on a GPU of this compute capability.

    Raises:
        TargetError: no known target does.
    """
    for target in TARGETS.values():
        if target.capability == (major, minor):
            return target
    known = ", ".join(TARGETS)
    if (major, minor) < (8, 0):
        raise TargetError(f"this GPU is sm_{major}{minor}; gtco needs sm_80 or newer ({known})")
    raise TargetError(f"this GPU is sm_{major}{minor}, for which gtco has no target yet ({known})")
