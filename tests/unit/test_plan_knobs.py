"""Knobs of the plan that change no answer: when the kernel behind a GEMM may begin, and how many
blocks a multiprocessor takes."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import derive
from gtco.compiler import capture_for, fuse, plan_with
from gtco.cost_model.knowledge import Knowledge
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.passes.legality import family
from gtco.runtime.module import CompiledModule
from gtco.runtime.nvrtc import compile_uncached
from gtco.runtime.plan import PlanError, PlanKnobs
from gtco.target import HOST, TARGETS
from tests import groups, models

H100 = TARGETS["sm_90a"]
SETTINGS = (PlanKnobs(0, 0), PlanKnobs(0, 1), PlanKnobs(0, 0, 1))


def modules(target: str) -> tuple[CompiledModule, ...]:
    """A small ViT with early triggers, with late ones, and with its blocks spread."""
    torch.manual_seed(0)
    model = models.vit(image=16, patch=4, width=64, depth=1, heads=2).half()
    options = Options(target=target)
    captured = capture_for(model, (torch.randn(1, 3, 16, 16).half(),), None, options)
    fused = fuse(run_pipeline(captured.graph), target=H100)
    plans = (plan_with(Knowledge("none"), fused, H100, options, each) for each in SETTINGS)
    return tuple(CompiledModule(plan, captured) for plan in plans)


def test_wgmma_gemms_trigger_late_and_nothing_else_does() -> None:
    early, late, _ = (module._plan for module in modules("sm_90a"))
    sketches = set()
    for before, after in zip(early.launches, late.launches, strict=True):
        program = before.program
        assert program is not None
        wgmma = program.sketch == "gemm_wgmma"
        assert after.program == (replace(program, late_trigger=True) if wgmma else program)
        sketches.add(program.sketch)
    assert sketches >= {"gemm_wgmma", "attention_wgmma", "elementwise"}


def test_blocks_that_are_spread_find_no_room_beside_their_kind() -> None:
    early, _, spread = (module._plan for module in modules("sm_90a"))
    for before, after in zip(early.launches, spread.launches, strict=True):
        program, made = before.program, after.program
        assert program is not None and made is not None and math.prod(program.grid) <= 132
        assert 2 * (made.smem_bytes + 1024) > H100.smem_per_sm
        assert made == replace(program, smem_bytes=made.smem_bytes)
    few = replace(H100, sm_count=1)
    one_each = PlanKnobs(0, 0, 1).apply(early.launches, few)
    for before, after in zip(early.launches, one_each, strict=True):
        assert before.program is not None
        assert (after == before) == (math.prod(before.program.grid) > 1)


def test_knobs_of_a_record() -> None:
    assert PlanKnobs.of({}) == PlanKnobs()
    assert PlanKnobs.of({"fetch_distance": 1}) == replace(PlanKnobs(), fetch_distance=1)
    assert PlanKnobs.of({"late_trigger": 0, "of a later version": 3}) == PlanKnobs(late_trigger=0)


@pytest.mark.parametrize("value", (-1, 3, 1000, True, 1.0, "1", None))
@pytest.mark.parametrize("name", PlanKnobs.CHOICES)
def test_values_that_no_knob_has(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"no value of the plan's knob {name} \\(of 0, 1"):
        PlanKnobs.of({name: value})


def test_every_knob_has_its_choices() -> None:
    assert set(PlanKnobs.CHOICES) == {field.name for field in fields(PlanKnobs)}


@pytest.mark.compiler
def test_the_answer_is_the_same_to_the_bit() -> None:
    early, late, spread = modules(HOST)
    image = torch.randn(1, 3, 16, 16).half()
    assert torch.equal(early(image), late(image))
    assert torch.equal(early(image), spread(image))


def test_a_late_trigger_is_another_kernel() -> None:
    group = groups.plain_linear(37, 128, 72, torch.float16)
    sketch = derive(group, family(group), H100).sketches[0]
    assert sketch.name == "gemm_wgmma"
    program = sketch.emit(next(iter(sketch.defaults())))
    early = replace(program, source=f"#define AN_EARLY_ONE\n{program.source}")  # the same lines
    assert cubin(early) == cubin(replace(early, source=f"#define NOT_IT\n{program.source}"))
    assert cubin(early) != cubin(replace(program, late_trigger=True))


def cubin(program: KernelProgram) -> bytes:
    code = program.text.replace("ENTRY_POINT", "kernel")
    return compile_uncached(code, "kernel", program.arch).cubin
