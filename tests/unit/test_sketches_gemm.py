"""The GEMM sketches: derivation, refusals, limits, spills and source, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from gtco.codegen.rules import derive
from gtco.codegen.sketch import Illegal, Sketch
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.ir.graph import GraphBuilder, Group
from gtco.ir.spec import TensorSpec
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.cubin import CompiledKernel, CubinCache
from gtco.runtime.host import run_on_host
from gtco.target import TARGETS
from tests import groups
from tests.kernel_checks import first_default, inputs_of, sample, wrong_outputs

A100, H100 = TARGETS["sm_80"], TARGETS["sm_90a"]
FEW = dataclasses.replace(H100, sm_count=1)
"""Where even small results have two tiles for each block that stays."""
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

CASES = groups.GEMM_CASES
ONE_PRODUCT = "this sketch multiplies fp32 as tf32 alone"
NO_TENSOR_MAP = {
    "patch_16": "operand A .* is no K-major tile that a tensor map describes",
    "patch_14": "operand A .* is no K-major tile that a tensor map describes",
    "bmm_shared": "operand B .* is read again, which no tensor map describes",
    "bmm_odd": "operand A has rows that are not 16-byte aligned",
    "tf32_patch": "operand A .* is no K-major tile that a tensor map describes",
    "tf32_bmm": "operand A has rows that are not 16-byte aligned|operand B .* is no K-major tile",
    "fp32_odd": f"operand A has rows that are not 16-byte aligned|{ONE_PRODUCT}",
    "fp32_patch": f"operand A .* is no K-major tile that a tensor map describes|{ONE_PRODUCT}",
    "fp32_bmm": f"operand A has rows that are not 16-byte aligned|{ONE_PRODUCT}",
}
"""Cases that wgmma refuses even on sm_90a, and its sentence."""
FEW_ROWS = {"norm_odd", "one_row", "head", "rms_one_row", "rotary_one_row"}
"""Cases of at most 8 rows."""


def sketches(case: str) -> Iterator[Sketch]:
    """Every sketch of a case on every architecture that takes it."""
    for target in TARGETS.values():
        yield from derive(CASES[case](), "gemm", target).sketches


# -- derivation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_few_rows_come_first_then_wgmma_where_a_tensor_map_describes_the_operands(
    case: str,
) -> None:
    expected = ["gemm_mma"] if case in NO_TENSOR_MAP else ["gemm_wgmma", "gemm_mma"]
    expected += ["gemm_persistent"] if case == "fc1_huge" else []
    expected = ["gemm_skinny"] * (case in FEW_ROWS) + expected
    assert [each.name for each in derive(CASES[case](), "gemm", H100).sketches] == expected


@pytest.mark.parametrize("case", NO_TENSOR_MAP)
@pytest.mark.parametrize("kind", [GemmWgmma, GemmPersistent])
def test_wgmma_says_which_operand_it_cannot_copy(case: str, kind: type[Sketch]) -> None:
    with pytest.raises(Illegal, match=NO_TENSOR_MAP[case]):
        kind(CASES[case](), FEW)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_wgmma_needs_sm_90a(arch: str) -> None:
    derivation = derive(CASES["qkv"](), "gemm", TARGETS[arch])
    assert [each.name for each in derivation.sketches] == ["gemm_mma"]
    names = ("gemm_wgmma", "gemm_persistent")
    rows, *others, patches, planes = derivation.refusals
    assert rows == ("gemm_skinny", "197 rows, of 8 at most")
    reason = "rows of a matrix are no patch of an image"
    assert (patches, planes) == (("conv_mma", reason), ("conv_wgmma", reason))
    assert others == [(name, f"{arch} has no wgmma") for name in names]


def test_fp64_has_no_sketch_and_all_say_why() -> None:
    derivation = derive(groups.plain_linear(8, 64, 64, torch.float64), "gemm", H100)
    assert not derivation.sketches
    assert derivation.reason == (
        "gemm_skinny: mma.sync m16n8k16 takes no torch.float64; "
        "gemm_wgmma, gemm_mma, gemm_persistent: no tensor core multiplies torch.float64; "
        "conv_mma, conv_wgmma: rows of a matrix are no patch of an image"
    )


def chain(*ops: str) -> Group:
    """x through `ops`, a matmul with y."""
    b = GraphBuilder()
    x, y = (b.input(name, TensorSpec((16, 16), F16)) for name in "xy")
    for op in ops:
        x = b.add(op, x, y) if op == "matmul" else b.add(op, x)
    return Group("chain", b.build([x]))


@pytest.mark.parametrize("kind", [GemmSkinny, GemmMma, GemmWgmma, GemmPersistent])
@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (("matmul", "matmul"), "one contraction, not 2"),
        (("relu",), "one contraction, not 0"),
        (("relu", "matmul"), "operand %relu is made in the same kernel"),
    ],
)
def test_what_is_no_gemm(kind: type[Sketch], ops: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        kind(chain(*ops), FEW)


def test_equal_groups_have_equal_source() -> None:
    for kind in (GemmMma, GemmWgmma, GemmPersistent):
        first, second = (kind(CASES["fc1"](), FEW) for _ in range(2))
        schedule = next(iter(first.defaults()))
        assert first.emit(schedule).name == second.emit(schedule).name


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: groups.plain_linear(9, 64, 64, F16), "9 rows, of 8 at most"),
        (lambda: groups.batched_matmul(1, 1, 64, 72, F16, transposed=True), "2 products, each of"),
        (lambda: groups.plain_linear(1, 64, 64, F32), "takes no torch.float32"),
        (lambda: groups.plain_linear(1, 75, 64, F16), "operand A .* is not read by 16 bytes"),
        (lambda: groups.plain_linear(8, 4, 64, F16), "operand A .* is not read by 16 bytes"),
    ],
)
def test_skinny_says_what_it_leaves_to_others(make: Callable[[], Group], reason: str) -> None:
    with pytest.raises(Illegal, match=reason):
        GemmSkinny(make(), H100)


def test_skinny_reads_what_a_view_leaves_aligned() -> None:
    """The class token of each of four images: rows far apart."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 197, 768), F16))
    w = b.constant("w", torch.zeros(16, 768, dtype=F16))
    token = b.add("reshape", b.add("slice", x, dim=1, start=0, end=1), shape=(4, 768))
    sketch = GemmSkinny(Group("tokens", b.build([b.add("linear", token, w)])), H100)
    assert "row * 151296" in sketch.emit(next(iter(sketch.defaults()))).source


# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_defaults_are_legal(case: str) -> None:
    for sketch in sketches(case):
        names = [knob.name for knob in sketch.knobs()]
        schedules = list(sketch.defaults())
        assert schedules
        for schedule in schedules:
            assert list(schedule) == names
            assert sketch.emit(schedule).arch == sketch.target.arch


@pytest.mark.parametrize("case", ["projection", "fc1_huge", "head"])
def test_defaults_of_wgmma_differ_in_tiles_and_hardly_in_rings(case: str) -> None:
    """Of a tile one ring, of one atom a stage: more only where eight stages are little. Where four
    stages are more than the ring's share, there is one of four, too."""
    sketch = GemmWgmma(CASES[case](), H100)
    room = 0.7 * H100.smem_per_block
    schedules = list(sketch.defaults())
    rings: dict[tuple[int, ...], list[int]] = {}
    for schedule in schedules:
        atom = (schedule["block_p"] + schedule["block_q"]) * 128
        ring = schedule["stages"] * schedule["atoms"] * atom
        assert schedule["depth"] == 1 and schedule["stages"] <= 8
        assert ring <= room or schedule["stages"] in (2, 4)
        assert schedule["atoms"] == 1 or schedule["atoms"] * 8 * atom <= room
        steps = -(-sketch.steps // (schedule["split"] * schedule["atoms"]))
        all_that_fit = ring + schedule["atoms"] * atom > room
        assert all_that_fit or schedule["stages"] in (8, max(2, steps))
        tile = {name: value for name, value in schedule.items() if name != "stages"}
        rings.setdefault(tuple(tile.values()), []).append(schedule["stages"])
    assert all(len(each) == 1 or max(each) == 4 for each in rings.values())
    assert (max(schedule["atoms"] for schedule in schedules) > 1) == (case == "head")


def test_defaults_of_wgmma_have_sides_that_fill_the_multiprocessors() -> None:
    """33 tiles of 128 rows and one row: four by 32 tiles of 136 rows are one turn of blocks."""
    sketch = GemmWgmma(groups.plain_linear(33 * 128 + 1, 512, 512, F16), H100)
    first = next(iter(sketch.defaults()))
    assert (first["block_p"], first["block_q"], first["split"]) == (128, 136, 1)
    assert math.prod(sketch.emit(first).grid) == 128


@pytest.mark.parametrize(
    ("arch", "changes", "reason"),
    [
        ("sm_86", {"block_m": 128, "block_n": 256, "warps_m": 4, "warps_n": 4}, "shared memory .*"
         "sm_86 has 101376 B a block"),
        ("sm_80", {"block_m": 128, "block_n": 128, "warps_m": 1, "warps_n": 2},
         "256 accumulators a thread leave no registers"),
        ("sm_80", {"block_m": 16, "block_n": 32, "warps_m": 1, "warps_n": 4}, "no multiple of 16"),
        ("sm_80", {"block_m": 16, "warps_m": 2}, "16 rows over 2 warps"),
    ],
)  # fmt: skip
def test_mma_says_which_limit_broke(arch: str, changes: dict[str, int], reason: str) -> None:
    sketch = GemmMma(CASES["qkv"](), TARGETS[arch])
    with pytest.raises(Illegal, match=reason):
        sketch.emit(first_default(sketch, **changes))


def test_mma_transposed_tiles_span_64_elements() -> None:
    sketch = GemmMma(CASES["bmm"](), A100)
    with pytest.raises(Illegal, match="block_n 32: a transposed tile spans 64 elements"):
        sketch.emit(first_default(sketch, block_m=32, block_n=32, warps_m=1, warps_n=1))


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("qkv", {"block_p": 192, "block_q": 64, "stages": 8}, "shared memory .* sm_90a has"),
        ("qkv", {"block_p": 256, "block_q": 256}, "registers a thread, of"),
        ("qkv", {"split": 2, "multicast": 2}, "splits K or shares tiles, not both"),
        ("qkv", {"swap": 0, "block_p": 192, "multicast": 4}, "2 tiles along P .* by 4"),
        ("qkv", {"cluster_q": 2, "multicast": 2}, "splits K or shares tiles, not both"),
        ("qkv", {"block_q": 72, "cluster_q": 2}, "3 tiles along Q in clusters of 2"),
        ("qkv", {"block_q": 72, "cluster_q": 3, "split": 3}, "a cluster of 9 blocks"),
        ("batch", {"split": 2}, "split-K 2 exceeds the 1 steps of K"),
        ("projection", {"swap": 0, "block_q": 32}, "cut the chunks of the row statistics"),
    ],
)
def test_wgmma_says_which_limit_broke(case: str, changes: dict[str, int], reason: str) -> None:
    sketch = GemmWgmma(CASES[case](), H100)
    defaults = {"swap": 1, "block_p": 64, "block_q": 64, "stages": 2, "split": 1, "multicast": 1}
    defaults["cluster_q"] = 1
    with pytest.raises(Illegal, match=reason):
        sketch.emit(first_default(sketch, **{**defaults, **changes}))


@pytest.mark.parametrize(
    ("case", "arch", "changes", "reason"),
    [
        ("head", "sm_80", {"split": 2}, "sm_80 has no clusters"),
        ("one_row", "sm_90a", {"columns": 32}, "32 columns a block cut the chunks"),
        ("head", "sm_90a", {"warps": 8, "split": 4}, "32 warps share the 24 chunks of K"),
        ("head", "sm_90a", {"warps": 8, "ahead": 4}, "4 chunks ahead, a warp has 3"),
        ("head", "sm_90a", {"warps": 1, "columns": 64, "ahead": 6}, "192 registers of weights"),
        ("head", "sm_90a", {"warps": 8, "columns": 128, "ahead": 2},
         "about 230 registers a thread, of 168"),
    ],
)  # fmt: skip
def test_skinny_says_which_limit_broke(
    case: str, arch: str, changes: dict[str, int], reason: str
) -> None:
    sketch = GemmSkinny(CASES[case](), TARGETS[arch])
    with pytest.raises(Illegal, match=reason):
        sketch.emit(first_default(sketch, **{"split": 1, "ahead": 1, **changes}))


def test_skinny_is_taken_unmeasured_and_priced_below_wgmma() -> None:
    for make in (CASES["one_row"], CASES["head"], lambda: groups.residual_linear(1, 3072, 768, F16),
                 lambda: groups.norm_linear(1, 768, 3072, F16, gelu=True)):  # fmt: skip
        skinny, wgmma = (kind(make(), H100) for kind in (GemmSkinny, GemmWgmma))
        assert derive(make(), "gemm", H100).sketches[0].name == skinny.name
        ours, theirs = (sketch._cost(next(iter(sketch.defaults()))) for sketch in (skinny, wgmma))
        assert ours < theirs


def test_skinny_fetches_all_weights_of_a_vit_at_once() -> None:
    for make in (CASES["one_row"], CASES["head"], lambda: groups.residual_linear(1, 3072, 768, F16),
                 lambda: groups.norm_linear(1, 768, 3072, F16, gelu=True)):  # fmt: skip
        sketch = GemmSkinny(make(), H100)
        schedule = next(iter(sketch.defaults()))
        parts = schedule["warps"] * schedule["split"] * 32
        assert schedule["ahead"] == -(-sketch.problem.k // parts)


def test_a_smaller_shared_memory_takes_fewer_schedules() -> None:
    counts = [
        len(list(GemmMma(CASES["qkv"](), TARGETS[arch]).legal()))
        for arch in ("sm_86", "sm_80", "sm_90a")
    ]
    assert counts[0] < counts[1] <= counts[2]


# -- meaning ---------------------------------------------------------------------------------------

SMALL: dict[str, Callable[[], Group]] = {
    "norm_gelu": lambda: groups.norm_linear(37, 200, 136, F16, gelu=True),
    "residual_stats": lambda: groups.residual_linear(33, 136, 128, BF16),
    "odd_columns": lambda: groups.plain_linear(19, 72, 91, F16),
    "patches": lambda: groups.patch_embedding(42, 14, 72, F16),
    "bmm_odd": lambda: groups.batched_matmul(2, 17, 45, 39, BF16),
    "bmm_transposed": lambda: groups.batched_matmul(1, 35, 64, 72, F16, transposed=True),
    "tf32_norm": lambda: groups.tf32(groups.norm_linear(37, 100, 72, F32, gelu=True)),
    "tf32_stats": lambda: groups.tf32(groups.residual_linear(33, 68, 128, F32)),
    "tf32_patches": lambda: groups.tf32(groups.patch_embedding(42, 14, 72, F32)),
    "tf32_bmm": lambda: groups.tf32(groups.batched_matmul(2, 17, 45, 39, F32)),
    "fp32_norm": lambda: groups.norm_linear(37, 100, 72, F32, gelu=True),
    "fp32_stats": lambda: groups.residual_linear(33, 68, 128, F32),
    "fp32_patches": lambda: groups.patch_embedding(42, 14, 72, F32),
    "fp32_bmm": lambda: groups.batched_matmul(2, 17, 45, 39, F32),
}


@pytest.mark.compiler
@pytest.mark.parametrize("case", SMALL)
def test_mma_is_right_on_the_cpu(case: str) -> None:
    group = SMALL[case]()
    values = inputs_of(group)
    for program in sample(GemmMma(group, A100), 1, seed=1):
        assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
@pytest.mark.parametrize(("k", "slots"), [(72, 2), (136, 3), (264, 4)])
def test_a_short_loop_has_no_slots_that_it_does_not_reach(k: int, slots: int) -> None:
    group = groups.plain_linear(19, k, 91, F16)
    sketch, values = GemmMma(group, A100), inputs_of(group)
    program = sketch.emit(first_default(sketch, block_m=32, block_n=64, block_k=64, stages=4))
    assert program.smem_bytes == slots * (32 + 64) * 64 * 2
    assert not wrong_outputs(program, group, values, run_on_host)


@pytest.mark.compiler
def test_the_check_rejects_a_kernel_that_drops_the_end_of_k() -> None:
    group = SMALL["odd_columns"]()
    values = inputs_of(group)
    program = sample(GemmMma(group, A100), 0)[0]
    wrong = dataclasses.replace(program, source=program.source.replace("K = 72", "K = 64"))
    assert wrong.source != program.source
    assert wrong_outputs(wrong, group, values, run_on_host)


# -- source ----------------------------------------------------------------------------------------


def test_default_schedules_do_not_spill() -> None:
    programs = [
        sketch.emit(schedule)
        for case in CASES
        for sketch in sketches(case)
        if sketch.target in (A100, H100)
        for schedule in itertools.islice(sketch.defaults(), 1)
    ]
    jobs = [CompileJob(each.code, each.name, each.arch) for each in programs]
    for program, compiled in zip(programs, compile_many(jobs, 2, CubinCache(None)), strict=True):
        where = f"{program.sketch} {dict(program.schedule)} on {program.arch}"
        assert isinstance(compiled, CompiledKernel), f"{where}: {compiled}"
        assert compiled.spill_bytes == 0, where


def test_mma_source(golden: Callable[[str, object], None]) -> None:
    sketch = GemmMma(CASES["patch_16"](), A100)
    schedule = {
        "block_m": 64,
        "block_n": 64,
        "block_k": 64,
        "warps_m": 2,
        "warps_n": 2,
        "stages": 4,
    }
    golden("gemm_mma_patch.cu", sketch.emit(schedule).source)


def test_skinny_source(golden: Callable[[str, object], None]) -> None:
    sketch = GemmSkinny(CASES["one_row"](), H100)
    schedule = {"columns": 64, "warps": 3, "split": 8, "ahead": 1}
    golden("gemm_skinny_projection.cu", sketch.emit(schedule).source)


def test_wgmma_source(golden: Callable[[str, object], None]) -> None:
    sketch = GemmWgmma(CASES["projection"](), H100)
    knobs = {"swap": 1, "block_p": 128, "block_q": 104, "stages": 4, "split": 4, "multicast": 1}
    schedule = first_default(sketch, **knobs, atoms=1)
    golden("gemm_wgmma_projection.cu", sketch.emit(schedule).source)


def test_fp32_on_wgmma_neither_spills_nor_serializes_products() -> None:
    """While the tensor cores multiply, the warps write the next step's low parts."""
    cases = (groups.norm_linear(197, 768, 3072, F32, gelu=True),
             groups.residual_linear(197, 3072, 768, F32),
             groups.convolution((1, 14, 14, 256), 256, (3, 3), F32))  # fmt: skip
    programs = [
        sketch.emit(schedule)
        for sketch in (GemmWgmma(group, H100) for group in cases)
        for schedule in itertools.islice(sketch.defaults(), 0, 9, 3)
    ]
    jobs = [CompileJob(each.code, each.name, each.arch) for each in programs]
    for program, compiled in zip(programs, compile_many(jobs, 2, CubinCache(None)), strict=True):
        where = f"{dict(program.schedule)}"
        assert isinstance(compiled, CompiledKernel), f"{where}: {compiled}"
        assert compiled.spill_bytes == 0 and "serialized" not in compiled.log, where


@pytest.mark.parametrize("sketch_of", [GemmWgmma, GemmMma])
def test_drafts_count_results_where_blocks_come_in_waves(
    sketch_of: type[GemmWgmma] | type[GemmMma],
) -> None:
    """Of blocks that all run at once the next kernel hides them."""
    counted = []
    for rows in (197, 66800):
        sketch = sketch_of(groups.residual_linear(rows, 64, 256, F16), H100)
        work = sketch.block_work(sketch.emit(next(iter(sketch.defaults()))))
        counted.append(work is not None and work.writers > 0)
    assert counted == [False, True]


@pytest.mark.parametrize(
    ("make", "counted", "waits"),
    [
        (lambda: groups.plain_linear(64, 64, 64, F16), False, False),
        (lambda: groups.batched_matmul(1, 64, 68, 64, F16), False, False),
        (lambda: groups.batched_matmul(1, 64, 66, 64, F16), True, False),
        (lambda: groups.batched_matmul(1, 64, 65, 64, F16), True, True),
        (lambda: groups.tf32(groups.batched_matmul(1, 64, 65, 64, F32)), True, False),
    ],
    ids=["whole copies", "of 8 bytes", "of 4", "elements", "floats"],
)
def test_the_draft_counts_what_narrow_copies_take(
    make: Callable[[], Group], counted: bool, waits: bool
) -> None:
    sketch = GemmMma(make(), A100)
    work = sketch.block_work(sketch.emit(next(iter(sketch.defaults()))))
    assert (work.instructions > 0, work.awaited > 0) == (counted, waits)
