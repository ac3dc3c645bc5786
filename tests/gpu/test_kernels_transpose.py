"""The transpose sketch on a GPU against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.transpose import Transpose
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests.kernel_checks import inputs_of, sample, wrong_outputs
from tests.transpose_groups import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_transpose_matches_fp64(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = Transpose(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 3):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), "bits differ"
