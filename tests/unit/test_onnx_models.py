"""Whole models from torch's exporters, against torch and ONNX Runtime."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gtco.frontend.onnx import load_onnx
from gtco.frontend.torch_export import capture
from gtco.interpreter import interpret
from gtco.passes import run_pipeline
from tests import models
from tests.onnx_cases import (
    assert_near,
    run_ort,
)

ort = pytest.importorskip("onnxruntime")


class Tensors(nn.Module):
    """A model whose result is the flat tuple of its tensors, as an ONNX graph's is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        leaves = pytree.tree_leaves(self.model(image))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def hf_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    return models.randomize_batch_norm(ResNetForImageClassification(config).eval())


def export(model: nn.Module, image: Tensor, path: Path, *, dynamo: bool) -> None:
    logging.disable(logging.WARNING)
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            if dynamo:
                torch.onnx.export(model, (image,), path, dynamo=True, external_data=False)
            else:
                torch.onnx.export(model, (image,), str(path), dynamo=False, opset_version=17)
    finally:
        logging.disable(logging.NOTSET)


BY_SCRIPT = (
    models.vit,
    models.hf_vit,
    models.hf_detr,
    models.hf_swin,
    models.hf_convnext,
    models.hf_segformer,
    models.hf_cvt,
    hf_resnet,
)
BY_DYNAMO = (models.vit, models.hf_vit, models.hf_detr, models.hf_convnext)
MODELS = [(build, False) for build in BY_SCRIPT] + [(build, True) for build in BY_DYNAMO]


@pytest.mark.parametrize(
    "build, dynamo", MODELS, ids=lambda x: x.__name__ if callable(x) else "dynamo" if x else "ts"
)
def test_models(build: Callable[[], nn.Module], dynamo: bool, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    side = models.IMAGE_SIZES.get(build, 32)
    model, image, path = Tensors(build()).eval(), torch.randn(1, 3, side, side), tmp_path / "m.onnx"
    export(model, image, path, dynamo=dynamo)
    imported = load_onnx(path)
    with torch.no_grad():
        found, expected = imported(image), model(image)
    assert_near(found, expected)
    assert_near(found, run_ort(str(path), image.numpy()))
    captured = capture(imported, (image,))
    captured.graph.verify()
    assert_near(interpret(captured.graph, (image,)), expected)
    assert_near(interpret(run_pipeline(captured.graph), (image,)), expected, 1e-4)
