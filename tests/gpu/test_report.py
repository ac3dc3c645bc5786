"""`gtco report` on a GPU: times are measured and groups are checked."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gtco.benchmarking.answers import INPUT_KINDS
from gtco.benchmarking.build_facts import MEASURED, build_facts
from gtco.compiler import make_plan
from gtco.locate import Located
from gtco.options import Options
from gtco.reporting.page import page

pytestmark = pytest.mark.gpu


def test_a_build_on_a_gpu_is_timed_and_checked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512))
    x = torch.randn(64, 512, device="cuda").half()
    with torch.no_grad():
        plan, captured = make_plan(model.eval().cuda().half(), (x,), {}, Options())
    by_graph = build_facts("small", plan, captured, "test").answers
    source = Located("small", model, (x,), {})
    build = build_facts("small", plan, captured, "test", source=source)
    assert len(build.answers) == len(by_graph) == len(INPUT_KINDS)
    assert all(each.judged.ok and each.judged.limit for each in (*build.answers, *by_graph))
    moved = replace(source, module=copy.deepcopy(model).cpu(), args=(x.cpu(),))
    assert not build_facts("small", plan, captured, "test", source=moved).wrong
    assert build.device == torch.cuda.get_device_name()
    assert build.is_measured and build.clock == MEASURED
    assert all(each.measured_us is not None and each.measured_us > 0 for each in build.launches)
    assert all(each.error is not None and each.error.ok for each in build.launches)
    assert build.total_us == build.times["back to back"] > 0
    assert set(build.times) == {
        "back to back",
        "synchronised p50",
        "synchronised p90",
        "synchronised p99",
    }
    assert "back to back, measured" in page([build])
