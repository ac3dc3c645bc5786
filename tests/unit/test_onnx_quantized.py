"""Products between QuantizeLinear and DequantizeLinear, as exporters for TensorRT write them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import gtco
from gtco.compiler import make_plan
from gtco.frontend.onnx import OnnxError, load_onnx
from gtco.ir.interpreter import interpret
from gtco.passes import quantized_pairs
from gtco.passes.quantized_pairs import multiply_pairs
from gtco.passes.rewrite import Log
from tests.onnx_cases import run_ort

E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """How a linear of [1, 21, k] by [k, n] is written.

    Args:
        gemm: weights are [n, k] and the product is a Gemm of two dimensions.
        stored: weights are in 8 bits with a DequantizeLinear alone.
        axis: of the weights, along which their scales are; None for one scale.
        kind: type of 8 bits.
        zero: zero point of the activations.
        also: the mean of the rounded activations is added.
    """

    k: int = 80
    n: int = 40
    gemm: bool = False
    stored: bool = True
    axis: int | None = 1
    dtype: Any = np.float32
    kind: Any = E4M3
    zero: int = 0
    also: bool = False
    opset: int = 19


def model_of(form: Form) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    n, k = form.n, form.k
    shape = (n, k) if form.gemm else (k, n)
    w = rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1)))
    w = w * np.exp(rng.standard_normal((1, shape[1])))
    most = 448.0 if form.kind == E4M3 else 127.0
    size = abs(w).max() if form.axis is None else abs(w).max(1 - form.axis)
    scale = (size / most).astype(form.dtype)
    full = scale if form.axis is None else np.expand_dims(scale, 1 - form.axis)
    signed = form.kind if form.kind == E4M3 else np.int8
    steps = np.clip(w / full.astype(np.float32), -most, most)
    stored = (steps if form.kind == E4M3 else np.round(steps)).astype(signed)
    constants = {
        "s": np.array(0.5 / most * 4, form.dtype),
        "z": np.array(form.zero, form.kind),
        "ws": scale,
        "wz": np.zeros(scale.shape, signed),
        "b": rng.standard_normal(n).astype(form.dtype),
        "wq" if form.stored else "w": stored if form.stored else w.astype(form.dtype),
    }
    axis = {} if form.axis is None else {"axis": form.axis}
    x = "x"
    nodes = []
    if form.gemm:
        constants["rows"] = np.array([-1, k], np.int64)
        nodes.append(helper.make_node("Reshape", ["x", "rows"], ["x2"]))
        x = "x2"
    nodes += [
        helper.make_node("QuantizeLinear", [x, "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
    ]
    if not form.stored:
        nodes.append(helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"], **axis))
    nodes.append(helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], **axis))
    if form.gemm:
        nodes.append(helper.make_node("Gemm", ["xd", "wd", "b"], ["y"], transB=1))
    else:
        nodes.append(helper.make_node("MatMul", ["xd", "wd"], ["m"]))
        nodes.append(helper.make_node("Add", ["m", "b"], ["y"]))
    if form.also:
        mean = helper.make_node("ReduceMean", ["xd"], ["mean"], keepdims=1)
        nodes += [mean, helper.make_node("Add", ["y", "mean"], ["z_out"])]
    code = helper.np_dtype_to_tensor_dtype(np.dtype(form.dtype))
    rows = [21, n] if form.gemm else [1, 21, n]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", code, [1, 21, k])],
        [helper.make_tensor_value_info("z_out" if form.also else "y", code, rows)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", form.opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def off(found: Tensor, expected: np.ndarray[Any, Any]) -> float:
    """The largest error, in relation to the largest value."""
    truth = torch.from_numpy(expected.astype(np.float64))
    return float((found.double() - truth).abs().max() / truth.abs().max())


def eights(plan: Any, dtype: torch.dtype = torch.float8_e4m3fn) -> list[str]:
    """The operators of a plan that read `dtype`."""
    graph = plan.graph
    return [node.op for node in graph.nodes if graph.specs[node.inputs[0]].dtype == dtype]


FP8 = {
    "columns": Form(),
    "one scale": Form(axis=None),
    "rows of a gemm": Form(gemm=True, axis=0),
    "around fp32 weights": Form(stored=False),
    "around, gemm": Form(stored=False, gemm=True, axis=0, k=48, n=72),
    "opset 23": Form(opset=23),
    "read elsewhere": Form(also=True, opset=21),
}


@pytest.mark.compiler
@pytest.mark.parametrize("form", FP8.values(), ids=FP8)
def test_fp8_pairs_multiply_in_fp8(form: Form) -> None:
    model = model_of(form)
    module = load_onnx(model)
    (x,) = module.example()
    expected = ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]
    assert off(module(x), expected) < 1e-6
    plan, _ = make_plan(module, (x,), None, gtco.Options(target="sm_90a"))
    assert "linear" in eights(plan) and "matmul" not in {node.op for node in plan.graph.nodes}
    compiled = gtco.compile(module, (x,), target="host")
    assert off(compiled(x), expected) < 1e-5


@pytest.mark.compiler
def test_fp8_pairs_of_an_fp16_model_lose_no_more_than_fp16_does() -> None:
    model = model_of(Form(dtype=np.float16))
    module = load_onnx(model)
    (x,) = module.example()
    expected = run_ort(model, x.numpy())[0]
    compiled = gtco.compile(module, (x,), target="host")
    assert off(compiled(x), expected) < 2e-3


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Form(axis=0), "the scales of the weights differ along the dimension that is summed"),
        (Form(axis=1, gemm=True), "the scales of the weights differ along the dimension"),
        (Form(k=76), "tensor cores take no fp8 operands of 40 rows of 76"),
        (Form(n=41), "tensor cores take no fp8 operands of 41 rows of 80"),
    ],
)
def test_other_forms_compute_what_they_say(form: Form, reason: str) -> None:
    model, log = model_of(form), Log()
    module = load_onnx(model)
    (x,) = module.example()
    changed = multiply_pairs(gtco.capture(module, (x,)), log)
    assert reason in str(log.refusals[0])
    assert "quantize" not in {node.op for node in changed.nodes}
    expected = ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]
    assert off(interpret(changed, (x,))[0], expected) < 1e-6


def test_a_scale_on_the_wrong_axis_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(axis=0)
    model = model_of(form)
    module = load_onnx(model)
    (x,) = module.example()
    careless = replace(quantized_pairs.RULE, check=lambda edit, match: None)
    monkeypatch.setattr(quantized_pairs, "RULE", careless)
    changed = multiply_pairs(gtco.capture(module, (x,)))
    expected = ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]
    assert off(interpret(changed, (x,))[0], expected) > 1e-2


def test_targets_without_fp8_compute_what_the_model_says() -> None:
    module = load_onnx(model_of(Form()))
    plan, _ = make_plan(module, module.example(), None, gtco.Options(target="sm_80"))
    assert eights(plan) == ["cast"]
    (x,) = module.example()
    assert torch.allclose(interpret(plan.graph, (x,))[0], module(x), rtol=1e-5, atol=1e-5)


INT8 = {
    "columns": Form(kind=np.int8),
    "around fp32 weights": Form(kind=np.int8, stored=False, axis=0, gemm=True, opset=13),
    "one scale, zero point": Form(kind=np.int8, axis=None, zero=-7, opset=13),
    "odd sizes": Form(kind=np.int8, k=77, n=41, zero=3),
    "unsigned": Form(kind=np.uint8, zero=120),
    "read elsewhere": Form(kind=np.int8, zero=5, also=True),
    "fp16": Form(kind=np.int8, dtype=np.float16, opset=19),
}


@pytest.mark.compiler
@pytest.mark.parametrize("form", INT8.values(), ids=INT8)
def test_int8_pairs_are_as_in_onnx_runtime(form: Form) -> None:
    model = model_of(form)
    module = load_onnx(model)
    (x,) = module.example()
    (expected,) = run_ort(model, x.numpy())
    exact = 1e-5 if form.dtype == np.float32 else 5e-3
    assert off(module(x), expected) < exact
    assert off(gtco.compile(module, (x,), target="host")(x), expected) < exact
    plan, _ = make_plan(module, (x,), None, gtco.Options(target="sm_80"))
    assert ("linear" in eights(plan, torch.int8)) == (form.k % 16 == 0)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_int8_of_an_fp32_model_keeps_its_digits_in_fp16(kind: Any) -> None:
    form = Form(kind=kind, zero=100)
    model = model_of(form)
    module = load_onnx(model)
    (x,) = module.example()
    plan, _ = make_plan(module, (x,), None, gtco.Options(target="sm_80", precision="fp16"))
    assert "linear" in eights(plan, torch.int8)
    assert off(interpret(plan.graph, (x,))[0], run_ort(model, x.numpy())[0]) < 1e-6


@pytest.mark.parametrize("name", ["TRT_FP8QuantizeLinear", "TRT_INT4DequantizeLinear"])
def test_operators_of_other_domains_are_refused_with_what_to_do(name: str) -> None:
    model = model_of(Form())
    node = next(each for each in model.graph.node if each.op_type == "QuantizeLinear")
    node.op_type, node.domain = name, "trt"
    model.opset_import.append(helper.make_opsetid("trt", 1))
    with pytest.raises(OnnxError, match=rf"trt::{name} is not supported; export it with Quantize"):
        load_onnx(model)
