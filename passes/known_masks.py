"""A mask that is known is kept once, however many images have it.

    %bias: f16[1,3,49,49]                                 const %masks: f16[1,64,3,49,49]
    %windows: f16[1,64,1,49,49]                     ->    %e: f16[8,64,3,49,49] = expand(%masks)
    %scores[8 * 64, 3, 49, 49] + %bias + %windows         %m: f16[512,3,49,49] = reshape(%e)

What is added to the scores of Swin's windows (ICCV 2021) is the same in each image of a batch: as
large as all scores it would fill caches, and of a large batch the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.ir.views import through_views
from gtco.passes.rewrite import Editor
from gtco.passes.views import without_repeats

Shape = tuple[int, ...]


def sum_of_known(masks: Sequence[tuple[Tensor, Shape]], scores: Shape) -> tuple[Tensor, int]:
    """What is added to the scores of the first heads, and how often that comes again.

    Args:
        masks: known ones, and the shape of the scores as each is added to them.
        scores: [..., rows, keys].

    Returns:
        f64 [heads, rows, keys], and by how many times as many heads the scores are of.
    """
    *lead, rows, keys = scores
    times = math.prod(lead)
    for mask, shape in masks:
        same = shape[-2:] == (rows, keys)
        times = math.gcd(times, _repeats(tuple(mask.shape), shape) if same else 1)
    times = math.prod(_cut(lead, times))
    total = torch.zeros((), dtype=torch.float64)
    for mask, shape in masks:
        part, left = mask.double().expand(shape), times
        for dim, size in enumerate(shape[:-2]):
            cut = math.gcd(size, left)
            part, left = part.narrow(dim, 0, size // cut), left // cut
        total = total + part.reshape(-1, rows, keys)
    return total, times


def _repeats(own: Shape, shape: Shape) -> int:
    """How often a tensor of size `own`, expanded to `shape`, comes again along the first of its
    dimensions."""
    own = (1,) * (len(shape) - len(own)) + own
    times = 1
    for size, whole in zip(own[:-2], shape[:-2], strict=True):
        if size != 1:
            break
        times *= whole
    return times


def _cut(lead: Sequence[int], times: int) -> list[int]:
    """By how much each of `lead` can be divided for heads `times` times as few, the first of all in
    their order; together perhaps by less."""
    cuts = []
    for size in lead:
        cuts.append(math.gcd(size, times))
        times = times // cuts[-1] if cuts[-1] == size else 1
    return cuts


def add_known(edit: Editor, total: Tensor, times: int, scores: Shape, dtype: torch.dtype) -> str:
    """The sum of `sum_of_known` as a mask of all scores."""
    cuts = _cut(scores[:-2], times)
    kept = [size // cut for size, cut in zip(scores[:-2], cuts, strict=True)]
    mask = without_repeats(total.reshape(*kept, *scores[-2:]), kept=2).to(dtype)
    for dim, cut in enumerate(cuts):
        if cut > 1 and mask.shape[dim] > 1:  # some of the heads along it, again and again
            once = edit.add_constant("masks", mask.unsqueeze(dim).contiguous())
            size = mask.shape[dim]
            shape = (*mask.shape[:dim], cut, *mask.shape[dim:])
            spread = edit.add("expand", once, shape=shape)
            shape = (*mask.shape[:dim], cut * size, *mask.shape[dim + 1 :])
            return edit.add("reshape", spread, shape=shape)
    return edit.add_constant("masks", mask.contiguous())


def spreads_mask(edit: Editor, node: Node) -> bool:
    """Whether `node` sees a constant again and again, and is the mask of attentions alone."""
    if not node.definition.is_view:
        return False
    base, _ = through_views(edit.producer, node.values[0])
    if base not in edit.constants or edit.specs[base].numel >= node.outputs[0].numel:
        return False
    pending, found = [node.values[0]], False
    while pending:
        value = pending.pop()
        if edit.is_output(value):
            return False
        for user in edit.users(value):
            if user.definition.is_view:
                pending.append(user.values[0])
            elif user.definition.family != "attention" or value in user.inputs[:3]:
                return False
            else:
                found = True
    return found
