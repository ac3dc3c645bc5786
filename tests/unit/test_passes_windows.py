"""Attention of windows of equal length that lie one behind another becomes one node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.passes.attention import fuse_attention
from gtco.passes.canonicalize import canonicalize
from gtco.passes.windows import join_windows
from tests.pass_checks import captured, check, ops, random

HEADS, WIDTH = 2, 8
CHANNELS = HEADS * WIDTH


def attended(
    x: Tensor, lengths: Sequence[int], *, turned: bool = True, causal: bool = False
) -> Tensor:
    """Windows of these lengths of Q, K and V, which x has side by side."""
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    parts = [
        F.scaled_dot_product_attention(*each, is_causal=causal)
        for each in zip(*(y.split(lengths, 2) for y in (q, k, v)), strict=True)
    ]
    if turned:
        return torch.cat([part.transpose(1, 2) for part in parts], 1)
    return torch.cat(parts, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "nodes"),
    [
        ((4, 4, 4), 1),
        ((4, 4, 2, 4, 4, 2), 4),  # two rows with a window cut at the border, of all tokens
        ((4, 4, 2) * 4, 4),  # four of them, of which the last stays by itself
        ((4, 4, 2, 4, 4, 2, 3), 3),
        ((4, 4, 2, 4, 4, 2, 2, 2, 1), 4),  # the same above a row of windows that are cut
        ((4, 2, 4, 2, 2, 1) * 2, 8),  # of two images, each of which is looked at by itself
        ((4, 2, 4, 2, 4, 3), 4),
        ((3, 5, 5), 2),
        ((5, 4, 3), 3),
        ((6, 6, 2, 2), 2),
    ],
)
def test_equal_neighbours_are_one(
    lengths: tuple[int, ...], nodes: int, batch: int, turned: bool, causal: bool
) -> None:
    graph, args = captured(
        lambda _, x: attended(x, lengths, turned=turned, causal=causal),
        random(batch, sum(lengths), 3 * CHANNELS, dtype=torch.float32),
    )
    found = check(join_windows, fuse_attention(canonicalize(graph)), args)
    assert ops(found)["attention"] == nodes
    assert ops(found)["concat"] == (nodes > 1)


def of_other_keys(_: nn.Module, x: Tensor) -> Tensor:
    """Each window looks at the other one."""
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    (a, b), (c, d), (e, f) = (y.split(4, 2) for y in (q, k, v))
    parts = F.scaled_dot_product_attention(a, d, f), F.scaled_dot_product_attention(b, c, e)
    return torch.cat(parts, 2)


def in_another_order(_: nn.Module, x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    parts = [
        F.scaled_dot_product_attention(*each)
        for each in zip(*(y.split(4, 2) for y in (q, k, v)), strict=True)
    ]
    return torch.cat(parts[::-1], 2)


def rows_around_others(_: nn.Module, x: Tensor) -> Tensor:
    """Two rows of windows, and behind both what lies between them."""
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    lengths = tuple(part * (x.shape[1] // 8) for part in (2, 1, 2, 2, 1))
    first, second, between, third, fourth = (
        F.scaled_dot_product_attention(*each)
        for each in zip(*(y.split(lengths, 2) for y in (q, k, v)), strict=True)
    )
    return torch.cat((first, second, third, fourth, between), 2)


def read_elsewhere(_: nn.Module, x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    parts = [
        F.scaled_dot_product_attention(*each)
        for each in zip(*(y.split(4, 2) for y in (q, k, v)), strict=True)
    ]
    return torch.cat(parts, 2) + torch.cat([parts[1], parts[0]], 2)


def of_other_scales(_: nn.Module, x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    parts = [
        F.scaled_dot_product_attention(*each, scale=scale)
        for *each, scale in zip(*(y.split(4, 2) for y in (q, k, v)), (0.5, 0.25), strict=True)
    ]
    return torch.cat(parts, 2)


@pytest.mark.parametrize(
    "function",
    [of_other_keys, in_another_order, rows_around_others, read_elsewhere, of_other_scales],
)
def test_others_stay(function: object) -> None:
    graph, args = captured(function, random(1, 8, 3 * CHANNELS, dtype=torch.float32))
    before = fuse_attention(canonicalize(graph))
    assert check(join_windows, before, args).nodes == before.nodes
