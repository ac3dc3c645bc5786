"""Convolutions that compute their image as they copy it: right on the host build, compiled, and
what is no prologue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gtco.codegen.rules import derive
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_patches import ConvPatches
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.legality import explain
from gtco.passes.prologues import prologue_of
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests.kernel_checks import inputs_of, staying, wrong_outputs
from tests.pass_checks import random
from tests.prologue_groups import CASES, F16, WIDE, prepared

A100, H100 = TARGETS["sm_80"], TARGETS["sm_90a"]
KINDS: tuple[tuple[type[ConvPatches], str], ...] = (
    *((ConvMma, case) for case in (*CASES, *WIDE)),
    *((ConvWgmma, case) for case in CASES),
)


@pytest.mark.compiler
@pytest.mark.parametrize(("kind", "case"), KINDS)
def test_every_case_is_right(kind: type[ConvPatches], case: str) -> None:
    """By the best default, and by two random schedules of blocks that stay."""
    group = {**CASES, **WIDE}[case]()
    values = inputs_of(group, seed=1)
    for program in staying(kind, group, H100):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("joined", [(), (32,)])
def test_none_spills(arch: str, joined: tuple[int, ...]) -> None:
    graph = prepared((1, 64, 128, 128, 32), 32, (3, 3, 3), F16, "norm", joined=joined)
    taken = derive(Group("scan", graph), "gemm", TARGETS[arch]).sketches
    assert len(taken) == (1 if arch == "sm_80" else 2)
    for sketch in taken:
        program = sketch.emit(next(iter(sketch.defaults())))
        assert not compile_uncached(program.code, program.name, program.arch).spill_bytes


def test_other_sketches_say_that_they_copy_unchanged() -> None:
    group = CASES["norm"]()
    refused = derive(group, "gemm", H100).refusals
    said = dict(refused)
    assert (
        said["gemm_mma"] == said["gemm_persistent"] == "this sketch copies its operands unchanged"
    )


def of_operands(
    change: Callable[[GraphBuilder, str, str], str], *, returns: bool = False
) -> tuple[Graph, str | None]:
    """conv(change(x)), and why its nodes are no group."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 9, 9, 32), F16))
    gate = b.input("gate", TensorSpec((2, 1, 1, 32), F16))
    made = change(b, x, gate)
    w = b.constant("w", random(32, 3, 3, 32, dtype=F16))
    ones = (1, 1)
    y = b.add("conv", made, w, stride=ones, before=ones, after=ones, dilation=ones)
    graph = b.build([y, made] if returns else [y])
    return graph, explain(graph, [node for node in graph.nodes if not node.definition.is_view])


UNCHANGED = "is copied to shared memory unchanged"
REFUSED: dict[str, Callable[[GraphBuilder, str, str], str]] = {
    "of constants alone": lambda b, x, gate: b.add("relu", b.add("mul", x, other=2.0)),
    "two images": lambda b, x, gate: b.add(
        "add", b.add("mul", x, gate), b.input("y", TensorSpec((2, 9, 9, 32), F16))
    ),
    "a number of each pixel": lambda b, x, gate: b.add(
        "mul", b.add("mul", x, gate), b.input("y", TensorSpec((2, 9, 9, 1), F16))
    ),
    "pixels in another order": lambda b, x, gate: b.add(
        "permute", b.add("mul", x, gate), dims=(0, 2, 1, 3)
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_none(case: str) -> None:
    graph, reason = of_operands(REFUSED[case])
    conv = next(node for node in graph.nodes if node.op == "conv")
    assert prologue_of(graph, conv) is None and UNCHANGED in str(reason)


def test_what_others_read_is_stored() -> None:
    graph, reason = of_operands(lambda b, x, gate: b.add("mul", x, gate), returns=True)
    conv = next(node for node in graph.nodes if node.op == "conv")
    assert prologue_of(graph, conv) is None and UNCHANGED in str(reason)


def test_all_of_it_or_none() -> None:
    graph = CASES["norm"]().graph
    members = [node for node in graph.nodes if node.op != "scale_shift"]
    assert "is part of what stands ahead of the image" in str(explain(graph, members))
    behind = [node for node in graph.nodes if node.op in ("conv", "grouped_conv", "add", "relu")]
    assert explain(graph, behind) is None and explain(graph, graph.nodes) is None


def test_one_piece_of_a_concat_at_most() -> None:
    b = GraphBuilder()
    pieces = [
        b.add("mul", b.input(f"x{at}", TensorSpec((1, 9, 9, 16), F16)),
              b.input(f"gate{at}", TensorSpec((1, 1, 1, 16), F16)))
        for at in range(2)
    ]  # fmt: skip
    w = b.constant("w", random(16, 3, 3, 32, dtype=F16))
    ones = (1, 1)
    joined = b.add("concat", *pieces, dim=3)
    y = b.add("conv", joined, w, stride=ones, before=ones, after=ones, dilation=ones)
    graph = b.build([y])
    conv = graph.producers[y]
    assert prologue_of(graph, conv) is None


def test_numbers_of_channels_may_lie_apart() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((1, 9, 9, 16), F16))
    gate = b.add("slice", b.input("gate", TensorSpec((1, 1, 1, 32), F16)),
                 dim=3, start=0, end=32, step=2)  # fmt: skip
    w = b.constant("w", random(16, 3, 3, 16, dtype=F16))
    ones = (1, 1)
    made = b.add("mul", x, gate)
    graph = b.build([b.add("conv", made, w, stride=ones, before=ones, after=ones, dilation=ones)])
    group = Group("apart", graph)
    sketch = ConvMma(group, A100)
    program = sketch.emit(next(iter(sketch.defaults())))
    assert not wrong_outputs(program, group, inputs_of(group), run_on_host)
