"""Who gets the next round, against Ansor's gradient worked out by hand."""

from __future__ import annotations

import math

import pytest

from gtco.cost_model.budget import ALPHA, BETA, WINDOW, Budget
from gtco.cost_model.similar import likeness
from gtco.passes.tasks import workload_key
from gtco.target import TARGETS
from tests.groups import GEMM_CASES
from tests.tile_groups import gelu_bias

INF = math.inf
ALONE = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def tell(budget: Budget, task: int, best_us: float | None) -> None:
    """A whole round."""
    budget.begin(task)
    budget.observe(task, best_us)


def test_each_task_has_a_round_first_the_heaviest_before() -> None:
    budget = Budget([1, 12, 4], [5.0, 2.0, 10.0], [INF] * 3, ALONE)
    order = []
    while len(order) < 3:
        task = budget.next()
        assert task is not None
        order.append(task)
        tell(budget, task, 1.0)
    assert order == [2, 1, 0]


def test_the_gain_is_ansors_gradient() -> None:
    budget = Budget([3, 1, 1], [4.0, 1.0, 1.0], [INF] * 3, ALONE)
    for best in (10.0, 9.0, 8.5, 8.0, 7.0):
        tell(budget, 0, best)
    past = (9.0 - 7.0) / WINDOW
    hope = max(7.0 / 5, 7.0 - BETA * 7.0)
    assert budget.gain_us(0) == pytest.approx(3 * (ALPHA * past + (1 - ALPHA) * hope))


def test_a_task_that_goes_on_improving_is_preferred() -> None:
    budget = Budget([1, 1], [5.0, 5.0], [INF] * 2, [[1, 0], [0, 1]])
    for first, second in ((9.0, 9.0), (8.0, 9.0), (7.0, 9.0), (6.9, 6.9)):
        tell(budget, 0, first)
        tell(budget, 1, second)
    tell(budget, 0, 5.0)
    tell(budget, 1, 6.9)
    assert budget.next() == 1  # equal rounds, and more is left to hope for
    budget = Budget([1, 1], [5.0, 5.0], [INF] * 2, [[1, 0], [0, 1]])
    for first in (30.0, 20.0, 10.0):
        tell(budget, 0, first)
        tell(budget, 1, 10.0)
    assert budget.next() == 0


def test_similar_tasks_share_hope() -> None:
    def gains(like: float) -> float:
        budget = Budget([1, 1], [4.0, 4.0], [INF] * 2, [[1, like], [like, 1]])
        for _ in range(20):
            tell(budget, 0, 20.0)
            tell(budget, 1, 5.0)
        return budget.gain_us(0)

    assert gains(0.0) == pytest.approx((1 - ALPHA) * 20 / 20)
    assert gains(0.9) == pytest.approx((1 - ALPHA) * (20 - BETA * 5))


def test_a_task_without_any_time_goes_on_and_an_ended_one_does_not() -> None:
    budget = Budget([1, 1], [4.0, 4.0], [INF] * 2, [[1, 0], [0, 1]])
    tell(budget, 0, None)
    tell(budget, 1, 3.0)
    assert budget.next() == 0
    budget.end(0)
    assert budget.next() == 1
    budget.end(1)
    assert budget.next() is None
    assert Budget([], [], [], []).next() is None


def test_rounds_under_way_go_to_several_tasks() -> None:
    budget = Budget([12, 12], [4.0, 4.0], [INF] * 2, [[1, 0], [0, 1]])
    tell(budget, 0, 5.0)
    tell(budget, 1, 4.9)
    chosen = []
    for _ in range(4):  # nothing is known of any of these rounds yet
        task = budget.next()
        assert task is not None
        chosen.append(task)
        budget.begin(task)
    assert chosen == [0, 1, 0, 1]


def test_another_plans_task_waits_until_it_promises_more() -> None:
    budget = Budget([12, 1, 1], [4.0, 9.0, 9.0], [INF, 3.0, 0.0], ALONE)
    rounds = {0: 0, 1: 0, 2: 0}
    while not rounds[1]:
        task = budget.next()
        assert task is not None
        tell(budget, task, 4.0)
        rounds[task] += 1
    before = (1 - ALPHA) * 12 * 4.0 / 3.0
    assert rounds == {0: math.ceil(before), 1: 1, 2: 0}


def test_a_models_rounds_go_where_its_time_is() -> None:
    """ViT-B/16's layers, each with times that come down as searches do."""
    weights = [12, 12, 12, 12, 12, 1, 1]
    floors = [4.1, 3.4, 3.2, 5.6, 6.4, 6.0, 2.0]
    drafts = [0.7 * each for each in floors]
    alike = [[float(i == j) for j in range(7)] for i in range(7)]
    budget = Budget(weights, drafts, [INF] * 7, alike)
    rounds = [0] * 7
    order = []
    for _ in range(60):
        task = budget.next()
        assert task is not None
        rounds[task] += 1
        order.append(task)
        tell(budget, task, floors[task] * (1 + 0.5 / rounds[task]))
    assert sorted(order[:7]) == list(range(7)) and order[0] == 4
    shares = [weight * floor for weight, floor in zip(weights, floors, strict=True)]
    for heavy in range(5):
        assert rounds[heavy] >= 6, "a heavy task starves"
        assert rounds[heavy] / 60 < 2 * shares[heavy] / sum(shares), "one task takes all"
    assert rounds[4] == max(rounds) and max(rounds[5:]) <= 3


def test_likeness_of_workloads() -> None:
    def key(name: str) -> str:
        return workload_key(GEMM_CASES[name](), TARGETS["sm_90a"])

    assert likeness(key("qkv"), key("qkv")) == 1.0
    near, far = likeness(key("projection"), key("fc2")), likeness(key("projection"), key("qkv"))
    assert 1 > near > far > 0
    assert near == likeness(key("fc2"), key("projection"))
    other = workload_key(gelu_bias(4, 8), TARGETS["sm_90a"])
    assert likeness(key("projection"), other) < 0.1
