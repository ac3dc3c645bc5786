"""Convolutions apply the norms of groups ahead of them, where their kernels do so faster."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gtco
from experiments.models.transformers_zoo import randomize
from experiments.models.volumes import ScanUNet
from gtco.compiler import make_plan
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes import applied_norms, box_moments
from gtco.passes.applied_norms import apply_norms
from gtco.passes.prologues import prologue_of
from tests.pass_checks import check, ops, random

F16, F32 = torch.float16, torch.float32
IMAGE = (2, 6, 8, 16)
Reads = Callable[[GraphBuilder, str], list[str]]


@pytest.fixture(autouse=True)
def _small_images_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied_norms, "LARGE_BYTES", 1)


def no_refusal(group: Group) -> None:
    return None


def by_launches(group: Group) -> float:
    """As if each kernel took as long."""
    return 30.0


always = partial(apply_norms, refusal=no_refusal, price=by_launches)


def conv(b: GraphBuilder, x: str, columns: int = 24, stride: int = 1) -> str:
    w = b.constant("w", random(columns, 3, 3, b.specs[x].sizes[-1], dtype=b.specs[x].dtype))
    return b.add("conv", x, w, stride=(stride, stride), before=(1, 1), after=(1, 1),
                 dilation=(1, 1))  # fmt: skip


def normed(
    reads: Reads,
    *,
    groups: int = 16,
    chunks: int = 3,
    affine: int = 2,
    dtype: torch.dtype = F16,
    eps: float = 1e-3,
) -> Graph:
    """What reads leaky_relu(group_norm(x) g + b) in two kernels, which makes of it what it does."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(IMAGE, dtype))
    numbers = [
        b.constant(name, random(16, dtype=dtype, seed=at) + 2) for at, name in enumerate("gb")
    ]
    stats = b.add("group_stats", x, groups=groups, chunks=chunks)
    y = b.add("normalize_groups", x, stats, *numbers[:affine], eps=eps)
    y = b.add("where", b.add("gt", y, other=0.0), y, b.add("mul", y, other=0.125))
    return b.build(reads(b, y))


def args_of(graph: Graph) -> list[Tensor]:
    """Of large means, so that what cancels shows."""
    return [random(*spec.sizes, dtype=spec.dtype, seed=7) + 3 for spec in graph.inputs.values()]


def linear(b: GraphBuilder, x: str, *bias: str) -> str:
    depth = b.specs[x].sizes[-1]
    return b.add("linear", x, b.constant("v", random(8, depth, dtype=b.specs[x].dtype)), *bias)


def skip(b: GraphBuilder, y: str) -> list[str]:
    """A strided convolution, and one of a concat."""
    other = b.input("other", TensorSpec((*IMAGE[:-1], 8), F16))
    return [conv(b, y, stride=2), conv(b, b.add("concat", other, y, dim=3))]


READS: dict[str, tuple[Reads, int]] = {
    "one": (lambda b, y: [conv(b, y)], 1),
    "two": (lambda b, y: [conv(b, y), conv(b, y, 32, stride=2)], 2),
    "a skip": (skip, 2),
    "a linear of its pixels": (lambda b, y: [conv(b, y), linear(b, y)], 2),
    "a linear with a bias": (lambda b, y: [linear(b, y, b.constant("v", random(8, dtype=F16)))], 1),
}


@pytest.mark.parametrize("groups", [16, 4, 1])
@pytest.mark.parametrize("case", READS)
def test_the_same_image(case: str, groups: int) -> None:
    reads, count = READS[case]
    made = normed(reads, groups=groups)
    result = check(always, made, args_of(made))
    found = ops(result)
    assert found["scale_shift"] == count and found["normalize_groups"] == 0
    assert found["mean"] == 2 and found["group_stats"] == 1  # the numbers are made once
    convs = [node for node in result.nodes if node.op == "conv"]
    assert all(prologue_of(result, node) is not None for node in convs)


def test_norms_one_behind_another() -> None:
    """Of convolutions without biases, which are made again themselves."""

    def reads(b: GraphBuilder, y: str) -> list[str]:
        z = conv(b, y, 16)
        stats = b.add("group_stats", z, groups=8, chunks=3)
        return [conv(b, b.add("relu", b.add("normalize_groups", z, stats, eps=1e-3)))]

    made = normed(reads)
    result = check(always, made, args_of(made))
    assert ops(result)["scale_shift"] == 2 and "normalize_groups" not in ops(result)


def test_a_concat_of_two_norms_stays() -> None:
    def reads(b: GraphBuilder, y: str) -> list[str]:
        z = b.input("z", TensorSpec(IMAGE, F16))
        stats = b.add("group_stats", z, groups=16, chunks=3)
        z = b.add("normalize_groups", z, stats, eps=1e-3)
        return [conv(b, b.add("concat", y, z, dim=3))]

    made = normed(reads)
    assert ops(always(made)) == ops(made)


@pytest.mark.parametrize("affine", [0, 1])
def test_norms_without_weights(affine: int) -> None:
    made = normed(READS["one"][0], affine=affine)
    check(always, made, args_of(made))


def test_as_close_as_the_norm_was() -> None:
    """Where an image's mean is 300 of its deviations, in fp32."""
    made = normed(READS["one"][0])
    args = [random(*IMAGE, dtype=F16) * 0.25 + 80]
    exact = interpret(made, args, dtype=torch.float64)[0]
    before, after = (
        (interpret(graph, args, dtype=F32)[0] - exact).abs().max() for graph in (made, always(made))
    )
    assert after <= 2 * before + 1e-3 * exact.abs().max()


STAYS: dict[str, Reads] = {
    "rows of tokens": lambda b, y: [linear(b, b.add("reshape", y, shape=(2, 48, 16)))],
    "weights that are given": lambda b, y: [
        conv(b, y), b.add("linear", y, b.input("v", TensorSpec((8, 16), F16)))
    ],
    "it is returned": lambda b, y: [conv(b, y), y],
    "others read the concat": lambda b, y: [
        conv(b, c := b.add("concat", y, b.input("o", TensorSpec((*IMAGE[:-1], 8), F16)), dim=3)),
        b.add("relu", c),
    ],
    "both pieces of a concat": lambda b, y: [conv(b, b.add("concat", y, y, dim=3))],
    "a residual": lambda b, y: [conv(b, b.add("add", y, b.input("r", b.specs[y])))],
}  # fmt: skip


@pytest.mark.parametrize("case", STAYS)
def test_what_stays(case: str) -> None:
    made = normed(STAYS[case])
    assert ops(always(made)) == ops(made)


def test_floats_stay() -> None:
    made = normed(READS["one"][0], dtype=F32)
    assert "scale_shift" not in ops(always(made))


def test_where_no_kernel_applies_it_or_none_gains() -> None:
    made = normed(READS["two"][0])
    refused = partial(apply_norms, refusal=lambda group: "none does", price=by_launches)
    assert ops(refused(made)) == ops(made)

    def dear(group: Group) -> float:
        return 90.0 if any(node.op == "scale_shift" for node in group.compute) else 30.0

    assert ops(apply_norms(made, refusal=no_refusal, price=dear)) == ops(made)
    assert ops(apply_norms(made, refusal=no_refusal, price=lambda group: None)) == ops(made)


def test_small_images_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied_norms, "LARGE_BYTES", 2**23)
    made = normed(READS["one"][0])
    assert ops(always(made)) == ops(made)


class Scan(nn.Module):
    """A level of a U-Net and the way down from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv3d(depth, 32, 3, padding=1) for depth in (8, 32))
        self.norms = nn.ModuleList(nn.InstanceNorm3d(32, affine=True) for _ in range(2))
        self.down, self.joined = nn.Conv3d(32, 32, 3, 2, 1), nn.Conv3d(64, 32, 3, padding=1)
        self.other = nn.Conv3d(32, 32, 1)  # leaves channels last

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = nn.functional.leaky_relu(self.norms[0](self.first(x)), 0.01)
        x = nn.functional.leaky_relu(self.norms[1](self.second(x)), 0.01)
        return self.down(x), self.joined(torch.cat([self.other(y), x], 1))


@pytest.mark.compiler
def test_a_whole_scan_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A U-Net of scans on the host build, whose statistics come from the convolutions as well."""
    monkeypatch.setattr(box_moments, "LARGE_BYTES", 1)
    monkeypatch.setattr(box_moments, "BEYOND_L2", 1)
    monkeypatch.setattr(applied_norms, "NUMBERS_US", -100.0)
    split = sys.modules["gtco.passes.split_group_norm"]
    for name, value in {"PART": 16, "MAX_COLUMNS": 16, "MOST_STATS": 64}.items():
        monkeypatch.setattr(split, name, value)
    torch.manual_seed(0)
    model, x = ScanUNet((32, 64)).eval(), torch.randn(1, 1, 8, 16, 16)
    randomize(model)
    given = copy.deepcopy(model).half()
    options = Options.of(target="sm_90a")
    plan, _ = make_plan(given, (x.half(),), {}, options)
    kernels = [{node.op for node in launch.group.compute} for launch in plan.launches]
    assert sum({"scale_shift", "conv", "box_moments"} <= each for each in kernels) == 2
    compiled = gtco.compile(given, (x.half(),), target="host", fallback="error")
    with torch.no_grad():
        exact = copy.deepcopy(given).double()(x.half().double())
        found, eager = compiled(x.half()).double(), given(x.half()).double()
    assert (found - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_plan_has_them_in_the_convolutions(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied_norms, "LARGE_BYTES", 2**23)
    x, y = (torch.randn(1, depth, 32, 128, 128).half() for depth in (8, 32))
    plan, _ = make_plan(Scan().eval().half(), (x, y), {}, Options.of(target=arch))
    kernels = [[node.op for node in launch.group.compute] for launch in plan.launches]
    assert all(launch.program is not None for launch in plan.launches)
    applied = [kernel for kernel in kernels if "scale_shift" in kernel]
    assert len(applied) == 3 and all("conv" in kernel for kernel in applied)
    assert not any("normalize_groups" in kernel for kernel in kernels)
