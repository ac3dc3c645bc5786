"""An .onnx file as an `nn.Module`, so that it goes through the same capture as any other.

    load_onnx("model.onnx") -> OnnxModel; capture(OnnxModel, (image,)) -> Captured

Each node runs a torch function from one table. What is known before the inputs are (shapes, and
what is computed from shapes and small constants) is computed on the CPU while the module runs, so
that `torch.export` sees fixed shapes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data
from torch import Tensor, nn

from gtco.frontend.onnx_activations import ACTIVATIONS
from gtco.frontend.onnx_attention import ATTENTION
from gtco.frontend.onnx_call import CUT_OFF, Call, OnnxError, Op
from gtco.frontend.onnx_inputs import (
    check_inputs,
    declared_inputs,
    example_inputs,
    with_shapes,
)
from gtco.frontend.onnx_math import MATH
from gtco.frontend.onnx_norms import NORMS
from gtco.frontend.onnx_quantize import QUANTIZED
from gtco.frontend.onnx_recurrent import RECURRENT
from gtco.frontend.onnx_run import CONTROL, Body, Scope
from gtco.frontend.onnx_sampling import SAMPLING
from gtco.frontend.onnx_select import SELECT
from gtco.frontend.onnx_shapes import DTYPES, FLOAT8_AND_STRINGS, FP8, SHAPES
from gtco.frontend.onnx_spectral import SPECTRAL
from gtco.frontend.onnx_windows import WINDOWS
from gtco.frontend.signature import NamedInputs

__all__ = ["OPS", "OnnxError", "OnnxModel", "load_onnx"]

OPS: Mapping[str, Op] = MappingProxyType(
    {
        **ACTIVATIONS,
        **ATTENTION,
        **CONTROL,
        **MATH,
        **NORMS,
        **QUANTIZED,
        **RECURRENT,
        **SAMPLING,
        **SELECT,
        **SHAPES,
        **SPECTRAL,
        **WINDOWS,
    }
)
"""The operators that gtco claims, each with its function."""

OPSETS = range(7, 29)
"""The versions of the default operator set whose semantics the table was checked against."""

SMALL_ELEMENTS = 1024
"""A floating-point initializer up to this size is known at compile time; integers that may be
sizes, and masks, always are."""

DEFAULT_DOMAINS = ("", "ai.onnx")

STANDARD_PAIRS = (
    "export it with QuantizeLinear and DequantizeLinear of ONNX's default domain: int8 from "
    "opset 13 on, float8e4m3fn from opset 19 on"
)
"""What to do about another domain's operators of the same meaning."""


class OnnxModel(NamedInputs, nn.Module):
    """The graph of an ONNX model as a module.

    Its forward takes the graph's inputs in order and returns a tensor, or a tuple of them where
    the graph has several outputs. Initializers are buffers; equal ones are one.

    Args:
        model: a checked model without local functions.
        folder: where its external data is. Read tensor by tensor from there, so that a model of
            3 GB takes 3 GB.
        shapes: sizes to compile for, by input; needed only where the model leaves axes free.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        folder: Path | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self._by_content: dict[tuple[Any, ...], str] = {}
        self._body = self._read(model.graph, _opset(model), folder)
        declared = declared_inputs(model.graph, self._body.buffers)
        self.inputs = with_shapes(declared, shapes or {})
        self.input_names = tuple(_identifier(each.name) for each in self.inputs)
        self.eval()

    def _read(self, graph: onnx.GraphProto, opset: int, folder: Path | None) -> Body:
        if graph.sparse_initializer:
            raise OnnxError("sparse initializers are not supported; store them dense")
        stored = {
            tensor.name: _tensor(tensor, f"initializer {tensor.name!r}", folder)
            for tensor in graph.initializer
        }
        calls = []
        for index, node in enumerate(graph.node):
            call = self._call(node, _where(node, index), opset, folder)
            if call.op == "Constant" and isinstance(value := call.attrs.get("value"), Tensor):
                stored[call.outputs[0]] = value  # an initializer by another name
            else:
                calls.append(call)
        return Body(
            tuple(value.name for value in graph.input if value.name not in stored),
            tuple(output.name for output in graph.output),
            tuple(calls),
            {name: self._store(name, value) for name, value in stored.items()},
            {
                name: value
                for name, value in stored.items()
                if value.numel() <= _most_known(value.dtype)
            },
        )

    def _store(self, name: str, value: Tensor) -> str:
        raw = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
        key = (value.dtype, tuple(value.shape), hashlib.sha256(raw).digest())
        if key not in self._by_content:
            self._by_content[key] = f"{_identifier(name)}_{len(self._by_content)}"
            self.register_buffer(self._by_content[key], value)
        return self._by_content[key]

    def _call(self, node: onnx.NodeProto, where: str, opset: int, folder: Path | None) -> Call:
        _check_claimed(node, where)
        attrs: dict[str, Any] = {}
        for each in node.attribute:
            if each.type == onnx.AttributeProto.GRAPH:
                attrs[each.name] = self._read(each.g, opset, folder)
            else:
                attrs[each.name] = _attribute(each, where, folder)
        function = OPS[node.op_type]
        inputs, outputs = tuple(node.input), tuple(node.output)
        return Call(node.op_type, function, where, opset, attrs, inputs, outputs)

    def example(self) -> tuple[Tensor, ...]:
        """Inputs of the declared shapes: random floats, zeros for the rest.

        Raises:
            OnnxError: an input has an axis without a fixed size.
        """
        return example_inputs(self.inputs)

    def forward(self, *args: Tensor) -> Any:
        """Run the graph.

        Raises:
            OnnxError: an input does not fit its declaration, or a node is not supported in the
                form that the model has it.
        """
        check_inputs(self.inputs, args)
        device = args[0].device if args else torch.device("cpu")
        outer = Scope(device, self.get_buffer)
        scope = outer.run(self._body, [(x, False) for x in args])
        outputs = []
        for name in self._body.outputs:  # what is known is no result of the trace: copy it into it
            value, known = scope[name]
            outputs.append(value.to(device).clone() if known else value)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _most_known(dtype: torch.dtype) -> float:
    """Elements of an initializer that is known; weights of 8 bits stay so."""
    if dtype in (FP8, torch.int8, torch.uint8):
        return 1
    return SMALL_ELEMENTS if dtype.is_floating_point else math.inf


def _identifier(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z_]", "_", name) or "tensor"


def load_onnx(
    source: str | os.PathLike[str] | onnx.ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> OnnxModel:
    """Read and check an ONNX model.

    Args:
        source: a file, or a model that is in memory with all its data.
        shapes: the size of every axis, by input, such as `{"x": (1, 3, 224, 224)}`. Axes of one
            name have one size, so that one input may stand for all; a model whose axes all have
            fixed sizes needs none.

    Raises:
        OnnxError: the file is damaged or no ONNX model, its graph is not well formed, its external
            data leaves its folder, gtco does not support its opset or one of its operators, or
            `shapes` does not fit its inputs.
        FileNotFoundError: there is no such file.
    """
    if isinstance(source, onnx.ModelProto):
        return OnnxModel(_checked(source, "the model"), None, shapes)
    path = Path(source)
    if path.suffix != ".onnx":
        raise OnnxError(f"{path} has to be the path of an .onnx file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise OnnxError(f"{path} is no ONNX model, or it is damaged ({_line(error)})") from error
    if not model.graph.output:
        raise OnnxError(f"{path} is no ONNX model, or it is damaged: it has no graph with outputs")
    _opset(model)
    try:
        onnx.checker.check_model(path, full_check=True)  # by path: it also checks external data
    except Exception as error:
        raise OnnxError(f"{path} is not valid ({_line(error)})") from error
    return OnnxModel(_inlined(model), path.parent, shapes)


def _checked(model: onnx.ModelProto, label: str) -> onnx.ModelProto:
    _opset(model)
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        raise OnnxError(f"{label} is not valid ({_line(error)})") from error
    return _inlined(model)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def _opset(model: onnx.ModelProto) -> int:
    for entry in model.opset_import:
        if entry.domain in DEFAULT_DOMAINS:
            if entry.version not in OPSETS:
                raise OnnxError(
                    f"the model is of opset {entry.version}; gtco reads {OPSETS[0]} to "
                    f"{OPSETS[-1]}: convert it with onnx.version_converter, or export it again"
                )
            return int(entry.version)
    for index, node in enumerate(model.graph.node):
        _check_claimed(node, _where(node, index))
    raise OnnxError("the model does not import the default operator set (ai.onnx); export it again")


def _where(node: onnx.NodeProto, index: int) -> str:
    return f"node {node.name or f'number {index}'} ({node.op_type})"


def _check_claimed(node: onnx.NodeProto, where: str) -> None:
    name, foreign = node.op_type, node.domain not in DEFAULT_DOMAINS
    if foreign or name not in OPS:
        remedy = STANDARD_PAIRS if foreign and "quantizelinear" in name.lower() else CUT_OFF
        name = f"{node.domain}::{name}" if foreign else name
        raise OnnxError(f"{where}: the operator {name} is not supported; {remedy}")


def _attribute(attribute: onnx.AttributeProto, where: str, folder: Path | None) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return _tensor(value, f"{where}: attribute {attribute.name!r}", folder)
    if isinstance(value, list):
        return [_text(item) for item in value]
    return _text(value)


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _tensor(proto: onnx.TensorProto, where: str, folder: Path | None) -> Tensor:
    if proto.data_type not in DTYPES:
        kind = onnx.TensorProto.DataType.Name(proto.data_type)
        raise OnnxError(f"{where} is of type {kind}, which {FLOAT8_AND_STRINGS}")
    dtype = DTYPES[proto.data_type]
    try:
        array = numpy_helper.to_array(_with_data(proto, folder))
    except Exception as error:
        raise OnnxError(f"{where} cannot be read ({_line(error)})") from error
    if dtype == torch.bfloat16:  # numpy has no such type: take its bits
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if dtype == FP8:
        return torch.from_numpy(array.view(np.uint8).copy()).view(FP8)
    return torch.from_numpy(np.array(array, copy=not array.flags.writeable, order="C"))


def _with_data(proto: onnx.TensorProto, folder: Path | None) -> onnx.TensorProto:
    """The tensor with its external data, if it has any, in a copy that goes when it was read."""
    if not uses_external_data(proto):
        return proto
    if folder is None:
        raise ValueError("its data is in another file: load the model by its path")
    loaded = onnx.TensorProto()
    loaded.CopyFrom(proto)
    load_external_data_for_tensor(loaded, str(folder))
    return loaded
