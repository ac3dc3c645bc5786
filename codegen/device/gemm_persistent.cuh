// D[rows, columns] = A[rows, K] B[columns, K]^T on wgmma by blocks that stay: as many as there are
// multiprocessors, each of which walks over tiles of D. One warp fills a ring of mbarriers by TMA
// and runs on across tiles, so that the next tile's loads begin during an epilogue.
//
// Two consumer warpgroups take tiles in turn: while one multiplies, the other runs its epilogue.
// COOPERATIVE gives each half the rows of every tile instead: larger tiles draw less from L2, but
// nothing multiplies during an epilogue. A warp stages only rows of its own, so that an epilogue
// needs no barrier beyond the warp.
#pragma once

#include "epilogue.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
struct TilePlace {
  int row0, col0, batch;
};

// Tiles in the order in which blocks take them: down GROUP rows of tiles, then one to the right, so
// that the tiles under way share rows of A and of B in L2.
template <class C>
__device__ __forceinline__ TilePlace tile_place(int tile) {
  constexpr int DOWN = ceil_div(C::ROWS, C::BLOCK_M), ACROSS = ceil_div(C::COLUMNS, C::BLOCK_N);
  constexpr int LAST = DOWN % C::GROUP;  // rows of tiles in a last, lower group
  const int batch = tile / (DOWN * ACROSS), in_batch = tile % (DOWN * ACROSS);
  const int group = in_batch / (C::GROUP * ACROSS), in_group = in_batch % (C::GROUP * ACROSS);
  const int height = LAST != 0 && group == DOWN / C::GROUP ? max_of(1, LAST) : C::GROUP;
  return {(group * C::GROUP + in_group % height) * C::BLOCK_M, in_group / height * C::BLOCK_N,
          batch};
}

// Config: Element, BATCH, ROWS, COLUMNS, K, BLOCK_M, BLOCK_N, COOPERATIVE, STAGES, A_CONSTANT,
// B_CONSTANT, ATOMS (of 128 bytes of K a stage), PIECE (columns that are staged at a time),
// STAGE_LD, GROUP, BLOCKS, STAGED_AT, ROW_VALUES_AT and BARRIERS_AT (bytes). 384 threads.
template <class C, class Functor>
__device__ __forceinline__ void gemm_persistent(const ptx::TensorMap& a_map,
                                                const ptx::TensorMap& b_map,
                                                const Functor& functor) {
  using Element = typename C::Element;
  constexpr int ATOM_K = 128 / sizeof(Element);  // one 128-byte swizzle row
  constexpr int K_STEP = 32;                     // bytes of K that one wgmma takes
  constexpr int A_BYTES = C::BLOCK_M * 128, B_BYTES = C::BLOCK_N * 128;  // of an atom
  constexpr int STAGE_BYTES = C::ATOMS * (A_BYTES + B_BYTES);
  constexpr int STEPS = ceil_div(C::K, C::ATOMS * ATOM_K);  // of a tile
  constexpr int TILES = C::BATCH * ceil_div(C::ROWS, C::BLOCK_M) * ceil_div(C::COLUMNS, C::BLOCK_N);
  constexpr int GROUP_M = C::COOPERATIVE ? C::BLOCK_M / 2 : C::BLOCK_M;  // a warpgroup's rows
  constexpr int PRODUCTS = GROUP_M / 64;
  constexpr int WARP_ROWS = PRODUCTS * 16;
  static_assert(GROUP_M == 64 || GROUP_M == 128, "a warpgroup multiplies 64 or 128 rows");
  static_assert(C::BLOCK_N % C::PIECE == 0, "pieces are whole");
  static_assert(C::BLOCKS <= TILES, "every block has a tile");
  // Of 65536 a multiprocessor, that 384 threads begin with in even parts of 168.
  constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
  static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168, "what is given was taken");

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 ring = ptx::shared_address(smem);  // (STAGES, ATOMS x A_BYTES and ATOMS x B_BYTES)
  const u32 full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 empty = full + 8 * C::STAGES;
  const u32 turn = empty + 8 * C::STAGES;  // of each warpgroup

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, C::COOPERATIVE ? 8 : 4);
    }
    for (int group = 0; group < 2; ++group) ptx::mbarrier_init(turn + 8 * group, 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp >= 8) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp > 8) {
      ptx::griddepcontrol_wait();
      return;
    }
    const auto copy_a = [&](int s, const TilePlace& at, int step) {
#pragma unroll
      for (int atom = 0; atom < C::ATOMS; ++atom)
        ptx::cp_async_bulk_tensor(ring + s * STAGE_BYTES + atom * A_BYTES, a_map,
                                  (step * C::ATOMS + atom) * ATOM_K, at.row0, at.batch,
                                  full + 8 * s);
    };
    const auto copy_b = [&](int s, const TilePlace& at, int step) {
#pragma unroll
      for (int atom = 0; atom < C::ATOMS; ++atom)
        ptx::cp_async_bulk_tensor(ring + s * STAGE_BYTES + C::ATOMS * A_BYTES + atom * B_BYTES,
                                  b_map, (step * C::ATOMS + atom) * ATOM_K, at.col0, at.batch,
                                  full + 8 * s);
    };
    // The first tile's weights need not wait for the kernel before.
    constexpr int AHEAD = min_of(C::STAGES, STEPS);
    const TilePlace first = tile_place<C>(blockIdx.x);
    if (lane == 0) {
      ptx::prefetch_tensormap(a_map);
      ptx::prefetch_tensormap(b_map);
#pragma unroll 1
      for (int step = 0; step < AHEAD; ++step) {
        ptx::mbarrier_arrive_expect_tx(full + 8 * step, STAGE_BYTES);
        if constexpr (C::A_CONSTANT) copy_a(step, first, step);
        if constexpr (C::B_CONSTANT) copy_b(step, first, step);
      }
    }
    __syncwarp();  // so that no lane's wait holds these copies up
    ptx::griddepcontrol_wait();
    if (lane > 0) return;
#pragma unroll 1
    for (int step = 0; step < AHEAD; ++step) {
      if constexpr (!C::A_CONSTANT) copy_a(step, first, step);
      if constexpr (!C::B_CONSTANT) copy_b(step, first, step);
    }
    int filled = AHEAD;  // over all tiles
    int begin = AHEAD;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < TILES; tile += C::BLOCKS) {
      const TilePlace at = tile_place<C>(tile);
#pragma unroll 1
      for (int step = begin; step < STEPS; ++step, ++filled) {
        const int s = filled % C::STAGES;
        // The slots' first round waits for a phase before the first, which is over.
        ptx::mbarrier_wait(empty + 8 * s, (filled / C::STAGES & 1) ^ 1);
        ptx::mbarrier_arrive_expect_tx(full + 8 * s, STAGE_BYTES);
        copy_a(s, at, step);
        copy_b(s, at, step);
      }
      begin = 0;
    }
    // Blocks of the next kernel fit only where one of this has ended: the earlier they are told,
    // the earlier they bring their weights.
    ptx::griddepcontrol_launch_dependents();
    return;
  }

  ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
  ptx::griddepcontrol_wait();
  const int group = warp / 4;
  float* staged =  // (16, STAGE_LD)
      reinterpret_cast<float*>(smem + C::STAGED_AT) + warp * 16 * C::STAGE_LD;
  auto* row_values =  // (PRODUCTS, 16)
      reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT) + warp * WARP_ROWS;
  const auto release = [&](int s) {
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
  };

  // `round` counts this block's tiles; a warpgroup takes every second one, or a part of each.
#pragma unroll 1
  for (int round = C::COOPERATIVE ? 0 : group;; round += C::COOPERATIVE ? 1 : 2) {
    const int tile = blockIdx.x + round * C::BLOCKS;
    if (tile >= TILES) break;
    const TilePlace at = tile_place<C>(tile);
    // Of the warp's first product; the others' are 64 further each.
    const int in_batch = at.row0 + (C::COOPERATIVE ? group * GROUP_M : 0) + warp % 4 * 16;
    const int row0 = at.batch * C::ROWS + in_batch, row_end = (at.batch + 1) * C::ROWS;
    __syncwarp();  // the last tile's row values have been read
    if constexpr (Functor::ROW_VALUES > 0) {
      const int row = row0 + lane / 16 * 64 + lane % 16;
      if (lane < WARP_ROWS && row < row_end) row_values[lane] = functor.row_values(row, true);
      __syncwarp();
    }
    float acc[PRODUCTS][C::BLOCK_N / 2];
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
      for (int i = 0; i < C::BLOCK_N / 2; ++i) acc[m][i] = 0.0f;
    // Its turn also says that every copy ahead of its own has come: the parity of a slot's barrier
    // could not tell the phase that it waits for from the one before the last.
    if (!C::COOPERATIVE && round > 0) ptx::mbarrier_wait(turn + 8 * group, (round - 1) / 2 & 1);

    int used = round * STEPS;  // slots, over all tiles
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step, ++used) {
      const int s = used % C::STAGES;
      ptx::mbarrier_wait(full + 8 * s, used / C::STAGES & 1);
      const u32 a_tile =  // (ATOMS, GROUP_M, ATOM_K)
          ring + s * STAGE_BYTES + (C::COOPERATIVE ? group * GROUP_M * 128 : 0);
      const u32 b_tile = ring + s * STAGE_BYTES + C::ATOMS * A_BYTES;  // (ATOMS, BLOCK_N, ATOM_K)
      ptx::wgmma_fence();
#pragma unroll
      for (int atom = 0; atom < C::ATOMS; ++atom)
#pragma unroll
        for (int k = 0; k < 128; k += K_STEP)
#pragma unroll
          for (int m = 0; m < PRODUCTS; ++m)
            ptx::Wgmma<Element, C::BLOCK_N>::mma(
                acc[m], ptx::wgmma_descriptor(a_tile + atom * A_BYTES + m * 64 * 128 + k),
                ptx::wgmma_descriptor(b_tile + atom * B_BYTES + k), 1);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (step > 0) release((used - 1) % C::STAGES);  // its products are done, this step's not
    }
    // The other's products follow these without a gap.
    if (!C::COOPERATIVE && tile + C::BLOCKS < TILES && lane == 0)
      ptx::mbarrier_arrive(turn + 8 * (1 - group));
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(acc[m]);
    release((used - 1) % C::STAGES);

    constexpr int FREE = max_of(0, CONSUMER_REGISTERS - PRODUCTS * C::BLOCK_N / 2 - 56);
    constexpr int UNROLLED = FREE >= 48 ? 2 : 1;
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
      for (int piece = 0; piece < C::BLOCK_N / C::PIECE; ++piece) {
        EpilogueTile<16, C::PIECE, 32, min_of(48, FREE) * 4, Functor, UNROLLED> part(
            functor, lane, 0, row0 + m * 64, at.col0 + piece * C::PIECE, row_end, C::COLUMNS);
        part.fetch();
        __syncwarp();  // the piece before has been read
#pragma unroll
        for (int j = 0; j < C::PIECE / 8; ++j) {
          const float* from = acc[m] + (piece * C::PIECE / 8 + j) * 4;
          float* to = staged + lane / 4 * C::STAGE_LD + j * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
          *reinterpret_cast<float2*>(to + 8 * C::STAGE_LD) = make_float2(from[2], from[3]);
        }
        __syncwarp();
        constexpr int V = Functor::VECTOR;
        part.run(row_values + m * 16,
                 [&](int r, int c) { return load<V>(staged + r * C::STAGE_LD + c); });
      }
  }
}
#endif

}  // namespace gtco
