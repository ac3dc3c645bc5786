"""The ONNX package's node tests as models that gtco can be asked to import, and small models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.testing import assert_close

from gtco.frontend.onnx import OPS, OnnxError, OnnxModel, load_onnx
from gtco.frontend.onnx_shapes import DTYPES

FLOATS = {1, 10, 11, 16, 17}
EXPANDED = "(several)"
"""What a case of several nodes, an operator's definition spelled out, counts as."""

TOLERANCES = {torch.float16: (2e-3, 1e-3), torch.bfloat16: (2e-2, 5e-3)}
"""(relative, absolute) for what is computed in halves; otherwise ONNX's own for the case."""
ABSOLUTE = {"DFT": 1e-5}
"""Of operators whose sums of large numbers may be zero: ONNX has theirs in fp64."""


@dataclass(frozen=True)
class Case:
    """A node test.

    Args:
        operator: its operator, or `EXPANDED`.
        sets: pairs of inputs and expected outputs.
        floating: whether a floating-point tensor goes in or out.
        typed: whether gtco has the types of all its inputs and outputs.
    """

    name: str
    operator: str
    model: onnx.ModelProto
    sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    floating: bool
    typed: bool
    rtol: float
    atol: float

    def run(self) -> list[tuple[OnnxModel, list[Tensor]]]:
        """Compare every data set; return the models and their inputs.

        Raises:
            OnnxError: gtco refuses the case.
            AssertionError: it is wrong.
        """
        return [self._run(inputs, outputs) for inputs, outputs in self.sets]

    def _run(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[OnnxModel, list[Tensor]]:
        for embedded in self._embeddings():
            module, given = self._module(inputs, embedded)
            try:
                with torch.no_grad():
                    result = module(*given)
                break
            except OnnxError as error:
                if "not known at compile time" not in str(error):
                    raise
                refusal = error
        else:
            raise refusal
        found = result if isinstance(result, tuple) else (result,)
        expected = [as_tensor(output) for output in outputs]
        rtol, atol = max(self.rtol, 1e-3), max(self.atol, ABSOLUTE.get(self.operator, 1e-7))
        for x in [*map(as_tensor, inputs), *expected]:
            wider = TOLERANCES.get(x.dtype, (0.0, 0.0))
            rtol, atol = max(rtol, wider[0]), max(atol, wider[1])
        for x, y in zip(found, expected, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if x.dtype == torch.float8_e4m3fn:  # exactly: torch has no tolerance for it
                x, y = x.float(), y.float()
            assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)
        return module, given

    def _embeddings(self) -> Iterator[set[str]]:
        """Inputs to make constants of: none; those that are no floats; all but one; all."""
        inputs = self.model.graph.input
        yield set()
        yield {i.name for i in inputs if i.type.tensor_type.elem_type not in FLOATS}
        yield {i.name for i in inputs[1:]}
        yield {i.name for i in inputs}

    def _module(self, inputs: Sequence[Any], embedded: set[str]) -> tuple[OnnxModel, list[Tensor]]:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        del model.graph.input[:]
        given: list[Any] = []
        for declared, value in zip(self.model.graph.input, inputs, strict=True):
            if declared.name in embedded:
                array = as_array(value)
                model.graph.initializer.append(numpy_helper.from_array(array, declared.name))
            else:
                model.graph.input.append(declared)
                given.append(value)
        module = load_onnx(model)  # first: it refuses types that torch has not
        return module, [as_tensor(value) for value in given]


def as_array(value: Any) -> np.ndarray[Any, Any]:
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
    return np.asarray(array)


def as_tensor(value: Any) -> Tensor:
    array = as_array(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


@cache
def _loaded() -> list[Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model_tests(kind="node")


def _claimed(model: onnx.ModelProto) -> bool:
    return all(node.op_type in OPS and not node.domain for node in model.graph.node)


def unclaimed_models() -> dict[str, onnx.ModelProto]:
    """The node tests with an operator that gtco does not claim, by name."""
    return {each.name: each.model for each in _loaded() if not _claimed(each.model)}


@cache
def node_cases() -> dict[str, list[Case]]:
    """The node tests whose operators gtco all claims, by operator."""
    found: dict[str, list[Case]] = {}
    for each in _loaded():
        nodes = each.model.graph.node
        if not _claimed(each.model):
            continue
        operator = nodes[0].op_type if len(nodes) == 1 else EXPANDED
        values = [*each.model.graph.input, *each.model.graph.output]
        types = {value.type.tensor_type.elem_type for value in values}
        for entry in each.model.opset_import:
            if entry.domain == "":
                entry.version = max(entry.version, 7)  # the operator has not changed since
        case = Case(
            each.name.removeprefix("test_"),
            operator,
            each.model,
            each.data_sets,
            bool(types & FLOATS),
            types <= set(DTYPES) and not _casts_to_other_types(nodes),
            each.rtol,
            each.atol,
        )
        found.setdefault(operator, []).append(case)
    return found


def _casts_to_other_types(nodes: Sequence[onnx.NodeProto]) -> bool:
    return any(a.name == "to" and a.i not in DTYPES for node in nodes for a in node.attribute)


# -- small models, and ONNX Runtime ----------------------------------------------------------------

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


def run_ort(
    model: onnx.ModelProto | str, *inputs: np.ndarray[Any, Any], as_written: bool = False
) -> list[Any]:
    """What ONNX Runtime makes of `model` on the CPU; `as_written` without its own rewrites."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if as_written:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    found = found if isinstance(found, tuple) else (found,)
    for x, y in zip(found, expected, strict=True):
        y = torch.as_tensor(y)
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * y.abs().max().item())
