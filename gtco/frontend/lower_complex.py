"""ATen's operators of complex numbers: kernels know real ones alone.

    %z = view_as_complex(%x)       ->  %a = %x[..., 0]   %b = %x[..., 1]
    %y = mul(%z, %w)               ->  %a c - %b d       %a d + %b c
    %f = _fft_r2c(%x, dim=[1, 2])  ->  a product with the transform's own matrix (fourier.py)

What only moves elements is done to each part. An imaginary part that is known to be zero is no
tensor, and nothing is computed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from gtco.frontend.complex_parts import REAL, Complex, Part, Parts, Planes, parts_of, stored
from gtco.frontend.context import Scalar, Unsupported, Value
from gtco.frontend.fourier import TooLong, transforms

aten = torch.ops.aten


class ComplexLowerer(Parts):
    """Lowers calls that read or make complex numbers."""

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

    def _partwise(self, target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The same call on the real parts and on the imaginary ones, if any has one."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        pairs = [self._pair(each) for each in leaves]

        def of(parts: list[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(parts, spec)
            return self.real(target, *args, **kwargs)

        real, zero = of([pair[0] for pair in pairs]), all(pair[1] is None for pair in pairs)
        imag = None if zero else of([self.whole(*pair) for pair in pairs])
        if isinstance(real, Value):
            return Complex(real, imag)
        return tuple(map(Complex, real, [None] * len(real) if imag is None else imag))

    def _pair(self, leaf: Any) -> tuple[Any, Any]:
        """An argument for the call on real parts, and that for the other; what is no number of
        the tensor, such as an index or a size, is the same in both."""
        if isinstance(leaf, Complex):
            return leaf.real, leaf.imag
        if isinstance(leaf, torch.dtype):
            return REAL.get(leaf, leaf), None
        return leaf, None

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
        if found.planes and self.ctx.dtype(found.real) == dtype:
            return found
        imag = None if found.imag is None else self._fitted(found.imag, shape, dtype)
        return Complex(self._fitted(found.real, shape, dtype), imag)

    def _fitted(self, x: Value, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        return self.ctx.cast(self.ctx.expand(x, shape), dtype)


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
        ("mean", "dim"), ("select_scatter", "default"),
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
def _view_as_complex(low: Parts, x: Value) -> Complex:
    real, imag = (low.real(aten.select.int, x, -1, at) for at in (0, 1))
    return Complex(real, imag)


@_rule(aten.view_as_real.default)
def _view_as_real(low: Parts, z: Complex) -> Value:
    if z.planes:
        dims = [dim for dim in range(low.ctx.rank(z.planes.value)) if dim != z.planes.axis]
        return low.ctx.permute(z.planes.value, [*dims, z.planes.axis])
    imag = low.whole(z.real, z.imag)
    stacked: Value = low.real(aten.stack.default, [z.real, imag], -1)
    return stacked


@_rule(aten.complex.default)
def _complex(low: Parts, real: Value, imag: Value) -> Complex:
    planes = low.joined(real, imag)
    return Complex(real, imag) if planes is None else low.of_planes(planes)


@_rule(aten.polar.default)
def _polar(low: Parts, radius: Value, angle: Value) -> Complex:
    cosine, sine = (low.real(op, angle) for op in (aten.cos.default, aten.sin.default))
    return low.made((low.times(radius, cosine), low.times(radius, sine)))


@_rule(aten.abs.default)
def _abs(low: Parts, z: Complex) -> Value:
    if z.imag is None:
        size: Value = low.real(aten.abs.default, z.real)
        return size
    root: Value = low.real(aten.sqrt.default, _square_of_size(low, z))
    return root


def _square_of_size(low: Parts, z: Complex) -> Part:
    return low.plus(low.times(z.real, z.real), low.times(z.imag, z.imag))


@_rule(aten.angle.default)
def _angle(low: Parts, z: Complex) -> Value:
    angle: Value = low.real(aten.atan2.default, low.whole(z.real, z.imag), z.real)
    return angle


@_rule(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def _conjugate(low: Parts, z: Complex) -> Complex:
    return Complex(z.real, None if z.imag is None else low.negative(z.imag))


@_rule(aten._to_copy.default)
def _to_copy(
    low: Parts, z: Complex | Value, *, dtype: torch.dtype | None = None, **_: Any
) -> Complex | Value:
    if dtype is None or dtype in REAL:
        return z if isinstance(z, Complex) else Complex(z, None)
    assert isinstance(z, Complex)
    return z.real  # as torch, which says that the other part is discarded


@_rule(aten.constant_pad_nd.default)
def _pad(low: Parts, z: Complex, pad: list[int], value: complex | Scalar = 0) -> Complex:
    real = low.real(aten.constant_pad_nd.default, z.real, pad, value.real)
    if z.imag is None and not value.imag:
        return Complex(real, None)
    imag = low.whole(z.real, z.imag)
    return Complex(real, low.real(aten.constant_pad_nd.default, imag, pad, value.imag))


@_rule(aten.full_like.default)
def _full_like(low: Parts, z: Complex, value: complex | Scalar, **_: Any) -> Complex:
    shape, dtype = low.ctx.shape(z.real), low.ctx.dtype(z.real)
    parts = (value.real, value.imag)
    made = [low.ctx.constant("full", torch.full(shape, part, dtype=dtype)) for part in parts]
    return Complex(made[0], made[1] if parts[1] else None)


@_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(low: Parts, a: Any, b: Any) -> Complex:
    for z, w in ((a, b), (b, a)):
        if isinstance(z, Complex) and z.planes and (found := _filtered(low, z.planes, w)):
            return found
    return low.made(low.product(parts_of(a), parts_of(b)))


def _filtered(low: Parts, planes: Planes, w: Any) -> Complex | None:
    """The product with what is known, such as a filter: both parts in one kernel, from which the
    next transform reads them at once.

    z w = re(z) [re(w), im(w)] + im(z) [-im(w), re(w)]
    """
    ctx, axis = low.ctx, planes.axis
    if not isinstance(w, Complex) or w.imag is None or not low.known(w):
        return None
    shape = ctx.shape(planes.value)
    own = (1,) * (len(shape) - 1 - ctx.rank(w.real)) + ctx.shape(w.real)
    if len(own) >= len(shape):
        return None
    own = (*own[:axis], 1, *own[axis:])
    if any(size not in (1, whole) for size, whole in zip(own, shape, strict=True)):
        return None
    u, v = (ctx.reshape(part, own) for part in (w.real, w.imag))
    of_real = ctx.add("concat", u, v, dim=axis)
    of_imag = ctx.add("concat", low.negative(v), u, dim=axis)
    real, imag = low.halves(planes)
    terms = ctx.add("mul", real, of_real), ctx.add("mul", imag, of_imag)
    return low.of_planes(Planes(ctx.add("add", *terms), axis))


@_rule(aten.square.default)
def _square(low: Parts, z: Complex) -> Complex:
    return _mul(low, z, z)  # type: ignore[no-any-return]


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(low: Parts, a: Any, b: Any) -> Complex:
    if not isinstance(b, (Complex, complex)):
        return low.made(_divided(low, parts_of(a), b))
    if isinstance(b, complex):
        return _mul(low, a, 1 / b)  # type: ignore[no-any-return]
    size = _square_of_size(low, b)
    product = low.product(parts_of(a), parts_of(_conjugate(low, b)))
    return low.made(_divided(low, product, size))


def _divided(low: Parts, parts: tuple[Part, Part], by: Part) -> tuple[Part, Part]:
    real, imag = (None if part is None else low.real(aten.div.Tensor, part, by) for part in parts)
    return real, imag


@_rule(aten.reciprocal.default)
def _reciprocal(low: Parts, z: Complex) -> Complex:
    one = low.ctx.add("add", low.zeros((1,), low.ctx.dtype(z.real)), other=1)
    return _div(low, one, z)  # type: ignore[no-any-return]


@_rule(aten.add.Tensor, aten.add.Scalar)
def _add(low: Parts, a: Any, b: Any, alpha: complex | Scalar = 1) -> Complex:
    (x, y), (u, v) = parts_of(a), _scaled(low, b, alpha)
    return low.made((low.plus(x, u), low.plus(y, v)))


@_rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(low: Parts, a: Any, b: Any, alpha: complex | Scalar = 1) -> Complex:
    (x, y), (u, v) = parts_of(a), _scaled(low, b, alpha)
    return low.made((low.minus(x, u), low.minus(y, v)))


@_rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(low: Parts, a: Any, b: Any, alpha: complex | Scalar = 1) -> Complex:
    return _sub(low, b, a, alpha)  # type: ignore[no-any-return]


def _scaled(low: Parts, b: Any, alpha: complex | Scalar) -> tuple[Part, Part]:
    return parts_of(b) if alpha == 1 else low.product(parts_of(b), parts_of(alpha))


@_rule(aten.exp.default)
def _exp(low: Parts, z: Complex) -> Complex:
    radius = low.real(aten.exp.default, z.real)
    return Complex(radius, None) if z.imag is None else _polar(low, radius, z.imag)


def _product_of(op: OpOverload) -> Rule:
    """A product of matrices: four real ones, or two beside a real operand."""

    def rule(low: Parts, a: Any, b: Any, bias: Any = None) -> Complex:
        def times(x: Part, y: Part) -> Part:
            return None if x is None or y is None else low.real(op, x, y)

        found = low.made(low.product(parts_of(a), parts_of(b), times))
        return found if bias is None else _add(low, found, bias)

    return rule


for _op in (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.linear.default):
    _rule(_op)(_product_of(_op))


def _fourier(op: OpOverload) -> Rule:
    def rule(low: Parts, z: Any, dims: list[int], *how: Any) -> Any:
        z = z if isinstance(z, Complex) else Complex(z, None)
        # Images lie with their channels last, and stay so.
        image = low.ctx.rank(z.real) == 4 and sorted(dim % 4 for dim in dims) == [2, 3]
        if image:
            z, dims = low.permuted(z, (0, 2, 3, 1)), [dim % 4 - 1 for dim in dims]
        try:
            products = [*transforms(op, low.ctx.shape(z.real), dims, *how)]
        except TooLong as error:
            raise Unsupported(str(error)) from error
        for (first, transform), (following, _) in zip(
            products, [*products[1:], (0, None)], strict=True
        ):
            z = low.transformed(z, first, transform, after=following > first)
        if image:
            z = low.permuted(z, (0, 3, 1, 2))
        return z if op is not aten._fft_c2r.default else z.real

    return rule


for _op in (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default):
    _rule(_op)(_fourier(_op))
