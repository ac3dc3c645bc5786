"""The features that the learned cost model sees: one documented number each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gtco.cost_model.model import draft_us, resident_blocks
from gtco.cost_model.work import Work
from gtco.target import Target

FEATURES_VERSION = 7
"""Moves whenever a feature is added, dropped or computed otherwise."""

FAMILIES = (
    "gemm_wgmma",
    "gemm_mma",
    "gemm_persistent",
    "attention",
    "attention_wgmma",
    "rowwise",
    "elementwise",
)
"""Sketches with a feature of their own: `is_<name>`."""
KNOBS = (
    "swap",
    "multicast",
    "atoms",
    "raster",
    "block_k",
    "warps_m",
    "warps_n",
    "warps_k",
    "copy_warps",
    "vectors",
    "lanes",
    "warps_per_row",
    "row_warps",
    "rows_first",
)
"""Knobs that no other feature expresses: `knob_<name>`, NaN where the sketch has none."""


def _waves(work: Work, target: Target) -> float:
    return work.blocks / (target.sm_count * resident_blocks(work, target))


def _mma_us(work: Work, target: Target) -> float:
    return work.blocks * work.block.mma_flops / (work.group.peak_tflops(target) * 1e6)


def _moved(work: Work) -> int:
    return work.group.weight_bytes + work.group.read_bytes + work.group.written_bytes


def _tail(work: Work, target: Target) -> float:
    waves = _waves(work, target)
    return math.ceil(waves) - waves


_NUMBERS: Mapping[str, tuple[str, Callable[[Work, Target], float]]] = {
    "matmul_flops": ("log2 of the group's contraction", lambda w, t: _log(w.group.matmul_flops)),
    "pointwise_flops": (
        "log2 of its fp32 instructions",
        lambda w, t: _log(w.group.pointwise_flops),
    ),
    "weight_bytes": ("log2, from device memory", lambda w, t: _log(w.group.weight_bytes)),
    "read_bytes": ("log2 of the activations read", lambda w, t: _log(w.group.read_bytes)),
    "written_bytes": ("log2 of the results", lambda w, t: _log(w.group.written_bytes)),
    "half": ("1 for 16-bit operands, 2 for 8-bit ones", lambda w, t: w.group.half),
    "blocks": ("log2 of the grid", lambda w, t: _log(w.blocks)),
    "threads": ("of a block", lambda w, t: w.threads),
    "smem_bytes": ("dynamic, of a block", lambda w, t: w.smem_bytes),
    "registers": ("of a thread, the sketch's estimate", lambda w, t: w.block.registers),
    "cluster": ("blocks of a cluster", lambda w, t: w.cluster),
    "split": ("blocks that share a main loop", lambda w, t: w.block.split),
    "stages": ("steps in flight", lambda w, t: w.block.stages),
    "depth": ("steps whose products are not awaited at once", lambda w, t: w.block.depth),
    "steps": ("of the main loop", lambda w, t: w.block.steps),
    "tiles": ("of results, one after the other", lambda w, t: w.block.tiles),
    "consumers": ("warpgroups that take tiles in turn", lambda w, t: w.block.consumers),
    "tile_p": ("rows of a block's results", lambda w, t: w.block.tile_p),
    "tile_q": ("columns of a block's results", lambda w, t: w.block.tile_q),
    "mma_flops": ("log2 of one block's, padding included", lambda w, t: _log(w.block.mma_flops)),
    "padding": (
        "matrix work done per matrix work asked, at least 1; 1 without any",
        lambda w, t: w.blocks * w.block.mma_flops / (w.group.matmul_flops or math.inf) or 1.0,
    ),
    "fill_bytes": ("log2, into one block's shared memory", lambda w, t: _log(w.block.fill_bytes)),
    "l2_bytes": ("log2, what all blocks draw", lambda w, t: _log(w.blocks * w.block.l2_bytes)),
    "in_flight_bytes": (
        "of one block's stages",
        lambda w, t: w.block.stages * w.block.fill_bytes / w.block.steps,
    ),
    "sm_in_flight_bytes": (
        "of all blocks of a multiprocessor",
        lambda w, t: (
            min(resident_blocks(w, t), -(-w.blocks // t.sm_count))
            * w.block.stages
            * w.block.fill_bytes
            / w.block.steps
        ),
    ),
    "l2_footprint": ("log2 of the distinct bytes read and written", lambda w, t: _log(_moved(w))),
    "reuse": (
        "drawn from L2 per distinct byte",
        lambda w, t: w.blocks * w.block.l2_bytes / _moved(w),
    ),
    "intensity": (
        "matrix work per byte filled",
        lambda w, t: w.block.mma_flops / w.block.fill_bytes,
    ),
    "resident": ("blocks that fit a multiprocessor", lambda w, t: resident_blocks(w, t)),
    "occupancy": (
        "resident threads, of 2048",
        lambda w, t: resident_blocks(w, t) * w.threads / 2048,
    ),
    "waves": ("blocks over what fits the chip", _waves),
    "tail": ("the empty part of the last wave", _tail),
    "chip": ("blocks per multiprocessor", lambda w, t: w.blocks / t.sm_count),
    "dram_us": (
        "weights at the rate of device memory",
        lambda w, t: w.group.weight_bytes / (t.dram_gbps * 1e3),
    ),
    "l2_us": (
        "all that blocks draw, at L2's rate",
        lambda w, t: w.blocks * w.block.l2_bytes / (t.l2_gbps * 1e3),
    ),
    "mma_us": ("matrix work at the peak rate", _mma_us),
    "fp32_us": (
        "fp32 instructions at the peak rate",
        lambda w, t: w.group.pointwise_flops / (t.fp32_tflops * 1e6),
    ),
    "draft_us": ("the draft model's answer", draft_us),
}

FEATURES: Mapping[str, str] = {
    **{name: text for name, (text, _) in _NUMBERS.items()},
    **{f"is_{name}": f"1 for a {name} kernel" for name in FAMILIES},
    **{f"knob_{name}": "the knob's value, NaN without it" for name in KNOBS},
}
"""Every feature by name, in order, with its meaning."""


def features(work: Work, target: Target) -> dict[str, float]:
    """The features of one program, in the order of `FEATURES`."""
    return {
        **{name: float(number(work, target)) for name, (_, number) in _NUMBERS.items()},
        **{f"is_{name}": float(work.sketch == name) for name in FAMILIES},
        **{f"knob_{name}": float(work.schedule.get(name, math.nan)) for name in KNOBS},
    }


def _log(number: float) -> float:
    return math.log2(1 + number)
