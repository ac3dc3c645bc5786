"""Depthwise convolutions and poolings: right at every border, captured, fused, refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sketches.stencil import Stencil
from gtco.passes import run_pipeline
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import stencil_groups
from tests.kernel_checks import compile_for_all, inputs_of, wrong_outputs
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
    for case in ("depthwise_7x7", "max_3x3", "avg_ceil"):
        group = stencil_groups.CASES[case]()
        assert not list(compile_for_all(lambda target, group=group: Stencil(group, target), 2))


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
