"""Linears back to back: right in every schedule, taken and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.back_to_back import LEAST_ROWS, MOST_COLUMNS
from gtco.passes.legality import explain, family
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests.back_to_back_groups import BF16, CASES, F16, FEW, bottleneck, perceptron
from tests.kernel_checks import inputs_of, wrong_outputs, wrong_statistics
from tests.pass_checks import Golden

H100 = TARGETS["sm_90a"]
SMALL = replace(FEW, smem_per_block=140 * 1024)
"""With room for one tile of A, or for few squares."""


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_host_build(case: str) -> None:
    group = CASES[case]()
    for seed, (_, program) in enumerate(GemmBackToBack(group, FEW).legal()):
        values = inputs_of(group, seed)
        outputs = run_on_host(program, group, values, seed)
        assert not wrong_outputs(program, group, values, lambda *_, made=outputs: made)
        assert not wrong_statistics(group, outputs)


@pytest.mark.compiler
@pytest.mark.parametrize("case", ["wider", "bottleneck", "perceptron"])
def test_right_with_little_shared_memory(case: str) -> None:
    group = CASES[case]()
    sketch = GemmBackToBack(
        group, SMALL if case != "wider" else replace(SMALL, smem_per_block=2**17 + 2**15)
    )
    (program, *_) = (program for _, program in sketch.legal())
    assert "A_TILES = 1" in program.source or "SQUARES = 2" in program.source
    for seed in (0, 1):
        values = inputs_of(group, seed)
        assert not wrong_outputs(
            program, group, values, lambda *given, seed=seed: run_on_host(*given, seed)
        )


def test_kernels_compile_without_spills() -> None:
    for case, make in CASES.items():
        for schedule, program in GemmBackToBack(make(), FEW).legal():
            compiled = compile_uncached(program.code, program.name, program.arch)
            assert compiled.spill_bytes == 0, (case, schedule)


def test_source(golden: Golden) -> None:
    sketch = GemmBackToBack(bottleneck(16896, (64, 256, 64), F16), H100)
    golden("gemm_back_to_back.cu", sketch.emit(next(iter(sketch.defaults()))).source)


@pytest.mark.parametrize("case", ["bottleneck", "no residual", "perceptron"])
def test_the_residual_is_copied_and_the_value_between_stored(case: str) -> None:
    program = next(program for _, program in GemmBackToBack(CASES[case](), FEW).legal())
    assert ("image_map" in program.source) == (case == "bottleneck")
    assert ("NotStored" in program.source) == (case == "perceptron")


REFUSED = {
    "columns between": (lambda: bottleneck(300, (64, 100, 64), F16), FEW, "no multiple of 8"),
    "few rows": (lambda: bottleneck(4096, (64, 256, 64), F16), H100, "32 tiles of 128 rows"),
    "another target": (CASES["bottleneck"], TARGETS["sm_80"], "sm_80 has no wgmma"),
    "many columns": (
        lambda: bottleneck(300, (64, 256, MOST_COLUMNS + 8), F16), FEW, "0 pairs of linears",
    ),
    "unaligned rows": (lambda: bottleneck(300, (60, 256, 64), F16), FEW, "not 16-byte aligned"),
    "a deep first product": (
        lambda: bottleneck(300, (512, 256, 256), F16), FEW, "no ring of two stages fits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, target, reason = REFUSED[case]
    with pytest.raises(Illegal, match=reason):
        sketch = GemmBackToBack(make(), target)
        sketch.emit(next(iter(sketch.defaults())))


def test_legality() -> None:
    rows = LEAST_ROWS
    for group in (
        bottleneck(rows, (64, 256, 64), F16),
        bottleneck(rows, (64, 256, 64), BF16, of_images=True),
        perceptron(rows, (96, 384, 96), F16),
    ):
        assert family(group) == "back_to_back"
        assert explain(group.graph, group.graph.nodes) is None
    few = bottleneck(rows - 8, (64, 256, 64), F16)
    reason = explain(few.graph, few.graph.nodes)
    assert reason == "linear and linear are two contractions"


def _parts(graph: Graph, *names: str) -> str:
    return explain(graph, [node for node in graph.nodes if node.name in names]) or ""


def test_parts_of_a_pair_are_judged_as_before() -> None:
    graph = bottleneck(LEAST_ROWS, (64, 256, 64), F16).graph
    assert not _parts(graph, "linear", "add", "relu")
    assert not _parts(graph, "linear_1", "relu_1")
    assert not _parts(graph, "linear", "add", "relu", "linear_1")
    for names in (("relu", "linear_1"), ("add", "relu", "linear_1", "relu_1")):
        assert "reads %relu, which no contraction of the group makes" in _parts(graph, *names)


def test_what_follows_reads_nothing_from_between() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((LEAST_ROWS, 64), F16))
    w = b.constant("w", torch.zeros(64, 64, dtype=F16))
    y = b.add("relu", b.add("linear", x, w))
    z = b.add("add", b.add("linear", y, w), y)
    graph = b.build([z])
    reason = explain(graph, graph.nodes)
    assert reason is not None and "reads %relu behind %linear_1" in reason


def test_others_read_what_lies_between() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((LEAST_ROWS, 64), F16))
    w = b.constant("w", torch.zeros(64, 64, dtype=F16))
    y = b.add("linear", x, w)
    z = b.add("linear", b.add("relu", y), w)
    graph = b.build([y, z])
    assert explain(graph, graph.nodes) == "linear and linear are two contractions"


class Bottlenecks(nn.Module):
    """Two blocks, the first of which widens the image."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(64, 256, 1)
        self.reduce = nn.ModuleList(nn.Conv2d(256, 64, 1) for _ in range(2))
        self.spread = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))
        self.expand = nn.ModuleList(nn.Conv2d(64, 256, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(x)
        for reduce, spread, expand in zip(self.reduce, self.spread, self.expand, strict=True):
            z = torch.relu(spread(torch.relu(reduce(torch.relu(y)))))
            y = y + expand(z)
        return y


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(("target", "there"), [("sm_90a", True), ("sm_80", False)])
def test_models(target: str, there: bool) -> None:
    for model, sizes in ((Bottlenecks(), (64, 64, 56, 56)), (Perceptron(96), (64, 3136, 96))):
        model = model.half().eval()
        x = torch.randn(sizes, dtype=torch.float16)
        fused = gtco.fuse_only(model, (x,), target=target) if False else None
        assert fused is None
