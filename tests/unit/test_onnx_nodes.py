"""ONNX's own node tests, and older opsets against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gtco.frontend.onnx import OPS, OnnxError, OnnxModel, load_onnx
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from tests.onnx_cases import (
    EXPANDED,
    floats,
    ints,
    node_cases,
    node_model,
    run_ort,
    unclaimed_models,
)

ort = pytest.importorskip("onnxruntime")

REFUSED = {
    "batchnorm_epsilon_training_mode": "training_mode is on",
    "batchnorm_example_training_mode": "training_mode is on",
    "mvn": "not valid",  # ONNX's own checker fails on the definition of the operator
    "resize_downsample_scales_cubic_align_corners": "no whole size",
    "resize_downsample_scales_linear_align_corners": "no whole size",
    "scan_sum": "of opset 8, whose first axis is the batch's",
    "training_dropout": "training_mode is on",
    "training_dropout_default": "training_mode is on",
    "training_dropout_default_mask": "training_mode is on",
    "training_dropout_mask": "training_mode is on",
}
"""The node tests of claimed operators and gtco's types that fail, and what refuses each."""


# -- node tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [*sorted(OPS), EXPANDED])
def test_node_cases(operator: str) -> None:
    captured = False
    for case in node_cases().get(operator, []):
        if not case.typed:
            with pytest.raises(OnnxError, match="not supported"):
                case.run()
        elif case.name in REFUSED:
            with pytest.raises(OnnxError, match=REFUSED[case.name]):
                case.run()
        else:
            ran = case.run()
            module, inputs = ran[0]
            if not captured and inputs and case.floating and operator != EXPANDED:
                captured = True
                check_captured(module, tuple(inputs))


def check_captured(module: OnnxModel, inputs: tuple[Tensor, ...]) -> None:
    program = capture(module, inputs)
    program.graph.verify()
    result = program.unflatten(interpret(program.graph, program.flatten(inputs)))
    expected = module(*inputs)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-5, equal_nan=True)


def test_at_least_98_of_100_node_cases_pass() -> None:
    """`test_node_cases` runs them: what is neither refused nor untyped is compared there."""
    cases = [case for group in node_cases().values() for case in group]
    typed = [case for case in cases if case.typed]
    asked = [case for case in typed if case.floating]
    failing = [case for case in asked if case.name in REFUSED]
    print(
        f"\nONNX's node tests: {len(cases)} of {len(OPS)} claimed operators, "
        f"{len(cases) - len(typed)} of types that gtco has not; of the other {len(typed)}, "
        f"{len(asked)} with floats, {len(REFUSED)} are refused"
    )
    assert len(asked) > 1150
    assert len(failing) == len(REFUSED)
    assert len(failing) <= 0.02 * len(asked)


def test_what_is_not_claimed_is_refused_by_name_with_a_remedy() -> None:
    for name, model in unclaimed_models().items():
        with pytest.raises(OnnxError, match=r"(node|input) .* is not supported.*; |opset .*: "):
            load_onnx(model)
            pytest.fail(name)


def test_a_wrong_operator_fails_its_node_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtco.frontend import onnx as frontend

    wrong = {**OPS, "Floor": lambda call, x: x.ceil()}
    monkeypatch.setattr(frontend, "OPS", wrong)
    with pytest.raises(AssertionError):
        test_node_cases("Floor")


# -- older opsets, against ONNX Runtime ----------------------------------------------------------

X = floats(2, 3, 4)
IMAGE = floats(1, 3, 9, 8)
NONE = np.zeros(0, dtype=np.float32)

OLDER = {
    "upsample 7, nearest": ("Upsample", 7, [IMAGE], 1, dict(scales=[1.0, 1.0, 2.0, 3.0])),
    "upsample 8, linear": ("Upsample", 8, [IMAGE], 1,
                           dict(mode="linear", scales=[1.0, 1.0, 2.0, 1.5])),
    "upsample 9, nearest": ("Upsample", 9, [IMAGE, np.array([1, 1, 1.5, 2], np.float32)], 1, {}),
    "upsample 9, linear": ("Upsample", 9, [IMAGE, np.array([1, 1, 3, 2], np.float32)], 1,
                           dict(mode="linear")),
    "resize 10, nearest": ("Resize", 10, [IMAGE, np.array([1, 1, 0.6, 2.5], np.float32)], 1, {}),
    "resize 10, linear": ("Resize", 10, [IMAGE, np.array([1, 1, 2, 1.5], np.float32)], 1,
                          dict(mode="linear")),
    "clip 7": ("Clip", 7, [X], 1, dict(min=-0.2, max=0.4)),
    "clip 10, high only": ("Clip", 10, [X], 1, dict(max=0.4)),
    "pad 7": ("Pad", 7, [X], 1, dict(pads=[0, 1, 2, 0, 0, -1], value=0.5)),
    "pad 10, edge": ("Pad", 10, [X], 1, dict(pads=[0, 1, 2, 0, 0, 1], mode="edge")),
    "slice 9": ("Slice", 9, [X], 1, dict(starts=[1, -3], ends=[9, -1], axes=[1, 2])),
    "slice 7, all axes": ("Slice", 7, [X], 1, dict(starts=[0, 1, 1], ends=[1, 3, 2])),
    "slice 10": ("Slice", 10, [X, ints(0), ints(9), ints(2), ints(2)], 1, {}),
    "top k 9": ("TopK", 9, [floats(3, 7)], 2, dict(axis=0, k=2)),
    "top k 10": ("TopK", 10, [floats(3, 7), ints(3)], 2, {}),
    "scatter 9": ("Scatter", 9, [X, np.array([[[1, 0, 2, 1]]]), floats(1, 1, 4)], 1, dict(axis=1)),
    "batch norm 7": ("BatchNormalization", 7, [X, *floats(3, 3), abs(floats(3))], 1,
                     dict(spatial=1, momentum=0.5)),
    "max pool 8, places": ("MaxPool", 8, [IMAGE], 2, dict(kernel_shape=[2, 3], strides=[2, 1])),
    "average pool 7": ("AveragePool", 7, [IMAGE], 1, dict(kernel_shape=[3, 2], pads=[1, 0, 1, 1])),
    "dropout 7": ("Dropout", 7, [X], 1, dict(ratio=0.3)),
    "gemm 7": ("Gemm", 7, [floats(4, 3), floats(4, 5), floats(5)], 1, dict(transA=1)),
    "sum 7": ("Sum", 7, [X, floats(2, 3, 4), floats(2, 3, 4)], 1, {}),
    "depth to space 10": ("DepthToSpace", 10, [floats(1, 8, 3, 2)], 1, dict(blocksize=2)),
    "softmax 11, axis 1 of 3": ("Softmax", 11, [X], 1, dict(axis=1)),
    "softmax 12, default axis": ("Softmax", 12, [X], 1, {}),
    "softmax 11, axis -1": ("Softmax", 11, [X], 1, dict(axis=-1)),
    "log softmax 11, axis 0": ("LogSoftmax", 11, [X], 1, dict(axis=0)),
    "softmax 13, default axis": ("Softmax", 13, [X], 1, {}),
    "unsqueeze 11": ("Unsqueeze", 11, [X], 1, dict(axes=[0, -1])),
    "squeeze 11": ("Squeeze", 11, [floats(1, 3, 1)], 1, dict(axes=[0])),
    "split 11": ("Split", 11, [X], 2, dict(axis=-1, split=[1, 3])),
    "split 11, equal": ("Split", 11, [X], 3, dict(axis=1)),
    "reduce sum 11": ("ReduceSum", 11, [X], 1, dict(axes=[1, -1], keepdims=0)),
    "reduce mean 13": ("ReduceMean", 13, [X], 1, dict(axes=[-1])),
    "reduce max 12, all": ("ReduceMax", 12, [X], 1, {}),
    "clip 11, low only": ("Clip", 11, [X, np.array(0.1, np.float32)], 1, {}),
    "clip 12, high only": ("Clip", 12, [X, None, np.array(0.1, np.float32)], 1, {}),
    "dropout 11": ("Dropout", 11, [X], 1, dict(ratio=0.3)),
    "pad 11, reflect": ("Pad", 11, [X, ints(0, 1, 2, 0, 0, 3)], 1, dict(mode="reflect")),
    "pad 13, negative": ("Pad", 13, [X, ints(0, -1, 2, 0, 1, -1)], 1, {}),
    "slice 11, backwards": ("Slice", 11, [X, ints(-1), ints(-9), ints(2), ints(-2)], 1, {}),
    "gather 11, negative": ("Gather", 11, [X, ints(-1, 0)], 1, dict(axis=1)),
    "cumsum 11": ("CumSum", 11, [X, np.array(1, np.int64)], 1, dict(reverse=1, exclusive=1)),
    "gemm 11": ("Gemm", 11, [floats(4, 3), floats(5, 4), floats(3, 1)], 1,
                dict(transA=1, transB=1, alpha=0.5, beta=2.0)),
    "batch norm 9": ("BatchNormalization", 11, [X, *floats(3, 3), abs(floats(3))], 1, {}),
    "group norm by layers": ("LayerNormalization", 17, [X, floats(3, 4)], 1, dict(axis=1)),
    "max pool, ceil": ("MaxPool", 12, [IMAGE], 1,
                       dict(kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1, pads=[1, 0, 0, 1])),
    "max pool, wide pads": ("MaxPool", 12, [IMAGE], 1,
                            dict(kernel_shape=[3, 3], pads=[2, 2, 2, 2], dilations=[2, 1])),
    "average pool 11": ("AveragePool", 11, [IMAGE], 1,
                        dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 0, 0, 1])),
    "average pool 11, pads counted": ("AveragePool", 11, [IMAGE], 1,
                                      dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1],
                                           count_include_pad=1)),
    "conv 11, same lower": ("Conv", 11, [IMAGE, floats(6, 1, 3, 4), floats(6)], 1,
                            dict(group=3, auto_pad="SAME_LOWER", strides=[2, 1])),
    "resize 11, linear": ("Resize", 11, [IMAGE, NONE, np.array([1, 1, 2, 1.5], np.float32)], 1,
                          dict(mode="linear", coordinate_transformation_mode="half_pixel")),
    "resize 11, nearest": ("Resize", 11, [IMAGE, NONE, np.array([1, 1, 2, 2], np.float32)], 1,
                           dict(coordinate_transformation_mode="asymmetric",
                                nearest_mode="floor")),
    "resize 13, cubic sizes": ("Resize", 13, [IMAGE, None, None, ints(1, 3, 5, 13)], 1,
                               dict(mode="cubic", cubic_coeff_a=-0.5)),
    "resize 13, align": ("Resize", 13, [IMAGE, None, None, ints(1, 3, 18, 5)], 1,
                         dict(mode="linear", coordinate_transformation_mode="align_corners")),
    "resize 18, antialias": ("Resize", 18, [IMAGE, None, None, ints(1, 3, 4, 3)], 1,
                             dict(mode="linear", antialias=1)),
    "grid sample 16": ("GridSample", 16, [IMAGE, floats(1, 4, 5, 2)], 1,
                       dict(mode="bicubic", padding_mode="reflection", align_corners=1)),
    "mod of floats": ("Mod", 13, [X, floats(4)], 1, dict(fmod=1)),
    "pow of integers": ("Pow", 13, [abs(X), ints(2)], 1, {}),
    "top k 11": ("TopK", 11, [np.round(X), ints(3)], 2, dict(axis=-1)),
    "argmax 12, last": ("ArgMax", 12, [np.round(X)], 1, dict(axis=2, select_last_index=1)),
    "transpose": ("Transpose", 11, [X], 1, {}),
    "flatten, negative": ("Flatten", 11, [X], 1, dict(axis=-1)),
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER.values(), ids=OLDER)
def test_older_opsets(case: tuple[str, int, list[Any], int, dict[str, Any]]) -> None:
    op, opset, inputs, outputs, attrs = case
    model = node_model(op, opset, inputs, outputs, **attrs)
    result = load_onnx(model)(torch.from_numpy(inputs[0]))
    found = result if isinstance(result, tuple) else (result,)
    for x, y in zip(found, run_ort(model, inputs[0]), strict=True):
        torch.testing.assert_close(x, torch.from_numpy(y), rtol=1e-4, atol=1e-5)


def test_what_changed_its_meaning_is_refused() -> None:
    model = node_model("BatchNormalization", 8, [X, *floats(3, 3, 4), abs(floats(3, 4))], spatial=0)
    with pytest.raises(OnnxError, match="spatial=0"):
        load_onnx(model)(torch.from_numpy(X))


def test_group_norm_before_opset_21_is_refused() -> None:
    """It has a scale per group there; ONNX deprecated it, and its checker says so."""
    model = node_model("GroupNormalization", 18, [floats(2, 6, 5), *floats(2, 2)], num_groups=2)
    model.graph.output[0].type.CopyFrom(model.graph.input[0].type)
    with pytest.raises(OnnxError, match="deprecated"):
        load_onnx(model)
