"""Calls of ATen: what stands for an operator that the table of `gtco.ir.ops` does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Stands for input number `index` in the arguments of an `aten` node."""

    index: int

    def __repr__(self) -> str:
        return f"${self.index}"


def call(
    *inputs: Tensor, target: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]
) -> Any:
    """Call the ATen overload `target`, with `Slot`s replaced by the inputs.

    They are contiguous, as they were when the model was exported: some kernels ask for that, and
    others read their memory in its order.
    """
    inputs = tuple(tensor.contiguous() for tensor in inputs)

    def fill(value: Any) -> Any:
        if isinstance(value, Slot):
            return inputs[value.index]
        return [fill(item) for item in value] if isinstance(value, tuple) else value

    return _overload(target)(*(fill(a) for a in args), **{k: fill(v) for k, v in kwargs})


def _overload(target: str) -> Any:
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def without_data(op: str, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`attrs` with which `op` allocates nothing: an ATen call makes its tensors on no device."""
    if op != "aten":
        return attrs
    names = [argument.name for argument in _overload(attrs["target"])._schema.arguments]
    if "device" not in names:
        return attrs
    meta, args, kwargs = torch.device("meta"), list(attrs["args"]), dict(attrs["kwargs"])
    if (index := names.index("device")) < len(args):
        args[index] = meta
    else:
        kwargs["device"] = meta
    return {**attrs, "args": args, "kwargs": tuple(kwargs.items())}
