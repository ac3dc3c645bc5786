"""The GEMM of few rows on the host build: tails of K, rows and columns, clusters, rings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.cost_model.judge import random_values
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import groups
from tests.kernel_checks import wrong_outputs

pytestmark = pytest.mark.compiler

F16, BF16 = torch.float16, torch.bfloat16


def varying_weights(rows: int, k: int, columns: int) -> Group:
    """A linear whose weights an earlier kernel writes, and whose input is a constant."""
    b = GraphBuilder()
    x = b.constant("x", torch.linspace(-1, 1, rows * k).reshape(rows, k).to(F16))
    w = b.input("w", TensorSpec((columns, k), F16))
    return Group("varying_weights", b.build([b.add("relu", b.add("linear", x, w))]))


GROUPS: Mapping[str, Callable[[], Group]] = {
    "residual and statistics": lambda: groups.residual_linear(1, 768, 192, BF16),
    "statistics of 8 rows": lambda: groups.residual_linear(8, 328, 200, F16),
    "two batches of rows": lambda: groups.residual_linear(3, 136, 64, F16, batch=2),
    "norm and GELU": lambda: groups.norm_linear(3, 1000, 328, F16, gelu=True),
    "norm and GELU in bf16": lambda: groups.norm_linear(1, 264, 91, BF16, gelu=True),
    "large K": lambda: groups.plain_linear(2, 3072, 24, F16),
    "smallest K": lambda: groups.plain_linear(8, 8, 8, F16),
    "K of 72": lambda: groups.plain_linear(1, 72, 1000, BF16),
    "weights that vary": lambda: varying_weights(5, 200, 40),
}
KNOBS = ("columns", "warps", "split", "ahead")
CASES = [
    ("residual and statistics", (64, 3, 8, 1)),
    ("residual and statistics", (64, 4, 3, 2)),
    ("residual and statistics", (128, 8, 1, 1)),
    ("statistics of 8 rows", (64, 2, 4, 1)),
    ("statistics of 8 rows", (128, 1, 2, 2)),
    ("two batches of rows", (64, 2, 2, 1)),
    ("norm and GELU", (16, 4, 8, 1)),
    ("norm and GELU", (32, 3, 1, 4)),
    ("norm and GELU", (64, 2, 2, 3)),
    ("norm and GELU in bf16", (16, 3, 1, 3)),
    ("norm and GELU in bf16", (32, 4, 2, 2)),
    ("large K", (16, 12, 8, 1)),
    ("large K", (32, 15, 1, 3)),
    ("smallest K", (16, 1, 1, 1)),
    ("K of 72", (64, 1, 3, 1)),
    ("K of 72", (16, 2, 1, 1)),
    ("weights that vary", (16, 2, 2, 1)),
    ("weights that vary", (32, 3, 1, 3)),
]


@pytest.mark.parametrize(("name", "values"), CASES)
def test_right_in_every_schedule(name: str, values: tuple[int, ...]) -> None:
    group = GROUPS[name]()
    program = GemmSkinny(group, TARGETS["sm_90a"]).emit(dict(zip(KNOBS, values, strict=True)))
    given = random_values(group, torch.device("cpu"), seed=1)
    for seed in (0, 1):
        assert not wrong_outputs(
            program, group, given, lambda p, g, v, seed=seed: run_on_host(p, g, v, seed)
        )


@pytest.mark.parametrize("split", [1, 8])
def test_the_same_bits_in_many_orders(split: int) -> None:
    group = GROUPS["residual and statistics"]()
    schedule = {"columns": 64, "warps": 3, "split": split, "ahead": 1}
    program = GemmSkinny(group, TARGETS["sm_90a"]).emit(schedule)
    given = random_values(group, torch.device("cpu"), seed=1)
    first = run_on_host(program, group, given, 0)
    for seed in range(1, 6):
        again = run_on_host(program, group, given, seed)
        assert all(torch.equal(first[name], again[name]) for name in group.graph.outputs)
