"""Faults planted in what convolutions of patches compute as they copy their image, each of which
the host build must catch; the twins without one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gtco.ir.graph import Group
from tests.faults.templates import check_caught, planted, verdicts
from tests.faults.test_conv_patches_faults import Scene, by_patches, by_wgmma
from tests.prologue_groups import BF16, F16, prepared

pytestmark = pytest.mark.compiler


def _of(*args: Any, **attrs: Any) -> Callable[[], Group]:
    return lambda: Group("prologue", prepared(*args, **attrs))


SCENES: dict[str, Scene] = {
    "stages": by_patches(_of((2, 7, 21, 48), 24, (3, 3), F16, "norm")),
    "wgmma": by_wgmma(_of((2, 9, 17, 32), 24, (3, 3), BF16, "norm")),
    "one stage": by_patches(_of((2, 7, 9, 24), 24, (3, 3), F16, "norm"), stages=1, warps_m=2),
    "piece": by_patches(_of((1, 7, 9, 16), 24, (3, 3), F16, "norm", joined=(16, 32), piece=1)),
    "gate": by_patches(_of((2, 7, 21, 48), 24, (3, 3), F16, "gate")),
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
