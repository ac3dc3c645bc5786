"""Attention that no kernel takes is expanded, and its scores stay fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gtco
from gtco.check import judge
from gtco.compiler import capture_for, plan_captured
from gtco.ir.graph import Graph, Group
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import expand_attention as expansion
from gtco.passes.canonicalize import canonicalize
from gtco.passes.expand_attention import expand_attention
from gtco.passes.rewrite import Log
from gtco.runtime.module import CompiledModule
from gtco.selection import refusal
from gtco.target import TARGETS
from tests.pass_checks import Function, captured, check, ops, random, reasons

EXPANDED = {"matmul": 2, "mul": 1, "softmax": 1}
GUARDED = {"amax": 1, "eq": 1, "where": 1}
"""What a mask that may forbid a query every key asks for besides."""
HALVES = (torch.float16, torch.bfloat16)
TAKES = partial(refusal, target=TARGETS["sm_90a"])
attend = F.scaled_dot_product_attention


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(random(*shape, dtype=dtype, seed=seed) for seed in range(3))


def no_attention(group: Group) -> str | None:
    return "no attention" if any(node.op == "attention" for node in group.nodes) else None


def expanded(graph: Graph, log: Log | None = None) -> Graph:
    return expand_attention(graph, log, refusal=no_attention)


def sees(queries: int, keys: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A mask by which the fourth query sees no key; of floats it adds something too."""
    seen = random(queries, keys, seed=7) > -0.5
    seen[3] = False
    return seen if dtype == torch.bool else torch.where(seen, random(queries, keys), -math.inf)


MASKS = {
    "seen": sees(7, 7),
    "added": sees(7, 7, torch.float64),
    "late": torch.arange(7)[None] > 2,
}
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, int]]] = {
    "heads of 320": (lambda c, *args: attend(*args), heads(2, 1, 7, 320), {}),
    "values wider than keys": (
        lambda c, q, k, v: attend(q, k, v[..., :9], scale=-0.3), heads(1, 2, 5, 16), {},
    ),
    "no dimension of heads": (lambda c, *args: attend(*args), heads(7, 49), {}),
    "channels that attend to channels": (
        lambda c, *args: attend(*(x.mT for x in args)), heads(2, 49, 12), {},
    ),
    "causal, fewer keys than queries": (
        lambda c, q, k, v: attend(q, k[:, :, :4], v[:, :, :4], is_causal=True),
        heads(1, 2, 6, 9), {"where": 1},
    ),
    "one image's keys for all": (lambda c, q, k, v: attend(q, k[:1], v[:1]), heads(3, 2, 5, 9), {}),
    "a mask of bools": (
        lambda c, q, k, v: attend(q, k, v, q[..., :7] > 0.5), heads(2, 1, 7, 11),
        {**GUARDED, "gt": 1, "where": 2},
    ),
    "a known mask of bools": (
        lambda c, *args: attend(*args, c.seen), heads(2, 1, 7, 11), {**GUARDED, "where": 2},
    ),
    "a mask of the keys": (
        lambda c, *args: attend(*args, c.late), heads(2, 1, 7, 11), {"where": 1},
    ),
    "a mask of numbers": (
        lambda c, q, k, v: attend(q, k, v, q[..., :7]), heads(2, 1, 7, 11), {**GUARDED, "add": 1},
    ),
    "a known mask of numbers": (
        lambda c, *args: attend(*args, c.added), heads(2, 1, 7, 11),
        {**GUARDED, "add": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_means_the_same(name: str) -> None:
    function, args, more = CASES[name]
    graph, args = captured(function, *args, **MASKS)
    assert ops(check(expanded, canonicalize(graph), args)) == EXPANDED | more


@pytest.mark.parametrize("dtype", HALVES)
def test_scores_are_stored_as_they_were_computed(dtype: torch.dtype) -> None:
    """Of a query and a key of 100 their product of 3 million is no half float."""
    q, k, v = heads(1, 1, 6, 300, dtype=dtype)
    q, k = q.abs() * 0 + 100, k * 0 + 100
    graph, args = captured(lambda c, *args: attend(*args), q, k, v)
    result = expanded(canonicalize(graph))
    scores = next(node for node in result.nodes if node.op == "matmul")
    assert scores.outputs[0].dtype == torch.float32
    (out,), (exact,) = interpret(result, args), interpret(graph, args, dtype=torch.float64)
    assert judge(out, attend(q.double(), k.double(), v.double()).to(dtype), exact, dtype).ok


def test_nan_stays_where_a_mask_may_forbid_all() -> None:
    q, k, v = heads(1, 1, 7, 11)
    q[0, 0, 2, 3] = torch.nan
    graph, args = captured(lambda c, *args: attend(*args, c.seen), q, k, v, **MASKS)
    (out,) = interpret(expanded(graph), args)
    assert out[0, 0, 2].isnan().all() and not out[0, 0, 3].any()


@pytest.mark.parametrize(
    ("width", "dtype", "takes"),
    [
        (64, torch.float16, True),
        (192, torch.float16, True),
        (196, torch.float16, False),
        (256, torch.bfloat16, False),
        (49, torch.float16, False),
        (49, torch.float32, True),  # in runs of 4 bytes
    ],
)
def test_the_sketches_say_what_no_kernel_takes(width: int, dtype: torch.dtype, takes: bool) -> None:
    graph, _ = captured(lambda c, *args: attend(*args), *heads(1, 2, 20, width, dtype=dtype))
    result = expand_attention(graph, refusal=TAKES)
    assert ops(result) == ({"attention": 1} if takes else EXPANDED | {"cast": 1})


def test_what_no_kernel_multiplies_stays() -> None:
    log = Log()
    graph, _ = captured(lambda c, *args: attend(*args), *heads(1, 2, 20, 49))
    assert ops(expand_attention(graph, log, refusal=TAKES)) == {"attention": 1}
    assert "no kernel takes its matmul either" in reasons(log)


def test_many_scores_stay_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = captured(lambda c, q, k, v: attend(q, k, v), *heads(2, 1, 7, 320))
    log = Log()
    monkeypatch.setattr(expansion, "MOST_BYTES", 700)
    assert ops(expanded(graph, log)) == {"attention": 1}
    assert "scores take" in reasons(log)


def test_nothing_to_attend_to_stays() -> None:
    graph, _ = captured(lambda c, q, k, v: attend(q, k[:, :0], v[:, :0]), *heads(2, 7, 320))
    log = Log()
    assert ops(expanded(graph, log)) == {"attention": 1}
    assert "no element" in reasons(log)


def spelled_out(c: Function, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a model writes it, which a pass takes for one first."""
    return (q @ k.mT * 0.3).softmax(-1) @ v


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda c, *args: attend(*args), (1, 2, 37, 264)),
        (spelled_out, (1, 2, 23, 197)),
        (lambda c, *args: attend(*(x.mT for x in args)), (2, 197, 12)),
        (lambda c, *args: attend(*args, is_causal=True), (1, 3, 35, 195)),
        (lambda c, q, k, v: attend(q, k, v, q[..., :19] > 0.9), (1, 2, 19, 197)),
        (lambda c, q, k, v: attend(q, k[:1], v[:1], q[:1, :, :, :19]), (2, 3, 19, 203)),
    ],
)
def test_all_kernels_are_generated_and_right(
    function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    args, options = heads(*shape, dtype=dtype), Options(target="host")
    whole = capture_for(Function(function).eval(), args, None, options)
    plan = plan_captured(whole, options)
    assert len(plan.launches) <= 4 and all(launch.program for launch in plan.launches)
    assert not any(launch.family == "attention" for launch in plan.launches)
    (exact,) = interpret(whole.graph, args, dtype=torch.float64)
    verdict = judge(CompiledModule(plan, whole)(*args), function(None, *args), exact, dtype)
    assert verdict.ok, str(verdict)


def test_fusing_by_hand_expands_too() -> None:
    args = heads(1, 1, 16, 200, dtype=torch.float16)
    fused = gtco.fuse(gtco.capture(Function(lambda c, *args: attend(*args)).eval(), args))
    assert "attention" not in ops(fused.graph)
