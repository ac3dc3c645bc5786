"""Every pair of knob values of every sketch compiles, wherever a legal schedule has the pair: all
with `--thorough`, else most.

Two knobs whose values clash (a tile, a split, a wait that only one of them needs) show up in some
pair; covering the pairs instead of the product takes hundreds of programs instead of thousands.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.rules import SKETCHES
from gtco.codegen.sketch import Illegal, Schedule, Sketch
from gtco.codegen.sketches.attention import Attention
from gtco.codegen.sketches.attention_projection import AttentionProjection
from gtco.codegen.sketches.attention_wgmma import AttentionWgmma
from gtco.codegen.sketches.columnwise import Columnwise
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_skinny import GemmSkinny
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.codegen.sketches.grid_sample import GridSample
from gtco.codegen.sketches.resize import Resize
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.codegen.sketches.squeeze import Squeeze
from gtco.codegen.sketches.stencil import Stencil
from gtco.codegen.sketches.stencil_tiles import StencilTiles
from gtco.codegen.sketches.topk import TopK
from gtco.codegen.sketches.transpose import Transpose
from gtco.ir.graph import Group
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.cubin import CompiledKernel, CubinCache
from gtco.target import TARGETS
from tests import (
    attention_groups,
    back_to_back_groups,
    column_groups,
    groups,
    projection_groups,
    squeeze_groups,
    stencil_groups,
    tile_groups,
    transpose_groups,
)

F16, BF16 = torch.float16, torch.bfloat16
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_120")
MOST_PROGRAMS, FEW_PROGRAMS = 700, 150
"""Of all pairs; and the first ones of them, which have most pairs."""
WORKERS = 2

CASES: dict[str, tuple[type[Sketch], Callable[[], Group]]] = {
    "wgmma": (GemmWgmma, lambda: groups.norm_linear(65, 512, 256, F16, gelu=True)),
    "persistent": (GemmPersistent, lambda: groups.norm_linear(1576, 1280, 768, F16, gelu=True)),
    "persistent_stats": (GemmPersistent, lambda: groups.residual_linear(4500, 264, 256, BF16)),
    "skinny": (GemmSkinny, lambda: groups.norm_linear(3, 1288, 1000, F16, gelu=True)),
    "mma": (GemmMma, lambda: groups.norm_linear(197, 768, 2304, BF16)),
    "mma_gathered": (GemmMma, lambda: groups.patch_embedding(56, 14, 128, F16)),
    "patches": (ConvMma, lambda: groups.convolution((2, 7, 28, 30, 16), 40, (2, 3, 3), F16)),
    "planes": (ConvWgmma, lambda: groups.convolution((2, 7, 28, 30, 16), 40, (2, 3, 3), F16)),
    "attention": (Attention, lambda: attention_groups.packed(197, 12, 64)),
    "attention_wgmma": (AttentionWgmma, lambda: attention_groups.packed(197, 12, 64)),
    "projected": (
        AttentionProjection,
        lambda: projection_groups.projected(4, 197, 64, 256, residual=True, stats=True),
    ),
    "rows": (Rowwise, lambda: tile_groups.class_token(197, 768, stats=True)),
    "columns": (Rowwise, lambda: tile_groups.softmax(3, 13, 40, dim=1)),
    "pixels": (Columnwise, column_groups.COLUMNWISE["gated_volume"]),
    "channels": (Columnwise, column_groups.COLUMNWISE["groups_of_4"]),
    "merged": (Rowwise, lambda: tile_groups.merge_stats(197, 768)),
    "back_to_back": (
        GemmBackToBack,
        lambda: back_to_back_groups.bottleneck(8448, (64, 256, 64), F16),
    ),
    "squeeze": (Squeeze, squeeze_groups.CASES["se_512"]),
    "stencil": (Stencil, stencil_groups.CASES["depthwise_3x3"]),
    "stencil_tiles": (StencilTiles, stencil_groups.TILES["statistics of 96"]),
    "resize": (Resize, next(iter(stencil_groups.RESIZES.values()))),
    "grid_sample": (GridSample, stencil_groups.SAMPLES["bilinear_heads"]),
    "sample_sum": (GridSample, stencil_groups.SAMPLES["sum_of_heads"]),
    "topk": (TopK, tile_groups.TOPK["five_of_1000"]),
    "groups": (
        Elementwise,
        lambda: tile_groups.normalize_groups(5, 3, 7, 24, groups=3, chunks=7),
    ),
    "elementwise": (Elementwise, lambda: tile_groups.class_token(197, 768)),
    "transpose": (Transpose, transpose_groups.CASES["normalized"]),
}
"""Each sketch on groups that have what its knobs touch."""


@dataclass(frozen=True)
class Legal:
    """A schedule of a case, and its program for each architecture where it is legal."""

    case: str
    schedule: Schedule
    programs: tuple[KernelProgram, ...]

    def pairs(self) -> Iterator[tuple[object, ...]]:
        """Every two knobs with their values, each knob alone too; apart by case."""
        for pair in itertools.combinations_with_replacement(self.schedule.items(), 2):
            yield (self.case, *pair)

    def __str__(self) -> str:
        return f"{self.case} {dict(self.schedule)}"


def cover(legal: Sequence[Legal], most: int, seed: int) -> tuple[list[Legal], int]:
    """A few of `legal` that have as many of all their pairs as `most` of them can, greedily.

    Returns:
        The chosen ones and how many pairs they lack.
    """
    shuffled = random.Random(seed).sample(legal, len(legal))
    bit: dict[tuple[object, ...], int] = {}
    masks = [sum(1 << bit.setdefault(pair, len(bit)) for pair in each.pairs()) for each in shuffled]
    missing = (1 << len(bit)) - 1
    chosen: list[Legal] = []
    while missing and len(chosen) < most:
        best = max(range(len(masks)), key=lambda at: (masks[at] & missing).bit_count())
        missing &= ~masks[best]
        chosen.append(shuffled[best])
    return chosen, missing.bit_count()


@pytest.fixture(scope="module")
def legal() -> list[Legal]:
    """Every schedule of every case that is legal on any of the architectures."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[KernelProgram]] = {}
    for (case, (kind, make)), arch in itertools.product(CASES.items(), ARCHITECTURES):
        try:
            sketch = kind(make(), TARGETS[arch])
        except Illegal:
            continue
        for schedule, program in sketch.legal():
            found.setdefault((case, tuple(schedule.items())), []).append(program)
    return [
        Legal(case, dict(schedule), tuple(programs)) for (case, schedule), programs in found.items()
    ]


def test_a_greedy_cover_has_every_pair() -> None:
    sketch = Elementwise(tile_groups.gelu_bias(4, 8), TARGETS["sm_80"])
    legal = [Legal("case", schedule, (program,)) for schedule, program in sketch.legal()]
    chosen, missing = cover(legal, 100, seed=0)
    assert missing == 0
    assert {pair for each in chosen for pair in each.pairs()} == {
        pair for each in legal for pair in each.pairs()
    }
    assert cover(legal, 100, seed=0)[0] == chosen
    assert cover(legal, 2, seed=0)[1] > 0


def test_every_case_is_legal_where_its_sketch_is(legal: list[Legal]) -> None:
    assert {kind for kind, _ in CASES.values()} == set(SKETCHES)
    found = {(each.case, program.arch) for each in legal for program in each.programs}
    for case, (kind, _) in CASES.items():
        hopper = (
            GemmWgmma, GemmPersistent, GemmBackToBack, ConvWgmma, AttentionProjection,
            AttentionWgmma,
        )  # fmt: skip
        expected = {"sm_90a"} if kind in hopper else set(ARCHITECTURES)
        assert {arch for name, arch in found if name == case} == expected


def test_no_legal_program_breaks_a_limit(legal: list[Legal]) -> None:
    programs = [(each, program) for each in legal for program in each.programs]
    for each, program in programs:
        target = TARGETS[program.arch]
        where = f"{each} on {target.arch}"
        assert program.smem_bytes <= target.smem_per_block, where
        assert program.block <= 1024 and program.block % 32 == 0, where
        assert max(program.grid[1:]) <= 65535, where
        assert program.grid[0] % program.cluster[0] == 0 and program.cluster[0] <= 8, where
        assert program.cluster == (1, 1, 1) or target.has_wgmma, where


def test_every_pair_of_knob_values_compiles(
    legal: list[Legal],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    thorough = request.config.getoption("--thorough")
    chosen, missing = cover(legal, MOST_PROGRAMS, seed=0)
    assert not missing, f"{MOST_PROGRAMS} programs leave out {missing} pairs"
    chosen = chosen if thorough else chosen[:FEW_PROGRAMS]
    # Each for one architecture, in turns: all of them compile the same source.
    programs = [(each, each.programs[at % len(each.programs)]) for at, each in enumerate(chosen)]
    with capsys.disabled():
        print(f"\n{len(programs)} programs", end=" ")
    jobs = [CompileJob(program.code, program.name, program.arch) for _, program in programs]
    results = compile_many(jobs, WORKERS, CubinCache(tmp_path / "cubins"))
    for (each, program), result in zip(programs, results, strict=True):
        where = f"{each} on {program.arch}"
        assert isinstance(result, CompiledKernel), f"{where}: {result}"
        smem_bytes = result.smem_bytes + program.smem_bytes
        assert smem_bytes <= TARGETS[result.arch].smem_per_block, where
        assert result.registers * program.block <= 65536, where
