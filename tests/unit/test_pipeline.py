"""The passes together, on whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gtco.frontend.torch_export import capture
from gtco.ir.graph import Graph, Node
from gtco.ir.interpreter import interpret
from gtco.passes import PIPELINE, run_pipeline
from gtco.passes.rewrite import Log
from tests import models
from tests.pass_checks import Golden, captured, random, rmse

LAYER = {"linear": 4, "attention": 1, "gelu": 1, "row_stats": 2, "merge_stats": 2,
         "mul": 4, "sub": 2, "add": 4, "cast": 2}  # fmt: skip
"""A layer: 4 GEMMs, their epilogues (mean, rstd, offset, residual, GELU), attention, statistics."""


@pytest.mark.parametrize("build", [models.vit, models.vit_spelled_out, models.hf_vit_classifier,
                                   models.setr])  # fmt: skip
def test_a_vit_layer_is_four_gemms_and_attention(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    image = random(1, 3, 32, 32, dtype=torch.float16)
    model = build(**({"num_hidden_layers": 4} if build is models.hf_vit_classifier else
                     {"depth": 4})).half()  # fmt: skip
    graph = run_pipeline(capture(model, (image,)).graph)
    parts = Counter(n.op for n in graph.nodes if _layer(n) == 2 and not n.definition.is_view)
    assert parts == LAYER
    for node in graph.nodes:
        if node.op == "attention":
            assert len(node.inputs) == 3
            assert len({_base(graph, name) for name in node.inputs}) == 1
            assert graph.specs[_base(graph, node.inputs[0])].sizes == (
                1,
                17 - (build is models.setr),
                192,
            )


def _layer(node: Node) -> int | None:
    numbers = [int(part) for part in node.source.split(".") if part.isdigit()]
    return numbers[0] if numbers else None


def _base(graph: Graph, value: str) -> str:
    while (node := graph.producers.get(value)) is not None and node.definition.is_view:
        value = node.inputs[0]
    return value


def test_only_the_class_token_leaves_the_last_layer(golden: Golden) -> None:
    torch.manual_seed(0)
    image = random(1, 3, 16, 16, dtype=torch.float16)
    model = models.hf_vit_classifier(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32,
        image_size=16,
    )  # fmt: skip
    golden("passes/pipeline_hf_vit.txt", run_pipeline(capture(model.half(), (image,)).graph))


@pytest.mark.parametrize("build", [models.vit, models.vit_spelled_out, models.hf_dinov2])
def test_half_precision_is_as_near_to_the_truth_as_eager(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, image = build().half(), random(1, 3, 32, 32, dtype=torch.float16)
    program = capture(model, (image,))
    actual = interpret(run_pipeline(program.graph), (image,))
    eager = interpret(program.graph, (image,))
    exact = interpret(program.graph, (image,), dtype=torch.float64)
    for a, e, x in zip(actual, eager, exact, strict=True):
        assert a.dtype == e.dtype
        assert rmse(a, x) <= 3 * rmse(e, x) + 1e-3


def test_detr_decoder_layers_read_the_memory_through_joined_linears() -> None:
    image, log = random(1, 3, 64, 64, dtype=torch.float32), Log()
    graph = run_pipeline(capture(models.hf_detr(1, 3), (image,)).graph, log=log)
    joined = [node for node in graph.nodes if node.op == "linear" and "joined" in node.inputs[1]]
    assert max(node.outputs[0].sizes[-1] for node in joined) == 3 * 64


def test_weights_that_did_not_change_share_memory() -> None:
    model, image = models.vit(), random(1, 3, 32, 32, dtype=torch.float32)
    graph = run_pipeline(capture(model, (image,)).graph)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    weights = [n.inputs[1] for n in graph.nodes if n.op == "linear"]
    assert all(graph.constants[name].data_ptr() in own for name in weights)


def test_dump(tmp_path: Path) -> None:
    graph, _ = captured(lambda c, x: x.relu(), random(3))
    run_pipeline(graph, tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names[0] == "00-captured.txt"
    assert names[6] == f"06-{PIPELINE[5].__name__}.txt"
    assert len(names) == len(PIPELINE) + 1
