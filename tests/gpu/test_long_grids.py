"""Grids that would be longer along y or z than CUDA launches, on a GPU against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.program import LARGEST_GRID
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.ir.graph import Group
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import attention_groups, groups
from tests.kernel_checks import first_default, inputs_of, wrong_outputs

pytestmark = pytest.mark.gpu

MANY = LARGEST_GRID[1] + 37
CASES: dict[str, tuple[type[Sketch], Callable[[], Group], dict[str, int]]] = {
    "heads": (Attention, lambda: attention_groups.cross((MANY,), 20, 24, 32), {}),
    "heads of wgmma": (AttentionWgmma, lambda: attention_groups.cross((MANY,), 20, 24, 32), {}),
    "rows": (
        GemmMma, lambda: groups.plain_linear(MANY * 64 - 5, 16, 24, torch.float16),
        {"block_m": 64, "block_n": 64}),
    "products": (
        GemmMma, lambda: groups.batched_matmul(-(-MANY // 2), 20, 24, 40, torch.float16), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_long_axis_lies_along_x(case: str) -> None:
    kind, make, knobs = CASES[case]
    group, target = make(), target_of_capability(*torch.cuda.get_device_capability())
    if kind is AttentionWgmma and not target.has_wgmma:
        pytest.skip(f"{target.arch} has no wgmma")
    sketch = kind(group, target)
    program = sketch.emit(first_default(sketch, **knobs))
    assert program.grid[0] >= MANY and "LONG_AXIS" in program.source
    assert not wrong_outputs(program, group, inputs_of(group, seed=1, device="cuda"), run_group)
