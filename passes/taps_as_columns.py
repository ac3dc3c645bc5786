"""A convolution of few results makes those of all taps of a row at once, and adds them up behind.

    %y[n, p, q, 3] = conv(%x[n, h, w, c], %v[3, 9, 9, c])
      ->  %t: f32[n, p, q + 8, 32] = cast(conv(%x, %v'[32, 9, 1, c]), dtype=f32)
          %y = cast(%t[:, :, 0:q, 0:3] + %t[:, :, 1:q+1, 3:6] + ... + %t[:, :, 8:q+8, 24:27])

Tensor cores multiply sixteen columns or more, of which three would be results: the last layer of
super resolution, of image translation, of a decoder. With a row's taps as columns they fill them,
and the image is read once for each row of taps. What cancels between taps stays in f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gtco.ir.graph import Graph, Node
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

MOST_RESULTS = 8
"""Channels of a result that leave half of what is multiplied unused, or more."""
MOST_COLUMNS = 64
"""That a row's taps may become."""
COLUMNS = 16
"""That are multiplied where there are fewer."""
LEAST_CHANNELS = 16
LEAST_FLOPS = 1.5e9
"""With `COLUMNS` of them, of a convolution that takes longer than another kernel and its image."""
VECTOR = 8
"""Columns of which an image has a multiple, so that threads store 16 bytes."""


@dataclass(frozen=True)
class _Taps:
    """A convolution [n, p, q, results], the `columns` that a row's taps become, and how many pixels
    these are `apart`."""

    conv: Node
    results: int
    columns: int
    apart: int


def _match(edit: Editor, conv: Node) -> _Taps | None:
    weight = edit.constant(conv.inputs[1])
    if weight is None or weight.dim() != 4 or not weight.is_floating_point():
        return None
    results, rows, taps, channels = weight.shape
    columns = -(-results * taps // VECTOR) * VECTOR
    if results > MOST_RESULTS or channels < LEAST_CHANNELS or columns > MOST_COLUMNS:
        return None
    if taps == 1 or conv.attrs["stride"][1] != 1 or columns >= COLUMNS * taps:
        return None
    flops = 2 * math.prod(conv.outputs[0].sizes[:3]) * rows * taps * channels * COLUMNS
    if flops < LEAST_FLOPS:
        return None
    return _Taps(conv, results, columns, conv.attrs["dilation"][1])


def _replace(edit: Editor, match: _Taps) -> str:
    conv, results = match.conv, match.results
    image, name = conv.inputs
    weight = edit.constants[name]
    _, rows, taps, channels = weight.shape
    by_tap = weight.permute(2, 0, 1, 3).reshape(taps * results, rows, 1, channels)
    filled = weight.new_zeros(match.columns, rows, 1, channels)
    filled[: taps * results] = by_tap
    attrs = {**conv.attrs, "dilation": (conv.attrs["dilation"][0], 1)}
    wide = edit.add(conv.op, image, edit.add_constant(f"{name}_taps", filled), **attrs)
    dtype, width = conv.outputs[0].dtype, conv.outputs[0].sizes[2]
    if dtype != torch.float32:
        wide = edit.add("cast", wide, dtype=torch.float32)
    total = ""
    for tap in range(taps):
        start = tap * match.apart
        part = edit.add("slice", wide, dim=2, start=start, end=start + width)
        part = edit.add("slice", part, dim=3, start=tap * results, end=(tap + 1) * results)
        total = edit.add("add", total, part) if total else part
    return total if dtype == torch.float32 else edit.add("cast", total, dtype=dtype)


RULES: tuple[Rule[_Taps], ...] = (
    Rule("conv(x, w) of few results -> sum of slices of conv(x, w')", ("conv",), _match, _replace,
         never_refused),
)  # fmt: skip


def columns_of_taps(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
