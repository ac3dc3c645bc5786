"""Running sums and products through the frontend and on the host build."""

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


class Running(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ODD = torch.randn(3, 5, 33, generator=torch.Generator().manual_seed(1))
ODD[0, 1, 4], ODD[1, 2, 7], ODD[1, 2, 9] = math.nan, math.inf, -math.inf
NEAR_ONE = 1 + torch.randn(2, 20_000, generator=torch.Generator().manual_seed(2)) / 200
NEAR_ONE[:, ::777] *= -1

GENERATED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "the last dimension": (lambda x: x.cumsum(-1), ODD),
    "the first": (lambda x: x.cumsum(0), ODD),
    "in 16 bits": (lambda x: x.cumsum(1) / 3, ODD.half()),
    "of truths, as floats": (lambda x: (x > 0).cumsum(2, dtype=torch.float32), ODD),
    "a long row with its readers": (lambda x: (x + 1).cumsum(1).relu(), ODD.abs().reshape(1, -1)),
    "more than a block holds": (lambda x: x.cumsum(1), torch.rand(2, 20_000)),
    "products": (lambda x: x.cumprod(-1), ODD),
    "of the first dimension": (lambda x: x.cumprod(0), ODD),
    "of one element": (lambda x: x.cumprod(1), ODD[:, :1]),
    "of the middle one, in 16 bits": (lambda x: x.cumprod(1) / 3, ODD.half()),
    "in bfloat16, as floats": (lambda x: x.cumprod(2, dtype=torch.float32), ODD.bfloat16()),
    "in 64 bits": (lambda x: x.cumprod(2), ODD.double()),
    "of zeros and signs": (lambda x: x.cumprod(2), ODD.round().clamp(-1, 1)),
    "a long row of products": (lambda x: (x.cumprod(1) * 2).relu(), NEAR_ONE[:, :999]),
    "more products than a block holds": (lambda x: x.cumprod(1), NEAR_ONE),
    "of what is joined": (
        lambda x: torch.cat([torch.ones_like(x[..., :1]), 1 - x], -1).cumprod(-1)[..., :-1],
        ODD.sigmoid(),
    ),
}


@pytest.mark.parametrize("case", GENERATED)
def test_what_runs_over_floats_is_generated(case: str) -> None:
    function, x = GENERATED[case]
    compiled = gtco.compile(Running(function), (x,), target="host", fallback="error")
    found, right = compiled(x), function(x)
    assert found.dtype == right.dtype
    slack = {torch.float16: 4e-3, torch.float64: 1e-12}.get(right.dtype, 1e-4)
    torch.testing.assert_close(found, right, rtol=slack, atol=slack, equal_nan=True)


@pytest.mark.parametrize("op", ("cumsum", "cumprod"))
def test_integers_stay_torchs(op: str) -> None:
    model, x = Running(lambda x: getattr((x > -2).long(), op)(1)), ODD
    with pytest.raises(gtco.FallbackError, match=op):
        gtco.compile(model, (x,), target="host", fallback="error")
    assert torch.equal(gtco.compile(model, (x,), target="host")(x), model(x))


FAULTS = {
    "none": ("", ""),
    "lanes before this one left out": ("& offset) ahead = combine(ahead, other);", "& offset) {}"),
    "earlier steps left out": ("    before = combine(before, total);\n", ""),
    "earlier warps left out": ("if (w == row_warp_) ahead = combine(ahead, total);", ""),
}


@pytest.mark.parametrize("op", ("cumsum", "cumprod"))
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, op: str) -> None:
    group = tile_groups.cumsum(2, 4099, dim=1, dtype=torch.bfloat16, op=op)
    schedule = {"lanes": 32, "row_warps": 1, "rows_first": 0, "warps_per_row": 4}
    program = Rowwise(group, TARGETS["sm_90a"]).emit(schedule)
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)
