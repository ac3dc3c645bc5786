"""Faults planted in what convolutions of patches compute as they copy their image, each of which
the host build must catch; the twins without one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_patches import ConvPatches
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests.faults.templates import check_caught, planted, verdicts
from tests.faults.test_conv_patches_faults import SCHEDULE
from tests.prologue_groups import BF16, F16, prepared

pytestmark = pytest.mark.compiler

Scene = Callable[[], tuple[KernelProgram, Group]]


def _of(
    kind: type[ConvPatches], arch: str, *args: object, joined: tuple[int, ...] = (), piece: int = 0,
    **changes: int,
) -> Scene:  # fmt: skip
    """By one multiprocessor, where a block goes from patch to patch."""

    def scene() -> tuple[KernelProgram, Group]:
        graph = prepared(*args, joined=joined, piece=piece)  # type: ignore[arg-type]
        group = Group("prologue", graph)
        sketch = kind(group, replace(TARGETS[arch], sm_count=1))
        return sketch.emit({**SCHEDULE, **changes}), group

    return scene


SCENES: dict[str, Scene] = {
    "stages": _of(ConvMma, "sm_80", (2, 7, 21, 48), 24, (3, 3), F16, "norm"),
    "wgmma": _of(
        ConvWgmma, "sm_90a", (2, 9, 17, 32), 24, (3, 3), BF16, "norm", tile_h=8, warps_m=4
    ),
    "one stage": _of(ConvMma, "sm_80", (2, 7, 9, 24), 24, (3, 3), F16, "norm", stages=1, warps_m=2),
    "piece": _of(
        ConvMma, "sm_80", (1, 7, 9, 16), 24, (3, 3), F16, "norm", joined=(16, 32), piece=1
    ),
    "gate": _of(ConvMma, "sm_80", (2, 7, 21, 48), 24, (3, 3), F16, "gate"),
}
BORDER = "const Whole result = places[i] % 2 ? prepared(of_held, held[i]) : held[i];"
FAULTS: dict[str, tuple[str, str, str]] = {
    "zeros of the border prepared": (
        "stages",
        BORDER,
        "const Whole result = prepared(of_held, held[i]);",
    ),
    "nothing prepared beside products": ("stages", BORDER, "const Whole result = held[i];"),
    "border of the first stages prepared": ("stages", "if (!v.inside) continue;", ""),
    "border of one stage prepared": ("one stage", "if (!v.inside) continue;", ""),
    "first stages as they lie": (
        "stages",
        "for (int s = 0; s < C::STAGES - 1; ++s) prepare(s);",
        "for (int s = 0; s < 0; ++s) prepare(s);",
    ),
    "one stage as it lies": ("one stage", "if constexpr (PREPARES) prepare(s);", ""),
    "ahead of the copies": (
        "stages",
        "    ptx::cp_async_wait<0>();\n#pragma unroll 1",
        "#pragma unroll 1",
    ),
    "numbers of the first image": ("stages", "row = at.image * pixels_of_image<A>()", "row = 0"),
    "gates of the first image": ("gate", "row = at.image * pixels_of_image<A>()", "row = 0"),
    "numbers of the first channels": (
        "stages",
        "channel = at.channel - C::PREPARED_FIRST",
        "channel = 0",
    ),
    "channels of another piece": (
        "piece",
        "channel = at.channel - C::PREPARED_FIRST",
        "channel = at.channel",
    ),
    "a piece ahead prepared": ("piece", "at.channel < C::PREPARED_FIRST ||", ""),
    "a piece behind prepared": ("piece", "|| at.channel >= C::PREPARED_END", ""),
    "the last part left out": (
        "stages",
        "if constexpr (PREPARES && C::STAGES > 1) put(s + C::STAGES - 1);",
        "",
    ),
    "parts left out between": (
        "stages",
        "          put(s + C::STAGES - 1);\n          copy",
        "          copy",
    ),
    "parts of the first row alone": ("wgmma", "(i * Patch::ROWS + row) * THREADS", "i * THREADS"),
    "into the stage that is read": (
        "wgmma",
        "image_of(s)[places[i] / 2] = result;",
        "image_of(s + 1)[places[i] / 2] = result;",
    ),
    "channels of the step before": ("stages", "      of_held = v.at;\n", ""),
    "loads of no pixel": (
        "wgmma",
        "load_packed<Patch::CHUNK>(a.pixel(v.at), v.inside)",
        "load_packed<Patch::CHUNK>(a.pixel(v.at), true)",
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
