"""Refuse a tensor that is too large before anything is allocated for it.

What a model says decides how large its tensors are, and a file of a hundred bytes may ask for
2**40 of them. So each call to torch that an operator's function makes is asked for the shape of
its result: on the meta device ahead of the call where real tensors are computed, behind it while
`torch.export` traces, where tensors hold no data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 2**31 - 1
"""Elements of a tensor: kernels count them in 32 bits."""


class TooLargeError(ValueError):
    """A tensor of more elements than kernels count, or than this machine's memory holds."""


def check_size(shape: Sequence[int], itemsize: int = 1) -> None:
    """Refuse to make a tensor.

    Args:
        shape: its sizes.
        itemsize: bytes of an element; those of a tensor that is never allocated do not matter.

    Raises:
        TooLargeError: naming the shape.
    """
    if not all(isinstance(size, int) for size in shape):
        return  # not known before the model runs
    count = math.prod(shape)
    if count > LARGEST:
        raise TooLargeError(
            f"it would make a tensor of {list(shape)}, {count} elements; the largest has {LARGEST}"
        )
    if count * itemsize > _memory_bytes():
        raise TooLargeError(
            f"it would make a tensor of {list(shape)}, {count * itemsize} bytes; this machine has "
            f"{_memory_bytes()}"
        )


@contextmanager
def bounded(arguments: Sequence[Tensor | None]) -> Iterator[None]:
    """Check the size of each tensor that torch makes, whether on `arguments` or anew.

    Raises:
        TooLargeError: from the call that would make it.
    """
    real = all(x is None or type(x) in (Tensor, nn.Parameter) for x in arguments)
    mode = _AheadOfMemory if real else _Traced
    with mode():
        yield


class _AheadOfMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if not func.is_view:
            _check_all(_on_meta(func, args, given))
        result = func(*args, **given)
        if func.is_view:
            _check_all(result)
        return result


class _Traced(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (Tensor, tuple, list)):
            _check_all(result, itemsize=1)
        return result


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns, without its data; None where that depends on data."""
    moved_args, moved_kwargs = pytree.tree_map_only(Tensor, _without_data, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        moved_kwargs["device"] = torch.device("meta")
    try:
        return func(*moved_args, **moved_kwargs)
    except Exception:  # the call itself says it better
        return None


def _without_data(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _check_all(results: Any, itemsize: int | None = None) -> None:
    for result in pytree.tree_leaves(results):
        if isinstance(result, Tensor):
            check_size(result.shape, result.itemsize if itemsize is None else itemsize)


@cache
def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
