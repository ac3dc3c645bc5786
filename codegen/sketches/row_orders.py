"""Tensor maps whose rows come in the order in which `wgmma` hands a thread neighbours."""

from __future__ import annotations

from dataclasses import replace

from gtco.codegen.program import TensorMapArgument


def by_width(plain: TensorMapArgument, width: int) -> TensorMapArgument:
    """The map of the same tiles of one product, whose rows come in an order in which a thread has
    `width` side by side of wgmma's N side: of 4 `width`, row `width` t + 2 j + e comes as
    8 j + 2 t + e. Two are what wgmma leaves of rows as they lie."""
    if width == 2:
        return plain
    k, size, _ = plain.sizes
    row = plain.strides[0]
    return replace(
        plain,
        sizes=(k, 2, 4, width // 2, size // (4 * width)),
        strides=(row, width * row, 2 * row, 4 * width * row),
        box=(plain.box[0], 2, 4, width // 2, plain.box[1] // (4 * width)),
    )


def pairs(plain: TensorMapArgument) -> TensorMapArgument:
    """The map of the same tiles, whose rows come in an order in which a thread has two side by side
    of wgmma's M side: of 16, row 2 i + e comes as 8 e + i."""
    k, size, batch = plain.sizes
    row, product = plain.strides
    return replace(
        plain,
        sizes=(k, 8, 2, size // 16, batch),
        strides=(2 * row, row, 16 * row, product),
        box=(plain.box[0], 8, 2, plain.box[1] // 16, 1),
    )
