"""Operators in forms that ONNX's node tests do not have, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.frontend.torch_export import capture
from tests.onnx_cases import floats, ints, node_model, run_ort

ort = pytest.importorskip("onnxruntime")

LINE = floats(2, 4, 7)
IMAGE = floats(2, 4, 6, 5)
TOKENS = floats(5, 3, 4)  # (tokens, batch, size)
LENGTHS = np.array([5, 2, 4], np.int32)
REGIONS = np.array([[0, 0, 9, 7], [-3, 2, 4, 30], [5, 5, 5, 5]], np.float32)


def weights(gates: int, directions: int = 1) -> list[Any]:
    """w, r and b for inputs of 4 and states of 3."""
    shapes = ((gates * 3, 4), (gates * 3, 3), (gates * 6,))
    return [floats(directions, *shape) for shape in shapes]


def states(directions: int, count: int) -> list[Any]:
    return [floats(directions, 3, 3) for _ in range(count)]


FORMS = {
    "transposed, 1d groups": ("ConvTranspose", 11, [LINE, floats(4, 3, 4), floats(6)], 1,
                              dict(group=2, strides=[3], pads=[2, 1], dilations=[2])),
    "transposed, symmetric": ("ConvTranspose", 11, [IMAGE, floats(4, 3, 3, 4), floats(3)], 1,
                              dict(strides=[2, 3], pads=[1, 2, 1, 2], output_padding=[1, 0])),
    "transposed, output shape": ("ConvTranspose", 11, [IMAGE, floats(4, 2, 3, 3), floats(2)], 1,
                                 dict(strides=[2, 2], output_shape=[12, 9])),
    "transposed, same upper": ("ConvTranspose", 11, [IMAGE, floats(4, 2, 4, 4), floats(2)], 1,
                               dict(strides=[2, 2], auto_pad="SAME_UPPER")),
    "transposed, same lower": ("ConvTranspose", 11, [IMAGE, floats(4, 2, 3, 3)], 1,
                               dict(strides=[2, 2], auto_pad="SAME_LOWER")),
    "transposed, wide padding": ("ConvTranspose", 11, [IMAGE, floats(4, 2, 2, 2), floats(2)], 1,
                                 dict(strides=[2, 2], pads=[0, 1, 1, 0], output_padding=[1, 1])),
    "lstm": ("LSTM", 14, [TOKENS, *weights(4)], 3, dict(hidden_size=3)),
    "lstm, both ways": ("LSTM", 14, [TOKENS, *weights(4, 2), None, *states(2, 2)], 3,
                        dict(hidden_size=3, direction="bidirectional")),
    "lstm, lengths": ("LSTM", 14, [TOKENS, *weights(4, 2), LENGTHS, *states(2, 2)], 3,
                      dict(hidden_size=3, direction="bidirectional")),
    "lstm, backwards": ("LSTM", 11, [TOKENS, *weights(4), LENGTHS], 3,
                        dict(hidden_size=3, direction="reverse")),
    "lstm, peepholes": ("LSTM", 14, [TOKENS, *weights(4), None, *states(1, 2), floats(1, 9)], 3,
                        dict(hidden_size=3)),
    "lstm, clip and functions": ("LSTM", 14, [TOKENS, *weights(4)], 3,
                                 dict(hidden_size=3, clip=0.3,
                                      activations=["HardSigmoid", "Elu", "Softsign"],
                                      activation_alpha=[0.3, 0.7], activation_beta=[0.4])),
    "lstm, input forget": ("LSTM", 14, [TOKENS, *weights(4)], 3,
                           dict(hidden_size=3, input_forget=1)),
    "gru": ("GRU", 14, [TOKENS, *weights(3)], 2, dict(hidden_size=3)),
    "gru, both ways": ("GRU", 14, [TOKENS, *weights(3, 2), LENGTHS, *states(2, 1)], 2,
                       dict(hidden_size=3, direction="bidirectional", linear_before_reset=1)),
    "rnn": ("RNN", 14, [TOKENS, *weights(1, 2)], 2,
            dict(hidden_size=3, direction="bidirectional", activations=["Relu", "Tanh"])),
    "roi align": ("RoiAlign", 16, [IMAGE, REGIONS, ints(0, 1, 1)], 1,
                  dict(output_height=3, output_width=2, sampling_ratio=2, spatial_scale=0.5)),
    "roi align 10": ("RoiAlign", 11, [IMAGE, REGIONS, ints(0, 1, 1)], 1,
                     dict(output_height=3, output_width=2, sampling_ratio=3, spatial_scale=0.25)),
    "lrn, odd": ("LRN", 13, [IMAGE], 1, dict(size=3, alpha=0.5)),
    "hardmax 11": ("Hardmax", 11, [np.round(LINE)], 1, dict(axis=1)),
    "selu": ("Selu", 11, [LINE], 1, dict(alpha=2.0, gamma=0.5)),
    "celu": ("Celu", 12, [LINE], 1, dict(alpha=0.4)),
    "shrink": ("Shrink", 11, [LINE], 1, dict(bias=0.2, lambd=0.7)),
    "thresholded relu": ("ThresholdedRelu", 11, [LINE], 1, dict(alpha=0.3)),
    "length of a vector": ("LpNormalization", 11, [LINE], 1, dict(axis=1, p=1)),
    "lp pool": ("LpPool", 11, [IMAGE], 1, dict(kernel_shape=[2, 3], p=3, pads=[1, 0, 0, 1])),
    "global lp pool": ("GlobalLpPool", 11, [IMAGE], 1, dict(p=3)),
    "log of a sum": ("ReduceLogSum", 13, [abs(LINE)], 1, dict(axes=[1], keepdims=0)),
    "det": ("Det", 11, [floats(2, 3, 3)], 1, {}),
    "reverse sequence": ("ReverseSequence", 11, [TOKENS, ints(5, 2, 4)], 1,
                         dict(time_axis=0, batch_axis=1)),
    "reverse sequence, batch first": ("ReverseSequence", 11, [TOKENS, ints(1, 2, 3, 0, 3)], 1,
                                      dict(time_axis=1, batch_axis=0)),
    "compress": ("Compress", 11, [LINE, np.array([True, False, False, True])], 1, dict(axis=1)),
    "quantize": ("QuantizeLinear", 13, [IMAGE, abs(floats(4)), ints(3, 0, 9, 200).astype(np.uint8)],
                 1, dict(axis=1)),
    "eye": ("EyeLike", 11, [floats(3, 5)], 1, dict(k=-1)),
    "affine grid": ("AffineGrid", 20, [floats(2, 2, 3), ints(2, 4, 5, 6)], 1,
                    dict(align_corners=1)),
    "dynamic quantize": ("DynamicQuantizeLinear", 11, [IMAGE], 3, {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms(form: tuple[str, int, list[Any], int, dict[str, Any]]) -> None:
    op, opset, inputs, outputs, attrs = form
    model = node_model(op, opset, inputs, outputs, **attrs)
    module, x = load_onnx(model), torch.from_numpy(inputs[0])
    result = module(x)
    found = result if isinstance(result, tuple) else (result,)
    for a, b in zip(found, run_ort(model, inputs[0]), strict=True):
        torch.testing.assert_close(a, torch.from_numpy(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [2.0, 3.0, 0.5, 1.5])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("place", ["asymmetric", "half_pixel", "align_corners"])
@pytest.mark.parametrize("shape", [(2, 3, 6, 4), (1, 2, 4, 6, 2)], ids=["image", "volume"])
def test_the_nearest_pixels(
    shape: tuple[int, ...], place: str, rounding: str, scale: float
) -> None:
    scales = np.array([1, 1, *(scale for _ in shape[2:])], np.float32)
    given = {"coordinate_transformation_mode": place, "nearest_mode": rounding}
    x = floats(*shape)
    model = node_model("Resize", 13, [x, np.array([], np.float32), scales], 1, **given)
    (wanted,) = run_ort(model, x)
    assert np.array_equal(load_onnx(model)(torch.from_numpy(x)).numpy(), wanted)


@pytest.mark.parametrize(
    ("place", "rounding", "scale", "mode"),
    [
        ("asymmetric", "floor", 2.0, "nearest"),
        ("half_pixel", "round_prefer_floor", 2.0, "nearest"),
        ("half_pixel", "round_prefer_ceil", 0.5, "nearest-exact"),
        ("asymmetric", "floor", 1.5, "nearest"),
        ("half_pixel", "ceil", 2.0, None),
    ],
)
def test_which_are_one_resize(place: str, rounding: str, scale: float, mode: str | None) -> None:
    given = {"coordinate_transformation_mode": place, "nearest_mode": rounding}
    scales = np.array([1, 1, scale, scale], np.float32)
    model = node_model("Resize", 13, [IMAGE, np.array([], np.float32), scales], 1, **given)
    graph = capture(load_onnx(model), (torch.from_numpy(IMAGE),)).graph
    modes = [node.attrs["mode"] for node in graph.nodes if node.op == "resize"]
    assert modes == ([] if mode is None else [mode])


@pytest.mark.parametrize("shape", [(1, 6, 20), (3, 6, 4, 5), (1, 40, 9, 9)], ids=str)
@pytest.mark.parametrize("opset", [13, 17])
def test_weights_normalized_by_themselves(shape: tuple[int, ...], opset: int) -> None:
    """Weight standardization is a batch norm of the weights in training mode; of images that mode
    is refused (test_onnx_nodes.py)."""
    channels = shape[1]
    given = [floats(*shape), floats(channels), floats(channels), floats(channels)]
    given.append(abs(floats(channels)))
    names = ["w", "scale", "shift", "mean", "variance"]
    mode: dict[str, Any] = {"training_mode": 1} if opset > 13 else {}
    results = ["normal", "new_mean", "new_variance"] + ["own_mean", "own_var"] * (opset == 13)
    node = helper.make_node("BatchNormalization", names, results, momentum=0.75, **mode)
    used = results if opset > 13 else results[:1]
    nodes = [node, *(helper.make_node("Add", ["x", each], [f"y_{each}"]) for each in used)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [
            helper.make_tensor_value_info(
                f"y_{each}", TensorProto.FLOAT, shape if each == "normal" else [channels]
            )
            for each in used
        ],
        [numpy_helper.from_array(value, name) for name, value in zip(names, given, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    found = load_onnx(model)(torch.zeros(1))
    w, scale, shift, mean, variance = (torch.from_numpy(each).double() for each in given)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    own_variance, own_mean = torch.var_mean(w, axes, correction=0)
    normal = F.batch_norm(w, own_mean, own_variance, scale, shift, False, 0.0, 1e-5)
    expected = [normal, 0.75 * mean + 0.25 * own_mean, 0.75 * variance + 0.25 * own_variance]
    for x, y in zip(found if len(used) > 1 else [found], expected, strict=False):
        torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-5)
