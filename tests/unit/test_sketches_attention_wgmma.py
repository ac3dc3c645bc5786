"""Attention on wgmma: derivation, compilation, meaning on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal, Schedule
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.ir.graph import Group
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.selection import first_choice
from gtco.target import TARGETS
from tests import attention_groups as groups
from tests.kernel_checks import inputs_of, sample, wrong_outputs

H100 = TARGETS["sm_90a"]


def schedule(
    block_q: int, block_k: int, parts: int, stages: int, split: int = 1, rest: int = 0
) -> Schedule:
    knobs = {"block_q": block_q, "block_k": block_k, "parts": parts, "stages": stages}
    return {**knobs, "split": split, "rest": rest}


CASES: dict[str, tuple[Callable[[], Group], Schedule]] = {
    "heads of 80, a tile of two boxes": (
        lambda: groups.packed(257, 1, 80),
        schedule(64, 272, 1, 1),
    ),
    "heads of 128 and 96": (
        lambda: groups.cross((1, 2), 65, 129, 128, 96),
        schedule(128, 48, 1, 2),
    ),
    "heads of 8 and 72": (lambda: groups.cross((3,), 5, 40, 8, 72), schedule(64, 48, 1, 1)),
    "an epilogue, two items": (
        lambda: groups.packed(97, 2, 64, epilogue=True, batch=2),
        schedule(64, 64, 2, 2),
    ),
    "a part without a key": (lambda: groups.cross((2,), 9, 40, 16), schedule(64, 96, 2, 1)),
    "a ring of three, causal": (
        lambda: groups.cross((1, 2), 130, 200, 64, causal=True),
        schedule(128, 32, 2, 3),
    ),
    "a ring of wide tiles": (lambda: groups.cross((1,), 70, 600, 64), schedule(128, 288, 1, 2)),
    "bool mask": (
        lambda: groups.cross((2, 2), 37, 70, 24, mask=groups.BOOL, mask_lead=(2, 1)),
        schedule(64, 32, 2, 2),
    ),
    "four blocks with a tile each": (lambda: groups.packed(150, 1, 64), schedule(64, 48, 1, 1, 4)),
    "two blocks with rings, in parts; an epilogue": (
        lambda: groups.packed(97, 2, 64, epilogue=True, batch=2),
        schedule(128, 32, 2, 2, 2),
    ),
    "eight blocks, the last without a whole tile; heads of 80": (
        lambda: groups.cross((2,), 70, 230, 80, 72),
        schedule(64, 32, 1, 1, 8),
    ),
    "two blocks, bool mask": (
        lambda: groups.cross((2, 2), 37, 90, 24, mask=groups.BOOL, mask_lead=(2, 1)),
        schedule(64, 32, 2, 2, 2),
    ),
    "a rest, all tiles in flight": (
        lambda: groups.packed(150, 1, 64),
        schedule(64, 64, 1, 3, rest=16),
    ),
    "a rest, a ring, an epilogue": (
        lambda: groups.packed(150, 2, 64, epilogue=True, batch=2),
        schedule(64, 64, 1, 2, rest=16),
    ),
    "a rest beside parts, heads of 32": (
        lambda: groups.cross((1, 2), 100, 200, 32),
        schedule(64, 64, 2, 2, rest=16),
    ),
    "a rest, heads of 80 and 72": (
        lambda: groups.cross((2,), 70, 230, 80, 72),
        schedule(64, 64, 1, 2, rest=16),
    ),
    "a rest, causal": (
        lambda: groups.cross((1, 2), 170, 200, 64, causal=True),
        schedule(64, 64, 1, 2, rest=16),
    ),
    "a rest, bool mask": (
        lambda: groups.cross((2, 2), 79, 90, 24, mask=groups.BOOL, mask_lead=(2, 1)),
        schedule(64, 64, 1, 2, rest=16),
    ),
    "a rest beside two warpgroups, added mask": (
        lambda: groups.cross((2,), 290, 70, 40, 72, groups.BF16, mask=groups.F32),
        schedule(128, 64, 1, 2, rest=16),
    ),
    "four blocks, added mask, warpgroups without queries": (
        lambda: groups.cross((2,), 17, 60, 40, 72, groups.BF16, mask=groups.F32),
        schedule(256, 16, 1, 1, 4),
    ),
    "added mask, warpgroups without queries": (
        lambda: groups.cross((2,), 17, 33, 40, 72, groups.BF16, mask=groups.F32),
        schedule(256, 16, 1, 2),
    ),
}


WGMMA_CASES = {**groups.CASES, **groups.TF32_CASES}


@pytest.mark.parametrize("case", WGMMA_CASES)
def test_compiles(case: str) -> None:
    for program in sample(AttentionWgmma(WGMMA_CASES[case](), H100), 1):
        compiled = compile_uncached(program.code, program.name, program.arch)
        assert compiled.spill_bytes == 0, dict(program.schedule)
        assert "serialized" not in compiled.log


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_is_right_on_the_cpu(case: str) -> None:
    make, knobs = CASES[case]
    group = make()
    values = inputs_of(group)
    program = AttentionWgmma(group, H100).emit(knobs)
    assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize(
    ("knobs", "width"),
    [
        (schedule(64, 192, 1, 2), 64),
        (schedule(128, 192, 1, 2), 64),
        (schedule(192, 112, 1, 2), 64),
        (schedule(64, 256, 1, 2), 32),
        (schedule(64, 304, 1, 2), 32),
    ],
)
def test_large_tiles_of_tf32_find_their_registers(knobs: Schedule, width: int) -> None:
    program = AttentionWgmma(groups.tf32_of(600, width), H100).emit(knobs)
    compiled = compile_uncached(program.code, program.name, program.arch)
    assert compiled.spill_bytes == 0
    assert "serialized" not in compiled.log


def test_a_split_leaves_no_block_without_keys() -> None:
    sketch = AttentionWgmma(groups.packed(150, 1, 64), H100)
    with pytest.raises(Illegal, match="of 5 tiles of keys one of 4 blocks gets none"):
        sketch.emit(schedule(64, 32, 1, 1, 4))
    causal = AttentionWgmma(groups.cross((1, 2), 130, 200, 64, causal=True), H100)
    with pytest.raises(Illegal, match="causal"):
        causal.emit(schedule(64, 64, 1, 1, 4))


def test_what_a_rest_needs() -> None:
    sketch = AttentionWgmma(groups.packed(150, 1, 64), H100)
    with pytest.raises(Illegal, match="48 keys over 4 warps"):
        sketch.emit(schedule(64, 48, 1, 2, rest=16))
    with pytest.raises(Illegal, match="2 blocks that share"):
        sketch.emit(schedule(64, 64, 1, 2, 2, rest=16))
    with pytest.raises(Illegal, match="tf32"):
        AttentionWgmma(groups.tf32_of(160, 64), H100).emit(schedule(64, 64, 1, 2, rest=16))


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "expected"),
    [(576, 576, 16, {"rest": 16}), (100, 1050, 8, {"split": 4}), (197, 197, 12, {})],
)
def test_blocks_are_cut_to_fill_the_multiprocessors(
    queries: int, keys: int, heads: int, expected: Schedule
) -> None:
    sketch = AttentionWgmma(groups.cross((heads,), queries, keys, 64), H100)
    first = next(iter(sketch.defaults()))
    assert {"split": first["split"], "rest": first["rest"]} == {"split": 1, "rest": 0, **expected}


@pytest.mark.compiler
@pytest.mark.parametrize("split", (2, 4))
def test_a_split_of_tf32_is_right_on_the_cpu(split: int) -> None:
    group = groups.tf32_of(160, 64)
    values = inputs_of(group)
    program = AttentionWgmma(group, H100).emit(schedule(64, {2: 80, 4: 48}[split], 1, 1, split))
    assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize(("keys", "width"), groups.TF32_SIZES)
def test_tf32_is_right_on_the_cpu(keys: int, width: int) -> None:
    group = groups.tf32_of(keys, width)
    values = inputs_of(group)
    for program in sample(AttentionWgmma(group, H100), 2):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("case", sorted(groups.TF32_CASES.keys() - {"tf32_vit_b"}))
def test_tf32_with_masks_and_epilogues_is_right_on_the_cpu(case: str) -> None:
    group = groups.TF32_CASES[case]()
    values = inputs_of(group)
    for program in sample(AttentionWgmma(group, H100), 2):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float16) for kind in (torch.bool, torch.float16, torch.float32)),
        *((kind, torch.float32) for kind in (torch.bool, torch.float32)),
    ],
)
def test_rows_without_a_key_are_zeros_as_in_torch(kind: torch.dtype, dtype: torch.dtype) -> None:
    group, values = groups.masked(kind, dtype)
    for parts in (1, 2):
        program = AttentionWgmma(group, H100).emit(schedule(64, 64, parts, 2))
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.parametrize("case", WGMMA_CASES)
def test_every_shape_has_a_default(case: str) -> None:
    assert next(iter(AttentionWgmma(WGMMA_CASES[case](), H100).defaults()))


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_tf32_takes_wgmma_where_there_is_one(arch: str) -> None:
    for group in (groups.TF32_CASES["tf32_vit_b"](), groups.tf32_of(1050, 32)):
        chosen, _ = first_choice(derive(group, "attention", TARGETS[arch]))
        assert chosen is not None
        assert chosen.sketch.name == ("attention_wgmma" if arch == "sm_90a" else "attention")


def test_one_tile_of_all_keys_is_tried_first_where_it_fits() -> None:
    defaults = list(AttentionWgmma(groups.packed(197, 12, 64), H100).defaults())
    assert defaults[0] == schedule(64, 208, 1, 1)


def test_source(golden: Callable[[str, object], None]) -> None:
    sketch = AttentionWgmma(groups.packed(197, 12, 64), H100)
    golden("attention_wgmma_vit.cu", sketch.emit(next(iter(sketch.defaults()))).source)


def test_refusals() -> None:
    plain = groups.cross((1,), 16, 16, 64)
    with pytest.raises(Illegal, match="sm_80 has no wgmma"):
        AttentionWgmma(plain, TARGETS["sm_80"])
    with pytest.raises(Illegal, match="this sketch multiplies fp32 as tf32 alone"):
        AttentionWgmma(groups.FLOAT_CASES["fp32_vit_b"](), H100)
    repeated = groups.repeated_keys(3, 20, 30, 32)
    again = r"operand k .* repeats a row, which no tensor map describes"
    with pytest.raises(Illegal, match=again):
        AttentionWgmma(repeated, H100)
    names = [sketch.name for sketch in derive(repeated, "attention", H100).sketches]
    assert names == ["attention"]


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        (schedule(256, 64, 2, 2), "1024 threads, of which none has registers"),
        (schedule(64, 80, 2, 2), "80 keys in 2 parts: wgmma takes 16"),
        (schedule(64, 320, 1, 2), "2 stages, and fewer tiles of keys"),
        (schedule(64, 64, 1, 1), "a ring of one stage"),
        (schedule(256, 224, 1, 2), "registers a thread, of 128"),
        (schedule(192, 96, 1, 4), "shared memory"),
    ],
)
def test_says_which_limit_broke(knobs: Schedule, reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        AttentionWgmma(groups.cross((1,), 64, 320, 128), H100).emit(knobs)
