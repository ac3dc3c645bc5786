"""Kernels that walk either way: a few of each sketch, of several blocks and of odd shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from gtco.codegen.program import KernelProgram
from gtco.codegen.sketch import Sketch
from gtco.codegen.sketches.columnwise import Columnwise
from gtco.codegen.sketches.conv_mma import ConvMma
from gtco.codegen.sketches.conv_wgmma import ConvWgmma
from gtco.codegen.sketches.elementwise import Elementwise
from gtco.codegen.sketches.gemm_back_to_back import GemmBackToBack
from gtco.codegen.sketches.gemm_mma import GemmMma
from gtco.codegen.sketches.gemm_persistent import GemmPersistent
from gtco.codegen.sketches.gemm_wgmma import GemmWgmma
from gtco.codegen.sketches.grid_sample import GridSample
from gtco.codegen.sketches.resize import Resize
from gtco.codegen.sketches.rowwise import Rowwise
from gtco.codegen.sketches.squeeze import Squeeze
from gtco.codegen.sketches.stencil import Stencil
from gtco.codegen.sketches.stencil_tiles import StencilTiles
from gtco.codegen.sketches.transpose import Transpose
from gtco.ir.graph import Group
from gtco.target import TARGETS
from tests import (
    back_to_back_groups,
    column_groups,
    groups,
    squeeze_groups,
    stencil_groups,
    tile_groups,
    transpose_groups,
)
from tests.kernel_checks import first_default

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
H100 = TARGETS["sm_90a"]
FEW = replace(H100, sm_count=2, smem_per_block=160 * 1024)
"""So few multiprocessors that blocks of small kernels stay for several tiles."""


def _norm() -> Group:
    return groups.norm_linear(197, 136, 192, BF16, gelu=True)


def _residual() -> Group:
    return groups.residual_linear(197, 264, 256, F16)


def _products() -> Group:
    return groups.batched_matmul(3, 97, 200, 136, F16)


def _windows() -> Group:
    return groups.convolution((2, 13, 11, 72), 104, (3, 3), F16)


_STAYING = (GemmPersistent, GemmBackToBack, ConvMma, ConvWgmma)
_Case = tuple[type[Sketch], Callable[[], Group], Mapping[str, int]]
_OF_SWAPPED = {"swap": 1, "block_p": 64, "block_q": 24, "stages": 2}
_OF_TILES = {"channels": 48, "rows": 2, "strip": 4, "down": 2, "across": 2, "threads": 128}
_CASES: dict[str, _Case] = {
    "gemm_wgmma": (GemmWgmma, _norm, {}),
    "gemm_wgmma, products": (GemmWgmma, _products, {}),
    "gemm_wgmma, parts of K": (GemmWgmma, _residual, {"split": 2, "multicast": 1}),
    "gemm_wgmma, multicast": (
        GemmWgmma, _residual, {**_OF_SWAPPED, "split": 1, "multicast": 4, "cluster_q": 1},
    ),
    "gemm_wgmma, neighbours": (
        GemmWgmma,
        _residual,
        {**_OF_SWAPPED, "split": 2, "multicast": 1, "atoms": 1, "cluster_q": 3},
    ),
    "gemm_wgmma, windows": (GemmWgmma, _windows, {}),
    "gemm_mma": (GemmMma, _norm, {}),
    "gemm_mma, products": (GemmMma, _products, {}),
    "gemm_mma, groups": (GemmMma, groups.GROUPED_CASES["groups_of_more_columns_than_a_tile"], {}),
    "gemm_persistent": (GemmPersistent, _norm, {}),
    "gemm_persistent, products": (GemmPersistent, _products, {}),
    "gemm_persistent, turns": (
        GemmPersistent, _residual, {"cooperative": 0, "block_m": 64, "block_n": 64, "copies": 0},
    ),
    "gemm_persistent, a copied residual": (
        GemmPersistent, _residual, {"cooperative": 1, "block_m": 128, "block_n": 64, "copies": 1},
    ),
    "gemm_persistent, lines": (
        GemmPersistent,
        lambda: groups.norm_linear(300, 24, 72, F16, gelu=True),
        {"cooperative": 0, "block_m": 64, "block_n": 96, "copies": 0, "lines": 1},
    ),
    "gemm_persistent, windows": (
        GemmPersistent, _windows, {"cooperative": 0, "block_m": 64, "block_n": 64, "lines": 0},
    ),
    "gemm_back_to_back": (GemmBackToBack, back_to_back_groups.CASES["bottleneck"], {}),
    "gemm_back_to_back, rows": (GemmBackToBack, back_to_back_groups.CASES["perceptron"], {}),
    "conv_mma": (ConvMma, _windows, {}),
    "conv_mma, groups": (ConvMma, groups.GROUPED_CASES["groups_of_16"], {}),
    "conv_mma, frames": (ConvMma, groups.CONV_CASES["conv_3x3x3"], {}),
    "conv_wgmma": (ConvWgmma, _windows, {}),
    "squeeze": (Squeeze, squeeze_groups.CASES["se_512"], {"split": 1}),
    "squeeze, shared": (Squeeze, squeeze_groups.CASES["se_512"], {"split": 4}),
    "stencil": (Stencil, stencil_groups.CASES["depthwise_3x3"], {}),
    "stencil, parts": (Stencil, stencil_groups.CASES["three_behind_a_token"], {}),
    "stencil, pieces": (Stencil, stencil_groups.CASES["mean_beside_skips"], {}),
    "stencil, statistics": (Stencil, stencil_groups.STATISTICS["stats_232"], {}),
    "stencil_tiles": (
        StencilTiles, lambda: stencil_groups.depthwise((2, 13, 17, 96), (3, 3)), _OF_TILES,
    ),
    "resize": (Resize, stencil_groups.RESIZES["bilinear_up"], {}),
    "resize, pieces": (Resize, stencil_groups.RESIZES["resize_between_skips"], {"threads": 64}),
    "grid_sample": (GridSample, stencil_groups.SAMPLES["bilinear"], {}),
    "grid_sample, shares": (GridSample, stencil_groups.SAMPLES["sum_of_heads"], {}),
    "columnwise": (Columnwise, column_groups.COLUMNWISE["channels"], {}),
    "columnwise, means": (Columnwise, column_groups.COLUMNWISE["gated"], {}),
    "rowwise": (Rowwise, tile_groups.ROWWISE["norm_residual"], {}),
    "rowwise, merged": (Rowwise, tile_groups.ROWWISE["merge"], {}),
    "elementwise": (Elementwise, tile_groups.ELEMENTWISE["pad_patch_7"], {}),
    "elementwise, group norm": (Elementwise, tile_groups.ELEMENTWISE["groups_320"], {}),
    "transpose": (Transpose, transpose_groups.CASES["copied_odd_channels"], {}),
}  # fmt: skip
CASES = tuple(_CASES)


def made(case: str) -> tuple[Group, KernelProgram]:
    """A group and its kernel, of several blocks."""
    kind, make, changes = _CASES[case]
    group = make()
    sketch = kind(group, FEW if kind in _STAYING else H100)
    return group, sketch.emit(first_default(sketch, **changes))
