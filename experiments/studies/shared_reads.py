"""What a block waits for its tiles, by where the weights are and by who else reads them.

    python -m experiments.studies.shared_reads [--json FILE]

128 blocks of one multiprocessor each read a tile of P (weights, 64 KB) and one of Q (activations,
104 KB) in eight steps, by bulk copies that are asked for all at once, as FC1 of ViT-L/16 does for
half of its K. All kernels before have read Q. P is "cold" (256 MB were read since), "fetched" (by
`prefetch.global.L2`, each half of a tile by another multiprocessor) or "hot" (all multiprocessors
have read it). The styles are which blocks of a cluster have which tiles.

Microseconds are clocks at the rate that the driver names: an H100's 1.98 GHz are 1.77 to 1.87
(experiments/notes/16-large_models.md), so that all of them are 6 to 12% longer.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from cuda.core import Device

from experiments.publish import provenance
from experiments.studies.fill_rate import BULK
from gtco.codegen.program import KernelProgram, Pointer
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.driver import BoundLaunch
from gtco.runtime.run import load_program

P_BYTES, Q_BYTES, P_TILES, Q_TILES = 64 << 10, 104 << 10, 64, 6
WEIGHTS = ("cold", "fetched", "hot")
ROUNDS, IN_VAIN = 10, 2


@dataclass(frozen=True)
class Style:
    """Who reads what.

    Args:
        cluster: blocks of a cluster.
        p: the tile of P of block `b`, which is number `r` in cluster `c`.
        q: the same of Q.
    """

    cluster: int
    p: str
    q: str

    @property
    def blocks(self) -> int:
        """As many as fit at a time."""
        return 120 if self.cluster in (3, 6) else 128


STYLES = {
    "scattered": Style(1, "b % 64", "b / 64"),
    "two share P": Style(2, "c", "r"),
    "two share Q": Style(2, "2 * (c % 32) + r", "c / 32"),
    "four share Q": Style(4, "4 * (c % 16) + r", "c / 16"),
    "2 x 2, P in pairs": Style(4, "2 * c + r / 2", "r % 2"),
    "2 x 2, Q in pairs": Style(4, "2 * c + r % 2", "r / 2"),
    "4 x 2": Style(8, "4 * c + r / 2", "r % 2"),
    "three parts of K, two share P": Style(6, "c * 3 + r % 3", "r % 3 * 2 + r / 3"),
    "three parts of K": Style(3, "(c % 20) * 3 + r", "r * 2 + c / 20"),
    "16 tiles of P, two share P": Style(2, "c % 16", "r"),
    "one tile of P": Style(2, "0", "r"),
    "one tile of each": Style(2, "0", "0"),
}

HEAD = f"""#include "ptx.cuh"
using namespace gtco;
constexpr int P = {P_BYTES}, Q = {Q_BYTES}, P_TILES = {P_TILES}, Q_TILES = {Q_TILES}, STEPS = 8;
__device__ __forceinline__ u64 now() {{
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}}
{BULK}"""
PREPARE = """
extern "C" __global__ void __launch_bounds__(256)
ENTRY_POINT(const char* p, const char* q, int* out) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 to = ptx::shared_address(smem), barrier = to + Q;
  const auto read = [&](const char* from, int bytes, int number) {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    bulk(to, from, bytes, barrier);
    ptx::mbarrier_wait(barrier, number & 1);
  };
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    for (int i = 0; i < Q_TILES; ++i) read(q + i * Q, Q, i);
    if (WEIGHTS == 2)
      for (int i = 0; i < P_TILES; ++i)
        read(p + i64((blockIdx.x + i) % P_TILES) * P, P, Q_TILES + i);
  }
  __syncthreads();
  if (WEIGHTS == 1 && blockIdx.x < 2 * P_TILES)
    for (int i = threadIdx.x * 128; i < P / 2; i += 256 * 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p + i64(blockIdx.x) * (P / 2) + i));
  const u64 begin = now();
  while (now() - begin < 12000) __nanosleep(200);  // what was asked for is there
}
"""
READ = """
extern "C" __global__ void __launch_bounds__(128)
ENTRY_POINT(const char* p, const char* q, int* out) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 ring = ptx::shared_address(smem), barriers = ring + P + Q;
  const int b = blockIdx.x, c = b / CLUSTER, r = b % CLUSTER;
  if (threadIdx.x != 0) return;
  p += i64(P_TILE) * P;
  q += i64(Q_TILE) * Q;
  for (int i = 0; i < STEPS; ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
  ptx::fence_mbarrier_init();
  const u64 go = (now() / 8192 + 2) * 8192;  // all blocks at once
  while (now() < go) {
  }
  const i64 begin = clock64();
  for (int i = 0; i < STEPS; ++i) {
    ptx::mbarrier_arrive_expect_tx(barriers + 8 * i, (P + Q) / STEPS);
    bulk(ring + i * (P / STEPS), p + i * (P / STEPS), P / STEPS, barriers + 8 * i);
    bulk(ring + P + i * (Q / STEPS), q + i * (Q / STEPS), Q / STEPS, barriers + 8 * i);
  }
  ptx::mbarrier_wait(barriers, 0);
  out[b * 2] = static_cast<int>(clock64() - begin);
  for (int i = 1; i < STEPS; ++i) ptx::mbarrier_wait(barriers + 8 * i, 0);
  out[b * 2 + 1] = static_cast<int>(clock64() - begin);
}
"""


def _program(source: str, blocks: int, threads: int, smem: int, cluster: int) -> KernelProgram:
    arguments = (Pointer("p"), Pointer("q"), Pointer("out"))
    grid, shape = (blocks, 1, 1), (cluster, 1, 1)
    return KernelProgram(
        "reads", "reads", {}, HEAD + source, "sm_90a", grid, threads, smem, arguments, shape
    )


def prepare(weights: int) -> KernelProgram:
    """What the kernels before leave in L2; `weights` counts `WEIGHTS`."""
    source = f"constexpr int WEIGHTS = {weights};\n{PREPARE}"
    return _program(source, 132, 256, Q_BYTES + 64, 1)


def read(style: Style) -> KernelProgram:
    """Each block reads its tiles and stores the clocks until the first step and the last."""
    names = {"CLUSTER": str(style.cluster), "P_TILE": f"({style.p})", "Q_TILE": f"({style.q})"}
    source = "".join(f"#define {name} {text}\n" for name, text in names.items()) + READ
    return _program(source, style.blocks, 128, P_BYTES + Q_BYTES + 64, style.cluster)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = {word: prepare(number) for number, word in enumerate(WEIGHTS)}
    readers = {name: read(style) for name, style in STYLES.items()}
    jobs = [CompileJob(p.code, p.name, p.arch) for p in (*before.values(), *readers.values())]
    for outcome in compile_many(jobs):
        if isinstance(outcome, Exception):
            raise SystemExit(str(outcome))
    clocks_per_us = Device(0).properties.clock_rate / 1000
    tensors = {
        "p": torch.zeros(P_TILES * P_BYTES, dtype=torch.uint8, device="cuda"),
        "q": torch.zeros(Q_TILES * Q_BYTES, dtype=torch.uint8, device="cuda"),
        "out": torch.zeros(2 * 128, dtype=torch.int32, device="cuda"),
    }
    other = torch.zeros(64 << 20, device="cuda")

    def bound(program: KernelProgram) -> BoundLaunch:
        return BoundLaunch(load_program(program, 0), program, tensors, dependent=False)

    rows = []
    for name, style in STYLES.items():
        for word in WEIGHTS:
            launches = [bound(before[word]), bound(readers[name])]
            rounds = []
            for _ in range(IN_VAIN + ROUNDS):
                other.sum()
                for launch in launches:
                    launch(torch.cuda.current_stream().cuda_stream)
                rounds.append(tensors["out"][: 2 * style.blocks].view(-1, 2).cpu().double())
            times_us = torch.stack(rounds[IN_VAIN:]) / clocks_per_us
            first_us, all_us = times_us.median(0).values.median(0).values.tolist()
            rows.append({"style": name, "weights": word, "first_us": first_us, "all_us": all_us})
            print(f"{name:30s} {word:8s} first step {first_us:.2f} us, all {all_us:.2f} us")
    if options.json:
        result = {"experiment": "shared_reads", "rows": rows, **provenance("shared_reads")}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
