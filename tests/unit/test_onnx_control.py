"""ONNX graphs inside graphs, and what is known before the inputs are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import OnnxError, load_onnx
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from tests.onnx_cases import floats, ints, run_ort

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = floats(3, 4)


def value(name: str, kind: int = FLOAT, shape: Sequence[int | None] | None = (3, 4)) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, array: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))


def body(
    nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], **initializers: Any
) -> onnx.GraphProto:
    stored = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    return helper.make_graph(nodes, "body", inputs, outputs, stored)


def model(nodes: list[onnx.NodeProto], outputs: list[Any], **initializers: Any) -> onnx.ModelProto:
    graph = body(nodes, [value("x")], outputs, **initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check(made: onnx.ModelProto, ops: set[str] | None = None) -> None:
    pytest.importorskip("onnxruntime")
    module, x = load_onnx(made), torch.from_numpy(X)
    expected = tuple(map(torch.from_numpy, run_ort(made, X)))
    found = module(x)
    torch.testing.assert_close(found if isinstance(found, tuple) else (found,), expected)
    captured = capture(module, (x,))
    torch.testing.assert_close(tuple(interpret(captured.graph, (x,))), expected)
    if ops is not None:
        assert {node.op for node in captured.graph.nodes} == ops


def test_a_branch_that_shapes_decide() -> None:
    """What an exporter writes for `squeeze`: the branch that fits the axis runs."""
    relu = body([helper.make_node("Relu", ["x"], ["a"])], [], [value("a")])
    scaled = helper.make_node("Mul", ["x", "two"], ["b"])
    double = body([scaled], [], [value("b")], two=np.float32(2))
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["size"], axis=0),
        helper.make_node("Equal", ["size", "four"], ["is_four"]),
        helper.make_node("If", ["is_four"], ["y"], then_branch=relu, else_branch=double),
    ]
    check(model(nodes, [value("y")], one=np.int64(1), four=np.int64(4)), {"relu"})
    check(model(nodes, [value("y")], one=np.int64(1), four=np.int64(5)), {"mul"})


def loop(going_on: onnx.NodeProto, trips: int) -> onnx.ModelProto:
    """y = x + x + x ..., and each sum."""
    inner = body(
        [
            going_on,
            helper.make_node("Add", ["state", "x"], ["next"]),
            helper.make_node("Identity", ["next"], ["row"]),
        ],
        [value("i", INT, ()), value("cond", BOOL, ()), value("state")],
        [value("more", BOOL, ()), value("next"), value("row")],
        two=np.int64(2),
    )
    nodes = [helper.make_node("Loop", ["trips", "yes", "x"], ["y", "rows"], body=inner, name="it")]
    outputs = [value("y"), value("rows", FLOAT, [None, 3, 4])]
    return model(nodes, outputs, trips=np.int64(trips), yes=np.bool_(True))


def test_a_loop_is_unrolled() -> None:
    check(loop(helper.make_node("Identity", ["cond"], ["more"]), 3))
    check(loop(helper.make_node("Less", ["i", "two"], ["more"]), 9))


def test_a_loop_that_never_ends_is_refused() -> None:
    endless = loop(helper.make_node("Identity", ["cond"], ["more"]), 2**40)
    with pytest.raises(OnnxError, match=r"node it \(Loop\): .* more than 4096 steps.*; "):
        load_onnx(endless)(torch.from_numpy(X))


def test_a_scan_is_unrolled() -> None:
    inner = body(
        [
            helper.make_node("Add", ["state", "row"], ["next"]),
            helper.make_node("Mul", ["next", "row"], ["made"]),
        ],
        [value("state", shape=[3]), value("row", shape=[3])],
        [value("next", shape=[3]), value("made", shape=[3])],
    )
    scan = helper.make_node(
        "Scan",
        ["start", "x"],
        ["last", "y"],
        body=inner,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_input_directions=[1],
        scan_output_axes=[1],
        scan_output_directions=[1],
    )
    check(model([scan], [value("last", shape=[3]), value("y")], start=floats(3)))


def test_a_branch_that_data_decides_is_refused() -> None:
    branch = body([helper.make_node("Relu", ["x"], ["a"])], [], [value("a")])
    other = body([helper.make_node("Neg", ["x"], ["b"])], [], [value("b")])
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], name="it", then_branch=branch,
                         else_branch=other),
    ]  # fmt: skip
    made = model(nodes, [value("y")], zero=np.float32(0))
    with pytest.raises(OnnxError, match=r"node it \(If\): 'positive' decides .*; make it a const"):
        capture(load_onnx(made), (torch.from_numpy(X),))


# -- what is known -------------------------------------------------------------------------------


@pytest.mark.parametrize("as_nodes", [False, True], ids=["initializers", "constant nodes"])
def test_a_shape_computed_from_shapes_is_known(as_nodes: bool) -> None:
    whole = np.round(8 * floats(2, 40, 50))  # sums of these are exact in any order
    stored = {"first": ints(0), "rest": ints(-1, 2), "weight": whole}
    nodes = [constant(name, array) for name, array in stored.items()] if as_nodes else []
    nodes += [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["rows"], axis=0),
        helper.make_node("Concat", ["rows", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["x", "wanted"], ["split"]),
        helper.make_node("Shape", ["weight"], ["of_weight"]),
        helper.make_node("ConstantOfShape", ["of_weight"], ["zeros"]),
        helper.make_node("Add", ["weight", "zeros"], ["same"]),
        helper.make_node("ReduceSum", ["same"], ["total"], keepdims=0),
        helper.make_node("Add", ["split", "total"], ["y"]),
    ]
    made = model(nodes, [value("y", shape=[3, 2, 2])], **({} if as_nodes else stored))
    check(made)
    sizes = sorted(buffer.numel() for buffer in load_onnx(made).buffers())
    assert sizes == [1, 2, 4000]


def test_results_whose_size_depends_on_data_are_taken_where_the_data_is_known() -> None:
    nodes = [
        helper.make_node("NonZero", ["mask"], ["places"]),
        helper.make_node("Squeeze", ["places", "zero"], ["kept"]),
        helper.make_node("Gather", ["x", "kept"], ["y"], axis=1),
    ]
    made = model(nodes, [value("y", shape=[3, None])], mask=ints(0, 1, 0, 5), zero=ints(0))
    check(made)
    made.graph.node[0].input[0] = "x"
    del made.graph.node[1:]
    made.graph.node[0].output[0] = "y"
    made.graph.output[0].CopyFrom(value("y", INT, [2, None]))
    with pytest.raises(OnnxError, match=r"\(NonZero\): input 'x' decides a shape .*; make it a"):
        load_onnx(made)(torch.from_numpy(X))
