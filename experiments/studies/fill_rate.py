"""How fast a multiprocessor fills its shared memory from L2, and what a kernel boundary costs.

    python -m experiments.studies.fill_rate [--json FILE]

The fill kernel is a GEMM's main loop by itself: one thread copies tiles of P and Q through a ring
of mbarriers, a warpgroup takes them, with or without its wgmmas. P and Q have P_TILES and Q_TILES
tiles, a block for each pair, as a GEMM has. The time a step of 64 columns is the slope between a
short and a long K in a chain of launches. The boundary kernel loads and stores one word a thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.publish import provenance
from gtco.codegen.program import KernelProgram, Pointer, TensorMapArgument
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.driver import BoundLaunch
from gtco.runtime.run import Chain, load_program

SHORT, LONG = 12, 48
LAUNCHES = 20


@dataclass(frozen=True)
class Fill:
    """One way to fill shared memory.

    Args:
        block_p: rows of a P tile, of 128 bytes a step.
        block_q: rows of a Q tile.
        p_tiles: tiles of P; `p_tiles * q_tiles` blocks.
        q_tiles: tiles of Q.
        stages: of the ring.
        bulk: copy from a packed layout, one contiguous piece a tile, by cp.async.bulk.
        multicast: neighbours along P that share their Q tiles.
        halves: copies that a tile is cut into.
        math: 0 no wgmma, 1 with, 2 wgmma alone without copies.
    """

    block_p: int
    block_q: int
    p_tiles: int
    q_tiles: int
    stages: int = 5
    bulk: int = 0
    multicast: int = 1
    halves: int = 1
    math: int = 0


QKV, FC1, PROJ = Fill(64, 72, 36, 3), Fill(64, 104, 48, 2, 4), Fill(64, 32, 12, 7, 8)
WIDE = Fill(128, 104, 18, 2, 3)
FILLS = (
    *(replace(each, math=math) for each in (QKV, FC1, PROJ, WIDE) for math in (0, 1, 2)),
    *(replace(each, bulk=1) for each in (QKV, FC1, PROJ, WIDE)),
    *(replace(each, stages=each.stages * 2) for each in (QKV, PROJ)),
    *(replace(each, halves=2) for each in (QKV, FC1)),
    *(replace(each, multicast=many) for each in (QKV, FC1, PROJ) for many in (2, 4)),
    *(replace(QKV, bulk=1, multicast=many) for many in (2, 4)),
    *(replace(QKV, p_tiles=tiles, q_tiles=1) for tiles in (1, 8, 33, 66, 132)),
    *(replace(QKV, p_tiles=tiles, q_tiles=1, bulk=1) for tiles in (1, 33, 132)),
    replace(QKV, p_tiles=1, q_tiles=108),
    replace(QKV, p_tiles=108, q_tiles=1),
    replace(QKV, p_tiles=88, q_tiles=3),  # two blocks a multiprocessor
)

BULK = """
__device__ __forceinline__ void bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
"""
"""Copies a contiguous piece to shared memory; `barrier` counts its bytes."""
SOURCE = """#include "wgmma.cuh"
using namespace gtco;
{bulk_copy}
__device__ __forceinline__ void bulk_multicast(u32 to, const char* from, u32 bytes, u32 barrier,
                                               u16 blocks) {{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}}

constexpr int STEPS = {steps}, STAGES = {stages}, BLOCK_P = {block_p}, BLOCK_Q = {block_q};
constexpr int P_TILES = {p_tiles}, MULTICAST = {multicast}, HALVES = {halves}, MATH = {math};
constexpr bool BULK = {bulk};
constexpr int P_BYTES = BLOCK_P * 128, Q_BYTES = BLOCK_Q * 128, BYTES = P_BYTES + Q_BYTES;
constexpr int GROUPS = BLOCK_P / 64;

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, 1)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap p_map, const __grid_constant__ ptx::TensorMap
            q_map, const char* p, const char* q, float* out) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 ring = ptx::shared_address(smem), full = ring + STAGES * BYTES;
  const u32 empty = full + 8 * STAGES;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int p_tile = blockIdx.x % P_TILES, q_tile = blockIdx.x / P_TILES;
  const int rank = blockIdx.x % MULTICAST;
  if (thread == 0) {{
    for (int s = 0; s < STAGES; ++s) {{
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, GROUPS * 4 * MULTICAST);
    }}
    ptx::fence_mbarrier_init();
  }}
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
  if (warp == GROUPS * 4) {{
    if (lane == 0 && MATH != 2) {{
      for (int step = 0; step < STEPS; ++step) {{
        const int s = step % STAGES;
        const u32 to = ring + s * BYTES, done = full + 8 * s;
        if (step >= STAGES) ptx::mbarrier_wait(empty + 8 * s, (step / STAGES - 1) & 1);
        ptx::mbarrier_arrive_expect_tx(done, BYTES);
        for (int half = 0; half < HALVES; ++half) {{
          const int p_row = half * BLOCK_P / HALVES, q_row = half * BLOCK_Q / HALVES;
          const u32 p_to = to + p_row * 128, q_to = to + P_BYTES + q_row * 128;
          const char* p_from = p + (u64(p_tile) * STEPS + step) * P_BYTES + p_row * 128;
          const char* q_from = q + (u64(q_tile) * STEPS + step) * Q_BYTES + q_row * 128;
          if constexpr (BULK)
            bulk(p_to, p_from, P_BYTES / HALVES, done);
          else
            ptx::cp_async_bulk_tensor(p_to, p_map, step * 64, p_tile * BLOCK_P + p_row, 0, done);
          if (MULTICAST > 1 && step % MULTICAST == rank) {{
            if constexpr (BULK)
              bulk_multicast(q_to, q_from, Q_BYTES / HALVES, done, (1 << MULTICAST) - 1);
            else
              ptx::cp_async_bulk_tensor_multicast(q_to, q_map, step * 64, q_tile * BLOCK_Q + q_row,
                                                  0, done, (1 << MULTICAST) - 1);
          }}
          if (MULTICAST == 1) {{
            if constexpr (BULK)
              bulk(q_to, q_from, Q_BYTES / HALVES, done);
            else
              ptx::cp_async_bulk_tensor(q_to, q_map, step * 64, q_tile * BLOCK_Q + q_row, 0, done);
          }}
        }}
      }}
    }}
  }} else {{
    float acc[BLOCK_Q / 2];
    for (int i = 0; i < BLOCK_Q / 2; ++i) acc[i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {{
      const int s = step % STAGES;
      if constexpr (MATH != 2) ptx::mbarrier_wait(full + 8 * s, step / STAGES & 1);
      if constexpr (MATH > 0) {{
        const u32 a = ring + s * BYTES + warp / 4 * 64 * 128, b = ring + s * BYTES + P_BYTES;
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 128; k += 32)
          ptx::Wgmma<half_t, BLOCK_Q>::mma(acc, ptx::wgmma_descriptor(a, k),
                                           ptx::wgmma_descriptor(b, k), 1);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>(acc);
      }}
      if constexpr (MATH != 2) {{
        if (MULTICAST > 1) {{
          if (lane < MULTICAST) ptx::mbarrier_arrive_cluster(ptx::mapa(empty + 8 * s, lane));
        }} else if (lane == 0) {{
          ptx::mbarrier_arrive(empty + 8 * s);
        }}
      }}
    }}
    float sum = 0.0f;
    for (int i = 0; i < BLOCK_Q / 2; ++i) sum += acc[i];
    out[blockIdx.x * GROUPS * 128 + thread] = sum;
  }}
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
}}
"""

BOUNDARY = """#include "ptx.cuh"
using namespace gtco;

extern "C" __global__ void __launch_bounds__(256, 1)
ENTRY_POINT(const float* in, float* out) {{
  const int i = blockIdx.x * 256 + threadIdx.x;
  if ({early}) ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  out[i] = in[i] + 1.0f;
  if (!{early}) ptx::griddepcontrol_launch_dependents();
}}
"""


def fill_program(fill: Fill, steps: int) -> KernelProgram:
    def tensor_map(name: str, rows: int, box: int) -> TensorMapArgument:
        k = steps * 64
        sizes, strides = (k, rows, 1), (k, k * rows)
        return TensorMapArgument(name, 0, torch.float16, sizes, strides, (64, box, 1))

    knobs = asdict(fill)
    smem = fill.stages * ((fill.block_p + fill.block_q) * 128 + 16)
    arguments = (
        tensor_map("p", fill.block_p * fill.p_tiles, fill.block_p // fill.halves),
        tensor_map("q", fill.block_q * fill.q_tiles, fill.block_q // fill.halves),
        Pointer("p"),
        Pointer("q"),
        Pointer("out"),
    )
    bulk = str(bool(fill.bulk)).lower()
    source = SOURCE.format(**{**knobs, "bulk": bulk}, steps=steps, bulk_copy=BULK)
    grid, cluster = (fill.p_tiles * fill.q_tiles, 1, 1), (fill.multicast, 1, 1)
    threads = fill.block_p * 2 + 32
    return KernelProgram(
        "fill", "fill", knobs, source, "sm_90a", grid, threads, smem, arguments, cluster
    )


def boundary_program(early: int, smem: int, cluster: int) -> KernelProgram:
    knobs = {"early": early, "smem": smem, "cluster": cluster}
    source = BOUNDARY.format(early=early)
    arguments = (Pointer("in"), Pointer("out"))
    shape = (cluster, 1, 1)
    return KernelProgram(
        "boundary", "boundary", knobs, source, "sm_90a", (132, 1, 1), 256, smem, arguments, shape
    )


def chain_us(program: KernelProgram, tensors: dict[str, Tensor], dependent: bool) -> float:
    """Microseconds from start to start of `program` in a chain of launches over `tensors`."""
    kernel = load_program(program, 0)
    chain = [
        BoundLaunch(kernel, program, tensors, dependent=dependent and index > 0)
        for index in range(LAUNCHES)
    ]
    return statistics.median(Chain(chain).times_us(9))


def measure_fill(fill: Fill) -> dict[str, float]:
    times = []
    for steps in (SHORT, LONG):
        p = torch.zeros(fill.block_p * fill.p_tiles * steps * 64, dtype=torch.float16).cuda()
        q = torch.zeros(fill.block_q * fill.q_tiles * steps * 64, dtype=torch.float16).cuda()
        out = torch.empty(fill.p_tiles * fill.q_tiles * 256, device="cuda")
        times.append(chain_us(fill_program(fill, steps), {"p": p, "q": q, "out": out}, False))
    step_us = (times[1] - times[0]) / (LONG - SHORT)
    filled = (fill.block_p + fill.block_q) * 128 / 1e3
    return {
        "step_us": step_us,
        "bytes_per_ns_a_block": filled / step_us,
        "tb_per_s": filled * fill.p_tiles * fill.q_tiles / step_us / 1e3,
        "short_us": times[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    boundaries = [
        (early, smem, cluster) for early in (0, 1) for smem in (0, 104 * 1024) for cluster in (1, 4)
    ]
    programs = [fill_program(fill, steps) for fill in FILLS for steps in (SHORT, LONG)]
    programs += [boundary_program(*each) for each in boundaries]
    outcomes = compile_many([CompileJob(each.code, each.name, each.arch) for each in programs])
    for program, outcome in zip(programs, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise SystemExit(f"{program.schedule}: {outcome}")
    fills = [{**asdict(fill), **measure_fill(fill)} for fill in FILLS]
    for row in fills:
        knobs = " ".join(f"{name}={row[name]}" for name in asdict(QKV))
        print(
            f"{row['step_us']:.3f} us a step, {row['bytes_per_ns_a_block']:5.1f} B/ns a block, "
            f"{row['tb_per_s']:.2f} TB/s, {row['short_us']:.2f} us for {SHORT} steps: {knobs}"
        )
    words = {"in": torch.zeros(132 * 256).cuda(), "out": torch.zeros(132 * 256).cuda()}
    edges = []
    for early, smem, cluster in boundaries:
        program = boundary_program(early, smem, cluster)
        row = {"early_trigger": early, "smem_bytes": smem, "cluster": cluster}
        row_us = {
            name: chain_us(program, words, dependent)
            for name, dependent in (("dependent_us", True), ("plain_us", False))
        }
        edges.append({**row, **row_us})
        print(edges[-1])
    if options.json:
        result = {
            "experiment": "fill_rate",
            "fills": fills,
            "boundaries": edges,
            **provenance("fill_rate"),
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
