"""Programs in numbers: the numbers are right, documented, and order programs as devices do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gtco.codegen.rules import SKETCHES, derive
from gtco.codegen.sampler import Candidate, Sampler
from gtco.cost_model.features import FAMILIES, FEATURES, KNOBS, features
from gtco.cost_model.model import draft_us, resident_blocks
from gtco.cost_model.work import Work, work_of
from gtco.graph import Group
from gtco.passes.legality import family
from gtco.target import TARGETS
from tests import attention_groups, groups, tile_groups

H100 = TARGETS["sm_90a"]
F16 = torch.float16

EXPRESSED = {"block_p", "block_q", "block_m", "block_n", "stages", "split", "threads"}
"""Knobs that tile_p, tile_q and other features express."""


def sampler(group: Group) -> Sampler:
    return Sampler(derive(group, family(group), H100).sketches, 0)


def made(group: Group, sketch: str, **schedule: int) -> Candidate:
    found = sampler(group).adopt(sketch, schedule)
    assert found is not None and dict(found.program.schedule) == schedule
    return found


PROJECTION = {
    "swap": 1,
    "block_p": 64,
    "block_q": 32,
    "stages": 8,
    "split": 1,
    "multicast": 1,
    "early_trigger": 0,
    "prefetch": 0,
}


FOUR = (
    groups.residual_linear(197, 768, 768, F16),
    tile_groups.gelu_bias(197, 768),
    tile_groups.softmax(64, 200),
    attention_groups.packed(197, 12, 64),
)
"""A group of each family."""


@pytest.fixture(scope="module")
def projection() -> Candidate:
    return made(groups.residual_linear(197, 768, 768, F16), "gemm_wgmma", **PROJECTION)


def test_the_numbers_of_a_projection(projection: Candidate) -> None:
    work = work_of(projection)
    group, block = work.group, work.block
    assert group.matmul_flops == 2 * 197 * 768 * 768
    assert group.weight_bytes == 768 * 768 * 2 + 768 * 2
    assert group.read_bytes == 2 * 197 * 768 * 2
    assert group.written_bytes == 197 * 768 * 2 + 197 * 12 * 2 * 4
    assert group.half == 1
    assert (work.blocks, work.threads, work.cluster) == (12 * 7, 256, 1)
    assert work.smem_bytes == projection.program.smem_bytes
    assert (block.steps, block.stages, block.split) == (12, 8, 1)
    assert block.fill_bytes == block.l2_bytes == 12 * (64 + 32) * 128
    assert block.mma_flops == 2 * 64 * 32 * 768
    assert (block.tile_p, block.tile_q) == (64, 32)


def test_numbers_survive_a_record(projection: Candidate) -> None:
    work = work_of(projection)
    assert Work.of_numbers(work.sketch, work.schedule, work.numbers()) == work
    with pytest.raises(KeyError, match="fill_bytes"):
        numbers = {k: v for k, v in work.numbers().items() if k != "fill_bytes"}
        Work.of_numbers(work.sketch, work.schedule, numbers)


def test_every_feature_is_documented_and_finite_where_it_applies() -> None:
    for group in FOUR:
        for candidate in sampler(group).random(10):
            found = features(work_of(candidate), H100)
            assert list(found) == list(FEATURES)
            missing = {name for name, value in found.items() if not math.isfinite(value)}
            assert missing == {
                f"knob_{name}" for name in KNOBS if name not in candidate.program.schedule
            }
    assert all(FEATURES.values())


def test_every_knob_and_sketch_is_a_feature() -> None:
    """A new knob must join KNOBS (and FEATURES_VERSION move), or be expressed by another."""
    assert {kind.name for kind in SKETCHES} == set(FAMILIES)
    names = {knob.name for g in FOUR for sketch in sampler(g).sketches for knob in sketch.knobs()}
    assert names - EXPRESSED == set(KNOBS)


def test_a_changed_number_changes_its_features(projection: Candidate) -> None:
    work = work_of(projection)
    more = replace(work, blocks=2 * work.blocks)
    before, after = features(work, H100), features(more, H100)
    for name in ("blocks", "waves", "l2_us", "mma_us", "chip"):
        assert after[name] > before[name], name
    assert after["smem_bytes"] == before["smem_bytes"]


def test_residency_is_the_tightest_limit(projection: Candidate) -> None:
    work = work_of(projection)
    assert resident_blocks(replace(work, smem_bytes=100 * 1024), H100) == 2
    assert resident_blocks(replace(work, smem_bytes=227 * 1024), H100) == 1
    small = replace(work, smem_bytes=0, block=replace(work.block, registers=32))
    assert resident_blocks(small, H100) == 8
    assert resident_blocks(replace(small, threads=32), H100) == 32
    assert resident_blocks(replace(small, threads=1024), H100) == 2


# Measured best schedules of experiments/notes/01-gemm_wgmma.md, microseconds.
MEASURED = {
    "qkv": ((64, 72, 5, 1), 5.56),
    "projection": ((64, 32, 8, 1), 3.65),
    "fc1": ((64, 104, 4, 1), 6.89),
    "fc2": ((64, 104, 8, 4), 7.56),
}


@pytest.mark.parametrize("case", MEASURED)
def test_the_draft_is_near_what_was_measured(case: str) -> None:
    (p, q, stages, split), us = MEASURED[case]
    sizes = {"block_p": p, "block_q": q, "stages": stages, "split": split}
    candidate = made(groups.GEMM_CASES[case](), "gemm_wgmma", **{**PROJECTION, **sizes})
    assert draft_us(work_of(candidate), H100) == pytest.approx(us, rel=0.25)


def test_the_draft_orders_obvious_pairs(projection: Candidate) -> None:
    work = work_of(projection)
    best = draft_us(work, H100)
    block = work.block
    for worse in (
        replace(work, blocks=8 * work.blocks),
        replace(work, block=replace(block, fill_bytes=4 * block.fill_bytes)),
        replace(work, block=replace(block, stages=2)),
        replace(work, block=replace(block, mma_flops=20 * block.mma_flops)),
        replace(work, group=replace(work.group, weight_bytes=10**8)),
        replace(work, group=replace(work.group, pointwise_flops=10**8)),
    ):
        assert draft_us(worse, H100) > 1.05 * best
