"""Drawing programs: legal, different, repeatable, and the limits say what they refused."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.target import TARGETS
from tests import groups, tile_groups

H100, A100 = TARGETS["sm_90a"], TARGETS["sm_80"]
F16 = torch.float16


def sampler(group: Group, seed: int = 0, target=H100) -> Sampler:
    return Sampler(derive(group, family(group), target).sketches, seed)


@pytest.fixture(scope="module")
def projection() -> Group:
    return groups.residual_linear(197, 768, 768, F16)


def keys(found: list[Candidate]) -> list:
    return [each.key for each in found]


def check_legal(found: list[Candidate]) -> None:
    """Emitting the schedule again gives the same program."""
    for each in found:
        again = each.sketch.emit(each.program.schedule)
        assert (again.source, again.grid, again.smem_bytes) == (
            each.program.source,
            each.program.grid,
            each.program.smem_bytes,
        )


def test_random_programs_are_legal_and_different(projection: Group) -> None:
    found = sampler(projection).random(60)
    assert len(set(keys(found))) == len(found) == 60
    assert {each.sketch.name for each in found} == {"gemm_wgmma", "gemm_mma"}
    check_legal(found)
    assert keys(found) == keys(sampler(projection).random(60))
    assert keys(found) != keys(sampler(projection, seed=1).random(60))


def test_a_small_space_is_drawn_whole() -> None:
    small = sampler(tile_groups.gelu_bias(4, 8), target=A100)
    (sketch,) = small.sketches
    assert sorted(keys(small.random(100))) == sorted(
        ("elementwise", tuple(sorted(schedule.items()))) for schedule, _ in sketch.legal()
    )


def test_no_sketch_draws_nothing() -> None:
    none = Sampler((), 0)
    assert none.random(5) == none.defaults(5) == []


def test_defaults_come_in_order(projection: Group) -> None:
    found = sampler(projection).defaults(12)
    by_sketch: dict[str, list[dict]] = {}
    for each in found:
        by_sketch.setdefault(each.sketch.name, []).append(dict(each.program.schedule))
    assert {name: len(each) for name, each in by_sketch.items()} == {
        "gemm_wgmma": 12,
        "gemm_mma": 2,
    }
    assert by_sketch["gemm_wgmma"] == [dict(s) for s in found[0].sketch.defaults()][:12]


def test_many_rows_have_a_third_sketch_whose_defaults_come_last() -> None:
    found = sampler(groups.norm_linear(1576, 768, 2304, F16)).defaults(12)
    names = [each.sketch.name for each in found]
    assert names == ["gemm_wgmma"] * 12 + ["gemm_mma"] * 2 + ["gemm_persistent"] * 2


def test_mutations_and_crossings_stay_legal_and_near(projection: Group) -> None:
    space = sampler(projection)
    first, second = [c for c in space.random(20) if c.sketch.name == "gemm_wgmma"][:2]
    children = [child for _ in range(20) if (child := space.mutate(first))]
    assert len(children) == 20
    check_legal(children)
    for child in children:
        schedule = first.program.schedule
        changed = sum(child.program.schedule[name] != schedule[name] for name in schedule)
        assert 1 <= changed <= 3
    for _ in range(10):
        if (child := space.crossover(first, second)) is None:
            continue
        check_legal([child])
        for name, value in child.program.schedule.items():
            assert value in (first.program.schedule[name], second.program.schedule[name])
        assert child.key not in (first.key, second.key)


def test_two_sketches_do_not_cross(projection: Group) -> None:
    found = {each.sketch.name: each for each in sampler(projection).random(40)}
    assert sampler(projection).crossover(found["gemm_wgmma"], found["gemm_mma"]) is None


def test_neighbours_are_one_step_of_one_knob_away(projection: Group) -> None:
    space = sampler(projection)
    start = space.random(1)[0]
    near = space.neighbours(start)
    check_legal(near)
    choices = {knob.name: knob.choices for knob in start.sketch.knobs()}
    for each in near:
        ((name, value),) = each.program.schedule.items() - start.program.schedule.items()
        positions = [choices[name].index(v) for v in (value, start.program.schedule[name])]
        assert abs(positions[0] - positions[1]) == 1


def test_rings_are_all_programs_of_a_tile(projection: Group) -> None:
    space = sampler(projection)
    start = next(each for each in space.random(50) if each.sketch.name == "gemm_wgmma")
    found = space.rings(start)
    check_legal(found)
    assert len(set(keys(found))) == len(found) > 4 and start.key not in keys(found)

    def changed(each: Candidate) -> set[str]:
        return {name for name, _ in each.program.schedule.items() - start.program.schedule.items()}

    ring = {"stages", "atoms", "depth", "cluster_q"}
    assert all(changed(each) <= ring for each in found)
    near = [each for each in space.neighbours(start) if changed(each) <= ring]
    assert near and {each.key for each in near} <= set(keys(found))


def test_a_sketch_without_a_ring_has_no_others() -> None:
    space = sampler(tile_groups.gelu_bias(4, 100))
    assert [space.rings(each) for each in space.random(3)] == [[], [], []]


def test_a_schedule_is_emitted_once(projection: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    space = sampler(projection)
    sketch = space.sketches[0]
    schedule = next(iter(sketch.defaults()))
    made = space.make(sketch, schedule)
    monkeypatch.setattr(type(sketch), "emit", None)
    assert space.make(sketch, dict(schedule)) is made


def test_each_limit_counts_what_it_refused(projection: Group) -> None:
    space = sampler(projection)
    space.random(50)
    assert any("gemm_wgmma: shared memory N B" in reason for reason in space.refused)
    before = space.refused.total()
    schedule = {**next(iter(space.sketches[0].defaults())), "split": 2, "multicast": 2}
    assert space.make(space.sketches[0], schedule) is None
    assert space.refused.total() == before + 1
    space.make(space.sketches[0], schedule)
    assert space.refused.total() == before + 1


def test_another_tasks_schedule_is_adopted(projection: Group) -> None:
    space = sampler(projection)
    other = sampler(groups.norm_linear(577, 768, 2304, F16)).defaults(1)[0]
    adopted = space.adopt(other.sketch.name, other.program.schedule)
    assert adopted is not None
    check_legal([adopted])
    own = space.defaults(1)[0]
    assert space.adopt(own.sketch.name, own.program.schedule) is own
    odd = {**own.program.schedule, "block_q": 33, "stages": 3, "cluster_q": 1}
    near = space.adopt(own.sketch.name, odd)
    assert near is not None and near.program.schedule["block_q"] == 32
    assert space.adopt("gone", own.program.schedule) is None
    assert space.adopt(own.sketch.name, {**own.program.schedule, "gone": 1}) is None
    older = {knob: value for knob, value in own.program.schedule.items() if knob != "cluster_q"}
    newer = space.adopt(own.sketch.name, older)
    assert newer is not None and newer.program.schedule == {**older, "cluster_q": 1}
    thirds = {**own.program.schedule, "block_q": 104, "cluster_q": 3}  # of two tiles
    apart = space.adopt(own.sketch.name, thirds)
    assert apart is not None and apart.program.schedule == {**thirds, "cluster_q": 1}
