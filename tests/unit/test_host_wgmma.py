"""The wgmma GEMM on the host build: TMA, mbarriers, clusters and multicast at odd shapes."""

from __future__ import annotations

import pytest
import torch

from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.cost_model.judge import random_values
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import groups, int8_groups
from tests.kernel_checks import wrong_outputs

pytestmark = pytest.mark.compiler

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GROUPS = {
    "norm and GELU": lambda: groups.norm_linear(37, 200, 256, F16, gelu=True),
    "residual and statistics": lambda: groups.residual_linear(19, 136, 128, BF16),
    "statistics of whole chunks": lambda: groups.residual_linear(21, 128, 192, F16),
    "one row": lambda: groups.plain_linear(1, 72, 104, F16),
    "columns that no vector divides": lambda: groups.plain_linear(7, 72, 91, F16),
    "several products": lambda: groups.batched_matmul(2, 33, 64, 40, F16, transposed=True),
    "B in rows of K": lambda: groups.batched_matmul(2, 33, 200, 136, F16),
    "A in rows of K": lambda: groups.transposed_linear(200, 72, 104, BF16),
    "windows of an image": lambda: groups.window_linear((2, 12, 15, 72), (4, 5), 72, F16),
    "windows in a row": lambda: groups.window_linear((1, 3, 35, 200), (3, 7), 104, BF16),
    "pixels column by column": lambda: groups.window_linear((1, 3, 35, 64), (3, 1), 24, F16),
    "tf32, norm and GELU": lambda: groups.tf32(groups.norm_linear(37, 100, 256, F32, gelu=True)),
    "tf32, statistics": lambda: groups.tf32(groups.residual_linear(21, 64, 192, F32)),
    "tf32, odd columns": lambda: groups.tf32(groups.plain_linear(7, 36, 91, F32)),
    "fp8, norm and GELU": lambda: groups.fp8_linear(37, 656, 256, F16, norm=True),
    "fp8, statistics": lambda: groups.fp8_linear(21, 272, 192, F16),
    "fp8, odd columns": lambda: groups.fp8_linear(7, 144, 90, BF16),
    "int8, GELU": lambda: int8_groups.linear(37, 656, 256, F16, residual=False),
    "int8, residual": lambda: int8_groups.linear(21, 272, 192, F16),
    "fp32, norm and GELU": lambda: groups.norm_linear(37, 100, 256, F32, gelu=True),
    "fp32, statistics": lambda: groups.residual_linear(21, 64, 192, F32),
    "fp32, odd columns": lambda: groups.plain_linear(7, 36, 91, F32),
    "fp32, several products": lambda: groups.batched_matmul(2, 33, 136, 40, F32, transposed=True),
    "many steps, norm and GELU": lambda: groups.norm_linear(261, 712, 136, F16, gelu=True),
    "many steps, statistics": lambda: groups.residual_linear(133, 840, 200, BF16),
    "many steps of tf32": lambda: groups.tf32(groups.plain_linear(133, 356, 200, F32)),
    # Of these, 16 columns are whole and 32 are not.
    "norm and GELU of 144": lambda: groups.norm_linear(37, 200, 144, F16, gelu=True),
    "residual and statistics of 144": lambda: groups.residual_linear(19, 136, 144, BF16),
    "residual and statistics of 240": lambda: groups.residual_linear(69, 136, 240, F16),
    "residual of 48": lambda: groups.residual_linear(70, 24, 48, F16, stats=False),
    "windows of 80": lambda: groups.convolution((1, 9, 8, 72), 80, (3, 3), F16),
    "fp8 of 208": lambda: groups.fp8_linear(37, 272, 208, F16),
    "tf32, norm and GELU of 48": lambda: groups.tf32(
        groups.norm_linear(37, 100, 48, F32, gelu=True)
    ),
    "fp32 of 112": lambda: groups.residual_linear(21, 64, 112, F32, stats=False),
}
KNOBS = (
    "swap",
    "block_p",
    "block_q",
    "stages",
    "split",
    "multicast",
    "atoms",
    "depth",
    "cluster_q",
)
CASES = [
    # Their partial sums come to lie over the ring.
    ("many steps, norm and GELU", (1, 128, 256, 4, 3, 1, 1, 1, 1)),
    ("many steps, norm and GELU", (0, 192, 136, 5, 2, 1, 1, 0, 1)),
    ("many steps, statistics", (0, 256, 128, 4, 3, 1, 1, 1, 2)),
    ("many steps, statistics", (1, 128, 136, 6, 4, 1, 1, 1, 1)),
    ("many steps of tf32", (1, 128, 64, 9, 2, 1, 1, 0, 3)),
    ("norm and GELU", (1, 64, 40, 2, 1, 1, 1, 0, 1)),
    ("norm and GELU", (0, 64, 64, 3, 1, 1, 2, 0, 1)),
    ("norm and GELU", (1, 64, 24, 2, 1, 4, 2, 0, 1)),
    ("norm and GELU", (1, 128, 40, 2, 1, 2, 1, 0, 1)),
    ("norm and GELU", (0, 64, 32, 2, 4, 1, 1, 0, 1)),
    ("norm and GELU", (1, 64, 40, 5, 3, 1, 1, 0, 1)),
    ("norm and GELU", (1, 64, 40, 2, 1, 1, 1, 1, 1)),
    ("norm and GELU", (1, 64, 24, 2, 1, 4, 1, 1, 1)),
    ("norm and GELU", (0, 128, 64, 3, 1, 1, 2, 1, 1)),
    ("residual and statistics", (1, 64, 24, 2, 2, 1, 1, 0, 1)),
    ("residual and statistics", (1, 64, 24, 2, 1, 2, 1, 0, 1)),
    ("residual and statistics", (1, 64, 24, 3, 2, 1, 1, 1, 1)),
    ("residual and statistics", (0, 64, 128, 2, 1, 1, 3, 0, 1)),
    ("residual and statistics", (0, 64, 128, 2, 2, 1, 1, 0, 1)),
    ("residual and statistics", (0, 64, 64, 2, 2, 1, 1, 0, 1)),
    ("residual and statistics", (1, 128, 24, 2, 1, 1, 1, 0, 1)),
    ("statistics of whole chunks", (0, 64, 128, 2, 2, 1, 1, 1, 1)),
    ("statistics of whole chunks", (0, 128, 64, 2, 1, 1, 1, 1, 1)),
    ("statistics of whole chunks", (1, 64, 16, 2, 2, 1, 1, 1, 1)),
    ("statistics of whole chunks", (1, 128, 24, 2, 2, 1, 1, 0, 1)),
    ("one row", (1, 64, 8, 2, 1, 1, 1, 0, 1)),
    ("one row", (1, 64, 8, 2, 2, 1, 1, 0, 1)),
    ("one row", (1, 64, 8, 2, 2, 1, 1, 1, 1)),
    ("columns that no vector divides", (1, 64, 8, 2, 1, 1, 1, 0, 1)),
    ("columns that no vector divides", (1, 64, 8, 2, 2, 1, 1, 0, 1)),
    ("several products", (1, 64, 40, 2, 1, 1, 1, 0, 1)),
    ("norm and GELU", (1, 64, 24, 2, 1, 1, 1, 1, 2)),
    ("norm and GELU", (1, 64, 16, 2, 2, 1, 1, 0, 3)),
    ("norm and GELU", (0, 64, 64, 2, 2, 1, 1, 1, 4)),
    ("residual and statistics", (1, 64, 16, 2, 2, 1, 1, 0, 2)),
    ("statistics of whole chunks", (1, 64, 8, 2, 2, 1, 1, 1, 3)),
    ("statistics of whole chunks", (1, 64, 16, 2, 1, 1, 2, 0, 2)),
    ("several products", (1, 64, 24, 2, 1, 1, 1, 0, 2)),
    ("B in rows of K", (0, 64, 64, 2, 1, 1, 1, 0, 1)),
    ("B in rows of K", (0, 64, 128, 2, 2, 1, 1, 1, 1)),
    ("B in rows of K", (0, 128, 64, 2, 1, 1, 2, 1, 3)),
    ("B in rows of K", (0, 64, 192, 2, 1, 1, 1, 1, 1)),
    ("A in rows of K", (1, 64, 64, 2, 1, 1, 1, 0, 1)),
    ("A in rows of K", (1, 64, 128, 3, 2, 1, 1, 1, 1)),
    ("A in rows of K", (1, 128, 64, 2, 1, 1, 2, 1, 2)),
    ("windows of an image", (0, 64, 72, 2, 1, 1, 1, 1, 1)),
    ("windows of an image", (0, 128, 64, 2, 1, 1, 2, 0, 2)),
    ("windows of an image", (1, 64, 48, 3, 2, 1, 1, 0, 1)),
    ("windows in a row", (0, 64, 64, 2, 2, 1, 1, 1, 1)),
    ("windows in a row", (1, 64, 40, 2, 1, 2, 2, 1, 1)),
    ("pixels column by column", (0, 64, 24, 2, 1, 1, 1, 1, 1)),
    ("fp8, norm and GELU", (0, 64, 64, 3, 1, 1, 2, 0, 1)),
    ("fp8, norm and GELU", (1, 64, 24, 2, 1, 4, 2, 0, 1)),
    ("fp8, norm and GELU", (0, 128, 32, 2, 2, 1, 1, 0, 1)),
    ("fp8, statistics", (1, 64, 24, 2, 2, 1, 1, 0, 1)),
    ("fp8, statistics", (0, 64, 64, 2, 1, 1, 1, 0, 1)),
    ("fp8, statistics", (1, 64, 8, 2, 2, 1, 1, 0, 3)),
    ("fp8, odd columns", (1, 64, 8, 2, 1, 1, 1, 0, 1)),
    ("int8, GELU", (0, 64, 64, 3, 1, 1, 2, 0, 1)),
    ("int8, GELU", (1, 64, 24, 2, 1, 4, 2, 0, 1)),
    ("int8, GELU", (0, 128, 32, 2, 2, 1, 1, 1, 1)),
    ("int8, GELU", (1, 64, 48, 3, 1, 2, 1, 1, 1)),
    ("int8, residual", (1, 64, 24, 2, 2, 1, 1, 0, 1)),
    ("int8, residual", (0, 64, 64, 2, 3, 1, 1, 1, 1)),
    ("int8, residual", (1, 64, 8, 2, 3, 1, 1, 0, 1)),
    ("fp8, odd columns", (0, 64, 64, 2, 2, 1, 1, 0, 1)),
    ("tf32, norm and GELU", (0, 64, 64, 3, 1, 1, 2, 1, 1)),
    ("tf32, norm and GELU", (1, 64, 24, 2, 1, 4, 2, 0, 1)),
    ("tf32, norm and GELU", (0, 64, 32, 2, 3, 1, 1, 0, 1)),
    ("tf32, statistics", (1, 64, 16, 2, 2, 1, 1, 1, 1)),
    ("tf32, statistics", (0, 64, 128, 2, 2, 1, 1, 0, 1)),
    ("tf32, odd columns", (1, 64, 8, 2, 2, 1, 1, 0, 1)),
    ("tf32, odd columns", (0, 64, 96, 2, 1, 1, 1, 0, 1)),
    ("fp32, norm and GELU", (0, 64, 64, 3, 1, 1, 1, 0, 1)),
    ("fp32, norm and GELU", (0, 128, 32, 2, 1, 1, 1, 0, 1)),
    ("fp32, norm and GELU", (1, 64, 24, 2, 1, 4, 1, 0, 1)),
    ("fp32, norm and GELU", (1, 192, 16, 2, 1, 1, 1, 0, 3)),
    ("fp32, norm and GELU", (0, 64, 32, 2, 3, 1, 1, 0, 1)),
    ("fp32, statistics", (1, 64, 16, 2, 2, 1, 1, 0, 1)),
    ("fp32, statistics", (0, 64, 64, 2, 2, 1, 1, 0, 3)),
    ("fp32, statistics", (1, 128, 24, 2, 1, 1, 1, 0, 1)),
    ("fp32, odd columns", (1, 64, 8, 2, 2, 1, 1, 0, 1)),
    ("fp32, odd columns", (0, 64, 96, 2, 1, 1, 1, 0, 1)),
    ("fp32, several products", (1, 64, 40, 3, 1, 1, 1, 0, 1)),
    ("fp32, several products", (0, 64, 40, 4, 5, 1, 1, 0, 1)),
    ("norm and GELU of 144", (0, 64, 64, 3, 1, 1, 2, 0, 1)),
    ("norm and GELU of 144", (0, 64, 144, 2, 1, 1, 1, 1, 1)),
    ("norm and GELU of 144", (0, 64, 48, 2, 2, 1, 1, 1, 3)),
    ("norm and GELU of 144", (0, 64, 16, 2, 3, 1, 1, 0, 1)),
    ("norm and GELU of 144", (0, 64, 72, 2, 1, 1, 1, 0, 1)),  # 16 rows are not whole
    ("norm and GELU of 144", (0, 128, 48, 2, 1, 1, 1, 0, 1)),
    ("norm and GELU of 144", (1, 64, 24, 2, 1, 1, 1, 1, 1)),
    ("residual and statistics of 144", (0, 64, 64, 2, 1, 1, 3, 0, 1)),
    ("residual and statistics of 144", (0, 64, 192, 2, 2, 1, 1, 0, 1)),
    ("residual and statistics of 240", (0, 64, 128, 2, 1, 1, 1, 1, 1)),
    ("residual and statistics of 240", (0, 64, 256, 2, 3, 1, 1, 0, 1)),
    ("residual and statistics of 240", (0, 64, 64, 2, 1, 2, 1, 0, 1)),  # one copy for two blocks
    ("residual of 48", (0, 64, 48, 2, 1, 1, 1, 1, 1)),
    ("residual of 48", (0, 64, 32, 2, 1, 1, 1, 0, 2)),
    ("windows of 80", (0, 64, 80, 2, 2, 1, 1, 1, 1)),
    ("windows of 80", (0, 128, 64, 2, 1, 1, 2, 0, 2)),
    ("fp8 of 208", (0, 64, 64, 2, 1, 1, 1, 0, 1)),
    ("tf32, norm and GELU of 48", (0, 64, 48, 3, 2, 1, 1, 1, 1)),
    ("fp32 of 112", (0, 64, 112, 2, 2, 1, 1, 0, 1)),
]


@pytest.mark.parametrize(("name", "values"), CASES)
def test_right_in_every_schedule(name: str, values: tuple[int, ...]) -> None:
    group = GROUPS[name]()
    schedule = dict(zip(KNOBS, values, strict=True))
    program = GemmWgmma(group, TARGETS["sm_90a"]).emit(schedule)
    given = random_values(group, torch.device("cpu"), seed=1)
    for seed in (0, 1):
        assert not wrong_outputs(
            program, group, given, lambda p, g, v, seed=seed: run_on_host(p, g, v, seed)
        )


def test_multicast_is_right_in_many_schedules() -> None:
    """Lanes hand slots back to peers one by one: none may do so before its warp has read them."""
    group = GROUPS["norm and GELU"]()
    schedule = dict(zip(KNOBS, (1, 64, 24, 2, 1, 4, 1, 1, 1), strict=True))
    program = GemmWgmma(group, TARGETS["sm_90a"]).emit(schedule)
    given = random_values(group, torch.device("cpu"), seed=1)
    for seed in range(16):
        run_on_host(program, group, given, seed)


@pytest.mark.parametrize("swap", [0, 1])
def test_statistics_of_a_mean_that_is_large_against_the_spread(swap: int) -> None:
    """They are merged over threads, lanes and warps, in which a large mean must not cancel."""
    group = GROUPS["statistics of whole chunks"]()
    values = (swap, 64, 64, 2, 1, 1, 1, 0, 1)
    program = GemmWgmma(group, TARGETS["sm_90a"]).emit(dict(zip(KNOBS, values, strict=True)))
    given = random_values(group, torch.device("cpu"), seed=1)
    given["residual"] += 500
    assert not wrong_outputs(program, group, given, run_on_host)
