"""The attention sketch: derivation, compilation for two architectures, meaning on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gtco.codegen.sketch import Illegal, Schedule
from gtco.codegen.sketches.attention import Attention
from gtco.ir.graph import Group
from gtco.runtime.host import HostError, run_on_host
from gtco.target import TARGETS
from tests import attention_groups as groups
from tests.kernel_checks import compile_for_all, inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]
SMALL = ("epilogue", "bool_mask", "f32_mask", "causal", "causal_tall", "one_query", "one_key",
         "wide", "tf32_epilogue", "tf32_mask", "tf32_causal", "tf32_wide",
         "tf32_narrow", "fp32_epilogue", "fp32_mask", "fp32_causal",
         "fp32_wide")  # fmt: skip
CASES = {**groups.CASES, **groups.NARROW_CASES, **groups.FLOAT_CASES}


@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str) -> None:
    group = CASES[case]()
    assert not list(compile_for_all(lambda target: Attention(group, target)))


@pytest.mark.compiler
@pytest.mark.parametrize("case", SMALL)
def test_is_right_on_the_cpu(case: str) -> None:
    group = CASES[case]()
    values = inputs_of(group)
    for program in sample(Attention(group, H100), 1, seed=2):
        assert not wrong_outputs(program, group, values, run_on_host)


def schedule(
    block_q: int, block_k: int, warps_k: int, stages: int, copy_warps: int = 0
) -> Schedule:
    return {
        "block_q": block_q,
        "block_k": block_k,
        "warps_k": warps_k,
        "stages": stages,
        "copy_warps": copy_warps,
        "tma": 0,
    }


COPYING: dict[str, tuple[Callable[[], Group], Schedule]] = {
    "bool mask": (
        lambda: groups.cross((2, 2), 37, 70, 24, mask=groups.BOOL, mask_lead=(2, 1)),
        schedule(48, 32, 1, 2, 2),
    ),
    "added mask, two parts": (
        lambda: groups.cross((2,), 17, 33, 40, 72, groups.BF16, mask=groups.F32),
        schedule(32, 32, 2, 1, 4),
    ),
    "causal, two parts": (
        lambda: groups.cross((1, 2), 70, 130, 64, causal=True),
        schedule(48, 64, 2, 3, 2),
    ),
    "causal, more queries than keys": (
        lambda: groups.cross((1, 2), 130, 33, 16, causal=True),
        schedule(80, 32, 1, 1, 6),
    ),
    "width 64, an epilogue": (
        lambda: groups.packed(97, 2, 64, epilogue=True),
        schedule(32, 112, 1, 1, 6),
    ),
    "width 80": (lambda: groups.packed(101, 1, 80), schedule(96, 16, 1, 4, 6)),
    "seven parts": (lambda: groups.packed(113, 1, 32), schedule(32, 112, 7, 1, 4)),
    "more threads than chunks": (lambda: groups.cross((3,), 5, 1, 8), schedule(16, 16, 1, 1, 6)),
    "a warp that copies nothing": (
        lambda: groups.cross((3,), 5, 40, 8),
        schedule(16, 16, 1, 2, 2),
    ),
}


@pytest.mark.compiler
@pytest.mark.parametrize("case", COPYING)
def test_warps_that_copy_change_no_bit(case: str) -> None:
    make, copying = COPYING[case]
    group = make()
    values = inputs_of(group)
    sketch = Attention(group, H100)
    program, alone = sketch.emit(copying), sketch.emit({**copying, "copy_warps": 0})
    assert program.block - alone.block == 32 * copying["copy_warps"]
    assert not wrong_outputs(program, group, values, run_on_host)
    expected = run_on_host(alone, group, values)
    for seed in (0, 1):
        found = run_on_host(program, group, values, seed)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_few_warps_have_a_default_with_more_that_copy() -> None:
    defaults = list(Attention(groups.packed(197, 12, 64), H100).defaults())
    assert defaults[:3] == [
        schedule(32, 128, 4, 2),
        schedule(32, 208, 1, 1),
        schedule(32, 208, 1, 1, 6),
    ]
    for each in defaults:
        warps = each["block_q"] // 16 * each["warps_k"]
        assert each["copy_warps"] == 0 or 6 <= warps + each["copy_warps"] <= 8


@pytest.mark.compiler
@pytest.mark.parametrize("kind", (torch.bool, torch.float16, torch.float32))
def test_rows_without_a_key_are_zeros_as_in_torch(kind: torch.dtype) -> None:
    group, values = groups.masked(kind)
    for warps_k in (1, 4):
        program = Attention(group, H100).emit(schedule(16, 64, warps_k, 2))
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_the_host_build_rejects_a_missing_wait() -> None:
    """Copies arrive as late as the waits allow: what nobody waited for is not there."""
    group = groups.cross((1,), 16, 100, 16)
    values = inputs_of(group)
    program = Attention(group, H100).emit(schedule(16, 32, 1, 2))
    assert not wrong_outputs(program, group, values, run_on_host)
    lax = "#define cp_async_wait cp_async_wait_never\n"
    never = "namespace gtco::ptx { template <int> void cp_async_wait_never() {} }\n"
    wrong = dataclasses.replace(
        program, source=f'#include "epilogue.cuh"\n{never}{lax}{program.source}'
    )
    with pytest.raises(HostError, match="an asynchronous copy that is under way"):
        run_on_host(wrong, group, values)


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = Attention(groups.packed(197, 12, 64), H100)
    golden("attention_vit.cu", sketch.emit(next(iter(sketch.defaults()))).source)


@pytest.mark.parametrize("case", CASES)
def test_every_shape_has_a_default_on_every_target(case: str) -> None:
    for target in TARGETS.values():
        assert next(iter(Attention(CASES[case](), target).defaults()))


def test_refusals() -> None:
    for group, reason in (
        (groups.cross((1,), 16, 16, 64, dtype=torch.float64), "no tensor core multiplies"),
        (groups.cross((1,), 16, 16, 15), "no multiple of 4 bytes"),
        (groups.cross((1,), 16, 16, 256), "at most 192"),
        (groups.cross((1,), 16, 16, 192, dtype=torch.float32), "192 elements leave no registers"),
    ):
        with pytest.raises(Illegal, match=reason):
            Attention(group, H100)


def test_says_which_limit_broke() -> None:
    sketch = Attention(groups.cross((1,), 512, 512, 128), TARGETS["sm_86"])
    with pytest.raises(Illegal, match="shared memory"):
        sketch.emit(schedule(64, 128, 2, 2))
    with pytest.raises(Illegal, match="registers"):
        sketch.emit(schedule(128, 128, 4, 1))
    with pytest.raises(Illegal, match="1088 threads, a block has at most 1024"):
        sketch.emit(schedule(64, 128, 8, 1, 2))
