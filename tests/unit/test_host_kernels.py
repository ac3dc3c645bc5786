"""Every sketch of every kernel case on the host build, in two schedules, each with an order of
threads of its own.

The GPU tests run the same cases. `--thorough` adds the largest, six random schedules of each and
eight orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import derive
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import attention_groups, column_groups, groups, origin_groups, tile_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.compiler

CASES: dict[str, Callable[[], Group]] = {
    **tile_groups.ELEMENTWISE,
    **tile_groups.ROWWISE,
    **{f"columns_{name}": make for name, make in column_groups.COLUMNWISE.items()},
    **{f"begins_further_on_{name}": make for name, make in origin_groups.CASES.items()},
    **groups.GEMM_CASES,
    **groups.SCALED_CASES,
    **{f"attention_{name}": make for name, make in attention_groups.CASES.items()},
    **{f"attention_{name}": make for name, make in attention_groups.NARROW_CASES.items()},
}
LARGE = {"qkv", "fc1", "fc1_huge", "fc2", "projection", "patch_16", "attention_vit_384",
         "attention_detr_self", "attention_cvt", "attention_vit_h", "gelu_197",
         "tf32_fc1", "tf32_projection", "fp32_fc1", "fp8_fc1", "fp8_fc2",
         "attention_detr_cross"}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_right_in_every_schedule(case: str, request: pytest.FixtureRequest) -> None:
    thorough = request.config.getoption("--thorough")
    if case in LARGE and not thorough:
        pytest.skip("large: pytest --thorough runs it")
    group = CASES[case]()
    values = inputs_of(group, seed=1)
    sketches = derive(group, family(group), TARGETS["sm_90a"]).sketches
    assert sketches
    for sketch in sketches:
        for at, program in enumerate(sample(sketch, 6 if thorough else 1)):
            for seed in range(8) if thorough else (at,):

                def run(
                    program: KernelProgram,
                    group: Group,
                    values: Mapping[str, Tensor],
                    seed: int = seed,
                ) -> Mapping[str, Tensor]:
                    return run_on_host(program, group, values, seed)

                assert not wrong_outputs(program, group, values, run)
