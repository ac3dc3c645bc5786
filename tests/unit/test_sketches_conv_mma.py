"""Convolutions of patches on `mma.sync`: right at every border and with whatever a patch reads
beside it, compiled, refused in sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.cost_model.model import draft_us
from gtco.cost_model.work import work_of
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS, Target
from tests import groups
from tests.kernel_checks import defaults, inputs_of, wrong_outputs, wrong_statistics
from tests.pass_checks import Golden

A100, H100 = TARGETS["sm_80"], TARGETS["sm_90a"]
ONE = replace(A100, sm_count=1)
"""Where even a small image has several patches for each block that stays."""
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

CASES = groups.CONV_CASES | groups.GROUPED_CASES
ONCE = "no pixel is in two windows"
NO_RUNS = r"the (image|weights) \(.* not in runs of 16 bytes"
REFUSED = {
    "conv_1x1_stride": ONCE,
    "conv_few_channels": NO_RUNS,
    "conv_odd": NO_RUNS,
    "conv_3d_odd": NO_RUNS,
    "groups_of_4": NO_RUNS,
    "groups_of_1x1": ONCE,
    "groups_of_64_1x1": ONCE,
    "groups_of_odd_channels": NO_RUNS,
    "groups_that_widen": NO_RUNS,
}
"""Cases that the sketch refuses on every target, and its sentence."""
TAKEN = [case for case in CASES if case not in REFUSED]

SCHEDULE = {
    "tile_t": 1,
    "tile_h": 4,
    "tile_w": 8,
    "block_n": 32,
    "chunks": 2,
    "warps_m": 2,
    "warps_n": 1,
    "stages": 2,
}
"""A small patch, of which an image of few pixels has several."""


def drawn(sketch: ConvMma, count: int, seed: int = 1) -> list[KernelProgram]:
    """The best default's program and `count` drawn from all that are legal, frames among them."""
    default = sketch.emit(next(iter(sketch.defaults())))
    return [default, *(each.program for each in Sampler((sketch,), seed).random(count))]


def made(group: Group, target: Target = A100, **changes: int) -> KernelProgram:
    """The program of `SCHEDULE` with some knobs set otherwise."""
    return ConvMma(group, target).emit({**SCHEDULE, **changes})


def wrong(
    program: KernelProgram, group: Group, values: Mapping[str, Tensor] | None = None
) -> list[str]:
    """What is wrong, with two orders of threads and blocks."""
    values = inputs_of(group, seed=1) if values is None else values
    found: list[str] = []
    for seed in (0, 1):

        def run(
            program: KernelProgram, group: Group, values: Mapping[str, Tensor], seed: int = seed
        ) -> Mapping[str, Tensor]:
            return run_on_host(program, group, values, seed)

        found += wrong_outputs(program, group, values, run)
    return found


def finite(group: Group, values: Mapping[str, Tensor]) -> Tensor:
    """Which results are numbers."""
    return interpret(group.graph, [values[name] for name in group.graph.inputs])[0].isfinite()


# -- meaning ---------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("case", TAKEN)
def test_every_case_is_right(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group, seed=1)
    for program in drawn(ConvMma(group, A100), 1):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize(("chunks", "stages"), [(1, 1), (2, 2), (4, 3), (8, 1), (8, 2), (1, 3)])
def test_blocks_that_go_from_patch_to_patch(chunks: int, stages: int) -> None:
    """Of five chunks of channels, the last step has fewer, or only one step has any. Three blocks'
    worth of columns leaves each few blocks for its twelve patches."""
    group = groups.convolution((2, 9, 11, 40), 72, (3, 3), F16)
    program = made(group, ONE, chunks=chunks, stages=stages)
    patches, alone = 12, chunks == 8 and stages == 1
    assert program.grid == (patches, 3, 1) if alone else program.grid[0] < patches
    assert not wrong(program, group)


@pytest.mark.compiler
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_blocks_that_go_from_patch_to_patch_of_volumes(chunks: int) -> None:
    group = groups.convolution((2, 5, 6, 9, 24), 40, (3, 3, 3), F16, residual=False)
    program = made(group, ONE, tile_t=2, chunks=chunks, stages=3 - chunks // 4)
    assert program.grid[0] < 24
    assert not wrong(program, group)


@pytest.mark.compiler
@pytest.mark.parametrize(("h", "w"), [(32, 8), (4, 32), (16, 16)])
def test_patches_larger_than_the_image(h: int, w: int) -> None:
    group = groups.convolution((2, 3, 5, 16), 16, (3, 3), BF16)
    assert not wrong(made(group, tile_h=h, tile_w=w, block_n=16, stages=1), group)


@pytest.mark.compiler
@pytest.mark.parametrize("t", [2, 4, 8])
def test_patches_of_more_frames_than_there_are(t: int) -> None:
    group = groups.convolution((2, 3, 5, 4, 16), 24, (3, 3, 3), F16)
    assert not wrong(made(group, tile_t=t, stages=1), group)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("stride", "dilation"),
    [((1, 2), (1, 1)), ((2, 1), (1, 2)), ((2, 3), (2, 3)), ((3, 2), (1, 2)), ((3, 3), (1, 1))],
)
def test_strides_and_dilation(stride: tuple[int, int], dilation: tuple[int, int]) -> None:
    group = groups.convolution(
        (1, 19, 23, 16), 16, (4, 5), F16, stride=stride, before=(1, 3), after=(2, 0),
        dilation=dilation,
    )  # fmt: skip
    assert not wrong(made(group, block_n=16), group)


@pytest.mark.compiler
@pytest.mark.parametrize("stride", [(2, 1, 3), (3, 2, 2)])
def test_strides_and_dilation_of_volumes(stride: tuple[int, int, int]) -> None:
    group = groups.convolution(
        (1, 11, 9, 17, 16), 16, (4, 3, 4), F16, stride=stride, before=(2, 1, 0), after=(0, 1, 2),
        dilation=(2, 1, 3),
    )  # fmt: skip
    assert not wrong(made(group, tile_t=2, block_n=16), group)


@pytest.mark.compiler
@pytest.mark.parametrize("columns", [4, 6, 20, 72])
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_columns_that_fill_no_tile(columns: int, block_n: int) -> None:
    """Vectors of 2, 4 and 8 of them, in pairs and in eights of a lane."""
    group = groups.convolution((1, 5, 6, 16), columns, (3, 3), F16)
    assert not wrong(made(group, block_n=block_n), group)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [F16, BF16, F32, "tf32"], ids=str)
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_long_sum_of_every_type(dtype: torch.dtype | str, chunks: int) -> None:
    """More than 1024 products, of which an exact sum hands on what it is rounded by."""
    if isinstance(dtype, str):
        group = groups.tf32(groups.convolution((1, 5, 6, 120), 32, (3, 3), F32))
    else:
        group = groups.convolution((1, 5, 6, 120), 32, (3, 3), dtype)
    assert not wrong(made(group, chunks=chunks), group)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("columns", [72, 200])
def test_row_statistics(columns: int, dtype: torch.dtype) -> None:
    """Of the rounded values beside them, also where the last chunk of 64 columns is narrower."""
    group = groups.convolution((2, 5, 7, 16), columns, (3, 3), dtype, stats=True)
    values = inputs_of(group, seed=1)
    for changes in (
        {"block_n": 64},
        {"block_n": 128, "warps_m": 1, "tile_h": 4, "warps_n": 2},
        {"block_n": 128, "warps_m": 2, "tile_h": 4, "warps_n": 1, "chunks": 1},
    ):
        program = made(group, **changes)
        assert not wrong(program, group, values)
        assert not wrong_statistics(group, run_on_host(program, group, values))


@pytest.mark.compiler
def test_row_statistics_of_groups_of_channels() -> None:
    group = groups.convolution((1, 5, 7, 32), 128, (3, 3), F16, groups=2, stats=True)
    values = inputs_of(group, seed=1)
    program = made(group, block_n=64)
    assert not wrong(program, group, values)
    assert not wrong_statistics(group, run_on_host(program, group, values))


@pytest.mark.compiler
def test_the_check_rejects_a_kernel_of_fewer_patches() -> None:
    group = groups.convolution((1, 9, 8, 16), 16, (3, 3), F16)
    program = made(group, block_n=16)
    less = replace(program, source=program.source.replace("PATCHES = 3", "PATCHES = 2"))
    assert less.source != program.source
    assert wrong_outputs(less, group, inputs_of(group, seed=1), run_on_host)


# -- what must not reach a result ------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kernel", [(3, 3), (3, 3, 3)])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_tail_of_an_odd_number_of_taps(
    kernel: tuple[int, ...], odd: float, stages: int
) -> None:
    """One chunk of channels, whose taps are multiplied in pairs: beside the last one, zeros meet
    zeros, not the pixels that come first in a patch or behind the weights."""
    image = (1, *(3,) * (len(kernel) - 2), 9, 14, 8)
    group = groups.convolution(image, 24, kernel, F16, residual=False)
    values = inputs_of(group, seed=1)
    values["x"][(0,) * (len(kernel) + 1)] = odd  # the first pixel
    values["x"][..., -1, 3, 2] = odd
    assert finite(group, values).float().mean() > 0.5
    assert not wrong(made(group, chunks=1, stages=stages), group, values)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [F32, "tf32"], ids=str)
def test_the_tail_of_floats(dtype: torch.dtype | str) -> None:
    group = groups.convolution((1, 9, 14, 4), 24, (3, 3), F32, residual=False)
    group = groups.tf32(group) if dtype == "tf32" else group
    values = inputs_of(group, seed=1)
    values["x"][0, 0, 0] = torch.nan
    values["x"][0, -1, 3, 2] = torch.nan
    assert finite(group, values).float().mean() > 0.5
    assert not wrong(made(group, chunks=1), group, values)


@pytest.mark.compiler
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_what_lies_beyond_the_channels_is_not_read(chunks: int) -> None:
    group = CASES["conv_of_some_channels"]()
    values = inputs_of(group, seed=1)
    values["x"][..., :64] = values["x"][..., 128:] = torch.nan
    assert finite(group, values).all()
    assert not wrong(made(group, chunks=chunks), group, values)


@pytest.mark.compiler
def test_a_last_step_of_fewer_chunks_reads_no_neighbours() -> None:
    """Three chunks of channels between others, in steps of two and in one of four."""
    group = groups.convolution((1, 5, 9, 40), 24, (3, 3), F16, channels=(8, 32))
    values = inputs_of(group, seed=1)
    values["x"][..., :8] = values["x"][..., 32:] = torch.nan
    for chunks in (2, 4):
        assert not wrong(made(group, chunks=chunks), group, values)


@pytest.mark.compiler
@pytest.mark.parametrize("axes", [2, 3])
def test_images_do_not_reach_one_another(axes: int) -> None:
    """A patch that is larger than an image has none of the next one's pixels."""
    group = groups.convolution((3, *(3, 5, 6)[-axes:], 16), 24, (3,) * axes, F16)
    values = inputs_of(group, seed=1)
    values["x"][1] = torch.nan
    known = finite(group, values)
    assert known[0].all() and known[2].all() and not known[1].any()
    for changes in ({}, {"tile_h": 16, "tile_w": 16}, {"tile_t": 4 if axes == 3 else 1}):
        assert not wrong(made(group, **changes), group, values)


@pytest.mark.compiler
def test_groups_do_not_reach_one_another() -> None:
    """A NaN in a group's channels is in the results of that group alone."""
    group = CASES["groups_of_16"]()
    values = inputs_of(group, seed=1)
    values["x"][..., 16:32] = torch.nan
    for program in drawn(ConvMma(group, A100), 2):
        assert not wrong_outputs(program, group, values, run_on_host)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_convolution_of_patches(case: str) -> None:
    for target in (A100, H100):
        with pytest.raises(Illegal, match=REFUSED[case]):
            ConvMma(CASES[case](), target)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: groups.plain_linear(64, 64, 64, F16), "rows of a matrix are no patch"),
        (lambda: groups.convolution((1, 9, 8, 64), 32, (1, 1), F16, before=(0, 0)), ONCE),
        (lambda: groups.convolution((1, 9, 8, 64), 32, (3, 3), F16, stride=(3, 3)), ONCE),
        (lambda: groups.convolution((1, 9, 8, 60), 32, (3, 3), F16), NO_RUNS),
        (lambda: groups.convolution((1, 9, 8, 64), 32, (3, 3), F16, channels=(4, 36)), NO_RUNS),
        (lambda: groups.convolution((1, 9, 8, 64), 32, (3, 3), F16, groups=16), NO_RUNS),
        (
            lambda: groups.convolution((1, 9, 8, 64), 64, (3, 3), F16, groups=2, stats=True),
            "32 columns a group cut the chunks of the row statistics",
        ),
        (
            lambda: groups.convolution((1, 64, 64, 64), 64, (13, 13), F16),
            "no default patch fits the shared memory",
        ),
    ],
)
def test_refusals(make: Callable[[], Group], reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        ConvMma(make(), H100)


def test_of_two_values_no_fragment_holds_the_statistics() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 5, 6, 16), F16))
    w = b.constant("w", torch.zeros(64, 3, 3, 16, dtype=F16))
    y = b.add("conv", x, w, stride=(1, 1), before=(1, 1), after=(1, 1), dilation=(1, 1))
    z = b.add("relu", y)
    group = Group("two", b.build([y, b.add("row_stats", y), z, b.add("row_stats", z)]))
    with pytest.raises(Illegal, match="2 values with row statistics, of one at most"):
        ConvMma(group, H100)


@pytest.mark.parametrize("arch", TARGETS)
def test_whoever_takes_a_group_has_a_default_for_it(arch: str) -> None:
    """The weights of large kernels fit no block's shared memory on some targets: the sketch refuses
    the group, so that those who ask for its defaults need not expect an error."""
    for image, kernel in (
        ((1, 64, 64, 64), (5, 5)),
        ((1, 64, 64, 64), (7, 7)),
        ((1, 16, 64, 64, 64), (3, 3, 3)),
        ((1, 64, 64, 16), (31, 31)),
    ):
        group = groups.convolution(image, 64, kernel, F16)
        derivation = derive(group, "gemm", TARGETS[arch])
        for sketch in derivation.sketches:
            assert list(sketch.defaults())
        taken = {sketch.name for sketch in derivation.sketches}
        refused = dict(derivation.refusals)
        assert "conv_mma" in taken or refused["conv_mma"].startswith("no default patch fits")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps_m": 4}, "8 rows a warp are no multiple of 16"),
        ({"block_n": 16, "warps_n": 2}, "8 columns a warp are less than a pair of mma tiles"),
        ({"chunks": 8}, "8 chunks of 4"),
        ({"tile_h": 32, "tile_w": 32, "warps_m": 4}, "256 accumulators a thread"),
        (
            {"tile_h": 16, "tile_w": 32, "block_n": 128, "warps_m": 8, "warps_n": 2},
            "128 accumulators a thread",  # of 512, which have 128 registers each
        ),
        ({"tile_h": 32, "tile_w": 32, "warps_m": 8, "chunks": 4}, "shared memory .* has 166912 B"),
        (
            {"tile_h": 16, "tile_w": 32, "warps_m": 8, "chunks": 4, "stages": 1},
            "one block a multiprocessor, which copies nothing while it multiplies",
        ),
        ({"tile_t": 2}, "is no value of the knob tile_t"),
        ({"tile_w": 4}, "is no value of the knob tile_w"),
    ],
)
def test_illegal_schedules(changes: dict[str, int], reason: str) -> None:
    group = groups.convolution((1, 56, 56, 32), 32, (3, 3), F16)
    with pytest.raises(Illegal, match=reason):
        made(group, **changes)


def test_statistics_need_a_warp_of_whole_chunks() -> None:
    group = groups.convolution((1, 9, 8, 16), 128, (3, 3), F16, stats=True)
    for changes in ({}, {"block_n": 64, "warps_n": 2}):
        with pytest.raises(Illegal, match="32 columns a part cut the chunks"):
            made(group, **changes)


# -- prices ----------------------------------------------------------------------------------------


def drafts(sketch: ConvMma | GemmMma) -> list[float]:
    """What the draft model says of each legal default."""
    return [
        draft_us(work_of(Candidate(sketch, program)), sketch.target) for program in defaults(sketch)
    ]


@pytest.mark.parametrize("case", TAKEN)
def test_every_default_has_a_price(case: str) -> None:
    group = CASES[case]()
    for target in (A100, H100, TARGETS["sm_100"]):
        sketch = ConvMma(group, target)
        costs = [sketch._cost(schedule) for schedule in sketch.defaults()]
        assert costs == sorted(costs)
        prices = (*(us for us, _ in costs), *drafts(sketch))
        assert all(math.isfinite(us) and us > 0 for us in prices)


def test_few_channels_of_a_volume_are_drafted_faster_than_as_rows() -> None:
    """As rows they would be drawn from L2 again for each of 27 taps."""
    group = groups.convolution((1, 64, 128, 128, 32), 32, (3, 3, 3), F16)
    assert drafts(ConvMma(group, H100))[0] < drafts(GemmMma(group, H100))[0]


def test_blocks_read_more_from_shared_memory_than_is_filled() -> None:
    group = groups.convolution((1, 8, 28, 28, 32), 32, (3, 3, 3), F16)
    sketch = ConvMma(group, H100)
    block = sketch.block_work(sketch.emit({**SCHEDULE, "chunks": 4}))
    taps, chunks, warps, patches = 27, 4, 2, block.tiles
    assert block.operand_bytes == patches * taps * chunks * warps * (16 + 32) * 16
    assert block.mma_flops == patches * 2 * 32 * 32 * taps * 32
    # Weights once, which stay, and of each patch three frames of 6 x 10 pixels.
    assert block.fill_bytes == 27 * 4 * 32 * 16 + patches * 3 * 6 * 10 * 64


# -- source ----------------------------------------------------------------------------------------

COMPILED: dict[str, Callable[[], Group]] = {
    "volume": lambda: groups.convolution((1, 64, 128, 128, 32), 32, (3, 3, 3), F16),
    "image": lambda: groups.convolution((1, 56, 56, 64), 64, (3, 3), BF16),
    "many_channels": lambda: groups.convolution((1, 14, 14, 256), 256, (3, 3), F16),
    "one_chunk": lambda: groups.convolution((1, 112, 112, 8), 64, (5, 5), F16, stride=(2, 2)),
    "groups": lambda: groups.convolution((1, 28, 28, 256), 256, (3, 3), F16, groups=8),
    "statistics": lambda: groups.convolution((1, 56, 56, 64), 96, (3, 3), F16, stats=True),
    "tf32": lambda: groups.tf32(groups.convolution((1, 56, 56, 32), 32, (3, 3), F32)),
    "fp32": lambda: groups.convolution((1, 56, 56, 32), 32, (3, 3), F32),
}


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_default_kernels_hardly_spill(case: str, arch: str) -> None:
    sketch = ConvMma(COMPILED[case](), TARGETS[arch])
    for program in itertools.islice(defaults(sketch), 0, 3, 2):
        compiled = compile_uncached(program.code, program.name, program.arch)
        # As `compile_for_all` has it: the assembler spills a handful to have 128 registers.
        assert compiled.spill_bytes <= 64, dict(program.schedule)


def test_source(golden: Golden) -> None:
    volume = groups.convolution((1, 16, 64, 64, 32), 32, (3, 3, 3), F16)
    knobs = {"tile_t": 4, "tile_h": 8, "block_n": 32, "chunks": 4, "warps_m": 4}
    golden("conv_mma_volume.cu", made(volume, **knobs).source)
    image = groups.convolution((1, 28, 28, 96), 144, (3, 3), F32, stride=(2, 2), groups=3)
    golden("conv_mma_groups.cu", made(image, tile_h=8, chunks=8).source)
