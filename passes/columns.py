"""One linear of columns that linears of the same operand make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.passes.rewrite import Editor

ALL = slice(None)
"""Columns of a linear."""


def linear_of(
    edit: Editor,
    parts: Sequence[tuple[Node, Tensor | slice]],
    suffix: str,
    order: Tensor | None = None,
) -> str:
    """A linear that makes what linears of one operand make, its columns in another order.

    Args:
        edit: the graph.
        parts: linears that read the same and have the same attributes, with constant weights, and
            the columns of each, in the order of the result.
        suffix: of the constants' names.
        order: of the result's columns which of those named so far, one after another; as they come
            without it.
    """
    weights, biases = [], []
    for linear, columns in parts:
        weight = edit.constants[linear.inputs[1]]
        columns = columns if isinstance(columns, slice) else columns.to(weight.device)
        weights.append(weight[columns])
        bias = linear.inputs[2:]
        whole = edit.constants[bias[0]] if bias else weight.new_zeros(1)
        biases.append(whole.expand(weight.shape[0])[columns])
    first, _ = parts[0]
    hint = first.inputs[1]
    found = [torch.cat(weights)]
    if any(len(linear.inputs) == 3 for linear, _ in parts):
        found.append(torch.cat(biases))
    if order is not None:
        found = [tensor[order.to(tensor.device)] for tensor in found]
    names = (f"{hint}_{suffix}", f"{hint}_{suffix}_bias")
    constants = [edit.add_constant(*each) for each in zip(names, found, strict=False)]
    return edit.add("linear", first.inputs[0], *constants, **first.attrs)
