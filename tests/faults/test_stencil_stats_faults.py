"""Faults planted in the row statistics of a stencil's result; the twin without one passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.stencil import Stencil
from gtco.ir.graph import Group
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import stencil_groups
from tests.faults.templates import check_caught, planted, verdicts
from tests.kernel_checks import inputs_of, wrong_statistics

pytestmark = pytest.mark.compiler

FAULTS = {
    "a mask of half the warp": (
        "__shfl_xor_sync(~0u, x, offset);  //",
        "__shfl_xor_sync(0xffffu, x, offset);  //",
    ),
    "threads that leave ahead of the shuffles": (
        "Pixels pixels[ROWS]",
        "if (!on) return;\n  Pixels pixels[ROWS]",
    ),
    "64 columns in a narrower chunk": (
        "count = min_of(STATS_CHUNK, COLUMNS - chunk * STATS_CHUNK);\n  float total",
        "count = STATS_CHUNK;\n  float total",
    ),
    "the lanes of a whole chunk in a narrower one": (
        "col < Place::FIRST ? Place::LANES : Place::LAST",
        "Place::LANES",
    ),
    "lanes beyond the last column in the spread": (
        "(values[i] - mean) * (values[i] - mean) : 0.0f;\n  m2 = sum",
        "(values[i] - mean) * (values[i] - mean) : mean * mean;\n  m2 = sum",
    ),
    "one window of several": (
        "active, inputs, acc, StatsOfChunks",
        "active && s == 0, inputs, acc, StatsOfChunks",
    ),
    "lanes in the order of pixels": ("if constexpr (Functor::ROW_STATS)", "if constexpr (false)"),
}


OF_FETCHED = {
    "what the epilogue reads of the first window": ("fetched[SLOTS == 1 ? 0 : s]", "fetched[0]"),
    "what it reads of a window beyond the last": (
        "on && q0 + s < C::Q ? line * C::Q + q0 + s : 0",
        "line * C::Q + q0 + s",
    ),
}


def program_of(dtype: torch.dtype = torch.float32) -> tuple[KernelProgram, Group]:
    """88 channels: in vectors of four, a chunk of 16 lanes and one of 6 lanes of 8."""
    group = stencil_groups.depthwise((1, 5, 6, 88), (3, 3), dtype, stats=True)
    sketch = Stencil(group, TARGETS["sm_90a"])
    return sketch.emit({"strip": 4, "vector": 4, "threads": 64}), group


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults(fault: str) -> None:
    program, group = program_of()
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)


@pytest.mark.parametrize("fault", ["none", *OF_FETCHED])
def test_faults_of_what_comes_beside_the_pixels(fault: str) -> None:
    program, group = program_of(torch.float16)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *OF_FETCHED[fault]), group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_what_is_not_yet_rounded(dtype: torch.dtype) -> None:
    program, group = program_of(dtype)
    values = inputs_of(group)
    assert not wrong_statistics(group, run_on_host(program, group, values))
    rounding = "bf16_t" if dtype == torch.bfloat16 else "half_t"
    assert f"round_to<{rounding}>" in program.source
    early = replace(
        program, source=program.source.replace(f"round_to<{rounding}>", "round_to<float>")
    )
    assert wrong_statistics(group, run_on_host(early, group, values))
