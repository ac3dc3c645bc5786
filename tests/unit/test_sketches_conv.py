"""Convolutions as GEMMs of windows: right at every border, compiled, refused in sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.model import roofline_us
from gtco.runtime.encoding import EncodingError, _decode_argument, _encode_argument
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests import groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs
from tests.pass_checks import Golden

A100, H100 = TARGETS["sm_80"], TARGETS["sm_90a"]
F16 = torch.float16
UNALIGNED = {"conv_few_channels", "conv_odd", "conv_3d_odd"}
"""Cases whose pixels no tensor map describes."""
WIDE_GROUPS = [
    case for case in groups.GROUPED_CASES if case.startswith(("groups_of_64", "groups_of_32"))
]
"""Cases of whole copies of channels a group."""
WGMMA_CASES = [case for case in groups.CONV_CASES if case not in UNALIGNED]


@pytest.mark.compiler
@pytest.mark.parametrize("case", [*groups.CONV_CASES, *groups.GROUPED_CASES])
def test_windows_gathered_by_threads(case: str) -> None:
    group = (groups.CONV_CASES | groups.GROUPED_CASES)[case]()
    for program in sample(GemmMma(group, A100), 1):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("case", WGMMA_CASES)
def test_windows_gathered_by_the_copy_engine(case: str) -> None:
    group = groups.CONV_CASES[case]()
    sketch = GemmWgmma(group, H100)
    for program in sample(sketch, 1):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)
    swapped = [each for each in sketch.defaults() if each["swap"]]
    least = min(swapped, key=lambda each: each["block_p"] * each["block_q"] * each["atoms"])
    assert not wrong_outputs(sketch.emit(least), group, inputs_of(group, seed=2), run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("case", WIDE_GROUPS)
def test_wide_groups_gathered_by_the_copy_engine(case: str) -> None:
    group = groups.GROUPED_CASES[case]()
    for program in sample(GemmWgmma(group, H100), 3):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("multicast", [2, 4])
def test_windows_shared_by_a_cluster(multicast: int) -> None:
    group = groups.convolution((2, 7, 5, 72), 256, (3, 3), F16, stride=(2, 1))
    sketch = GemmWgmma(group, H100)
    values = inputs_of(group, seed=1)
    shared = [each for each in sketch.defaults() if each["multicast"] == multicast]
    schedule = next(each for each in shared if each["swap"] and each["block_p"] == 64)
    program = sketch.emit(schedule)
    assert not wrong_outputs(program, group, values, run_on_host)
    assert not compile_uncached(program.code, program.name, program.arch).spill_bytes


@pytest.mark.compiler
def test_what_lies_beyond_the_image_is_not_read() -> None:
    """Not even a NaN next to the channels, or in the pixels of the next row, reaches a result."""
    group = groups.CONV_CASES["conv_of_some_channels"]()
    values = inputs_of(group, seed=1)
    values["x"][..., :64] = values["x"][..., 128:] = torch.nan
    for sketch in (GemmMma(group, A100), GemmWgmma(group, H100)):
        assert not wrong_outputs(sample(sketch, 0)[0], group, values, run_on_host)


@pytest.mark.compiler
def test_groups_do_not_reach_one_another() -> None:
    """A NaN in a group's channels is in the results of that group alone."""
    group = groups.GROUPED_CASES["groups_of_4"]()
    values = inputs_of(group, seed=1)
    values["x"][..., 4:8] = torch.nan
    for program in sample(GemmMma(group, A100), 1):
        assert not wrong_outputs(program, group, values, run_on_host)
    wide = groups.GROUPED_CASES["groups_of_64"]()
    values = inputs_of(wide, seed=1)
    values["x"][..., 64:] = torch.nan
    for program in sample(GemmWgmma(wide, H100), 1):
        assert not wrong_outputs(program, wide, values, run_on_host)


def test_kernels_of_groups_compile_without_spills() -> None:
    group = groups.convolution((1, 14, 14, 512), 512, (3, 3), F16, groups=32)
    assert not list(compile_for_all(lambda target: derive(group, "gemm", target).sketches[0], 2))


def test_kernels_compile_without_spills() -> None:
    group = groups.convolution((1, 14, 14, 256), 256, (3, 3), F16)
    assert not list(compile_for_all(lambda target: derive(group, "gemm", target).sketches[0], 2))


def test_kernels_of_volumes_compile_without_spills() -> None:
    group = groups.convolution((1, 8, 28, 28, 128), 256, (3, 3, 3), F16)
    assert not list(compile_for_all(lambda target: derive(group, "gemm", target).sketches[0], 2))
    sketch = GemmWgmma(group, H100)
    shared = next(each for each in sketch.defaults() if each["multicast"] > 1)
    program = sketch.emit(shared)
    assert not compile_uncached(program.code, program.name, program.arch).spill_bytes


@pytest.mark.parametrize("image", [(1, 200, 334, 64), (1, 8, 100, 84, 64)])
def test_kernels_that_stay_compile_without_spills(image: tuple[int, ...]) -> None:
    group = groups.convolution(image, 64, (3,) * (len(image) - 2), F16)
    for program in sample(GemmPersistent(group, H100), 2):
        compiled = compile_uncached(program.code, program.name, program.arch)
        assert compiled.spill_bytes == 0, dict(program.schedule)


def test_source(golden: Golden) -> None:
    group = groups.convolution((1, 28, 28, 128), 256, (3, 3), F16, stride=(2, 2))
    sketch = GemmWgmma(group, H100)
    golden("gemm_wgmma_conv.cu", sketch.emit(next(iter(sketch.defaults()))).code)
    group = groups.CONV_CASES["conv_few_channels"]()
    mma = GemmMma(group, A100)
    golden("gemm_mma_conv.cu", mma.emit(next(iter(mma.defaults()))).code)


def test_the_map_of_windows() -> None:
    group = groups.convolution((2, 9, 8, 64), 32, (3, 3), F16, stride=(2, 1), before=(1, 2))
    sketch = GemmWgmma(group, H100)
    program = sketch.emit(next(each for each in sketch.defaults() if each["swap"]))
    argument = program.arguments[1]
    assert argument.sizes == (64, 8, 9, 2) and argument.box[0] == 64
    assert argument.strides == (64, 512, 4608)
    assert argument.window is not None
    assert argument.window.lower == (-2, -1) and argument.window.stride == (1, 2)
    # Ten windows begin at -2 to 7 of 8 columns, five at -1 to 7 of 9 rows.
    assert argument.window.upper == (0, -1)
    assert _decode_argument(_encode_argument(argument)) == argument


def test_the_map_of_windows_with_frames() -> None:
    group = groups.convolution((2, 7, 9, 8, 64), 32, (3, 2, 3), F16, stride=(2, 1, 1))
    sketch = GemmWgmma(group, H100)
    program = sketch.emit(next(each for each in sketch.defaults() if each["swap"]))
    argument = program.arguments[1]
    assert argument.sizes == (64, 8, 9, 7, 2) and argument.strides == (64, 512, 4608, 32256)
    assert argument.window is not None
    assert argument.window.lower == (-1, -1, -1) and argument.window.stride == (1, 1, 2)
    # Eight windows begin at -1 to 6 of 8 columns, ten at -1 to 8 of 9 rows, four at -1 to 5 of 7.
    assert argument.window.upper == (-1, 0, -1)
    assert _decode_argument(_encode_argument(argument)) == argument
    short = replace(argument, window=replace(argument.window, stride=(1, 1)))
    with pytest.raises(EncodingError, match="2 numbers in stride, not 3"):
        _decode_argument(_encode_argument(short))


def test_frames_that_no_map_reaches_are_refused() -> None:
    far = groups.convolution(
        (1, 40, 4, 4, 64), 32, (3, 3, 3), F16, before=(17, 1, 1), dilation=(1, 1, 1)
    )
    with pytest.raises(Illegal, match="corners"):
        GemmWgmma(far, H100)
    wide = groups.convolution(
        (1, 40, 4, 4, 64), 32, (3, 3, 3), F16, before=(0, 1, 1), dilation=(16, 1, 1)
    )
    with pytest.raises(Illegal, match=r"corners|33 pixels"):
        GemmWgmma(wide, H100)
    assert GemmMma(far, H100) and GemmMma(wide, H100)


def _refusal(**changes: object) -> str:
    given = {"image": (1, 9, 8, 64), "columns": 32, "kernel": (3, 3), "dtype": F16, **changes}
    with pytest.raises(Illegal) as caught:
        GemmWgmma(groups.convolution(**given), H100)
    return str(caught.value)


def test_refusals() -> None:
    assert "16-byte aligned" in _refusal(image=(1, 9, 8, 60))
    assert "windows (9, 9) apart" in _refusal(stride=(9, 9))
    assert "groups of 32 channels" in _refusal(groups=2)
    assert "corners" in _refusal(image=(1, 400, 400, 64), kernel=(1, 1), before=(150, 0))


def test_an_illegal_step_of_several_taps() -> None:
    sketch = GemmWgmma(groups.convolution((1, 9, 8, 64), 64, (5, 1), F16), H100)
    schedule = dict(next(iter(sketch.defaults())), atoms=2)
    with pytest.raises(Illegal, match="5 atoms of taps in steps of 2"):
        sketch.emit(schedule)


def test_windows_are_priced_by_their_whole_depth() -> None:
    small = groups.convolution((8, 56, 56, 256), 256, (1, 1), F16, before=(0, 0), residual=False)
    large = groups.convolution((8, 56, 56, 256), 256, (3, 3), F16, residual=False)
    assert roofline_us(large, H100) > 4 * roofline_us(small, H100)


@pytest.mark.parametrize(("channels", "kept"), [(8, True), (16, False), (24, False)])
def test_copies_that_share_sectors_with_their_neighbours_go_through_l1(
    channels: int, kept: bool
) -> None:
    """Pixels of 16 bytes are half a sector of memory, of which L1 keeps the other half."""
    group = groups.convolution((1, 9, 9, channels), 32, (3, 3), F16, before=(1, 1))
    mma = GemmMma(group, A100)

    code = mma.emit(next(iter(mma.defaults()))).code

    assert f"SHARES_SECTORS = {str(kept).lower()}" in code
