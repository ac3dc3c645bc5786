"""The sketches of rows on a GPU against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.columnwise import Columnwise
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.codegen.sketches.topk import TopK
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import column_groups, tile_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", tile_groups.ROWWISE)
def test_rowwise_matches_fp64(case: str) -> None:
    group = tile_groups.ROWWISE[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = Rowwise(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"


@pytest.mark.parametrize("case", column_groups.COLUMNWISE)
def test_columnwise_matches_fp64(case: str) -> None:
    group = column_groups.COLUMNWISE[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = Columnwise(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"


@pytest.mark.parametrize("case", tile_groups.TOPK)
def test_topk_is_in_order_of_places(case: str) -> None:
    group = tile_groups.TOPK[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = TopK(group, target_of_capability(*torch.cuda.get_device_capability()))
    for _, program in sketch.legal():
        assert not wrong_outputs(program, group, values, run_group)
