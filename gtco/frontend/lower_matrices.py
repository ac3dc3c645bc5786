"""Inverses, determinants and solutions of small systems, such as those of cameras and homographies,
to gtco's ops.

    inv(%x: f32[b, 3, 3])  ->  the adjugate, of products of elements, by the determinant

Its error grows with the condition of the matrix twice over, so one step of Newton's follows: then
it is as that of a factorisation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Context, Lowering, Unsupported, Value, registrar

aten = torch.ops.aten

MATRICES: dict[OpOverload, Lowering] = {}
_lowers = registrar(MATRICES)

MOST_ROWS = 4
"""The adjugate of more has too many products."""

Places = tuple[int, ...]
"""Rows or columns of a matrix."""


def _minors(ctx: Context, x: Value) -> Callable[[Places, Places], Value]:
    """What gives the determinant of some rows and as many columns of x [..., n, n], as [..., 1]:
    each is computed once.

    Raises:
        Unsupported: there are more than `MOST_ROWS` rows.
    """
    *lead, n, _ = ctx.shape(x)
    if n > MOST_ROWS:
        raise Unsupported(
            f"reads matrices of {n} rows, and {MOST_ROWS} are the most; the library waits for the "
            f"GPU to say whether they are singular: use torch.linalg.inv_ex"
        )
    flat = ctx.reshape(x, (*lead, n * n))

    @cache
    def minor(rows: Places, columns: Places) -> Value:
        elements = [ctx.slice(flat, -1, at, at + 1) for at in (rows[0] * n + c for c in columns)]
        if len(rows) == 1:
            return elements[0]
        total: Value | None = None
        for place, (element, column) in enumerate(zip(elements, columns, strict=True)):
            term = ctx.add("mul", element, minor(rows[1:], _without(columns, column)))
            sign = "sub" if place % 2 else "add"
            total = term if total is None else ctx.add(sign, total, term)
        assert total is not None
        return total

    return minor


def _without(places: Places, one: int) -> Places:
    return tuple(each for each in places if each != one)


@_lowers(aten.linalg_det.default, aten.det.default)
def _det(ctx: Context, x: Value) -> Value | None:
    whole = tuple(range(ctx.shape(x)[-1]))
    if len(whole) > MOST_ROWS:
        return None
    if not whole:
        return ctx.constant("one", torch.ones(ctx.shape(x)[:-2], dtype=ctx.dtype(x)))
    determinant = _minors(ctx, x)(whole, whole)
    return ctx.reshape(determinant, ctx.shape(x)[:-2])


@_lowers(aten.linalg_inv.default, aten.inverse.default)
def _inverse(ctx: Context, x: Value) -> Value:
    """Of row i and column j, the minor without row j and column i, by the determinant."""
    minor, whole = _minors(ctx, x), tuple(range(ctx.shape(x)[-1]))
    elements = []
    for i, j in itertools.product(whole, whole):
        if len(whole) == 1:
            one = ctx.constant("one", torch.ones(1, dtype=ctx.dtype(x), device=ctx.device))
            element = ctx.expand(one, (*ctx.shape(x)[:-2], 1))
        else:
            element = minor(_without(whole, j), _without(whole, i))
        elements.append(ctx.add("neg", element) if (i + j) % 2 else element)
    adjugate = ctx.add("concat", *elements, dim=ctx.rank(x) - 2)
    inverse = ctx.reshape(ctx.add("div", adjugate, minor(whole, whole)), ctx.shape(x))
    unit = ctx.constant("unit", torch.eye(len(whole), dtype=ctx.dtype(x), device=ctx.device))
    off = ctx.add("sub", unit, _product(ctx, x, inverse))
    return ctx.add("add", inverse, _product(ctx, inverse, off))


def _product(ctx: Context, a: Value, b: Value) -> Value:
    """[..., m, n] times [..., n, k] as sums of products, which no tensor core rounds."""
    each = ctx.reshape(a, (*ctx.shape(a), 1))
    other = ctx.reshape(b, (*ctx.shape(b)[:-2], 1, *ctx.shape(b)[-2:]))
    products = ctx.add("mul", each, other)
    return ctx.add("sum", products, dims=(ctx.rank(products) - 2,), keepdim=False)


@_lowers(aten.linalg_solve.default)
def _solve(ctx: Context, a: Value, b: Value, *, left: bool = True) -> Value:
    """The product with the inverse; b is [..., n] or [..., n, m]."""
    vector = ctx.rank(b) == 1 or (
        ctx.rank(b) + 1 == ctx.rank(a) and ctx.shape(b) == ctx.shape(a)[:-1]
    )
    columns = ctx.reshape(b, (*ctx.shape(b), 1)) if vector else b
    inverse = _inverse(ctx, a)
    assert isinstance(inverse, Value)
    found = _product(ctx, inverse, columns) if left else _product(ctx, columns, inverse)
    return ctx.reshape(found, ctx.shape(found)[:-1]) if vector else found
