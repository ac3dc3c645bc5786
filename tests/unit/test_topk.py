"""The first elements of rows in order: captured, on the host build, refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.rules import derive
from gtco.codegen.sketches.topk import MOST_KEPT, TopK
from gtco.cost_model.model import roofline_us
from gtco.passes.legality import family
from gtco.passes.slices import push_slices
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import tile_groups
from tests.faults.templates import check_caught, planted, verdicts
from tests.kernel_checks import compile_for_all, inputs_of, wrong_outputs
from tests.pass_checks import captured, check, random

H100 = TARGETS["sm_90a"]


@pytest.mark.compiler
@pytest.mark.parametrize("case", tile_groups.TOPK)
def test_right_on_the_host_build(case: str) -> None:
    group = tile_groups.TOPK[case]()
    sketch = TopK(group, H100)
    schedules = [next(iter(sketch.defaults()))]
    if group.graph.specs["x"].numel < 3000:
        schedules += [{"threads": threads} for threads in (32, 64, 512)]
    for schedule in schedules:
        values = inputs_of(group, seed=schedule["threads"])
        assert not wrong_outputs(sketch.emit(schedule), group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("largest", (True, False))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_what_is_no_number_zeros_and_equal_ones(dtype: torch.dtype, largest: bool) -> None:
    """NaN is the largest, both zeros are one number, and of equal ones the first goes first."""
    group = tile_groups.topk(6, 90, k=60, dtype=dtype, largest=largest)
    x = torch.randn(6, 90, generator=torch.Generator().manual_seed(3)).round().to(dtype)
    x[0, ::7], x[0, 3], x[0, 5] = math.nan, math.inf, -math.inf
    x[1, 4::9] = -x[1, ::9] * 0.0
    x[2], x[3], x[4] = -0.0, math.nan, -math.inf
    x[5, 1::2] = torch.finfo(dtype).tiny / 8  # is no normal number
    program = TopK(group, H100).emit({"threads": 64})
    values, places = run_on_host(program, group, {"x": x}).values()
    right = x.sort(dim=1, descending=largest, stable=True)
    assert torch.equal(places, right.indices[:, :60])
    torch.testing.assert_close(values, right.values[:, :60], rtol=0, atol=0, equal_nan=True)


@pytest.mark.compiler
def test_extreme_integers() -> None:
    for dtype in (torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        x = torch.tensor([[0, info.max, -1, info.min, 1, info.max, info.min + 1]], dtype=dtype)
        group = tile_groups.topk(1, 7, k=7, dtype=dtype)
        _, places = run_on_host(TopK(group, H100).emit({"threads": 32}), group, {"x": x}).values()
        assert places.tolist() == [[1, 5, 4, 0, 2, 6, 3]]


def test_kernels_compile_without_spills() -> None:
    for case in ("five_of_1000", "smallest_of_ties", "of_a_detector", "read_again"):
        group = tile_groups.TOPK[case]()
        assert not list(compile_for_all(lambda target, group=group: TopK(group, target), 1))


def test_limits_have_names() -> None:
    for group, reason in (
        (tile_groups.topk(1, 300_000, k=3), "a row of 300000 elements, a block has 261120"),
        (tile_groups.topk(1, 9000, k=5000), f"5000 elements of a row, at most {MOST_KEPT}"),
        (tile_groups.topk(2, 9, k=2, dtype=torch.float64), "orders no torch.float64"),
        (tile_groups.topk(2, 9, k=2, dtype=torch.int8), "orders no torch.int8"),
    ):
        derivation = derive(group, family(group), H100)
        assert not derivation.sketches
        assert reason in derivation.reason
        assert roofline_us(group, H100) > 0


def test_a_price_grows_with_the_row_and_with_what_is_kept() -> None:
    def price(columns: int, k: int, rows: int = 1) -> float:
        return roofline_us(tile_groups.topk(rows, columns, k=k, dtype=torch.float32), H100)

    assert price(1000, 5) < price(8400, 5) < price(8400, 300) < price(91_000, 300)
    assert price(8400, 300, 32) < 2 * price(8400, 300) < price(8400, 300, 32 * 132)


class Best(nn.Module):
    def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(x))


GENERATED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "the last dimension": lambda x: x.topk(5),
    "the smallest of the first": lambda x: x.topk(2, 0, largest=False),
    "of the middle, of what is computed": lambda x: (x * 2 + 1).topk(4, 1),
    "of one row": lambda x: x.flatten().topk(17, sorted=False),
    "all of them": lambda x: (x.sort(1, descending=True).values, x.argsort(-1)),
    "rows that are picked": lambda x: (x.gather(1, x.topk(3, 1).indices).softmax(1),),
    "of what a slice leaves": lambda x: x[:, 1:, ::2].topk(2),
    "places as integers": lambda x: x.long().topk(1),
}


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("case", GENERATED)
def test_generated(case: str, dtype: torch.dtype) -> None:
    size = (3, 5, 11)  # no two elements are equal
    x = torch.randperm(math.prod(size), generator=torch.Generator().manual_seed(5))
    x = (x.reshape(size) - 70).to(dtype)
    model = Best(GENERATED[case])
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    for found, right in zip(compiled(x), model(x), strict=True):
        assert found.dtype == right.dtype
        if case != "of one row" or right.dtype == dtype:
            torch.testing.assert_close(found.sort().values, right.sort().values, rtol=1e-3, atol=0)
        if case != "of one row":
            torch.testing.assert_close(found, right, rtol=1e-3, atol=0)


def test_a_limit_is_reported_and_atens_answer_is_the_same() -> None:
    x = torch.stack([torch.randperm(5000), torch.randperm(5000)]).float()  # no two are equal
    model = Best(lambda x: x.topk(4500))
    with pytest.raises(gtco.FallbackError, match=r"4500 elements of a row, at most 4096"):
        gtco.compile(model, (x,), target="host", fallback="error")
    for found, right in zip(gtco.compile(model, (x,), target="host")(x), model(x), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("size", ((0, 4), (3, 0)))
def test_of_no_element(size: tuple[int, int]) -> None:
    x = torch.zeros(size)
    for function in (lambda x: x.topk(0), lambda x: x.sort(0)):
        graph, args = captured(lambda m, x, f=function: tuple(f(x)), x)
        for found, right in zip(gtco.interpret(graph, args), function(x), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", (torch.float64, torch.int64))
@pytest.mark.parametrize("dim", (0, 1, 2))
def test_the_first_of_what_is_in_order_need_no_others(dim: int, dtype: torch.dtype) -> None:
    def first(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        values, places = torch.sort(x, dim=dim, descending=True, stable=True)
        return values.narrow(dim, 0, 2), places.narrow(dim, 0, 2)

    x = (random(3, 4, 5) * 3).round().to(dtype)
    result = check(push_slices, *captured(first, x))
    (node,) = (node for node in result.nodes if node.op == "topk")
    assert node.attrs["k"] == 2


@pytest.mark.parametrize(
    "pick",
    (
        lambda values, places: (values[:, 1:3], places[:, 1:3]),
        lambda values, places: (values[:, :3], places[:, :2]),
        lambda values, places: (values[:, :2], places[:, 2:]),
        lambda values, places: (values[:, 2:], places[:, :2]),
        lambda values, places: (values[:, :3], places),
        lambda values, places: (values[:, ::2], places[:, ::2]),
        lambda values, places: (values[:1], places[:1]),
        lambda values, places: (values[:, :2], places + 1),
    ),
)
def test_others_that_are_read_stay(pick: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    graph, args = captured(lambda m, x: pick(*x.sort(1)), random(3, 4))
    (node,) = (node for node in check(push_slices, graph, args).nodes if node.op == "topk")
    assert node.attrs["k"] == 4


MEETS = "__syncthreads();"
REST = "list[i] = {0, 0};\n  "
SWAPPED = "list[second] = a;\n        }\n      }\n      "
FAULTS = {
    "none": ("", ""),
    "one digit too few": ("level < LEVELS;", "level < LEVELS - 1;"),
    "of equal ones any": ("(entry.rest & known.rest) ^ least.rest", "0"),
    "what is larger not taken off": ("need -= found.above;", ""),
    "another warp's counts": ("slots[w * 16 + digit]", "slots[digit]"),
    "warps before this one left out": ("before += w < warp ? slots[w] : 0;", ""),
    "half a warp left out": ("count += __shfl_xor_sync(~0u, count, 16);", ""),
    "no meeting before the sort": (REST + MEETS, REST),
    "no meeting between passes": (SWAPPED + MEETS, SWAPPED),
    "sorted the other way in part": ("= !(i & apart) == !(i & size)", "= !(i & apart)"),
    "the same slots at each level": ("turn ^= 1;", ""),
}


@pytest.mark.compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    group = tile_groups.TOPK["most_of_ties"]()  # of which no more are sorted
    program = TopK(group, H100).emit({"threads": 128})
    if fault == "none":
        assert not verdicts(program, group)
    else:
        check_caught(planted(program, *FAULTS[fault]), group)
