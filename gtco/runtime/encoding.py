"""A plan as plain JSON values, and back: what an artifact's "plan" part holds.

Nothing in it is code: operators are names from `gtco.ir.ops.OPS`, ATen overloads are looked up
among those that torch has registered, and every other value is one of a closed set of types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gtco.codegen.program import (
    Argument,
    KernelProgram,
    Pointer,
    TensorMapArgument,
    WindowBox,
)
from gtco.ir.aten import Slot
from gtco.ir.graph import FusedGraph, Graph, Group, Node, subgraph
from gtco.ir.ops import OPS
from gtco.ir.spec import DTYPE_NAMES, TensorSpec
from gtco.options import Options
from gtco.runtime.plan import Launch, Plan
from gtco.target import HOST, find_target

Json = Any

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LAYOUTS = {str(each): each for each in (torch.strided,)}
_MEMORY_FORMATS = {
    str(each): each
    for each in (torch.contiguous_format, torch.channels_last, torch.preserve_format)
}
LARGEST_BYTES = 1 << 40
"""Of a tensor, and of all that a plan stores: no GPU has as much."""
_UNSAFE_ATEN = frozenset({"aten::from_file"})
"""Overloads that change no tensor and yet reach outside the program."""


class EncodingError(ValueError):
    """A value that no artifact can hold, or JSON that describes no plan."""


# -- attribute values ------------------------------------------------------------------------------


def encode_value(value: Any) -> Json:
    """An attribute as JSON: what JSON has no type for becomes an object of one key.

    Raises:
        EncodingError: a type outside the closed set.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (tuple, list)):
        return [encode_value(item) for item in value]
    if isinstance(value, Slot):
        return {"slot": value.index}
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return {"dtype": DTYPE_NAMES[value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout) and str(value) in _LAYOUTS:
        return {"layout": str(value)}
    if isinstance(value, torch.memory_format) and str(value) in _MEMORY_FORMATS:
        return {"memory_format": str(value)}
    raise EncodingError(f"a {type(value).__name__} ({value!r:.80}) cannot be saved")


def decode_value(data: Json) -> Any:
    """The value that `encode_value` wrote; lists come back as tuples.

    Raises:
        EncodingError: it wrote no such thing.
    """
    if isinstance(data, list):
        return tuple(decode_value(item) for item in data)
    if not isinstance(data, dict):
        return data
    match data:
        case {"float": ("inf" | "-inf" | "nan") as text}:
            return float(text)
        case {"slot": int(index)}:
            return Slot(index)
        case {"dtype": str(name)}:
            return _lookup(_DTYPES, name, "dtype")
        case {"device": str(name)}:
            return torch.device(name)
        case {"layout": str(name)}:
            return _lookup(_LAYOUTS, name, "layout")
        case {"memory_format": str(name)}:
            return _lookup(_MEMORY_FORMATS, name, "memory format")
    raise EncodingError(f"{data!r:.80} is no attribute value")


def _text(data: Json, key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise EncodingError(f"{key} is {value!r:.80}, no text")
    return value


def _time(data: Json, key: str) -> float | None:
    value = data[key]
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise EncodingError(f"{key} is {value!r:.80}, no time")
    return value


def _flag(data: Json, key: str) -> bool:
    value = data[key]
    if not isinstance(value, bool):
        raise EncodingError(f"{key} is {value!r:.80}, neither true nor false")
    return value


def _whole(value: Json, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise EncodingError(f"{what} is {value!r:.80}, no whole number")
    return value


def _lookup(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise EncodingError(f"unknown {what} {name!r}")
    return table[name]


# -- graphs ----------------------------------------------------------------------------------------


def encode_spec(spec: TensorSpec) -> Json:
    return {"shape": list(spec.sizes), "dtype": DTYPE_NAMES[spec.dtype]}


def decode_spec(data: Json) -> TensorSpec:
    shape = tuple(_whole(size, "a size") for size in data["shape"])
    spec = TensorSpec(shape, _lookup(_DTYPES, data["dtype"], "dtype"))
    if min(shape, default=0) < 0 or max(spec.nbytes, *shape, 0) > LARGEST_BYTES:
        raise EncodingError(f"{spec!s:.80} is no shape of a tensor that a GPU holds")
    return spec


def encode_graph(graph: Graph, weights: Mapping[str, str]) -> Json:
    """`graph` as JSON.

    Args:
        graph: of fixed shapes.
        weights: constant name to the artifact's part that holds it; none for one whose shape
            and dtype are all that counts.
    """
    return {
        "inputs": [{"name": name, **encode_spec(spec)} for name, spec in graph.inputs.items()],
        "constants": [
            {"name": name, **encode_spec(graph.specs[name]), "part": weights.get(name)}
            for name in graph.constants
        ],
        "nodes": [
            {
                "name": node.name,
                "op": node.op,
                "inputs": list(node.inputs),
                "attrs": {key: encode_value(value) for key, value in node.attrs.items()},
                "outputs": [encode_spec(spec) for spec in node.outputs],
                "source": node.source,
            }
            for node in graph.nodes
        ],
        "outputs": list(graph.outputs),
        "orders": {name: list(order) for name, order in graph.orders.items()},
    }


def decode_graph(data: Json, parts: Mapping[str, Tensor]) -> Graph:
    """The graph that `encode_graph` wrote; a constant without a part holds no data.

    Raises:
        EncodingError: an unknown operator, or a constant that differs from its part.
        GraphError: a graph that breaks a rule.
    """
    constants: dict[str, Tensor] = {}
    for each in data["constants"]:
        spec = decode_spec(each)
        part = each["part"]
        tensor = spec.meta() if part is None else _lookup(parts, part, "part")
        if TensorSpec.of(tensor) != spec:
            raise EncodingError(f"{part} is {TensorSpec.of(tensor)}, not {spec}")
        constants[each["name"]] = tensor
    graph = Graph(
        MappingProxyType({each["name"]: decode_spec(each) for each in data["inputs"]}),
        MappingProxyType(constants),
        tuple(_decode_node(each) for each in data["nodes"]),
        tuple(data["outputs"]),
        MappingProxyType({name: _order(order) for name, order in data["orders"].items()}),
    )
    graph.verify()
    return graph


def _order(data: Json) -> tuple[int, ...]:
    return tuple(_whole(dim, "a dimension") for dim in data)


def _decode_node(data: Json) -> Node:
    name, op = data["name"], data["op"]
    if op not in OPS:
        raise EncodingError(f"%{name} is of the unknown operator {op!r}")
    attrs = {key: decode_value(value) for key, value in data["attrs"].items()}
    if op == "aten":
        _check_aten(name, attrs["target"])
    outputs = tuple(decode_spec(spec) for spec in data["outputs"])
    source = _text(data, "source")
    return Node(name, op, tuple(data["inputs"]), MappingProxyType(attrs), outputs, source)


def _check_aten(name: str, target: str) -> None:
    """Refuse what is no registered operator without side effects."""
    found: Any = None
    words = target.split(".")
    if len(words) == 3 and all(word.isidentifier() for word in words):
        packet = getattr(getattr(torch.ops, words[0]), words[1], None)
        found = getattr(packet, words[2], None)
    if not isinstance(found, torch._ops.OpOverload):
        raise EncodingError(
            f"%{name} calls {target}, which is not registered here; import the package that "
            f"registers it before loading"
        )
    if found._schema.is_mutable or found._schema.name in _UNSAFE_ATEN:
        raise EncodingError(f"%{name} calls {target}, which does more than compute a tensor")


# -- the plan --------------------------------------------------------------------------------------


def encode_plan(plan: Plan, weights: Mapping[str, str]) -> Json:
    """`plan` as JSON; the kernels' sources stand once each.

    Raises:
        EncodingError: naming what cannot be saved.
    """
    _refuse_host(plan.options)
    programs = [launch.program for launch in plan.launches if launch.program]
    return {
        "target": plan.target.arch,
        "options": asdict(replace(plan.options, calibration=None)),
        "dependent_launch": plan.dependent_launch,
        "graph": encode_graph(plan.graph, weights),
        "refusals": [list(each) for each in plan.fused.refusals],
        "legal_plans": plan.fused.legal_plans,
        "sources": {program.name: program.source for program in programs},
        "launches": [_encode_launch(launch) for launch in plan.launches],
    }


def decode_plan(data: Json, parts: Mapping[str, Tensor]) -> Plan:
    """The plan that `encode_plan` wrote.

    Args:
        data: JSON.
        parts: the weights by the artifact's part.

    Raises:
        EncodingError: it describes no plan.
        TargetError: its target is unknown here.
        OptionError: its options are.
        GraphError: its graph breaks a rule.
    """
    target = find_target(data["target"])
    options = Options.of(**data["options"])
    _refuse_host(options)
    graph = decode_graph(data["graph"], parts)
    nodes = {node.name: node for node in graph.nodes}
    launches = tuple(
        _decode_launch(each, graph, nodes, data["sources"], target.arch)
        for each in data["launches"]
    )
    refusals = tuple((str(a), str(b), str(reason)) for a, b, reason in data["refusals"])
    groups = tuple(launch.group for launch in launches)
    fused = FusedGraph(graph, groups, refusals, _whole(data["legal_plans"], "legal_plans"))
    return Plan(fused, launches, target, options, _flag(data, "dependent_launch"))


def _refuse_host(options: Options) -> None:
    """Keep an artifact from being code for the CPU: the host build would compile its sources."""
    if options.target == HOST:
        raise EncodingError(
            f"the target {HOST!r} is for checking kernels, not for artifacts; compile for a GPU"
        )


def _encode_launch(launch: Launch) -> Json:
    group, program = launch.group, launch.program
    return {
        "group": group.name,
        "nodes": [node.name for node in group.nodes],
        "outputs": list(group.graph.outputs),
        "family": launch.family,
        "source": launch.source,
        "reason": launch.reason,
        "predicted_us": launch.predicted_us,
        "program": None if program is None else encode_program(program),
    }


def _decode_launch(
    data: Json, graph: Graph, nodes: Mapping[str, Node], sources: Mapping[str, str], arch: str
) -> Launch:
    members = [_lookup(nodes, name, "node") for name in data["nodes"]]
    group = Group(_text(data, "group"), subgraph(graph, members, data["outputs"]))
    program = None
    if data["program"] is not None:
        known = {*group.graph.inputs, *group.graph.outputs, *graph.constants}
        for each in data["program"]["arguments"]:
            value = each.get("pointer", each.get("tensor_map"))
            if value not in known:
                raise EncodingError(f"{group.name} has no stored value %{value}")
        try:
            program = decode_program(data["program"], sources, arch)
        except EncodingError as error:
            raise EncodingError(f"{group.name}: {error}") from error
    family, source, reason = (_text(data, key) for key in ("family", "source", "reason"))
    return Launch(group, family, program, source, reason, _time(data, "predicted_us"))


def encode_program(program: KernelProgram) -> Json:
    """`program` as JSON, but for its source."""
    return {
        "kernel": program.name,
        "family": program.family,
        "sketch": program.sketch,
        "schedule": dict(program.schedule),
        "arch": program.arch,
        "grid": list(program.grid),
        "block": program.block,
        "smem_bytes": program.smem_bytes,
        "cluster": list(program.cluster),
        "arguments": [_encode_argument(argument) for argument in program.arguments],
        "used_smem_bytes": program.used_smem_bytes,
        "binding": program.binding,
        "fetch_bytes": program.fetch_bytes,
        "late_trigger": program.late_trigger,
        "backward": program.backward,
    }


def decode_program(data: Json, sources: Mapping[str, str], arch: str) -> KernelProgram:
    """The program that `encode_program` wrote.

    Args:
        data: JSON.
        sources: entry point to source.
        arch: what it must be for.

    Raises:
        EncodingError: it is another program's, or of another architecture.
    """
    program = KernelProgram(
        _text(data, "family"),
        _text(data, "sketch"),
        {knob: _whole(value, knob) for knob, value in data["schedule"].items()},
        _lookup(sources, data["kernel"], "kernel"),
        data["arch"],
        _three(data["grid"], "grid"),
        _whole(data["block"], "block"),
        _whole(data["smem_bytes"], "smem_bytes"),
        tuple(_decode_argument(each) for each in data["arguments"]),
        _three(data["cluster"], "cluster"),
        _whole(data["used_smem_bytes"], "used_smem_bytes"),
        _text(data, "binding"),
        _whole(data["fetch_bytes"], "fetch_bytes"),
        data["late_trigger"] is True,
        data["backward"] is True,
    )
    if program.name != data["kernel"]:
        raise EncodingError(
            f"{data['kernel']} is another kernel: not of this source, launch shape and arguments"
        )
    if program.arch != arch:
        raise EncodingError(f"{program.name} is for {program.arch}, the plan for {arch}")
    return program


def _encode_argument(argument: Argument) -> Json:
    if isinstance(argument, Pointer):
        return {"pointer": argument.value, "origin": argument.origin}
    return {
        "tensor_map": argument.value,
        "origin": argument.origin,
        "offset": argument.offset,
        "dtype": DTYPE_NAMES[argument.dtype],
        "sizes": list(argument.sizes),
        "strides": list(argument.strides),
        "box": list(argument.box),
        "swizzle_bytes": argument.swizzle_bytes,
        **({} if argument.window is None else {"window": asdict(argument.window)}),
    }


def _decode_argument(data: Json) -> Argument:
    if "pointer" in data:
        return Pointer(data["pointer"], _whole(data["origin"], "origin"))
    sizes, strides, box = (
        tuple(_whole(each, name) for each in data[name]) for name in ("sizes", "strides", "box")
    )
    window = data.get("window")
    ranks = (3, 5) if window is None else (4, 5)
    sides = len(sizes) if window is None else 2
    if len(sizes) not in ranks or len(strides) != len(sizes) - 1 or len(box) != sides:
        raise EncodingError(f"a tensor map of {len(sizes)} sizes, {len(strides)} strides")
    return TensorMapArgument(
        data["tensor_map"],
        _whole(data["offset"], "offset"),
        _lookup(_DTYPES, data["dtype"], "dtype"),
        sizes,
        strides,
        box,
        _whole(data["swizzle_bytes"], "swizzle_bytes"),
        None if window is None else _decode_window(window, len(sizes) - 2),
        _whole(data["origin"], "origin"),
    )


def _decode_window(data: Json, axes: int) -> WindowBox:
    sizes = {}
    for name in ("lower", "upper", "stride"):
        sizes[name] = tuple(_whole(value, name) for value in data[name])
        if len(sizes[name]) != axes:
            raise EncodingError(f"windows with {len(sizes[name])} numbers in {name}, not {axes}")
    return WindowBox(**sizes)


def _three(values: Sequence[Json], what: str) -> tuple[int, int, int]:
    x, y, z = (_whole(value, what) for value in values)
    return x, y, z
