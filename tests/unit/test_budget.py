"""Who gets the next round, against Ansor's gradient worked out by hand."""

from __future__ import annotations

import pytest

from gtco.cost_model.budget import ALPHA, BETA, WINDOW, Budget
from gtco.cost_model.similar import likeness
from gtco.passes.tasks import workload_key
from gtco.target import TARGETS
from tests.groups import GEMM_CASES
from tests.tile_groups import gelu_bias

ALONE = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_each_task_has_a_round_first_the_heaviest_before() -> None:
    budget = Budget([1, 12, 4], [5.0, 2.0, 10.0], ALONE)
    order = []
    while len(order) < 3:
        task = budget.next()
        assert task is not None
        order.append(task)
        budget.observe(task, 1.0)
    assert order == [2, 1, 0]


def test_the_gain_is_ansors_gradient() -> None:
    budget = Budget([3, 1, 1], [4.0, 1.0, 1.0], ALONE)
    for best in (10.0, 9.0, 8.5, 8.0, 7.0):
        budget.observe(0, best)
    past = (9.0 - 7.0) / WINDOW
    hope = max(7.0 / 5, 7.0 - BETA * 7.0)
    assert budget.gain_us(0) == pytest.approx(3 * (ALPHA * past + (1 - ALPHA) * hope))


def test_a_task_that_goes_on_improving_is_preferred() -> None:
    budget = Budget([1, 1], [5.0, 5.0], [[1, 0], [0, 1]])
    for first, second in ((9.0, 9.0), (8.0, 9.0), (7.0, 9.0), (6.9, 6.9)):
        budget.observe(0, first)
        budget.observe(1, second)
    budget.observe(0, 5.0)
    budget.observe(1, 6.9)
    assert budget.next() == 1  # equal rounds, and more is left to hope for
    budget = Budget([1, 1], [5.0, 5.0], [[1, 0], [0, 1]])
    for first in (30.0, 20.0, 10.0):
        budget.observe(0, first)
        budget.observe(1, 10.0)
    assert budget.next() == 0


def test_similar_tasks_share_hope() -> None:
    def gains(like: float) -> float:
        budget = Budget([1, 1], [4.0, 4.0], [[1, like], [like, 1]])
        for _ in range(20):
            budget.observe(0, 20.0)
            budget.observe(1, 5.0)
        return budget.gain_us(0)

    assert gains(0.0) == pytest.approx((1 - ALPHA) * 20 / 20)
    assert gains(0.9) == pytest.approx((1 - ALPHA) * (20 - BETA * 5))


def test_a_task_without_any_time_goes_on_and_an_ended_one_does_not() -> None:
    budget = Budget([1, 1], [4.0, 4.0], [[1, 0], [0, 1]])
    budget.observe(0, None)
    budget.observe(1, 3.0)
    assert budget.next() == 0
    budget.end(0)
    assert budget.next() == 1
    budget.end(1)
    assert budget.next() is None
    assert Budget([], [], []).next() is None


def test_likeness_of_workloads() -> None:
    def key(name: str) -> str:
        return workload_key(GEMM_CASES[name](), TARGETS["sm_90a"])

    assert likeness(key("qkv"), key("qkv")) == 1.0
    near, far = likeness(key("projection"), key("fc2")), likeness(key("projection"), key("qkv"))
    assert 1 > near > far > 0
    assert near == likeness(key("fc2"), key("projection"))
    other = workload_key(gelu_bias(4, 8), TARGETS["sm_90a"])
    assert likeness(key("projection"), other) < 0.1
