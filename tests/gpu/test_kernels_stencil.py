"""Depthwise convolutions, poolings and resizes on a GPU against fp64, outputs poisoned, twice for
the same bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.resize import Resize
from gtco.codegen.sketches.stencil import Stencil
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import stencil_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", stencil_groups.CASES | stencil_groups.RESIZES)
def test_windows_match_fp64(case: str) -> None:
    kind = Stencil if case in stencil_groups.CASES else Resize
    group = (stencil_groups.CASES | stencil_groups.RESIZES)[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = kind(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"
