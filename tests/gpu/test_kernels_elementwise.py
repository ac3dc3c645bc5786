"""The elementwise sketch on a GPU against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.elementwise import Elementwise
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import tile_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", tile_groups.ELEMENTWISE)
def test_elementwise_matches_fp64(case: str) -> None:
    group = tile_groups.ELEMENTWISE[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = Elementwise(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.float64))
def test_nan_goes_through(dtype: torch.dtype) -> None:
    group = tile_groups.nans(dtype)
    values = inputs_of(group, device="cuda")
    values["x"][0] = float("nan")
    values["y"][1] = float("nan")
    sketch = Elementwise(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 2):
        assert not wrong_outputs(program, group, values, run_group)
