"""Complex tensors as two real ones: what holds them and computes with their parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gtco.frontend.context import Context, Scalar, Value
from gtco.frontend.fourier import Transform
from gtco.ir.graph import Node

aten = torch.ops.aten

REAL: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.complex32: torch.float16,
        torch.complex64: torch.float32,
        torch.complex128: torch.float64,
    }
)
"""The type of either part of a complex number."""

Part = Value | Scalar | None
"""A real or an imaginary part; None is zero."""


@dataclass(frozen=True)
class Planes:
    """Both parts of a complex tensor in one.

    Args:
        value: of its shape with a dimension of two, the real part and the imaginary one.
        axis: where that is.
    """

    value: Value
    axis: int


@dataclass(frozen=True)
class Complex:
    """A complex tensor in the graph that is being built.

    Args:
        real: of its shape.
        imag: likewise, or None where all of it is zero.
        planes: where the two are views of one tensor, that tensor.
    """

    real: Value
    imag: Value | None
    planes: Planes | None = None


def is_complex(value: Any) -> bool:
    """Whether an argument or an example value holds complex numbers."""
    return any(
        isinstance(leaf, (Complex, complex)) or (isinstance(leaf, Tensor) and leaf.is_complex())
        for leaf in pytree.tree_leaves(value)
    )


def stored(ctx: Context, name: str, tensor: Tensor) -> Complex:
    """A constant."""
    parts = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    real, imag = (part.contiguous() for part in parts.unbind(-1))
    return Complex(ctx.constant(name, real), ctx.constant(name, imag) if imag.any() else None)


class Parts:
    """Computes with real and imaginary parts.

    Args:
        ctx: what it builds with.
        real: lowers a call on real values.
    """

    def __init__(self, ctx: Context, real: Callable[..., Any]) -> None:
        self.ctx = ctx
        self.real = real
        self._made: dict[tuple[Any, ...], Value] = {}

    def whole(self, real: Any, imag: Any) -> Any:
        """The imaginary part, also of what is real."""
        if imag is not None or not isinstance(real, Value):
            return real if imag is None else imag
        if not self.ctx.dtype(real).is_floating_point:
            return real
        return self.zeros(self.ctx.shape(real), self.ctx.dtype(real))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        zero = torch.zeros((1,) * len(shape), dtype=dtype, device=self.ctx.device)
        return self.ctx.expand(self.ctx.constant("zero", zero), shape)

    # -- arithmetic --------------------------------------------------------------------------

    def times(self, a: Part, b: Part) -> Part:
        """a b, of parts."""
        if a is None or b is None:
            return None
        if isinstance(a, Value) or isinstance(b, Value):
            first, second = (a, b) if isinstance(a, Value) else (b, a)
            product: Value = self.real(aten.mul.Tensor, first, second)
            return product
        return a * b

    def plus(self, a: Part, b: Part) -> Part:
        """a + b, of parts."""
        if a is None or b is None:
            return a if b is None else b
        if isinstance(a, Value) or isinstance(b, Value):
            first, second = (a, b) if isinstance(a, Value) else (b, a)
            total: Value = self.real(aten.add.Tensor, first, second)
            return total
        return a + b

    def minus(self, a: Part, b: Part) -> Part:
        """a - b, of parts."""
        if isinstance(a, Value) and isinstance(b, Value):
            difference: Value = self.real(aten.sub.Tensor, a, b)
            return difference
        return self.plus(a, self.negative(b) if isinstance(b, Value) else self.times(b, -1))

    def negative(self, x: Value) -> Value:
        negative: Value = self.real(aten.neg.default, x)
        return negative

    def product(
        self, a: tuple[Part, Part], b: tuple[Part, Part], times: Callable[..., Part] | None = None
    ) -> tuple[Part, Part]:
        """The parts of a b, where `times` multiplies two parts (both None: zero)."""
        times = times or self.times
        (x, y), (u, v) = a, b
        return self.minus(times(x, u), times(y, v)), self.plus(times(x, v), times(y, u))

    def made(self, parts: tuple[Part, Part]) -> Complex:
        """The tensor of two parts, one of which is a tensor."""
        real, imag = parts
        one = real if isinstance(real, Value) else imag
        assert isinstance(one, Value)
        zeros = partial(self.zeros, self.ctx.shape(one), self.ctx.dtype(one))

        def whole(part: Part) -> Value:
            if isinstance(part, Value):
                return part
            return zeros() if part is None else self.ctx.add("add", zeros(), other=part)

        return Complex(whole(real), None if imag is None else whole(imag))

    def of_planes(self, planes: Planes) -> Complex:
        """The tensor whose parts `planes` holds."""
        shape = self.ctx.shape(planes.value)
        shape = shape[: planes.axis] + shape[planes.axis + 1 :]
        real, imag = (self.ctx.reshape(part, shape) for part in self.halves(planes))
        return Complex(real, imag, planes)

    def halves(self, planes: Planes) -> tuple[Value, Value]:
        """The parts, each with a dimension of one."""
        real, imag = (self.ctx.slice(planes.value, planes.axis, at, at + 1) for at in (0, 1))
        return real, imag

    def permuted(self, z: Complex, order: tuple[int, ...]) -> Complex:
        """z with its dimensions in another order; its planes stay before the same one."""
        if z.planes is None:
            imag = None if z.imag is None else self.ctx.permute(z.imag, order)
            return Complex(self.ctx.permute(z.real, order), imag)
        axis = z.planes.axis
        dims = [dim + (dim >= axis) for dim in order]
        place = order.index(axis) if axis in order else len(order)
        dims.insert(place, axis)
        return self.of_planes(Planes(self.ctx.permute(z.planes.value, dims), place))

    def _makers(self) -> dict[str, Node]:
        return {name: node for node in self.ctx.builder.nodes for name in node.values}

    def joined(self, real: Value, imag: Value) -> Planes | None:
        """The tensor whose two places along a dimension are these parts, perhaps converted."""
        makers = self._makers()
        one, other = (_chosen(makers, part) for part in (real, imag))
        if one is None or other is None:
            return None
        (first, converted), (second, too) = one, other
        base, dim = Value(first.inputs[0]), first.attrs["dim"]
        if first.inputs != second.inputs or dim != second.attrs["dim"] or converted != too:
            return None
        shape = self.ctx.shape(base)
        places = [(node.attrs["start"], node.attrs["end"]) for node in (first, second)]
        dropped = (*shape[:dim], *shape[dim + 1 :]) == self.ctx.shape(real)
        if shape[dim] != 2 or places != [(0, 1), (1, 2)] or not dropped:
            return None
        return Planes(self.ctx.cast(base, self.ctx.dtype(real)), dim)

    def known(self, x: Any) -> bool:
        """Whether an operand is computed of constants alone."""
        makers = self._makers()
        pending = [part.name for part in parts_of(x) if isinstance(part, Value)]
        while pending:
            name = pending.pop()
            if name in makers:
                pending += makers[name].inputs
            elif name not in self.ctx.builder.constants:
                return False
        return True

    def transformed(self, z: Complex, first: int, transform: Transform, after: bool) -> Complex:
        """What `transform` makes of the axes of z from `first` on: one product, which reads both
        parts at once.

        Args:
            after: whether the planes of the result lie behind these axes, and not before them.
        """
        ctx, shape = self.ctx, self.ctx.shape(z.real)
        rank, points = len(transform.sizes), math.prod(transform.sizes)
        lead, tail = shape[:first], shape[first + rank :]
        count, behind = math.prod(lead), math.prod(tail)
        read_after, x = False, z.real
        if z.imag is not None:
            planes = self._beside(z, first, rank)
            read_after, x, points = planes.axis > first, planes.value, 2 * points
        key = transform, z.imag is not None, read_after, after, ctx.dtype(x), ctx.device
        if key not in self._made:
            matrix = transform.matrix(
                imaginary=z.imag is not None, read_after=read_after, made_after=after
            )
            self._made[key] = ctx.constant("fourier", matrix.to(ctx.device, ctx.dtype(x)))
        w = self._made[key]
        # [lead, points, tail]: what is transformed is not moved to the end.
        if behind == 1:
            y = self.real(aten.linear.default, ctx.reshape(x, (count, points)), w)
        else:
            flat = (count, points, behind) if count > 1 else (points, behind)
            y = self.real(aten.matmul.default, w, ctx.reshape(x, flat))
        if not transform.gives_complex:
            return Complex(ctx.reshape(y, (*lead, *transform.out, *tail)), None)
        two = (*transform.out, 2) if after else (2, *transform.out)
        value = ctx.reshape(y, (*lead, *two, *tail))
        return self.of_planes(Planes(value, first + len(transform.out) if after else first))

    def _beside(self, z: Complex, first: int, rank: int) -> Planes:
        """The planes of z, next to the axes from `first` on."""
        if z.planes is None:
            parts = (z.real, self.whole(z.real, z.imag))
            shape = self.ctx.shape(z.real)
            each = [self.ctx.reshape(part, (*shape[:first], 1, *shape[first:])) for part in parts]
            return Planes(self.ctx.add("concat", *each, dim=first), first)
        axis = z.planes.axis
        if axis in (first, first + rank):
            return z.planes
        order = [dim for dim in range(self.ctx.rank(z.planes.value)) if dim != axis]
        order.insert(first, axis)
        return Planes(self.ctx.permute(z.planes.value, order), first)


def _chosen(makers: Mapping[str, Node], part: Value) -> tuple[Node, bool] | None:
    """The slice that `part` is, without its dimension, and whether it was converted since."""
    node = makers.get(part.name)
    converted = node is not None and node.op == "cast"
    for op in ("cast", "reshape")[not converted :]:
        if node is None or node.op != op:
            return None
        node = makers.get(node.inputs[0])
    return (node, converted) if node is not None and node.op == "slice" else None


def parts_of(x: Complex | Value | complex | Scalar) -> tuple[Part, Part]:
    """The real and the imaginary part of an operand."""
    if isinstance(x, Complex):
        return x.real, x.imag
    if isinstance(x, complex):
        return x.real, x.imag or None
    return x, None
