"""Volumes [N, C, T, H, W]: what is captured of them, what becomes of it, and whole models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from experiments.models.transformers_zoo import randomize
from experiments.models.volumes import X3D, ClipResNet, ScanUNet
from gtco.check import judge
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests.elsewhere import run_elsewhere
from tests.pass_checks import Function, ops

Sizes = int | tuple[int, int, int]


def conv(channels: int, kernel: Sizes, **given: Sizes) -> nn.Conv3d:
    return nn.Conv3d(4, channels, kernel, **given)  # type: ignore[arg-type]


CONVOLUTIONS = {
    "3x3x3": (conv(6, 3, padding=1), "conv"),
    "apart": (conv(6, 3, stride=(2, 1, 2), padding=(0, 1, 2)), "conv"),
    "dilated": (conv(6, (2, 3, 1), padding=(1, 2, 0), dilation=(2, 2, 1)), "conv"),
    "frames and pixels": (conv(6, (2, 3, 3), stride=(2, 1, 1), padding=(1, 0, 0)), "conv"),
    "of a frame": (conv(6, (1, 3, 3), stride=(2, 1, 2), padding=(0, 1, 1)), "conv"),
    "of a frame, in groups": (conv(8, (1, 3, 3), padding=(0, 1, 1), groups=2), "grouped_conv"),
    "of a frame, by channel": (conv(4, (1, 3, 3), groups=4), "depthwise_conv"),
    "of frames": (conv(6, (3, 1, 1), stride=(2, 1, 1), padding=(1, 0, 0)), "conv"),
    "of frames, apart": (conv(6, (3, 1, 1), stride=(1, 2, 3), dilation=(2, 1, 1)), "conv"),
    "of frames, by channel": (conv(4, (3, 1, 1), padding=(1, 0, 0), groups=4), "depthwise_conv"),
    "of a border of pixels": (conv(6, (3, 1, 1), padding=(0, 1, 1)), "conv"),
    "of a pixel": (conv(6, 1), "linear"),
    "of a pixel, apart": (conv(6, 1, stride=2), "conv"),
    "in groups": (conv(6, 3, stride=2, padding=1, groups=2), "grouped_conv"),
    "by channel": (conv(4, 3, stride=(1, 2, 2), padding=1, groups=4), "depthwise_conv"),
    "two of a channel": (conv(8, (2, 3, 2), padding=1, groups=4), "depthwise_conv"),
}


def rewritten(model: nn.Module, *args: Tensor) -> Graph:
    """The graph of `model` after all passes, which is right, wherever the constants are."""
    graph = gtco.capture(model.eval(), args)
    result = run_pipeline(graph)
    result.verify()
    assert str(run_elsewhere(run_pipeline, graph)) == str(result)
    expected = model(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for each in (graph, result):
        for found, exact in zip(interpret(each, args), expected, strict=True):
            torch.testing.assert_close(found, exact)
    return result


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("images", [1, 2])
def test_convolutions(case: str, images: int) -> None:
    model, kind = CONVOLUTIONS[case]
    graph = rewritten(model.double(), torch.randn(images, 4, 6, 7, 5).double())
    contractions = {"conv", "grouped_conv", "depthwise_conv", "linear"}
    assert "aten" not in ops(graph)
    assert ops(graph).keys() & contractions == {kind}


def test_computed_weights_of_every_kind() -> None:
    def model(_: Function, x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        return F.conv3d(F.conv3d(F.conv3d(x, w, padding=1), v), u)

    shapes = (4, 4, 3, 3, 3), (6, 4, 1, 3, 2), (2, 6, 2, 1, 1)
    weights = [torch.randn(shape).double() for shape in shapes]
    graph = rewritten(Function(model), torch.randn(2, 4, 6, 7, 5).double(), *weights)
    assert ops(graph)["conv"] == 3


@pytest.mark.parametrize("kernel", [3, (1, 3, 3), (3, 1, 1)])
def test_a_norm_and_a_residual_leave_no_permute_between_convolutions(
    kernel: int | tuple[int, ...],
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = kernel if isinstance(kernel, tuple) else (kernel,) * 3
            padding = tuple(size // 2 for size in sizes)
            self.convs = nn.ModuleList(nn.Conv3d(8, 8, kernel, padding=padding) for _ in range(3))
            self.norms = nn.ModuleList(nn.BatchNorm3d(8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = torch.relu(norm(conv(x)) + x)
            return x

    model = Block().double()
    randomize(model)
    graph = rewritten(model, torch.randn(2, 8, 4, 5, 6).double())
    assert "mul" not in ops(graph)  # factors of batch norms are in the weights
    for node in graph.nodes:
        source = node.inputs[0]
        while source not in graph.inputs and graph.producers[source].definition.is_view:
            source = graph.producers[source].inputs[0]
        at_the_ends = source in graph.inputs or node.values[0] in graph.outputs
        assert node.op != "permute" or at_the_ends, str(node)


PARTS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "max_pool3d": lambda _, x: F.max_pool3d(x, 3, 2, 1),
    "max_pool3d of frames": lambda _, x: F.max_pool3d(x, (3, 1, 1), (1, 1, 1), (1, 0, 0)),
    "max_pool3d of pixels": lambda _, x: F.max_pool3d(x, (1, 3, 2), ceil_mode=True),
    "max_pool3d, dilated": lambda _, x: F.max_pool3d(x, 2, 1, 0, (2, 1, 2)),
    "avg_pool3d": lambda _, x: F.avg_pool3d(x, (2, 3, 2), (2, 1, 1), (1, 1, 0)),
    "avg_pool3d of what is there": lambda _, x: F.avg_pool3d(
        x, 3, 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "avg_pool3d of everything": lambda _, x: F.avg_pool3d(x, (6, 7, 5)),
    "adaptive_avg_pool3d": lambda _, x: F.adaptive_avg_pool3d(x, (4, 2, 3)),
    "adaptive_avg_pool3d to one": lambda _, x: F.adaptive_avg_pool3d(x, 1),
    "trilinear": lambda _, x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "trilinear, corners": lambda _, x: F.interpolate(
        x, size=(5, 9, 5), mode="trilinear", align_corners=True
    ),
    "trilinear of pixels": lambda _, x: F.interpolate(x, size=(6, 9, 11), mode="trilinear"),
    "nearest": lambda _, x: F.interpolate(x, size=(9, 7, 3), mode="nearest"),
    "nearest-exact": lambda _, x: F.interpolate(x, scale_factor=(2, 1.5, 2), mode="nearest-exact"),
    "group_norm": lambda _, x: F.group_norm(x, 2),
    "instance_norm": lambda _, x: F.instance_norm(x),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_stands_between_convolutions_is_generated(part: str) -> None:
    graph = rewritten(Function(PARTS[part]), torch.randn(2, 4, 6, 7, 5).double())
    assert "aten" not in ops(graph)


@pytest.mark.parametrize("divisor", [7, None])
def test_a_divisor_of_a_mean_stays_torchs(divisor: int | None) -> None:
    model = Function(lambda _, x: F.avg_pool3d(x, 2, divisor_override=divisor))
    graph = rewritten(model, torch.randn(2, 4, 6, 7, 5).double())
    assert ("aten" in ops(graph)) == (divisor is not None)


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose3d(4, 3, 2, stride=2),
        nn.ConvTranspose3d(4, 3, (3, 4, 2), stride=(1, 2, 3), padding=(1, 2, 0)),
        nn.ConvTranspose3d(4, 3, 3, stride=2, padding=1, output_padding=1, bias=False),
    ],
)
def test_transposed_convolutions(model: nn.Module) -> None:
    graph = rewritten(model.double(), torch.randn(2, 4, 3, 4, 5).double())
    assert "aten" not in ops(graph)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "clips, factored": (lambda: ClipResNet(factored=True, width=16), (2, 3, 3, 14, 12)),
    "clips, expanded": (lambda: X3D((1, 2), 10), (1, 3, 3, 16, 20)),
    "scans": (lambda: ScanUNet((8, 16, 24)), (1, 1, 8, 12, 4)),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", MODELS)
def test_models_are_generated_whole_and_right(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    randomize(model)
    model.half()
    gtco.compile(model, (x,), target="sm_90a", fallback="error")
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    verdict = judge(compiled(x), model(x), model.double()(x.double()), torch.float16)
    assert verdict.ok, verdict
