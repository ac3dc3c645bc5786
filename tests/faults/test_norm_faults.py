"""Epsilon left out of a norm, in each place where a kernel adds it: rows whose spread is small
against it must show that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.ir.graph import Group
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import groups, tile_groups
from tests.faults.templates import planted
from tests.kernel_checks import inputs_of, sample, wrong_outputs

pytestmark = pytest.mark.compiler

F16 = torch.float16
FEW = replace(TARGETS["sm_90a"], sm_count=2)
ONE_PASS = "ptx::max_nan(squares - total * apart, 0.0f) / COLUMNS + eps"
ALL_AT_ONCE = "spread / COLUMNS + eps"

CASES: dict[str, tuple[type[Sketch], Callable[[], Group], str]] = {
    "rowwise": (Rowwise, lambda: tile_groups.layer_norm(5, 40), "m2 / T(C::COLUMNS) + eps"),
    "merged statistics": (Rowwise, lambda: tile_groups.merge_stats(5, 200), ALL_AT_ONCE),
    "merged statistics of groups": (
        Elementwise,
        lambda: tile_groups.normalize_groups(2, 9, 40, groups=5, chunks=1),
        "/ WHOLE + eps",
    ),
    "gemm_skinny": (GemmSkinny, lambda: groups.norm_linear(3, 136, 40, F16), ALL_AT_ONCE),
    "gemm_wgmma": (GemmWgmma, lambda: groups.norm_linear(19, 136, 40, F16), ALL_AT_ONCE),
    "gemm_persistent": (
        GemmPersistent, lambda: groups.norm_linear(130, 328, 136, F16), ONE_PASS,
    ),
}  # fmt: skip


def of_little_spread(group: Group) -> dict[str, Tensor]:
    """Inputs of rows whose deviation is about the root of epsilon, and of a first one of none."""
    values = inputs_of(group, seed=1)
    if "stats" in values:
        values["stats"][..., 1] *= 1e-6
        values["stats"][..., 0] = values["stats"][..., :1, 0]
        values["stats"][:, 0, :, 1] = 0
    else:
        values["x"] = (values["x"] * 1e-3).to(F16)
        values["x"][0] = 0.25
    return values


def verdict(program: KernelProgram, group: Group) -> list[str]:
    return wrong_outputs(program, group, of_little_spread(group), run_on_host, slack=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_epsilon_counts(case: str) -> None:
    kind, make, term = CASES[case]
    group = make()
    (program,) = sample(kind(group, FEW), 0)
    assert verdict(program, group) == []
    assert verdict(planted(program, term, term.removesuffix(" + eps")), group)
