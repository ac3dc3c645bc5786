"""More blocks along y or z than CUDA launches: they lie along x, as those of 16,384 windows do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import gtco.codegen.sketch as module
from gtco.codegen.program import LARGEST_GRID
from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.passes.legality import family
from gtco.runtime.host import run_on_host
from gtco.runtime.nvrtc import compile_uncached
from gtco.target import TARGETS
from tests import attention_groups, groups
from tests.kernel_checks import defaults, first_default, inputs_of, wrong_outputs

H100 = TARGETS["sm_90a"]
CASES: dict[str, tuple[type[Sketch], Callable[[], Group], tuple[int, int, int]]] = {
    "rows": (GemmMma, lambda: groups.residual_linear(133, 48, 40, torch.float16), (3, 1, 1)),
    "rows, and columns": (
        GemmMma, lambda: groups.plain_linear(150, 40, 72, torch.float16), (3, 2, 1)),
    "a batch": (
        GemmMma, lambda: groups.batched_matmul(3, 75, 24, 72, torch.float16), (6, 2, 2)),
    "heads": (Attention, lambda: attention_groups.packed(97, 5, 32), (5, 2, 1)),
    "heads of wgmma": (AttentionWgmma, lambda: attention_groups.packed(97, 5, 64), (5, 2, 1)),
}  # fmt: skip
"""A sketch, a group, and the grid where two blocks along y and z are the most."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Grids are at most two blocks long along y and z."""
    monkeypatch.setattr(module, "LARGEST_GRID", (LARGEST_GRID[0], 2, 2))
    yield


@pytest.mark.compiler
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("case", CASES)
def test_a_long_axis_lies_along_x(case: str) -> None:
    kind, make, grid = CASES[case]
    group = make()
    sketch = kind(group, H100)
    tile = {"block_m": 64, "block_n": 64} if kind is GemmMma else {"block_q": 64, "split": 1}
    knobs = first_default(sketch)
    program = sketch.emit({**knobs, **{name: tile[name] for name in knobs.keys() & tile.keys()}})
    values = inputs_of(group)
    assert not wrong_outputs(program, group, values, run_on_host)
    assert compile_uncached(program.code, program.name, program.arch).spill_bytes == 0
    line = next((each for each in program.source.splitlines() if "LONG_AXIS" in each), None)
    assert program.grid == grid and line is not None
    wrong = replace(program, source=program.source.replace(line, ""))
    assert wrong_outputs(wrong, group, values, run_on_host)


@pytest.mark.usefixtures("short")
def test_two_long_axes_are_refused() -> None:
    sketch = GemmMma(groups.batched_matmul(3, 150, 24, 40, torch.float16), H100)
    schedule = {"block_m": 64, "block_n": 64, "block_k": 32, "warps_m": 2, "warps_n": 2}
    with pytest.raises(Illegal, match="6 blocks along z, a grid has at most 2"):
        sketch.emit({**schedule, "stages": 2})


@pytest.mark.usefixtures("short")
def test_blocks_of_a_cluster_stay_side_by_side() -> None:
    sketch = AttentionWgmma(attention_groups.packed(300, 5, 64), H100)
    split = {**first_default(sketch), "block_q": 64, "block_k": 64, "stages": 2, "split": 2}
    with pytest.raises(Illegal, match="blocks of a cluster lie along the axis"):
        sketch.emit({**split, "parts": 1, "rest": 0})
    assert all(each.cluster == (1, 1, 1) for each in defaults(sketch))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_windows_of_a_large_image_have_a_kernel(arch: str) -> None:
    b = GraphBuilder()
    q, k, v = (b.input(name, TensorSpec((16384, 6, 64, 32), torch.float16)) for name in "qkv")
    group = Group("windows", b.build([b.add("attention", q, k, v, scale=0.2, causal=False)]))
    found = derive(group, family(group), TARGETS[arch])
    assert found.sketches
    for sketch in found.sketches:
        assert next(defaults(sketch)).grid == (6 * 16384, 1, 1)
