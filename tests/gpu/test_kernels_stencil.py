"""Depthwise convolutions, poolings, resizes and samplings on a GPU against fp64, outputs poisoned,
twice for the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.grid_sample import GridSample
from gtco.codegen.sketches.resize import Resize
from gtco.codegen.sketches.stencil import Stencil
from gtco.ir.graph import Group
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import stencil_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.gpu


CASES = [
    (kind, make)
    for kind, cases in (
        (Stencil, stencil_groups.CASES),
        (Resize, stencil_groups.RESIZES),
        (GridSample, stencil_groups.SAMPLES),
    )
    for make in cases.values()
]
NAMES = [*stencil_groups.CASES, *stencil_groups.RESIZES, *stencil_groups.SAMPLES]


@pytest.mark.parametrize(("kind", "make"), CASES, ids=NAMES)
def test_windows_match_fp64(kind: type[Sketch], make: Callable[[], Group]) -> None:
    group = make()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = kind(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"
