"""The judge accepts what eager itself would give and rejects planted wrong answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gtco.check import BOUNDS, Precision, judge

EAGER = {"tf32": torch.float32, "fp8": torch.float16, "int8": torch.float16}
DTYPES = {precision: EAGER.get(str(precision), precision) for precision in BOUNDS}


def answers(precision: Precision, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(fp64 reference, the same rounded as an eager run in `precision` would)."""
    generator = torch.Generator().manual_seed(0)
    reference = scale * torch.randn(16, 40, generator=generator, dtype=torch.float64)
    if precision == "tf32":
        return reference, reference.to(torch.float16).float()  # tf32 has fp16's mantissa
    return reference, reference.to(DTYPES[precision])  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", BOUNDS, ids=str)
def test_eagers_own_answer_is_right(precision: Precision) -> None:
    reference, eager = answers(precision)
    verdict = judge(eager.clone(), eager, reference, precision)
    assert verdict.ok, verdict
    assert verdict.rmse == verdict.eager_rmse <= verdict.limit


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("precision", BOUNDS, ids=str)
def test_an_error_at_the_limit_decides(precision: Precision, scale: float) -> None:
    """The limit is where DESIGN puts it, and the constant part shrinks with small outputs."""
    reference, eager = answers(precision, scale)
    bound = BOUNDS[precision]
    eager_rmse = float((eager.double() - reference).square().mean().sqrt())
    rms = float(reference.square().mean().sqrt())
    limit = bound.multiple * eager_rmse + bound.tolerance / 10 * min(bound.largest, rms)
    noise = torch.ones_like(reference)
    noise[:, ::2] = -1  # so that the error's RMSE is exactly its size
    for factor, right in ((0.9, True), (1.1, False)):
        verdict = judge(
            (reference + factor * limit * noise).float(),
            eager.float(),
            reference,
            precision,
        )
        assert verdict.ok is right, (factor, verdict)


def poison(answer: Tensor, value: float) -> Tensor:
    wrong = answer.clone()
    wrong[3, 7] = value
    return wrong


@pytest.mark.parametrize("precision", BOUNDS, ids=str)
def test_planted_wrong_answers_are_rejected(precision: Precision) -> None:
    reference, eager = answers(precision)
    planted = {
        "one NaN": poison(eager, math.nan),
        "one infinity": poison(eager, math.inf),
        "zeros": torch.zeros_like(eager),
        "another dtype": eager.double(),
        "another shape": eager[:, :-1],
        "rows exchanged": eager.roll(1, 0),
        "one row not written": torch.cat([eager[:-1], torch.zeros_like(eager[:1])]),
        "no tensor": [eager],
        "nothing": None,
    }
    accepted = [
        name for name, wrong in planted.items() if judge(wrong, eager, reference, precision).ok
    ]
    assert not accepted


def test_zeros_do_not_pass_for_small_outputs() -> None:
    reference, eager = answers(torch.float16, 1e-4)
    assert not judge(torch.zeros_like(eager), eager, reference, torch.float16).ok


def test_what_is_not_finite_must_agree() -> None:
    reference, eager = answers(torch.float16)
    reference[0, 0], reference[0, 1] = math.nan, math.inf
    eager[0, 0], eager[0, 1], eager[0, 2] = math.nan, math.inf, math.inf  # [0, 2] overflowed
    assert judge(eager.clone(), eager, reference, torch.float16).ok
    finite = reference.nan_to_num(posinf=1.0).half()
    assert "NaN" in judge(finite, eager, reference, torch.float16).reason
    assert "finite" in judge(poison_at(finite, math.nan), eager, reference, torch.float16).reason
    overflowed = eager.clone()
    overflowed[0, 2] = math.nan
    assert "NaN in 1" in judge(overflowed, eager, reference, torch.float16).reason


def poison_at(answer: Tensor, value: float) -> Tensor:
    wrong = answer.clone()
    wrong[0, 0] = value
    return wrong


def test_where_eager_is_nan_the_answer_need_not_be_finite() -> None:
    exact = torch.linspace(1, 9, 9, dtype=torch.float64)
    eager = exact.half()
    eager[3:6] = math.nan
    answer = exact.half()
    answer[3], answer[4] = math.nan, math.inf
    assert judge(answer, eager, exact, torch.float16).ok
    for value in (math.nan, math.inf):
        answer[0] = value
        assert not judge(answer, eager, exact, torch.float16).ok


def test_structures_are_judged_output_by_output() -> None:
    reference, eager = answers(torch.float16)
    labels = torch.arange(4)
    good = {"logits": eager, "labels": labels, "name": "vit"}
    truth = {"logits": reference, "labels": labels, "name": "vit"}
    assert judge(dict(good), good, truth, torch.float16).ok
    assert "output 1" in judge({**good, "labels": labels + 1}, good, truth, torch.float16).reason
    assert "output 2" in judge({**good, "name": "bert"}, good, truth, torch.float16).reason
    missing = {"logits": eager, "labels": labels}
    assert "structured" in judge(missing, good, truth, torch.float16).reason
    assert judge((), (), (), torch.float16).ok
