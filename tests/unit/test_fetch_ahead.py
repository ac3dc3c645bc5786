"""A kernel that brings a later kernel's weights to L2: all of them, once, and nothing else new."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco import compiler
from gtco.codegen.program import KernelProgram, Pointer
from gtco.codegen.rules import derive
from gtco.compiler import plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.ir.graph import Group
from gtco.options import Options
from gtco.passes.legality import family
from gtco.runtime.host import HostError
from gtco.runtime.nvrtc import compile_uncached
from gtco.runtime.plan import Plan, PlanKnobs, fetch_ahead
from gtco.target import CARDS, TARGETS
from tests import attention_groups, groups, tile_groups

F16 = torch.float16
GROUPS: dict[str, Callable[[], Group]] = {
    "gemm": lambda: groups.plain_linear(37, 128, 72, F16),
    "attention": lambda: attention_groups.packed(17, 2, 32),
    "rowwise": lambda: tile_groups.class_token(5, 64, stats=True),
    "elementwise": lambda: tile_groups.gelu_bias(7, 24),
}


def programs(name: str) -> list[KernelProgram]:
    """The first schedule of each sketch."""
    group = GROUPS[name]()
    sketches = derive(group, family(group), TARGETS["sm_90a"]).sketches
    return [sketch.emit(next(iter(sketch.defaults()))) for sketch in sketches]


def shares(program: KernelProgram) -> list[range]:
    """The bytes that each block brings, from the numbers in the source."""
    found = re.search(r"prefetch_ahead<(\d+), (\d+)>", program.text)
    assert found is not None
    total, share = map(int, found.groups())
    x, y, z = program.grid
    starts = [block * share for block in range(x * y * z)]
    return [range(at, at + min(share, total - at)) for at in starts if total > at]


@pytest.mark.parametrize("name", GROUPS)
def test_every_sketch_can_fetch_ahead(name: str) -> None:
    for plain in programs(name):
        program = plain.fetching("later", 1 << 20)
        assert program.name != plain.name
        assert program.arguments == (*plain.arguments, Pointer("later"))
        assert program.text.count("const char* __restrict__ ahead) {") == 1
        assert replace(program, fetch_bytes=0, arguments=plain.arguments) == plain
        compiled, before = (
            compile_uncached(each.code, each.name, each.arch) for each in (program, plain)
        )
        assert compiled.spill_bytes == before.spill_bytes == 0
        assert len(compiled.cubin) > len(before.cubin)


@pytest.mark.parametrize("grid", [(1, 1, 1), (7, 1, 1), (6, 2, 1), (3, 5, 2), (132, 1, 1)])
@pytest.mark.parametrize("nbytes", [16, 1 << 16, (1 << 16) + 24, 1_179_648, 4_718_600])
def test_the_blocks_share_all_bytes(nbytes: int, grid: tuple[int, int, int]) -> None:
    program = replace(programs("gemm")[0], grid=grid).fetching("later", nbytes)
    parts = shares(program)
    assert all(each.start % 16 == 0 and len(each) % 16 == 0 and len(each) > 0 for each in parts)
    assert [each.start for each in parts] == [0, *(each.stop for each in parts[:-1])]
    assert nbytes - 16 < parts[-1].stop <= nbytes
    block = f"blockIdx.x + {grid[0]} * (blockIdx.y + {grid[1]} * blockIdx.z)"
    assert block in program.text


def three_linears() -> tuple[nn.Module, Tensor]:
    """The first kernel brings the weights of the third, of 64 KiB; those of the second are less."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 256)
    )
    return model.half().eval(), torch.randn(9, 64).half()


def plan(arch: str, distance: int = 2) -> Plan:
    model, x = three_linears()
    target = TARGETS[arch]
    fused = gtco.fuse(gtco.capture(model, (x,)), target=target)
    options = Options(target=arch)
    known = Knowledge(CARDS["sm_90a"].name)
    return plan_with(known, fused, target, options, PlanKnobs(fetch_distance=distance))


def fetched(plan: Plan) -> list[str | None]:
    """The constant that each launch brings for another."""
    found: list[str | None] = []
    for launch in plan.launches:
        assert launch.program is not None
        ahead = launch.program.fetch_bytes
        found.append(launch.program.arguments[-1].value if ahead else None)
    return found


def test_a_launch_brings_large_weights_of_the_second_after_it() -> None:
    first, second, third = fetched(made := plan("sm_90a"))
    assert (second, third) == (None, None)
    assert first is not None and first in made.launches[2].group.graph.constants
    assert made.graph.constants[first].nbytes == 1 << 16
    assert first not in made.launches[0].group.graph.constants


@pytest.mark.parametrize(
    "arch", [arch for arch, each in TARGETS.items() if not each.has_dependent_launch]
)
def test_older_targets_fetch_nothing(arch: str) -> None:
    assert fetched(plan(arch)) == [None, None, None]


def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans fetch weights ahead, as if the whole graph had been faster so."""
    monkeypatch.setattr(compiler, "plan_knobs", lambda *_: PlanKnobs(fetch_distance=2))


def test_distance_0_changes_nothing() -> None:
    made = plan("sm_90a", 0)
    assert fetched(made) == [None, None, None]
    again = fetch_ahead(made.launches, 0)
    assert all(ours is theirs for ours, theirs in zip(again, made.launches, strict=True))


def test_what_runs_in_aten_neither_fetches_nor_is_fetched_for() -> None:
    launches = plan("sm_90a", 0).launches
    for at in (0, 2):
        without = [replace(each, program=None) if i == at else each for i, each in
                   enumerate(launches)]  # fmt: skip
        again = fetch_ahead(without, 2)
        assert all(ours is theirs for ours, theirs in zip(again, without, strict=True))
    assert fetch_ahead(launches, 2)[0] is not launches[0]


def test_an_artifact_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching(monkeypatch)
    model, x = three_linears()
    compiled = gtco.compile(model, (x,), target="sm_90a")
    compiled.save(tmp_path / "a.gtco")
    loaded = gtco.load(tmp_path / "a.gtco")
    assert fetched(loaded._plan) == fetched(compiled._plan)
    assert fetched(loaded._plan)[0] is not None
    assert loaded.kernels == compiled.kernels


@pytest.mark.compiler
def test_the_answer_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = three_linears()
    plain = gtco.compile(model, (x,), target="host")
    fetching(monkeypatch)
    ahead = gtco.compile(model, (x,), target="host")
    assert fetched(ahead._plan)[0] is not None and fetched(plain._plan)[0] is None
    assert torch.equal(ahead(x), plain(x))


@pytest.mark.compiler
def test_more_than_there_is_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KernelProgram.fetching
    monkeypatch.setattr(KernelProgram, "fetching", lambda p, name, n: right(p, name, n + 16))
    fetching(monkeypatch)
    model, x = three_linears()
    with pytest.raises(HostError, match=r"reads byte \d+ of %\S+, which has 65536"):
        gtco.compile(model, (x,), target="host")(x)
