"""Attention with its projection: refusals, limits, registers, and its meaning on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gtco.codegen.sketch import Illegal, Schedule
from gtco.codegen.sketches.attention_projection import AttentionProjection
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests import attention_groups
from tests import projection_groups as groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]
F16, F32 = torch.float16, torch.float32


@pytest.mark.compiler
@pytest.mark.parametrize("case", groups.SMALL)
def test_is_right_on_the_cpu(case: str) -> None:
    group = groups.SMALL[case]()
    values = inputs_of(group)
    for program in sample(AttentionProjection(group, H100), 1, seed=2):
        assert not wrong_outputs(program, group, values, run_on_host)


MMA: dict[str, Schedule] = {
    "one part": {"block_q": 16, "block_k": 48, "warps_k": 1, "stages": 1},
    "a ring": {"block_q": 16, "block_k": 16, "warps_k": 1, "stages": 2},
    "columns shared": {"block_q": 32, "block_k": 32, "warps_k": 2, "stages": 2},
    "seven parts of K": {"block_q": 16, "block_k": 112, "warps_k": 7, "stages": 1},
    "parts beside the own result": {"block_q": 32, "block_k": 64, "warps_k": 4, "stages": 1},
    "rows shared": {"block_q": 64, "block_k": 32, "warps_k": 2, "stages": 1},
    "three tiles of rows": {"block_q": 48, "block_k": 32, "warps_k": 2, "stages": 2},
    "rows in threes": {"block_q": 96, "block_k": 32, "warps_k": 1, "stages": 1},
}
WGMMA: dict[str, Schedule] = {
    "a warpgroup for two tiles": {"block_q": 16, "block_k": 64, "warps_k": 4, "stages": 1},
    "a warpgroup a tile": {"block_q": 32, "block_k": 64, "warps_k": 4, "stages": 1},
    "half a warpgroup idle": {"block_q": 32, "block_k": 112, "warps_k": 7, "stages": 1},
    "one tile for each of two": {"block_q": 64, "block_k": 32, "warps_k": 2, "stages": 1},
    "five tiles of queries": {"block_q": 80, "block_k": 32, "warps_k": 1, "stages": 1},
}


def check_twice(group: Group, schedule: Schedule, wgmma: bool) -> None:
    """Right, with the same bits whatever the order of threads."""
    values = inputs_of(group, seed=4)
    program = AttentionProjection(group, H100).emit(schedule)
    assert ("WGMMA = true" in program.source) == wgmma
    assert not wrong_outputs(program, group, values, run_on_host)
    first, again = (run_on_host(program, group, values, seed) for seed in (0, 1))
    assert all(torch.equal(tensor, again[value]) for value, tensor in first.items())


@pytest.mark.compiler
@pytest.mark.parametrize("name", MMA)
def test_every_way_to_share_the_work_on_mma_sync(name: str) -> None:
    check_twice(groups.projected(2, 41, 32, 128, residual=True, stats=True), MMA[name], False)


@pytest.mark.compiler
@pytest.mark.parametrize("name", WGMMA)
def test_every_way_to_share_the_work_on_wgmma(name: str) -> None:
    check_twice(groups.projected(2, 41, 64, 256, residual=True, stats=True), WGMMA[name], True)


@pytest.mark.compiler
def test_values_with_a_large_mean() -> None:
    group = groups.SMALL["four_heads"]()
    values = inputs_of(group)
    values["qkv"] = (values["qkv"].float() + 20.0).half()
    values["qkv"][..., -1] *= 20.0
    program = sample(AttentionProjection(group, H100), 0)[0]
    assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_rows_without_a_key_project_zeros() -> None:
    group = groups.projected(2, 19, 16, 32, mask=torch.bool)
    values = inputs_of(group)
    values["mask"] = torch.rand(19, 19, generator=torch.Generator().manual_seed(0)) < 0.5
    values["mask"][3] = False
    program = sample(AttentionProjection(group, H100), 0)[0]
    assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize("case", groups.LARGE)
def test_compiles_without_spills(case: str) -> None:
    sketch = AttentionProjection(groups.LARGE[case](), H100)
    for program in sample(sketch, 2):
        compiled = compile_uncached(program.code, program.name, program.arch)
        print(dict(program.schedule), f"{compiled.registers} registers, {program.smem_bytes} B")
        assert compiled.spill_bytes <= (0 if case.startswith("vit") else 64)
        assert "serialized" not in compiled.log
        assert compiled.registers <= 65536 // program.block


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = AttentionProjection(groups.LARGE["vit_b"](), H100)
    golden("attention_projection_vit.cu", sketch.emit(next(iter(sketch.defaults()))).source)


def twice_read() -> Group:
    graph = groups.projected(2, 16, 16, 32).graph
    (attention,) = (node.name for node in graph.nodes if node.op == "attention")
    return Group("twice_read", replace(graph, outputs=(*graph.outputs, attention)))


def heads_last() -> Group:
    """The columns are (column of the head, head)."""
    b = GraphBuilder()
    q, k, v = (b.input(name, TensorSpec((1, 2, 16, 16), F16)) for name in "qkv")
    y = b.add("permute", b.add("attention", q, k, v, scale=0.25), dims=(0, 2, 3, 1))
    w = b.constant("w", torch.zeros(32, 32, dtype=F16))
    y = b.add("linear", b.add("reshape", y, shape=(1, 16, 32)), w)
    return Group("heads_last", b.build([y]))


def second_linear() -> Group:
    """A linear that reads something else."""
    b = GraphBuilder()
    q, k, v = (b.input(name, TensorSpec((1, 2, 16, 16), F16)) for name in "qkv")
    x = b.input("x", TensorSpec((1, 16, 32), F16))
    y = b.add("attention", q, k, v, scale=0.25)
    w = b.constant("w", torch.zeros(32, 32, dtype=F16))
    return Group("second_linear", b.build([y, b.add("linear", x, w)]))


REFUSALS = {
    "is read by others than the projection": twice_read,
    "reads no %attention": second_linear,
    "reads the heads of %attention in another order": heads_last,
    "no linear projects the result": lambda: attention_groups.packed(16, 2, 16),
    "17 heads of a batch item": lambda: groups.projected(17, 16, 16, 272),
    "1 heads of a batch item": lambda: groups.projected(1, 16, 16, 16),
    "no multiple of 16 for each of 3 heads": lambda: groups.projected(3, 16, 16, 64),
    "a head of 24 columns": lambda: groups.projected(2, 16, 24, 32),
    "cut the chunks of the row statistics": lambda: groups.projected(2, 16, 16, 64, stats=True),
    "shared memory": lambda: groups.projected(16, 257, 80, 1280),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refuses_with_a_sentence(reason: str) -> None:
    group = REFUSALS[reason]()
    with pytest.raises(Illegal, match=reason):
        AttentionProjection(group, H100)


def test_needs_clusters() -> None:
    with pytest.raises(Illegal, match="sm_80 has no clusters"):
        AttentionProjection(groups.SMALL["two_heads"](), TARGETS["sm_80"])


def test_says_which_limit_broke() -> None:
    sketch = AttentionProjection(groups.LARGE["vit_l"](), H100)
    with pytest.raises(Illegal, match="shared memory"):
        sketch.emit({"block_q": 32, "block_k": 224, "warps_k": 7, "stages": 1})
    with pytest.raises(Illegal, match="registers"):
        sketch.emit({"block_q": 128, "block_k": 128, "warps_k": 4, "stages": 1})
