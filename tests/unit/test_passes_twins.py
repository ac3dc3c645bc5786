"""What is computed of queries and of keys alike is computed of both at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.ir.graph import Graph
from gtco.passes import twins
from gtco.passes.attention import fuse_attention
from gtco.passes.canonicalize import canonicalize
from gtco.passes.fold_constants import fold_constants
from gtco.passes.horizontal import join_siblings
from gtco.passes.rewrite import Log
from gtco.passes.twins import compute_twins_once
from tests.faults.test_pass_faults import planted
from tests.pass_checks import captured, check, ops, random, reasons

HEADS, WIDTH, TOKENS = 2, 8, 5
CHANNELS = HEADS * WIDTH
WEIGHTS = {
    "q": random(CHANNELS, CHANNELS, seed=1), "k": random(CHANNELS, CHANNELS, seed=2),
    "v": random(CHANNELS, CHANNELS, seed=3), "bias": random(CHANNELS, seed=4),
    "heads": random(HEADS, 1, 1, seed=5).exp(), "of_q": random(WIDTH, seed=6),
    "of_k": random(WIDTH, seed=7),
}  # fmt: skip
Normed = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
X = random(3, TOKENS, CHANNELS)


def cosine(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Swin V2's, scaled by head."""
    return F.normalize(q, dim=-1) * c.heads, F.normalize(k, dim=-1)


def scaled_keys(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(q, dim=-1), c.heads * F.normalize(k, dim=-1)


def learned(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        for x, w in ((q, c.of_q), (k, c.of_k))
    )


def layer(normed: Normed, *, self_attention: bool = True) -> Callable[..., Tensor]:
    def attend(c: nn.Module, x: Tensor, *more: Tensor) -> Tensor:
        def heads(w: Tensor, b: Tensor | None, x: Tensor) -> Tensor:
            return F.linear(x, w, b).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

        q, k = normed(c, heads(c.q, c.bias, x), heads(c.k, None, x if self_attention else more[0]))
        scores = q @ k.mT
        v = heads(c.v, c.bias, x if self_attention else more[0])
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return attend


def prepared(function: Callable[..., Tensor], *args: Tensor) -> tuple[Graph, tuple[Tensor, ...]]:
    graph, args = captured(function, *args, **WEIGHTS)
    graph = fold_constants(canonicalize(graph))
    return join_siblings(fuse_attention(graph)), args


@pytest.mark.parametrize("normed", [cosine, scaled_keys, learned])
def test_norms_of_queries_and_keys_are_one(normed: Normed) -> None:
    graph, args = prepared(layer(normed), X)
    before, after = ops(graph), ops(check(compute_twins_once, graph, args))
    kinds = "sum", "mean", "sqrt", "rsqrt"
    assert sum(before[kind] for kind in kinds) == 4
    assert sum(after[kind] for kind in kinds) == 2
    assert after["attention"] == 1


def test_constants_that_are_the_same_stay_one() -> None:
    def same(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = learned(c, q, k)
        return q / q.abs().amax(-1, keepdim=True) * c.of_v, k / k.abs().amax(
            -1, keepdim=True
        ) * c.of_v

    graph, args = captured(layer(same), X, **WEIGHTS, of_v=random(WIDTH, seed=9))
    graph = join_siblings(fuse_attention(fold_constants(canonicalize(graph))))
    result = check(compute_twins_once, graph, args)
    (shape,) = {spec.sizes for name, spec in result.specs.items() if name.startswith("of_v_of")}
    assert shape == (1, 1, 1, 1, WIDTH)


def other_norm(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1, eps=0.5)


def other_rows(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(q, dim=-1), F.normalize(k, dim=-2)


def exchanged(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(k, dim=-1), F.normalize(q, dim=-1)


def no_norm(c: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.abs(), k.abs()


@pytest.mark.parametrize("normed", [other_norm, other_rows, exchanged, no_norm])
def test_look_alikes_stay(normed: Normed) -> None:
    graph, args = prepared(layer(normed), X)
    result = check(compute_twins_once, graph, args)
    assert [node.op for node in result.nodes] == [node.op for node in graph.nodes]


def test_keys_of_another_tensor_stay() -> None:
    graph, args = prepared(layer(cosine, self_attention=False), X, random(3, 7, CHANNELS, seed=9))
    assert ops(check(compute_twins_once, graph, args))["sum"] == 2


def test_a_norm_that_others_read_stays() -> None:
    def attend(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, w).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for w in (c.q, c.k, c.v)
        )
        q, k = cosine(c, q, k)
        return (q @ k.mT).softmax(-1) @ v + k.sum()

    log = Log()
    graph, args = prepared(attend, X)
    assert ops(check(compute_twins_once, graph, args, log)) == ops(graph)
    assert "read elsewhere too" in reasons(log)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.ones(", "torch.zeros("),
        ("for x in (a, b)]", "for x in (a, a)]"),
        ("start=at, end=at + 1", "start=0, end=1"),
        ("dim % rank + 1", "dim % rank"),
    ],
)
def test_a_planted_fault_is_caught(old: str, new: str) -> None:
    step = planted(twins, old, new).compute_twins_once
    with pytest.raises(Exception, match=r"not close|cannot become|GraphError|permut|shape"):
        for normed in (cosine, learned):
            graph, args = prepared(layer(normed), X)
            result = check(step, graph, args)
            assert ops(result) != ops(graph), "GraphError: the rule declined"
