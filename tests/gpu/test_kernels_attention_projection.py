"""Attention with its projection on a GPU against fp64, outputs poisoned, the same bits twice."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.attention_projection import AttentionProjection
from gtco.runtime.run import run_group
from gtco.target import TARGETS
from tests import projection_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs clusters of sm_90a",
    ),
]


@pytest.mark.parametrize("case", {**projection_groups.SMALL, **projection_groups.LARGE})
@pytest.mark.parametrize("mean", (0.0, 20.0))
def test_attention_projection_matches_fp64(case: str, mean: float) -> None:
    group = {**projection_groups.SMALL, **projection_groups.LARGE}[case]()
    values = inputs_of(group, seed=1, device="cuda")
    for name in values.keys() & {"qkv", "q", "k", "v"}:
        values[name] = (values[name].float() + mean).to(values[name].dtype)
    for program in sample(AttentionProjection(group, TARGETS["sm_90a"]), 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), f"%{name} has other bits"
