"""Types, numbers, conversions and operators of single values, as the kernels spell them in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gtco.codegen.sketch import check
from gtco.ir.graph import Graph, Node
from gtco.ir.spec import TensorSpec

C_TYPES = {
    torch.float16: "half_t",
    torch.bfloat16: "bf16_t",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "e4m3_t",
}
_WIDENED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
"""What is stored narrower than it is computed with."""


def c_type(dtype: torch.dtype) -> str:
    """The device library's name of a stored element.

    Raises:
        Illegal: there is none.
    """
    check(dtype in C_TYPES, f"no kernel stores {dtype}")
    return C_TYPES[dtype]


def compute_type(dtype: torch.dtype) -> str:
    """The C++ type that arithmetic on `dtype` is done in (`compute_t` of the device library)."""
    return "float" if dtype in _WIDENED else c_type(dtype)


def literal(value: Any, dtype: torch.dtype = torch.float32) -> str:
    """A Python number as a C++ literal of the compute type of `dtype`."""
    kind = compute_type(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if kind not in ("float", "double"):
        text = f"{int(value)}{'LL' if kind == 'i64' else ''}"
        return text if kind in ("i64", "i32") else f"{kind_cast(kind)}({text})"
    if math.isinf(value):
        text = "__int_as_float(0x7f800000)" if value > 0 else "__int_as_float(0xff800000)"
        return text if kind == "float" else f"static_cast<double>({text})"
    if math.isnan(value):
        text = "__int_as_float(0x7fffffff)"
        return text if kind == "float" else f"static_cast<double>({text})"
    return f"{float(value)!r}{'f' if kind == 'float' else ''}"


def kind_cast(kind: str) -> str:
    """The opening of a conversion to the C++ type `kind`."""
    return f"static_cast<{kind}>"


def convert(expression: str, source: torch.dtype, result: torch.dtype) -> str:
    """`expression` as a value of the compute type of `result`."""
    if compute_type(source) == compute_type(result):
        return expression
    if source.is_floating_point and result in (torch.uint8, torch.int8, torch.int16):
        # As torch on CPUs: numbers wrap around, where the GPU's own conversion stops at the ends.
        expression = f"{kind_cast('i64')}({expression})"
    return f"{kind_cast(compute_type(result))}({expression})"


def scalar(graph: Graph, node: Node, inputs: Sequence[str]) -> str:
    """The scalar CUDA expression of pointwise `node` of the scalar expressions `inputs`.

    Inputs have the compute types of their specs, and so has the result.
    """
    template = node.definition.cuda
    check(template is not None, f"%{node.name}: {node.op} has no scalar expression")
    assert template is not None
    specs = [graph.specs[name] for name in node.inputs]
    result = node.outputs[0].dtype
    if node.op == "cast":
        return convert(inputs[0], specs[0].dtype, result)
    inner = torch.float32 if node.definition.quantizes else _inner_dtype(node, specs)
    names = [
        name if node.definition.selects and slot == 0 else convert(name, spec.dtype, inner)
        for slot, (name, spec) in enumerate(zip(inputs, specs, strict=True))
    ]
    if "other" in node.attrs:
        names.append(literal(node.attrs["other"], inner))
    attrs = {key: value for key, value in node.attrs.items() if key != "other"}
    text = template.format(*(_wrap(name) for name in names), **attrs)
    # A 16-bit value may keep its digits on the way to a reader of its kernel; what a model
    # rounds to 8 bits is meant to lose them. What is only stored is rounded by the store.
    read_here = any(node.values[0] in reader.inputs for reader in graph.nodes)
    if read_here and (node.definition.quantizes or result == torch.float8_e4m3fn):
        return f"round_to<{c_type(result)}>({text})"
    if node.definition.quantizes:
        return text
    # C++ widens small integers, which wrap around in torch.
    small = compute_type(result) in ("short", "signed char", "u8") or inner == torch.bool
    if small:
        return f"{kind_cast(compute_type(result))}({text})"
    return text


def _inner_dtype(node: Node, inputs: Sequence[TensorSpec]) -> torch.dtype:
    """What `node` computes in: its result's dtype, or what a comparison promotes to."""
    result = node.outputs[0].dtype
    if result != torch.bool or len(inputs) + ("other" in node.attrs) != 2:
        return result
    other = inputs[1].meta() if len(inputs) == 2 else node.attrs["other"]
    return torch.result_type(inputs[0].meta(), other)


def _wrap(expression: str) -> str:
    return expression if expression.isidentifier() else f"({expression})"
