"""The attention sketches on a GPU against fp64, outputs poisoned, twice for the same bits."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.ir.graph import Group
from gtco.runtime.run import run_group
from gtco.target import target_of_capability
from tests import attention_groups, attention_tma
from tests.groups import tf32
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.gpu


KINDS = (Attention, AttentionWgmma)


def sketch_of(kind: type[Sketch], group: Group) -> Sketch:
    target = target_of_capability(*torch.cuda.get_device_capability())
    if kind is AttentionWgmma and not target.has_wgmma:
        pytest.skip(f"{target.arch} has no wgmma")
    return kind(group, target)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, case) for kind in KINDS for case in attention_groups.CASES),
        *((Attention, case) for case in attention_groups.NARROW_CASES),
        *((Attention, case) for case in attention_groups.FLOAT_CASES),
        *((AttentionWgmma, case) for case in attention_groups.TF32_CASES),
    ],
)
def test_attention_matches_fp64(kind: type[Sketch], case: str) -> None:
    cases = attention_groups.CASES | attention_groups.NARROW_CASES | attention_groups.FLOAT_CASES
    group = cases[case]()
    values = inputs_of(group, seed=1, device="cuda")
    for program in sample(sketch_of(kind, group), 5):
        assert not wrong_outputs(program, group, values, run_group)
        first, again = (run_group(program, group, values) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"


def tma_sketch(group: Group) -> Sketch:
    sketch = sketch_of(Attention, group)
    if not sketch.target.has_wgmma:
        pytest.skip(f"{sketch.target.arch} has no tensor maps")
    return sketch


@pytest.mark.parametrize("case", attention_tma.CASES)
def test_operands_that_tma_brings(case: str) -> None:
    make, schedule = attention_tma.CASES[case]
    group = make()
    values = inputs_of(group, seed=1, device="cuda")
    program = tma_sketch(group).emit(schedule)
    assert not wrong_outputs(program, group, values, run_group)
    first, again = (run_group(program, group, values) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor.nan_to_num(), again[name].nan_to_num()), "bits differ"


@pytest.mark.parametrize("width", (16, 24, 64, 72))
def test_tma_brings_nothing_of_another_head(width: int) -> None:
    group, values = attention_tma.between_nan(width)
    values = {name: each.cuda() for name, each in values.items()}
    program = tma_sketch(group).emit(attention_tma.schedule(16, 32, 1, 1))
    assert not wrong_outputs(program, group, values, run_group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keys", "width"), attention_groups.TF32_SIZES)
def test_tf32_matches_fp64_at_odd_sizes(kind: type[Sketch], keys: int, width: int) -> None:
    group = attention_groups.tf32_of(keys, width)
    values = inputs_of(group, seed=1, device="cuda")
    for program in sample(sketch_of(kind, group), 3):
        assert not wrong_outputs(program, group, values, run_group)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float16) for kind in (torch.bool, torch.float16, torch.float32)),
        *((kind, torch.float32) for kind in (torch.bool, torch.float32)),
    ],
)
def test_rows_without_a_key_are_zeros_as_in_torch(
    make: type[Sketch], kind: torch.dtype, dtype: torch.dtype
) -> None:
    group = attention_groups.cross((2,), 200, 300, 64, dtype=dtype, mask=kind)
    if dtype == torch.float32:
        group = tf32(group)
    values = inputs_of(group, device="cuda")
    keep = torch.rand(200, 300, device="cuda") < 0.5
    keep[3::16] = False
    values["mask"] = keep
    if kind != torch.bool:
        values["mask"] = torch.zeros(keep.shape, dtype=kind, device="cuda")
        values["mask"][~keep] = float("-inf")
        values["mask"][7] = torch.finfo(kind).min
    for program in sample(sketch_of(make, group), 3):
        assert not wrong_outputs(program, group, values, run_group)
