"""In which order columns come that a lane of a wgmma epilogue has side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gtco.codegen.program import TensorMapArgument
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.codegen.sketches.row_orders import by_width
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.target import TARGETS
from tests import groups

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
H100 = TARGETS["sm_90a"]
FEW = replace(H100, sm_count=1)
"""Where even small results have two tiles for each block that stays."""
ONE_BLOCK = {
    "swap": 0, "block_p": 64, "block_q": 64, "stages": 2, "split": 1, "multicast": 1,
    "cluster_q": 1,
}  # fmt: skip


def by_rows(rows: int, k: int, columns: int) -> Group:
    """One product, whose B lies in rows of K."""
    b = GraphBuilder()
    x, y = b.input("x", TensorSpec((rows, k), F16)), b.input("y", TensorSpec((k, columns), F16))
    return Group("by_rows", b.build([b.add("matmul", x, y)]))


@pytest.mark.parametrize(
    ("group", "width"),
    [
        (lambda: groups.plain_linear(300, 72, 160, F16), 8),
        (lambda: groups.plain_linear(300, 72, 144, F16), 4),
        (lambda: groups.plain_linear(300, 72, 48, BF16), 4),
        (lambda: groups.plain_linear(300, 72, 136, F16), 2),
        (lambda: groups.convolution((2, 13, 11, 72), 80, (3, 3), F16), 4),
        (lambda: groups.tf32(groups.plain_linear(300, 72, 48, F32)), 4),
        (lambda: groups.rotary_linear(300, 72, 2, 2, 20, F16), 4),  # heads of five fours
        (lambda: groups.rotary_linear(300, 72, 2, 4, 20, F16), 2),
        (lambda: groups.rotary_linear(300, 72, 2, 4, 10, F16), 2),
        (lambda: groups.batched_matmul(2, 97, 64, 144, F16, transposed=True), 2),
        (lambda: by_rows(300, 72, 144), 2),
    ],
)
def test_a_lane_has_columns_side_by_side_where_whole_parts_of_b_come_in_another_order(
    group: Callable[[], Group], width: int
) -> None:
    for sketch, changes in (
        (GemmPersistent(group(), FEW), {"lines": 0}),
        (GemmWgmma(group(), H100), ONE_BLOCK),
    ):
        program = sketch.emit({**next(iter(sketch.defaults())), **changes})
        assert f"WIDTH = {width}" in program.source
        b_map = program.arguments[1]
        assert isinstance(b_map, TensorMapArgument)
        assert (len(b_map.sizes) == 5) == (width > 2)


@pytest.mark.parametrize("changes", [{"block_q": 72}, {"multicast": 2}])
def test_tiles_of_no_whole_part_of_b_and_shared_copies_leave_its_order(
    changes: dict[str, int],
) -> None:
    sketch = GemmWgmma(groups.plain_linear(256, 72, 144, F16), H100)
    program = sketch.emit({**next(iter(sketch.defaults())), **ONE_BLOCK, **changes})
    assert "WIDTH = 2;" in program.source


@pytest.mark.parametrize("width", [2, 4, 8])
def test_rows_come_in_the_order_in_which_a_lane_has_neighbours(width: int) -> None:
    """wgmma gives lane t columns 8 j + 2 t and the next: they are `width` that lie side by side."""
    size, pitch = 8 * width, 40
    plain = TensorMapArgument("w", 0, F16, (40, size, 1), (pitch, size * pitch), (64, size, 1))
    ordered = by_width(plain, width)
    rows = torch.as_strided(
        torch.arange(size * pitch) // pitch, ordered.sizes[:0:-1], ordered.strides[::-1]
    )
    lanes = rows.reshape(-1, width // 2, 4, 2).permute(0, 2, 1, 3)
    assert lanes.flatten().tolist() == list(range(size))
