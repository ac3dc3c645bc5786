"""A border around a sum of what is broadcast."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.cost_model.model import roofline_us
from gtco.ir.graph import Graph, GraphBuilder
from gtco.ir.interpreter import interpret
from gtco.ir.spec import TensorSpec
from gtco.passes.bordered_sums import border_addends
from gtco.passes.fusion import fuse
from gtco.passes.legality import family
from gtco.passes.rewrite import Log
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests.kernel_checks import inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]
BORDER = {"before": (0, 1, 1), "after": (0, 0, 3)}


def relative_positions(
    *, frames: tuple[int, ...] = (2, 3, 4, 1, 1), read_twice: bool = False, ahead: str = "add"
) -> Graph:
    """pad(reshape((rows + columns) + frames)) of 2 heads, 3 queries and 4 x 5 x 2 keys."""
    b = GraphBuilder()
    heads, queries = 2, 3
    rows = b.input("rows", TensorSpec((heads, queries, 1, 5, 1), torch.float16))
    columns = b.input("columns", TensorSpec((heads, queries, 1, 1, 2), torch.float16))
    other = b.input("frames", TensorSpec(frames, torch.float16))
    sum_ = b.add("add", b.add("add", rows, columns), other)
    if ahead != "add":
        sum_ = b.add(ahead, sum_)
    mask = b.add("pad", b.add("reshape", sum_, shape=(heads, queries, 40)), **BORDER)
    outputs = [b.add("relu", mask)]
    if read_twice:
        outputs.append(b.add("exp", sum_))
    return b.build(outputs)


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if not node.definition.is_view]


def test_each_addend_gets_the_border() -> None:
    graph = relative_positions()
    changed = border_addends(graph)
    changed.verify()
    assert ops(graph) == ["add", "add", "pad", "relu"]
    assert sorted(ops(changed)) == ["add", "add", "pad", "pad", "pad", "relu"]
    inputs = [torch.randn(spec.sizes).half() for spec in graph.inputs.values()]
    (before,) = interpret(graph, inputs, dtype=torch.float64)
    (after,) = interpret(changed, inputs, dtype=torch.float64)
    assert torch.equal(before, after)
    assert not after[:, 0].any() and not after[:, :, 0].any() and not after[:, :, 41:].any()


@pytest.mark.compiler
def test_one_kernel_reads_what_is_added_where_it_lies() -> None:
    fused = fuse(border_addends(relative_positions()), lambda group: roofline_us(group, H100))
    (group,) = fused.groups
    values = inputs_of(group, seed=1)
    (sketch,) = derive(group, family(group), H100).sketches
    for program in sample(sketch, 3):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"read_twice": True}, "read elsewhere too"),
        ({"frames": (2, 3, 4, 5, 2)}, "as large as the sum"),
        ({"ahead": "exp"}, ""),
    ],
)
def test_what_is_left(given: dict[str, object], words: str) -> None:
    graph, log = relative_positions(**given), Log()  # type: ignore[arg-type]
    assert ops(border_addends(graph, log)) == ops(graph)
    assert any(words in str(refused) for refused in log.refusals) or not words
