"""Faults planted in convolutions of patches on wgmma, each of which the host build must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

ONE = replace(TARGETS["sm_90a"], sm_count=1)
"""Where a block goes from patch to patch of even a small image."""
SCHEDULE = {
    "tile_t": 1,
    "tile_h": 8,
    "tile_w": 8,
    "block_n": 32,
    "chunks": 2,
    "warps_m": 4,
    "warps_n": 1,
    "stages": 2,
}


def _of(make: Callable[[], Group], **changes: int) -> Callable[[], tuple[KernelProgram, Group]]:
    def scene() -> tuple[KernelProgram, Group]:
        group = make()
        return ConvWgmma(group, ONE).emit({**SCHEDULE, **changes}), group

    return scene


SCENES: dict[str, Callable[[], tuple[KernelProgram, Group]]] = {
    "image": _of(lambda: groups.convolution((2, 17, 21, 24), 40, (3, 3), groups.F16), tile_h=16),
    "warpgroups": _of(
        lambda: groups.convolution((1, 14, 27, 16), 24, (3, 2), groups.BF16, stride=(1, 2)),
        tile_w=16,
        warps_m=8,
    ),
    "one stage": _of(lambda: groups.convolution((1, 9, 9, 48), 16, (3, 3), groups.F16), stages=1),
}
FAULTS: dict[str, tuple[str, str, str]] = {
    "threads' copies not shown to wgmma": (
        "image",
        "      Products::show();\n",
        "",
    ),
    "products not awaited": ("image", "      products.wait();\n", ""),
    "no fence ahead of products": ("image", "    ptx::wgmma_fence();\n", ""),
    "products never committed": ("image", "    ptx::wgmma_commit_group();\n", ""),
    "sums of the patch before": ("image", "void clear() { empty_ = true; }", "void clear() {}"),
    "sums of the last tap alone": ("image", "          add = 1;\n", "          add = 0;\n"),
    "planes as far apart as those of weights": (
        "image",
        "plane_descriptor<Patch::PLANE * 16,",
        "plane_descriptor<Patch::COLUMNS * 16,",
    ),
    "lines as far apart as pixels": ("image", "W::STRIDE_H * Patch::PITCH * 16>", "128>"),
    "columns of one plane": ("image", "<Patch::COLUMNS * 16, 128>", "<16, 128>"),
    "columns of one eight": ("image", "<Patch::COLUMNS * 16, 128>", "<Patch::COLUMNS * 16, 16>"),
    "the first square twice": ("image", "Patch::first_pixel(i * 64)", "Patch::first_pixel(0)"),
    "the first warpgroup's pixels": (
        "warpgroups",
        "Patch::first_pixel(row_)",
        "Patch::first_pixel(0)",
    ),
    "the first warp's rows": ("image", "% 128 / 32 * 16", "% 128 / 32 * 0"),
    "squares of lines": ("warpgroups", "r / (8 * SIDE) % (C::TILE_W / 8) * 8", "r / 8 % 2 * 8"),
    "a stage that is still read": (
        "one stage",
        "__syncthreads();  // the stage",
        "// the stage",
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_without_a_fault(scene: str) -> None:
    program, group = SCENES[scene]()
    assert not verdicts(program, group)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    scene, old, new = FAULTS[fault]
    program, group = SCENES[scene]()
    check_caught(planted(program, old, new), group)
