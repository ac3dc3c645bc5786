"""Attention spelled out becomes one node.

    %t = permute(%k, dims=[0, 1, 3, 2])
    %a = matmul(%q, %t)
    %b = mul(%a, other=0.125)                   ->    %y = attention(%q, %k, %v, %mask,
    %c = add(%b, %mask)                                              scale=0.125, causal=False)
    %d = softmax(%c, dim=3)
    %y = matmul(%d, %v)

The scale may stand on q, on k, or on the product before the mask, and differ from head to head;
masks that are known become one, others are added to one another, and both may be added to
reshaped scores; casts to a wider type around the softmax are what `attention` does anyway. A mask
that masks nothing goes, and one that is a sum becomes two (`gtco.passes.masks`).

A query that may see no key is NaN as spelled out and 0 from `attention`. So a mask that may forbid
a query every key stays apart, unless the softmax is guarded as torch's ONNX exporters do it,
`where(softmax != softmax, 0, softmax)`, which is those zeros. (Beyond them the guard hides NaN
among the scores themselves, which `attention` shows.)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtco.ir.graph import Graph, Node
from gtco.ir.views import through_views
from gtco.passes import views
from gtco.passes.known_masks import REPEATED_MASKS, known_masks, sum_of_known
from gtco.passes.masks import ROWS_OF_MASKS, SUM_OF_MASKS
from gtco.passes.rewrite import Editor, Log, Rule, rewrite

MAX_HEAD = 256
"""Elements of the widest head that stays in registers; attention over channels has wider ones."""

_MOST_STEPS = 6
"""Scales and masks between a product and its softmax; Swin V2 of transformers has a scale, a bias,
and the mask of its windows twice."""


@dataclass(frozen=True)
class _Attention:
    """What the pattern bound: `k` is [..., keys, d], or with `k_is_transposed` [..., d, keys]."""

    root: Node
    q: str
    k: str
    v: str
    masks: tuple[tuple[str, tuple[int, ...]], ...]
    """What is added to the scores, and the shape that they have there; the first is added last."""
    scale: float
    heads: Tensor | None
    """Constants that the scores are multiplied by besides, the same in all rows and columns."""
    heads_at: tuple[int, ...]
    """The shape that the scores have there."""
    k_is_transposed: bool
    softmax: Node
    inner: tuple[str, ...]
    """Values inside the pattern, which nobody else may read."""
    misplaced_scale: bool
    guard: frozenset[str]
    """The two nodes that replace NaN in the softmax by 0, if they are there."""


def _scaled(edit: Editor, value: str) -> tuple[str, float] | None:
    """(x, c) if `value` is `x * c` with a number c."""
    node = edit.producer(value, "mul", "div")
    return None if node is None else views.scaled_by(node)


def _scaled_by_head(edit: Editor, value: str) -> tuple[str, Tensor] | None:
    """(x, c) if `value` is `x * c` with a constant c that is the same in all rows and columns."""
    node = edit.producer(value, "mul")
    if node is None or len(node.inputs) != 2:
        return None
    for x, c in (node.inputs, node.inputs[::-1]):
        constant = edit.constant(c)
        if constant is None or constant.shape[-2:] != (1, 1) or edit.shape(x) != edit.shape(value):
            continue
        if bool(constant.isfinite().all()) and bool(constant.any()):
            return x, constant
    return None


def _unscaled(edit: Editor, value: str) -> tuple[str, float]:
    return _scaled(edit, value) or (value, 1.0)


def _transposed(edit: Editor, value: str) -> str | None:
    """x if `value` is x with its last two dimensions exchanged."""
    node = edit.producer(value, "permute")
    if node is None:
        return None
    dims = tuple(node.attrs["dims"])
    return node.inputs[0] if dims == _last_exchanged(len(dims)) else None


def _last_exchanged(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def transpose(edit: Editor, value: str) -> str:
    """`value` with its last two dimensions exchanged."""
    return edit.add("permute", value, dims=_last_exchanged(edit.specs[value].rank))


def _see_through(edit: Editor, value: str, inner: list[str], *, cut: bool = False) -> str:
    """`value` before casts, and before reshapes: those that keep its rows and columns or, with
    `cut`, any."""
    while node := edit.producer(value, "cast", "reshape"):
        if not cut and edit.shape(value)[-2:] != edit.shape(node.inputs[0])[-2:]:
            break
        inner.append(value)
        value = node.inputs[0]
    return value


def _unguarded(edit: Editor, value: str) -> tuple[str, Node, Node] | None:
    """(s, comparison, choice) if `value` is `where(s != s, 0, s)`."""
    choice = edit.producer(value, "where")
    comparison = choice and edit.producer(choice.inputs[0], "ne")
    if choice is None or comparison is None:
        return None
    _, zero, s = choice.inputs
    constant = edit.constant(zero)
    if comparison.inputs != (s, s) or constant is None or bool(constant.any()):
        return None
    return s, comparison, choice


def _match(edit: Editor, node: Node) -> _Attention | None:
    inner: list[str] = []
    value = _see_through(edit, node.inputs[0], inner)
    guard: frozenset[str] = frozenset()
    if guarded := _unguarded(edit, value):
        inner += [value, guarded[1].name]
        value, guard = guarded[0], frozenset(node.name for node in guarded[1:])
    softmax = edit.producer(value, "softmax")
    if softmax is None:
        return None
    inner.append(value)
    value, misplaced = _see_through(edit, softmax.inputs[0], inner, cut=True), False
    masks: list[tuple[str, tuple[int, ...]]] = []
    product, heads = None, None
    heads_at: tuple[int, ...] = ()
    scale, scaled = 1.0, False
    for _ in range(_MOST_STEPS):
        if product := edit.producer(value, "matmul"):
            break
        if pair := _scaled(edit, value):
            inner.append(value)
            value, scale, scaled = pair[0], scale * pair[1], True
        elif heads is None and (by_head := _scaled_by_head(edit, value)):
            inner.append(value)
            heads_at = edit.shape(value)
            value, heads, scaled = *by_head, True
        elif (added := edit.producer(value, "add")) and len(added.inputs) == 2:
            inner.append(value)
            shape = edit.shape(value)
            value, mask = _scores_first(edit, added)
            masks.append((mask, shape))
            misplaced = scaled
        else:
            return None
        value = _see_through(edit, value, inner, cut=True)
    if product is None:
        return None
    inner.append(value)
    q, q_scale = _unscaled(edit, product.inputs[0])
    right, k_scale = _unscaled(edit, product.inputs[1])
    k = _transposed(edit, right)
    if k is not None:
        k, inner_scale = _unscaled(edit, k)
        k_scale *= inner_scale
    return _Attention(
        node, q, k or right, node.inputs[1], tuple(masks), scale * q_scale * k_scale, heads,
        heads_at, k is None, softmax, tuple(inner), misplaced, guard,
    )  # fmt: skip


def _scores_first(edit: Editor, added: Node) -> tuple[str, str]:
    """The operands of `scores + mask`, whichever way round."""
    a, b = added.inputs
    scores = _unscaled(edit, b)[0]
    return (b, a) if edit.producer(scores, "matmul") and a != b else (a, b)


def _check(edit: Editor, match: _Attention) -> str | None:
    rank = edit.specs[match.softmax.name].rank
    if match.softmax.attrs["dim"] % rank != rank - 1:
        return "the softmax does not run over the keys"
    if match.misplaced_scale:
        return "the scale follows the mask, so it scales the mask too"
    for value in match.inner:
        guarded = match.guard and value == match.softmax.name and not edit.is_output(value)
        if guarded and {user.name for user in edit.users(value)} == match.guard:
            continue
        if not edit.read_once(value):
            return f"%{value} is read elsewhere too, so it must be stored"
    if any(edit.specs[x].rank < 2 for x in (match.q, match.k, match.v)):
        return "one of q, k and v is a vector"
    width = max(edit.shape(match.q)[-1], edit.shape(match.v)[-1])
    if width > MAX_HEAD:
        return f"its heads are {width} elements wide; up to {MAX_HEAD} fit one kernel"
    leading = {edit.shape(x)[:-2] for x in (match.q, match.k, match.v)}
    if len(leading) != 1:
        return "q, k and v differ in their batch dimensions"
    dtypes = {edit.dtype(x) for x in (match.q, match.k, match.v)}
    if len(dtypes) != 1:
        return "q, k and v differ in dtype"
    (dtype,) = dtypes
    if not dtype.is_floating_point:
        return f"q, k and v are {edit.specs[match.q]}, whole numbers"
    for value in match.inner:
        if value not in match.guard and not views.loses_nothing(dtype, edit.dtype(value)):
            return f"%{value} is {edit.specs[value]}, which rounds what attention does not"
    if not 0 < abs(match.scale) < math.inf:
        return f"its scale {match.scale} is no number to scale by"
    (batch,), rows, columns = leading, edit.shape(match.q)[-2], edit.shape(match.v)[-1]
    if match.root.outputs[0].sizes != (*batch, rows, columns):
        return f"it gives {match.root.outputs[0]}, which has not the rows of q and the columns of v"
    scores = _scores(edit, match)
    if 0 in (*scores, edit.shape(match.q)[-1], columns):
        return "it has no element"
    for mask, shape in match.masks:
        if math.prod(shape) != math.prod(scores) or not _broadcasts(edit.shape(mask), shape):
            return f"the mask %{mask} is larger than the scores {list(scores)}"
        if edit.dtype(mask) != edit.dtype(match.q):
            return f"the mask is {edit.specs[mask]}, not of q's dtype"
    if not match.guard and _may_forbid_all(edit, match):
        masks = ", ".join(f"%{mask}" for mask, _ in match.masks)
        return (
            f"the mask {masks} may forbid a query every key, "
            "which is NaN as it is spelled out and 0 from attention"
        )
    cut = match.heads_at[-2:] != scores[-2:]
    if match.heads is not None and (cut or not _broadcasts(match.heads.shape, scores)):
        return "the scores are reshaped on the way to or from their scale"
    return None


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` added to one of shape `target` gives `target`."""
    tail = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(
        own in (1, size) for own, size in zip(shape, tail, strict=True)
    )


def _may_forbid_all(edit: Editor, match: _Attention) -> bool:
    """Whether a row of what is added to the scores may be all -inf."""
    if not match.masks:
        return False
    if _all_known(edit, match):
        known = [(edit.constants[mask], shape) for mask, shape in match.masks]
        dtype = edit.dtype(match.q)
        if sum(float(mask.min()) for mask, _ in known) >= torch.finfo(dtype).min:
            return False
        total, _ = sum_of_known(known, _scores(edit, match))
        return bool((total.to(dtype) == -torch.inf).all(-1).any())
    pending = [mask for mask, _ in match.masks]
    seen = set(pending)
    while pending:
        value = pending.pop()
        constant, node = edit.constant(value), edit.producer(value)
        if constant is not None:
            if not bool(constant.isfinite().all()):
                return True
            continue
        if node is not None and node.definition.ends_masks:
            continue
        if node is None or not node.definition.stays_finite:
            return True
        if not math.isfinite(node.attrs.get("other") or 0):
            return True
        operands = node.inputs[1:] if node.definition.selects else node.inputs
        pending += [operand for operand in operands if operand not in seen]
        seen.update(operands)
    return False


def _replace(edit: Editor, match: _Attention) -> str:
    k = transpose(edit, match.k) if match.k_is_transposed else match.k
    q, scale = match.q, match.scale
    if match.heads is not None:
        # A power of two for all leaves factors of at most 1, exact and without overflow.
        most = 2.0 ** math.ceil(math.log2(float(match.heads.abs().max())))
        factors = (match.heads.double() / most).to(edit.dtype(q))
        q = edit.add("mul", q, edit.add_constant("scales", factors))
        scale *= most
    return edit.add("attention", q, k, match.v, *_masks(edit, match), scale=scale, causal=False)


def _scores(edit: Editor, match: _Attention) -> tuple[int, ...]:
    """The shape of the scores."""
    keys = edit.shape(match.k)[-1 if match.k_is_transposed else -2]
    return (*edit.shape(match.q)[:-1], keys)


def _masks(edit: Editor, match: _Attention) -> list[str]:
    """The operands that `attention` takes for the masks of `match`."""
    if not match.masks:
        return []
    scores = _scores(edit, match)
    as_it_is = len(match.masks) == 1 and match.masks[0][1] == scores
    if _all_known(edit, match) and not as_it_is:
        return known_masks(edit, match.masks, scores, edit.dtype(match.q))
    spread = [_of_scores(edit, mask, shape, scores) for mask, shape in match.masks]
    return [functools.reduce(lambda total, mask: edit.add("add", total, mask), spread)]


def _all_known(edit: Editor, match: _Attention) -> bool:
    return all(edit.constant(mask) is not None for mask, _ in match.masks)


def _of_scores(edit: Editor, mask: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """`mask`, which is added to scores of `shape`, as it is added to those of q and k."""
    if shape == scores:
        return _of_rank_2(edit, mask)
    return edit.add("reshape", edit.add("expand", mask, shape=shape), shape=scores)


def _of_rank_2(edit: Editor, mask: str) -> str:
    """A mask of one value, or of one a key, as the matrix that attention takes."""
    shape = edit.shape(mask)
    if len(shape) >= 2:
        return mask
    return edit.add("reshape", mask, shape=(1,) * (2 - len(shape)) + shape)


def _idle_mask(edit: Editor, node: Node) -> Node | None:
    """An attention whose constant mask lets every query see every key."""
    base, _ = through_views(edit.producer, node.inputs[3]) if len(node.inputs) == 4 else ("", ())
    mask = edit.constant(base)
    if mask is None:
        return None
    idle = mask.all() if mask.dtype == torch.bool else (mask == 0).all()
    return node if bool(idle) else None


def _without_mask(edit: Editor, node: Node) -> str:
    return edit.add("attention", *node.inputs[:3], **node.attrs)


RULES: tuple[Rule[Any], ...] = (
    *views.RULES,
    Rule("softmax(q @ k.T * c + mask) @ v -> attention(q, k, v, mask, c)", ("matmul",),
         _match, _replace, _check),
    Rule("attention(q, k, v, nothing masked) -> attention(q, k, v)", ("attention",),
         _idle_mask, _without_mask),
    REPEATED_MASKS,
    SUM_OF_MASKS,
    ROWS_OF_MASKS,
)  # fmt: skip


def fuse_attention(graph: Graph, log: Log | None = None) -> Graph:
    """See the module's docstring."""
    return rewrite(graph, RULES, log)
