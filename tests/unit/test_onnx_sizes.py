"""ONNX models that ask for more than any memory holds: each is refused by name, and at once."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import gtco
from gtco.frontend import onnx_sizes
from gtco.frontend.onnx import OnnxError, load_onnx

SPARE_BYTES = 4 << 30
"""Address space above what the process has: an attempt to hold a large tensor fails at once."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def halves(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


HUGE = 2**36
Constants = Sequence[Any]
OF_THE_INPUT: dict[str, tuple[str, tuple[int, ...], Constants, dict[str, Any]]] = {
    "expand": ("Expand", (1,), [ints(HUGE)], {}),
    "expand to many sizes": ("Expand", (1,), [ints(2**12, 2**12, 2**12)], {}),
    "expand beyond 64 bits": ("Expand", (1,), [ints(2**40, 2**40)], {}),
    "tile": ("Tile", (4,), [ints(2**31)], {}),
    "tile of two axes": ("Tile", (4, 4), [ints(2**15, 2**15)], {}),
    "pad": ("Pad", (4,), [ints(HUGE, 0)], {}),
    "pad by repeating the edge": ("Pad", (4,), [ints(HUGE, HUGE)], {"mode": "edge"}),
    "pad by reflection": ("Pad", (4,), [ints(0, 2**40)], {"mode": "reflect"}),
    "resize to sizes": ("Resize", (1, 1, 4, 4), [None, None, ints(1, 1, 2**20, 2**20)], {}),
    "resize by scales": ("Resize", (1, 1, 4, 4), [None, halves(1, 1, 2**18, 2**18)], {}),
    "resize linearly": (
        "Resize",
        (1, 1, 4, 4),
        [None, None, ints(1, 1, 2**20, 2**20)],
        {"mode": "linear", "exclude_outside": 1},
    ),
    "resize without end": ("Resize", (1, 1, 4, 4), [None, halves(1, 1, np.inf, 1)], {}),
    "resize of one axis": (
        "Resize",
        (1, 1, 4, 2**16),
        [None, None, ints(2**33)],
        {"mode": "linear", "axes": [2]},
    ),
    "one hot": ("OneHot", (4,), [ints(HUGE), halves(0, 1)], {}),
    "broadcast": ("Add", (2**16, 1), [np.zeros((1, 2**16), np.float32)], {}),
    "product": ("MatMul", (2**16, 1), [np.zeros((1, 2**16), np.float32)], {}),
    "convolution over padding": (
        "Conv",
        (1, 1, 4, 4),
        [np.zeros((1, 1, 1, 1), np.float32)],
        {"pads": [0, 0, 2**20, 2**20]},
    ),
    "pooling over padding": (
        "MaxPool",
        (1, 1, 4, 4),
        [],
        {"kernel_shape": [2, 2], "pads": [0, 0, 2**20, 2**20], "strides": [2**19, 2**19]},
    ),
}
KNOWN: dict[str, tuple[str, Constants]] = {
    "constant of shape": ("ConstantOfShape", [ints(HUGE)]),
    "constant of three sizes": ("ConstantOfShape", [ints(2**20, 2**20, 2**20)]),
    "constant within 32 bits": ("ConstantOfShape", [ints(2**31)]),
    "range": ("Range", [np.int64(0), np.int64(2**40), np.int64(1)]),
    "range of small steps": ("Range", [np.float32(0), np.float32(1), np.float32(1e-30)]),
    "range without end": ("Range", [np.float32(0), np.float32(np.inf), np.float32(1)]),
    "range without step": ("Range", [np.float32(0), np.float32(1), np.float32(0)]),
    "expand": ("Expand", [halves(1), ints(HUGE)]),
    "tile": ("Tile", [halves(1, 2), ints(2**33)]),
    "pad": ("Pad", [halves(1, 2), ints(0, 2**33)]),
    "one hot": ("OneHot", [ints(1, 2), ints(HUGE), halves(0, 1)]),
    "broadcast": (
        "Add",
        [np.zeros((2**16, 1), np.float32), np.zeros((1, 2**16), np.float32)],
    ),
}
NO_NUMBER = {
    "expand beyond 64 bits": "RuntimeError",
    "resize without end": "OverflowError",
    "range of small steps": "OverflowError",
    "range without end": "OverflowError",
    "range without step": "ZeroDivisionError",
}
"""What is refused before it comes to a size."""


def model(
    op: str, shape: Sequence[int] | None, constants: Constants, attrs: dict[str, Any]
) -> onnx.ModelProto:
    """sum(op(x, *constants)), or x + sum(op(*constants)) without a shape of x."""
    names = [f"c{at}" if value is not None else "" for at, value in enumerate(constants)]
    tensors = [
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in zip(names, constants, strict=True)
        if value is not None
    ]
    given = names if shape is None else ["x", *names]
    kind = TensorProto.INT64 if op == "OneHot" and shape is not None else TensorProto.FLOAT
    nodes = [
        helper.make_node(op, given, ["y"], name="the_node", **attrs),
        helper.make_node("Cast", ["y"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["floats"], ["sum"], keepdims=0),
    ]
    if shape is None:
        nodes.append(helper.make_node("Add", ["x", "sum"], ["z"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, (1,) if shape is None else shape)],
        [helper.make_tensor_value_info(*(("z", 1, [1]) if shape is None else ("sum", 1, [])))],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def refusal(made: onnx.ModelProto, example: torch.Tensor) -> str:
    """What capture and a plain run both say, each within a moment."""
    module = load_onnx(made)
    begun = time.perf_counter()
    with pytest.raises(OnnxError) as captured:
        gtco.capture(module, (example,))
    with pytest.raises(OnnxError) as ran:
        module(example)
    assert time.perf_counter() - begun < 10
    assert "the_node" in str(captured.value)
    assert "the_node" in str(ran.value)
    return str(ran.value)


@pytest.mark.parametrize("case", OF_THE_INPUT)
def test_a_result_beyond_memory_is_refused(case: str) -> None:
    op, shape, constants, attrs = OF_THE_INPUT[case]
    x = torch.zeros(shape, dtype=torch.int64 if op == "OneHot" else torch.float32)
    message = refusal(model(op, shape, constants, attrs), x)
    assert NO_NUMBER.get(case, "would make a tensor") in message


@pytest.mark.parametrize("case", KNOWN)
def test_a_known_value_beyond_memory_is_refused(case: str) -> None:
    op, constants = KNOWN[case]
    message = refusal(model(op, None, constants, {}), torch.zeros(1))
    assert NO_NUMBER.get(case, "would make a tensor") in message


@pytest.mark.parametrize(
    "size, words",
    [(2**40, "the largest has"), (-2, "a size below 0"), (2**31, "the largest has")],
)
def test_an_input_that_cannot_be_is_refused(size: int, words: str) -> None:
    made = model("Relu", (size,), [], {})
    with pytest.raises(OnnxError, match=rf"input 'x'.*{words}"):
        load_onnx(made)


@pytest.mark.parametrize("unknown", [-1, "?", "None", "-1"])
def test_sizes_of_which_the_exporter_knows_nothing(unknown: int | str) -> None:
    """Paddle's exporter writes -1 or a question mark: axes of that name are of other sizes."""
    made = model("Relu", (1, 3, 1), [], {})
    for dimension in made.graph.input[0].type.tensor_type.shape.dim[::2]:
        if isinstance(unknown, str):
            dimension.dim_param = unknown
        else:
            dimension.dim_value = unknown
    assert load_onnx(made).inputs[0].free == ["axis 0", "axis 2"]
    x = torch.randn(2, 3, 5)
    graph = gtco.capture(load_onnx(made, shapes={"x": (2, 3, 5)}), (x,))
    torch.testing.assert_close(gtco.interpret(graph, (x,))[0], x.relu().sum())
    with pytest.raises(OnnxError, match=r"\[\?, 3, \?\] the sizes \[2, 4, 5\]"):
        load_onnx(made, shapes={"x": (2, 4, 5)})


def test_what_this_machine_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_sizes, "_memory_bytes", lambda: 1000)
    made = model("ConstantOfShape", None, [ints(251)], {})
    with pytest.raises(OnnxError, match=r"tensor of \[251\], 1004 bytes; this machine has 1000"):
        load_onnx(made)(torch.zeros(1))
    assert load_onnx(model("ConstantOfShape", None, [ints(250)], {}))(torch.zeros(1)).tolist() == [
        0
    ]


def test_sizes_given_for_free_axes_are_held_to_the_same() -> None:
    made = model("Relu", (1,), [], {})
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.raises(OnnxError, match=r"input 'x'.*the largest has"):
        load_onnx(made, shapes={"x": (2**40,)})
