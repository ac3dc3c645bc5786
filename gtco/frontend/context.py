"""What lowerings are written with: values, the context that builds nodes, and the registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from gtco.ir.graph import GraphBuilder
from gtco.ir.spec import TensorSpec

Scalar = int | float | bool


@dataclass(frozen=True)
class Value:
    """A tensor in the graph that is being built."""

    name: str


@dataclass(frozen=True)
class Number:
    """A number read out of a tensor of one element, for an argument that takes no tensor."""

    value: Value


@dataclass
class Context:
    """What a lowering builds with.

    Args:
        builder: the graph so far.
        source: the user's module that the present node came from.
        device: where the present node's result lives.
        used_outputs: which results of the present node somebody reads.
        notes: what a lowering knows of values that it made, by name, for the lowerings of their
            readers.
    """

    builder: GraphBuilder
    source: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    used_outputs: frozenset[int] = frozenset({0})
    notes: dict[str, Any] = field(default_factory=dict)

    def spec(self, x: Value) -> TensorSpec:
        return self.builder.specs[x.name]

    def shape(self, x: Value) -> tuple[int, ...]:
        return self.spec(x).sizes

    def rank(self, x: Value) -> int:
        return self.spec(x).rank

    def dtype(self, x: Value) -> torch.dtype:
        return self.spec(x).dtype

    def add(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        """Append a node with one result; trailing inputs that are None are left out."""
        (value,) = self.add_all(op, *inputs, **attrs)
        return value

    def add_all(self, op: str, *inputs: Value | None, **attrs: Any) -> tuple[Value, ...]:
        """Append a node, likewise, and give all of its results."""
        names = [x.name for x in inputs if x is not None]
        return tuple(map(Value, self.builder.node(op, names, attrs, source=self.source)))

    def reshape(self, x: Value, shape: Iterable[int]) -> Value:
        new = resolve_shape(tuple(shape), math.prod(self.shape(x)))
        return x if new == self.shape(x) else self.add("reshape", x, shape=new)

    def permute(self, x: Value, dims: Iterable[int]) -> Value:
        order = tuple(dim % self.rank(x) for dim in dims)
        return x if order == tuple(range(len(order))) else self.add("permute", x, dims=order)

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        own = (1,) * (len(shape) - self.rank(x)) + self.shape(x)
        new = tuple(old if size == -1 else size for old, size in zip(own, shape, strict=True))
        return x if new == self.shape(x) else self.add("expand", x, shape=new)

    def slice(self, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
        dim %= self.rank(x)
        size = self.shape(x)[dim]
        if (start, end, step) == (0, size, 1):
            return x
        attrs = {} if step == 1 else {"step": step}
        return self.add("slice", x, dim=dim, start=start, end=end, **attrs)

    def cast(self, x: Value, dtype: torch.dtype | None) -> Value:
        return x if dtype in (None, self.dtype(x)) else self.add("cast", x, dtype=dtype)

    def constant(self, hint: str, tensor: torch.Tensor) -> Value:
        return Value(self.builder.constant(hint, tensor))


class Unsupported(Exception):
    """A call that neither a lowering nor the library can take: why, and what to do."""


Lowering = Callable[..., Value | Number | tuple[Value | None, ...] | None]


def registrar(
    table: dict[OpOverload, Lowering],
) -> Callable[..., Callable[[Lowering], Lowering]]:
    """A decorator that enters a lowering into `table` under the overloads it is given."""

    def lowers(*overloads: OpOverload) -> Callable[[Lowering], Lowering]:
        def register(function: Lowering) -> Lowering:
            table.update(dict.fromkeys(overloads, function))
            return function

        return register

    return lowers


def resolve_shape(shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
    if -1 not in shape:
        return shape
    known = -math.prod(shape)
    return tuple(numel // known if size == -1 else size for size in shape)


def all_dims(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """The dimensions that a reduction over `dims` reduces: all of them if it names none.

    torch takes 0 and -1 for a tensor of rank 0 too, which has no dimension to reduce.
    """
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim % rank for dim in dims) if dims and rank else tuple(range(rank))


def per_axis(values: Sequence[int] | int, axes: int) -> tuple[int, ...]:
    """One number for each dimension, where ATen lets one stand for all."""
    items = (values,) if isinstance(values, int) else tuple(values)
    return items * axes if len(items) == 1 else items


def pair(values: Sequence[int] | int) -> tuple[int, int]:
    """Height and width, where ATen lets one number stand for both."""
    items = per_axis(values, 2)
    return items[0], items[1]
