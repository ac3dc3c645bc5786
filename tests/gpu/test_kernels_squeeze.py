"""Gates of squeeze-and-excitation on a GPU against fp64, outputs poisoned, twice for the same
bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.squeeze import Squeeze
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import squeeze_groups
from tests.kernel_checks import inputs_of, wrong_outputs

pytestmark = pytest.mark.gpu

LARGE = {
    "se_resnet9_64": lambda: squeeze_groups.gate((128, 16, 16, 64), 4),
    "se_resnet9_512": lambda: squeeze_groups.gate((128, 2, 2, 512), 32),
    "efficientnet_32": lambda: squeeze_groups.gate((1, 112, 112, 32), 8, silu=True),
    "efficientnet_1152": lambda: squeeze_groups.gate((1, 7, 7, 1152), 48, silu=True),
}


@pytest.mark.parametrize("case", squeeze_groups.CASES | LARGE)
def test_gates_match_fp64(case: str) -> None:
    group = (squeeze_groups.CASES | LARGE)[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = Squeeze(group, target_of_capability(*torch.cuda.get_device_capability()))
    for _, program in sketch.legal():
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"
