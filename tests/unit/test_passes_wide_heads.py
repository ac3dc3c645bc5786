"""Heads that no kernel holds: attention is spelled out, and its scores stay fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.check import judge
from gtco.compiler import capture_for, plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.cost_model.model import roofline_us
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import run_pipeline, wide_heads
from gtco.passes.canonicalize import canonicalize
from gtco.passes.fusion import fuse
from gtco.passes.rewrite import Log
from gtco.passes.wide_heads import spell_out_wide_heads
from gtco.runtime.module import CompiledModule
from gtco.target import TARGETS
from tests.pass_checks import Function, captured, check, ops, random, reasons

SPELLED_OUT = {"matmul": 2, "mul": 1, "softmax": 1}
attend = F.scaled_dot_product_attention


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(random(*shape, dtype=dtype, seed=seed) for seed in range(3))


def test_a_wide_head_is_spelled_out() -> None:
    graph, args = captured(lambda c, q, k, v: attend(q, k, v), *heads(2, 1, 7, 320))
    assert ops(check(spell_out_wide_heads, canonicalize(graph), args)) == SPELLED_OUT


def test_wide_values_are_enough() -> None:
    q, k, _ = heads(1, 2, 5, 16)
    v = random(1, 2, 5, 264)
    graph, args = captured(lambda c, *args: attend(*args, scale=-0.3), q, k, v)
    assert ops(check(spell_out_wide_heads, canonicalize(graph), args)) == SPELLED_OUT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_stored_as_they_were_computed(dtype: torch.dtype) -> None:
    """Of a query and a key of 100 their product of 3 million is no half float."""
    q, k, v = heads(1, 1, 6, 300, dtype=dtype)
    q, k = q.abs() * 0 + 100, k * 0 + 100
    graph, args = captured(lambda c, *args: attend(*args), q, k, v)
    result = spell_out_wide_heads(canonicalize(graph))
    scores = next(node for node in result.nodes if node.op == "matmul")
    assert scores.outputs[0].dtype == torch.float32
    (out,), (exact,) = interpret(result, args), interpret(graph, args, dtype=torch.float64)
    assert judge(out, attend(q.double(), k.double(), v.double()).to(dtype), exact, dtype).ok


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda c, q, k, v: attend(q, k, v, is_causal=True), "it is masked"),
        (lambda c, q, k, v: attend(q, k, v, q[..., :7] > 0), "it is masked"),
        (lambda c, q, k, v: attend(q, k[:1], v[:1]), "differ in their batch dimensions"),
    ],
)
def test_what_stays(function: Callable[..., Tensor], reason: str) -> None:
    graph, args = captured(function, *heads(2, 1, 7, 320))
    log = Log()
    assert ops(check(spell_out_wide_heads, canonicalize(graph), args, log))["attention"] == 1
    assert reason in reasons(log)


def test_scores_without_bounds_stay_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = captured(lambda c, q, k, v: attend(q, k, v), *heads(2, 1, 7, 320))
    graph = canonicalize(graph)
    for bound, reason in (("MOST_BYTES", "scores take"), ("MAX_COLUMNS", "do not fit one block")):
        with monkeypatch.context() as patch:
            patch.setattr(wide_heads, bound, 6)
            log = Log()
            assert ops(spell_out_wide_heads(graph, log)) == {"attention": 1}
            assert reason in reasons(log)


@pytest.mark.compiler
def test_all_kernels_are_generated_and_right() -> None:
    args = heads(1, 2, 37, 264, dtype=torch.float16)
    options, target = Options(target="host"), TARGETS["sm_90a"]
    whole = capture_for(Function(lambda c, *args: attend(*args)).eval(), args, None, options)
    fused = fuse(run_pipeline(whole.graph), lambda group: roofline_us(group, target))
    plan = plan_with(Knowledge("none"), fused, target, options)
    assert len(plan.launches) == 3 and all(launch.program for launch in plan.launches)
    (exact,) = interpret(whole.graph, args, dtype=torch.float64)
    verdict = judge(CompiledModule(plan, whole)(*args), attend(*args), exact, torch.float16)
    assert verdict.ok, str(verdict)
