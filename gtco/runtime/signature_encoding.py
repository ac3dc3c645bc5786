"""A model's signature as plain JSON values, and back: how a call's arguments become the graph's
inputs, and its outputs the result.

The types of both are known by the names that torch's pytree registers: no code is imported.
"""

from __future__ import annotations

import json
from collections import defaultdict, namedtuple
from collections.abc import Iterator

from torch.utils import _pytree as pytree

from gtco.frontend.torch_export import Captured
from gtco.runtime.encoding import (
    EncodingError,
    Json,
    decode_graph,
    decode_value,
    encode_graph,
    encode_value,
)


def encode_signature(captured: Captured) -> Json:
    return {
        "graph": encode_graph(captured.graph, {}),
        "in_spec": _encode_tree(captured.in_spec, "arguments"),
        "input_positions": list(captured.input_positions),
        "input_literals": [
            [index, encode_value(value)] for index, value in captured.input_literals.items()
        ],
        "out_spec": _encode_tree(captured.out_spec, "result"),
        "output_template": [encode_value(value) for value in captured.output_template],
    }


def decode_signature(data: Json) -> Captured:
    return Captured(
        decode_graph(data["graph"], {}),
        _decode_tree(data["in_spec"], "arguments"),
        tuple(data["input_positions"]),
        {index: decode_value(value) for index, value in data["input_literals"]},
        _decode_tree(data["out_spec"], "result"),
        tuple(decode_value(value) for value in data["output_template"]),
    )


def _encode_tree(spec: pytree.TreeSpec, what: str) -> Json:
    """torch's own JSON of a structure; its types are known by their registered names."""
    for kind in _kinds(spec):
        if not _is_named(kind):
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise EncodingError(
                f"there is a {name} in the model's {what}, a type that no file names; use a tuple, "
                f"a list, a dict or a dataclass there, such as tuple(it)"
            )
    try:
        text = pytree.treespec_dumps(spec)
        same = _decode_tree(json.loads(text), what) == spec
    except (NotImplementedError, TypeError, ValueError) as error:
        raise EncodingError(f"the structure of the model's {what}: {error}") from error
    if not same:
        raise EncodingError(f"the structure of the model's {what} is not kept by JSON: {spec}")
    return json.loads(text)


def _kinds(spec: pytree.TreeSpec) -> Iterator[type]:
    """The type of every container in `spec`; of a named tuple its own."""
    if spec.is_leaf():
        return
    yield spec.context if spec.type is namedtuple else spec.type
    for child in spec.children():
        yield from _kinds(child)


def _is_named(kind: type) -> bool:
    """Whether torch writes a name for containers of type `kind`, by which it reads them again."""
    names = [name for name, each in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.items() if each is kind]
    return kind is not defaultdict and names not in ([], [pytree.NO_SERIALIZED_TYPE_NAME_FOUND])


def _decode_tree(data: Json, what: str) -> pytree.TreeSpec:
    for each in _objects(data):
        if "__enum__" in each or each.get("type") == "collections.defaultdict":
            # torch would import whatever module these name
            raise EncodingError(f"the {what} hold an enum or a defaultdict, which cannot be loaded")
        name = each.get("type")
        if isinstance(name, str) and name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            raise EncodingError(
                f"the model's {what} are a {name}, which is not registered with torch's pytree "
                f"here; import {name.rpartition('.')[0] or name} before loading, and register a "
                f"plain dataclass: torch.export.register_dataclass(its class, "
                f"serialized_type_name={name!r})"
            )
    return pytree.treespec_loads(json.dumps(data))


def _objects(data: Json) -> Iterator[dict[str, Json]]:
    """Every JSON object in `data`, those in strings of JSON too."""
    if isinstance(data, str) and data[:1] in ("{", "["):
        try:
            data = json.loads(data)
        except ValueError:
            return
    if isinstance(data, dict):
        yield data
    if isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _objects(item)
