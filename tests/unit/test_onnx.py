"""ONNX in: the package's node tests, whole exported models, and bad files."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gtco
from gtco.frontend.onnx import OPS, OnnxError, OnnxModel, load_onnx
from gtco.frontend.torch_export import capture
from gtco.interpreter import interpret
from gtco.locate import UsageError, locate
from gtco.passes import run_pipeline
from tests import models
from tests.onnx_cases import EXPANDED, node_cases

ort = pytest.importorskip("onnxruntime")

REFUSED = {
    "batchnorm_epsilon_training_mode": "training_mode is on",
    "batchnorm_example_training_mode": "training_mode is on",
    "maxpool_with_argmax_2d_precomputed_pads": "output Indices",
    "maxpool_with_argmax_2d_precomputed_strides": "output Indices",
    "resize_downsample_scales_cubic_align_corners": "no whole size",
    "resize_downsample_scales_linear_align_corners": "no whole size",
    "training_dropout": "training_mode is on",
    "training_dropout_default": "training_mode is on",
    "training_dropout_default_mask": "training_mode is on",
    "training_dropout_mask": "training_mode is on",
    "training_dropout_zero_ratio": "training_mode is on",
    "training_dropout_zero_ratio_mask": "training_mode is on",
}
"""The node tests of claimed operators and gtco's types that fail, and what refuses each."""


# -- node tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [*sorted(OPS), EXPANDED])
def test_node_cases(operator: str) -> None:
    captured = False
    for case in node_cases().get(operator, []):
        if not case.typed:
            with pytest.raises(OnnxError, match=r"not supported|takes tensors"):
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
    cases = [case for group in node_cases().values() for case in group]
    asked = [case for case in cases if case.floating and case.typed]
    failing = [case for case in asked if case.name in REFUSED]
    assert len(asked) > 850
    assert len(failing) == len(REFUSED)
    assert len(failing) <= 0.02 * len(asked)


def test_a_wrong_operator_fails_its_node_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtco.frontend import onnx as frontend

    wrong = {**OPS, "Floor": lambda call, x: x.ceil()}
    monkeypatch.setattr(frontend, "OPS", wrong)
    with pytest.raises(AssertionError):
        test_node_cases("Floor")


# -- older opsets, against ONNX Runtime ----------------------------------------------------------

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def node_model(
    op: str, opset: int, inputs: list[Any], outputs: int = 1, **attrs: Any
) -> onnx.ModelProto:
    """A model of one node: its first input is the model's, the others are initializers."""
    names = [f"x{i}" if value is not None else "" for i, value in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, name="the_node", **attrs)],
        "g",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, inputs[0].shape)],
        [onnx.ValueInfoProto(name=name) for name in results],
        [
            numpy_helper.from_array(value, name)
            for name, value in list(zip(names, inputs, strict=True))[1:]
            if value is not None
        ],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def run_ort(model: onnx.ModelProto | str, *inputs: np.ndarray[Any, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    source = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


X = floats(2, 3, 4)
IMAGE = floats(1, 3, 9, 8)
NONE = np.zeros(0, dtype=np.float32)

OLDER = {
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


def test_group_norm_before_opset_21_is_refused() -> None:
    """It has a scale per group there; ONNX deprecated it, and its checker says so."""
    model = node_model("GroupNormalization", 18, [floats(2, 6, 5), *floats(2, 2)], num_groups=2)
    model.graph.output[0].type.CopyFrom(model.graph.input[0].type)
    with pytest.raises(OnnxError, match="deprecated"):
        load_onnx(model)


# -- whole models --------------------------------------------------------------------------------


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


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    found = found if isinstance(found, tuple) else (found,)
    for x, y in zip(found, expected, strict=True):
        y = torch.as_tensor(y)
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * y.abs().max().item())


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


# -- the ways in ---------------------------------------------------------------------------------


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def linear(size: int | str = 3) -> onnx.ModelProto:
    """y = relu(x @ w), with w an initializer."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
            helper.make_node("Relu", ["h"], ["y"], name="relu"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size, 5])],
        [numpy_helper.from_array(floats(4, 5), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_capture_and_compile_take_a_path(tmp_path: Path) -> None:
    path = save(linear("batch"), tmp_path / "m.onnx")
    x = torch.randn(2, 4)
    graph = gtco.capture(str(path), (x,))
    assert [node.op for node in graph.nodes] == ["matmul", "relu"]
    assert_near(interpret(graph, (x,)), [load_onnx(path)(x)])
    compiled = gtco.compile(path, (x,), target="sm_90a")
    assert isinstance(compiled, nn.Module)


def test_inputs_may_be_left_out_where_their_sizes_are_fixed(tmp_path: Path) -> None:
    fixed = save(linear(3), tmp_path / "fixed.onnx")
    located = locate(str(fixed))
    assert [tuple(x.shape) for x in located.args] == [(3, 4)]
    assert gtco.capture(fixed).outputs
    dynamic = save(linear("batch"), tmp_path / "dynamic.onnx")
    with pytest.raises(OnnxError, match=r"'x': torch.float32 \[batch, 4\].*example arguments"):
        locate(str(dynamic))
    with pytest.raises(UsageError, match="no file"):
        locate(str(tmp_path / "none.onnx"))


@pytest.mark.parametrize(
    "args",
    [(), (torch.zeros(3, 5),), (torch.zeros(3, 4).double(),), (torch.zeros(3, 4),) * 2, (3.0,)],
    ids=["none", "shape", "dtype", "two", "number"],
)
def test_arguments_have_to_fit(args: tuple[Any, ...]) -> None:
    with pytest.raises(OnnxError, match=r"'x': torch.float32 \[batch, 4\]"):
        load_onnx(linear("batch"))(*args)


def test_one_symbol_is_one_size() -> None:
    model = linear("n")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "n"
    with pytest.raises(OnnxError, match="was given"):
        load_onnx(model)(torch.zeros(3, 4))


def test_equal_initializers_are_one_buffer() -> None:
    model = linear()
    copy = model.graph.initializer.add()
    copy.CopyFrom(model.graph.initializer[0])
    copy.name = "v"
    model.graph.node[1].CopyFrom(helper.make_node("MatMul", ["x", "v"], ["z"]))
    model.graph.node.append(helper.make_node("Add", ["h", "z"], ["y"]))
    assert len(list(load_onnx(model).buffers())) == 1


def test_local_functions_are_inlined() -> None:
    model = linear()
    model.graph.node[1].CopyFrom(helper.make_node("Twice", ["h"], ["y"], domain="mine"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("mine", "Twice", ["a"], ["b"], body, opsets[:1]))
    model.opset_import.append(opsets[1])
    x = torch.randn(3, 4)
    weight = as_weight(model)
    torch.testing.assert_close(load_onnx(model)(x), 2 * (x @ weight))


def as_weight(model: onnx.ModelProto) -> Tensor:
    return torch.from_numpy(numpy_helper.to_array(model.graph.initializer[0]).copy())


# -- bad input -----------------------------------------------------------------------------------


def cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def no_initializer(model: onnx.ModelProto) -> None:
    del model.graph.initializer[:]


def wrong_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((4, 5)), "w"))


def wrong_shape(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(floats(3, 5), "w"))


def short_data(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "NoSuchOperator"


def not_claimed(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Hardmax"


def foreign_domain(model: onnx.ModelProto) -> None:
    model.graph.node[1].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def opset(version: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    change.__name__ = f"opset_{version}"
    return change


def no_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def unknown_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute.append(helper.make_attribute("alpha", 2.0))


def strings(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    model.graph.node[0].CopyFrom(helper.make_node("Identity", ["x"], ["h"]))


@pytest.mark.parametrize(
    "change, words",
    [
        (cycle, "not valid"),
        (no_initializer, "not valid.*'?w'?"),
        (wrong_type, "not valid"),
        (wrong_shape, "not valid"),
        (short_data, "not valid|cannot be read"),
        (unknown_operator, "NoSuchOperator"),
        (not_claimed, r"relu \(Hardmax\): the operator Hardmax is not supported"),
        (foreign_domain, r"relu.*com\.microsoft::Relu is not supported"),
        (opset(10), "opset 10; gtco reads 11 to"),
        (opset(99), "opset 99; gtco reads 11 to"),
        (no_opset, "opset|operator set"),
        (unknown_attribute, "alpha"),
        (strings, "not valid|STRING"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_bad_models(change: Callable[[onnx.ModelProto], None], words: str, tmp_path: Path) -> None:
    model = linear()
    change(model)
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(OnnxError, match=words):
        load_onnx(path)
    with pytest.raises(OnnxError, match=words):
        gtco.capture(path)


def test_damaged_files(tmp_path: Path) -> None:
    whole = linear().SerializeToString()
    for name, content in {
        "truncated": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "empty": b"",
        "text": b"this is no protobuf at all",
        "zip": b"PK\x03\x04" + bytes(100),
    }.items():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(content)
        with pytest.raises(OnnxError, match=r"no ONNX model|not valid"):
            load_onnx(path)
    with pytest.raises(FileNotFoundError):
        load_onnx(tmp_path / "none.onnx")
    with pytest.raises(OnnxError, match=r"\.onnx file"):
        load_onnx(tmp_path)


def external(folder: Path, location: str) -> Path:
    """A model in `folder` whose weight is in the file `location`."""
    model = linear()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": "80"}.items():
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    return save(model, folder / "m.onnx")


def test_external_data(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    data = floats(4, 5)
    (folder / "w.bin").write_bytes(data.tobytes())
    (tmp_path / "outside.bin").write_bytes(data.tobytes())
    x = torch.randn(3, 4)
    found = load_onnx(external(folder, "w.bin"))(x)
    torch.testing.assert_close(found, (x @ torch.from_numpy(data)).relu())
    os.symlink(tmp_path / "outside.bin", folder / "symbolic.bin")
    os.symlink(tmp_path, folder / "up")
    os.link(tmp_path / "outside.bin", folder / "hard.bin")
    (folder / "short.bin").write_bytes(data.tobytes()[:40])
    for location in (
        "../outside.bin",
        str(tmp_path / "outside.bin"),
        "symbolic.bin",
        "up/outside.bin",
        "hard.bin",
        "missing.bin",
        "short.bin",
    ):
        with pytest.raises(OnnxError, match=r"not valid|cannot be read"):
            load_onnx(external(folder, location))
            pytest.fail(location)


def test_a_node_says_what_it_does_not_support(tmp_path: Path) -> None:
    model = node_model("MaxPool", 12, [IMAGE], 2, kernel_shape=[2, 2])
    with pytest.raises(OnnxError, match=r"the_node \(MaxPool\).*Indices"):
        gtco.capture(save(model, tmp_path / "m.onnx"))


def test_a_shape_that_depends_on_data_is_refused_by_name() -> None:
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"], name="the_node")],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [6]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(OnnxError, match=r"the_node \(Reshape\).*'shape' decides a shape"):
        load_onnx(model)(torch.zeros(6), torch.tensor([2, 3]))
