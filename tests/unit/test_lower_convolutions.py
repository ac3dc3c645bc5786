"""Convolutions over lines, and transposed ones as convolutions of stride 1 over phases."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.check import judge
from gtco.passes import run_pipeline

PHASES = [
    (kernel, stride, padding, more)
    for kernel, stride, padding, more in itertools.product(
        (1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2), (0, 1)
    )
    if more < stride and kernel > padding  # the result has as many pixels as the image, or more
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "more"), PHASES)
def test_a_transposed_convolution_is_one_of_phases(
    kernel: int, stride: int, padding: int, more: int
) -> None:
    torch.manual_seed(kernel)
    model = nn.ConvTranspose2d(
        3, 5, (kernel, 2), (stride, 2), (padding, 0), (more, 0), bias=kernel % 2 == 0
    )
    x = torch.randn(2, 3, 5, 4).double()
    model.double().eval()
    graph = gtco.capture(model, (x,))
    assert "aten" not in {node.op for node in graph.nodes}
    (answer,) = gtco.interpret(graph, (x,))
    torch.testing.assert_close(answer, model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv1d(4, 6, 3, padding=1),
        nn.Conv1d(4, 6, 5, stride=2, padding=2, dilation=2, bias=False),
        nn.Conv1d(4, 8, 3, groups=2),
        nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1),
    ],
)
def test_a_line_is_an_image_of_one_row(model: nn.Module) -> None:
    x = torch.randn(2, 4, 9).double()
    graph = gtco.capture(model.double().eval(), (x,))
    assert "aten" not in {node.op for node in graph.nodes}
    (answer,) = gtco.interpret(graph, (x,))
    torch.testing.assert_close(answer, model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv3d(4, 6, (2, 3, 3), stride=(2, 3, 2), padding=(0, 1, 1)),
        nn.Conv3d(4, 6, (3, 2, 2), stride=(3, 2, 2), bias=False),
        nn.Conv3d(4, 8, (1, 3, 3), padding=(0, 2, 1), dilation=(3, 2, 1), groups=2),
        nn.Conv3d(4, 8, (5, 1, 1), stride=(5, 1, 1), groups=4).to(
            memory_format=torch.channels_last_3d
        ),
    ],
)
def test_kernels_one_behind_the_other_in_depth_read_an_image_of_stacked_channels(
    model: nn.Conv3d,
) -> None:
    x = torch.randn(2, 4, 5, 6, 7).double()
    graph = gtco.capture(model.double().eval(), (x,))
    assert "aten" not in {node.op for node in graph.nodes}
    (answer,) = gtco.interpret(graph, (x,))
    torch.testing.assert_close(answer, model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose2d(4, 6, 3, dilation=2),
        nn.ConvTranspose3d(4, 6, 3, groups=2, dilation=(1, 2, 1)),
    ],
)
def test_what_has_no_phases_stays_torchs(model: nn.Module) -> None:
    images = isinstance(model, nn.ConvTranspose2d)
    x = torch.randn(2, 4, 5, 5) if images else torch.randn(2, 4, 5, 5, 5)
    graph = gtco.capture(model.eval(), (x,))
    assert [node.op for node in graph.nodes] == ["aten"]
    torch.testing.assert_close(gtco.interpret(graph, (x,))[0].float(), model(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ConvTranspose2d(4, 8, (4, 3), stride=(2, 1), groups=4),
        nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, groups=4, bias=False),
        nn.ConvTranspose1d(4, 6, 5, stride=3, groups=2),
        nn.ConvTranspose3d(4, 6, (2, 3, 2), stride=(1, 2, 3), padding=(0, 1, 0), groups=2),
    ],
)
def test_each_group_of_a_transposed_convolution_has_its_phases(model: nn.Module) -> None:
    rank = len(model.kernel_size)
    x = torch.randn(2, 4, *(5, 4, 3)[:rank]).double()
    graph = gtco.capture(model.double().eval(), (x,))
    assert "aten" not in {node.op for node in graph.nodes}
    (answer,) = gtco.interpret(run_pipeline(graph), (x,))
    torch.testing.assert_close(answer, model(x))


class Modulated(nn.Module):
    """An image enlarged by weights of its own (StyleGAN2, Karras et al., CVPR 2020): each image of
    the batch is a group."""

    def __init__(self, kernel: int, padding: int, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, kernel, 3) / 4)
        self.style, self.shift = nn.Linear(6, 6), nn.Linear(6, 8) if biased else None
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        n, channels, *sizes = x.shape
        means = x.mean((2, 3))
        weight = (self.weight * self.style(means)[:, :, None, None, None]).flatten(0, 1)
        shift = None if self.shift is None else self.shift(means).flatten()
        y = F.conv_transpose2d(
            x.reshape(1, n * channels, *sizes), weight, shift, 2, self.padding, groups=n
        )
        return y.reshape(n, 8, *y.shape[2:])


@pytest.mark.parametrize(("kernel", "padding", "biased"), [(3, 0, False), (4, 1, True), (1, 0, 1)])
@pytest.mark.parametrize("batch", (1, 3))
def test_weights_that_are_computed_have_phases_too(
    kernel: int, padding: int, biased: bool, batch: int
) -> None:
    torch.manual_seed(kernel)
    model = Modulated(kernel, padding, biased).double().eval()
    x = torch.randn(batch, 6, 5, 4).double()
    graph = gtco.capture(model, (x,))
    assert "aten" not in {node.op for node in graph.nodes}
    for each in (graph, run_pipeline(graph)):
        torch.testing.assert_close(gtco.interpret(each, (x,))[0], model(x))


@pytest.mark.compiler
def test_a_modulated_convolution_is_generated_whole_and_right() -> None:
    torch.manual_seed(0)
    model = Modulated(3, 0, True).half().eval().requires_grad_(False)
    x = torch.randn(2, 6, 5, 4).half()
    gtco.compile(model, (x,), target="sm_90a", fallback="error")
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    verdict = judge(compiled(x), model(x), model.double()(x.double()), torch.float16)
    assert verdict.ok, verdict


@pytest.mark.compiler
def test_patches_of_a_video_are_generated_and_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 24, (2, 4, 4), stride=(2, 4, 4)), nn.Flatten(2)).half()
    x = torch.randn(2, 3, 4, 8, 12).half()
    compiled = gtco.compile(model.eval(), (x,), target="host", fallback="error")
    verdict = judge(compiled(x), model(x), model.double()(x.double()), torch.float16)
    assert verdict.ok, verdict


@pytest.mark.compiler
def test_a_decoder_is_generated_whole_and_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1),
    )
    model.half().eval()
    x = torch.randn(1, 16, 5, 7).half()
    gtco.compile(model, (x,), target="sm_90a", fallback="error")
    compiled = gtco.compile(model, (x,), target="host", fallback="error")
    verdict = judge(compiled(x), model(x), model.double()(x.double()), torch.float16)
    assert verdict.ok, verdict


def test_patches_of_a_cropped_transposed_convolution() -> None:
    up = nn.ConvTranspose2d(3, 7, 3, 2, 1, output_padding=1)
    model = nn.Sequential(up, nn.Conv2d(7, 5, 2, stride=2)).double().eval()
    x = torch.randn(3, 3, 1, 7).double()
    fused = gtco.fuse(gtco.capture(model, (x,)))
    (answer,) = gtco.interpret(fused, (x,))
    torch.testing.assert_close(answer, model(x))
