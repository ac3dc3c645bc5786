"""Which of several plans or schedules is fastest, by clocks that are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from gtco.compiler import fuse_with
from gtco.cost_model.knowledge import CHOSEN, VERSIONS, Knowledge
from gtco.frontend.torch_export import capture
from gtco.passes.tasks import tasks
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import PlanKnobs
from gtco.tuning import replay
from tests.perceptron import DEVICE, H100, mlp, record
from tests.plans import make_plan


def test_the_fastest_plan_wins_whatever_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(nn.Linear(4, 4).eval(), (torch.ones(2, 4),), {})
    plans = [make_plan(captured) for _ in range(3)]
    speed = {id(plans[0]): 10.0, id(plans[1]): 12.0, id(plans[2]): 8.0}
    asked = itertools.count()

    def clock(module: CompiledModule) -> Callable[[], float]:
        slower = 1 + next(asked) // 2  # for each pair, the clock runs otherwise
        return lambda: slower * speed[id(module._plan)]

    monkeypatch.setattr(replay, "clock", clock)
    best, times = replay.fastest(plans, captured)
    assert best._plan is plans[2]
    assert times == pytest.approx((10.0, 12.0, 8.0))
    late, none = replay.fastest(plans, captured, until=0.0)
    assert late._plan is plans[0] and none == ()
    alone, none = replay.fastest(plans[:1], captured)
    assert alone._plan is plans[0] and none == ()


Variant = tuple[int, int, int, int]
"""Knob "a" of the task that was joined, and the plan's: spread, late trigger, fetch distance."""


class Variants:
    """Stands in for `replay.Variants` of the perceptron's tasks; `tried` in the whole graph."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, whole_us: Callable[[Variant], float]
    ) -> None:
        graph, self.joined = mlp()
        (fused,) = fuse_with(Knowledge(DEVICE), graph, H100)
        self.found, self.target = tasks(fused, H100), H100
        self.tried: list[list[Variant]] = []

        def fastest(plans: Iterable[Variant], *_: object) -> tuple[None, tuple[float, ...]]:
            self.tried.append(list(plans))
            return None, tuple(map(whole_us, self.tried[-1]))

        monkeypatch.setattr(replay, "fastest", fastest)

    def __call__(self, choices: replay.Choices, knobs: PlanKnobs) -> Variant:
        a = choices[self.joined.key].schedule["a"]
        return a, knobs.spread, knobs.late_trigger, knobs.fetch_distance

    def compile(self, plans: Iterable[Variant]) -> None:
        self.compiled = list(plans)

    def refine(self, known: Knowledge) -> tuple[replay.Choices, PlanKnobs]:
        self.known = known
        return replay.refine(self, None, PlanKnobs(0, 0, 0))  # type: ignore[arg-type]


def test_what_leaves_more_room_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = Variants(monkeypatch, lambda each: 1.0)
    known = Knowledge(DEVICE)
    rooms = (200, 150, 60, 120, 180, 119, 10, 100, 110, 90, 80)  # KB of shared memory
    for number, smem in enumerate(rooms):
        run_us = 5.0 + number / 10 + (number == 8)  # that one is far slower
        made = record(run_us, workload=variants.joined.key, schedule={"a": number})
        known.add(replace(made, work={"smem_bytes": smem * 1024}))
    variants.refine(known)
    schedules, spreads, triggers, distances = variants.tried
    assert [knobs for _, *knobs in spreads] == [[0, 0, 0], [1, 0, 0]]
    assert [knobs for _, *knobs in triggers] == [[0, 0, 0], [0, 1, 0]]
    assert [knobs for _, *knobs in distances] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert [schedule for schedule, *_ in schedules] == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert variants.compiled == schedules


def test_the_whole_graph_decides_among_the_fastest_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole_us = {0: 100.0, 1: 99.9, 2: 90.0, 3: 95.0, 4: 50.0}  # three of a kind are tried
    variants = Variants(
        monkeypatch, lambda each: whole_us[each[0]] + each[1] - 2 * each[2] + 5 * (each[3] != 1)
    )
    joined = variants.joined
    (other,) = [task for task in variants.found if task.key != joined.key]
    known = Knowledge(DEVICE)
    for schedule, run_us in enumerate((5.0, 5.1, 5.2, 5.3, 5.4)):
        known.add(record(run_us, workload=joined.key, schedule={"a": schedule}))
    known.add(record(1.0, workload=other.key, schedule={"a": 7}))
    chosen, knobs = variants.refine(known)
    assert variants.tried == [
        [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0)],
        [(0, 0, 0, 0), (2, 0, 0, 0)],  # the leader and the first once more
        [(2, 0, 0, 0), (2, 1, 0, 0)],
        [(2, 0, 0, 0), (2, 0, 1, 0)],
        [(2, 0, 0, 0), (2, 0, 1, 0)],
        [(2, 0, 1, 0), (2, 0, 1, 1), (2, 0, 1, 2)],
        [(2, 0, 1, 0), (2, 0, 1, 1)],
        [(2, 0, 1, 1), (0, 0, 1, 1), (1, 0, 1, 1)],
        [(2, 0, 1, 1), (2, 1, 1, 1)],
        [(2, 0, 1, 1), (2, 0, 0, 1)],
        [(2, 0, 1, 1), (2, 0, 1, 0), (2, 0, 1, 2)],
    ], "again, from what was chosen so far"
    assert knobs == PlanKnobs(1, 1, 0)
    assert {key: each.schedule["a"] for key, each in chosen.items()} == {
        joined.key: 2,
        other.key: 7,
    }

    for each in replay.marked(known, chosen):
        known.add(each)
    assert [each.schedule["a"] for each in known.best(joined.key)] == [2, 0, 1, 3, 4]
    assert list(replay.marked(known, {key: known.best(key)[0] for key in chosen})) == []
    whole_us[0] = 80.0
    for each in replay.marked(known, variants.refine(known)[0]):
        known.add(each)
    assert [each.schedule["a"] for each in known.best(joined.key)][:2] == [0, 1]
    whole_us[1] = 79.9
    again, _ = variants.refine(known)
    assert again[joined.key].schedule == {"a": 0}, "noise"


def test_one_that_was_lucky_among_many_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 99.9, 98.0, 100.0, 100.1])  # of 0, 1 and 2, and then of 0 and 2
    variants = Variants(monkeypatch, lambda each: next(times, 100.0))
    known = Knowledge(DEVICE)
    for schedule in range(3):
        made = record(5.0 + schedule / 10, workload=variants.joined.key, schedule={"a": schedule})
        known.add(made)
    chosen, _ = variants.refine(known)
    first, again, *_ = variants.tried
    assert [a for a, *_ in first] == [0, 1, 2] and [a for a, *_ in again] == [0, 2]
    assert chosen[variants.joined.key].schedule == {"a": 0}


def test_other_rings_of_the_same_tile_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = Variants(monkeypatch, lambda each: 1.0)
    known = Knowledge(DEVICE)
    for stages in range(40):  # every other one of another tile; the last are far slower
        made = record(5.0 + stages / 24, workload=variants.joined.key, sketch="gemm_wgmma")
        schedule = {"block_p": 64 * (1 + stages % 2), "stages": stages, "atoms": stages % 3}
        known.add(replace(made, version=VERSIONS["gemm_wgmma"], schedule=schedule))
    tried = replay._contenders(known.best(variants.joined.key), variants.target)
    rings = range(4, 4 + 2 * replay.RINGS, 2)
    assert [each.schedule["stages"] for each in tried] == [0, 1, 2, *rings]


def test_the_task_that_promises_most_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = Variants(monkeypatch, lambda each: 1.0)
    (other,) = [task for task in variants.found if task.key != variants.joined.key]
    known = Knowledge(DEVICE)
    for schedule, run_us in ((0, 20.0), (1, 20.1)):  # dear, and its chain promises nothing
        known.add(record(run_us, workload=variants.joined.key, schedule={"a": schedule}))
    known.add(record(4.0, workload=other.key, schedule={"a": 3}))
    slow = record(8.0, workload=other.key, schedule={"a": 2})
    known.add(replace(slow, versions={**slow.versions, **CHOSEN}))
    variants.refine(known)
    first, second, *_ = variants.tried
    assert [a for a, *_ in first] == [0, 0] and [a for a, *_ in second] == [0, 1]


@pytest.mark.parametrize("better", [True, False])
def test_what_the_whole_graph_chose_before_kernels_changed_is_tried_first(
    monkeypatch: pytest.MonkeyPatch, better: bool
) -> None:
    variants = Variants(monkeypatch, lambda each: 80.0 if (each[0] == 8) == better else 100.0)
    key = variants.joined.key
    known = Knowledge(DEVICE)
    for schedule, run_us in ((0, 5.0), (8, 9.0)):  # too slow in a chain to be tried
        known.add(record(run_us, workload=key, schedule={"a": schedule}))
    assert known.once_chosen(key) is None
    for device, schedule in (("another", 0), (DEVICE, 7), (DEVICE, 8)):  # 7 was not measured since
        old = record(8.0, workload=key, schedule={"a": schedule})
        versions = {**old.versions, **CHOSEN}
        known.add(replace(old, device=device, version=old.version - 1, versions=versions))
    chosen, _ = variants.refine(known)
    assert variants.tried[0] == [(0, 0, 0, 0), (8, 0, 0, 0)]
    assert chosen[key].schedule == {"a": 8 if better else 0}


def test_a_hopeless_challenger_is_given_up() -> None:
    turns: list[str] = []

    def clock(name: str, us: float) -> Callable[[], float]:
        return lambda: turns.append(name) or us  # type: ignore[func-returns-value]

    assert replay._interleaved(clock("best", 10.0), clock("slow", 11.0)) == (10.0, 11.0)
    assert turns == ["best", "slow"] * (1 + replay.FEWEST) + ["best"]
    turns.clear()
    assert replay._interleaved(clock("best", 10.0), clock("close", 10.05)) == pytest.approx(
        (10.0, 10.05)
    )
    assert turns == ["best", "close"] * (1 + replay.ROUNDS) + ["best"]


def test_a_challenger_is_compared_with_the_turns_beside_its_own() -> None:
    """A GPU at the limit of its power lowers its clock between two turns."""
    slower = iter([1.0] * 10 + [1.3] * 7)
    best, challenger = (lambda us=us: us * next(slower) for us in (10.0, 10.05))
    us, their_us = replay._interleaved(best, challenger)
    assert their_us / us == pytest.approx(1.005)
