"""Running sums through the frontend and on the host build."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.target import TARGETS
from tests import tile_groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler


class Sums(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ODD = torch.randn(3, 5, 33, generator=torch.Generator().manual_seed(1))
ODD[0, 1, 4], ODD[1, 2, 7], ODD[1, 2, 9] = math.nan, math.inf, -math.inf

GENERATED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "the last dimension": (lambda x: x.cumsum(-1), ODD),
    "the first": (lambda x: x.cumsum(0), ODD),
    "in 16 bits": (lambda x: x.cumsum(1) / 3, ODD.half()),
    "of truths, as floats": (lambda x: (x > 0).cumsum(2, dtype=torch.float32), ODD),
    "a long row with its readers": (lambda x: (x + 1).cumsum(1).relu(), ODD.abs().reshape(1, -1)),
    "more than a block holds": (lambda x: x.cumsum(1), torch.rand(2, 20_000)),
}


@pytest.mark.parametrize("case", GENERATED)
def test_sums_of_floats_are_generated(case: str) -> None:
    function, x = GENERATED[case]
    compiled = gtco.compile(Sums(function), (x,), target="host", fallback="error")
    found, right = compiled(x), function(x)
    assert found.dtype == right.dtype
    slack = 4e-3 if right.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(found, right, rtol=slack, atol=slack, equal_nan=True)


def test_sums_of_integers_stay_torchs() -> None:
    model, x = Sums(lambda x: (x > 0).cumsum(1)), ODD
    with pytest.raises(gtco.FallbackError, match="cumsum"):
        gtco.compile(model, (x,), target="host", fallback="error")
    assert torch.equal(gtco.compile(model, (x,), target="host")(x), model(x))


FAULTS = {
    "none": ("", ""),
    "lanes before this one left out": ("& offset) ahead += other;", "& offset) {}"),
    "earlier steps left out": ("    before += total;\n", ""),
    "earlier warps left out": ("if (w == row_warp_) ahead += total;", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    group = tile_groups.ROWWISE["cumsum_long"]()
    schedule = {"lanes": 32, "row_warps": 1, "rows_first": 0, "warps_per_row": 4}
    program = Rowwise(group, TARGETS["sm_90a"]).emit(schedule)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)
