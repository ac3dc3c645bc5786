"""ONNX in: a path as a model, its arguments, and bad files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import gtco
from gtco.frontend.onnx import OnnxError, load_onnx
from gtco.ir.interpreter import interpret
from gtco.locate import UsageError, locate
from tests.onnx_cases import (
    assert_near,
    floats,
    node_model,
    save,
)


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
    with pytest.raises(gtco.CaptureError, match=r"by position; pass args=\(x,\)"):
        gtco.capture(fixed, (), {"x": torch.zeros(3, 4)})
    dynamic = save(linear("batch"), tmp_path / "dynamic.onnx")
    with pytest.raises(OnnxError, match=r"'x': torch.float32 \[batch, 4\].*example arguments"):
        locate(str(dynamic))
    with pytest.raises(UsageError, match="no file"):
        locate(str(tmp_path / "none.onnx"))


def two_inputs() -> onnx.ModelProto:
    """y = x + bias, both of `batch` rows."""
    inputs = {"x": ["batch", 4, None], "bias": ["batch", 1, 1]}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "bias"], ["y"])],
        "g",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", 1, ["batch", 4, None])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_shapes_fix_what_the_model_leaves_free() -> None:
    model = two_inputs()
    loaded = load_onnx(model, shapes={"x": (2, 4, 3)})
    assert [tuple(x.shape) for x in loaded.example()] == [(2, 4, 3), (2, 1, 1)]
    assert list(gtco.capture(loaded, loaded.example()).inputs) == ["x", "bias"]
    with pytest.raises(OnnxError, match=r"\[2, 4, 3\] was given"):
        loaded(torch.zeros(3, 4, 3), torch.zeros(3, 1, 1))


def test_free_axes_are_listed_with_the_remedy() -> None:
    words = (
        r"'x': torch.float32 \[batch, 4, \?\]: axis 0 \(batch\), axis 2; "
        r"'bias': .*: axis 0 \(batch\).*shapes=\{'x': \(1, 4, 1\)\}.*--shape x=1x4x1"
    )
    with pytest.raises(OnnxError, match=words):
        load_onnx(two_inputs()).example()
    with pytest.raises(OnnxError, match=r"'x': .* axis 2"):
        load_onnx(two_inputs(), shapes={"bias": (2, 1, 1)}).example()


@pytest.mark.parametrize(
    "shapes, words",
    [
        ({"X": (2, 4, 3)}, "names 'X'.*inputs are 'x'"),
        ({"x": (2, 4)}, r"'x'.*\[2, 4\].*do not fit"),
        ({"x": (2, 5, 3)}, "do not fit"),
        ({"x": (-1, 4, 3)}, "do not fit"),
        ({"x": (2.0, 4, 3)}, "do not fit"),
        ({"x": (2, 4, 3), "bias": (3, 1, 1)}, "'bias'.*one size"),
    ],
)
def test_shapes_have_to_fit(shapes: dict[str, Any], words: str) -> None:
    with pytest.raises(OnnxError, match=words):
        load_onnx(two_inputs(), shapes=shapes)


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
    model.graph.node[1].op_type = "Bernoulli"


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
        (not_claimed, r"relu \(Bernoulli\): the operator Bernoulli is not supported"),
        (foreign_domain, r"relu.*com\.microsoft::Relu is not supported"),
        (opset(6), "opset 6; gtco reads 7 to"),
        (opset(99), "opset 99; gtco reads 7 to"),
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


def test_external_data_of_a_model_in_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(80))
    model = onnx.load(external(tmp_path, "w.bin"), load_external_data=False)
    with pytest.raises(OnnxError, match=r"initializer 'w'.*load the model by its path|not valid"):
        load_onnx(model)


LARGE = """
import re, sys
from pathlib import Path
import torch
from gtco.frontend.onnx import load_onnx
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret

def peak():
    # Not getrusage: its peak begins with that of the process that made this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

before = peak()
model = load_onnx(Path(sys.argv[1]))
rows = torch.tensor([0, 262143])
graph = capture(model, (rows,)).graph
(y,) = interpret(graph, (rows,))
print(y[0, 0].item(), y[1, -1].item(), (peak() - before) / 2**30)
"""


def test_a_model_of_3_gb(tmp_path: Path) -> None:
    """Three tables of 1 GiB in one sparse file, of which the last elements are not zero."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of memory is asked of Linux")
    rows, columns = 2**18, 2**10
    names = ["a", "b", "c"]
    nodes = [helper.make_node("Gather", [name, "rows"], [f"{name}_rows"]) for name in names]
    nodes.append(helper.make_node("Sum", [f"{name}_rows" for name in names], ["y"]))
    tensors = []
    with (tmp_path / "weights.bin").open("wb") as data:
        for number, name in enumerate(names):
            start, length = number << 30, 4 * rows * columns
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[rows, columns])
            tensor.data_location = TensorProto.EXTERNAL
            facts = {"location": "weights.bin", "offset": str(start), "length": str(length)}
            for key, value in facts.items():
                tensor.external_data.add(key=key, value=value)
            data.seek(start + length - 4)
            data.write(np.float32(10**number).tobytes())
            tensors.append(tensor)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("rows", TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, columns])],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = save(model, tmp_path / "m.onnx")
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, last, grown_gb = map(float, done.stdout.split())
    assert (first, last) == (0, 111)
    # What imports needed for a while is part of the peak ahead of it.
    assert 2.5 < grown_gb < 5.5, "once in the buffers, and one tensor on its way there"


def test_a_node_says_what_it_does_not_support(tmp_path: Path) -> None:
    model = node_model(
        "MaxPool", 12, [floats(1, 3, 9, 8)], 2, kernel_shape=[2, 2], pads=[0, 0, 1, 1]
    )
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
