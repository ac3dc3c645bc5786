"""Every GEMM sketch at odd shapes against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.cost_model.judge import Judge, random_values
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import gated_groups, groups, int8_groups
from tests.kernel_checks import sample

pytestmark = pytest.mark.gpu


CASES = {
    **groups.GEMM_CASES,
    **groups.SCALED_CASES,
    **groups.CONV_CASES,
    **groups.GROUPED_CASES,
    **groups.JOINED_CASES,
    **int8_groups.LINEARS,
    **int8_groups.CONVOLUTIONS,
    "int8_many_rows": lambda: int8_groups.linear(3001, 1280, 768, torch.float16),
    "int8_many_residuals": lambda: int8_groups.linear(
        9001, 64, 256, torch.float16, residual=torch.int8
    ),
    **{f"gated_{name}": make for name, make in gated_groups.CASES.items()},
    "fc1_one_row": lambda: groups.norm_linear(1, 768, 3072, torch.float16, gelu=True),
    "fc2_one_row": lambda: groups.residual_linear(1, 3072, 768, torch.float16),
    "fc2_few_rows": lambda: groups.residual_linear(8, 5120, 1280, torch.bfloat16),
    "fc1_many_rows": lambda: groups.norm_linear(1576, 768, 3072, torch.float16, gelu=True),
    "fc2_many_rows": lambda: groups.residual_linear(3001, 1280, 768, torch.bfloat16),
    "gated_many_rows": lambda: gated_groups.gated(3001, 320, 1280, torch.float16, act="gelu"),
    "bmm_many_rows": lambda: groups.batched_matmul(4, 1000, 520, 1032, torch.float16),
    "joined_many_rows": lambda: groups.joined((20000,), (64, 72, 8), 128, torch.float16),
    "joined_conv_many_rows": lambda: groups.joined(
        (1, 160, 150), (64, 40), 64, torch.bfloat16, (3, 3)
    ),
}
"""The last six have several tiles for each multiprocessor."""


@pytest.mark.parametrize("case", CASES)
def test_gemm_matches_fp64(case: str) -> None:
    group = CASES[case]()
    graph = group.graph
    values = random_values(group, torch.device("cuda", torch.cuda.current_device()), seed=1)
    judge = Judge(group, values)
    target = target_of_capability(*torch.cuda.get_device_capability())
    sketches = derive(group, "gemm", target).sketches
    assert sketches
    for sketch in sketches:
        for program in sample(sketch, 4):
            where = f"{program.sketch} {dict(program.schedule)}"
            first = run_group(program, group, values)
            again = run_group(program, group, values)
            for name in graph.outputs:
                assert torch.equal(first[name], again[name]), f"{where}: bits of %{name} differ"
            assert not judge(first), where
