"""A mask that is known is kept once, however many images have it.

    %bias: f16[1,3,49,49]                                 const %masks: f16[1,64,3,49,49]
    %windows: f16[1,64,1,49,49]                     ->    %e: f16[8,64,3,49,49] = expand(%masks)
    %scores[8 * 64, 3, 49, 49] + %bias + %windows         %m: f16[512,3,49,49] = reshape(%e)

What is added to the scores of Swin's windows (ICCV 2021) is the same in each image of a batch: as
large as all scores it would fill caches, and of a large batch the memory. Of many windows even the
sum for one image is too large, and attention reads both as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtco.ir.graph import Node
from gtco.ir.views import through_views
from gtco.passes.rewrite import Editor, Rule, never_refused
from gtco.passes.views import without_repeats

Shape = tuple[int, ...]
Mask = tuple[str, Shape]
Part = tuple[Tensor, Shape]


MOST_SUMMED = 2**21
"""Elements of a sum that stays in a cache beside what else is read; a larger one is that of two
operands of an attention, if these are smaller."""


def known_masks(
    edit: Editor, masks: Sequence[Mask], scores: Shape, dtype: torch.dtype
) -> list[str]:
    """The operands of an attention for known masks, which are added to scores in these shapes."""
    parts = [(edit.constants[name], shape) for name, shape in masks]
    alike: dict[tuple[Shape, Shape], list[Part]] = {}
    for mask, shape in parts:
        alike.setdefault((tuple(mask.shape), shape), []).append((mask, shape))
    whole = _numel_of_sum(parts, scores)
    small = 2 * sum(mask.numel() for (mask, _), *_ in alike.values()) <= whole
    if len(alike) == 2 and small and whole > MOST_SUMMED:
        return [_added(edit, each, scores, dtype) for each in alike.values()]
    return [_added(edit, parts, scores, dtype)]


def _numel_of_sum(parts: Sequence[Part], scores: Shape) -> int:
    return math.prod(scores) // _times(parts, scores)


def _times(parts: Sequence[Part], scores: Shape) -> int:
    """How often the sum for the first heads comes again with others."""
    *lead, rows, keys = scores
    times = math.prod(lead)
    for mask, shape in parts:
        same = shape[-2:] == (rows, keys)
        times = math.gcd(times, _repeats(tuple(mask.shape), shape) if same else 1)
    return math.prod(_cut(lead, times))


def sum_of_known(parts: Sequence[Part], scores: Shape) -> tuple[Tensor, int]:
    """What is added to the scores of the first heads, and how often that comes again.

    Args:
        parts: masks, and the shape of the scores as each is added to them.
        scores: [..., rows, keys].

    Returns:
        f64 [heads, rows, keys], and by how many times as many heads the scores are of.
    """
    times = _times(parts, scores)
    total = torch.zeros((), dtype=torch.float64)
    for mask, shape in parts:
        part, left = mask.double().expand(shape), times
        for dim, size in enumerate(shape[:-2]):
            cut = math.gcd(size, left)
            part, left = part.narrow(dim, 0, size // cut), left // cut
        total = total + part.reshape(-1, *scores[-2:])
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


def _added(edit: Editor, parts: Sequence[Part], scores: Shape, dtype: torch.dtype) -> str:
    """The sum of `parts` as a mask of all scores."""
    total, times = sum_of_known(parts, scores)
    cuts = _cut(scores[:-2], times)
    kept = [size // cut for size, cut in zip(scores[:-2], cuts, strict=True)]
    mask = without_repeats(total.reshape(*kept, *scores[-2:]), kept=2).to(dtype)
    for dim, cut in enumerate(cuts):
        if cut > 1 and mask.shape[dim] > 1:  # some of the heads along it, again and again
            once = _kept(edit, mask.unsqueeze(dim))
            size = mask.shape[dim]
            shape = (*mask.shape[:dim], cut, *mask.shape[dim:])
            spread = edit.add("expand", once, shape=shape)
            shape = (*mask.shape[:dim], cut * size, *mask.shape[dim + 1 :])
            return edit.add("reshape", spread, shape=shape)
    return _kept(edit, mask)


def _kept(edit: Editor, mask: Tensor) -> str:
    """`mask` as a constant, which layers of equal masks share."""
    for name, known in edit.constants.items():
        if (known.shape, known.dtype) == (mask.shape, mask.dtype) and torch.equal(known, mask):
            return name
    return edit.add_constant("masks", mask.contiguous())


@dataclass(frozen=True)
class _Repeated:
    attention: Node
    masks: tuple[str | Tensor, ...]
    """Operands, or what is left of those that come again along their first dimensions."""


def _repeated(edit: Editor, node: Node) -> _Repeated | None:
    masks: list[str | Tensor] = []
    for name in node.inputs[3:]:
        known = edit.constant(name)
        once = None if known is None or known.dim() < 3 else without_repeats(known, kept=2)
        masks.append(name if once is None or once.shape == edit.shape(name) else once)
    shrunk = any(isinstance(mask, Tensor) for mask in masks)
    return _Repeated(node, tuple(masks)) if shrunk else None


def _once(edit: Editor, match: _Repeated) -> str:
    node = match.attention
    masks = [mask if isinstance(mask, str) else _kept(edit, mask) for mask in match.masks]
    return edit.add("attention", *node.inputs[:3], *masks, **node.attrs)


REPEATED_MASKS = Rule(
    "attention(q, k, v, expand(known)) -> attention(q, k, v, known)",
    ("attention",), _repeated, _once, never_refused,
)  # fmt: skip


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
