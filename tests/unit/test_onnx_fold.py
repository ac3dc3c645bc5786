"""The .onnx files that peers read: folded, of the same answers, and nothing else is taken out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.models import small
from gtco.benchmarking import onnx_peer
from gtco.benchmarking.onnx_fold import fold_constants

onnxruntime = pytest.importorskip("onnxruntime")


def operators(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(file).graph.node]


def answers(file: Path | bytes, *args: Tensor) -> list[Tensor]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    where = file if isinstance(file, bytes) else str(file)
    session = onnxruntime.InferenceSession(where, options, providers=["CPUExecutionProvider"])
    given = {f"input_{index}": x.numpy() for index, x in enumerate(args)}
    return [torch.from_numpy(each) for each in session.run(None, given)]


class Padded(nn.Module):
    """Attention by a mask of truths that a model makes for itself, as transformers' DETR does."""

    def forward(self, x: Tensor) -> Tensor:
        there = torch.ones((), dtype=torch.bool) & torch.ones(x.shape[1], dtype=torch.bool)
        mask = there.expand(1, x.shape[1], x.shape[1])
        return F.relu(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))


class Masked(nn.Module):
    """The mask comes from outside, and hides all of some rows."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, value=x, attn_mask=mask > 0)


def test_a_mask_that_hides_nothing_leaves_plain_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 12, 16).half()
    file = tmp_path / "model.onnx"
    onnx_peer.export_onnx(Padded(), (x,), file)
    plain = ["MatMul", "MatMul", "Mul", "Mul", "Relu", "Softmax", "Transpose"]
    assert sorted(operators(file)) == plain
    expected = Padded()(x)
    torch.testing.assert_close(answers(file, x)[0], expected, rtol=2e-3, atol=2e-3)
    monkeypatch.setattr(onnx_peer, "fold_constants", lambda model: None)
    onnx_peer.export_onnx(Padded(), (x,), file)
    assert "ConstantOfShape" in operators(file)  # without axes, which TensorRT 8.5 refuses


def test_a_mask_that_is_an_input_stays_in_half_precision(tmp_path: Path) -> None:
    x, mask = torch.randn(2, 12, 16).half(), (torch.rand(2, 12, 12) < 0.5).float()
    mask[0, 3], mask[1, 7] = 0, 1
    file = tmp_path / "model.onnx"
    onnx_peer.export_onnx(Masked(), (x, mask), file)
    casts = [n for n in onnx.load(file).graph.node if n.op_type == "Cast"]
    assert not any(each.i == TensorProto.FLOAT for n in casts for each in n.attribute)
    for seed in range(2):
        torch.manual_seed(seed)
        mask = mask.flip(0, 2)
        expected = Masked()(x, mask)
        assert (expected == 0).all(-1).sum() == 1
        torch.testing.assert_close(answers(file, x, mask)[0], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["detr_e6", "cvt_13", "setr_pup", "unet", "resnet50"])
def test_folded_models_answer_as_they_did(name: str, tmp_path: Path) -> None:
    module, args = getattr(small, name)()
    file = tmp_path / "model.onnx"
    onnx_peer.export_onnx(module, args, file)
    onnx.checker.check_model(file, full_check=True)
    left = {"ConstantOfShape", "Shape", "Range", "CumSum", "IsNaN", "Constant", "Expand"}
    assert not left.intersection(operators(file))
    with torch.no_grad():
        expected = module(*args)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    for found, each in zip(answers(file, *args), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=2e-2, atol=2e-2)


def model_of(*nodes: onnx.NodeProto, **constants: np.ndarray) -> ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "few",
        [helper.make_tensor_value_info("input_0", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(each, name) for name, each in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)


def branch(operator: str) -> onnx.GraphProto:
    """Reads `z` of the graph around it."""
    made = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    return helper.make_graph([helper.make_node(operator, ["z"], ["inner"])], "branch", [], made)


zeros, ones = np.zeros((3, 4), np.float32), np.ones((3, 4), np.float32)
one_row = np.zeros((1, 4), np.float32)
STAYS = {
    "zeros of a larger shape": model_of(
        helper.make_node("Add", ["input_0", "c"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
        c=zeros,
    ),
    "a choice of a larger shape": model_of(
        helper.make_node("Where", ["c", "input_0", "d"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
        c=np.ones((3, 4), bool),
        d=one_row,
    ),
    "a choice of both": model_of(
        helper.make_node("Where", ["c", "input_0", "d"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
        c=np.array([[True, False, True, True]]),
        d=one_row,
    ),
    "what is no sum": model_of(
        helper.make_node("Mul", ["input_0", "c"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
        c=one_row,
    ),
    "an output": model_of(helper.make_node("Add", ["input_0", "c"], ["y"]), c=one_row),
    "a constant output": model_of(helper.make_node("Relu", ["c"], ["y"]), c=ones),
    "what a branch reads": model_of(
        helper.make_node("Add", ["input_0", "c"], ["z"]),
        helper.make_node("If", ["d"], ["y"], then_branch=branch("Relu"), else_branch=branch("Abs")),
        c=one_row,
        d=np.array(True),
    ),
}


@pytest.mark.parametrize("what", STAYS)
def test_what_is_not_known_stays(what: str) -> None:
    x, model = torch.randn(1, 4), STAYS[what]
    before = [node.op_type for node in model.graph.node]
    expected = answers(model.SerializeToString(), x)[0]
    fold_constants(model)
    assert [node.op_type for node in model.graph.node] == before
    assert torch.equal(answers(model.SerializeToString(), x)[0], expected)


def test_random_numbers_and_what_nobody_reads() -> None:
    model = model_of(
        helper.make_node("RandomNormal", [], ["r"], shape=[1, 4]),
        helper.make_node("Exp", ["c"], ["unused"]),
        helper.make_node("Neg", ["c"], ["n"]),
        helper.make_node("Add", ["r", "n"], ["s"]),
        helper.make_node("Add", ["input_0", "s"], ["y"]),
        c=ones,
    )
    fold_constants(model)
    assert [node.op_type for node in model.graph.node] == ["RandomNormal", "Add", "Add"]
    assert [each.name for each in model.graph.initializer] == ["n"]
