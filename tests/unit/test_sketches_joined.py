"""Products of concats that nobody stores: right piece by piece, compiled, refused in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.codegen.program import KernelProgram, TensorMapArgument
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.compiler import make_plan
from gtco.cost_model.model import draft_us, roofline_us
from gtco.cost_model.work import work_of
from gtco.ir.graph import GraphBuilder, Group, Node
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes.dataflow import Flow, make_group
from gtco.passes.legality import explain, family
from gtco.runtime.encoding import _decode_argument, _encode_argument
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.selection import first_choice
from gtco.target import TARGETS, Target
from tests import groups
from tests.groups import BF16, F16, F32, joined
from tests.kernel_checks import (
    compile_for_all,
    inputs_of,
    sample,
    wrong_outputs,
    wrong_statistics,
)
from tests.pass_checks import Golden

A100, H100 = TARGETS["sm_80"], TARGETS["sm_90a"]
FEW = replace(H100, sm_count=2, smem_per_block=160 * 1024)
"""So few multiprocessors and so little shared memory that small results run on round the ring."""

CASES = groups.JOINED_CASES
NO_TENSOR_MAP = {
    "joined_expanded": "read again, which no tensor map describes",
}
"""Cases that wgmma refuses, and its sentence."""
CONVOLUTIONS = [case for case in CASES if case.startswith("joined_conv")]
NO_PATCH = {"joined_conv_1x1_stride": "no pixel is in two windows"}
WGMMA_KNOBS = (
    "swap", "block_p", "block_q", "stages", "split", "multicast", "atoms", "depth", "cluster_q",
)  # fmt: skip
PERSISTENT_KNOBS = ("cooperative", "block_m", "block_n", "atoms", "raster", "copies", "lines")


def wrong(program: KernelProgram, group: Group, seed: int = 1) -> list[str]:
    """What `program` gets wrong of random values, row statistics included."""
    values = inputs_of(group, seed=seed)
    found = wrong_outputs(program, group, values, run_on_host)
    if len(group.graph.outputs) > 1:
        found += wrong_statistics(group, run_on_host(program, group, values))
    return found


# -- every case ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_a_legal_group(case: str) -> None:
    group = CASES[case]()
    assert explain(group.graph, group.compute) is None
    convolves, copied = case in CONVOLUTIONS, case not in NO_TENSOR_MAP
    expected = ["gemm_wgmma"] * copied + ["gemm_mma"]
    patches, planes = convolves and case not in NO_PATCH, not case.endswith("32")
    expected += ["conv_mma"] * patches + ["conv_wgmma"] * (patches and planes)
    assert [each.name for each in derive(group, "gemm", H100).sketches] == expected


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_pieces_gathered_by_threads(case: str) -> None:
    group = CASES[case]()
    for program in sample(GemmMma(group, A100), 1):
        assert not wrong(program, group)


@pytest.mark.compiler
@pytest.mark.parametrize("case", [case for case in CONVOLUTIONS if case not in NO_PATCH])
def test_pieces_in_patches(case: str) -> None:
    group = CASES[case]()
    for program in sample(ConvMma(group, A100), 1):
        assert not wrong(program, group)


@pytest.mark.compiler
@pytest.mark.parametrize("case", [case for case in CASES if case not in NO_TENSOR_MAP])
def test_pieces_gathered_by_the_copy_engine(case: str) -> None:
    group = CASES[case]()
    sketch = GemmWgmma(group, H100)
    first, *others = sketch.defaults()
    other = next(each for each in others if each["swap"] != first["swap"])
    for schedule in (first, other):
        assert not wrong(sketch.emit(schedule), group)


# -- schedules of the copy engine ------------------------------------------------------------------

GROUPS: dict[str, Callable[[], Group]] = {
    "linear": lambda: joined((2, 35), (64, 96, 8), 256, F16),
    "linear with statistics": lambda: joined((2, 35), (72, 40), 256, BF16, stats=True),
    "convolution": lambda: joined((2, 7, 9), (40, 72), 256, F16, (3, 3)),
    "volume": lambda: joined((1, 3, 5, 6), (64, 8, 16), 128, BF16, (2, 3, 2)),
    "fp32": lambda: joined((70,), (36, 20), 128, F32),
}
WGMMA = [
    ("linear", (0, 64, 64, 2, 1, 1, 1, 0, 1)),
    ("linear", (0, 128, 64, 3, 1, 1, 2, 1, 1)),
    ("linear", (0, 64, 32, 2, 1, 2, 4, 0, 1)),
    ("linear", (1, 64, 24, 2, 1, 4, 1, 1, 1)),
    ("linear", (1, 128, 40, 2, 1, 2, 2, 0, 1)),
    ("linear", (1, 64, 40, 2, 4, 1, 1, 0, 1)),
    ("linear", (0, 64, 32, 2, 2, 1, 2, 1, 4)),
    ("linear", (1, 64, 24, 3, 2, 1, 1, 1, 3)),
    ("linear with statistics", (1, 64, 24, 2, 1, 4, 1, 0, 1)),
    ("linear with statistics", (0, 64, 128, 2, 3, 1, 1, 0, 1)),
    ("convolution", (0, 64, 64, 3, 1, 1, 3, 1, 1)),
    ("convolution", (0, 64, 64, 2, 1, 2, 1, 0, 1)),
    ("convolution", (1, 64, 32, 2, 1, 4, 3, 0, 1)),
    ("convolution", (1, 64, 64, 2, 1, 2, 1, 1, 1)),
    ("convolution", (1, 64, 32, 4, 4, 1, 1, 1, 2)),
    ("convolution", (0, 64, 64, 2, 5, 1, 1, 0, 1)),
    ("volume", (1, 64, 48, 2, 1, 2, 3, 0, 1)),
    ("volume", (1, 64, 24, 3, 2, 1, 1, 1, 3)),
    ("volume", (0, 64, 64, 2, 3, 1, 3, 1, 1)),
    ("fp32", (1, 64, 24, 2, 1, 2, 1, 0, 1)),
    ("fp32", (0, 64, 64, 2, 2, 1, 1, 0, 2)),
]


@pytest.mark.compiler
@pytest.mark.parametrize(("name", "values"), WGMMA)
def test_right_in_every_schedule(name: str, values: tuple[int, ...]) -> None:
    group = GROUPS[name]()
    program = GemmWgmma(group, H100).emit(dict(zip(WGMMA_KNOBS, values, strict=True)))
    assert not wrong(program, group)


STAYING: dict[str, Callable[[], Group]] = {
    "linear": lambda: joined((3, 97), (72, 40, 64), 104, F16),
    "linear with statistics": lambda: joined((200,), (72, 40), 128, BF16, stats=True),
    "convolution": lambda: joined((2, 13, 11), (72, 8, 64), 104, F16, (3, 3)),
    "convolution apart": lambda: joined((1, 27, 18), (40, 16), 64, BF16, (3, 2), stride=(2, 1)),
    "volume": lambda: joined((1, 5, 9, 8), (8, 72), 64, F16, (3, 3, 3)),
    "tf32": lambda: groups.tf32(joined((290,), (36, 20), 64, F32)),
}
PERSISTENT = [
    ("linear", (0, 64, 64, 1, 4, 0, 0)),
    ("linear", (0, 128, 96, 2, 1, 0, 0)),
    ("linear", (1, 192, 64, 2, 4, 0, 0)),
    ("linear with statistics", (0, 64, 64, 1, 4, 0, 0)),
    ("convolution", (0, 64, 64, 2, 4, 0, 0)),
    ("convolution", (1, 128, 96, 1, 1, 0, 0)),
    ("convolution apart", (0, 64, 64, 2, 1, 0, 0)),
    ("convolution apart", (1, 128, 64, 1, 4, 0, 0)),
    ("volume", (0, 64, 64, 1, 4, 0, 0)),
    ("tf32", (0, 64, 64, 1, 4, 0, 0)),
    ("convolution", (0, 64, 128, 1, 4, 0, 1)),
    ("convolution apart", (1, 128, 64, 1, 4, 0, 1)),
]


@pytest.mark.compiler
@pytest.mark.parametrize(("name", "values"), PERSISTENT)
def test_right_in_blocks_that_stay(name: str, values: tuple[int, ...]) -> None:
    group = STAYING[name]()
    program = GemmPersistent(group, FEW).emit(dict(zip(PERSISTENT_KNOBS, values, strict=True)))
    assert program.grid[0] <= FEW.sm_count
    assert not wrong(program, group)


# -- what reaches what -----------------------------------------------------------------------------


def every(group: Group) -> list[Sketch]:
    """Each sketch that takes `group`, once."""
    few = replace(H100, sm_count=1)
    return list(derive(group, "gemm", few).sketches)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("piece", "kernel", "odd"),
    [
        ("x0", (3, 3), torch.nan),
        ("x1", (), torch.inf),
        ("x2", (), torch.nan),
        ("x2", (3, 3), torch.inf),
    ],
)
def test_what_is_no_number_in_a_piece_is_in_its_results_alone(
    piece: str, kernel: tuple[int, ...], odd: float
) -> None:
    """One element of one pixel: the judge wants torch's own answer where that is no number."""
    group = joined((2, 9, 8), (64, 24, 40), 72, F16, kernel)
    values = inputs_of(group, seed=1)
    values[piece][1, 2, 3, -1] = odd
    for sketch in every(group):
        program = sample(sketch, 0)[0]
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "case", ["joined_channels", "joined_tokens", "joined_conv_channels", "joined_conv_cropped"]
)
def test_what_lies_beside_a_piece_is_not_read(case: str) -> None:
    """Not even a NaN in the channels, rows or tokens that a slice leaves out reaches a result."""
    group = CASES[case]()
    values = inputs_of(group, seed=1)
    (node,) = (node for node in group.nodes if node.op == "slice")
    whole, attrs = values[node.inputs[0]], node.attrs
    kept = whole.clone()
    whole.fill_(torch.nan)
    at = [slice(None)] * whole.dim()
    at[attrs["dim"]] = slice(attrs["start"], attrs["end"])
    whole[tuple(at)] = kept[tuple(at)]
    for sketch in every(group):
        assert not wrong_outputs(sample(sketch, 0)[0], group, values, run_on_host)


# -- compiled --------------------------------------------------------------------------------------

LARGE: dict[str, Callable[[], Group]] = {
    "linear": lambda: joined((1, 1024), (256, 128, 72), 256, F16, stats=True),
    "linear of 8": lambda: joined((1, 1024), (64, 72, 8, 64, 128, 40, 64, 256), 256, F16),
    "linear of fp32": lambda: joined((196,), (64, 36), 64, F32),
    "convolution": lambda: joined((1, 28, 28), (128, 72), 256, F16, (3, 3)),
    "volume": lambda: joined((1, 8, 28, 28), (64, 32, 32), 64, BF16, (3, 3, 3)),
}
# The copy engine's pieces of 32 channels end in as many zeros, which cost more than a concat.
PRICED = LARGE | {"volume": lambda: joined((1, 8, 28, 28), (64, 64), 64, BF16, (3, 3, 3))}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_kernels_compile_without_spills(case: str, place: int) -> None:
    """Of each sketch that takes it, the preferred one first."""
    group = LARGE[case]()

    def sketch(target: Target) -> Sketch:
        return derive(group, "gemm", target).sketches[: 1 + place][-1]

    assert not list(compile_for_all(sketch, 2))


@pytest.mark.parametrize("case", ["linear", "convolution", "volume"])
def test_kernels_of_clusters_compile_without_spills(case: str) -> None:
    sketch = GemmWgmma(LARGE[case](), H100)
    for name in ("multicast", "split", "cluster_q"):
        schedule = next(each for each in sketch.defaults() if each[name] > 1)
        program = sketch.emit(schedule)
        assert not compile_uncached(program.code, program.name, program.arch).spill_bytes, schedule


@pytest.mark.parametrize(
    "group",
    [
        joined((1, 20000), (64, 72, 8), 128, F16),
        joined((1, 160, 160), (64, 40), 64, F16, (3, 3)),
        joined((1, 8, 64, 64), (64, 40), 64, F16, (3, 3, 3)),
    ],
    ids=["linear", "convolution", "volume"],
)
def test_kernels_that_stay_compile_without_spills(group: Group) -> None:
    for program in sample(GemmPersistent(group, H100), 2):
        compiled = compile_uncached(program.code, program.name, program.arch)
        assert compiled.spill_bytes == 0, dict(program.schedule)


def test_source(golden: Golden) -> None:
    group = joined((1, 28, 28), (128, 72, 32), 256, F16, (3, 3))
    sketch = GemmWgmma(group, H100)
    golden("gemm_wgmma_joined.cu", sketch.emit(next(iter(sketch.defaults()))).code)
    group = joined((2, 35), (64, 96, 8), 72, F16)
    mma = GemmMma(group, A100)
    golden("gemm_mma_joined.cu", mma.emit(next(iter(mma.defaults()))).code)


# -- tensor maps -----------------------------------------------------------------------------------


def maps_of(group: Group, swap: int) -> list[TensorMapArgument]:
    """Those of the pieces of A, in their order."""
    sketch = GemmWgmma(group, H100)
    program = sketch.emit(next(each for each in sketch.defaults() if each["swap"] == swap))
    first, second, *others = program.arguments
    more = [each for each in others if isinstance(each, TensorMapArgument)]
    found = [second if swap else first, *more]
    for each in found:
        assert isinstance(each, TensorMapArgument)
        assert _decode_argument(_encode_argument(each)) == each
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("swap", [0, 1])
def test_the_maps_of_rows(swap: int) -> None:
    """Each has as many channels as its piece, so that nothing of another fills an atom."""
    group = joined((2, 35), (64, 40, 96), 256, F16, cut={1: (2, 192, 64)})
    maps = maps_of(group, swap)
    assert [each.value for each in maps] == ["x0", "x1", "x2"]
    assert [each.sizes for each in maps] == [(64, 70, 1), (40, 70, 1), (96, 70, 1)]
    assert [each.strides[0] for each in maps] == [64, 192, 96]
    assert [each.offset for each in maps] == [0, 64, 0]
    assert {each.box for each in maps} == {maps[0].box} and maps[0].box[0] == 64


def test_the_maps_of_windows() -> None:
    group = joined(
        (2, 9, 8), (64, 40), 32, F16, (3, 3),
        stride=(2, 1), before=(1, 2), cut={1: (1, 13, 3)},
    )  # fmt: skip
    first, second = maps_of(group, swap=1)
    assert first.sizes == (64, 8, 9, 2) and first.strides == (64, 512, 4608)
    assert second.sizes == (40, 8, 9, 2) and second.strides == (40, 320, 4160)
    assert (first.offset, second.offset) == (0, 960)
    assert first.window == second.window and first.box == second.box
    assert first.window is not None
    assert first.window.lower == (-2, -1) and first.window.stride == (1, 2)
    assert first.window.upper == (0, -1)


def test_the_maps_of_windows_with_frames() -> None:
    group = joined((2, 7, 9, 8), (8, 64), 32, F16, (3, 2, 3), stride=(2, 1, 1))
    first, second = maps_of(group, swap=1)
    assert first.sizes == (8, 8, 9, 7, 2) and first.strides == (8, 64, 576, 4032)
    assert second.sizes == (64, 8, 9, 7, 2) and second.strides == (64, 512, 4608, 32256)
    assert first.window == second.window


# -- refusals --------------------------------------------------------------------------------------


def test_few_rows_have_one_place() -> None:
    with pytest.raises(Illegal, match="reads its operand from one place"):
        GemmSkinny(CASES["joined_one_row"](), H100)


@pytest.mark.parametrize("case", NO_TENSOR_MAP)
@pytest.mark.parametrize("kind", [GemmWgmma, GemmPersistent])
def test_one_piece_that_no_tensor_map_describes_is_enough(case: str, kind: type[Sketch]) -> None:
    with pytest.raises(Illegal, match=NO_TENSOR_MAP[case]):
        kind(CASES[case](), FEW)


def test_no_patch_where_no_pixel_is_read_twice() -> None:
    for case, reason in NO_PATCH.items():
        with pytest.raises(Illegal, match=reason):
            ConvMma(CASES[case](), A100)
    with pytest.raises(Illegal, match="no patch of an image"):
        ConvMma(CASES["joined_2"](), A100)


@pytest.mark.parametrize(
    ("name", "atoms", "count"), [("linear", 3, 4), ("convolution", 2, 27), ("volume", 4, 36)]
)
def test_no_step_runs_beyond_the_last_atom(name: str, atoms: int, count: int) -> None:
    """Pieces of 64, 96 and 8 channels are 1, 2 and 1 atoms of 64; a tap of 40 and 72 has 3."""
    sketch = GemmWgmma(GROUPS[name](), H100)
    schedule = dict(next(iter(sketch.defaults())), atoms=atoms, split=1)
    if count % atoms:
        with pytest.raises(Illegal, match=f"{count} atoms of taps in steps of {atoms}"):
            sketch.emit(schedule)
    assert sketch.steps == count


def test_no_step_of_blocks_that_stay_runs_beyond_the_last_atom() -> None:
    group = joined((2, 13, 11), (72, 16), 104, F16, (3, 3))
    schedule = dict(zip(PERSISTENT_KNOBS, (0, 64, 64, 2, 4, 0, 0), strict=True))
    with pytest.raises(Illegal, match="27 atoms of taps in steps of 2"):
        GemmPersistent(group, FEW).emit(schedule)


@pytest.mark.parametrize("kind", [GemmMma, GemmWgmma, GemmPersistent])
def test_a_piece_that_is_made_in_the_kernel(kind: type[Sketch]) -> None:
    b = GraphBuilder()
    x, y = (b.input(name, TensorSpec((64, 64), F16)) for name in "xy")
    z = b.add("concat", b.add("relu", x), y, dim=1)
    z = b.add("linear", z, b.input("w", TensorSpec((64, 128), F16)))
    with pytest.raises(Illegal, match="operand %relu is made in the same kernel"):
        kind(Group("made", b.build([z])), FEW)


# -- prices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PRICED)
@pytest.mark.parametrize("target", [A100, H100], ids=["sm_80", "sm_90a"])
def test_pieces_are_cheaper_than_a_concat_of_its_own(case: str, target: Target) -> None:
    group = PRICED[case]()
    flow = Flow(group.graph)
    concat, *product = flow.compute
    assert concat.op == "concat"

    def first_us(nodes: Sequence[Node]) -> float:
        part = make_group(flow, nodes)
        best, _ = first_choice(derive(part, family(part), target))
        assert best is not None
        return draft_us(work_of(best), target)

    joined_us = first_us(flow.compute)
    assert joined_us < first_us([concat]) + first_us(product)
    assert roofline_us(group, target) == joined_us


def test_windows_that_no_patch_holds_have_a_price() -> None:
    group = joined((1, 80, 80), (128, 128), 128, F16, (3, 3), dilation=(31, 31))
    with pytest.raises(Illegal, match="no default patch fits"):
        ConvMma(group, A100)
    for target in (A100, H100):
        assert 0 < roofline_us(group, target) < math.inf


class TwoImages(nn.Module):
    """Features of two images, one of them pooled, as EfficientLoFTR joins them: their halves have
    two readers, so that the convolution stores them with the channels apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mlp = nn.Conv2d(16, 32, 3, padding=1), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x).reshape(1, 2, 32, 12, 16).unbind(1)
        joined = torch.cat([a, F.max_pool2d(b, 3, 1, 1)], 1).permute(0, 2, 3, 1)
        made: Tensor = self.mlp(joined).relu()
        return made


def test_a_piece_whose_channels_are_stored_apart_is_joined_by_a_kernel_of_its_own() -> None:
    args = (torch.randn(2, 16, 12, 16).half(),)
    plan, _ = make_plan(TwoImages().half().eval(), args, None, Options.of(target="sm_90a"))
    assert all(launch.program is not None for launch in plan.launches)
    kernels = [[node.op for node in launch.group.compute] for launch in plan.launches]
    assert ["linear", "relu"] in kernels
