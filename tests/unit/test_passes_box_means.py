"""The mean of an image's pixels becomes that of means which the kernel of the pixels leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.columnwise import Columnwise
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes import box_means
from gtco.passes.box_means import mean_of_boxes
from gtco.passes.legality import explain, family
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import box_groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs
from tests.pass_checks import check, ops, random

F16, F32 = torch.float16, torch.float32


def depthwise(
    *image: int, stride: int = 1, keepdim: bool = True, dtype: torch.dtype = F16
) -> Graph:
    """The mean of silu(depthwise_conv(x)), and that itself."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, dtype))
    given = {"before": (1, 1), "after": (1, 1), "dilation": (1, 1), "stride": (stride, stride)}
    w = b.constant("w", random(3, 3, image[-1], dtype=dtype))
    y = b.add("silu", b.add("depthwise_conv", x, w, **given))
    return b.build([y, b.add("mean", y, dims=(1, 2), keepdim=keepdim)])


def linear(*image: int, columns: int = 8, dtype: torch.dtype = F16) -> Graph:
    """The mean of linear(x) + x, and that itself."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec(image, dtype))
    y = b.add("linear", x, b.constant("w", random(columns, image[-1], dtype=dtype)))
    y = b.add("add", y, b.input("residual", b.specs[y]))
    return b.build([y, b.add("mean", y, dims=tuple(range(1, len(image) - 1)), keepdim=True)])


def args_of(graph: Graph) -> tuple[Tensor, ...]:
    specs = graph.inputs.values()
    return tuple(random(*spec.sizes, dtype=spec.dtype, seed=at) for at, spec in enumerate(specs))


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize(
    ("graph", "boxes"),
    [
        ((2, 56, 56, 8), (2, 7, 7, 8)),
        ((1, 28, 14, 8), (1, 4, 2, 8)),
        ((1, 20, 10, 8), (1, 5, 2, 8)),
        ((3, 7, 8, 8), (3, 1, 1, 8)),
    ],
)
def test_boxes_of_a_depthwise_convolution(
    graph: tuple[int, ...], boxes: tuple[int, ...], keepdim: bool
) -> None:
    made = depthwise(*graph, keepdim=keepdim)
    result = check(mean_of_boxes, made, args_of(made))
    (means,) = (node for node in result.nodes if node.op == "box_means")
    assert means.outputs[0] == TensorSpec(boxes, F32)
    assert ops(result)["mean"] == 1
    assert not ops(mean_of_boxes(result)) - ops(result), "once is enough"


def test_runs_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_means, "LARGE_BYTES", 1)
    for image, runs in (((2, 4, 12, 24), 3), ((1, 2, 4, 10, 24), 5), ((3, 16, 24), 1)):
        made = linear(*image, dtype=F32)
        result = check(mean_of_boxes, made, args_of(made))
        (means,) = (node for node in result.nodes if node.op == "box_means")
        assert means.outputs[0].sizes == (image[0], runs, 8)


@pytest.mark.parametrize(
    "graph",
    [
        depthwise(1, 11, 56, 8),
        depthwise(1, 14, 9, 8),
        depthwise(1, 10, 10, 8),
        linear(1, 56, 56, 24),
        linear(64, 33, 45, 24, columns=64),
    ],
    ids=["eleven rows", "nine pixels a row", "boxes of ten", "a small product", "no whole runs"],
)
def test_other_means_stay(graph: Graph) -> None:
    assert mean_of_boxes(graph) is graph or ops(mean_of_boxes(graph)) == ops(graph)


def test_one_kernel_holds_both() -> None:
    graph = mean_of_boxes(depthwise(2, 28, 28, 32))
    nodes = [node for node in graph.nodes if node.op not in ("mean", "cast")]
    assert explain(graph, nodes) is None
    after = [node for node in graph.nodes if node.op in ("box_means", "mean")]
    assert "cannot read it in the same kernel" in str(explain(graph, after))


def test_what_leaves_no_means_says_so() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 32, 24), F16))
    y = b.add("linear", x, b.constant("w", random(16, 24, dtype=F16)))
    z = b.add("linear", y, b.constant("v", random(8, 16, dtype=F16)))
    means = [b.add("box_means", value, box=box) for value, box in ((y, (8,)), (y, (16,)))]
    graph = b.build([z, *means])
    by_op = {name: graph.producers[name] for name in (y, *means)}
    assert "no means of boxes of [8]" in str(explain(graph, [by_op[y], by_op[means[0]]]))
    assert explain(graph, [by_op[y], by_op[means[1]]]) is None
    joined = box_groups.RUNS["means of a concat"]()
    assert explain(joined.graph, joined.compute) is None
    b = GraphBuilder()
    x = b.input("x", TensorSpec((2, 32, 24), F16))
    y = b.add("linear", x, b.constant("w", random(64, 24, dtype=F16)))
    graph = b.build([y, b.add("box_means", y, box=(16,)), b.add("row_stats", y)])
    assert "do not reduce the same rows" in str(explain(graph, graph.nodes))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("shape", "box", "kind"),
    [
        ((2, 48, 24), (16,), Columnwise),
        ((2, 48, 24), (16,), Rowwise),
        ((2, 8, 10, 24), (4, 5), Rowwise),
    ],
)
def test_a_kernel_of_their_own(
    shape: tuple[int, ...], box: tuple[int, ...], kind: type[Sketch]
) -> None:
    b = GraphBuilder()
    y = b.add("silu", b.input("x", TensorSpec(shape, F16)))
    group = Group("means", b.build([b.add("box_means", y, box=box)]))
    for program in sample(kind(group, TARGETS["sm_90a"]), 2):
        assert not wrong_outputs(program, group, inputs_of(group, seed=1), run_on_host)


class Gate(nn.Module):
    """A depthwise convolution and squeeze-and-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, channels, 1)  # leaves channels last
        self.depthwise = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)
        self.squeeze = nn.Conv2d(channels, 8, 1)
        self.excite = nn.Conv2d(8, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.depthwise(self.expand(x)))
        mean = x.mean((2, 3), keepdim=True)
        return x * self.excite(nn.functional.relu(self.squeeze(mean))).sigmoid()


@pytest.mark.parametrize("side", [28, 7])
def test_squeeze_and_excitation_as_a_whole(side: int) -> None:
    torch.manual_seed(0)
    model, x = Gate(32).eval().half(), torch.randn(2, 32, side, side).half()
    fused = gtco.fuse(gtco.capture(model, x))
    kinds = {family(group): [node.op for node in group.compute] for group in fused.groups}
    assert kinds["stencil"][-1] == "box_means"
    assert "squeeze" in kinds, "of one box, too"
