"""An operator that a family can carry is one row of the table: captured graphs aside, nothing else
has to know of it."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.rowwise import Rowwise
from gtco.codegen.sketches.stencil import Stencil
from gtco.ir import ops
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.interpreter import interpret
from gtco.ir.ops import OPS, Op, Pattern, RowKernel, Window
from gtco.ir.spec import TensorSpec
from gtco.passes import fusion, run_pipeline
from gtco.passes.legality import family
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests.kernel_checks import inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]

ROWS = (
    Op("softsign", Pattern.ELEMENTWISE, torch.nn.functional.softsign,
       "{0} / (1.0f + math::abs({0}))"),
    Op("root_mean_square", Pattern.REDUCTION,
       lambda x, *, dims, keepdim: x.square().mean(dims, keepdim=keepdim).sqrt(),
       row=RowKernel("math::sqrt(tile.mean(map<N>([&](int i) {{ return {0}[i] * {0}[i]; }})))")),
    Op("softmin", Pattern.REDUCTION, lambda x, *, dim: torch.softmax(-x, dim),
       row=RowKernel("tile.softmax(map<N>([&](int i) {{ return -{0}[i]; }}))", whole=True)),
    Op("min_pool", Pattern.COMPLEX_OUT_FUSABLE,
       lambda x, **attrs: -OPS["max_pool"].reference(-x, **attrs), flops=ops.OPS["max_pool"].flops,
       family="stencil", window=Window("math::infinity()", "math::min_nan(sum, pixel)")),
)  # fmt: skip


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in ROWS:
        monkeypatch.setitem(OPS, row.name, row)  # type: ignore[arg-type]


def groups_of(graph: Graph) -> list[Group]:
    fused = fusion.fuse(run_pipeline(graph), lambda group: 1.0)
    assert len(fused.groups) == 1, "it joins the kernels of others"
    return list(fused.groups)


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["root_mean_square", "softmin"])
def test_a_reduction(name: str) -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((5, 33), torch.float16))
    attrs = {"dim": 1} if name == "softmin" else {"dims": (1,), "keepdim": True}
    y = b.add("mul", b.add("softsign", x), b.add(name, x, **attrs))
    graph = b.build([y])
    (group,) = groups_of(graph)
    assert family(group) == "rowwise"
    for program in sample(Rowwise(group, H100), 1):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)
    value = torch.randn(5, 33).half()
    (answer,) = interpret(graph, [value])
    assert answer.shape == (5, 33)


@pytest.mark.compiler
def test_a_pooling() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 7, 5, 24), torch.float16))
    attrs = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 1)}
    y = b.add("softsign", b.add("min_pool", x, **attrs, ceil_mode=False))
    (group,) = groups_of(b.build([y]))
    assert family(group) == "stencil"
    for program in sample(Stencil(group, H100), 1):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)
