// D[rows, columns] = A[rows, K] B[columns, K]^T for 1 to 8 rows on mma.sync: as long as B takes to
// come. The columns (output channels) are mma's M side and the rows (tokens) its N side.
//
// Operands go from device memory to registers, and where B is constant a block's first AHEAD chunks
// are under way before the dependent-launch wait: all of them, if that many registers are free.
// Lane (g, t) of a warp reads elements 8 t to 8 t + 7 of a chunk of 32 of channels g and g + 8 and
// of token g. That is not the order in which mma has them, but it is the same for both operands,
// and a sum over K has no order.
//
// Warps take chunks in turn, those of a cluster of SPLIT blocks together. Their sums meet in the
// shared memory of the cluster's first block, which adds them in a fixed order.
#pragma once

#include "epilogue.cuh"

namespace gtco {

// The sum of PARTS vectors, PITCH floats apart, always in this order: the same bits.
template <int V, int PARTS, int PITCH>
__device__ __forceinline__ Vec<float, V> add_parts(const float* from) {
  Vec<float, V> sum = load<V>(from);
#pragma unroll
  for (int part = 1; part < PARTS; ++part) {
    const Vec<float, V> more = load<V>(from + part * PITCH);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += more[i];
  }
  return sum;
}

// An operand is a struct with a constexpr CONSTANT and `at(batch, row, k)`; 8 elements along K are
// aligned neighbours. Config: Element, ROWS, COLUMNS, K, BLOCK_COLUMNS, WARPS (that multiply; one
// more opens the inbox and gathers the row values), SPLIT, AHEAD (chunks of a warp under way),
// STAGE_LD, ROW_VALUES_AT and BARRIER_AT (bytes).
template <class C, class A, class B, class Functor>
__device__ __forceinline__ void gemm_skinny(const A& a, const B& b, const Functor& functor) {
  using Element = typename C::Element;
  static_assert(sizeof(Element) == 2, "m16n8k16 takes 16-bit operands");
  static_assert(C::ROWS <= 8, "mma's N side");
  static_assert(C::BLOCK_COLUMNS % 16 == 0, "mma's M side");
  constexpr int TILES = C::BLOCK_COLUMNS / 16;
  constexpr int CHUNK = 32;  // elements of K that a warp takes at a time
  constexpr int TURN = C::SPLIT * C::WARPS * CHUNK;
  constexpr int THREADS = (C::WARPS + 1) * 32;
  constexpr int STEPS = ceil_div(C::K, TURN);
  static_assert(C::AHEAD <= STEPS, "a ring that is used");
  constexpr int CHAINS = min_of(2 * C::AHEAD, max_of(1, 4 / TILES));  // four products in flight
  constexpr int PART = C::ROWS * C::STAGE_LD;

  extern __shared__ __align__(1024) unsigned char smem[];
  float* parts = reinterpret_cast<float*>(smem);  // (WARPS, ROWS, STAGE_LD)
  float* inbox = parts + C::WARPS * PART;         // (SPLIT - 1, ROWS, STAGE_LD)
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = blockIdx.x % C::SPLIT, col0 = blockIdx.x / C::SPLIT * C::BLOCK_COLUMNS;
  const int k0 = (rank * C::WARPS + warp) * CHUNK + lane % 4 * 8;
  const bool multiplies = warp < C::WARPS;

  // A ring of chunks, each half of a tile on its own; zeros beyond K and the last row or column.
  u32 weights[C::AHEAD][TILES][2][4], tokens[C::AHEAD][4];
  const auto inside = [&](int step) {
    return (step + 1) * TURN <= C::K || k0 + step * TURN < C::K;
  };
  const auto load_weights = [&](int slot, int step) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const int col = col0 + i * 8 + lane / 4;
      const bool valid = inside(step) && (C::COLUMNS % C::BLOCK_COLUMNS == 0 || col < C::COLUMNS);
      const Element* from = valid ? b.at(0, col, k0 + step * TURN) : b.base;
      ptx::ld_global_v4(weights[slot][i / 2][i % 2], from, valid);
    }
  };
  const auto load_tokens = [&](int slot, int step) {
    const bool valid = inside(step) && lane / 4 < C::ROWS;
    const Element* from = valid ? a.at(0, lane / 4, k0 + step * TURN) : a.base;
    ptx::ld_global_v4(tokens[slot], from, valid);
  };

  ptx::griddepcontrol_launch_dependents();
  if (B::CONSTANT && multiplies) {
#pragma unroll
    for (int s = 0; s < C::AHEAD; ++s) load_weights(s, s);
  }
#if __CUDA_ARCH__ >= 900
  const u32 inbox_full = ptx::shared_address(smem + C::BARRIER_AT);
  if constexpr (C::SPLIT > 1) {
    if (thread == C::WARPS * 32 && rank == 0) {
      ptx::mbarrier_init(inbox_full, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(inbox_full, (C::SPLIT - 1) * C::ROWS * C::BLOCK_COLUMNS * 4);
    }
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
  }
#endif
  ptx::griddepcontrol_wait();

  // Only the first block of a cluster has an epilogue.
  const int row_count = rank == 0 ? C::ROWS : 0;
  EpilogueTile<C::ROWS, C::BLOCK_COLUMNS, THREADS, 64, Functor> tile(functor, thread, 0, 0, col0,
                                                                     row_count, C::COLUMNS);
  if (multiplies) {
#pragma unroll
    for (int s = 0; s < C::AHEAD; ++s) {
      load_tokens(s, s);
      if constexpr (!B::CONSTANT) load_weights(s, s);
    }
  }
  tile.fetch();
  // Left alone, the assembler asks for some of this only after the first products. They cannot pass
  // a branch, nor loads a barrier, and nobody waits here for what has been asked for.
  __syncthreads();
  if (multiplies) {
    float acc[CHAINS][TILES][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step += C::AHEAD)
#pragma unroll
      for (int s = 0; s < C::AHEAD; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            const auto& of = weights[s][i];
            const u32 fragment[4] = {of[0][half * 2], of[1][half * 2], of[0][half * 2 + 1],
                                     of[1][half * 2 + 1]};
            ptx::mma_m16n8k16<Element>(acc[(s * 2 + half) % CHAINS][i], fragment,
                                       tokens[s][half * 2], tokens[s][half * 2 + 1]);
          }
        if constexpr (C::AHEAD < STEPS) {
          load_weights(s, step + C::AHEAD + s);
          load_tokens(s, step + C::AHEAD + s);
        }
      }
    // Register j is channel lane / 4 + j / 2 * 8, token lane % 4 * 2 + j % 2.
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = lane % 4 * 2 + j % 2, col = i * 16 + lane / 4 + j / 2 * 8;
        float sum = acc[0][i][j];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) sum += acc[chain][i][j];
        if (row < C::ROWS) parts[warp * PART + row * C::STAGE_LD + col] = sum;
      }
  } else {
    fill_row_values<C::ROWS, 32>(functor, row_values, lane, 0, row_count);
  }
  __syncthreads();

#if __CUDA_ARCH__ >= 900
  if constexpr (C::SPLIT > 1) {
    ptx::barrier_cluster_wait();  // the inbox can take sums
    if (rank > 0) {
      const u32 to = ptx::mapa(ptx::shared_address(inbox + (rank - 1) * PART), 0);
      const u32 full = ptx::mapa(inbox_full, 0);
#pragma unroll 1
      for (int i = thread; i < C::ROWS * C::BLOCK_COLUMNS / 2; i += THREADS) {
        const int at = i / (C::BLOCK_COLUMNS / 2) * C::STAGE_LD + i % (C::BLOCK_COLUMNS / 2) * 2;
        const Vec<float, 2> sum = add_parts<2, C::WARPS, PART>(parts + at);
        ptx::st_async(to + at * 4, sum[0], sum[1], full);
      }
      return;
    }
    ptx::mbarrier_wait(inbox_full, 0);
  }
#endif
  constexpr int V = Functor::VECTOR;
  tile.run(row_values, [&](int r, int c) {
    return add_parts<V, C::WARPS + C::SPLIT - 1, PART>(parts + r * C::STAGE_LD + c);
  });
}

}  // namespace gtco
