"""Kernels of gated linear units, which store the even columns of what they compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gtco.codegen.sketch import Illegal, Schedule, Sketch
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.work import group_work, halved_nodes
from gtco.ir.graph import Graph, GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests.gated_groups import CASES, F16, F32, gated
from tests.kernel_checks import defaults, inputs_of, wrong_outputs

H100 = TARGETS["sm_90a"]
FEW = replace(H100, sm_count=1)
"""Where even small results have two tiles for each block that stays."""
PLAIN = {"stages": 2, "split": 1, "multicast": 1, "atoms": 1, "depth": 0, "cluster_q": 1}
SWAPPED = {**PLAIN, "swap": 1, "block_p": 64, "block_q": 24}
STRAIGHT = {**PLAIN, "swap": 0, "block_p": 64, "block_q": 64}
WGMMA: dict[str, tuple[Schedule, ...]] = {
    "norm": (SWAPPED, STRAIGHT, {**STRAIGHT, "multicast": 2}, {**SWAPPED, "split": 2}),
    "bf16": (STRAIGHT,),
    "factors": (STRAIGHT, {**STRAIGHT, "block_q": 40}),
    "heads": (SWAPPED, STRAIGHT),
    "one_row": (STRAIGHT,),
    "few_rows": (SWAPPED,),
    "tf32": (SWAPPED, STRAIGHT),
    "fp32": (SWAPPED, STRAIGHT),
    "fp8": (SWAPPED, STRAIGHT),
}
"""The wide kernel's schedules of each case; columns that are no multiple of 16 are not swapped."""


def check(sketch: Sketch, schedule: Schedule | None = None) -> None:
    program = next(defaults(sketch)) if schedule is None else sketch.emit(schedule)
    values = inputs_of(sketch.group, seed=1)
    assert not wrong_outputs(program, sketch.group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize("case", ["norm", "bf16", "factors", "tf32", "fp32", "fp8"])
def test_mma_is_right(case: str) -> None:
    check(GemmMma(CASES[case](), H100))


@pytest.mark.compiler
@pytest.mark.parametrize("case", CASES)
def test_wgmma_is_right_whichever_side_is_swapped(case: str) -> None:
    sketch = GemmWgmma(CASES[case](), H100)
    for schedule in WGMMA[case]:
        check(sketch, schedule)


@pytest.mark.compiler
@pytest.mark.parametrize("case", ["norm", "heads"])
def test_blocks_that_stay_are_right(case: str) -> None:
    check(GemmPersistent(CASES[case](), FEW))


@pytest.mark.compiler
@pytest.mark.parametrize("case", ["one_row", "few_rows"])
def test_few_rows_are_right(case: str) -> None:
    check(GemmSkinny(CASES[case](), H100))


def test_single_columns_are_refused() -> None:
    with pytest.raises(Illegal, match="single columns of 104, and pairs are read"):
        GemmWgmma(CASES["factors"](), H100).emit(SWAPPED)


def without_linear(columns: int, dtype: torch.dtype, rows: int = 21) -> Group:
    """The same of a stored value, where the linear has a kernel of its own."""
    b = GraphBuilder()
    y = b.input("y", TensorSpec((rows, 2 * columns), dtype))
    result = b.add("mul", y, b.add("silu", b.add("swap_pairs", y)))
    return Group("gate", b.build([b.add("slice", result, dim=1, start=0, end=2 * columns, step=2)]))


@pytest.mark.compiler
@pytest.mark.parametrize(("columns", "dtype"), [(20, F16), (5, F32)])
def test_a_kernel_without_the_linear_is_right(columns: int, dtype: torch.dtype) -> None:
    check(Elementwise(without_linear(columns, dtype), H100))


def test_a_kernel_compiles_and_stores_half_as_wide() -> None:
    program = next(defaults(GemmWgmma(gated(197, 768, 2048, F16, norm=True), H100)))
    assert "store<V / 2>(out0 + row * 2048 + (col / 2), map<V / 2>(" in program.source
    assert compile_uncached(program.code, program.name, program.arch).spill_bytes <= 64


def test_work_counts_every_other_element() -> None:
    def graph(half: bool) -> Graph:
        b = GraphBuilder()
        y = b.input("y", TensorSpec((8, 64), F16))
        gate = b.add("silu", b.add("swap_pairs", b.add("relu", y)))
        result = b.add("mul", y, gate)
        if half:
            return b.build([b.add("slice", result, dim=1, start=0, end=64, step=2)])
        return b.build([result])

    whole, half = (group_work(Group("g", graph(each))) for each in (False, True))
    assert half.written_bytes * 2 == whole.written_bytes
    assert half.pointwise_flops * 2 == whole.pointwise_flops
    assert not halved_nodes(graph(False))
    names = {node.name for node in graph(True).nodes if not node.definition.is_view}
    assert halved_nodes(graph(True)) == names
