"""QuantizeLinear and DequantizeLinear around products, as exporters for TensorRT write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

import gtco
from gtco.frontend.onnx import load_onnx
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from tests.onnx_cases import run_ort

ort = pytest.importorskip("onnxruntime")


def qdq_model(
    opset: int = 19,
    sizes: tuple[int, int, int] = (19, 47, 33),
    dtype: type = np.float32,
    *,
    axis: int = 1,
    stored: bool = False,
    zero: int = 0,
) -> onnx.ModelProto:
    """x [1, M, K] @ W [K, N] + b: x with one scale, W with one an index of `axis`.

    Args:
        stored: W is int8 with a DequantizeLinear alone.
        zero: the zero point of x.
    """
    m, k, n = sizes
    random = np.random.default_rng(0)
    w = (random.standard_normal((k, n)) * np.geomspace(0.1, 10, n)).astype(dtype)
    scale = (np.abs(w).max(1 - axis % 2) / 127).astype(dtype)
    zeros = np.zeros(scale.shape, np.int8)
    constants = {
        "x_scale": np.array(0.02, dtype), "x_zero": np.array(zero, np.int8), "w_scale": scale,
        "w_zero": zeros, "b": random.standard_normal(n).astype(dtype),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "x_scale", "x_zero"], ["xd"]),
    ]
    if stored:
        wide = np.expand_dims(scale.astype(np.float32), 1 - axis % 2)
        constants["wq"] = np.round(w / wide).clip(-128, 127).astype(np.int8)
    else:
        constants["w"] = w
        given = ["w", "w_scale", "w_zero"]
        nodes.append(helper.make_node("QuantizeLinear", given, ["wq"], axis=axis))
    given = ["wq", "w_scale", "w_zero"]
    nodes.append(helper.make_node("DequantizeLinear", given, ["wd"], axis=axis))
    nodes.append(helper.make_node("MatMul", ["xd", "wd"], ["product"]))
    nodes.append(helper.make_node("Add", ["product", "b"], ["y"]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "qdq",
        [helper.make_tensor_value_info("x", kind, [1, m, k])],
        [helper.make_tensor_value_info("y", kind, [1, m, n])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def inputs(sizes: tuple[int, int, int] = (19, 47, 33), dtype: type = np.float32) -> Tensor:
    """Some are ties between two steps, some beyond the last one."""
    random = np.random.default_rng(1)
    x = random.standard_normal((1, *sizes[:2])) * 1.5
    x[0, 0, ::2] = (np.arange(len(x[0, 0, ::2])) + 0.5) * 0.02
    return torch.from_numpy(x.astype(dtype))


FORMS: dict[str, dict[str, Any]] = {
    "opset 13": {"opset": 13},
    "opset 21": {"opset": 21},
    "opset 23": {"opset": 23},
    "axis 0": {"axis": 0},
    "axis -1": {"axis": -1},
    "stored int8": {"stored": True},
    "zero point": {"zero": -5},
    "odd sizes": {"sizes": (1, 5, 3)},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_int8_is_what_onnx_runtime_computes(form: dict[str, Any]) -> None:
    model = qdq_model(**form)
    x = inputs(form.get("sizes", (19, 47, 33)))
    (expected,) = run_ort(model, x.numpy(), as_written=True)
    graph = gtco.capture(load_onnx(model), (x,))
    for each in (graph, run_pipeline(graph)):
        (found,) = interpret(each, (x,))
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-4)


def test_weights_are_folded_and_nothing_is_left_to_aten() -> None:
    model = qdq_model()
    fused = gtco.fuse(gtco.capture(load_onnx(model), (inputs(),)))
    ops = [node.op for node in fused.graph.nodes]
    assert ops.count("linear") == 1 and "aten" not in ops and "matmul" not in ops
    (linear,) = (node for node in fused.graph.nodes if node.op == "linear")
    assert len(linear.inputs) == 3, "the bias is the linear's"
    assert ops.count("div") == 1 and "sub" not in ops, "a zero point of 0 shifts nothing"


def test_a_scale_on_the_wrong_axis_is_caught() -> None:
    with pytest.raises(gtco.OnnxError, match="does not fit axis 0"):
        model = qdq_model()
        for node in model.graph.node[2:4]:
            node.attribute[0].i = 0
        load_onnx(model)(inputs())
    square = (19, 33, 33)
    right, wrong = qdq_model(sizes=square), qdq_model(sizes=square, stored=True)
    wrong.graph.node[2].attribute[0].i = 0  # fits, and is another model
    x = inputs(square)
    (expected,) = map(torch.from_numpy, run_ort(right, x.numpy(), as_written=True))
    found = load_onnx(wrong)(x)
    assert (found - expected).norm() > 0.5 * expected.norm()


@pytest.mark.compiler
def test_the_host_build_computes_int8() -> None:
    model, x = qdq_model(), inputs()
    compiled = gtco.compile(load_onnx(model), (x,), target="host")
    (expected,) = run_ort(model, x.numpy(), as_written=True)
    torch.testing.assert_close(compiled(x), torch.from_numpy(expected), rtol=1e-4, atol=1e-3)
