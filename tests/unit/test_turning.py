"""Kernels and plans that walk from the last tile to the first: the same bits, where it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gtco
from gtco.codegen.program import TURNING, KernelProgram
from gtco.codegen.rules import SKETCHES, derive
from gtco.compiler import capture_for, fuse, plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.ir.graph import GraphBuilder, Group, subgraph
from gtco.ir.spec import TensorSpec
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.legality import family
from gtco.runtime.host import run_on_host
from gtco.runtime.module import CompiledModule
from gtco.runtime.nvrtc import compile_uncached
from gtco.runtime.plan import Launch, Plan
from gtco.runtime.turning import WORTH_TURNING, turn
from gtco.target import HOST, TARGETS
from tests import attention_groups, groups, models, projection_groups, tile_groups, turned
from tests.kernel_checks import defaults, inputs_of

H100 = TARGETS["sm_90a"]
F16 = torch.float16


@pytest.mark.compiler
@pytest.mark.parametrize("case", turned.CASES)
def test_either_way_gives_the_same_bits(case: str) -> None:
    group, forward = turned.made(case)
    backward = replace(forward, backward=True)
    assert forward.turns and backward.name != forward.name
    values = inputs_of(group, seed=1)
    expected = run_on_host(forward, group, values)
    for seed in (0, 1):
        outputs = run_on_host(backward, group, values, seed)
        assert all(torch.equal(outputs[name], expected[name]) for name in group.graph.outputs)


def machine_code(program: KernelProgram) -> bytes:
    code = program.text.replace("ENTRY_POINT", "kernel")
    return compile_uncached(code, "kernel", program.arch).cubin


def both_ways(program: KernelProgram) -> tuple[bytes, bytes]:
    """Of text with the same lines."""
    unknown = replace(program, source=f"#define NO_WORD\n{program.source}")
    return machine_code(unknown), machine_code(replace(program, backward=True))


@pytest.mark.parametrize("case", turned.CASES)
def test_backward_is_another_kernel(case: str) -> None:
    forward, backward = both_ways(turned.made(case)[1])
    assert forward != backward


FORWARD: dict[str, Callable[[], Group]] = {
    "gemm_skinny": lambda: groups.plain_linear(3, 256, 72, F16),
    "attention": lambda: attention_groups.packed(17, 2, 32),
    "attention_wgmma": lambda: attention_groups.packed(197, 2, 64),
    "attention_projection": lambda: projection_groups.projected(2, 50, 32, 64),
    "topk": tile_groups.TOPK["one_of_1000"],
}


def test_every_sketch_turns_or_is_known_to_go_forward() -> None:
    assert {kind.name for kind in SKETCHES} == TURNING | set(FORWARD)
    assert {turned.made(case)[1].sketch for case in turned.CASES} == TURNING


@pytest.mark.parametrize("sketch", FORWARD)
def test_kernels_that_go_forward_whatever_is_said(sketch: str) -> None:
    group = FORWARD[sketch]()
    found = derive(group, family(group), H100).sketches
    program = next(each.emit(next(iter(each.defaults()))) for each in found if each.name == sketch)
    assert not program.turns
    forward, backward = both_ways(program)
    assert forward == backward


LARGE, SMALL = TensorSpec((4096, 8192), F16), TensorSpec((4096, 2048), F16)
"""67 MB, which L2 does not keep, and 17 MB, which it does."""
ATEN = "by ATen"


def ways(b: GraphBuilder) -> str:
    """Which way the launches go, of one node each: > forward, < backward. What comes from the
    module `ATEN` has no generated kernel."""
    last = b.nodes[-1]
    graph = b.build(last.values)
    launches = []
    for node in graph.nodes:
        group = Group(node.name, subgraph(graph, [node], node.values))
        kind = family(group)
        sketches = () if node.source == ATEN else derive(group, kind, H100).sketches
        program = next(defaults(sketches[0])) if sketches else None
        launches.append(Launch(group, kind, program, "default"))
    found = turn(launches, H100)
    for before, after in zip(launches, found, strict=True):
        goes_back = after.program is not None and after.program.backward
        assert after.program == (before.program and replace(before.program, backward=goes_back))
    return "".join("<" if each.program and each.program.backward else ">" for each in found)


def test_large_values_are_walked_over_to_and_fro() -> None:
    b = GraphBuilder()
    x = b.input("x", LARGE)
    for _ in range(4):
        x = b.add("relu", x)
    assert ways(b) == "<><>"


def test_what_l2_keeps_is_walked_over_forward() -> None:
    b = GraphBuilder()
    x = b.input("x", SMALL)
    for _ in range(3):
        x = b.add("relu", x)
    assert ways(b) == ">>>"


@pytest.mark.parametrize(("more", "expected"), [(0, ">"), (2, "<")])
def test_from_which_size_on(more: int, expected: str) -> None:
    b = GraphBuilder()
    elements = int(WORTH_TURNING * H100.kept_bytes) // 2
    b.add("relu", b.input("x", TensorSpec((elements + more,), F16)))
    assert ways(b) == expected


def test_two_readers_of_one_value_go_apart() -> None:
    b = GraphBuilder()
    y = b.add("relu", b.input("x", LARGE))
    for op in ("silu", "abs", "exp"):
        b.add(op, y)
    assert ways(b) == "<><>"


def test_small_launches_between_change_nothing() -> None:
    b = GraphBuilder()
    y = b.add("relu", b.input("x", LARGE))
    b.add("relu", b.input("small", SMALL))
    b.add("silu", y)
    b.add("abs", y)
    assert ways(b) == "<>><"


def test_what_a_launch_of_small_inputs_makes_counts_as_written_forward() -> None:
    b = GraphBuilder()
    y = b.add("relu", b.input("small", SMALL))
    y = b.add("concat", *[y] * 4, dim=1)
    b.add("relu", y)
    assert ways(b) == ">><"


def test_calls_of_aten_go_forward() -> None:
    b = GraphBuilder()
    x = b.add("relu", b.input("x", LARGE))
    y = b.add("abs", x, source=ATEN)
    z = b.add("relu", y)
    b.add("silu", x)
    b.add("abs", z, source=ATEN)
    b.add("silu", z)
    assert ways(b) == "<><<><"


def test_kernels_that_cannot_turn_go_forward() -> None:
    b = GraphBuilder()
    x = b.input("x", LARGE)
    b.node("topk", [x], {"k": 1, "largest": True})
    b.add("relu", x)
    b.node("topk", [x], {"k": 1, "largest": True})
    b.add("silu", x)
    assert ways(b) == "><><"


def test_of_two_large_values_the_one_that_was_touched_last_counts() -> None:
    b = GraphBuilder()
    x = b.input("x", LARGE)
    y = b.add("relu", x)
    z = b.add("relu", y)
    b.add("add", x, z)
    b.add("add", z, x)
    b.add("mul", z, z)
    assert ways(b) == "<><><"


def test_weights_do_not_count() -> None:
    b = GraphBuilder()
    w = b.constant("w", torch.zeros(8192, 4096, dtype=F16))
    b.add("linear", b.input("x", TensorSpec((64, 4096), F16)), w)
    assert ways(b) == ">"


def backward(plan: Plan) -> list[bool]:
    return [launch.program is not None and launch.program.backward for launch in plan.launches]


def forward_alone(plan: Plan) -> Plan:
    launches = (
        replace(each, program=each.program and replace(each.program, backward=False))
        for each in plan.launches
    )
    return replace(plan, launches=tuple(launches))


@pytest.mark.compiler
def test_a_model_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    model, image = models.vit(32, 4, 64, 1, 2).half(), torch.randn(2, 3, 32, 32).half()
    options, small = Options(target=HOST), replace(H100, l2_bytes=1 << 12)
    captured = capture_for(model, (image,), None, options)
    plan = plan_with(
        Knowledge("none"), fuse(run_pipeline(captured.graph), target=H100), small, options
    )
    assert len(set(backward(plan))) == 2
    other = forward_alone(plan)
    assert not any(backward(other))
    assert torch.equal(
        CompiledModule(plan, captured)(image), CompiledModule(other, captured)(image)
    )


def test_an_artifact_says_which_way(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3))
    compiled = gtco.compile(model.half(), (torch.randn(80, 64, 56, 56).half(),), target="sm_90a")
    assert any(backward(compiled._plan))
    compiled.save(tmp_path / "large.gtco")
    loaded = gtco.load(tmp_path / "large.gtco")
    assert [each.program for each in loaded._plan.launches] == [
        each.program for each in compiled._plan.launches
    ]
