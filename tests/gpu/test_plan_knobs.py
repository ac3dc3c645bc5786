"""Knobs of a plan: what they change is time, and no bit of an answer."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from gtco.cli.demo import VisionTransformer, randomize
from gtco.compiler import capture_for, fuse_known, plan_of
from gtco.cost_model.knowledge import known_on
from gtco.options import Options
from gtco.passes import run_pipeline
from gtco.runtime.device import resolve_device
from gtco.runtime.module import CompiledModule
from gtco.runtime.plan import PlanKnobs
from gtco.selection import select

pytestmark = pytest.mark.gpu


def test_dependent_launch_and_the_knobs_change_no_bit() -> None:
    device, options = resolve_device(None), Options()
    target = device.target
    model = VisionTransformer(patch=16, width=192, depth=3, heads=3)
    randomize(model, seed=0)
    model = model.eval().cuda().half()
    image = torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.float16)
    captured = capture_for(model, (image,), None, options)
    known = known_on(device)
    fused = fuse_known(known, run_pipeline(captured.graph), target)
    launches = select(fused, target, known)
    settings = [PlanKnobs(*each) for each in itertools.product((0, 1, 2), (0, 1), (0, 1))]
    plans = [plan_of(fused, launches, target, options, knobs) for knobs in settings]
    plans.append(replace(plans[-1], dependent_launch=False))
    modules = [CompiledModule(plan, captured) for plan in plans]
    for _ in range(3):
        fresh = torch.randn_like(image)
        first, *others = [module(fresh) for module in modules]
        assert all(torch.equal(first, other) for other in others)
