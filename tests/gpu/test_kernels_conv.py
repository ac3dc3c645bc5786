"""Convolutions of patches on a GPU: random schedules with frames among them, many patches a block,
outputs poisoned, twice for the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gtco.codegen.sampler import Sampler
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_patches import ConvPatches
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.cost_model.judge import Judge, random_values
from gtco.ir.graph import Group
from gtco.runtime.run import run_group
from gtco.target import Target, target_of_capability
from tests import groups, int8_groups
from tests.kernel_checks import wrong_statistics

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kind", [ConvMma, ConvWgmma])]

F16, BF16, F32 = groups.F16, groups.BF16, groups.F32
SCHEDULES = 8
LARGE = {
    "volume": lambda: groups.convolution((1, 16, 64, 66, 32), 32, (3, 3, 3), F16),
    "volume_of_one_chunk": lambda: groups.convolution((2, 9, 33, 50, 8), 40, (3, 3, 3), BF16),
    "volume_strides": lambda: groups.convolution(
        (1, 17, 40, 42, 24), 48, (3, 3, 3), F16, stride=(2, 2, 2), residual=False
    ),
    "image": lambda: groups.convolution((4, 56, 56, 64), 64, (3, 3), F16),
    "image_strides": lambda: groups.convolution(
        (2, 112, 115, 16), 64, (7, 7), BF16, stride=(2, 3), before=(3, 3)
    ),
    "many_channels": lambda: groups.convolution((2, 28, 28, 200), 136, (3, 3), F16),
    "statistics": lambda: groups.convolution((2, 33, 35, 48), 136, (3, 3), F16, stats=True),
    "groups": lambda: groups.convolution((2, 28, 28, 256), 256, (3, 3), F16, groups=8),
    "tf32": lambda: groups.tf32(groups.convolution((1, 56, 56, 32), 36, (3, 3), F32)),
    "fp32": lambda: groups.convolution((1, 56, 56, 32), 36, (3, 3), F32),
}
"""More patches than blocks that stay, and several waves."""
CASES = {**groups.CONV_CASES, **groups.GROUPED_CASES, **int8_groups.CONVOLUTIONS, **LARGE}


@pytest.fixture
def target() -> Target:
    return target_of_capability(*torch.cuda.get_device_capability())


def values_of(group: Group, device: str = "cuda") -> dict[str, Tensor]:
    return random_values(group, torch.device(device), seed=1)


def check(sketch: ConvPatches, given: Mapping[str, Tensor], count: int) -> None:
    """The first default and `count` random programs are right, twice with the same bits. The judge
    works where the values are."""
    group = sketch.group
    judge = Judge(group, given)
    device = next(iter(given.values())).device
    values = {name: tensor.cuda() for name, tensor in given.items()}
    default = sketch.emit(next(iter(sketch.defaults())))
    drawn = [each.program for each in Sampler((sketch,), 1).random(count)]
    for program in (default, *drawn):
        where = f"{dict(program.schedule)}"
        first = run_group(program, group, values)
        again = run_group(program, group, values)
        for name in group.graph.outputs:
            same = torch.equal(first[name].nan_to_num(), again[name].nan_to_num())
            assert same, f"{where}: bits of %{name} differ"
        assert not judge({name: tensor.to(device) for name, tensor in first.items()}), where
        assert not wrong_statistics(group, first), where


def sketch_of(kind: type[ConvPatches], group: Group, target: Target) -> ConvPatches:
    """The sketch of `group`; skips where it refuses."""
    try:
        return kind(group, target)
    except Illegal as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES)
def test_patches_match_fp64(kind: type[ConvPatches], case: str, target: Target) -> None:
    group = CASES[case]()
    check(sketch_of(kind, group, target), values_of(group), SCHEDULES)


@pytest.mark.parametrize("case", ["conv_3x3", "conv_wide_channels", "conv_3x3x3", "groups_dilated"])
def test_one_multiprocessors_blocks_take_all_patches(
    kind: type[ConvPatches], case: str, target: Target
) -> None:
    """As if there were one: few blocks, each from patch to patch of a small image."""
    group = CASES[case]()
    check(sketch_of(kind, group, replace(target, sm_count=1)), values_of(group), SCHEDULES)


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@pytest.mark.parametrize("kernel", [(3, 3), (3, 3, 3)])
def test_the_tail_of_an_odd_number_of_taps(
    kind: type[ConvPatches], kernel: tuple[int, ...], odd: float, target: Target
) -> None:
    """Beside the last tap, zeros meet zeros: what is no number stays in its own windows. The CPU
    judges, for cuDNN's Winograd would spread it over a tile."""
    image = (1, *(3,) * (len(kernel) - 2), 9, 14, 8)
    group = groups.convolution(image, 24, kernel, F16, residual=False)
    values = values_of(group, "cpu")
    values["x"][(0,) * (len(kernel) + 1)] = odd
    values["x"][..., -1, 3, 2] = odd
    check(sketch_of(kind, group, target), values, SCHEDULES)


def test_images_and_groups_do_not_reach_one_another(
    kind: type[ConvPatches], target: Target
) -> None:
    group = groups.convolution((3, 5, 6, 32), 48, (3, 3), F16, groups=2)
    values = values_of(group, "cpu")
    values["x"][1] = torch.nan
    values["x"][0, ..., 16:] = torch.inf
    check(sketch_of(kind, group, target), values, SCHEDULES)
