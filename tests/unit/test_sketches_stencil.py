"""Depthwise convolutions and poolings: right at every border, captured, fused, refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sketches.stencil import Stencil
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes import run_pipeline
from gtco.passes.legality import explain
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import stencil_groups
from tests.kernel_checks import (
    compile_for_all,
    inputs_of,
    sample,
    wrong_outputs,
    wrong_statistics,
)
from tests.pass_checks import Golden, captured, check, ops, random

H100 = TARGETS["sm_90a"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", stencil_groups.CASES)
def test_right_on_the_host_build(case: str) -> None:
    group = stencil_groups.CASES[case]()
    sketch = Stencil(group, H100)
    programs = [program for _, program in sketch.legal()]
    for program in (programs[0], programs[-1], sketch.emit(next(iter(sketch.defaults())))):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("case", stencil_groups.STATISTICS)
def test_statistics_are_of_what_is_stored(case: str) -> None:
    group = stencil_groups.STATISTICS[case]()
    assert explain(group.graph, group.compute) is None
    values = inputs_of(group, seed=1)
    for program in sample(Stencil(group, H100), 5, seed=2):
        outputs = run_on_host(program, group, values)
        assert not wrong_outputs(program, group, values, lambda *_, outputs=outputs: outputs)
        assert not wrong_statistics(group, outputs)


@pytest.mark.compiler
def test_nan_is_the_largest_and_stays() -> None:
    group = stencil_groups.CASES["max_3x3"]()
    values = inputs_of(group)
    values["x"][0, 2, 3] = torch.nan
    values["x"][1] = -torch.inf
    program = Stencil(group, H100).emit({"strip": 2, "vector": 4, "threads": 64})
    (result,) = run_on_host(program, group, values).values()
    expected = F.max_pool2d(values["x"].permute(0, 3, 1, 2), 3, 2, 1).permute(0, 2, 3, 1)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_kernels_compile_without_spills() -> None:
    cases = stencil_groups.CASES | stencil_groups.STATISTICS
    names = ("depthwise_7x7", "max_3x3", "avg_ceil", "adaptive_avg_column")
    for case in (*names, "stats_96", "stats_24", "stats_232"):
        group = cases[case]()
        assert not list(compile_for_all(lambda target, group=group: Stencil(group, target), 1))


def test_source(golden: Golden) -> None:
    sketch = Stencil(stencil_groups.CASES["depthwise_3x3"](), H100)
    golden("stencil_depthwise.cu", sketch.emit(next(iter(sketch.defaults()))).code)


class Windows(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.max_pool2d(x, 3, 2, 1)
        z = F.avg_pool2d(y, (2, 3), 1, (1, 0), True, False)
        return F.max_pool2d(z, 2, 1, 0, 2), F.avg_pool2d(x, 2, divisor_override=3)


def test_poolings_are_captured_and_run_with_channels_last() -> None:
    graph, args = captured(lambda m, x: Windows()(x), random(2, 5, 12, 9))
    result = check(lambda g, log: run_pipeline(g, log=log), graph, args)
    assert ops(result) == {"max_pool": 2, "avg_pool": 2}


def test_an_integer_image_stays_atens() -> None:
    graph, _ = captured(lambda m, x: F.max_pool2d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.int32))
    assert {"aten"} <= set(ops(graph))


def test_channels_that_are_stored_apart_are_asked_for_one_by_one() -> None:
    requests = []
    for dims in ((0, 1, 2, 3), (0, 3, 1, 2)):
        b = GraphBuilder()
        x = b.input("x", TensorSpec((2, 16, 16, 32), torch.float16))
        attrs = {name: (1, 1) for name in ("stride", "padding", "dilation")}
        y = b.add("max_pool", x, kernel=(3, 3), ceil_mode=False, **attrs)
        sketch = Stencil(Group("pool", b.build([b.add("permute", y, dims=dims)])), H100)
        program = sketch.emit(next(iter(sketch.defaults())))
        requests.append(program.grid[0] * sketch.block_work(program).requests)
    assert requests == [0, 2 * 16 * 16 * 32]


def test_a_block_of_mobilenet_is_two_kernels() -> None:
    block = nn.Sequential(
        nn.Conv2d(32, 32, 3, 1, 1, groups=32, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 64, 1, bias=False),
        nn.BatchNorm2d(64),
    )
    graph = gtco.capture(block.eval().half(), (torch.randn(1, 32, 14, 14).half(),))
    fused = gtco.fuse(graph)
    kinds = [derive(group, group.name.split("_")[0], H100).sketches for group in fused]
    assert [sketches[0].family for sketches in kinds] == ["stencil", "gemm"]


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.reduce = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return x + self.reduce(F.gelu(self.expand(y)))


@pytest.mark.compiler
def test_a_block_of_convnext_is_three_kernels() -> None:
    block, x = ConvNeXtBlock(48).eval(), torch.randn(2, 5, 6, 48)
    groups = fused(block, tuple(x.shape))
    assert groups[0] == ["depthwise_conv", "add", "row_stats"] and len(groups) == 3
    block.float()
    compiled = gtco.compile(block, (x,), target="host")
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-4)


class Projections(nn.Module):
    """What attention of CvT reads: convolutions of the pixels, each behind the class token."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, stride, 1, groups=channels) for stride in (1, 2, 2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        token, pixels = x.split([1, x.shape[1] - 1], 1)
        side = int(pixels.shape[1] ** 0.5)
        image = pixels.transpose(1, 2).unflatten(2, (side, side))
        rows = (conv(image).flatten(2).transpose(1, 2) for conv in self.convs)
        return tuple(torch.cat((token, row), 1) for row in rows)


class Skip(nn.Module):
    """A resized image beside another, which a convolution reads; `shown` returns the former as
    well."""

    def __init__(self, shown: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 16, 1) for _ in range(3))
        self.last = nn.Conv2d(32, 8, 3)
        self.shown = shown

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        small, large = self.convs[0](x), self.convs[1](y)
        up = F.interpolate(small, scale_factor=2.0)
        both = torch.cat((up, large), 1)
        result = self.last(both)
        return (result, both, up) if self.shown else (result, both)


def fused(module: nn.Module, *shapes: tuple[int, ...]) -> list[list[str]]:
    """The ops of each group."""
    graph = gtco.capture(module.eval().half(), tuple(torch.randn(*s).half() for s in shapes))
    return [[node.op for node in group.compute] for group in gtco.fuse(graph)]


def test_the_projections_of_cvt_are_one_kernel() -> None:
    (group,) = fused(Projections(32), (1, 197, 32))
    assert sorted(group) == ["add"] * 3 + ["concat"] * 3 + ["depthwise_conv"] * 3


@pytest.mark.parametrize("shown", [False, True])
def test_a_resize_stores_beside_its_skip(shown: bool) -> None:
    groups = fused(Skip(shown), (1, 8, 6, 6), (1, 8, 12, 12))
    assert ["resize", "concat"] in groups


def test_a_concat_of_what_is_computed_needs_its_stencil() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 4, 6, 8), torch.float16))
    given = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "ceil_mode": False}
    y = b.add("relu", b.add("max_pool", x, dilation=(1, 1), **given))
    graph = b.build([b.add("concat", y, dim=3)])
    assert explain(graph, graph.nodes) is None
    reason = explain(graph, graph.nodes[1:])
    assert reason is not None and reason.startswith("concat reads stored values only")


def test_two_results_of_one_concat_are_refused() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 4, 6, 8), torch.float16))
    given = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "ceil_mode": False}
    large = b.add("max_pool", x, dilation=(1, 1), **given)
    mean = b.add("avg_pool", x, count_padding=True, divisor=None, **given)
    graph = b.build([b.add("concat", large, mean, dim=3)])
    assert explain(graph, graph.nodes[:2]) is None
    reason = explain(graph, graph.nodes)
    assert reason == "the kernel stores each result of max_pool by itself"
