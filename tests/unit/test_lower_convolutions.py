"""Convolutions over lines, and transposed ones as convolutions of stride 1 over phases."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import gtco
from gtco.check import judge

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
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.ConvTranspose3d(4, 6, 3, groups=2),
    ],
)
def test_what_has_no_phases_stays_torchs(model: nn.Module) -> None:
    images = isinstance(model, nn.ConvTranspose2d)
    x = torch.randn(2, 4, 5, 5) if images else torch.randn(2, 4, 5, 5, 5)
    graph = gtco.capture(model.eval(), (x,))
    assert [node.op for node in graph.nodes] == ["aten"]
    torch.testing.assert_close(gtco.interpret(graph, (x,))[0].float(), model(x), atol=1e-5, rtol=0)


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
