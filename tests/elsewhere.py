"""A device that is not the CPU, on a machine that has none: torch's "meta" with data behind it.

As on a GPU, an operator takes tensors of one device, and what it makes is there too; tensors
without dimensions may come from the CPU. So a pass that mixes constants of a model on a GPU with
tensors of its own fails here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gtco.ir.graph import Graph

ELSEWHERE = torch.device("meta")
_MOVES = ("_to_copy", "copy_")


def _dispatch(
    _: Any,
    function: Any,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    return _run(function, args, dict(kwargs or {}))


class Elsewhere(Tensor):
    """`held`, as if it were on that device."""

    held: Tensor
    __torch_dispatch__ = classmethod(_dispatch)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
        )
        made.held = held
        return made


class _Anywhere(TorchDispatchMode):
    """What is made on that device has data too."""

    __torch_dispatch__ = _dispatch


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = function.overloadpacket.__name__
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = any(isinstance(each, Elsewhere) for each in tensors)
    if there and name not in _MOVES:
        for each in tensors:
            if not isinstance(each, Elsewhere) and each.dim():
                raise RuntimeError(f"{function}: tensors of two devices")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]) == ELSEWHERE
        kwargs["device"] = torch.device("cpu")
    args, kwargs = tree_map_only(Elsewhere, lambda each: each.held, (args, kwargs))
    found = function(*args, **kwargs)
    if name.endswith("_"):
        return tensors[0]
    return tree_map_only(Tensor, Elsewhere, found) if there else found


def run_elsewhere(step: Callable[[Graph], Graph], graph: Graph) -> Graph:
    """What `step` makes of `graph` with its constants elsewhere: those of the result are there."""
    constants = {name: Elsewhere(each) for name, each in graph.constants.items()}
    with _Anywhere():
        result = step(replace(graph, constants=MappingProxyType(constants)))
    here = [name for name, each in result.constants.items() if not isinstance(each, Elsewhere)]
    assert not here or not constants, f"constants that are not where the others are: {here}"
    return result
