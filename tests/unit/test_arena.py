"""No two live values overlap, whatever the lifetimes."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gtco.runtime.arena import ALIGNMENT, Arena, Lifetime, align, plan_arena

lifetimes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(-1, 12), st.integers(0, 12)), max_size=24
).map(
    lambda rows: [
        Lifetime(f"v{index}", nbytes, first, first + length)
        for index, (nbytes, first, length) in enumerate(rows)
    ]
)


def overlapping(arena: Arena, values: list[Lifetime]) -> list[tuple[str, str]]:
    """Pairs that are alive together and share a byte."""
    clashes = []
    for a, b in combinations(values, 2):
        begin_a, begin_b = arena.offsets[a.name], arena.offsets[b.name]
        apart = begin_a + a.nbytes <= begin_b or begin_b + b.nbytes <= begin_a
        if a.first <= b.last and b.first <= a.last and not apart:
            clashes.append((a.name, b.name))
    return clashes


@given(lifetimes)
def test_live_values_never_overlap(values: list[Lifetime]) -> None:
    arena = plan_arena(values)
    assert overlapping(arena, values) == []
    assert all(offset % ALIGNMENT == 0 for offset in arena.offsets.values())
    assert arena.nbytes <= sum(align(value.nbytes) for value in values)
    launches = range(-1, 26)
    live = [
        sum(align(v.nbytes) for v in values if v.first <= launch <= v.last) for launch in launches
    ]
    assert arena.nbytes >= max(live)


def test_the_check_finds_an_overlap() -> None:
    values = [Lifetime("a", 512, 0, 2), Lifetime("b", 512, 2, 3)]
    assert overlapping(Arena({"a": 0, "b": 256}, 768), values) == [("a", "b")]


def test_a_chain_needs_two_buffers() -> None:
    values = [Lifetime(f"v{i}", 1000, i, i + 1) for i in range(10)]
    assert plan_arena(values).nbytes == 2 * align(1000)


def test_the_tightest_gap_is_taken() -> None:
    fixed = [Lifetime("big", 4096, 0, 0), Lifetime("mid", 2048, 0, 9), Lifetime("low", 512, 0, 0)]
    later = [Lifetime("c", 512, 5, 5)]
    arena = plan_arena([*fixed, *later])
    assert arena.nbytes == 4096 + 2048 + 512
    assert overlapping(arena, [*fixed, *later]) == []


def test_nothing_needs_nothing() -> None:
    assert plan_arena([]) == Arena({}, 0)
