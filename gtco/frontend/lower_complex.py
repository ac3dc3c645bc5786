"""Complex numbers as two real tensors: kernels know real ones alone.

    %z = view_as_complex(%x)       ->  %a = %x[..., 0]   %b = %x[..., 1]
    %y = mul(%z, %w)               ->  %a c - %b d       %a d + %b c
    %f = _fft_r2c(%x, dim=[1, 2])  ->  a product with the transform's own matrix (fourier.py)

What only moves elements is done to each part. An imaginary part that is known to be zero is no
tensor, and nothing is computed of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from gtco.frontend.context import Context, Scalar, Unsupported, Value
from gtco.frontend.fourier import TooLong, Transform, transforms

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
class Complex:
    """A complex tensor in the graph that is being built.

    Args:
        real: of its shape.
        imag: likewise, or None where all of it is zero.
    """

    real: Value
    imag: Value | None


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


class ComplexLowerer:
    """Lowers calls that read or make complex numbers.

    Args:
        ctx: what it builds with.
        real: lowers a call on real values.
    """

    def __init__(self, ctx: Context, real: Callable[..., Any]) -> None:
        self.ctx = ctx
        self.real = real
        self._made: dict[tuple[Transform, torch.dtype, torch.device], tuple[Value | None, ...]] = {}

    def call(self, target: OpOverload, args: list[Any], kwargs: dict[str, Any], made: Any) -> Any:
        """The `Complex`, the `Value` or the tuple of them that a call gives.

        Args:
            made: an example of what it gives.

        Raises:
            Unsupported: nothing here knows the operator.
        """
        given = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(each, (Complex, Value)) for each in given):
            return stored(self.ctx, target._schema.name.split("::")[-1], target(*args, **kwargs))
        if target in _RULES:
            found = _RULES[target](self, *args, **kwargs)
        elif target in _PARTWISE:
            found = self._partwise(target, args, kwargs)
        else:
            raise Unsupported("of complex numbers is not supported; use real arithmetic there")
        return self._as(found, made)

    # -- parts -------------------------------------------------------------------------------

    def _partwise(self, target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The same call on the real parts and on the imaginary ones, if any has one."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        pairs = [self._pair(each) for each in leaves]

        def of(parts: list[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(parts, spec)
            return self.real(target, *args, **kwargs)

        real, zero = of([pair[0] for pair in pairs]), all(pair[1] is None for pair in pairs)
        imag = None if zero else of([self._whole(*pair) for pair in pairs])
        if isinstance(real, Value):
            return Complex(real, imag)
        return tuple(map(Complex, real, [None] * len(real) if imag is None else imag))

    def _pair(self, leaf: Any) -> tuple[Any, Any]:
        """An argument for the call on real parts, and that for the other; what is no number of
        the tensor, such as an index or a size, is the same in both."""
        if isinstance(leaf, Complex):
            return leaf.real, leaf.imag
        return leaf, None

    def _whole(self, real: Any, imag: Any) -> Any:
        """The imaginary part, also of what is real."""
        if imag is not None or not isinstance(real, Value):
            return real if imag is None else imag
        if not self.ctx.dtype(real).is_floating_point:
            return real
        return self._zeros(self.ctx.shape(real), self.ctx.dtype(real))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        zero = torch.zeros((1,) * len(shape), dtype=dtype, device=self.ctx.device)
        return self.ctx.expand(self.ctx.constant("zero", zero), shape)

    def _as(self, found: Any, made: Any) -> Any:
        """What was found, in the shape and the type of the example."""
        if isinstance(found, tuple):
            return tuple(map(self._as, found, made))
        shape = tuple(made.shape)
        if not made.is_complex():
            assert isinstance(found, Value)
            return self._fitted(found, shape, made.dtype)
        assert isinstance(found, Complex)
        dtype = REAL[made.dtype]
        imag = None if found.imag is None else self._fitted(found.imag, shape, dtype)
        return Complex(self._fitted(found.real, shape, dtype), imag)

    def _fitted(self, x: Value, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        return self.ctx.cast(self.ctx.expand(x, shape), dtype)

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
        return self.plus(a, self.times(b, -1) if not isinstance(b, Value) else self._negative(b))

    def _negative(self, x: Value) -> Value:
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
        zeros = partial(self._zeros, self.ctx.shape(one), self.ctx.dtype(one))

        def whole(part: Part) -> Value:
            if isinstance(part, Value):
                return part
            return zeros() if part is None else self.ctx.add("add", zeros(), other=part)

        return Complex(whole(real), None if imag is None else whole(imag))

    def transformed(
        self, x: Complex, first: int, transform: Transform
    ) -> tuple[Value, Value | None]:
        """What `transform` makes of the axes of x from `first` on, in two parts, or one where it
        makes real numbers."""
        ctx, shape = self.ctx, self.ctx.shape(x.real)
        rank = len(transform.sizes)
        lead, points, tail = shape[:first], math.prod(transform.sizes), shape[first + rank :]
        count, behind = math.prod(lead), math.prod(tail)
        pieces = []
        for part, w in zip((x.real, x.imag), self._matrices(x, transform), strict=True):
            if part is None or w is None:
                continue
            # [lead, points, tail]: what is transformed is not moved to the end.
            if behind == 1:
                y = self.real(aten.linear.default, ctx.reshape(part, (count, points)), w)
            else:
                flat = (count, points, behind) if count > 1 else (points, behind)
                y = self.real(aten.matmul.default, w, ctx.reshape(part, flat))
            pieces.append(ctx.reshape(y, (count, ctx.shape(w)[0], behind)))
        total = pieces[0] if len(pieces) == 1 else ctx.add("add", *pieces)
        whole = (*lead, *transform.out, *tail)
        if not transform.gives_complex:
            return ctx.reshape(total, whole), None
        half = ctx.shape(total)[1] // 2
        real, imag = (ctx.slice(total, 1, at, at + half) for at in (0, half))
        return ctx.reshape(real, whole), ctx.reshape(imag, whole)

    def _matrices(self, x: Complex, transform: Transform) -> tuple[Value | None, ...]:
        """The constants of a transform, which all calls of it share."""
        key = transform, self.ctx.dtype(x.real), self.ctx.device
        if key not in self._made:
            self._made[key] = tuple(
                None
                if matrix is None
                else self.ctx.constant("fourier", matrix.to(key[1]).to(self.ctx.device))
                for matrix in transform.matrices()
            )
        return self._made[key]


def _parts(x: Complex | Value | complex | Scalar) -> tuple[Part, Part]:
    """The real and the imaginary part of an operand."""
    if isinstance(x, Complex):
        return x.real, x.imag
    if isinstance(x, complex):
        return x.real, x.imag or None
    return x, None


# -- operators -----------------------------------------------------------------------------------

Rule = Callable[..., Any]

_PARTWISE = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("alias", "default"), ("detach", "default"), ("lift_fresh_copy", "default"),
        ("clone", "default"), ("contiguous", "default"), ("view", "default"),
        ("reshape", "default"), ("_unsafe_view", "default"), ("unsqueeze", "default"),
        ("squeeze", "default"), ("squeeze", "dim"), ("squeeze", "dims"),
        ("flatten", "using_ints"), ("unflatten", "int"), ("permute", "default"),
        ("transpose", "int"), ("t", "default"), ("expand", "default"), ("copy", "default"),
        ("slice_scatter", "default"), ("slice", "Tensor"), ("select", "int"), ("unbind", "int"),
        ("split", "Tensor"), ("split_with_sizes", "default"), ("chunk", "default"),
        ("repeat", "default"), ("cat", "default"), ("stack", "default"), ("roll", "default"),
        ("flip", "default"), ("index_select", "default"), ("gather", "default"),
        ("index", "Tensor"), ("where", "self"), ("neg", "default"), ("sum", "dim_IntList"),
        ("mean", "dim"), ("select_scatter", "default"), ("constant_pad_nd", "default"),
    )
)  # fmt: skip
"""What is done to either part by itself."""

_RULES: dict[OpOverload, Rule] = {}


def _rule(*overloads: OpOverload) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(overloads, rule))
        return rule

    return register


@_rule(aten.view_as_complex.default)
def _view_as_complex(low: ComplexLowerer, x: Value) -> Complex:
    real, imag = (low.real(aten.select.int, x, -1, at) for at in (0, 1))
    return Complex(real, imag)


@_rule(aten.view_as_real.default)
def _view_as_real(low: ComplexLowerer, z: Complex) -> Value:
    imag = low._whole(z.real, z.imag)
    stacked: Value = low.real(aten.stack.default, [z.real, imag], -1)
    return stacked


@_rule(aten.complex.default)
def _complex(low: ComplexLowerer, real: Value, imag: Value) -> Complex:
    return Complex(real, imag)


@_rule(aten.polar.default)
def _polar(low: ComplexLowerer, radius: Value, angle: Value) -> Complex:
    cosine, sine = (low.real(op, angle) for op in (aten.cos.default, aten.sin.default))
    return low.made((low.times(radius, cosine), low.times(radius, sine)))


@_rule(aten.abs.default)
def _abs(low: ComplexLowerer, z: Complex) -> Value:
    if z.imag is None:
        size: Value = low.real(aten.abs.default, z.real)
        return size
    root: Value = low.real(aten.sqrt.default, _square_of_size(low, z))
    return root


def _square_of_size(low: ComplexLowerer, z: Complex) -> Part:
    return low.plus(low.times(z.real, z.real), low.times(z.imag, z.imag))


@_rule(aten.angle.default)
def _angle(low: ComplexLowerer, z: Complex) -> Value:
    angle: Value = low.real(aten.atan2.default, low._whole(z.real, z.imag), z.real)
    return angle


@_rule(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def _conjugate(low: ComplexLowerer, z: Complex) -> Complex:
    return Complex(z.real, None if z.imag is None else low._negative(z.imag))


@_rule(aten._to_copy.default)
def _to_copy(
    low: ComplexLowerer, z: Complex | Value, *, dtype: torch.dtype | None = None, **_: Any
) -> Complex | Value:
    if dtype is None or dtype in REAL:
        return z if isinstance(z, Complex) else Complex(z, None)
    assert isinstance(z, Complex)
    return z.real  # as torch, which says that the other part is discarded


@_rule(aten.full_like.default)
def _full_like(low: ComplexLowerer, z: Complex, value: complex | Scalar, **_: Any) -> Complex:
    shape, dtype = low.ctx.shape(z.real), low.ctx.dtype(z.real)
    parts = (value.real, value.imag)
    made = [low.ctx.constant("full", torch.full(shape, part, dtype=dtype)) for part in parts]
    return Complex(made[0], made[1] if parts[1] else None)


@_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(low: ComplexLowerer, a: Any, b: Any) -> Complex:
    return low.made(low.product(_parts(a), _parts(b)))


@_rule(aten.square.default)
def _square(low: ComplexLowerer, z: Complex) -> Complex:
    return _mul(low, z, z)  # type: ignore[no-any-return]


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(low: ComplexLowerer, a: Any, b: Any) -> Complex:
    if not isinstance(b, (Complex, complex)):
        return low.made(_divided(low, _parts(a), b))
    if isinstance(b, complex):
        return _mul(low, a, 1 / b)  # type: ignore[no-any-return]
    size = _square_of_size(low, b)
    product = low.product(_parts(a), _parts(_conjugate(low, b)))
    return low.made(_divided(low, product, size))


def _divided(low: ComplexLowerer, parts: tuple[Part, Part], by: Part) -> tuple[Part, Part]:
    real, imag = (None if part is None else low.real(aten.div.Tensor, part, by) for part in parts)
    return real, imag


@_rule(aten.reciprocal.default)
def _reciprocal(low: ComplexLowerer, z: Complex) -> Complex:
    one = low.ctx.add("add", low._zeros((1,), low.ctx.dtype(z.real)), other=1)
    return _div(low, one, z)  # type: ignore[no-any-return]


@_rule(aten.add.Tensor, aten.add.Scalar)
def _add(low: ComplexLowerer, a: Any, b: Any, alpha: complex | Scalar = 1) -> Complex:
    (x, y), (u, v) = _parts(a), _scaled(low, b, alpha)
    return low.made((low.plus(x, u), low.plus(y, v)))


@_rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(low: ComplexLowerer, a: Any, b: Any, alpha: complex | Scalar = 1) -> Complex:
    (x, y), (u, v) = _parts(a), _scaled(low, b, alpha)
    return low.made((low.minus(x, u), low.minus(y, v)))


@_rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(low: ComplexLowerer, a: Any, b: Any, alpha: complex | Scalar = 1) -> Complex:
    return _sub(low, b, a, alpha)  # type: ignore[no-any-return]


def _scaled(low: ComplexLowerer, b: Any, alpha: complex | Scalar) -> tuple[Part, Part]:
    return _parts(b) if alpha == 1 else low.product(_parts(b), _parts(alpha))


@_rule(aten.exp.default)
def _exp(low: ComplexLowerer, z: Complex) -> Complex:
    radius = low.real(aten.exp.default, z.real)
    return Complex(radius, None) if z.imag is None else _polar(low, radius, z.imag)


def _product_of(op: OpOverload) -> Rule:
    """A product of matrices: four real ones, or two beside a real operand."""

    def rule(low: ComplexLowerer, a: Any, b: Any, bias: Any = None) -> Complex:
        def times(x: Part, y: Part) -> Part:
            return None if x is None or y is None else low.real(op, x, y)

        found = low.made(low.product(_parts(a), _parts(b), times))
        return found if bias is None else _add(low, found, bias)

    return rule


for _op in (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.linear.default):
    _rule(_op)(_product_of(_op))


def _fourier(op: OpOverload) -> Rule:
    def rule(low: ComplexLowerer, z: Any, dims: list[int], *how: Any) -> Any:
        z = z if isinstance(z, Complex) else Complex(z, None)
        try:
            products = [*transforms(op, low.ctx.shape(z.real), dims, *how)]
        except TooLong as error:
            raise Unsupported(str(error)) from error
        for first, transform in products:
            z = Complex(*low.transformed(z, first, transform))
        return z if op is not aten._fft_c2r.default else z.real

    return rule


for _op in (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default):
    _rule(_op)(_fourier(_op))
