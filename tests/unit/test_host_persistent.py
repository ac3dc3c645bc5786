"""The persistent GEMM on the host build: several tiles a block, odd shapes, many orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.cost_model.judge import random_values
from gtco.ir.graph import Group
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import box_groups, groups, int8_groups
from tests.kernel_checks import wrong_outputs

pytestmark = pytest.mark.compiler

F16, BF16 = torch.float16, torch.bfloat16
FEW = replace(TARGETS["sm_90a"], sm_count=2, smem_per_block=160 * 1024)
"""So few multiprocessors and so little shared memory that small results run on round the ring."""

GROUPS: Mapping[str, Callable[[], Group]] = {
    "norm and GELU": lambda: groups.norm_linear(300, 200, 328, F16, gelu=True),
    "norm and GELU in bf16": lambda: groups.norm_linear(197, 136, 192, BF16, gelu=True),
    "residual and statistics": lambda: groups.residual_linear(197, 264, 256, BF16),
    "residual, statistics, batches": lambda: groups.residual_linear(50, 64, 192, F16, batch=3),
    "residual and half a chunk of statistics": lambda: groups.residual_linear(205, 96, 416, F16),
    "residual": lambda: groups.residual_linear(300, 72, 160, F16, stats=False),
    "residual in tf32": lambda: groups.tf32(
        groups.residual_linear(300, 72, 160, torch.float32, stats=False)
    ),
    "residual of pixels": lambda: groups.convolution((2, 13, 11, 72), 96, (3, 3), BF16),
    "norm of many chunks and GELU": lambda: groups.norm_linear(211, 520, 480, F16, gelu=True),
    "one row": lambda: groups.plain_linear(1, 72, 1000, F16),
    "seven rows": lambda: groups.norm_linear(7, 200, 1000, BF16, gelu=True),
    "columns that no vector divides": lambda: groups.plain_linear(65, 72, 91, F16),
    "few columns": lambda: groups.plain_linear(200, 256, 4, F16),
    "windows": lambda: groups.convolution((2, 13, 11, 72), 104, (3, 3), F16),
    "windows apart": lambda: groups.convolution(
        (1, 27, 18, 64), 64, (3, 2), BF16, stride=(2, 1), before=(2, 1), after=(1, 0)
    ),
    "rows in windows of an image": lambda: groups.window_linear((2, 12, 15, 72), (4, 5), 200, F16),
    "fp8": lambda: groups.fp8_linear(300, 1168, 192, F16, norm=True),
    "fp8 of few steps": lambda: groups.fp8_linear(200, 400, 256, BF16),
    "int8": lambda: int8_groups.linear(300, 1168, 192, F16, residual=False),
    "int8 and a residual": lambda: int8_groups.linear(200, 400, 256, BF16),
    "int8 and one of int8": lambda: int8_groups.linear(200, 144, 256, F16, residual=torch.int8),
    "windows of int8": lambda: int8_groups.convolution((2, 9, 17, 144), 64, (3, 3), F16),
    "B in rows of K": lambda: groups.batched_matmul(2, 97, 200, 136, BF16),
    "several products": lambda: groups.batched_matmul(2, 97, 64, 72, F16, transposed=True),
    # Of these, 16 columns are whole and 32 are not.
    "norm and GELU of 144": lambda: groups.norm_linear(300, 200, 144, F16, gelu=True),
    "residual and statistics of 144": lambda: groups.residual_linear(197, 136, 144, F16),
    "residual and statistics of 240": lambda: groups.residual_linear(205, 264, 240, BF16),
    "residual of 48": lambda: groups.residual_linear(300, 24, 48, F16, stats=False),
    "residual of 48 in tf32": lambda: groups.tf32(
        groups.residual_linear(300, 72, 48, torch.float32, stats=False)
    ),
    "windows of 80": lambda: groups.convolution((2, 13, 11, 72), 80, (3, 3), BF16),
    "rows in windows, 112": lambda: groups.window_linear((2, 12, 15, 72), (4, 5), 112, F16),
    "fp8 of 208": lambda: groups.fp8_linear(200, 400, 208, BF16),
    "rotated pairs of 80": lambda: groups.rotary_linear(197, 72, 2, 2, 20, F16, norm=True),
    "norm and GELU of 72": lambda: groups.norm_linear(300, 24, 72, F16, gelu=True),
    "residual of 24": lambda: groups.residual_linear(205, 72, 24, BF16, stats=False),
    "residual of 240 in fp32": lambda: groups.tf32(
        groups.residual_linear(205, 40, 240, torch.float32, stats=False)
    ),
    "several products of 144": lambda: groups.batched_matmul(2, 97, 64, 144, F16, transposed=True),
    **box_groups.RUNS,
}
KNOBS = ("cooperative", "block_m", "block_n", "atoms", "raster", "copies", "lines")
CASES = [
    ("fp8", (0, 64, 64, 1, 4, 0, 0)),
    ("fp8", (0, 128, 64, 2, 1, 0, 0)),
    ("fp8", (1, 128, 96, 1, 4, 0, 0)),
    ("fp8 of few steps", (0, 64, 128, 1, 1, 0, 0)),
    ("fp8 of few steps", (1, 128, 64, 2, 4, 0, 0)),
    ("int8", (0, 64, 64, 1, 4, 0, 0)),
    ("int8", (1, 128, 96, 2, 1, 0, 0)),
    ("int8 and a residual", (0, 128, 128, 1, 4, 0, 0)),
    ("int8 and a residual", (1, 192, 64, 2, 1, 0, 0)),
    ("int8 and one of int8", (0, 64, 64, 1, 4, 1, 0)),
    ("int8 and one of int8", (1, 128, 128, 1, 1, 1, 0)),
    ("windows of int8", (1, 128, 64, 1, 1, 0, 0)),
    ("norm and GELU", (0, 64, 64, 1, 4, 0, 0)),
    ("norm and GELU", (0, 128, 96, 1, 1, 0, 0)),
    ("norm and GELU", (0, 64, 192, 2, 16, 0, 0)),
    ("norm and GELU", (1, 128, 64, 1, 4, 0, 0)),
    ("norm and GELU", (1, 256, 128, 1, 1, 0, 0)),
    ("norm and GELU", (1, 192, 96, 1, 4, 0, 0)),
    ("norm and GELU in bf16", (0, 64, 64, 1, 4, 0, 0)),
    ("norm and GELU in bf16", (1, 128, 96, 2, 1, 0, 0)),
    ("residual and statistics", (0, 64, 64, 2, 1, 0, 0)),
    ("residual and statistics", (0, 128, 128, 1, 4, 0, 0)),
    ("residual and statistics", (1, 128, 128, 1, 4, 0, 0)),
    ("residual and statistics", (1, 192, 192, 1, 1, 0, 0)),
    ("residual and half a chunk of statistics", (0, 64, 128, 1, 1, 0, 0)),
    ("residual and half a chunk of statistics", (1, 192, 64, 1, 4, 0, 0)),
    ("residual and half a chunk of statistics", (0, 64, 128, 1, 1, 1, 0)),
    ("residual and half a chunk of statistics", (1, 192, 64, 1, 4, 1, 0)),
    ("residual and statistics", (0, 128, 128, 1, 4, 1, 0)),
    ("residual and statistics", (1, 128, 64, 2, 1, 1, 0)),
    ("residual", (0, 64, 64, 1, 4, 1, 0)),
    ("residual", (0, 128, 96, 1, 1, 1, 0)),
    ("residual", (1, 192, 64, 1, 4, 1, 0)),
    ("residual", (1, 256, 128, 1, 1, 1, 0)),
    ("residual in tf32", (0, 64, 64, 1, 4, 1, 0)),
    ("residual in tf32", (1, 128, 96, 1, 4, 1, 0)),
    ("residual of pixels", (0, 64, 64, 1, 4, 1, 0)),
    ("residual of pixels", (1, 128, 96, 1, 4, 1, 0)),
    ("norm of many chunks and GELU", (0, 128, 96, 1, 4, 0, 0)),
    ("norm of many chunks and GELU", (1, 192, 160, 1, 1, 0, 0)),
    ("residual, statistics, batches", (0, 64, 64, 1, 4, 0, 0)),
    ("one row", (0, 64, 128, 1, 4, 0, 0)),
    ("one row", (1, 128, 64, 1, 4, 0, 0)),
    ("seven rows", (0, 64, 160, 1, 1, 0, 0)),
    ("columns that no vector divides", (0, 64, 64, 1, 1, 0, 0)),
    ("few columns", (0, 64, 64, 1, 4, 0, 0)),
    ("windows", (0, 64, 64, 1, 4, 0, 0)),
    ("windows", (0, 128, 96, 2, 1, 0, 0)),
    ("windows", (1, 192, 64, 1, 4, 0, 0)),
    ("windows apart", (0, 64, 64, 1, 1, 0, 0)),
    ("windows apart", (1, 128, 64, 2, 4, 0, 0)),
    ("rows in windows of an image", (0, 64, 64, 1, 4, 0, 0)),
    ("rows in windows of an image", (1, 192, 96, 2, 1, 0, 0)),
    ("B in rows of K", (0, 64, 64, 1, 4, 0, 0)),
    ("B in rows of K", (1, 128, 128, 2, 1, 0, 0)),
    ("B in rows of K", (0, 128, 64, 1, 1, 0, 0)),
    ("several products", (0, 64, 64, 1, 4, 0, 0)),
    ("several products", (1, 128, 64, 1, 1, 0, 0)),
    ("norm and GELU of 144", (0, 64, 64, 1, 4, 0, 0)),
    ("norm and GELU of 144", (0, 128, 160, 1, 1, 0, 0)),
    ("norm and GELU of 144", (1, 128, 96, 2, 4, 0, 0)),
    ("residual and statistics of 144", (0, 64, 64, 1, 1, 0, 0)),
    ("residual and statistics of 144", (1, 192, 192, 1, 4, 0, 0)),
    ("residual and statistics of 240", (0, 64, 64, 1, 4, 0, 0)),
    ("residual and statistics of 240", (0, 128, 128, 2, 1, 0, 0)),
    ("residual and statistics of 240", (1, 128, 64, 1, 4, 0, 0)),
    ("residual of 48", (0, 64, 64, 1, 4, 0, 0)),
    ("residual of 48", (1, 128, 64, 1, 1, 0, 0)),
    ("residual of 48 in tf32", (0, 64, 64, 1, 4, 0, 0)),
    ("windows of 80", (0, 64, 64, 1, 4, 0, 0)),
    ("windows of 80", (1, 128, 96, 2, 1, 0, 0)),
    ("rows in windows, 112", (0, 64, 128, 1, 1, 0, 0)),
    ("fp8 of 208", (0, 64, 64, 1, 4, 0, 0)),
    ("fp8 of 208", (1, 128, 128, 2, 1, 0, 0)),
    ("rotated pairs of 80", (0, 64, 64, 1, 4, 0, 0)),
    ("several products of 144", (0, 64, 64, 1, 4, 0, 0)),
    ("norm and GELU of 72", (0, 64, 96, 1, 4, 0, 1)),
    ("norm and GELU of 72", (0, 128, 96, 1, 1, 0, 1)),
    ("norm and GELU of 72", (1, 256, 96, 1, 4, 0, 1)),
    ("norm and GELU of 144", (0, 64, 160, 1, 1, 0, 1)),
    ("norm and GELU of 144", (1, 192, 160, 1, 4, 0, 1)),
    ("residual of 24", (0, 64, 64, 1, 4, 0, 1)),
    ("residual of 24", (1, 192, 64, 2, 1, 0, 1)),
    ("residual of 48", (1, 128, 64, 1, 1, 0, 1)),
    ("residual of 240 in fp32", (0, 64, 256, 1, 1, 0, 1)),
    ("windows of 80", (1, 128, 96, 2, 1, 0, 1)),
    ("rotated pairs of 80", (0, 64, 96, 1, 4, 0, 1)),
    ("several products", (1, 128, 96, 1, 1, 0, 1)),
    ("several products of 144", (0, 64, 160, 1, 4, 0, 1)),
    ("means, residual", (0, 64, 64, 1, 4, 0, 0)),
    ("means, residual", (1, 128, 96, 1, 1, 1, 0)),
    ("means, residual", (1, 192, 192, 1, 4, 0, 0)),
    ("means, residual in tf32", (0, 128, 96, 1, 4, 1, 0)),
    ("means, norm and GELU of 144", (0, 128, 160, 1, 1, 0, 0)),
    ("means, norm and GELU of 144", (1, 256, 64, 1, 4, 0, 0)),
    ("means of 72 columns", (0, 64, 64, 1, 4, 0, 0)),
    ("means of 72 columns", (1, 192, 96, 1, 1, 0, 0)),
    ("means of windows", (0, 64, 128, 1, 1, 0, 0)),
    ("means of windows", (1, 128, 64, 1, 4, 0, 0)),
    ("means of a concat", (0, 64, 64, 1, 4, 0, 0)),
    ("means of a concat", (1, 128, 96, 1, 1, 0, 0)),
    ("moments of 4, residual", (0, 64, 64, 1, 4, 0, 0)),
    ("moments of 4, residual", (1, 192, 192, 1, 4, 1, 0)),
    ("moments of 16 in tf32", (0, 128, 96, 1, 4, 1, 0)),
    ("moments of 16 of 144", (0, 128, 160, 1, 1, 0, 0)),
    ("moments of 8 of 72", (1, 192, 96, 1, 1, 0, 0)),
    ("moments of 32, windows", (0, 64, 128, 1, 1, 0, 0)),
    ("moments of 32, windows", (1, 128, 64, 1, 4, 0, 0)),
    ("moments of 4 of a concat", (1, 128, 96, 1, 1, 0, 0)),
    ("moments of 8 alone", (0, 64, 64, 1, 4, 0, 0)),
    ("means alone", (0, 64, 64, 1, 4, 0, 0)),
    ("means alone", (1, 256, 64, 1, 1, 0, 0)),
]


@pytest.mark.parametrize(("name", "values"), CASES)
def test_right_in_every_schedule(name: str, values: tuple[int, ...]) -> None:
    group = GROUPS[name]()
    program = GemmPersistent(group, FEW).emit(dict(zip(KNOBS, values, strict=True)))
    assert program.grid[0] <= FEW.sm_count
    given = random_values(group, torch.device("cpu"), seed=1)
    for seed in (0, 1):
        assert not wrong_outputs(
            program, group, given, lambda p, g, v, seed=seed: run_on_host(p, g, v, seed)
        )


@pytest.mark.parametrize("values", [(0, 64, 64, 1, 4, 0, 0), (1, 128, 64, 1, 4, 0, 0)])
def test_right_in_many_orders(values: tuple[int, ...]) -> None:
    """Both warpgroups, the producer and its copies race in another way each time."""
    group = GROUPS["norm and GELU in bf16" if values[0] else "residual and statistics"]()
    program = GemmPersistent(group, FEW).emit(dict(zip(KNOBS, values, strict=True)))
    given = random_values(group, torch.device("cpu"), seed=1)
    for seed in range(2, 10):
        run_on_host(program, group, given, seed)


def test_a_mean_that_is_large_against_the_spread_costs_no_accuracy() -> None:
    """Idle warps merge a row's chunks in one pass, in which a large mean must not cancel."""
    group = GROUPS["norm of many chunks and GELU"]()
    program = GemmPersistent(group, FEW).emit(
        dict(zip(KNOBS, (0, 128, 96, 1, 4, 0, 0), strict=True))
    )
    given = random_values(group, torch.device("cpu"), seed=1)
    given["stats"][..., 0] += 3000
    assert not wrong_outputs(program, group, given, run_on_host)
