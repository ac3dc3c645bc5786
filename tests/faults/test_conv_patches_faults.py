"""Faults planted in convolutions of patches, each of which the host build must catch; the twins
without one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_patches import ConvPatches
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import box_groups, groups
from tests.faults.templates import check_caught, planted, verdicts

pytestmark = pytest.mark.compiler

SCHEDULE = {
    "tile_t": 1,
    "tile_h": 4,
    "tile_w": 8,
    "block_n": 32,
    "chunks": 2,
    "warps_m": 1,
    "warps_n": 1,
    "stages": 2,
}


Scene = Callable[[], tuple[KernelProgram, Group]]


def _of(
    make: Callable[[], Group],
    kind: type[ConvPatches] = ConvMma,
    arch: str = "sm_80",
    smem_per_block: int | None = None,
    **changes: int,
) -> Scene:
    """By one multiprocessor, where a block goes from patch to patch of even a small image; with as
    much shared memory as the card has, if nothing is said."""

    def scene() -> tuple[KernelProgram, Group]:
        group, target = make(), TARGETS[arch]
        smem = smem_per_block or target.smem_per_block
        sketch = kind(group, replace(target, sm_count=1, smem_per_block=smem))
        return sketch.emit({**SCHEDULE, **changes}), group

    return scene


def _of_wgmma(make: Callable[[], Group], **changes: int) -> Scene:
    return _of(make, ConvWgmma, "sm_90a", **{"tile_h": 8, "warps_m": 4, **changes})


def _rows() -> tuple[KernelProgram, Group]:
    """The epilogue that gemm_wgmma shares, where rows follow one another."""
    group = groups.residual_linear(33, 72, 24, groups.F16, stats=False)
    sketch = GemmWgmma(group, TARGETS["sm_90a"])
    return sketch.emit(next(each for each in sketch.defaults() if not each["swap"])), group


SCENES: dict[str, Scene] = {
    "image": _of(lambda: groups.convolution((2, 7, 21, 24), 72, (3, 3), groups.F16)),
    "weights in stages": _of(
        lambda: groups.convolution((2, 7, 21, 48), 72, (3, 3), groups.F16), smem_per_block=30_000
    ),
    "one stage": _of(
        lambda: groups.convolution((1, 7, 9, 24), 24, (3, 3), groups.F16), stages=1, warps_m=2
    ),
    "strides": _of(
        lambda: groups.convolution(
            (1, 11, 27, 16), 24, (3, 4), groups.F16, stride=(2, 3), dilation=(1, 2)
        ),
        stages=1,
    ),
    "volume": _of(
        lambda: groups.convolution((2, 4, 5, 9, 16), 16, (2, 3, 3), groups.F16), tile_t=2
    ),
    "one chunk": _of(lambda: groups.convolution((1, 5, 9, 8), 16, (3, 3), groups.F16), chunks=1),
    "groups": _of(lambda: groups.convolution((1, 5, 9, 32), 24, (3, 3), groups.F16, groups=2)),
    "wgmma": _of_wgmma(
        lambda: groups.convolution((2, 17, 21, 24), 40, (3, 3), groups.F16), tile_h=16
    ),
    "warpgroups": _of_wgmma(
        lambda: groups.convolution((1, 14, 27, 16), 24, (3, 2), groups.BF16, stride=(1, 2)),
        tile_w=16,
        warps_m=8,
    ),
    "wgmma, five taps": _of_wgmma(
        lambda: groups.convolution((1, 10, 20, 16), 16, (3, 5), groups.F16)
    ),
    "wgmma, one stage": _of_wgmma(
        lambda: groups.convolution((1, 9, 9, 48), 16, (3, 3), groups.F16), stages=1
    ),
    "moments": _of(
        lambda: box_groups.of_lines(
            groups.convolution((2, 12, 24, 16), 40, (3, 3), groups.F16, residual=False), 1
        )
    ),
    "moments, volume": _of(
        lambda: box_groups.of_lines(
            groups.convolution((2, 3, 4, 16, 16), 24, (3, 3, 3), groups.F16, residual=False), 4
        ),
        tile_t=2,
    ),
    "rows": _rows,
}
FAULTS: dict[str, tuple[str, str, str]] = {
    "pixels beyond the border": ("image", "< Patch::CHUNKS && is_inside<A>(at)", "< Patch::CHUNKS"),
    "frames beyond the border": (
        "volume",
        "at.inside(W::SIZE_T, W::SIZE_H, W::SIZE_W)",
        "at.inside(W::SIZE_H, W::SIZE_W)",
    ),
    "rows ahead of the image": ("image", "origin.y * W::STRIDE_H - W::BEFORE_H", "origin.y"),
    "frames ahead of the volume": ("volume", "origin.z * W::STRIDE_T - W::BEFORE_T", "origin.z"),
    "the stride of rows": ("strides", "y_of(r) * W::STRIDE_H) * PITCH", "y_of(r)) * PITCH"),
    "the phase of strided columns": (
        "strides",
        "x % W::STRIDE_W * PHASE + x / W::STRIDE_W",
        "x",
    ),
    "taps that are not dilated": (
        "strides",
        "at % W::KERNEL_W * W::DILATION_W",
        "at % W::KERNEL_W",
    ),
    "frames of taps for their rows": (
        "volume",
        "pixel(t * W::DILATION_T, y * W::DILATION_H,",
        "pixel(y * W::DILATION_T, t * W::DILATION_H,",
    ),
    "chunks in one another's planes": (
        "image",
        "item % C::CHUNKS * Patch::PLANE",
        "(item + 1) % C::CHUNKS * Patch::PLANE",
    ),
    "one plane for both halves": ("image", "a_half * Patch::PLANE", "0 * Patch::PLANE"),
    "chunks beyond the channels": (
        "image",
        "n0 + n < C::N && chunk < Patch::CHUNKS",
        "n0 + n < C::N",
    ),
    "columns beyond the last": ("image", "n0 + n < C::N && chunk", "chunk"),
    "patches across": ("image", "number % ACROSS * C::TILE_W", "number % DOWN * C::TILE_W"),
    "patches of the first image": ("image", "at.image = number / FRAMES;", "at.image = 0;"),
    "patches of the first frames": ("volume", "number % FRAMES * C::TILE_T", "0 * C::TILE_T"),
    "windows of the first frame": ("volume", "(t_of(r) * W::STRIDE_T", "(0 * W::STRIDE_T"),
    "a tap beside the last": ("one chunk", "last && a_half, last && b_half", "false, false"),
    "no zeros for it": ("one chunk", "[thread] = 0;", "[thread];"),
    "both taps of a pair the same": (
        "one chunk",
        "a_half ? next : Patch::tap(tap)",
        "Patch::tap(tap)",
    ),
    "columns as they come": (
        "image",
        "(place & 24) >> 2 | (place & 6) << 2",
        "(place & 24) | (place & 6)",
    ),
    "columns of the first chunks alone": ("image", "* NEAR + item % NEAR;", "* NEAR;"),
    "weights of one row of taps": ("image", "row * W::KERNEL_W + x;", "x;"),
    "a part of the image again": ("image", "item = row * THREADS + thread", "item = thread"),
    "the last part left out": (
        "image",
        "row < Patch::ROWS; ++row) copy",
        "row < Patch::ROWS - 1; ++row) copy",
    ),
    "parts left out beside products": ("image", "beside(row);", ""),
    "another stage's slot": ("image", "slot = s % C::STAGES", "slot = (s + 1) % C::STAGES"),
    "a stage too early": ("image", "cp_async_wait<C::STAGES - 2>", "cp_async_wait<C::STAGES - 1>"),
    "a stage that is still read": ("one stage", "__syncthreads();  // the stage", "// the stage"),
    "no barrier behind the copies": (
        "one stage",
        "Products::show();\n      __syncthreads();",
        "Products::show();",
    ),
    "weights of the first step": (
        "weights in stages",
        "Patch::WEIGHTS * 16, s % STEPS, row)",
        "Patch::WEIGHTS * 16, 0, row)",
    ),
    "channels of the first step": (
        "image",
        "IMAGE * 16, patch, s % STEPS, row)",
        "IMAGE * 16, patch, 0, row)",
    ),
    "weights in one slot": (
        "weights in stages",
        "KEEPS_WEIGHTS ? step : slot",
        "KEEPS_WEIGHTS ? step : 0",
    ),
    "weights that stay, all of the first step": (
        "image",
        "KEEPS_WEIGHTS ? step : slot",
        "KEEPS_WEIGHTS ? 0 : slot",
    ),
    "weights that stay, the first step's again": (
        "image",
        "Patch::WEIGHTS * 16, at / Patch::ROWS,",
        "Patch::WEIGHTS * 16, 0,",
    ),
    "the image where weights stay": ("image", "KEEPS_WEIGHTS ? STEPS :", "KEEPS_WEIGHTS ? 1 :"),
    "all but the last patch copied": (
        "image",
        "if (patch >= C::PATCHES) return;",
        "if (patch >= C::PATCHES - 1) return;",
    ),
    "all but the last patch": (
        "image",
        "patch < C::PATCHES; patch",
        "patch < C::PATCHES - 1; patch",
    ),
    "sums of the patch before": ("image", "[e / 4][e % 4] = 0.0f;", "[e / 4][e % 4] += 0.0f;"),
    "channels of the first group": ("groups", "group * A::CHANNELS + chunk", "chunk"),
    "columns of the first group": (
        "groups",
        "first_column = (IsGrouped<C>::value ? group",
        "first_column = (IsGrouped<C>::value ? 0",
    ),
    "ahead of the kernel before": ("image", "  ptx::griddepcontrol_wait();\n", ""),
    "rows of no result stored": (
        "image",
        "return result(r).inside(W::O, W::P, W::Q);",
        "return true;",
    ),
    "rows of no result read": ("image", "return has(r) ? at(r) : row(origin);", "return at(r);"),
    "rows of the patch's first row": (
        "image",
        "origin.y + Patch::y_of(r)",
        "origin.y + Patch::y_of(0)",
    ),
    "rows of the first volume": ("volume", "at.image * W::O + at.z", "at.z"),
    "moments of boxes beside": ("moments", "at.y / 2) * (W::Q / 8)", "at.y / 2) * (W::Q / 16)"),
    "moments of boxes across alone": ("moments", "at.y / 2) * (W::Q / 8) + at.x / 8", "at.y / 2)"),
    "moments of the first line's boxes": ("moments", "(W::P / 2) + at.y / 2", "(W::P / 2)"),
    "moments of the first image": ("moments", "(at.image * W::O + at.z) * (W::P / 2)", "0"),
    "moments of the first frame": (
        "moments, volume",
        "(at.image * W::O + at.z) * (W::P / 2)",
        "at.image * W::O * (W::P / 2)",
    ),
    "moments of runs": (
        "moments",
        "put_moments<Functor::BOXES>(moments, rows_.box()",
        "put_moments<Functor::BOXES>(moments, rows_.at(0) / 16",
    ),
    "rows, beyond the last stored": ("rows", "return first + r < end;", "return true;"),
    "rows, beyond the last read": (
        "rows",
        "return min_of(first + r, end - 1);",
        "return first + r;",
    ),
    "rows, all the first": (
        "rows",
        "(int r) const { return first + r; }",
        "(int r) const { return first; }",
    ),
    "threads' copies not shown to wgmma": (
        "wgmma",
        "      Products::show();\n",
        "",
    ),
    "products not awaited": ("wgmma", "      products.wait();\n", ""),
    "no fence ahead of products": ("wgmma", "    ptx::wgmma_fence();\n", ""),
    "products never committed": ("wgmma", "    ptx::wgmma_commit_group();\n", ""),
    "wgmma, sums of the patch before": (
        "wgmma",
        "void clear() { empty_ = true; }",
        "void clear() {}",
    ),
    "sums of the last tap alone": ("wgmma", "        add = 1;\n", "        add = 0;\n"),
    "planes as far apart as those of weights": (
        "wgmma",
        "lane / 16 * Patch::PLANE",
        "lane / 16 * C::BLOCK_N",
    ),
    "one plane for both halves of wgmma's": (
        "wgmma",
        "lane / 16 * Patch::PLANE",
        "0 * Patch::PLANE",
    ),
    "the first line twice": ("wgmma", "* 16 + lane % 16;", "* 16 + lane % 8;"),
    "pixels overwritten too early": (
        "wgmma",
        "wgmma_wait_group<BUFFERS - 1>",
        "wgmma_wait_group<BUFFERS>",
    ),
    "those of a row of taps before": (
        "wgmma, five taps",
        "step == 0 && STEPS % BUFFERS != 0",
        "false",
    ),
    "columns of one plane": ("wgmma", "<C::BLOCK_N * 16, 128>", "<16, 128>"),
    "columns of one eight": ("wgmma", "<C::BLOCK_N * 16, 128>", "<C::BLOCK_N * 16, 16>"),
    "the first square twice": ("wgmma", "Patch::first_pixel(i * 64)", "Patch::first_pixel(0)"),
    "the first warpgroup's pixels": (
        "warpgroups",
        "Patch::first_pixel(row_ + row_of_lane)",
        "Patch::first_pixel(row_of_lane)",
    ),
    "the first warp's rows": ("wgmma", "% 128 / 32 * 16", "% 128 / 32 * 0"),
    "squares of lines": ("warpgroups", "r / (8 * SIDE) % (C::TILE_W / 8) * 8", "r / 8 % 2 * 8"),
    "wgmma, a stage that is still read": (
        "wgmma, one stage",
        "__syncthreads();  // the stage",
        "// the stage",
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_without_a_fault(scene: str) -> None:
    program, group = SCENES[scene]()
    assert not verdicts(program, group)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    scene, old, new = FAULTS[fault]
    program, group = SCENES[scene]()
    check_caught(planted(program, old, new), group)


def test_blocks_of_the_scenes_have_several_patches() -> None:
    program, _ = SCENES["image"]()
    assert program.grid[0] * 2 <= 12
