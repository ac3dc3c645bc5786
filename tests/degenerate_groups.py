"""Groups of every family whose extents are 1, 2, 3, 5 and 7, alone and together.

What a family asks for stays: 8 elements of K where a sketch reads 16 bytes (16 of fp8), heads of 8,
16 columns for each head that a projection merges. Everything else shrinks.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from gtco.codegen.rules import derive
from gtco.codegen.sketch import Sketch
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.legality import family
from gtco.target import TARGETS, Target
from tests import (
    attention_groups,
    back_to_back_groups,
    groups,
    projection_groups,
    squeeze_groups,
    stencil_groups,
    tile_groups,
)

EXTENTS = (1, 2, 3, 5, 7)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = dict(zip(EXTENTS, (F16, BF16, F16, BF16, F16), strict=True))
Make = Callable[[], Group]


def scored_linear(rows: int, k: int, columns: int, dtype: torch.dtype) -> Group:
    """With a value of each row and one of each column, whichever of them has one element; stored
    twice, once as [columns, rows]."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((rows, k), dtype))
    w = b.constant("w", torch.linspace(-1, 1, columns * k).reshape(columns, k).to(dtype))
    of_row = b.input("of_row", TensorSpec((rows, 1), torch.float32))
    of_column = b.input("of_column", TensorSpec((columns,), dtype))
    y = b.add("mul", b.add("linear", x, w), b.add("exp", of_row))
    y = b.add("add", y, of_column)
    return Group("scored_linear", b.build([y, b.add("permute", y, dims=(1, 0))]))


LINEARS: dict[str, Callable[[int, int, int, torch.dtype], Group]] = {
    "plain": groups.plain_linear,
    "norm": partial(groups.norm_linear, gelu=True),
    "residual": partial(groups.residual_linear, stats=False),
    "stats": groups.residual_linear,
    "scored": scored_linear,
}


def _linears() -> Iterator[tuple[str, Make]]:
    for (kind, make), n in itertools.product(LINEARS.items(), EXTENTS):
        sizes = {
            "rows": (n, 72, 72), "K": (19, n, 40), "columns": (72, 72, n),
            "rows and columns": (n, 72, n), "all but K": (n, 8, n), "all": (n, n, n),
        }  # fmt: skip
        for which, (rows, k, columns) in sizes.items():
            yield f"{kind} linear, {which} {n}", partial(make, rows, k, columns, DTYPES[n])


def _products() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {
            "items": (n, 19, 24, 40), "rows": (2, n, 24, 40), "K": (2, 19, n, 40),
            "columns": (2, 19, 24, n), "all": (n, n, n, n), "all but K": (n, n, 8, n),
        }  # fmt: skip
        for which, size in sizes.items():
            make = partial(groups.batched_matmul, *size, DTYPES[n])
            yield f"product, {which} {n}", make
            yield f"product of rows, {which} {n}", partial(make, transposed=True)


def _convolutions() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        images = {
            "images": (n, 5, 6, 16), "height": (2, n, 6, 16), "width": (2, 6, n, 16),
            "channels": (2, 6, 5, n), "all": (n, n, n, n),
        }  # fmt: skip
        for which, image in images.items():
            make = partial(groups.convolution, image, 24 if which != "all" else n, (3, 3))
            yield f"convolution, {which} {n}", partial(make, DTYPES[n])
        few = partial(groups.convolution, (1, 7, 7, 8), dtype=DTYPES[n])
        yield f"convolution, columns {n}", partial(few, n, (3, 3))
        yield f"convolution, kernel {n}", partial(few, 8, (n, n), before=(n // 2, n // 2))
        yield f"convolution, stride {n}", partial(few, 8, (3, 3), stride=(n, n))


def _attentions() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {
            "heads": ((n,), 19, 33, 24), "queries": ((2,), n, 33, 24), "keys": ((2,), 19, n, 24),
            "width": ((2,), 19, 33, n), "all": ((n,), n, n, 8),
        }  # fmt: skip
        for which, (lead, queries, keys, width) in sizes.items():
            make = partial(attention_groups.cross, lead, queries, keys, width, 0, DTYPES[n])
            yield f"attention, {which} {n}", make
            yield f"causal attention, {which} {n}", partial(make, causal=True)
            yield f"masked attention, {which} {n}", partial(make, mask=torch.float32)
        packed = partial(attention_groups.packed, n, n, 8, DTYPES[n], batch=n, epilogue=True)
        yield f"packed attention, all {n}", packed


def _projections() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {
            "heads": (n, 19, 33), "queries": (2, n, 33), "keys": (2, 19, n), "all": (n, n, n),
        }  # fmt: skip
        for which, (heads, queries, keys) in sizes.items():
            make = partial(
                projection_groups.projected, heads, queries, 16, 16 * heads, DTYPES[n],
                batch=n if which == "all" else 1, keys=keys, residual=True,
            )  # fmt: skip
            yield f"projection, {which} {n}", make


def _pointwise() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        dtype = DTYPES[n]
        for which, shape in {"rows": (n, 40), "columns": (9, n), "all": (n, n, n)}.items():
            yield f"gelu, {which} {n}", partial(tile_groups.gelu_bias, *shape, dtype=dtype)
        yield f"concat, {n}", partial(tile_groups.concat_columns, n, n, 8, n, dtype=dtype)
        yield f"pad, {n}", partial(tile_groups.padded, n, n, before=n, after=1, dtype=dtype)
        patches = partial(tile_groups.padded_patches, n, n, (0, 1, 0), (0, 0, n), dtype)
        yield f"patches, {n}", patches
        yield f"class token, {n}", partial(tile_groups.class_token, n + 1, n, dtype)
        make = partial(tile_groups.normalize_groups, n, n, n * n, groups=n, chunks=1, dtype=dtype)
        yield f"normalized groups, {n}", make
        yield f"rolled, {n}", partial(tile_groups.rolled, n, n, shifts=(n // 2, 1), dtype=dtype)
        yield f"gathered, {n}", partial(tile_groups.gather, (n, n + 1), (n, n), 1, dtype)
        yield f"embedding, {n}", partial(tile_groups.embedding, n, n, n, dtype=dtype)


def _rows() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        dtype = DTYPES[n]
        for which, shape in {"rows": (n, 40), "columns": (9, n), "all": (n, n, n)}.items():
            for dim in (0, -1):
                make = partial(tile_groups.softmax, *shape, dtype=dtype, dim=dim)
                yield f"softmax {dim}, {which} {n}", make
            norm = partial(tile_groups.layer_norm, *shape, dtype=dtype, residual=True)
            yield f"layer norm, {which} {n}", norm
            yield f"statistics, {which} {n}", partial(tile_groups.row_stats, *shape, dtype=dtype)
            yield f"statistics alone, {which} {n}", partial(tile_groups.lone_stats, *shape)
            for dims in ((0,), (-1,), (0, len(shape) - 1)):
                make = partial(tile_groups.standardize, *shape, dims=dims, dtype=dtype)
                yield f"standardize {dims}, {which} {n}", make
                make = partial(tile_groups.pool, "amax", *shape, dims=dims, keepdim=False,
                               dtype=dtype)  # fmt: skip
                yield f"largest {dims}, {which} {n}", make
            for dim in (0, -1):
                make = partial(tile_groups.cumsum, *shape, dim=dim, dtype=dtype)
                yield f"running sums {dim}, {which} {n}", make
                make = partial(tile_groups.argmax, *shape, dim=dim, dtype=dtype, ties=n == 5)
                yield f"place of the largest {dim}, {which} {n}", make
            for kept in dict.fromkeys((1, shape[-1])):
                make = partial(tile_groups.topk, *shape, k=kept, dtype=dtype, largest=n != 3)
                yield f"the first {kept}, {which} {n}", make
        yield f"merged statistics, {n}", partial(tile_groups.merge_stats, n, n)
        for which, image in {"pixels": (2, n, n, 12), "all": (n, n, n, n)}.items():
            count = 3 if which == "pixels" else n
            make = partial(tile_groups.group_norm, *image, groups=count, dtype=dtype)
            yield f"group norm, {which} {n}", make
            yield f"group norm of channels first, {which} {n}", partial(make, first=True)
        make = partial(tile_groups.group_stats, n, n, n, n * n, groups=n, chunks=n, dtype=dtype)
        yield f"statistics of groups, all {n}", make


def _singles() -> Iterator[tuple[str, Make]]:
    """Products of fp32, as they are and in tf32."""
    for n in EXTENTS:
        makes: dict[str, Make] = {
            f"linear, {which} {n}": partial(groups.plain_linear, *size, F32)
            for which, size in {
                "rows": (n, 72, 72), "K": (19, n, 40), "columns": (72, 72, n), "all": (n, n, n),
            }.items()
        }  # fmt: skip
        makes[f"norm, all but K {n}"] = partial(groups.norm_linear, n, 8, n, F32)
        makes[f"product, all {n}"] = partial(groups.batched_matmul, n, n, n, n, F32)
        image = (n, n, n, n)
        makes[f"convolution, all {n}"] = partial(groups.convolution, image, n, (3, 3), F32)
        for which, sizes in {"keys": (19, n, 24), "width": (19, 33, n), "all": (n, n, 8)}.items():
            makes[f"attention, {which} {n}"] = partial(attention_groups.cross, (n,), *sizes, 0, F32)
        for name, make in makes.items():
            yield f"fp32 {name}", make
            yield f"tf32 {name}", lambda make=make: groups.tf32(make())


def _bytes() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {"rows": (n, 80, 72), "columns": (19, 80, n), "rows and columns": (n, 16, n)}
        for which, size in sizes.items():
            for norm in (True, False):
                make = partial(groups.fp8_linear, *size, DTYPES[n], norm=norm, batch=n)
                yield f"fp8 {'norm' if norm else 'residual'}, {which} {n}", make


def _grouped() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {  # an image, columns, groups
            "groups": ((1, 4, 5, 8 * n), 16 * n, n), "channels": ((1, 4, 5, 3 * n), 24, 3),
            "columns": ((1, 4, 5, 24), 3 * n, 3), "all": ((n, n, n, n * n), n * n, n),
        }  # fmt: skip
        for which, (image, columns, count) in sizes.items():
            make = partial(groups.convolution, image, columns, (3, 3), DTYPES[n], groups=count)
            yield f"grouped convolution, {which} {n}", make


def _stencils() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        dtype = DTYPES[n]
        images = {
            "images": (n, 5, 6, 16), "height": (2, n, 6, 16), "width": (2, 6, n, 16),
            "channels": (2, 6, 5, n), "all": (n, n, n, n),
        }  # fmt: skip
        for which, image in images.items():
            make = partial(stencil_groups.depthwise, image, (3, 3), dtype)
            yield f"depthwise, {which} {n}", make
            make = partial(stencil_groups.pool, "max_pool", image, (3, 3), (2, 2), (1, 1), dtype)
            yield f"largest of windows, {which} {n}", make
            make = partial(stencil_groups.adaptive, "adaptive_avg_pool", image, (n, 3), dtype)
            yield f"means that share an image, {which} {n}", make
            make = partial(stencil_groups.resize, image, (n, 2 * n), dtype=dtype)
            yield f"bilinear, {which} {n}", make
            make = partial(stencil_groups.resize, image, (4, n), "bicubic", F32, align=True)
            yield f"bicubic, {which} {n}", make
        few = partial(stencil_groups.depthwise, (1, 7, 7, 8), dtype=dtype)
        yield f"depthwise, kernel {n}", partial(few, (n, n), before=(n // 2, n // 2))
        yield f"depthwise, stride {n}", partial(few, (3, 3), stride=(n, n))
        mean = partial(stencil_groups.pool, "avg_pool", (1, 7, 7, 8), dtype=dtype)
        yield f"mean of windows, kernel {n}", partial(mean, (n, n), (1, 1), (n // 2, n // 2))
        yield f"mean of windows, stride {n}", partial(mean, (3, 3), (n, n), count_padding=False)
        make = partial(stencil_groups.projections, n, (n, n, n), (1, n), dtype, last=n % 2 == 0)
        yield f"projections, all {n}", make
        make = partial(stencil_groups.skipped, (n, n + 1, n + 1, n), (n, n), dtype)
        yield f"resize beside skips, all {n}", make
        yield f"mean beside skips, all {n}", partial(make, "avg_pool")


def _squeezes() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {  # an image, hidden columns, columns
            "images": ((n, 2, 3, 24), 4, 40), "pixels": ((2, n, n, 24), 4, 40),
            "channels": ((2, 2, 3, n), 4, 40), "hidden": ((2, 2, 3, 24), n, 40),
            "columns": ((2, 2, 3, 24), 4, n), "all": ((n, n, n, n), n, n),
        }  # fmt: skip
        for which, (image, hidden, columns) in sizes.items():
            make = partial(squeeze_groups.gate, image, hidden, columns, DTYPES[n])
            yield f"gate, {which} {n}", partial(make, scaled=n % 2 == 1, silu=n == 5)
        make = partial(squeeze_groups.gate, (n, n, n, n), n, channels_first=True)
        yield f"gate of channels first, all {n}", make


def _back_to_backs() -> Iterator[tuple[str, Make]]:
    for n in EXTENTS:
        sizes = {  # rows; columns of the operand, between, and of the result
            "rows": (n, (24, 72, 40)), "eights of K": (131, (8 * n, 40, 24)),
            "eights between": (131, (24, 8 * n, 40)), "columns": (131, (24, 72, n)),
            "all": (n, (8 * n, 8 * n, n)),
        }  # fmt: skip
        for which, (rows, columns) in sizes.items():
            make = partial(back_to_back_groups.bottleneck, rows, columns, DTYPES[n])
            yield f"bottleneck, {which} {n}", partial(make, residuals=n % 3, stored=n != 5)
            make = partial(back_to_back_groups.perceptron, rows, columns, DTYPES[n], stats=False)
            yield f"perceptron, {which} {n}", make


FAMILIES: dict[str, dict[str, Make]] = {
    "linear": dict(_linears()),
    "product": dict(_products()),
    "convolution": dict(_convolutions()),
    "attention": dict(_attentions()),
    "projection": dict(_projections()),
    "elementwise": dict(_pointwise()),
    "rowwise": dict(_rows()),
    "fp32 and tf32": dict(_singles()),
    "fp8": dict(_bytes()),
    "grouped convolution": dict(_grouped()),
    "stencil": dict(_stencils()),
    "squeeze": dict(_squeezes()),
    "back to back": dict(_back_to_backs()),
}
CASES: dict[str, Make] = {name: make for cases in FAMILIES.values() for name, make in cases.items()}
ONE_COLUMN = ("plain linear, columns 1", "scored linear, columns 1", "norm linear, all but K 1")


def _part(cases: dict[str, Make]) -> list[str]:
    drawn = random.Random(23).sample(sorted(cases), max(8, len(cases) // 7))
    return list(dict.fromkeys([*drawn, *(name for name in ONE_COLUMN if name in cases)]))


QUICK = tuple(name for cases in FAMILIES.values() for name in _part(cases))
"""Of each family a part, in which every extent has its turn."""
REFUSALS = (
    r"no multiple of (4|16) bytes",  # a head
    "columns in vectors of at least two",  # of row statistics
    r"\d+ heads of a batch item",  # a cluster
    r"^gemm_back_to_back: sm_\w+ has no wgmma$",
)
"""Why no sketch may take a group, as regular expressions: then the library does."""


def derived(group: Group, target: Target = TARGETS["sm_90a"]) -> tuple[Sketch, ...]:
    """Every sketch that takes `group`, those of blocks that stay included: on one multiprocessor
    even a small product has two tiles for each.

    Raises:
        AssertionError: there is none, for a reason that is none of `REFUSALS`.
    """
    found: dict[str, Sketch] = {}
    for each in (target, replace(target, sm_count=1)):
        derivation = derive(group, family(group), each)
        found |= {sketch.name: sketch for sketch in derivation.sketches if sketch.name not in found}
    reason = derivation.reason
    assert found or any(re.search(why, reason) for why in REFUSALS), reason
    return tuple(found.values())
