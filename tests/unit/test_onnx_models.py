"""Whole models from torch's exporters, against torch and ONNX Runtime."""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from gtco.frontend.onnx import load_onnx
from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests import models
from tests.onnx_cases import assert_near, run_ort

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


def export(
    model: nn.Module, args: tuple[Tensor, ...], path: Path, *, dynamo: bool, opset: int = 18
) -> None:
    logging.disable(logging.WARNING)
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            if dynamo:
                torch.onnx.export(
                    model, args, path, dynamo=True, external_data=False, opset_version=opset
                )
            else:
                torch.onnx.export(model, args, str(path), dynamo=False, opset_version=opset)
    finally:
        logging.disable(logging.NOTSET)


BY_SCRIPT = {
    models.vit_spelled_out: 11,
    models.setr: 15,
    models.hf_vit_classifier: 12,
    models.hf_deit: 13,
    models.hf_dinov2: 14,
    models.hf_clip_vision: 16,
    models.hf_convnext: 19,
    models.hf_segformer: 20,
    models.hf_detr: 17,
    models.hf_cvt: 12,
    hf_resnet: 11,
}
"""What the TorchScript exporter exports, and to which opset; it writes up to 20."""
BY_DYNAMO = {
    models.vit: 18,
    models.hf_vit: 21,
    models.hf_dinov2: 19,
    models.hf_beit: 20,
    models.hf_siglip_vision: 20,
    models.hf_swin: 21,
    hf_resnet: 18,
}
"""The same for the dynamo exporter, which writes from 18 on."""
MODELS = [
    pytest.param(build, dynamo, opset, id=f"{build.__name__}-{name}-{opset}")
    for dynamo, name, table in ((False, "ts", BY_SCRIPT), (True, "dynamo", BY_DYNAMO))
    for build, opset in table.items()
]
REFUSES_SDPA = {models.hf_beit, models.hf_swin}
"""What the dynamo exporter fails on as long as its attention is one call with a mask."""
RECOGNISED = ("attention", "softmax", "layer_norm", "gelu")


def test_every_opset_is_exported_to() -> None:
    assert {*BY_SCRIPT.values(), *BY_DYNAMO.values()} == set(range(11, 22))


@pytest.mark.parametrize("build, dynamo, opset", MODELS)
def test_models(build: Callable[[], nn.Module], dynamo: bool, opset: int, tmp_path: Path) -> None:
    """The export means what the model means, and as much of it is recognised."""
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    side = models.IMAGE_SIZES.get(build, 32)
    model, image, path = build(), torch.randn(1, 3, side, side), tmp_path / "m.onnx"
    direct = parts(Tensors(model), image)
    if opset < 14 or (dynamo and build in REFUSES_SDPA):  # the operator for it came with 14
        spell_out_attention(model)
    model = Tensors(model).eval()
    export(model, (image,), path, dynamo=dynamo, opset=opset)
    imported = load_onnx(path)
    with torch.no_grad():
        found, expected = imported(image), model(image)
    assert_near(found, expected)
    assert_near(found, run_ort(str(path), image.numpy()))
    captured = capture(imported, (image,))
    captured.graph.verify()
    assert_near(interpret(captured.graph, (image,)), expected)
    rewritten = run_pipeline(captured.graph)
    assert_near(interpret(rewritten, (image,)), expected, 1e-4)
    assert counts(rewritten) == direct


def parts(model: nn.Module, image: Tensor) -> dict[str, int]:
    return counts(run_pipeline(capture(model.eval(), (image,)).graph))


def counts(graph: Graph) -> dict[str, int]:
    found = Counter(node.op for node in graph.nodes)
    return {op: found[op] for op in RECOGNISED}


def spell_out_attention(model: nn.Module) -> None:
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("dynamo", [False, True], ids=["ts", "dynamo"])
def test_clip_with_text(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids, image = torch.randint(1, 98, (2, 16)), torch.randn(3, 3, 32, 32)
    ids[:, -2:] = 98
    model, path = Named(models.hf_clip(), "logits_per_image").eval(), tmp_path / "m.onnx"
    export(model, (ids, image), path, dynamo=dynamo)
    imported = load_onnx(path)
    with torch.no_grad():
        expected = model(ids, image)
    assert_near(imported(ids, image), [expected])
    captured = capture(imported, (ids, image))
    assert_near(interpret(run_pipeline(captured.graph), (ids, image)), [expected], 1e-4)


class Named(nn.Module):
    """A model with one of its results."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args)[self.name]
