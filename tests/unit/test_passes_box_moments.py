"""Statistics of groups are merged of those that the kernel of an image's pixels leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gtco.codegen.sampler import Sampler
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_patches import ConvPatches
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.compiler import make_plan
from gtco.cost_model.model import programmed_us
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes import box_moments
from gtco.passes.box_means import RUN
from gtco.passes.box_moments import moments_of_boxes
from gtco.passes.legality import explain
from gtco.passes.whole_means import whole_means
from gtco.runtime.host import run_on_host
from gtco.selection import refusal
from gtco.target import TARGETS
from tests import box_groups
from tests.kernel_checks import first_default, inputs_of, wrong_outputs
from tests.pass_checks import check, ops, random
from tests.unit.test_passes_box_means import args_of
from tests.unit.test_passes_whole_means import never, unknown

F16, F32 = torch.float16, torch.float32
HOPPER = TARGETS["sm_90a"]


def normed(
    *image: int, groups: int, chunks: int, columns: int = 16, dtype: torch.dtype = F32
) -> Graph:
    """The statistics of silu(linear(x)) + x, and that itself."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, dtype))
    y = b.add("linear", x, b.constant("w", random(columns, image[-1], dtype=dtype)))
    y = b.add("add", b.add("silu", y), b.input("residual", b.specs[y]))
    return b.build([y, b.add("group_stats", y, groups=groups, chunks=chunks)])


@pytest.fixture(autouse=True)
def _small_images_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_moments, "LARGE_BYTES", 1)


@pytest.mark.parametrize(
    ("image", "groups", "chunks", "columns", "of_box"),
    [
        ((2, 8, 12, 8), 4, 3, 16, 4),
        ((1, 4, 6, 8, 8), 3, 2, 24, 8),
        ((1, 64, 8), 2, 1, 96, 16),
        ((1, 32, 8), 1, 2, 64, 32),
    ],
)
def test_the_same_statistics(
    image: tuple[int, ...], groups: int, chunks: int, columns: int, of_box: int
) -> None:
    made = normed(*image, groups=groups, chunks=chunks, columns=columns)
    result = check(moments_of_boxes, made, args_of(made))
    (moments,) = (node for node in result.nodes if node.op == "box_moments")
    assert ops(result)["merge_moments"] == 1 and moments.attrs["columns"] == of_box


@pytest.mark.parametrize(
    ("image", "groups", "chunks"),
    [
        ((2, 5, 10, 8), 4, 5),  # 50 pixels are no whole runs
        ((2, 8, 8, 8), 4, 8),  # chunks of 8 pixels
        ((2, 8, 12, 8), 8, 3),  # two channels a group
    ],
)
def test_what_stays(image: tuple[int, ...], groups: int, chunks: int) -> None:
    made = normed(*image, groups=groups, chunks=chunks)
    assert "box_moments" not in ops(moments_of_boxes(made))


def test_images_that_lie_in_l2_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_moments, "LARGE_BYTES", 2**23)
    small, large = (
        normed(1, side, side, 64, groups=4, chunks=16, columns=64, dtype=F16) for side in (128, 256)
    )
    assert "box_moments" not in ops(moments_of_boxes(small))
    assert "box_moments" in ops(moments_of_boxes(large))


def test_an_image_that_no_product_makes_is_read_again() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 64, 16), F32))
    graph = b.build([b.add("group_stats", b.add("silu", x), groups=2, chunks=2)])
    assert "box_moments" not in ops(moments_of_boxes(graph))


def test_they_come_from_the_kernel_of_the_pixels() -> None:
    graph = moments_of_boxes(normed(2, 8, 12, 8, groups=4, chunks=3))
    nodes = [node for node in graph.nodes if node.op != "merge_moments"]
    assert explain(graph, nodes) is None
    after = [node for node in graph.nodes if node.op in ("box_moments", "merge_moments")]
    assert "cannot read it in the same kernel" in str(explain(graph, after))


def test_undone_where_no_kernel_leaves_them() -> None:
    made = moments_of_boxes(normed(2, 8, 12, 8, groups=4, chunks=3))
    result = check(partial(whole_means, refusal=never, price=unknown), made, args_of(made))
    assert ops(result)["group_stats"] == 1 and "box_moments" not in ops(result)


def test_the_sketches_of_the_target_decide() -> None:
    made = moments_of_boxes(
        normed(4, 64, 128, 64, groups=8, chunks=16, columns=64, dtype=F16)
    )  # tiles enough for the blocks that stay
    kept = {
        arch: ops(
            whole_means(
                made,
                refusal=partial(refusal, target=TARGETS[arch]),
                price=partial(programmed_us, target=TARGETS[arch]),
            )
        )
        for arch in ("sm_80", "sm_90a")
    }
    assert kept["sm_80"]["group_stats"] == 1 and kept["sm_90a"]["box_moments"] == 1


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 1)  # leaves channels last
        self.ahead, self.behind = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.behind(nn.functional.silu(self.norm(self.ahead(self.first(x)))))
        return result


@pytest.mark.parametrize(("arch", "side"), [("sm_80", 192), ("sm_90a", 320)])
def test_a_plan_has_them_in_the_convolution(
    arch: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At sizes where drafts say by far that they pay."""
    monkeypatch.setattr(box_moments, "LARGE_BYTES", 2**22)
    model, x = Block(128).eval().half(), torch.randn(1, 128, side, side).half()
    plan, _ = make_plan(model, (x,), {}, Options.of(target=arch))
    kernels = [[node.op for node in launch.group.compute] for launch in plan.launches]
    assert all(launch.program is not None for launch in plan.launches)
    assert any("conv" in kernel and "box_moments" in kernel for kernel in kernels)


# -- of lines of pixels ---------------------------------------------------------------------------


def convolved(*image: int, groups: int = 16, chunks: int = 3, dtype: torch.dtype = F32) -> Graph:
    """The statistics of conv(x) + b, and that itself."""
    b, sides = GraphBuilder(), len(image) - 2
    x, ones = b.input("x", TensorSpec(image, dtype)), (1,) * sides
    w = b.constant("w", random(16, *(3 for _ in ones), image[-1], dtype=dtype))
    y = b.add("conv", x, w, stride=ones, before=ones, after=ones, dilation=ones)
    y = b.add("add", y, b.constant("b", random(16, dtype=dtype)))
    return b.build([y, b.add("group_stats", y, groups=groups, chunks=chunks)])


@pytest.fixture
def _nothing_stays_in_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_moments, "BEYOND_L2", 1)


@pytest.mark.usefixtures("_nothing_stays_in_l2")
@pytest.mark.parametrize(
    ("image", "groups"),
    [((2, 6, 16, 8), 16), ((1, 3, 4, 16, 8), 8), ((2, 6, 16, 8), 4)],
)
def test_the_same_statistics_of_lines(image: tuple[int, ...], groups: int) -> None:
    made = convolved(*image, groups=groups)
    result = check(moments_of_boxes, made, args_of(made))
    (moments,) = (node for node in result.nodes if node.op == "box_moments")
    assert moments.attrs["box"] == (RUN,)
    nodes = [node for node in result.nodes if node.op != "merge_moments"]
    assert explain(result, [node for node in nodes if not node.definition.is_view]) is None
    back = check(partial(whole_means, refusal=never, price=unknown), result, args_of(made))
    assert ops(back)["group_stats"] == 1


@pytest.mark.usefixtures("_nothing_stays_in_l2")
@pytest.mark.parametrize("image", [(2, 6, 24, 8), (2, 96, 8)])
def test_images_of_no_lines(image: tuple[int, ...]) -> None:
    made = convolved(*image) if len(image) > 3 else normed(*image, groups=16, chunks=2)
    assert "box_moments" not in ops(moments_of_boxes(made))


@pytest.mark.usefixtures("_nothing_stays_in_l2")
def test_chunks_that_cut_runs() -> None:
    assert "box_moments" not in ops(moments_of_boxes(convolved(2, 6, 16, 8, chunks=4)))


def test_few_channels_a_group_of_what_l2_still_has() -> None:
    assert "box_moments" not in ops(moments_of_boxes(convolved(2, 6, 16, 8)))


@pytest.mark.usefixtures("_nothing_stays_in_l2")
def test_undone_where_the_image_is_better_read_again() -> None:
    made = moments_of_boxes(convolved(2, 6, 16, 8))

    def price(group: Group) -> float:
        ops_of = {node.op for node in group.compute}
        return 9.0 if {"conv", "box_moments"} <= ops_of else 4.0

    def none(group: Group) -> None:
        return None

    assert ops(whole_means(made, refusal=none, price=price))["group_stats"] == 1
    cheap = whole_means(made, refusal=none, price=lambda group: 4.0)
    assert ops(cheap)["box_moments"] == 1


@pytest.mark.compiler
@pytest.mark.parametrize("kind", [ConvMma, ConvWgmma])
@pytest.mark.parametrize("case", box_groups.LINES)
def test_convolutions_of_patches_leave_them(kind: type[ConvPatches], case: str) -> None:
    """By the best default, and by two random schedules of blocks that stay."""
    group = box_groups.LINES[case]()
    values = inputs_of(group, seed=1)
    of_one = Sampler((kind(group, replace(HOPPER, sm_count=1)),), 1)
    programs = [kind(group, HOPPER).emit(first_default(kind(group, HOPPER)))]
    programs += [drawn.program for drawn in of_one.random(2)]
    for program in programs:
        assert not wrong_outputs(program, group, values, run_on_host)


def test_what_patches_do_not_leave() -> None:
    with pytest.raises(Illegal, match="lines of 8 results are no runs of 16"):
        ConvMma(box_groups.RUNS["moments of 32, windows"](), HOPPER)
    with pytest.raises(Illegal, match="this sketch leaves no means"):
        ConvMma(box_groups.RUNS["means of windows"](), HOPPER)
    lines = box_groups.LINES["channels"]()
    with pytest.raises(Illegal, match="a lane would have parts of 16 boxes"):
        ConvMma(lines, HOPPER).emit(first_default(ConvMma(lines, HOPPER), block_n=64))
