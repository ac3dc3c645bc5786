"""Where a group begins to read is an argument of its launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.model import roofline_us
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.passes.origins import at_origins
from gtco.passes.tasks import tasks, workload_key
from gtco.selection import select
from gtco.target import TARGETS
from tests.origin_groups import cropped, gated, layer_of_keys, modulated

H100 = TARGETS["sm_90a"]

MOVED: dict[str, tuple[Callable[[int], Group], int, int, int]] = {
    # from, to, and how many bytes further on each input begins for an element of the first
    "gated": (lambda at: gated(start=at), 0, 384, 2),
    "modulated": (lambda at: modulated(start=at), 8, 192, 2),
    "layer_of_keys": (lambda at: layer_of_keys(start=at), 128, 512, 2),
    "cropped": (lambda at: cropped(top=at), 1, 5, 18 * 24 * 2),
}


@pytest.mark.parametrize("case", MOVED)
def test_one_kernel_wherever_it_begins(case: str) -> None:
    make, here, there, step = MOVED[case]
    one, other = make(here), make(there)
    assert workload_key(one, H100) == workload_key(other, H100)
    sketches = [derive(group, family(group), H100).sketches for group in (one, other)]
    assert sketches[0]
    for mine, yours in zip(*sketches, strict=True):
        schedule = next(iter(mine.defaults()))
        a, b = mine.emit(schedule), yours.emit(schedule)
        assert (a.name, a.code, a.binding) == (b.name, b.code, b.binding)
        apart = {y.origin - x.origin for x, y in zip(a.arguments, b.arguments, strict=True)}
        assert apart == {0, (there - here) * step}


def test_the_slices_read_the_same_from_there() -> None:
    group = modulated(start=195)
    moved, origins = at_origins(group.graph)
    assert origins == {"long": 2 * 192}  # as far as whole accesses of 16 bytes go
    x, long = torch.randn(2, 24, 96).half(), torch.randn(2, 1000).half()
    ahead = torch.cat([long.flatten()[192:], torch.zeros(192).half()]).reshape(2, 1000)
    (wanted,), (got,) = interpret(group.graph, [x, long]), interpret(moved, [x, ahead])
    assert torch.equal(wanted, got)


def test_what_whole_accesses_cannot_skip_counts() -> None:
    keys = {workload_key(modulated(start=at), H100) for at in range(192, 200)}
    assert len(keys) == 8


def test_an_input_that_is_read_otherwise_too_stays() -> None:
    def read(*, whole: bool, other_dim: bool) -> Group:
        b = GraphBuilder()
        x = b.input("x", TensorSpec((16, 16), torch.float16))
        y = b.add("relu", b.add("slice", x, dim=0, start=8, end=16))
        outputs = [y]
        if whole:
            outputs.append(b.add("exp", x))
        if other_dim:
            outputs.append(b.add("tanh", b.add("slice", x, dim=1, start=8, end=16)))
        return Group("g", b.build(outputs))

    assert at_origins(read(whole=False, other_dim=False).graph)[1] == {"x": 256}
    for whole, other_dim in ((True, False), (False, True)):
        graph = read(whole=whole, other_dim=other_dim).graph
        assert at_origins(graph) == (graph, {})


def test_the_parts_of_a_long_row_are_one_task() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 24, 64), torch.float16))
    long = b.input("long", TensorSpec((2, 4 * 64), torch.float16))
    for layer in range(4):
        gate = b.add("slice", long, dim=1, start=64 * layer, end=64 * (layer + 1))
        w = b.constant("w", torch.randn(64, 64).half() / 8)
        y = b.add("mul", b.add("linear", x, w), b.add("reshape", gate, shape=(2, 1, 64)))
        x = b.add("add", x, y)
    fused = fuse(b.build([x]), lambda group: roofline_us(group, H100))
    (task,) = tasks(fused, H100)
    assert task.weight == 4
    programs = [each.program for each in select(fused, H100, Knowledge("H100"))]
    assert len({each.name for each in programs if each}) == 1
    begins = [max(a.origin for a in each.arguments) for each in programs if each]
    assert begins == [0, 128, 256, 384]
