"""Synthetic measured pools: the draft model's time, bent in ways that it ignores, with noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from gtco.codegen.rules import derive
from gtco.codegen.sampler import Sampler
from gtco.cost_model.model import draft_us
from gtco.cost_model.pool import Entry, PoolTask
from gtco.cost_model.work import Work, work_of
from gtco.ir.graph import Group
from gtco.passes.legality import family
from gtco.passes.tasks import workload_key
from gtco.target import TARGETS
from tests import models
from tests.groups import GEMM_CASES

H100 = TARGETS["sm_90a"]
DEVICE = "synthetic"
CASES = (("a", "qkv"), ("a", "projection"), ("b", "fc1"), ("b", "fc2"))


def device_us(work: Work, noise: random.Random) -> float | None:
    """What the imaginary device says: swapped, even tiles and small clusters are faster."""
    if work.block.stages == 2 and work.cluster > 1:
        return None
    bent = 1 + 0.5 * (1 - work.schedule.get("swap", 0))
    bent *= 1 + 0.3 * (work.block.tile_q % 64 > 0) + 0.2 * (work.cluster > 2)
    bent *= 1.05 if work.sketch == "gemm_mma" else 1
    return draft_us(work, H100) * bent * math.exp(noise.gauss(0, 0.01))


def synthetic_task(model: str, name: str, group: Group, count: int) -> PoolTask:
    """`count` programs of `group`, eight defaults among them."""
    sampler = Sampler(derive(group, family(group), H100).sketches, seed=1)
    noise = random.Random(2)
    defaults = sampler.defaults(8)
    programs = {each.key: each for each in [*defaults, *sampler.random(count)]}
    entries = []
    for each in list(programs.values())[:count]:
        work = work_of(each)
        run_us = device_us(work, noise)
        error = "" if run_us else "wrong answer"
        entries.append(Entry(work, run_us, error, each in defaults))
    return PoolTask(
        name, model, H100.arch, DEVICE, "chain", workload_key(group, H100), 12, 9.0, tuple(entries)
    )


@cache
def synthetic_pool(count: int = 300) -> tuple[PoolTask, ...]:
    """Two models of two GEMMs each."""
    cases: dict[str, Callable[[], Group]] = GEMM_CASES
    return tuple(
        synthetic_task(model, f"{model}-{case}", cases[case](), count) for model, case in CASES
    )


def tiny() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One small linear layer and its input."""
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU()).half().eval()
    return model, (torch.randn(1, 40, 128).half(),)


def tiny_vit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A layer of two heads of 64, and the class token's."""
    torch.manual_seed(0)
    model = models.vit(image=16, patch=4, width=128, depth=2, heads=2).half()
    return model, (torch.randn(1, 3, 16, 16).half(),)
