"""Linears back to back: right in every schedule, taken and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.back_to_back import LEAST_ROWS, MOST_COLUMNS, BackToBacks
from gtco.passes.dataflow import Flow
from gtco.passes.legality import explain, family
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests.back_to_back_groups import BF16, CASES, F16, FEW, bottleneck, perceptron
from tests.kernel_checks import inputs_of, wrong_outputs, wrong_statistics
from tests.pass_checks import Golden

H100 = TARGETS["sm_90a"]
LITTLE = {
    "wider": (144, ("A_TILES = 1", "SQUARES = 2")),
    "bottleneck": (112, ("A_TILES = 2", "SQUARES = 2")),
    "of images": (160, ("A_TILES = 2", "SQUARES = 3")),
    "no residual": (80, ("A_TILES = 1", "SQUARES = 1")),
    "perceptron": (112, ("A_TILES = 1",)),
}
"""KB of shared memory for which there is less of a case, and what its first schedule has then."""


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
@pytest.mark.parametrize("case", LITTLE)
def test_right_with_little_shared_memory(case: str) -> None:
    kilobytes, there = LITTLE[case]
    group = CASES[case]()
    sketch = GemmBackToBack(group, replace(FEW, smem_per_block=kilobytes * 1024))
    program = sketch.emit(next(iter(sketch.defaults())))
    assert all(each in program.source for each in there)
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


@pytest.mark.parametrize(
    ("case", "copied", "stored"),
    [
        ("bottleneck", True, True),
        ("two residuals", True, True),
        ("shifted residual", False, True),
        ("no residual", False, True),
        ("not stored", True, False),
        ("perceptron", False, False),
    ],
)
def test_an_aligned_residual_is_copied_and_what_others_read_stored(
    case: str, copied: bool, stored: bool
) -> None:
    program = next(program for _, program in GemmBackToBack(CASES[case](), FEW).legal())
    assert ("image_map" in program.source) == copied
    assert ("NotStored" not in program.source) == stored


def operand_in_columns() -> Group:
    b = GraphBuilder()
    x = b.add("permute", b.input("x", TensorSpec((64, 304), F16)), dims=(1, 0))
    w = b.constant("w", torch.eye(64, dtype=F16))
    y = b.add("relu", b.add("linear", x, w))
    return Group("operand", b.build([b.add("linear", y, w)]))


def behind(rows: int, change: Callable[[GraphBuilder, str], Sequence[str]]) -> Group:
    """`change` of linear(relu(linear(x))), of 64 columns each."""
    b = GraphBuilder()
    w = b.constant("w", torch.eye(64, dtype=F16))
    y = b.add("relu", b.add("linear", b.input("x", TensorSpec((rows, 64), F16)), w))
    return Group("behind", b.build([*change(b, b.add("linear", y, w))]))


def scores_of_rows(b: GraphBuilder, y: str) -> list[str]:
    return [b.add("mul", y, b.add("exp", b.input("scores", TensorSpec((300, 1), F16))))]


def two_statistics(b: GraphBuilder, y: str) -> list[str]:
    z = b.add("gelu", y, approximate="none")
    return [y, z, b.add("row_stats", y), b.add("row_stats", z)]


def stored_in_columns() -> Group:
    b = GraphBuilder()
    w = b.constant("w", torch.eye(64, dtype=F16))
    y = b.add("relu", b.add("linear", b.input("x", TensorSpec((300, 64), F16)), w))
    z = b.add("linear", y, w)
    return Group("stored", b.build([b.add("permute", y, dims=(1, 0)), z]))


@pytest.mark.parametrize(
    ("case", "width"), [("bottleneck", 8), ("few between", 4), ("odd sizes", 2)]
)
def test_a_lane_stores_as_many_columns_as_parts_of_the_second_weights_allow(
    case: str, width: int
) -> None:
    program = next(program for _, program in GemmBackToBack(CASES[case](), FEW).legal())
    assert f"WIDTH = {width};" in program.source


REFUSED = {
    "operand in columns": (operand_in_columns, FEW, "A lies in rows of K"),
    "stored in columns": (stored_in_columns, FEW, "stored in no runs of 16 bytes"),
    "scores of rows behind": (
        lambda: behind(300, scores_of_rows), FEW, "the second epilogue reads values of each row",
    ),
    "two row statistics": (lambda: behind(300, two_statistics), FEW, "2 values with row statist"),
    "columns between": (lambda: bottleneck(300, (64, 100, 64), F16), FEW, "no multiple of 8"),
    "few rows": (lambda: bottleneck(4096, (64, 256, 64), F16), H100, "32 tiles of 128 rows"),
    "another target": (CASES["bottleneck"], TARGETS["sm_80"], "sm_80 has no wgmma"),
    "many columns": (
        lambda: bottleneck(300, (64, 256, MOST_COLUMNS + 8), F16), FEW, "0 pairs of linears",
    ),
    "unaligned rows": (lambda: bottleneck(300, (60, 256, 64), F16), FEW, "not 16-byte aligned"),
    "a deep first product": (
        lambda: bottleneck(300, (512, 256, 256), F16), FEW, "shared memory .* sm_90a has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, target, reason = REFUSED[case]
    with pytest.raises(Illegal, match=reason):
        GemmBackToBack(make(), target)


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


def test_one_row_stats_ends_the_kernel() -> None:
    graph = behind(LEAST_ROWS, two_statistics).graph
    assert explain(graph, graph.nodes) == "a GEMM ends in one row_stats at most"


def test_no_operand_is_prepared() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((8, LEAST_ROWS, 64), F16))
    w = b.constant("w", torch.eye(64, dtype=F16))
    x = b.add("mul", x, b.input("gate", TensorSpec((8, 1, 64), F16)))
    graph = b.build([b.add("linear", b.add("relu", b.add("linear", x, w)), w)])
    assert explain(graph, graph.nodes) == "%linear reads an operand that is prepared"
    assert explain(graph, graph.nodes[1:]) is None


def test_three_linears_in_a_row_are_two_pairs_and_no_kernel() -> None:
    b = GraphBuilder()
    x, w = b.input("x", TensorSpec((LEAST_ROWS, 64), F16)), b.constant("w", torch.eye(64).half())
    y = b.add("relu", b.add("linear", x, w))
    z = b.add("relu", b.add("linear", y, w))
    graph = b.build([b.add("linear", z, w)])
    first, _, second, _, third = graph.nodes
    pairs = BackToBacks(Flow(graph))
    assert pairs.of(first) is None
    for node, ahead in ((second, "linear"), (third, "linear_1")):
        pair = pairs.of(node)
        assert pair is not None and pair.first.name == ahead
    assert explain(graph, graph.nodes[:3]) is None and explain(graph, graph.nodes[2:]) is None
    assert "are two contractions" in (explain(graph, graph.nodes) or "")


def test_of_two_linears_the_one_with_less_to_copy_is_the_first() -> None:
    b = GraphBuilder()
    sides = []
    for depth in (128, 64):
        x = b.input(f"x{depth}", TensorSpec((300, depth), F16))
        sides.append(b.add("linear", x, b.constant(f"w{depth}", torch.ones(64, depth).half())))
    y = b.add("add", *sides)
    graph = b.build([b.add("linear", y, b.constant("v", torch.eye(64).half()))])
    pair = BackToBacks(Flow(graph)).of(graph.nodes[-1])
    assert pair is not None and pair.first.name == sides[1] and pair.middle == y


def test_others_read_what_lies_between() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((LEAST_ROWS, 64), F16))
    w = b.constant("w", torch.zeros(64, 64, dtype=F16))
    y = b.add("linear", x, w)
    z = b.add("linear", b.add("relu", y), w)
    graph = b.build([y, z])
    assert explain(graph, graph.nodes) == "linear and linear are two contractions"


class Bottlenecks(nn.Module):
    """Two blocks of a ResNet, behind the convolution that widens the image."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(64, 256, 1)
        self.reduce = nn.ModuleList(nn.Conv2d(256, 64, 1) for _ in range(2))
        self.spread = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))
        self.expand = nn.ModuleList(nn.Conv2d(64, 256, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.widen(x))
        for reduce, spread, expand in zip(self.reduce, self.spread, self.expand, strict=True):
            y = torch.relu(spread(torch.relu(reduce(x))))
            x = torch.relu(x + expand(y))
        return x


class Perceptron(nn.Module):
    """The second half of a layer of Swin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "bottlenecks": (Bottlenecks, (64, 56, 56), 8),
    "perceptron": (lambda: Perceptron(96), (3136, 96), 64),
}
"""Each with the sizes of an image, and how many of them have rows enough."""


def planned(model: str, images: int, target: str) -> list[Group]:
    make, sizes, _ = MODELS[model]
    graph = gtco.capture(make().eval().half(), (torch.zeros(images, *sizes).half(),))
    return list(gtco.fuse(graph, target=target))


@pytest.mark.parametrize("model", MODELS)
def test_models_of_many_rows_have_both_linears_in_one_kernel(model: str) -> None:
    images = MODELS[model][-1]
    there, *others = (
        group for group in planned(model, images, "sm_90a") if family(group) == "back_to_back"
    )
    assert not others
    ops = [node.op for node in there.compute]
    if model == "bottlenecks":  # what is expanded, and its sum with what was ahead, is stored too
        assert ops == ["linear", "add", "relu", "linear", "relu"]
        sizes = [there.graph.specs[name].sizes[-1] for name in there.graph.outputs]
        assert sorted(sizes) == [64, 256]
    else:
        assert ops[:2] == ["merge_stats", "linear"] and ops[-3:] == ["gelu", "linear", "add"]
        assert len(there.graph.outputs) == 1
    GemmBackToBack(there, H100)


@pytest.mark.parametrize("model", MODELS)
def test_few_rows_and_other_targets_keep_two_kernels(model: str) -> None:
    for images, target in ((1, "sm_90a"), (MODELS[model][-1], "sm_80")):
        assert all(family(group) != "back_to_back" for group in planned(model, images, target))
