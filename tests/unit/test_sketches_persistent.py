"""The persistent GEMM sketch: limits, what it copies and keeps, lines, spills and source."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from gtco.codegen.program import TensorMapArgument
from gtco.codegen.sketch import Illegal
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.cubin import CompiledKernel, CubinCache
from gtco.target import TARGETS
from tests import groups
from tests.kernel_checks import first_default

H100 = TARGETS["sm_90a"]
FEW = dataclasses.replace(H100, sm_count=1)
"""Where even small results have two tiles for each block that stays."""
F16, BF16 = torch.float16, torch.bfloat16
CASES = groups.GEMM_CASES


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("qkv", {"cooperative": 1, "block_m": 64}, "64 or 128 rows, not 32"),
        ("qkv", {"block_m": 256}, "64 or 128 rows, not 256"),
        ("qkv", {"block_m": 128, "block_n": 256}, "256 accumulators a thread, of 192"),
        ("qkv", {"cooperative": 1, "block_m": 192, "block_n": 224}, "112 accumulators .*, of 96"),
        ("qkv", {"cooperative": 1, "block_m": 256, "block_n": 192, "atoms": 2},
         "shared memory .* sm_90a has"),
        ("projection", {"block_n": 96}, "96 columns a tile cut the chunks of the row statistics"),
    ],
)  # fmt: skip
def test_persistent_says_which_limit_broke(case: str, changes: dict[str, int], reason: str) -> None:
    sketch = GemmPersistent(CASES[case](), FEW)
    defaults = {"cooperative": 0, "block_m": 64, "block_n": 64, "atoms": 1}
    with pytest.raises(Illegal, match=reason):
        sketch.emit(first_default(sketch, **{**defaults, **changes}))


def test_persistent_leaves_few_rows_to_others() -> None:
    with pytest.raises(Illegal, match="192 tiles of 64 x 64 are not two for each of 132 blocks"):
        GemmPersistent(CASES["fc1"](), H100)


def test_a_multiprocessor_has_one_persistent_block() -> None:
    sketch = GemmPersistent(groups.norm_linear(1576, 768, 3072, F16), H100)
    knobs = {"cooperative": 0, "block_m": 128, "block_n": 128}
    assert sketch.emit(first_default(sketch, **knobs)).grid == (132, 1, 1)
    few = GemmPersistent(groups.norm_linear(400, 768, 3072, F16), H100)
    assert few.emit(first_default(few, **knobs)).grid == (96, 1, 1)


def added(sizes: tuple[int, ...], columns: int = 256, order: tuple[int, ...] = ()) -> Group:
    """A linear of 33600 rows, and an image of `sizes`, permuted to `order`, that is added."""
    b = GraphBuilder()
    x, y = b.input("x", TensorSpec((240, 140, 128), F16)), b.input("y", TensorSpec(sizes, F16))
    product = b.add("linear", x, b.constant("w", torch.randn(columns, 128).half()))
    seen = b.add("permute", y, dims=order) if order else y
    return Group("added", b.build([b.add("add", product, seen)]))


@pytest.mark.parametrize(
    ("group", "copies"),
    [
        (lambda: added((240, 140, 256)), (0, 1)),
        (lambda: added((140, 240, 256), order=(1, 0, 2)), (0,)),  # rows without one stride
        (lambda: added((256, 240, 140), order=(1, 2, 0)), (0,)),  # columns apart
        (lambda: added((240, 1, 256)), (0,)),
        (lambda: added((240, 140, 1)), (0,)),
        (lambda: added((240, 140, 200), columns=200), (0,)),  # no 32 columns lie in order
        (lambda: groups.norm_linear(33600, 128, 256, F16), (0,)),
    ],
)
def test_persistent_copies_what_its_epilogue_reads_at_each_place(
    group: Callable[[], Group], copies: tuple[int, ...]
) -> None:
    sketch = GemmPersistent(group(), H100)
    knob = next(knob for knob in sketch.knobs() if knob.name == "copies")
    assert knob.choices == copies
    first = sketch.emit(next(iter(sketch.defaults())))
    maps = [each for each in first.arguments if isinstance(each, TensorMapArgument)]
    assert [each.value for each in maps[2:]] == ["y"] * (copies == (0, 1))
    assert first.schedule["copies"] == copies[-1]


@pytest.mark.parametrize(
    ("sizes", "block_n", "stays"),
    [
        ((100352, 24, 72), 96, True),
        ((100352, 24, 72), 64, False),  # a tile has a part of the columns
        ((100352, 576, 64), 64, True),
        ((100352, 3072, 64), 64, False),  # no room
        ((12544, 24, 72), 96, False),  # a block has one tile
    ],
)
def test_b_stays_where_a_tile_has_all_columns_and_there_is_room(
    sizes: tuple[int, int, int], block_n: int, stays: bool
) -> None:
    sketch = GemmPersistent(groups.plain_linear(*sizes, F16), H100)
    knobs = {"cooperative": 1, "block_m": 128, "block_n": block_n, "atoms": 1, "lines": 0}
    program = sketch.emit(first_default(sketch, **knobs))
    assert ("KEPT_AT" in program.source) == stays
    work = sketch.block_work(program)
    whole = work.steps * (128 + block_n) * 128
    assert (work.fill_bytes < whole) == (work.parts_of_b == 0) == stays


@pytest.mark.parametrize(
    ("group", "line"),
    [
        (lambda: groups.plain_linear(100352, 24, 72, F16), 72),
        (lambda: groups.plain_linear(25088, 40, 240, F16), 120),
        (lambda: groups.plain_linear(100352, 24, 60, F16), 0),
        (lambda: groups.residual_linear(100352, 24, 72, F16), 0),  # row statistics
        (lambda: groups.plain_linear(6272, 112, 672, F16), 0),  # several tiles
    ],
)
def test_which_rows_are_lines(group: Callable[[], Group], line: int) -> None:
    sketch = GemmPersistent(group(), H100)
    knob = next(knob for knob in sketch.knobs() if knob.name == "lines")
    assert knob.choices == ((0, 1) if line else (0,))
    legal = [program for schedule, program in sketch.legal() if schedule["lines"]]
    assert bool(legal) == (line > 0)
    assert all(f"LINES = {line}," in program.source for program in legal)


def test_persistent_schedules_neither_spill_nor_serialize_products() -> None:
    """The assembler says so where it waits for each wgmma before the next."""
    many_rows = (
        groups.norm_linear(1576, 768, 3072, F16, gelu=True),
        groups.norm_linear(6304, 1280, 3840, BF16),
        groups.residual_linear(1576, 3072, 768, F16),
    )
    programs = [
        sketch.emit(schedule)
        for sketch in (GemmPersistent(group, H100) for group in many_rows)
        for schedule in itertools.islice(sketch.defaults(), 6)
    ]
    jobs = [CompileJob(each.code, each.name, each.arch) for each in programs]
    for program, compiled in zip(programs, compile_many(jobs, 2, CubinCache(None)), strict=True):
        where = f"{dict(program.schedule)}"
        assert isinstance(compiled, CompiledKernel), f"{where}: {compiled}"
        assert compiled.spill_bytes == 0 and "serialized" not in compiled.log, where
        assert "setmaxnreg" not in compiled.log, where  # it says where it ignores one


def test_persistent_source(golden: Callable[[str, object], None]) -> None:
    sketch = GemmPersistent(groups.norm_linear(1576, 768, 3072, F16, gelu=True), H100)
    knobs = {"cooperative": 0, "block_m": 128, "block_n": 128, "atoms": 1}
    golden("gemm_persistent_fc1.cu", sketch.emit(first_default(sketch, **knobs, raster=4)).source)
