"""fp32 as three products of tf32 on a GPU: as accurate as torch's fp32."""

from __future__ import annotations

import pytest
import torch

from gtco.check import BOUNDS
from gtco.codegen.rules import derive
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import attention_groups, groups
from tests.exact_products import CASES, F32, INPUTS, error
from tests.kernel_checks import inputs_of, sample

pytestmark = pytest.mark.gpu

GEMMS = {
    **CASES,
    "longer_sums": lambda: groups.plain_linear(64, 8192, 64, F32),
    "fc2": lambda: groups.residual_linear(197, 3072, 768, F32, stats=False),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("case", GEMMS)
def test_products_are_as_accurate_as_torch(case: str, inputs: str) -> None:
    group = GEMMS[case]()
    values = inputs_of(group, device="cuda")
    values["x"] = INPUTS[inputs](values["x"])
    eager = error(group, values)
    target = target_of_capability(*torch.cuda.get_device_capability())
    for sketch in derive(group, "gemm", target).sketches:
        for program in sample(sketch, 2):
            output = run_group(program, group, values)[group.graph.outputs[0]]
            where = f"{program.sketch} {dict(program.schedule)}"
            assert error(group, values, output) <= BOUNDS[F32].multiple * eager, where


@pytest.mark.parametrize("inputs", ["as_drawn", "large_mean", "outliers"])
def test_attention_is_as_accurate_as_torch(inputs: str) -> None:
    group = attention_groups.cross((2,), 197, 197, 64, dtype=F32)
    values = inputs_of(group, device="cuda")
    for name in "kv":
        values[name] = INPUTS[inputs](values[name])
    eager = error(group, values)
    target = target_of_capability(*torch.cuda.get_device_capability())
    for sketch in derive(group, "attention", target).sketches:
        for program in sample(sketch, 2):
            output = run_group(program, group, values)[group.graph.outputs[0]]
            where = f"{program.sketch} {dict(program.schedule)}"
            assert error(group, values, output) <= BOUNDS[F32].multiple * eager, where
