"""Linears back to back on a GPU against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.ir.graph import Group
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests.back_to_back_groups import BF16, CASES, F16, bottleneck, perceptron
from tests.kernel_checks import inputs_of, wrong_outputs, wrong_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs wgmma",
    ),
]

LARGE: dict[str, Callable[[], Group]] = {
    "ResNet-50's first stage, batch 8": lambda: bottleneck(25088, (64, 256, 64), F16),
    "ResNet-50's second stage, batch 16": lambda: bottleneck(12544, (128, 512, 128), F16),
    "Swin-T's first stage, batch 8": lambda: perceptron(25088, (96, 384, 96), BF16),
}


@pytest.mark.parametrize("case", CASES | LARGE)
def test_linears_back_to_back_match_fp64(case: str) -> None:
    group = (CASES | LARGE)[case]()
    target = target_of_capability(*torch.cuda.get_device_capability())
    if case in CASES:  # whose few rows leave a GPU idle: two blocks walk over all of them
        target = replace(target, sm_count=2)
    values = inputs_of(group, seed=1, device="cuda")
    for _, program in GemmBackToBack(group, target).legal():
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        assert not wrong_statistics(group, first)
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"
