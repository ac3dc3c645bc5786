"""The judge takes any of equal elements where torch leaves it open, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.ir import graph, ops
from tests.fuzz.judge import judge, operator_tables_kept
from tests.fuzz.program import Maker, Program, case_of
from tests.fuzz.ties import Ties


@pytest.fixture(autouse=True, scope="module")
def _operator_tables() -> Iterator[None]:
    with operator_tables_kept():
        yield


ZEROS = torch.tensor([[0.0, -0.0], [0.0, 0.0], [-0.0, -0.0], [1.0, -0.0]])
OF_ROWS = [1, 0, 0, 0]
OF_BOUNDS = [[0, 1], [0, 0], [1, 1], [0, 1]]
"""Where -0.0 meets a bound of 0."""

OPEN: dict[str, Any] = {
    "x.amax(-1)": OF_ROWS,
    "x.amin(-1)": OF_ROWS,
    "x.max(-1).values": OF_ROWS,
    "x.min(-1).values": OF_ROWS,
    "x[:1].max()": 1,
    "x[3:].min()": 0,
    "x.cummax(-1).values": [[0, 1], [0, 0], [0, 0], [0, 0]],
    "x.cummin(-1).values": [[0, 1], [0, 0], [0, 0], [0, 0]],
    "torch.maximum(x, x.flip(-1))": [[1, 1], [0, 0], [0, 0], [0, 0]],
    "torch.fmin(x, x.flip(-1))": [[1, 1], [0, 0], [0, 0], [0, 0]],
    "x.relu()": OF_BOUNDS,
    "(x + -0.0).relu_()": OF_BOUNDS,
    "x.clamp(0)": OF_BOUNDS,
    "x.clamp(max=0)": OF_BOUNDS,
    "x.clamp(-0.0, 3)": [[1, 0], [1, 1], [0, 0], [0, 0]],
    "x.clamp(torch.full((2,), -1.0), torch.zeros(2))": OF_BOUNDS,
    "(x + -0.0).clamp_(0, 3)": OF_BOUNDS,
    "F.relu6(x)": OF_BOUNDS,
    "F.max_pool1d(x[None], 2)": [[[1], [0], [0], [0]]],
    "F.max_pool2d(x[None], (1, 2))": [[[1], [0], [0], [0]]],
    "F.adaptive_max_pool2d(x[None], (4, 1))": [[[1], [0], [0], [0]]],
    "x.sort(-1).values": [[0, 0]] * 4,
    "x.topk(1).values": [[0]] * 4,
    "F.leaky_relu(x)": [[0, 0]] * 4,
}  # fmt: skip
"""Where the sign of a zero is open of what is made of `ZEROS`."""


def run(text: str, seed: int | None) -> tuple[Tensor, bool]:
    with torch.no_grad(), Ties(seed) as ties:
        return eval(text, {"x": ZEROS, "torch": torch, "F": F}), ties.found


@pytest.mark.parametrize("text", OPEN)
def test_a_zero_has_either_sign_where_zeros_of_both_are_taken_from(text: str) -> None:
    with torch.no_grad():
        plain = eval(text, {"x": ZEROS, "torch": torch, "F": F})
    expected = torch.tensor(OPEN[text]).bool()
    (negative, _), (positive, _), (drawn, _), (own, found) = (run(text, s) for s in (0, 1, 2, None))
    for each in (negative, positive, drawn, own):
        assert torch.equal(each, plain), "no number changes"
    assert torch.equal(negative.signbit() != positive.signbit(), expected)
    assert not (negative.signbit() ^ plain.signbit())[~expected].any()
    assert found == bool(expected.any()) or "topk" in text, "torch's own order may be another"


def test_equal_elements_keep_their_order() -> None:
    x = torch.tensor([2.0, 5.0, 2.0, 5.0, 5.0, torch.nan, 1.0, torch.nan])
    for largest, places in ((True, [5, 7, 1, 3, 4, 0]), (False, [6, 0, 2, 1, 3, 4])):
        for options in ({}, {"sorted": False}):
            with Ties() as ties:
                values, indices = x.topk(6, largest=largest, **options)
            assert indices.tolist() == places
            assert torch.equal(values.nan_to_num(9), x[places].nan_to_num(9))
        with Ties():
            assert x.sort(descending=largest).indices.tolist()[:6] == places
    with Ties() as ties:
        torch.arange(8).topk(3)
    assert not ties.found


# -- the judge -------------------------------------------------------------------------------------


def program(*lines: str, dtype: torch.dtype = torch.float64) -> Program:
    """`lines` make `v0` of `x`, which has zeros of both signs and other equal elements."""
    return Program({"x": Maker((2, 6, 8), dtype, "special", 7)}, {}, lines, ("v0",))


def patch(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Callable[..., Any]]) -> None:
    """Other functions of operators, as if they were lowered to something else."""
    table = {name: replace(ops.OPS[name], reference=each) for name, each in changed.items()}
    monkeypatch.setattr(ops, "OPS", {**ops.OPS, **table})
    monkeypatch.setattr(graph, "OPS", ops.OPS)


TOPK, SORTED = "v0 = x.topk(3).indices", "v0 = x.sort(dim=-1, stable=True).indices"
VALUES = "v0 = 1 / x.topk(8).values"


@pytest.mark.parametrize(
    "line",
    [
        TOPK,
        VALUES,
        "v0 = x.topk(8, sorted=False).indices",
        "v0 = x.topk(2, 1, largest=False).values.reciprocal()",
        "v0 = x.to(i32).gather(-1, x.to(i32).topk(1, 1).indices)",
        "v1 = x.topk(2, 1, False).values * 1.5; v0 = torch.hypot(torch.atan2(v1, v1), v1)",
    ],
)
def test_the_order_of_equal_elements_is_no_fault(line: str) -> None:
    for dtype in (torch.float64, torch.float16):
        outcome = judge(case_of(program(line, dtype=dtype)))
        assert outcome.kind == "right" or "unstable captured: but for ties" in str(outcome)


def test_a_place_where_torch_has_another_is_a_tie() -> None:
    """Of so few equal elements torch's topk does not take the first, as of 2.13."""
    assert str(judge(case_of(program(TOPK)))).startswith("unstable captured: but for ties: 1")


Topk = Callable[..., tuple[Tensor, Tensor]]


def smallest(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    return TOPK_REFERENCE(x, k=k, largest=not largest)


def neighbours(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    values, places = TOPK_REFERENCE(x, k=k, largest=largest)
    return values, places.roll(1, -1)


def one_place_twice(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Of two equal elements the first one's place, for both."""
    values, places = TOPK_REFERENCE(x, k=k, largest=largest)
    again = torch.where(values[..., 1:] == values[..., :-1], places[..., :-1], places[..., 1:])
    return values, torch.cat([places[..., :1], again], -1)


def last_first(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The last of equal elements ahead of the first, which gtco does not do."""
    values, places = TOPK_REFERENCE(x.flip(-1), k=k, largest=largest)
    return values, x.shape[-1] - 1 - places


def nearly_equal(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """What is equal in whole numbers taken for equal."""
    places = TOPK_REFERENCE(x.round(), k=k, largest=largest)[1]
    return x.gather(-1, places), places


def unsigned(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    values, places = TOPK_REFERENCE(x, k=k, largest=largest)
    return torch.where(values == 0, 0.0, values), places


TOPK_REFERENCE: Topk = ops.OPS["topk"].reference


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (smallest, TOPK),
        (neighbours, TOPK),
        (one_place_twice, TOPK),
        (last_first, TOPK),
        (last_first, SORTED),
        (nearly_equal, TOPK),
        (nearly_equal, "v0 = x.topk(3).values"),
        (unsigned, VALUES),
    ],
)
def test_a_fault_of_topk_is_caught_among_ties(
    fault: Topk, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(program(line))
    assert not judge(case).failed
    patch(monkeypatch, {"topk": fault})
    assert str(judge(case)).startswith("wrong captured: output 0: ")


def test_the_last_of_equal_maxima_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch promises the first one."""

    def last(x: Tensor, *, dim: int, keepdim: bool) -> Tensor:
        return x.shape[dim] - 1 - x.flip(dim).argmax(dim, keepdim)

    cases = [case_of(program(line)) for line in ("v0 = x.argmax(-1)", "v0 = x.max(-1)[1]")]
    assert [judge(case).kind for case in cases] == ["right", "right"]
    patch(monkeypatch, {"argmax": last})
    assert [judge(case).kind for case in cases] == ["wrong", "wrong"]


SIGNED = [
    ("amax", "x.clamp(max=0).amax(-1)"),
    ("amax", "x.clamp(min=0).min(1).values"),
    ("maximum", "torch.maximum(x, x.flip(-1))"),
    ("minimum", "torch.minimum(x, x.flip(-1))"),
    ("maximum", "x.clamp(min=0)"),
    ("minimum", "F.hardtanh(x, -2, 0)"),
    ("maximum", "F.relu6(x)"),
    ("relu", "x.relu()"),
    ("max_pool", "F.max_pool2d(x[None].clamp(max=0), 2)"),
    ("adaptive_max_pool", "F.adaptive_max_pool2d(x[None].clamp(max=0), (5, 3))"),
]
"""Operator, and what shows the sign of its zeros."""


@pytest.mark.parametrize(("op", "text"), SIGNED)
def test_the_sign_of_a_zero_among_zeros_is_no_fault(
    op: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ops.OPS[op].reference

    def drawn(*args: Any, **attrs: Any) -> Tensor:
        with Ties(100):
            return original(*args, **attrs)

    for dtype in (torch.float64, torch.float16):
        case = case_of(program(f"v0 = 1 / {text}", dtype=dtype))
        assert not judge(case).failed
        with monkeypatch.context() as patched:
            patch(patched, {op: drawn})
            assert str(judge(case)).startswith("unstable captured: but for ties")


@pytest.mark.compiler
def test_a_kernel_may_take_either_zero() -> None:
    case = case_of(program("v0 = 1 / x.clamp(max=0).amax(-1)", dtype=torch.float32))
    outcome = judge(case, "host")
    assert outcome.kind == "right" or "unstable host: but for ties" in str(outcome)


@pytest.mark.parametrize(("op", "text"), SIGNED)
def test_a_sign_that_no_zero_has_is_a_fault(
    op: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ops.OPS[op].reference

    def other(*args: Any, **attrs: Any) -> Tensor:
        y = original(*args, **attrs)
        return torch.where(y == 0, -y, y)

    case = case_of(program(f"v0 = 1 / {text}"))
    patch(monkeypatch, {op: other})
    assert str(judge(case)).startswith("wrong captured: output 0: ")


def test_what_hangs_on_a_tie_excuses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(program("v0 = 1 / x.relu() + x.exp()"))
    relu, exp = ops.OPS["relu"].reference, ops.OPS["exp"].reference
    patch(monkeypatch, {"relu": lambda x: torch.where(x == 0, 0.0, relu(x))})
    assert str(judge(case)).startswith("unstable captured: but for ties")
    patch(monkeypatch, {"exp": lambda x: exp(x) * torch.where(x > 1, 1.001, 1)})
    assert str(judge(case)).startswith("wrong captured: output 0: ")


def test_an_infinity_of_the_other_sign_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(program("v0 = x.reciprocal()"))
    assert judge(case).kind == "right"
    patch(monkeypatch, {"reciprocal": lambda x: torch.where(x == 0, torch.inf, 1 / x)})
    assert str(judge(case)).startswith("wrong captured: output 0: inf at ")
