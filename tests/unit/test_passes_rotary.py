"""Rotary positions: however they are spelled, they end in the epilogue of one linear."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.ir.graph import Graph
from gtco.ir.interpreter import interpret
from gtco.passes import run_pipeline
from gtco.passes.canonicalize import canonicalize
from gtco.passes.fold_constants import fold_constants
from gtco.passes.rewrite import Log
from gtco.passes.rotary import fuse_rotary
from tests.pass_checks import captured, check, ops, random, reasons

HEADS, WIDTH, TOKENS = 2, 8, 5
CHANNELS = HEADS * WIDTH
WEIGHTS = {
    "q": random(CHANNELS, CHANNELS, seed=1), "k": random(CHANNELS, CHANNELS, seed=2),
    "v": random(CHANNELS, CHANNELS, seed=3), "qb": random(CHANNELS, seed=4),
    "qkv": random(3 * CHANNELS, CHANNELS, seed=5), "n": random(WIDTH, seed=6),
    "cos": random(TOKENS, WIDTH, seed=7), "sin": random(TOKENS, WIDTH, seed=8),
}  # fmt: skip
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's: Llama, DINOv3, Pixtral."""
    first, last = x.chunk(2, -1)
    return x * cos + torch.cat([-last, first], -1) * sin


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """timm's, of EVA-02."""
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape) * sin


def sine_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, last = x.chunk(2, -1)
    return torch.cat([-last, first], -1) * sin + x * cos


def two_products(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GPT-NeoX's: the halves are computed apart."""
    first, last = x.chunk(2, -1)
    c, s = cos[:, : WIDTH // 2], sin[:, : WIDTH // 2]
    return torch.cat([first * c - last * s, last * c + first * s], -1)


def some_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last four columns stay."""
    part = x[..., :4]
    return torch.cat([halves(part, cos[:, :4], sin[:, :4]), x[..., 4:]], -1)


def two_axes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows and columns of an image turn half of the channels each."""
    a, b = x.chunk(2, -1)
    return torch.cat(
        [neighbours(a, cos[..., :4], sin[..., :4]), halves(b, cos[..., 4:], sin[..., 4:])], -1
    )


def behind_a_class_token(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x[:, :, :1], halves(x[:, :, 1:], cos[1:], sin[1:])], 2)


def in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x.float(), cos.float(), sin.float()).to(x.dtype)


SPELLINGS: tuple[Turn, ...] = (
    halves, neighbours, sine_first, two_products, some_columns, two_axes, behind_a_class_token,
)  # fmt: skip


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def of_three_linears(turn: Turn) -> Callable[[nn.Module, Tensor], Tensor]:
    """Only queries have a bias."""

    def attend(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, c.q, c.qb), F.linear(x, c.k), F.linear(x, c.v)
        q, k, v = split(q), split(k), split(v)
        q, k = (turn(y, c.cos, c.sin) for y in (q, k))
        return F.scaled_dot_product_attention(q, k, v)

    return attend


def of_one_linear(turn: Turn) -> Callable[[nn.Module, Tensor], Tensor]:
    def attend(c: nn.Module, x: Tensor) -> Tensor:
        y = F.linear(x, c.qkv).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        q, k, v = y.unbind(0)
        return F.scaled_dot_product_attention(turn(q, c.cos, c.sin), turn(k, c.cos, c.sin), v)

    return attend


def ahead_of_heads(turn: Turn) -> Callable[[nn.Module, Tensor], Tensor]:
    """Turned as [batch, tokens, heads, width], and transposed after that."""

    def attend(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (HEADS, WIDTH)) for w in (c.q, c.k, c.v))
        cos, sin = c.cos[:, None], c.sin[:, None]
        q, k = (turn(y, cos, sin) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    return attend


def prepared(function: Callable[..., Tensor], *args: Tensor) -> tuple[Graph, tuple[Tensor, ...]]:
    dtype = args[0].dtype
    tensors = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    graph, args = captured(function, *args, **tensors)
    return fold_constants(canonicalize(graph)), args


X = random(2, TOKENS, CHANNELS)
TURNED = {"linear": 1, "swap_pairs": 1, "rotate": 1, "attention": 1}


@pytest.mark.parametrize("turn", SPELLINGS)
@pytest.mark.parametrize("layer", [of_three_linears, of_one_linear])
def test_an_epilogue_rotates(turn: Turn, layer: Callable[[Turn], Callable[..., Tensor]]) -> None:
    graph, args = prepared(layer(turn), X.float())
    assert ops(check(fuse_rotary, graph, args)) == TURNED


def test_heads_may_be_turned_before_they_are_transposed() -> None:
    graph, args = prepared(ahead_of_heads(halves), X.float())
    assert ops(check(fuse_rotary, graph, args)) == TURNED


@pytest.mark.parametrize("layer", [of_three_linears, of_one_linear, ahead_of_heads])
def test_casts_to_fp32_and_back_are_the_kernels_own(layer: Callable[..., Any]) -> None:
    graph, args = prepared(layer(in_fp32), X.half())
    result = fuse_rotary(graph)
    assert ops(result) == TURNED
    exact = interpret(graph, args, dtype=torch.float64)[0]
    (found,) = interpret(result, args)
    assert found.dtype == torch.float16
    assert (found - exact).abs().max() < 4e-3 * exact.abs().max()


def of_windows(c: nn.Module, x: Tensor) -> Tensor:
    """SAM 3's: linears read windows of an image, and pairs are unbound in fp32."""

    def turn(y: Tensor) -> Tensor:
        wide = y.float()
        first, last = wide.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-last, first], -1).flatten(-2)
        return (wide * c.cos[:4] + turned * c.sin[:4]).type_as(y)

    def of_window(y: Tensor) -> Tensor:
        return y.view(6, 4, HEADS, WIDTH).transpose(1, 2)

    x = x.view(1, 2, 2, 3, 2, CHANNELS).transpose(2, 3).reshape(6, 2, 2, CHANNELS)
    q, k, v = (of_window(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
    return F.scaled_dot_product_attention(turn(q), turn(k), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pairs_may_be_seen_through_other_views_than_what_they_turn(dtype: torch.dtype) -> None:
    graph, args = prepared(of_windows, random(1, 4, 6, CHANNELS).to(dtype))
    result = fuse_rotary(graph)
    assert ops(result) == TURNED
    (exact,) = interpret(graph, args, dtype=torch.float64)
    (got,) = interpret(result, args, dtype=torch.float64)
    torch.testing.assert_close(got, exact, rtol=2e-6, atol=2e-6)


def of_cut_windows(turn: Turn, c: nn.Module, x: Tensor) -> Tensor:
    """Qwen 2.5's at borders: windows of other lengths are cut out of what has turned."""
    q, k, v = (split(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
    q, k = turn(q, c.cos, c.sin), turn(k, c.cos, c.sin)
    parts = zip(*(y.split((3, 2), 2) for y in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*each) for each in parts], 2)


@pytest.mark.parametrize("turn", [halves, neighbours, two_axes])
def test_windows_are_cut_out_behind_the_epilogue_that_rotates(turn: Turn) -> None:
    graph, args = prepared(partial(of_cut_windows, turn), X.float())
    found = ops(check(fuse_rotary, graph, args))
    assert {name: found[name] for name in TURNED} == {**TURNED, "attention": 2}
    assert "neg" not in found and found["concat"] == 1


def of_crossed_windows(c: nn.Module, x: Tensor) -> Tensor:
    """One window's keys are queries of the other."""
    q, k, v = (split(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
    (a, b), (d, e) = (halves(y, c.cos, c.sin).split((3, 2), 2) for y in (q, k))
    f, g = v.split((3, 2), 2)
    parts = F.scaled_dot_product_attention(a, d, f), F.scaled_dot_product_attention(e, b, g)
    return torch.cat(parts, 2)


def of_a_window_and_all(c: nn.Module, x: Tensor) -> Tensor:
    """Keys turn as a whole and are read as a whole as well."""
    q, k, v = (split(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
    q, k = halves(q, c.cos, c.sin), halves(k, c.cos, c.sin)
    first = F.scaled_dot_product_attention(q[:, :, :3], k[:, :, :3], v[:, :, :3])
    return torch.cat([first, F.scaled_dot_product_attention(q[:, :, 3:], k, v)], 2)


def of_turned_values(c: nn.Module, x: Tensor) -> Tensor:
    """The values of one window are queries that have turned."""
    q, k, v = (split(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
    (a, b), (d, e) = (halves(y, c.cos, c.sin).split((3, 2), 2) for y in (q, k))
    first = F.scaled_dot_product_attention(a, d, v[:, :, :3])
    return torch.cat([first, F.scaled_dot_product_attention(b, e, b)], 2)


def of_windows_that_others_read(c: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (split(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
    q, k = halves(q, c.cos, c.sin), halves(k, c.cos, c.sin)
    parts = zip(*(y.split((3, 2), 2) for y in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*each) for each in parts], 2) + k


@pytest.mark.parametrize(
    "layer",
    [of_crossed_windows, of_a_window_and_all, of_turned_values, of_windows_that_others_read],
)
def test_windows_whose_columns_others_know_keep_them(layer: Callable[..., Tensor]) -> None:
    graph, args = prepared(layer, X.float())
    found = ops(check(fuse_rotary, graph, args))
    assert found["linear"] == 3 and "swap_pairs" not in found


def of_items(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each item of the batch turns by its own angles."""
    own = torch.arange(1.0, x.shape[0] + 1).reshape(-1, 1, 1, 1)
    return halves(x, cos * own, sin * own)


@pytest.mark.parametrize(("turn", "turns"), [(halves, True), (of_items, False)])
@pytest.mark.parametrize("layer", [of_three_linears, of_one_linear, ahead_of_heads])
def test_of_a_large_batch_one_item_tells_all(
    turn: Turn, turns: bool, layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its items differ: then only as many elements are looked at as may be."""
    graph, args = prepared(layer(turn), X.float())
    assert ops(check(fuse_rotary, graph, args)) == TURNED
    module = sys.modules[fuse_rotary.__module__]
    monkeypatch.setattr(module, "MAX_ELEMENTS", TOKENS * CHANNELS)
    found = check(fuse_rotary, graph, args)
    assert ops(found) == TURNED if turns else found.nodes == graph.nodes


def test_layers_are_alike_only_if_they_turn_by_the_same_angles() -> None:
    """The second layer turns the other way, and the third as the first does."""

    def thrice(c: nn.Module, x: Tensor) -> Tensor:
        for cos, sin in ((c.cos, c.sin), (c.sin, c.cos), (c.cos, c.sin)):
            q, k, v = (split(F.linear(x, weight)) for weight in (c.q, c.k, c.v))
            q, k = halves(q, cos, sin), halves(k, cos, sin)
            x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x

    graph, args = prepared(thrice, X.float())
    found = ops(check(fuse_rotary, graph, args))
    assert found == {name: 3 * count for name, count in TURNED.items()}


def test_layers_that_rotate_alike_read_the_same_constants() -> None:
    def twice(c: nn.Module, x: Tensor) -> Tensor:
        y = of_three_linears(halves)(c, x).transpose(1, 2).flatten(2)
        return of_one_linear(halves)(c, y)

    graph, args = prepared(twice, X.float())
    result = check(fuse_rotary, graph, args)
    assert {node.inputs[2:] for node in result.nodes if node.op == "rotate"} == {
        ("rotary_cos", "rotary_sin")
    }


def test_what_does_not_turn_is_not_touched_by_its_partner() -> None:
    """A class token beside an infinity, and values: 0 times infinity would be NaN."""
    graph, (x,) = prepared(of_one_linear(behind_a_class_token), X.float())
    weight = torch.zeros_like(graph.constants["qkv"])
    weight[2 * CHANNELS, 0] = 3e38  # one column of the values
    constants = {**graph.constants, "qkv": weight}
    graph = Graph(graph.inputs, constants, graph.nodes, graph.outputs)
    x = x.abs() * 100
    before, after = interpret(graph, (x,))[0], interpret(fuse_rotary(graph), (x,))[0]
    assert before.isinf().any() and not before.isnan().any()
    assert torch.equal(before, after)


def test_cross_attention_keeps_its_linears() -> None:
    def attend(c: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = split(F.linear(x, c.q)), split(F.linear(y, c.k)), split(F.linear(y, c.v))
        return F.scaled_dot_product_attention(halves(q, c.cos, c.sin), halves(k, c.cos, c.sin), v)

    graph, args = prepared(attend, X.float(), X.flip(0).float())
    found = ops(check(fuse_rotary, graph, args))
    assert found == {"linear": 3, "swap_pairs": 2, "rotate": 2, "attention": 1}


@pytest.mark.parametrize("turn", [halves, neighbours, some_columns, two_axes])
def test_a_norm_of_heads_lies_between_a_linear_and_its_rotation(turn: Turn) -> None:
    def attend(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (split(F.linear(x, w)) for w in (c.q, c.k, c.v))
        q, k = (F.layer_norm(y, (WIDTH,), c.n) for y in (q, k))
        return F.scaled_dot_product_attention(turn(q, c.cos, c.sin), turn(k, c.cos, c.sin), v)

    graph, args = prepared(attend, X.float())
    found = ops(check(fuse_rotary, graph, args))
    assert found == {"linear": 3, "layer_norm": 2, "swap_pairs": 2, "rotate": 2, "attention": 1}


def spelled_out(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma's norm by the root mean square."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def of_clamped_linears(turn: Turn, c: nn.Module, x: Tensor) -> Tensor:
    """Gemma 4's: linears that clamp what they make, heads normed ahead of their transposition."""
    q, k, v = (F.linear(x, w).clamp(-2, 2) for w in (c.q, c.k, c.v))
    q, k, v = (y.unflatten(-1, (HEADS, WIDTH)) for y in (q, k, v))
    q, k, v = spelled_out(q, c.n), spelled_out(k, c.n + 1), spelled_out(v, c.n)
    q, k = (turn(y, c.cos[:, None], c.sin[:, None]) for y in (q, k))
    return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))


def of_normed_parts(turn: Turn, c: nn.Module, x: Tensor) -> Tensor:
    """One linear makes queries, keys and values."""
    y = F.linear(x, c.qkv).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
    q, k, v = y.unbind(0)
    q, k = spelled_out(q, c.n), spelled_out(k, c.n)
    return F.scaled_dot_product_attention(turn(q, c.cos, c.sin), turn(k, c.cos, c.sin), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("turn", [halves, two_axes])
@pytest.mark.parametrize("layer", [of_clamped_linears, of_normed_parts])
def test_norms_that_are_spelled_out_rotate_what_they_give(
    layer: Callable[..., Tensor], turn: Turn, dtype: torch.dtype
) -> None:
    graph, args = prepared(partial(layer, turn), X.to(dtype))
    result = fuse_rotary(graph)
    found = ops(result)
    assert found["linear"] == 3 and found["rotate"] == found["swap_pairs"] == 2
    assert "concat" not in found and "neg" not in found
    (exact,) = interpret(graph, args, dtype=torch.float64)
    (got,) = interpret(result, args, dtype=torch.float64)
    torch.testing.assert_close(got, exact, rtol=2e-6, atol=2e-6)
    if dtype == torch.float32:
        check(run_pipeline, graph, args)


def of_scaled_heads(c: nn.Module, x: Tensor) -> Tensor:
    """Each head has scales of its own between two norms."""
    q, k, v = (split(F.linear(x, w)) for w in (c.q, c.k, c.v))
    scales = torch.stack([c.n, c.n + 1])[:, None]
    q, k = (F.layer_norm(y, (WIDTH,)) * scales for y in (q, k))
    q, k = (F.layer_norm(y, (WIDTH,)) for y in (q, k))
    return F.scaled_dot_product_attention(halves(q, c.cos, c.sin), halves(k, c.cos, c.sin), v)


def test_a_norm_whose_weights_differ_by_head_reads_its_partner_from_memory() -> None:
    graph, args = prepared(of_scaled_heads, X.float())
    assert ops(check(fuse_rotary, graph, args))["roll"] == 2


def test_heads_that_others_read_keep_their_columns() -> None:
    def attend(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (split(F.linear(x, w)) for w in (c.q, c.k, c.v))
        q, k = (F.layer_norm(y, (WIDTH,), c.n) for y in (q, k))
        turned = (halves(y, c.cos, c.sin) for y in (q, k))
        return F.scaled_dot_product_attention(*turned, v) + k

    graph, args = prepared(attend, X.float())
    found = ops(check(fuse_rotary, graph, args))
    assert found["roll"] == 2 and "swap_pairs" not in found


def test_a_cast_that_loses_something_stays_ahead_of_the_rotation() -> None:
    def lossy(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return halves(x.half().float(), cos, sin)

    graph, args = prepared(of_three_linears(lossy), X.float())
    result = fuse_rotary(graph)
    assert ops(result)["rotate"] == 2
    (found,), (exact,) = interpret(result, args), interpret(graph, args)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_a_linear_that_others_read_stays() -> None:
    def attend(c: nn.Module, x: Tensor) -> Tensor:
        y = F.linear(x, c.q)
        q, k, v = split(y), split(F.linear(x, c.k)), split(F.linear(x, c.v))
        z = F.scaled_dot_product_attention(halves(q, c.cos, c.sin), halves(k, c.cos, c.sin), v)
        return z.transpose(1, 2).flatten(2) + y

    graph, args = prepared(attend, X.float())
    found = ops(check(fuse_rotary, graph, args))
    assert found["linear"] == 3 and found["roll"] == 2


def test_columns_that_are_neither_halves_nor_neighbours_stay_without_a_linear() -> None:
    def attend(c: nn.Module, x: Tensor) -> Tensor:
        y = split(x)
        return F.scaled_dot_product_attention(some_columns(y, c.cos, c.sin), y, y)

    graph, args = prepared(attend, X.float())
    log = Log()
    assert check(fuse_rotary, graph, args, log).nodes == graph.nodes
    assert "neither neighbours nor halves" in reasons(log)


def three(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each element is a sum of three."""
    return halves(x, cos, sin) + x.roll(1, -1) * sin


def shifted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x, cos, sin) + 1.0


def of_another_row(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat([x[:, :, 1:], x[:, :, :1]], 2) * sin


def of_another_tensor(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, last = x.relu().chunk(2, -1)
    return x * cos + torch.cat([-last, first], -1) * sin


def one_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Who is whose partner goes round in a circle."""
    return x * cos + torch.cat([x[..., 1:], x[..., :1]], -1) * sin


@pytest.mark.parametrize("turn", [three, shifted, of_another_row, of_another_tensor, one_way])
def test_look_alikes_stay_as_they_are(turn: Turn) -> None:
    graph, args = prepared(of_three_linears(turn), X.float())
    assert check(fuse_rotary, graph, args).nodes == graph.nodes


def test_a_slice_of_columns_does_not_move_before_its_pairs() -> None:
    def part(c: nn.Module, x: Tensor) -> Tensor:
        return of_three_linears(halves)(c, x)[..., :3]

    graph, args = prepared(part, X.float())
    check(run_pipeline, graph, args)
