"""Depthwise convolutions, poolings, resizes and samplings on a GPU against fp64, outputs poisoned,
twice for the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.grid_sample import GridSample
from gtco.codegen.sketches.resize import Resize
from gtco.codegen.sketches.stencil import Stencil
from gtco.codegen.sketches.stencil_tiles import StencilTiles
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.references import grid_sample
from gtco.ir.spec import TensorSpec
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import stencil_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs, wrong_statistics

pytestmark = pytest.mark.gpu


CASES = [
    (kind, make)
    for kind, cases in (
        (Stencil, stencil_groups.CASES | stencil_groups.STATISTICS),
        (StencilTiles, stencil_groups.TILES),
        (Resize, stencil_groups.RESIZES),
        (GridSample, stencil_groups.SAMPLES),
    )
    for make in cases.values()
]
NAMES = [
    *stencil_groups.CASES,
    *stencil_groups.STATISTICS,
    *(f"tiles, {name}" for name in stencil_groups.TILES),
    *stencil_groups.RESIZES,
    *stencil_groups.SAMPLES,
]


@pytest.mark.parametrize(("kind", "make"), CASES, ids=NAMES)
def test_windows_match_fp64(kind: type[Sketch], make: Callable[[], Group]) -> None:
    group = make()
    values = inputs_of(group, seed=1, device="cuda")
    sketch = kind(group, target_of_capability(*torch.cuda.get_device_capability()))
    for program in sample(sketch, 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        assert not wrong_statistics(group, first)
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"


@pytest.mark.parametrize(("mode", "border", "align"), stencil_groups.KINDS)
@pytest.mark.parametrize("size", [(4, 8), (1, 2)])
def test_points_that_are_no_numbers_are_torchs(
    mode: str, border: bool, align: bool, size: tuple[int, int]
) -> None:
    if align and size == (4, 8):
        size = 5, 9  # so that points are exact, and no weight is nearly zero beside an infinity
    image = torch.randn(1, 3, *size, device="cuda")
    image[0, 1, 0, 1], image[0, 2, -1, 0] = float("nan"), float("inf")
    grid = stencil_groups.hard_points(*size, align).cuda()
    padding = "border" if border else "zeros"
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's has other answers where no number is
        eager = F.grid_sample(image, grid, mode, padding, align).permute(0, 2, 3, 1)
    given = {"mode": mode, "border": border, "align_corners": align}
    mine = grid_sample(image.permute(0, 2, 3, 1), grid, **given)
    torch.testing.assert_close(mine, eager, equal_nan=True)
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, *size, 3), torch.float32))
    points = b.input("grid", TensorSpec(tuple(grid.shape), torch.float32))
    group = Group("points", b.build([b.add("grid_sample", x, points, **given)]))
    target = target_of_capability(*torch.cuda.get_device_capability())
    (program, *_) = sample(GridSample(group, target), 0)
    values = {"x": image.permute(0, 2, 3, 1).contiguous(), "grid": grid}
    (made,) = run_group(program, group, values).values()
    torch.testing.assert_close(made, eager, equal_nan=True)
