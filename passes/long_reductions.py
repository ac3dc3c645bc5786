"""A reduction of all pixels of few channels becomes one of each row of pixels and one of those.

    %y[n, 1, 1, c] = mean(%x[n, h, w, c], dims=[1, 2])
      ->  %y = mean(mean(cast(%x, f32), dims=[2]), dims=[1])

A kernel gives each channel of an image to one block, of which few channels make too few; the first
of two has a block for each row besides. What lies between is fp32, as the sums in one kernel are.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS
from gtco.passes.rewrite import Editor, Log, Rule, never_refused, rewrite

LEAST_PIXELS = 2048
"""A block reads fewer in about the time that a second kernel takes."""
MOST_RESULTS = 1024
"""More make enough blocks."""


def _match(edit: Editor, node: Node) -> Node | None:
    x = node.inputs[0]
    rank = edit.specs[x].rank
    shape = edit.shape(x)
    dims = sorted(dim % rank for dim in node.attrs.get("dims", ()))
    if len(dims) != 2 or dims[1] != dims[0] + 1 or dims[1] == rank - 1:
        return None
    few = node.outputs[0].numel <= MOST_RESULTS
    many = math.prod(shape[dim] for dim in dims) >= LEAST_PIXELS
    two = all(shape[dim] > 1 for dim in dims)
    return node if few and many and two and edit.dtype(x) in FLOATS else None


def _replace(edit: Editor, node: Node) -> str:
    value, kept = node.inputs[0], edit.dtype(node.inputs[0])
    first, second = sorted(dim % edit.specs[value].rank for dim in node.attrs["dims"])
    if kept != torch.float32:
        value = edit.add("cast", value, dtype=torch.float32)
    value = edit.add(node.op, value, dims=(second,), keepdim=True)
    value = edit.add(node.op, value, dims=(first,), keepdim=True)
    if kept != torch.float32:
        value = edit.add("cast", value, dtype=kept)
    if not node.attrs["keepdim"]:
        value = edit.add("reshape", value, shape=node.outputs[0].sizes)
    return value


RULES: tuple[Rule[Any], ...] = (
    Rule("mean(x, (h, w)) -> mean(mean(x, w), h)", ("mean", "sum", "amax"),
         _match, _replace, never_refused),
)  # fmt: skip


def split_long_reductions(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
