"""Compute what an exported .onnx file computes of constants alone, once and for all.

    y = ConstantOfShape(Shape(x)); z = x + y  ->  z = x + [[0, 0], [0, 0]]  ->  z = x

Traced models compute masks, positions and sizes of fixed values in every call. Compilers that read
such files leave much of it in place, and some refuse it: TensorRT 8.5's parser has no constants
without axes. People who deploy with them fold their files first, so those of peers are folded here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

RANDOM = {"Bernoulli", "Multinomial", *(f"Random{k}" for k in ("Normal", "Uniform"))}
RANDOM |= {f"Random{k}Like" for k in ("Normal", "Uniform")}

SIZES = 64
"""Elements at most of constants that may be sizes, positions or axes, which shapes follow from."""


def fold_constants(model: ModelProto) -> None:
    """Take out of `model` what is known: values, sums with zeros, choices that are made.

    Args:
        model: changed, unless an operator of its has a graph of its own (loops and branches).
            Operators of other domains stay, and weights in files of their own are not known.
    """
    if not any(each.HasField("g") or each.graphs for n in model.graph.node for each in n.attribute):
        _Folding(model).fold()


class _Folding:
    """One way through a graph, in the order of its nodes."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        graph = model.graph
        inside = [w for w in graph.initializer if w.data_location != TensorProto.EXTERNAL]
        self._weights = {each.name: each for each in inside}
        self._made: dict[str, TensorProto] = {}
        self._same: dict[str, str] = {}
        self._outputs = {each.name for each in graph.output}
        self._types: dict[str, TypeProto] = {each.name: each.type for each in graph.input}
        for weight in graph.initializer:
            self._types[weight.name] = _type_of(weight)

    def fold(self) -> None:
        graph, kept = self._model.graph, []
        for node in graph.node:
            node.input[:] = [self._same.get(name, name) for name in node.input]
            if not self._is_known(node):
                kept.append(node)
        kept = _used(kept, self._outputs)
        needed = {name for node in kept for name in node.input}
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name not in needed:
                del graph.initializer[index]
        graph.initializer.extend(each for name, each in self._made.items() if name in needed)
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in kept]
        del graph.node[:]
        graph.node.extend(nodes)

    def _is_known(self, node: NodeProto) -> bool:
        """Note what is known of a node's outputs; whether that is all and it is needed no more."""
        if node.domain:
            return False
        self._infer(node)
        if self._outputs.intersection(node.output):  # which are made by nodes, never weights
            return False
        values = self._computed(node)
        if values is not None:
            for name, value in values.items():
                self._made[name] = numpy_helper.from_array(value, name)
                self._types[name] = _type_of(self._made[name])
            return True
        same = self._same_as(node)
        if same is not None:
            self._same[node.output[0]] = same
        return same is not None

    def _infer(self, node: NodeProto) -> None:
        names = [name for name in node.input if name]
        if any(name not in self._types for name in names):
            return
        opset = next(each.version for each in self._model.opset_import if not each.domain)
        data = {name: found for name in names if (found := self._constant(name)) is not None}
        with contextlib.suppress(onnx.shape_inference.InferenceError):
            self._types |= onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, opset),
                node,
                {name: self._types[name] for name in names},
                {name: each for name, each in data.items() if np.prod(each.dims) <= SIZES},
                opset_imports=list(self._model.opset_import),
                ir_version=self._model.ir_version,
            )

    def _computed(self, node: NodeProto) -> dict[str, np.ndarray] | None:
        outputs = [name for name in node.output if name]
        if node.op_type == "Shape":
            shape = self._shape(node.input[0])
            first, last = (_attribute(node, name) for name in ("start", "end"))
            return None if shape is None else {outputs[0]: np.array(shape[first:last], np.int64)}
        given = [self._constant(name) for name in node.input if name]
        if node.op_type in RANDOM or any(each is None for each in given):
            return None
        body = GraphProto(name="one", node=[node])
        body.initializer.extend(each for each in given if each is not None)
        body.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
        one = helper.make_model(
            body, opset_imports=self._model.opset_import, ir_version=self._model.ir_version
        )
        try:
            found = ReferenceEvaluator(one).run(None, {})
        except Exception:  # of any type; what onnx cannot evaluate is left to the file's reader
            return None
        return {name: np.asarray(value) for name, value in zip(outputs, found, strict=True)}

    def _same_as(self, node: NodeProto) -> str | None:
        """The input that the node passes on as it is."""
        pairs: list[tuple[str, bool]] = []
        if node.op_type == "Add":
            left, right = node.input
            pairs = [(left, self._all(right, False)), (right, self._all(left, False))]
        if node.op_type == "Where":
            truth, yes, no = node.input
            pairs = [(yes, self._all(truth, True)), (no, self._all(truth, False))]
        shape = self._shape(node.output[0])
        found = [name for name, passes in pairs if passes and self._shape(name) == shape]
        return found[0] if found and shape is not None else None

    def _all(self, name: str, truth: bool) -> bool:
        found = self._constant(name)
        return found is not None and bool(
            (numpy_helper.to_array(found).astype(bool) == truth).all()
        )

    def _constant(self, name: str) -> TensorProto | None:
        return self._made.get(name) or self._weights.get(name)

    def _shape(self, name: str) -> list[int] | None:
        kind = self._types.get(name)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        sizes = kind.tensor_type.shape.dim
        if not all(each.HasField("dim_value") for each in sizes):
            return None
        return [each.dim_value for each in sizes]


def _type_of(value: TensorProto) -> TypeProto:
    return helper.make_tensor_type_proto(value.data_type, value.dims)


def _attribute(node: NodeProto, name: str) -> int | None:
    return next((each.i for each in node.attribute if each.name == name), None)


def _used(nodes: Sequence[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Those that an output needs, in their order."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1]
