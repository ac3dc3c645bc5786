"""Means of boxes that no kernel leaves become those of the whole image again."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gtco.compiler import make_plan
from gtco.ir.graph import Graph, Group
from gtco.options import Options
from gtco.passes import box_means
from gtco.passes.box_means import mean_of_boxes
from gtco.passes.whole_means import whole_means
from gtco.selection import refusal
from gtco.target import TARGETS
from tests.pass_checks import check, ops
from tests.unit.test_passes_box_means import Gate, args_of, depthwise, linear

AMPERE, HOPPER = TARGETS["sm_80"], TARGETS["sm_90a"]


def never(group: Group) -> str:
    return "no kernel leaves any"


def unknown(group: Group) -> None:
    """No price."""


def boxes(graph: Graph) -> int:
    return ops(graph)["box_means"]


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("image", [(2, 56, 56, 8), (3, 7, 8, 8)], ids=["several", "one"])
def test_as_they_were(image: tuple[int, ...], keepdim: bool) -> None:
    made = mean_of_boxes(depthwise(*image, keepdim=keepdim))
    result = check(partial(whole_means, refusal=never, price=unknown), made, args_of(made))
    assert boxes(made) == 1 and boxes(result) == 0 and ops(result)["mean"] == 1


def left(group: Group) -> None:
    """Every kernel leaves its boxes."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_mean_of_one_box_is_a_view(dtype: torch.dtype) -> None:
    made = mean_of_boxes(depthwise(3, 7, 8, 8, dtype=dtype))
    result = check(partial(whole_means, refusal=left, price=unknown), made, args_of(made))
    assert boxes(result) == 1 and (ops(made)["mean"], ops(result)["mean"]) == (1, 0)
    several = mean_of_boxes(depthwise(3, 14, 16, 8, dtype=dtype))
    assert ops(whole_means(several, refusal=left, price=unknown))["mean"] == 1


def test_but_of_a_gate() -> None:
    model, x = Gate(32).eval(), torch.randn(2, 32, 7, 7)
    plan, _ = make_plan(model, (x,), None, Options.of(target="sm_90a"))
    held = [[node.op for node in launch.group.compute] for launch in plan.launches]
    assert ["mean", "linear", "relu", "linear", "sigmoid"] in held


def test_runs_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_means, "LARGE_BYTES", 1)
    made = mean_of_boxes(linear(2, 4, 12, 24, dtype=torch.float32))
    result = check(partial(whole_means, refusal=never, price=unknown), made, args_of(made))
    assert boxes(made) == 1 and boxes(result) == 0


def test_the_sketches_of_the_target_decide() -> None:
    large = mean_of_boxes(linear(8, 64, 64, 64, columns=64))
    narrow = mean_of_boxes(depthwise(2, 28, 28, 12))
    whole = mean_of_boxes(depthwise(2, 28, 28, 32))
    assert boxes(large) == boxes(narrow) == boxes(whole) == 1
    kept = {
        target.arch: [
            boxes(whole_means(graph, refusal=partial(refusal, target=target), price=unknown))
            for graph in (large, narrow, whole)
        ]
        for target in (AMPERE, HOPPER)
    }
    # `gemm_persistent` is of sm_90a, and 12 channels are no runs of 16 bytes.
    assert kept == {"sm_80": [0, 0, 1], "sm_90a": [1, 0, 1]}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("channels", [32, 12])
def test_no_plan_has_means_that_run_with_aten(arch: str, channels: int) -> None:
    model = Gate(channels).eval().half()
    x = torch.randn(2, channels, 28, 28).half()
    plan, _ = make_plan(model, (x,), {}, Options.of(target=arch))
    assert all(launch.program is not None for launch in plan.launches)
