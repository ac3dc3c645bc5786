"""Groups that begin to read further on, on a GPU."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.passes.legality import family
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests.kernel_checks import inputs_of, sample, wrong_outputs
from tests.origin_groups import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_right_in_every_schedule(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group, seed=1, device="cuda")
    sketches = derive(
        group, family(group), target_of_capability(*torch.cuda.get_device_capability())
    ).sketches
    assert sketches
    for sketch in sketches:
        for program in sample(sketch, 2):
            assert not wrong_outputs(program, group, values, run_group)
