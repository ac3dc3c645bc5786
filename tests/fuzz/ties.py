"""What torch leaves open where elements are equal, settled in one way or another.

    topk, sort                                 the places of equal elements, and so which of two
                                               zeros comes first: always in the order of places,
                                               as gtco promises it
    max, min, clamp, relu, max_pool, and such  the sign of a zero that is taken among zeros of both
                                               signs: torch's own, or one that is drawn

Torch promises the first place of `argmax` and of `max(dim)`, and all places of a stable sort: these
are not open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Ties(TorchDispatchMode):
    """Settles what the operators of its block leave open.

    Args:
        seed: draws the signs of zeros that are open: all negative of seed 0, all positive of 1.
            None leaves them as torch has them.

    Attributes:
        found: whether anything was open that shows.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.found = False
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.positive = {0: 0.0, 1: 1.0}.get(seed, 0.5)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operator = _functional(func)
        if operator in _ORDERED:
            return self._in_order(_ORDERED[operator], func, args, kwargs)
        if operator in _CHOSEN:
            return self._signed(_CHOSEN[operator], func, args, kwargs)
        return func(*args, **kwargs)

    def _in_order(self, rule: Any, func: Any, args: Any, kwargs: Any) -> Any:
        theirs = func(*args, **kwargs)
        if not args[0].dim() or args[0].is_complex():
            return theirs
        mine, same = rule(theirs, *args, **kwargs)
        if not same:
            return theirs
        self.found |= not torch.equal(mine[1], theirs[1])
        return mine

    def _signed(self, rule: Any, func: Any, args: Any, kwargs: Any) -> Any:
        given = (args[0].clone(), *args[1:]) if func._schema.is_mutable else args
        result = func(*args, **kwargs)
        value = result if isinstance(result, Tensor) else result[0]
        if value.is_floating_point():
            is_open = (value == 0) & rule(func, *given, **kwargs)
            self.found |= bool(is_open.any())
            if self.generator is not None:
                drawn = torch.rand(value.shape, generator=self.generator) < self.positive
                signed = torch.where(drawn, 0.0, -0.0).to(value.dtype)
                value.copy_(torch.where(is_open, signed, value))
        return result


def _functional(func: Any) -> Any:
    """The operator of an overload; of one that works in place, the one that does not."""
    if not func._schema.is_mutable:
        return func.overloadpacket
    name = func.overloadpacket.__name__
    return getattr(aten, name[:-1], None) if name.endswith("_") else None


# -- the order of equal elements -------------------------------------------------------------------


def _topk(
    theirs: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
    mine = values.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()
    ordered = theirs[0] if sorted else torch.sort(theirs[0], dim=dim, descending=largest)[0]
    return mine, _same(mine[0], ordered)


def _sort(theirs: Any, x: Tensor, dim: int = -1, descending: bool = False, **options: Any) -> Any:
    mine = tuple(torch.sort(x, dim=dim, descending=descending, stable=True))
    return mine, _same(mine[0], theirs[0])


def _same(mine: Tensor, theirs: Tensor) -> bool:
    """Whether they are equal elements: an answer that torch may give as well."""
    return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())


_ORDERED: dict[Any, Callable[..., Any]] = {aten.topk: _topk, aten.sort: _sort}
"""Operator to its answer with the first of equal elements first, and whether it is one."""


# -- the sign of a zero ----------------------------------------------------------------------------


def _both(a: Any, b: Any) -> Tensor | bool:
    """Where one is 0.0 and the other -0.0; a bound that is None is no bound."""
    if a is None or b is None:
        return False
    a, b = (x if isinstance(x, Tensor) else torch.tensor(float(x)) for x in (a, b))
    return (a == 0) & (b == 0) & (a.signbit() != b.signbit())


def _of_two(func: Any, a: Tensor, b: Any = 0.0) -> Tensor | bool:
    return _both(a, b)


def _between(func: Any, x: Tensor, low: Any = None, high: Any = None) -> Tensor | bool:
    larger = x if low is None else torch.maximum(x, torch.as_tensor(low))
    return _both(x, low) | _both(larger, high)


def _among(number: float) -> Callable[..., Tensor]:
    """Where zeros of both signs are among what a reduction or a pooling takes an element of: those
    of one sign, made the `number` that it takes rather than a zero, show themselves."""

    def among(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shown = []
        for negative in (False, True):
            marked = torch.where((x == 0) & (x.signbit() == negative), number, x)
            result = func(marked, *args, **kwargs)
            shown.append((result if isinstance(result, Tensor) else result[0]) == number)
        return shown[0] & shown[1]

    return among


_CHOSEN: dict[Any, Callable[..., Any]] = {
    aten.maximum: _of_two,
    aten.minimum: _of_two,
    aten.fmax: _of_two,
    aten.fmin: _of_two,
    aten.clamp: _between,
    aten.clamp_min: _of_two,
    aten.clamp_max: _of_two,
    aten.hardtanh: _between,
    aten.relu: _of_two,
    aten.amax: _among(1.0),
    aten.max: _among(1.0),
    aten.cummax: _among(1.0),
    aten.max_pool2d_with_indices: _among(1.0),
    aten.max_pool3d_with_indices: _among(1.0),
    aten.adaptive_max_pool2d: _among(1.0),
    aten.adaptive_max_pool3d: _among(1.0),
    aten.amin: _among(-1.0),
    aten.min: _among(-1.0),
    aten.cummin: _among(-1.0),
}
"""Operator to where the elements that it takes one of are zeros of both signs, if one of them is
taken."""
