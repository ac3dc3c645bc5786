"""Faults planted in the windows of volumes, of each way to read them; without, each is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.codegen.sketches.stencil import Stencil
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import groups, stencil_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler


def _convolution() -> Group:
    return groups.convolution((2, 3, 5, 4, 64), 64, (3, 3, 3), groups.F16, residual=False)


def _first(sketch: type[GemmMma | GemmWgmma | Stencil], group: Group) -> KernelProgram:
    made = sketch(group, TARGETS["sm_90a"])
    return made.emit(next(iter(made.defaults())))


COPIED = (_convolution, GemmWgmma)
GATHERED = (_convolution, GemmMma)
STENCIL = (lambda: stencil_groups.depthwise((2, 3, 5, 4, 16), (3, 3, 3)), Stencil)
FAULTS: dict[str, tuple[tuple[Callable[[], Group], type], str, str]] = {
    "copied, none": (COPIED, "", ""),
    "copied, no frames ahead": (COPIED, "W::STRIDE_T - W::BEFORE_T", "W::STRIDE_T"),
    "copied, taps of one frame": (COPIED, "tap_t = tap / (W::KERNEL_H", "tap_t = 0 / (W::KERNEL_H"),
    "copied, one volume": (COPIED, "first.image = image / W::O;", "first.image = 0;"),
    "gathered, none": (GATHERED, "", ""),
    "gathered, frames of the next volume": (
        GATHERED,
        "is_below(first.z + t * W::DILATION_T, W::SIZE_T)",
        "1u",
    ),
    "gathered, rows of the next frame": (
        GATHERED,
        "is_below(first.y + y * W::DILATION_H, W::SIZE_H)",
        "1u",
    ),
    "gathered, frames of another tap": (GATHERED, "bits = 1u << tap / (", "bits = 1u << 0 / ("),
    "gathered, taps of one frame": (GATHERED, "at.z = tap /", "at.z = 0 /"),
    "gathered, one volume": (GATHERED, "first.image = image / W::O;", "first.image = 0;"),
    "stencil, none": (STENCIL, "", ""),
    "stencil, frames of the next volume": (STENCIL, "&& z < C::FRAMES", ""),
    "stencil, taps of one frame": (STENCIL, "kh / C::KERNEL_H *", "0 *"),
    "stencil, no frames ahead": (STENCIL, "C::STRIDE_T - C::BEFORE_T", "C::STRIDE_T"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    (make, sketch), old, new = FAULTS[fault]
    group = make()
    program = _first(sketch, group)
    if old:
        check_caught(planted(program, old, new), group)
    else:
        assert not verdicts(program, group)
