"""Convolutions of patches on `wgmma`: right at every border, compiled, refused in sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.cost_model.model import draft_us
from gtco.cost_model.work import work_of
from gtco.ir.graph import Group
from gtco.ir.interpreter import interpret
from gtco.runtime.executable import compile_programs
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.runtime.plan import Plan
from gtco.target import TARGETS
from tests import groups
from tests.faults.templates import planted
from tests.groups import BF16, F16, convolution
from tests.kernel_checks import inputs_of, wrong_outputs, wrong_statistics
from tests.pass_checks import Golden

H100 = TARGETS["sm_90a"]
ONE = replace(H100, sm_count=1)
"""Where even a small image has several patches for each block that stays."""
CASES = {
    **{name: make for name, make in groups.CONV_CASES.items() if "32" not in name},
    **groups.GROUPED_CASES,
    **{name: make for name, make in groups.JOINED_CASES.items() if name.startswith("joined_conv")},
}
ONCE, NO_RUNS = "no pixel is in two windows", "is not in runs of 16 bytes"
WIDE, ONE_CHUNK = "that are swizzled by 16 bits", "one chunk of channels"
REFUSED = {
    **dict.fromkeys(("conv_1x1_stride", "groups_of_1x1", "groups_of_64_1x1",
                     "joined_conv_1x1_stride"), ONCE),
    **dict.fromkeys(("conv_few_channels", "conv_odd", "conv_3d_odd", "groups_of_4",
                     "groups_of_odd_channels", "groups_that_widen"), NO_RUNS),
    **dict.fromkeys(("groups_tf32", "groups_of_32_tf32", "groups_fp32", "joined_conv_fp32",
                     "joined_conv_tf32"), WIDE),
    "groups_of_some_channels": ONE_CHUNK,
}  # fmt: skip
TAKEN = [case for case in CASES if case not in REFUSED]


@pytest.mark.compiler
@pytest.mark.parametrize("case", TAKEN)
def test_every_case_is_right(case: str) -> None:
    """By the best default, and by a random schedule of blocks that stay."""
    group = CASES[case]()
    values = inputs_of(group, seed=1)
    sketch = ConvWgmma(group, H100)
    (drawn,) = Sampler((ConvWgmma(group, ONE),), 1).random(1)
    for program in (sketch.emit(next(iter(sketch.defaults()))), drawn.program):
        assert not wrong_outputs(program, group, values, run_on_host)
        assert not wrong_statistics(group, run_on_host(program, group, values))


SCHEDULE = {
    "tile_t": 1,
    "tile_h": 8,
    "tile_w": 16,
    "block_n": 32,
    "chunks": 2,
    "consumers": 1,
    "stages": 2,
}
IMAGE, LINES = (2, 17, 21, 40), (1, 27, 35, 32)
SCHEDULES: list[tuple[Callable[[], Group], dict[str, int]]] = [
    (lambda: convolution(IMAGE, 72, (3, 3), F16), {"tile_h": 16, "consumers": 2, "stages": 3}),
    (lambda: convolution(IMAGE, 72, (3, 3), F16), {"tile_h": 4, "chunks": 4, "consumers": 3}),
    (lambda: convolution(IMAGE, 72, (3, 3), BF16), {"block_n": 16, "chunks": 8, "stages": 5}),
    (lambda: convolution(IMAGE, 90, (3, 3), F16), {"block_n": 96, "chunks": 4}),
    (lambda: convolution(IMAGE, 120, (3, 3), F16), {"block_n": 128, "chunks": 4}),
    (lambda: convolution(IMAGE, 256, (3, 3), F16, residual=False), {"block_n": 128}),
    (
        lambda: convolution(LINES, 24, (4, 5), F16, stride=(3, 2), before=(1, 3), after=(2, 0),
                            dilation=(2, 3)),
        {"tile_h": 4, "consumers": 2},
    ),
    (
        lambda: convolution((1, 9, 18, 17, 16), 16, (3, 2, 3), F16, stride=(2, 1, 2)),
        {"tile_t": 4, "tile_h": 4, "consumers": 2},
    ),
    (lambda: convolution(IMAGE, 128, (3, 3), F16, stats=True), {"block_n": 64, "consumers": 2}),
    # Weights that do not stay, of more steps than stages and of fewer, and patches that are odd.
    (
        lambda: convolution((1, 21, 37, 240), 96, (3, 3), F16),
        {"tile_h": 4, "block_n": 96, "chunks": 4, "consumers": 3},
    ),
    (lambda: convolution((1, 9, 33, 320), 64, (3, 3), BF16), {"block_n": 64, "chunks": 8}),
]  # fmt: skip


@pytest.mark.compiler
@pytest.mark.parametrize(("make", "changes"), SCHEDULES)
def test_right_in_every_schedule(make: Callable[[], Group], changes: dict[str, int]) -> None:
    group = make()
    program = ConvWgmma(group, ONE).emit({**SCHEDULE, **changes})
    values = inputs_of(group, seed=1)
    for seed in (0, 1):
        outputs = run_on_host(program, group, values, seed)
        assert not wrong_outputs(program, group, values, lambda *_: outputs)  # noqa: B023
        assert not wrong_statistics(group, outputs)


@pytest.mark.compiler
def test_what_is_no_number_stays_in_its_windows_and_images() -> None:
    group = convolution((3, 5, 9, 24), 24, (3, 3), F16, residual=False)
    values = inputs_of(group, seed=1)
    values["x"][1] = torch.nan
    values["x"][2, 0, 0] = torch.inf
    known = interpret(group.graph, [values[name] for name in group.graph.inputs])[0].isfinite()
    assert known[0].all() and not known[1].any() and known[2].any()
    for tile_h in (8, 16):
        program = ConvWgmma(group, ONE).emit({**SCHEDULE, "tile_h": tile_h})
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_convolution_of_patches_of_16_bits(case: str) -> None:
    with pytest.raises(Illegal, match=REFUSED[case]):
        ConvWgmma(CASES[case](), H100)


@pytest.mark.parametrize(
    ("make", "arch", "reason"),
    [
        (CASES["conv_3x3"], "sm_80", "sm_80 has no wgmma"),
        (groups.CONV_CASES["conv_fp32"], "sm_90a", WIDE),
        (groups.CONV_CASES["conv_tf32"], "sm_90a", WIDE),
        (lambda: convolution((1, 9, 8, 8), 32, (3, 3), F16), "sm_90a", ONE_CHUNK),
        (
            lambda: convolution((1, 99, 98, 16), 32, (3, 3), F16, stride=(3, 3), dilation=(2, 2)),
            "sm_90a",
            ONCE,
        ),
    ],
)
def test_refusals(make: Callable[[], Group], arch: str, reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        ConvWgmma(make(), TARGETS[arch])


def test_dilated_windows_share_pixels_a_stride_apart() -> None:
    """0 2 4 6 and 6 8 10 12 do, and 0 2 4, 3 5 7 and 6 8 10 do not."""
    group = convolution((1, 99, 98, 16), 32, (4, 4), F16, stride=(3, 3), dilation=(2, 2))
    assert any(ConvWgmma(group, H100).defaults())


LARGE: dict[str, Callable[[], Group]] = {
    "volume": lambda: convolution((1, 64, 128, 128, 64), 32, (3, 3, 3), F16),
    "image": lambda: convolution((1, 512, 512, 128), 128, (3, 3), BF16),
    "strides": lambda: convolution((1, 225, 225, 32), 64, (3, 3), F16, stride=(2, 2)),
    "statistics": lambda: convolution((1, 56, 56, 64), 128, (3, 3), F16, stats=True),
}


@pytest.mark.parametrize("case", LARGE)
def test_kernels_compile_without_spills(case: str) -> None:
    sketch = ConvWgmma(LARGE[case](), H100)
    of_chunks = {each["chunks"]: each for each in reversed(list(sketch.defaults()))}
    for schedule in of_chunks.values():  # the first of each
        program = sketch.emit(schedule)
        compiled = compile_uncached(program.code, program.name, program.arch)
        # What epilogues know of their rows is found ahead of the loop.
        assert compiled.spill_bytes <= 64 and "serialized" not in compiled.log, schedule


def test_products_that_wait_for_one_another_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of one step under way into the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sketch = ConvWgmma(LARGE["volume"](), H100)
    of_one_pair = next(each for each in sketch.defaults() if each["chunks"] == 2)
    right = sketch.emit(of_one_pair)
    wrong = planted(right, "      products.wait();\n", "")
    for program in (right, wrong):
        launch = SimpleNamespace(program=program)
        (kernel,) = compile_programs(cast(Plan, SimpleNamespace(launches=(launch,)))).values()
        assert kernel.serialized == (program is wrong)
    assert "conv_wgmma's products on wgmma wait for one another" in caplog.text


def test_drafted_faster_than_what_reads_each_tap_from_l2() -> None:
    group = LARGE["volume"]()

    def first_us(sketch: Sketch) -> float:
        program = sketch.emit(next(iter(sketch.defaults())))
        return draft_us(work_of(Candidate(sketch, program)), H100)

    own, *others = sorted(derive(group, "gemm", H100).sketches, key=first_us)
    assert isinstance(own, ConvWgmma)
    assert all(first_us(own) < first_us(each) for each in others)


def test_source(golden: Golden) -> None:
    group = convolution((1, 56, 56, 64), 96, (3, 3), F16)
    sketch = ConvWgmma(group, H100)
    golden("conv_wgmma.cu", sketch.emit(next(iter(sketch.defaults()))).source)
