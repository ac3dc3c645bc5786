"""Attention spelled out is recognised where, and only where, it means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from gtco.ir.interpreter import interpret
from gtco.passes.attention import fuse_attention
from gtco.passes.canonicalize import canonicalize
from gtco.passes.fold_constants import fold_constants
from gtco.passes.pads import join_borders
from gtco.passes.rewrite import Log
from tests.pass_checks import Golden, captured, check, ops, random, reasons

Q, K, V = (random(2, 4, 6, 8, seed=seed) for seed in range(3))
MASK = random(6, 6, seed=3)


@pytest.mark.parametrize(
    "function",
    [
        lambda c, q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v,
        lambda c, q, k, v: ((q * 0.3) @ k.mT + c.mask).softmax(-1) @ v,
        lambda c, q, k, v: (c.mask + q @ (k / 3).mT).softmax(-1) @ v,
        lambda c, q, k, v: (q @ (k.mT / 3)).softmax(-1) @ v,
        lambda c, q, k, v: torch.bmm(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1),
                                     v.flatten(0, 1)),
        lambda c, q, k, v: torch.einsum(
            "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.3).softmax(-1), v),
        lambda c, q, k, v: F.scaled_dot_product_attention(q, k, v, c.mask < 99),
    ],
)  # fmt: skip
def test_attention(function: Callable[..., Tensor]) -> None:
    graph, args = captured(function, Q, K, V, mask=MASK)
    result = check(fuse_attention, fold_constants(canonicalize(graph)), args)
    assert ops(result) == {"attention": 1}


HEADS = torch.tensor([3.0, 100.0, 0.5, 7.0], dtype=torch.float64)[:, None, None]
WINDOWS = random(2, 1, 6, 6, seed=5)
PER_HEAD = random(4, 6, 6, seed=6)


def in_windows(scores: Tensor, mask: Tensor) -> Tensor:
    """A mask for each window, added to the scores of an image's windows: Swin's."""
    return (scores.unflatten(0, (1, 2)) + mask).flatten(0, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda c, q, k, v: (q @ k.mT * c.heads).softmax(-1) @ v,
        lambda c, q, k, v: (c.heads * (q @ k.mT * 0.3) + c.per_head).softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT * -c.heads + c.mask).softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT + c.per_head + c.mask).softmax(-1) @ v,
        lambda c, q, k, v: in_windows(q @ k.mT * c.heads + c.per_head, c.windows).softmax(-1) @ v,
        lambda c, q, k, v: in_windows(q @ k.mT, c.windows).softmax(-1) @ v,
        lambda c, q, k, v: in_windows(
            q @ k.mT * c.heads + c.per_head, c.windows + c.windows.exp()
        ).softmax(-1) @ v,
        lambda c, q, k, v: (
            in_windows(in_windows(q @ k.mT * c.heads + c.per_head, c.windows), c.windows)
            .softmax(-1) @ v
        ),
    ],
)  # fmt: skip
def test_scales_by_head_and_known_masks(function: Callable[..., Tensor]) -> None:
    tensors = {"mask": MASK, "heads": HEADS, "windows": WINDOWS, "per_head": PER_HEAD}
    graph, args = captured(function, 0.1 * Q, K, V, **tensors)
    found = ops(check(fuse_attention, fold_constants(canonicalize(graph)), args))
    assert found["attention"] == 1 and found.keys() <= {"attention", "mul"}


def test_a_scale_by_head_overflows_no_half_float() -> None:
    """A query of 60000 times a scale of 100 would; the kernel scales in fp32."""

    def attend(c: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * c.heads).softmax(-1) @ v

    q, k, v = (x.half() for x in (60000 * torch.ones_like(Q), 1e-6 * K, V))
    graph, args = captured(attend, q, k, v, heads=HEADS.half())
    result = fuse_attention(fold_constants(canonicalize(graph)))
    assert ops(result) == {"mul": 1, "attention": 1}
    (found,), (exact,) = interpret(result, args), interpret(graph, args, dtype=torch.float64)
    assert_close(found.double(), exact, atol=2e-2, rtol=2e-2)


def test_attention_form(golden: Golden) -> None:
    graph, args = captured(
        lambda c, q, k, v: (q @ k.mT * 0.3 + c.mask).softmax(-1) @ v, Q, K, V, mask=MASK
    )
    golden("passes/attention.txt", check(fuse_attention, graph, args))


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda c, q, k, v: (q @ k.mT).softmax(-2) @ v, "does not run over the keys"),
        (lambda c, q, k, v: ((q @ k.mT + c.mask) * 0.3).softmax(-1) @ v, "scales the mask too"),
        (lambda c, q, k, v: (p := (q @ k.mT).softmax(-1)) @ v + p.sum(), "read elsewhere too"),
        (lambda c, q, k, v: (q @ k[:1].mT).softmax(-1) @ v, "batch dimensions"),
        (lambda c, q, k, v: (q @ k.mT).softmax(-1) @ v.repeat(1, 1, 1, 40), "320 elements wide"),
        (lambda c, q, k, v: (q @ k.mT + c.mask.float()).softmax(-1) @ v, "not of q's dtype"),
        (lambda c, q, k, v: (q @ k.mT + c.mask + v[..., :1]).softmax(-1) @ v, "forbid a query"),
        (lambda c, q, k, v: ((q @ k.mT + c.mask) * c.heads).softmax(-1) @ v, "the mask too"),
        (lambda c, q, k, v: in_windows(q @ k.mT, v[:, :1, :, :6]).softmax(-1) @ v, "forbid a que"),
        (
            lambda c, q, k, v: (
                ((q[:, :, :4] @ k.mT).unflatten(-1, (2, 3)) * c.heads).flatten(-2).softmax(-1) @ v
            ),
            "reshaped",
        ),
    ],
)
def test_attention_refusals(function: Callable[..., Tensor], reason: str) -> None:
    log = Log()
    graph, args = captured(function, Q, K, V, mask=MASK, heads=HEADS)
    assert ops(check(fuse_attention, graph, args, log))["attention"] == 0
    assert reason in reasons(log)


@pytest.mark.parametrize(
    "function",
    [
        lambda c, q, k, v: (q @ k.mT).sigmoid() @ v,
        lambda c, q, k, v: (q @ k.mT).log_softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT).relu().softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT - c.mask).softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT * c.mask).softmax(-1) @ v,
        lambda c, q, k, v: ((q @ k.mT).softmax(-1) + c.mask) @ v,
        lambda c, q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v,
        lambda c, q, k, v: v.mT @ (q @ k.mT).softmax(-1),
        lambda c, q, k, v: (q @ k.mT).softmax(-1).mT @ v,
        lambda c, q, k, v: q @ (k.mT @ v).softmax(-1),
    ],
)
def test_what_only_looks_like_attention_stays(function: Callable[..., Tensor]) -> None:
    graph, args = captured(function, Q, K, V, mask=MASK)
    assert ops(check(fuse_attention, canonicalize(graph), args))["attention"] == 0


def test_a_scale_below_zero_of_widely_spread_scores() -> None:
    graph, args = captured(lambda c, q, k, v: (q @ k.mT * -30).softmax(-1) @ v, Q, K, V)
    result = check(fuse_attention, graph, args)
    assert [node.attrs["scale"] for node in result.nodes if node.op == "attention"] == [-30.0]


# -- queries that may see no key -----------------------------------------------------------------

DEAD = MASK.clone().index_fill(0, torch.tensor([2]), -torch.inf)
"""A mask whose third query sees no key."""


def guarded(scores: Tensor) -> Tensor:
    """As torch's ONNX exporters write the softmax of scaled_dot_product_attention."""
    weights = scores.softmax(-1)
    return torch.where(weights != weights, torch.zeros((), dtype=weights.dtype), weights)


@pytest.mark.parametrize("mask", [MASK, DEAD, MASK.new_zeros(6, 6)], ids=["some", "dead", "idle"])
def test_a_guarded_softmax_is_attention(mask: Tensor) -> None:
    graph, args = captured(
        lambda c, q, k, v: guarded(q @ k.mT * 0.3 + c.mask) @ v, Q, K, V, mask=mask
    )
    result = check(fuse_attention, canonicalize(graph), args)
    assert ops(result) == {"attention": 1}
    (node,) = result.nodes
    assert len(node.inputs) == (4 if mask.any() else 3)
    (y,) = interpret(result, args)
    assert bool((y[..., 2, :] == 0).all()) == (mask is DEAD)


def test_a_guarded_softmax_of_a_computed_mask_is_attention() -> None:
    graph, args = captured(
        lambda c, q, k, v: guarded(q @ k.mT + torch.zeros_like(q @ k.mT).masked_fill(
            q[..., :1] > 0, -torch.inf)) @ v, Q, K, V)  # fmt: skip
    result = check(fuse_attention, fold_constants(canonicalize(graph)), args)
    assert ops(result)["attention"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda c, q, k, v: (q @ k.mT + c.dead).softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT + c.left + c.right).softmax(-1) @ v,
        lambda c, q, k, v: (q @ k.mT + v @ v.mT / c.zero).softmax(-1) @ v,
        lambda c, q, k, v: (
            (q @ k.mT + torch.zeros_like(q @ k.mT).masked_fill(q[..., :1] > 9, -torch.inf)).softmax(
                -1
            )
            @ v
        ),
    ],
    ids=["constant", "two of which each forbids others", "quotient", "filled"],
)
def test_a_mask_that_may_forbid_every_key_stays_apart(function: Callable[..., Tensor]) -> None:
    """NaN as spelled out and 0 from attention: they must not be exchanged."""
    log = Log()
    right = torch.where(torch.arange(6) < 3, -torch.inf, 0.0).double().expand(6, 6)
    tensors = {"dead": DEAD, "left": right.flip(1), "right": right, "zero": torch.ones(6).double()}
    graph, args = captured(function, Q, K, V, **tensors)
    result = fuse_attention(fold_constants(canonicalize(graph)), log)
    assert ops(result)["attention"] == 0
    assert "may forbid a query every key" in reasons(log)
    (y,), (expected,) = interpret(result, args), interpret(graph, args)
    assert_close(y, expected, equal_nan=True)


def decomposed(c: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    """What is added for the rows and for the columns of 2 x 3 keys: SAM's relative positions."""
    q = q.unflatten(2, (2, 3))
    rows = torch.einsum("bnhwc,hkc->bnhwk", q, c.rows)[..., None]
    return rows, torch.einsum("bnhwc,wkc->bnhwk", q, c.columns)[..., None, :]


@pytest.mark.parametrize(
    "function, biases",
    [
        (lambda c, q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.add(*decomposed(c, q)).flatten(4).flatten(2, 3)), 1),
        (lambda c, q, k, v: ((q * 0.3 @ k.mT).unflatten(3, (2, 3)).unflatten(2, (2, 3))
                             + decomposed(c, q)[0] + decomposed(c, q)[1])
         .flatten(4).flatten(2, 3).softmax(-1) @ v, 1),
        (lambda c, q, k, v: (F.scaled_dot_product_attention(
            q, k, v, (bias := torch.add(*decomposed(c, q)).flatten(4).flatten(2, 3))), bias), 0),
        (lambda c, q, k, v: F.scaled_dot_product_attention(q, k, v, q @ v.mT + k @ v.mT), 0),
    ],
    ids=["given", "spelled out", "read elsewhere", "two of all scores"],
)  # fmt: skip
def test_sums_of_masks(function: Callable[..., Tensor], biases: int) -> None:
    tensors = {"rows": random(2, 2, 8, seed=8), "columns": random(3, 3, 8, seed=9)}
    graph, args = captured(function, Q, K, V, **tensors)
    result = check(fuse_attention, fold_constants(canonicalize(graph)), args)
    (node,) = (node for node in result.nodes if node.op == "attention")
    assert len(node.inputs) == 4 + biases
    assert ops(result)["add"] == 1 - biases


@pytest.mark.parametrize("keys, wide", [(6, 8), (8, 8), (13, 16)])
def test_a_mask_of_some_queries_and_keys(keys: int, wide: int) -> None:
    """Relative positions beside a class token, as MViT adds them: a mask with a border, whose rows
    are whole copies."""

    def attend(c: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores[:, :, 1:, 1:] += q[:, :, 1:] @ c.table
        return scores.softmax(-1) @ v

    k, v = (random(2, 4, keys, 8, seed=seed) for seed in range(2))
    graph, args = captured(attend, Q, k, v, table=random(8, keys - 1))
    bordered = join_borders(fold_constants(canonicalize(graph)))
    result = check(fuse_attention, bordered, args)
    assert ops(result) == {"linear": 1, "pad": 1, "attention": 1}
    (pad,) = (node for node in result.nodes if node.op == "pad")
    assert pad.outputs[0].sizes == (2, 4, 6, wide)


def test_attention_with_a_finite_computed_mask() -> None:
    graph, args = captured(
        lambda c, q, k, v: (q @ k.mT + torch.where(q[..., :1] > 0, (v @ v.mT).tanh(), -1e9))
        .softmax(-1) @ v, Q, K, V)  # fmt: skip
    result = check(fuse_attention, fold_constants(canonicalize(graph)), args)
    assert ops(result)["attention"] == 1


@pytest.mark.parametrize(
    "guard",
    [
        lambda s: torch.where(s != s, torch.ones((), dtype=s.dtype), s),
        lambda s: torch.where(s != 0.0, torch.zeros((), dtype=s.dtype), s),
        lambda s: torch.where(s != s.mT, torch.zeros((), dtype=s.dtype), s),
    ],
    ids=["by one", "of zeros", "of another"],
)
def test_what_only_looks_like_the_guard_stays(guard: Callable[[Tensor], Tensor]) -> None:
    graph, args = captured(lambda c, q, k, v: guard((q @ k.mT).softmax(-1)) @ v, Q, K, V)
    assert ops(check(fuse_attention, canonicalize(graph), args))["attention"] == 0


def test_a_guarded_softmax_that_is_read_elsewhere_stays() -> None:
    log = Log()
    graph, args = captured(
        lambda c, q, k, v: torch.where((p := (q @ k.mT).softmax(-1)) != p, 0.0, p) @ v + p.sum(),
        Q, K, V)  # fmt: skip
    assert ops(check(fuse_attention, canonicalize(graph), args, log))["attention"] == 0
    assert "read elsewhere too" in reasons(log)
