"""Statistics of groups are merged of those that the kernel of an image's pixels leaves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes import box_moments
from gtco.passes.box_moments import moments_of_boxes
from gtco.passes.legality import explain
from gtco.passes.whole_means import whole_means
from gtco.selection import refusal
from gtco.target import TARGETS
from tests.pass_checks import check, ops, random
from tests.unit.test_passes_box_means import args_of
from tests.unit.test_passes_whole_means import never

F16, F32 = torch.float16, torch.float32


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
    result = check(partial(whole_means, refusal=never), made, args_of(made))
    assert ops(result)["group_stats"] == 1 and "box_moments" not in ops(result)


def test_the_sketches_of_the_target_decide() -> None:
    made = moments_of_boxes(
        normed(4, 64, 128, 64, groups=8, chunks=16, columns=64, dtype=F16)
    )  # tiles enough for the blocks that stay
    kept = {
        arch: ops(whole_means(made, refusal=partial(refusal, target=TARGETS[arch])))
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_plan_has_them_in_the_convolution(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_moments, "LARGE_BYTES", 2**22)
    model, x = Block(128).eval().half(), torch.randn(1, 128, 192, 192).half()
    plan, _ = make_plan(model, (x,), {}, Options.of(target=arch))
    kernels = [[node.op for node in launch.group.compute] for launch in plan.launches]
    assert all(launch.program is not None for launch in plan.launches)
    together = any("conv" in kernel and "box_moments" in kernel for kernel in kernels)
    assert together == (arch == "sm_90a")
