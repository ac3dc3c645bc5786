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


OF_WGMMA = {
    "tile_t": 1,
    "tile_h": 4,
    "tile_w": 16,
    "block_n": 32,
    "chunks": 2,
    "consumers": 1,
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
        return sketch.emit({**(SCHEDULE if kind is ConvMma else OF_WGMMA), **changes}), group

    return scene


def _of_wgmma(
    make: Callable[[], Group], smem_per_block: int | None = None, **changes: int
) -> Scene:
    return _of(make, ConvWgmma, "sm_90a", smem_per_block, **changes)


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
        lambda: groups.convolution((2, 17, 21, 24), 40, (3, 3), groups.F16), tile_h=8
    ),
    "wgmma, consumers": _of_wgmma(
        lambda: groups.convolution((1, 14, 37, 48), 24, (3, 2), groups.BF16, stride=(1, 2)),
        consumers=2,
    ),
    "wgmma, streamed": _of_wgmma(
        lambda: groups.convolution((1, 9, 37, 96), 40, (3, 3), groups.F16),
        smem_per_block=100_000,
        chunks=4,
        consumers=2,
    ),
    "wgmma, frames": _of_wgmma(
        lambda: groups.convolution((2, 4, 5, 17, 16), 16, (3, 3, 3), groups.F16), tile_t=2
    ),
    "wgmma, a concat": _of_wgmma(
        lambda: groups.joined((1, 9, 17), (48, 32), 32, groups.F16, (3, 3)), chunks=4
    ),
    "wgmma, groups": _of_wgmma(
        lambda: groups.convolution((1, 5, 9, 64), 48, (3, 3), groups.F16, groups=2)
    ),
    "wgmma, odd columns": _of_wgmma(
        lambda: groups.convolution((1, 5, 17, 32), 90, (3, 3), groups.F16), chunks=4
    ),
    "moments": _of(
        lambda: box_groups.of_lines(
            groups.convolution((2, 12, 48, 16), 40, (3, 3), groups.F16, residual=False), 1
        ),
        tile_w=16,
    ),
    "moments, volume": _of(
        lambda: box_groups.of_lines(
            groups.convolution((2, 3, 4, 16, 16), 24, (3, 3, 3), groups.F16, residual=False), 4
        ),
        tile_t=2,
        tile_w=16,
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
        "      }\n      __syncthreads();",
        "      }",
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
    "sums of the patch before": ("image", "[e / 4][e % 4] = 0;", "[e / 4][e % 4] += 0;"),
    "channels of the first group": ("groups", "group * A::CHANNELS + chunk", "chunk"),
    "columns of the first group": (
        "groups",
        "first_((IsGrouped<C>::value ? group",
        "first_((IsGrouped<C>::value ? 0",
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
    "moments of boxes beside": ("moments", "row(result(0)) / 16", "row(result(0)) / 16 + 1"),
    "moments of the first box": ("moments", "row(result(0)) / 16", "row(origin) / 16"),
    "moments of the first frame": ("moments, volume", "row(result(0)) / 16", "row(origin) / 16"),
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
    "products not awaited": ("wgmma", "      products.wait();\n", ""),
    "no fence ahead of products": ("wgmma", "      ptx::wgmma_fence();\n", ""),
    "products never committed": ("wgmma", "      ptx::wgmma_commit_group();\n", ""),
    "wgmma, sums of the patch before": (
        "wgmma",
        "void clear() { empty_ = true; }",
        "void clear() {}",
    ),
    "sums of the last taps alone": ("wgmma, a concat", "      add = 1;\n", "      add = 0;\n"),
    "one half of a pixel's chunks": ("wgmma", "half = lane / 16 * 16;", "half = 0;"),
    "the first line twice": ("wgmma", "first_ + lane % 16)", "first_ + lane % 8)"),
    "pixels as if rows were not swizzled": ("wgmma", "<< 4);\n  }", "<< 4) * 0 + byte;\n  }"),
    "pixels overwritten too early": (
        "wgmma",
        "wgmma_wait_group<BUFFERS - 1>",
        "wgmma_wait_group<BUFFERS>",
    ),
    "the same line for all rows of taps": ("wgmma", "[i % RUN + y]", "[i % RUN]"),
    "the same weights for all rows of taps": ("wgmma", "y * (W::KERNEL_W * Ring::TAP)", "0"),
    "weights of the first column of taps": (
        "wgmma",
        "of_pair(weights, chunk, pair) + tap * Ring::TAP",
        "of_pair(weights, chunk, pair)",
    ),
    "the first warp's rows": ("wgmma", "% 128 / 32 * (RUN * 16)", "% 128 / 32 * 0"),
    "the first tile twice": ("wgmma", "+ i % RUN * 16;", "+ 0 * i;"),
    "strided pixels as neighbours": ("wgmma, consumers", "(PLANES ? 1 : W::STRIDE_W)", "1"),
    "a consumer's patches again": (
        "wgmma, consumers",
        "KEEPS ? consumer * C::BLOCKS : 0",
        "0",
    ),
    "another consumer's ring": (
        "wgmma, consumers",
        "first_slot = KEEPS ? consumer * C::STAGES : 0",
        "first_slot = 0",
    ),
    "rings that do not go on": ("wgmma, consumers", "      round.template skip<STEPS>();\n", ""),
    "slots that nobody waits for": (
        "wgmma",
        "            ptx::mbarrier_wait(empty + 8 * slot, to.phase ^ 1);\n",
        "",
    ),
    "a slot handed back by one lane": (
        "wgmma",
        "    __syncwarp();  // all lanes' loads of pixels\n",
        "",
    ),
    "pixels nobody waits for": (
        "wgmma",
        "      ptx::mbarrier_wait(full + 8 * slot, from.phase);\n",
        "",
    ),
    "weights nobody waits for": (
        "wgmma",
        "          ptx::mbarrier_wait(kept_full + 8 * atom, 0);\n",
        "          ;\n",
    ),
    "wgmma, ahead of the kernel before": (
        "wgmma",
        "  ptx::griddepcontrol_wait();\n  const int consumer",
        "  const int consumer",
    ),
    "images ahead of the kernel before": (
        "wgmma",
        "    ptx::griddepcontrol_wait();\n    if (threadIdx.x > PRODUCER) return;",
        "    if (threadIdx.x > PRODUCER) return;",
    ),
    "weights of the first step alone": (
        "wgmma, streamed",
        "copies.weights(stage, place_of(step).k, barrier)",
        "copies.weights(stage, 0, barrier)",
    ),
    "another consumer's patch of a stage": (
        "wgmma, streamed",
        "+ consumer * Ring::IMAGE",
        "+ 0 * Ring::IMAGE",
    ),
    "patches that are not there stored": (
        "wgmma, streamed",
        "if (own == patch) epilogue.finish(patch);",
        "epilogue.finish(own);",
    ),
    "weights ahead, asked for again": ("wgmma, streamed", "if (step >= ahead) {", "if (true) {"),
    "wgmma, frames ahead of the volume": (
        "wgmma, frames",
        "origin.z * W::STRIDE_T - W::BEFORE_T, origin.image",
        "origin.z * W::STRIDE_T, origin.image",
    ),
    "wgmma, lines ahead of the image": (
        "wgmma, frames",
        "origin.y * W::STRIDE_H - W::BEFORE_H,\n",
        "origin.y * W::STRIDE_H,\n",
    ),
    "the first piece of a concat alone": (
        "wgmma, a concat",
        "if (place.piece == piece) map",
        "if (false) map",
    ),
    "weights of the first atom alone": (
        "wgmma, a concat",
        "at / CHUNKS * Ring::ATOM",
        "0 * Ring::ATOM",
    ),
    "weights where an atom begins": ("wgmma, a concat", "at % CHUNKS * 16", "0 * 16"),
    "wgmma, channels of the first group": (
        "wgmma, groups",
        "group * Windows::CHANNELS + place.channel",
        "place.channel",
    ),
    "wgmma, weights of the first group": (
        "wgmma, groups",
        "(IsGrouped<C>::value ? group * C::N : 0) + n0};",
        "n0};",
    ),
    "columns of the first tile": (
        "wgmma, odd columns",
        "weights_map, channel, first_column + n, tap",
        "weights_map, channel, n, tap",
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
