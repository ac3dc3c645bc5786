"""Every sketch at extents of 1, 2, 3, 5 and 7 against fp64, outputs poisoned.

`--thorough` adds what is not in `QUICK`, and six random schedules of each.
"""

from __future__ import annotations

import pytest
import torch

from gtco.cost_model.judge import Judge, random_values
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import degenerate_groups as groups
from tests.kernel_checks import sample

pytestmark = pytest.mark.gpu

SLACK = 1e-2
"""Of an output's size: what is judged has few elements, and a fault makes an error of its size."""


@pytest.mark.parametrize("case", groups.CASES)
def test_right_in_every_sketch(case: str, request: pytest.FixtureRequest) -> None:
    thorough = request.config.getoption("--thorough")
    if case not in groups.QUICK and not thorough:
        pytest.skip("pytest --thorough runs it")
    target = target_of_capability(*torch.cuda.get_device_capability())
    group = groups.CASES[case]()
    values = random_values(group, torch.device("cuda", torch.cuda.current_device()), seed=1)
    judge = Judge(group, values, SLACK)
    for sketch in groups.derived(group, target):
        for program in sample(sketch, 6 if thorough else 1):
            where = f"{program.sketch} {dict(program.schedule)}"
            assert not judge(run_group(program, group, values)), where
