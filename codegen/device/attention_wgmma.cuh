// softmax(q k^T scale + mask) v per head in one pass over the keys, on wgmma fed by TMA, with an
// online softmax in fp32 (FlashAttention-3, Shah 2024).
//
// A warpgroup has 64 queries of the block's head, so that keys and values are read from shared
// memory once for 64 of them; PARTS warpgroups share each 64 queries: every one takes its part of
// each tile of keys, and the parts are merged at the end. Scores stay where the first product
// leaves them, since that is where the second wants its weights. Tiles arrive in a ring of STAGES;
// where all of them find room, no slot is used twice.
//
// SPLIT blocks of a cluster share the block's queries where blocks are few: each has its part of
// the tiles of keys, sends the others what it has of the queries that they finish, over their ring
// once they are done with it, and finishes its own.
//
// Beside whole warpgroups a block may have a REST of 16 queries, so that blocks divide the queries
// of a head, and the multiprocessors, better than by 64s: four more warps have them on mma.sync,
// each a part of each tile of keys.
//
// Of tf32 wgmma reads no operand but K-major, so that the values are wanted by columns. A warpgroup
// more, which has no queries, transposes each tile of them where it lies, while the others have
// the scores.
//
// Config: Element, LQ, LK, D, DV, BLOCK_Q, REST, BLOCK_K, BOX, PARTS, SPLIT, STAGES, CAUSAL, SCALE,
// and where things lie (bytes): KEYS_AT, VALUES_AT, SHARES_AT, ROW_VALUES_AT, BARRIERS_AT. Operands
// Q, K, V: `copy(to, column, row, head, barrier)` brings a box of 128 bytes of columns and of 64
// queries or BOX keys, or 32 values of tf32, zeros beyond the last. Mask: as in softmax.cuh.
#pragma once

#include "attention.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// How a slot of the ring has the values that PARTS warpgroups multiply, KEYS for each: where, in
// bytes from its start, a warpgroup's begin, the k-th step along its keys and the i-th 64 columns.
// Of 16 bits, in rows of keys: (ceil(DV / 64), PARTS, KEYS, 64).
template <class Element, int DV, int PARTS, int KEYS>
struct ValueTile {
  static constexpr int TRANSPOSERS = 0;  // warps
  static constexpr int ATOM = PARTS * KEYS * 128, BYTES = ceil_div(DV, 64) * ATOM;

  __device__ __forceinline__ static constexpr int part(int i) { return i * KEYS * 128; }
  __device__ __forceinline__ static constexpr int step(int k) { return k * 16 * 128; }
  __device__ __forceinline__ static constexpr int columns(int i) { return i * ATOM; }

  template <int BOX, class V>
  __device__ __forceinline__ static void copy(const V& values, u32 to, int key, int head,
                                              u32 barrier) {
    constexpr int BOXES = PARTS * KEYS / BOX;
#pragma unroll
    for (int i = 0; i < ceil_div(DV, 64) * BOXES; ++i)
      values.copy(to + i / BOXES * ATOM + i % BOXES * BOX * 128, i / BOXES * 64,
                  key + i % BOXES * BOX, head, barrier);
  }
};

// Of tf32, in squares of 32 keys and 32 columns: (PARTS, ceil(KEYS / 32), ceil(DV / 32), 32, 32).
// As the copies bring them their rows are keys; transposed, columns.
template <int DV, int PARTS, int KEYS>
struct ValueTile<float, DV, PARTS, KEYS> {
  static constexpr int TRANSPOSERS = 4;  // warps
  static constexpr int SIDE = 32, SQUARE = SIDE * 128;
  static constexpr int ACROSS = ceil_div(DV, SIDE), DOWN = ceil_div(KEYS, SIDE);
  static constexpr int SQUARES = PARTS * DOWN * ACROSS, BYTES = SQUARES * SQUARE;

  __device__ __forceinline__ static constexpr int part(int i) { return i * DOWN * ACROSS * SQUARE; }
  __device__ __forceinline__ static constexpr int step(int k) {
    return k / 4 * ACROSS * SQUARE + k % 4 * 32;
  }
  __device__ __forceinline__ static constexpr int columns(int i) { return i * 2 * SQUARE; }

  template <int, class V>
  __device__ __forceinline__ static void copy(const V& values, u32 to, int key, int head,
                                              u32 barrier) {
#pragma unroll 2
    for (int i = 0; i < SQUARES; ++i) {
      const int down = i / ACROSS;
      values.copy(to + i * SQUARE, i % ACROSS * SIDE, key + down / DOWN * KEYS + down % DOWN * SIDE,
                  head, barrier);
    }
  }

  // One of the transposing warps' part of a slot. A lane has a column; of eight keys the even ones
  // come first (`to_operand`). Neither loads nor stores meet a bank twice.
  __device__ __forceinline__ static void transpose(float* slot, int warp, int lane) {
#pragma unroll 1
    for (int i = warp; i < SQUARES; i += TRANSPOSERS) {
      float* square = slot + i * (SQUARE / 4);
      float x[SIDE];
#pragma unroll
      for (int r = 0; r < SIDE; ++r) x[r] = square[r * SIDE + (lane / 4 ^ r % 8) * 4 + lane % 4];
      __syncwarp();  // rows are overwritten by columns
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
        const int key = chunk / 2 * 8 + chunk % 2;
        store<4>(square + lane * SIDE + (chunk ^ lane % 8) * 4,
                 Vec<float, 4>{{x[key], x[key + 2], x[key + 4], x[key + 6]}});
      }
    }
  }
};

// Issues out (+)= weights v for COLUMNS columns of V from `values` on, (STEPS, COLUMNS).
template <class Element, class Tile, int COLUMNS, int STEPS>
__device__ __forceinline__ void multiply_columns(float (&out)[COLUMNS / 2],
                                                 const u32 (&weights)[STEPS][4], u32 values,
                                                 bool accumulate) {
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
    ptx::WgmmaFromRegisters<Element, COLUMNS>::mma(
        out, weights[k], ptx::wgmma_descriptor(values, Tile::step(k)), k > 0 || accumulate);
}

// out (+)= weights v for STEPS steps of keys, V at `values` as of `Tile`; done when it returns.
template <class Element, class Tile, int DV, int STEPS>
__device__ __forceinline__ void multiply_values(float (&out)[ceil_div(DV, 16) * 2][4],
                                                const u32 (&weights)[STEPS][4], u32 values,
                                                bool accumulate) {
  constexpr int WHOLE = DV / 64, REST = ceil_div(DV % 64, 16) * 16;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < WHOLE; ++i)
    multiply_columns<Element, Tile, 64>(reinterpret_cast<float (&)[32]>(out[i * 8]), weights,
                                        values + Tile::columns(i), accumulate);
  if constexpr (REST > 0)
    multiply_columns<Element, Tile, REST>(reinterpret_cast<float (&)[REST / 2]>(out[WHOLE * 8]),
                                          weights, values + Tile::columns(WHOLE), accumulate);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(reinterpret_cast<float (&)[ceil_div(DV, 16) * 8]>(out));
}

// The configuration of the warps that have the REST queries, whose tile has a box of 64.
template <class C>
struct RestOf : C {
  static constexpr bool TMA = true, WHOLE_ATOMS = true;
  static constexpr int BLOCK_Q = 64, WARPS_K = 4;
};

template <class C, class Q, class K, class V, class Mask, class Functor>
__device__ __forceinline__ void attention_wgmma(const Q& queries, const K& keys, const V& values,
                                                const Mask& mask, const Functor& functor) {
  using Element = typename C::Element;
  constexpr int BLOCK_Q = C::BLOCK_Q, PARTS = C::PARTS, SPLIT = C::SPLIT, STAGES = C::STAGES;
  constexpr int TILE = C::BLOCK_K, BOX = C::BOX, BOXES = TILE / BOX;
  constexpr int ALL_TILES = ceil_div(C::LK, TILE), SPLIT_TILES = ceil_div(ALL_TILES, SPLIT);
  constexpr int REST = C::REST, ROWS = BLOCK_Q + REST;
  constexpr int FINISHED = ROWS / SPLIT;  // queries of a block
  constexpr int KEYS = TILE / PARTS;      // of a warpgroup
  using Values = ValueTile<Element, C::DV, PARTS, KEYS>;
  using Softmax = SoftmaxRows<C, Mask, KEYS>;
  using RestC = RestOf<C>;
  constexpr int WARPS = BLOCK_Q / 16 * PARTS, TRANSPOSERS = Values::TRANSPOSERS;
  constexpr int REST_WARPS = REST > 0 ? RestC::WARPS_K : 0;
  constexpr int THREADS = (WARPS + TRANSPOSERS + REST_WARPS) * 32;
  using Parts = PartsMerge<Softmax, BLOCK_Q / SPLIT, PARTS * SPLIT, THREADS>;
  using RestParts = PartsMerge<Softmax, REST, RestC::WARPS_K, THREADS>;
  constexpr int PRODUCTS = ceil_div(KEYS, 256), N = KEYS / PRODUCTS;
  constexpr int E = 128 / sizeof(Element), D_ATOMS = ceil_div(C::D, E);
  constexpr int QUERY_ATOM = 64 * 128, ATOM = TILE * 128;  // bytes of E columns
  constexpr int KEY_BYTES = D_ATOMS * ATOM, VALUE_BYTES = Values::BYTES;
  constexpr bool ALL_IN_FLIGHT = SPLIT_TILES <= STAGES;  // no slot twice
  static_assert(KEYS % 16 == 0 && N % 8 == 0, "what wgmma takes");
  static_assert(BLOCK_Q % 64 == 0 && BOX % 8 == 0, "whole warpgroups, and rows of the swizzle");
  static_assert(SPLIT == 1 || (!C::CAUSAL && (SPLIT - 1) * SPLIT_TILES < ALL_TILES),
                "each block of a cluster has keys");
  static_assert(REST == 0 || (REST == 16 && SPLIT == 1 && TRANSPOSERS == 0), "a row of warps");

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 q_tile = ptx::shared_address(smem);                 // (ROWS / 64, D_ATOMS, 64, E)
  const u32 k_ring = ptx::shared_address(smem + C::KEYS_AT);    // (STAGES, D_ATOMS, TILE, E)
  const u32 v_ring = ptx::shared_address(smem + C::VALUES_AT);  // STAGES as of Values
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);
  const u32 queries_full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 keys_full = queries_full + 8, values_full = keys_full + 8 * STAGES;
  const u32 empty = values_full + 8 * STAGES, transposed = empty + 8 * STAGES;
  const u32 parts_full = transposed + (TRANSPOSERS > 0 ? 8 * STAGES : 0);

  const int thread = threadIdx.x, warp = ptx::uniform(thread / 32), lane = thread % 32;
  const int group = warp / 4 / PARTS, part = warp / 4 % PARTS;
  const int row = group * 64 + warp % 4 * 16;  // the warp's first of the block's queries
  const unsigned block = block_along<C, 0>();
  const int head = block_along<C, 1>(), query0 = block / SPLIT * ROWS;
  const int rank = SPLIT > 1 ? block % SPLIT : 0, tile0 = rank * SPLIT_TILES;
  const int key_count = C::CAUSAL ? min_of(C::LK, query0 + ROWS) : C::LK;
  const int tiles = min_of(SPLIT_TILES, ceil_div(key_count, TILE) - tile0);
  const int first = query0 + rank * FINISHED;  // of the queries that this block finishes
  if (thread == 0) {
    ptx::mbarrier_init(queries_full, 1);
    for (int s = 0; s < STAGES; ++s) {
      ptx::mbarrier_init(keys_full + 8 * s, 1);
      ptx::mbarrier_init(values_full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, WARPS + REST_WARPS);
      if constexpr (TRANSPOSERS > 0) ptx::mbarrier_init(transposed + 8 * s, TRANSPOSERS);
    }
    if constexpr (SPLIT > 1) ptx::mbarrier_init(parts_full, 1);
    ptx::fence_mbarrier_init();
    if constexpr (SPLIT > 1) ptx::mbarrier_arrive_expect_tx(parts_full, Parts::BYTES);
    queries.prefetch();
    keys.prefetch();
    values.prefetch();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const auto copy_tile = [&](int tile, int slot) {
    ptx::mbarrier_arrive_expect_tx(keys_full + 8 * slot, KEY_BYTES);
#pragma unroll
    for (int i = 0; i < D_ATOMS * BOXES; ++i)
      keys.copy(k_ring + slot * KEY_BYTES + i / BOXES * ATOM + i % BOXES * BOX * 128, i / BOXES * E,
                (tile0 + tile) * TILE + i % BOXES * BOX, head, keys_full + 8 * slot);
    ptx::mbarrier_arrive_expect_tx(values_full + 8 * slot, VALUE_BYTES);
    Values::template copy<BOX>(values, v_ring + slot * VALUE_BYTES, (tile0 + tile) * TILE, head,
                               values_full + 8 * slot);
  };
  if (thread == 0) {
    constexpr int BOXES_Q = ceil_div(ROWS, 64) * D_ATOMS;
    ptx::mbarrier_arrive_expect_tx(queries_full, BOXES_Q * QUERY_ATOM);
#pragma unroll
    for (int i = 0; i < BOXES_Q; ++i)
      queries.copy(q_tile + i * QUERY_ATOM, i % D_ATOMS * E, query0 + i / D_ATOMS * 64, head,
                   queries_full);
#pragma unroll 1
    for (int tile = 0; tile < min_of(tiles, STAGES); ++tile) copy_tile(tile, tile);
  }
  __syncwarp();
  fill_row_values<FINISHED, THREADS>(functor, row_values, thread, head * C::LQ + first,
                                     (head + 1) * C::LQ);

  Softmax state;
  state.lane = lane;
  const bool has_queries = query0 + row < C::LQ;
  // Of the first keys of any part, that are never forbidden: those of the last tile's last part.
  constexpr int LAST = C::LK - (ceil_div(C::LK, TILE) - 1) * TILE - (PARTS - 1) * KEYS;
  constexpr int FREE = Mask::PRESENT || C::CAUSAL ? 0 : max_of(0, LAST);
  MaskTile<C, Mask, KEYS> tile_mask;
  const auto load_mask = [&](int tile) {
    if constexpr (Mask::PRESENT) {
      const int key = (tile0 + tile) * TILE + part * KEYS;
      if (has_queries) tile_mask.load(mask, lane, head, query0 + row, key, tile == 0);
    }
  };
  RingPlace<STAGES> from{0, 0};
  const bool consumes = TRANSPOSERS + REST_WARPS == 0 || warp < WARPS;
  if (consumes) {
    load_mask(0);
    ptx::mbarrier_wait(queries_full, 0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, from.advance()) {
      const int s = from.slot;
      float scores[KEYS / 8][4];  // (16, KEYS)
      ptx::mbarrier_wait(keys_full + 8 * s, from.phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < ceil_div(C::D, E / 4); ++k)
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
          ptx::Wgmma<Element, N>::mma(
              reinterpret_cast<float (&)[N / 2]>(scores[i * N / 8]),
              ptx::wgmma_descriptor(q_tile + group * D_ATOMS * QUERY_ATOM,
                                    k / 4 * QUERY_ATOM + k % 4 * 32),
              ptx::wgmma_descriptor(k_ring + s * KEY_BYTES + part * KEYS * 128,
                                    k / 4 * ATOM + i * N * 128 + k % 4 * 32),
              k > 0);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>(reinterpret_cast<float (&)[KEYS / 2]>(scores));
      // The slot of the tile before, which all warps have left, or are about to.
      if constexpr (!ALL_IN_FLIGHT) {
        if (thread == 0 && tile > 0 && tile - 1 + STAGES < tiles) {
          const int slot = (tile - 1) % STAGES;
          ptx::mbarrier_wait(empty + 8 * slot, (tile - 1) / STAGES & 1);
          copy_tile(tile - 1 + STAGES, slot);
        }
        __syncwarp();
      }
      if (has_queries) {  // else what is computed is not stored
        state.template mask_scores<FREE>(scores, tile_mask, query0 + row,
                                         (tile0 + tile) * TILE + part * KEYS);
        state.rescale(scores);
      }
      constexpr int STEPS = KEYS / Softmax::template OPERAND_KEYS<Element>;
      u32 weights[STEPS][4];
#pragma unroll
      for (int k = 0; k < STEPS; ++k) state.template to_operand<Element>(weights[k], scores, k);
      ptx::mbarrier_wait((TRANSPOSERS > 0 ? transposed : values_full) + 8 * s, from.phase);
      multiply_values<Element, Values, C::DV>(
          state.out, weights, v_ring + s * VALUE_BYTES + Values::part(part), tile > 0);
      if constexpr (!ALL_IN_FLIGHT) {
        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
      }
      if (tile + 1 < tiles) load_mask(tile + 1);
    }
  } else if constexpr (REST > 0) {
    using Rest = AttentionWarp<RestC, Mask>;
    Rest rest;
    rest.lane = lane;
    const int first_query = query0 + BLOCK_Q, in_tile = (warp - WARPS) * Rest::KEYS;
    MaskTile<RestC, Mask, Rest::KEYS> rest_mask;
    ptx::mbarrier_wait(queries_full, 0);
    __syncwarp();  // ldmatrix takes whole warps
    rest.load_queries(reinterpret_cast<const Element*>(smem + BLOCK_Q / 64 * D_ATOMS * QUERY_ATOM),
                      0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, from.advance()) {
      const int s = from.slot, key = tile * TILE + in_tile;
      const bool any = first_query < C::LQ && key < key_count;
      if constexpr (Mask::PRESENT) {
        if (any) rest_mask.load(mask, lane, head, first_query, key, tile == 0);
      }
      ptx::mbarrier_wait(keys_full + 8 * s, from.phase);
      __syncwarp();
      float scores[Rest::KEYS / 8][4] = {};
      if (any) {
        rest.multiply_keys(
            scores, reinterpret_cast<const Element*>(smem + C::KEYS_AT + s * KEY_BYTES), in_tile);
        rest.mask_scores(scores, rest_mask, first_query, key);
        rest.rescale(scores);
      }
      ptx::mbarrier_wait(values_full + 8 * s, from.phase);
      __syncwarp();
      if (any)
        rest.multiply_values(
            scores, reinterpret_cast<const Element*>(smem + C::VALUES_AT + s * VALUE_BYTES),
            in_tile);
      __syncwarp();
      if constexpr (!ALL_IN_FLIGHT) {
        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
      }
    }
#pragma unroll
    for (int n = 0; n < Softmax::DV16 * 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.out[n][j] = rest.out[n][j];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.top[half] = rest.top[half];
      state.total[half] = rest.total[half];
    }
  } else if constexpr (TRANSPOSERS > 0) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, from.advance()) {
      const int s = from.slot;
      ptx::mbarrier_wait(values_full + 8 * s, from.phase);
      Values::transpose(reinterpret_cast<float*>(smem + C::VALUES_AT + s * VALUE_BYTES),
                        warp - WARPS, lane);
      ptx::fence_proxy_async();  // the tensor cores read it
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(transposed + 8 * s);
    }
  }

  float* const staged = reinterpret_cast<float*>(smem);
  float* const shares = reinterpret_cast<float*>(smem + C::SHARES_AT);
  const Parts parts(staged, shares);
  const RestParts rest_parts(staged + PARTS * BLOCK_Q * Parts::LD, shares + 2 * PARTS * BLOCK_Q);
  EpilogueTile<FINISHED, C::DV, THREADS, 64, Functor> tile(functor, thread, 0, head * C::LQ + first,
                                                           0, (head + 1) * C::LQ, C::DV);
  tile.fetch();
  if constexpr (SPLIT > 1) {
    ptx::barrier_cluster_arrive();  // done with its ring, which becomes the staging buffer
    ptx::barrier_cluster_wait();
    if (consumes) parts.template send<SPLIT>(state, rank * PARTS + part, row, parts_full);
    ptx::mbarrier_wait(parts_full, 0);
    parts.receive(thread);
  } else {
    __syncthreads();  // the ring becomes the staging buffer
    if (consumes) {
      parts.stage(state, part, row);
    } else if constexpr (REST > 0) {
      rest_parts.stage(state, warp - WARPS, 0);
    }
  }
  parts.settle(thread);
  if constexpr (REST > 0) rest_parts.settle(thread);
  tile.run(row_values, [&](int r, int c) {
    if constexpr (REST > 0) {
      if (r >= BLOCK_Q) return rest_parts.template merged<Functor::VECTOR>(r - BLOCK_Q, c);
    }
    return parts.template merged<Functor::VECTOR>(r, c);
  });
}
#endif

}  // namespace gtco
