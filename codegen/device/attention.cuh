// softmax(q k^T scale + mask) v per head in one pass over the keys (FlashAttention-2, Dao 2023), on
// mma.sync (m16n8k16, or m16n8k8 of tf32) with an online softmax in fp32.
//
// A block owns BLOCK_Q queries of one head. WARPS_K warps share each 16 queries: every one takes
// its part of each tile of keys, and the parts are merged at the end. K and V tiles arrive in a
// ring of STAGES tiles, by cp.async or by TMA (attention_tiles.cuh); 16-byte chunks lie so that
// ldmatrix meets no bank twice. COPY_WARPS more warps hold no queries: they copy with the others,
// and store results with them.
//
// Config: Element, LQ, LK, D, DV, BLOCK_Q, BLOCK_K, WARPS_K, COPY_WARPS, STAGES, CAUSAL, SCALE,
// SHARES_AT, ROW_VALUES_AT (bytes); with TMA also BOX, and KEYS_AT, VALUES_AT, BARRIERS_AT (bytes).
// Operands Q, K, V: `at(head, row, column)`; with TMA `copy(to, column, row, head, barrier)` and
// `prefetch()`. Mask: as in softmax.cuh.
#pragma once

#include "attention_tiles.cuh"
#include "grid.cuh"
#include "mma.cuh"
#include "softmax.cuh"

namespace gtco {

// What a warp does with its 16 queries and its part of a tile's keys on mma.sync.
template <class C, class Mask, bool EXACT = is_exact<C>>
struct AttentionWarp : SoftmaxRows<C, Mask, C::BLOCK_K / C::WARPS_K> {
  using Element = typename C::Element;
  static constexpr int E = 16 / sizeof(Element);  // of a chunk, of which mma takes two
  static constexpr int STEPS = ceil_div(C::D, 2 * E), DV16 = ceil_div(C::DV, 16);
  static constexpr int KEYS = C::BLOCK_K / C::WARPS_K;  // of a tile, that this warp takes
  using QueryRows = TileRows<C, C::BLOCK_Q, STEPS * 2 * E, E>;
  using KeyRows = TileRows<C, C::BLOCK_K, STEPS * 2 * E, E>;
  using ValueRows = TileRows<C, C::BLOCK_K, DV16 * 16, E>;
  static_assert(KEYS % 16 == 0, "a warp takes keys in steps of 16");
  using SoftmaxRows<C, Mask, KEYS>::lane;
  using SoftmaxRows<C, Mask, KEYS>::out;

  u32 q[STEPS][4];  // (16, D) as A fragments

  __device__ __forceinline__ void load_queries(const Element* tile, int row) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      const int chunk = k * 2 + lane / 16;
      ptx::ldmatrix_x4(q[k], ptx::shared_address(tile + QueryRows::offset(row + lane % 16, chunk)));
      Mma<Element>::round(q[k]);
    }
  }

  // scores = q k^T for this warp's keys of the tile, from row `key` on.
  __device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 8][4], const Element* tile,
                                                int key) const {
    const int row = key + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        u32 b[4];  // (16 keys, 2 chunks): keys 0-7 chunk 0, keys 0-7 chunk 1, keys 8-15 chunk 0...
        const int chunk = k * 2 + lane / 8 % 2;
        ptx::ldmatrix_x4(b, ptx::shared_address(tile + KeyRows::offset(row + n * 16, chunk)));
        Mma<Element>::round(b);
        Mma<Element>::multiply(scores[n * 2], q[k], b[0], b[1]);
        Mma<Element>::multiply(scores[n * 2 + 1], q[k], b[2], b[3]);
      }
    }
  }

  // out += weights v.
  __device__ __forceinline__ void multiply_values(const float (&weights)[KEYS / 8][4],
                                                  const Element* tile, int key) {
    if constexpr (sizeof(Element) == 4) {
      multiply_values_of_tf32(weights, tile, key);
    } else {
      const int row = key + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int k = 0; k < KEYS / 16; ++k) {
        u32 a[4];
        this->template to_operand<Element>(a, weights, k);
#pragma unroll
        for (int n = 0; n < DV16; ++n) {
          u32 b[4];  // (16 keys, 16 columns): keys 0-7 columns 0-7, keys 8-15 columns 0-7, ...
          const int chunk = n * 2 + lane / 16;
          ptx::ldmatrix_x4_trans(
              b, ptx::shared_address(tile + ValueRows::offset(row + k * 16, chunk)));
          Mma<Element>::multiply(out[n * 2], a, b[0], b[1]);
          Mma<Element>::multiply(out[n * 2 + 1], a, b[2], b[3]);
        }
      }
    }
  }

 private:
  // Of the values each lane loads the two keys whose weights it has (`to_operand`).
  __device__ __forceinline__ void multiply_values_of_tf32(const float (&weights)[KEYS / 8][4],
                                                          const Element* tile, int key) {
    const Element* from = tile + ValueRows::offset(key, 0);
    const auto value = [&](int row, int column) {
      return ptx::cvt_tf32(from[ValueRows::offset(row, column / E) + column % E]);
    };
#pragma unroll
    for (int k = 0; k < KEYS / 8; ++k) {
      u32 a[4];
      this->template to_operand<Element>(a, weights, k);
      const int row = k * 8 + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < DV16 * 2; ++n) {
        const int column = n * 8 + lane / 4;
        ptx::mma_m16n8k8(out[n], a, value(row, column), value(row + 1, column));
      }
    }
  }
};

// The same with products as good as fp32's. The queries, in two parts too many for the registers,
// are read again for each tile.
template <class C, class Mask>
struct AttentionWarp<C, Mask, true> : SoftmaxRows<C, Mask, C::BLOCK_K / C::WARPS_K> {
  using Element = typename C::Element;
  using Mma = gtco::Mma<Element, true>;
  static constexpr int E = 4;  // of a chunk, of which mma takes two
  static constexpr int STEPS = ceil_div(C::D, 2 * E), DV16 = ceil_div(C::DV, 16);
  static constexpr int KEYS = C::BLOCK_K / C::WARPS_K;  // of a tile, that this warp takes
  using QueryRows = TileRows<C, C::BLOCK_Q, STEPS * 2 * E, E>;
  using KeyRows = TileRows<C, C::BLOCK_K, STEPS * 2 * E, E>;
  using ValueRows = TileRows<C, C::BLOCK_K, DV16 * 16, E>;
  static_assert(KEYS % 16 == 0, "a warp takes keys in steps of 16");
  using SoftmaxRows<C, Mask, KEYS>::lane;
  using SoftmaxRows<C, Mask, KEYS>::out;

  const Element* queries;
  int query;

  __device__ __forceinline__ void load_queries(const Element* tile, int row) {
    queries = tile;
    query = row;
  }

  // scores = q k^T for this warp's keys of the tile, from row `key` on.
  __device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 8][4], const Element* tile,
                                                int key) const {
    const int row = key + lane / 16 * 8 + lane % 8;
    float sums[KEYS / 8][Mma::PARTS][4] = {};
#pragma unroll 1
    for (int k = 0; k < STEPS; ++k) {
      u32 a[Mma::PARTS][4];
      ptx::ldmatrix_x4(a[0], ptx::shared_address(queries + QueryRows::offset(query + lane % 16,
                                                                             k * 2 + lane / 16)));
      Mma::split(a);
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        // (16 keys, 2 chunks): keys 0-7 chunk 0, keys 0-7 chunk 1, keys 8-15 chunk 0...
        u32 b[Mma::PARTS][4];
        const int chunk = k * 2 + lane / 8 % 2;
        ptx::ldmatrix_x4(b[0], ptx::shared_address(tile + KeyRows::offset(row + n * 16, chunk)));
        Mma::split(b);
        Mma::mma(sums[n * 2], a, b);
        Mma::mma(sums[n * 2 + 1], a, b, 2);
      }
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) scores[i / 4][i % 4] = Mma::total(sums[i / 4], i % 4);
  }

  // out += weights v, with keys in the order that `multiply_values_of_tf32` has.
  __device__ __forceinline__ void multiply_values(const float (&weights)[KEYS / 8][4],
                                                  const Element* tile, int key) {
    const Element* from = tile + ValueRows::offset(key, 0);
    u32 a[KEYS / 8][Mma::PARTS][4];
#pragma unroll
    for (int k = 0; k < KEYS / 8; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][0][i] = __float_as_uint(weights[k][i % 2 * 2 + i / 2]);
      Mma::split(a[k]);
    }
#pragma unroll
    for (int n = 0; n < DV16 * 2; ++n) {
      __syncwarp();  // the assembler loads no more ahead: it has no room for it
      const int column = n * 8 + lane / 4;
      float sum[Mma::PARTS][4] = {};
#pragma unroll
      for (int k = 0; k < KEYS / 8; ++k) {
        u32 b[Mma::PARTS][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = ValueRows::offset(k * 8 + lane % 4 * 2 + i, column / E) + column % E;
          b[0][i] = __float_as_uint(from[at]);
        }
        Mma::split(b);
        Mma::mma(sum, a[k], b);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] += Mma::total(sum, i);
    }
  }
};

// A block's part of one head: BLOCK_Q queries against all keys, in three calls (start, run, merge).
template <class C, class Mask, int COPY_WARPS = 0>
class AttentionBlock {
 public:
  using Warp = AttentionWarp<C, Mask>;
  static_assert(C::BLOCK_Q % 16 == 0, "a warp owns 16 queries");
  static constexpr int THREADS = (C::BLOCK_Q / 16 * C::WARPS_K + COPY_WARPS) * 32;

  // `smem` holds the tiles of the loop; `staged`, which may lie over them, and `shares` are for the
  // merge.
  __device__ __forceinline__ AttentionBlock(unsigned char* smem, float* staged, float* shares,
                                            int head, int query0)
      : parts_(staged, shares),
        thread_(threadIdx.x),
        part_(thread_ / 32 % C::WARPS_K),
        row_(thread_ / 32 / C::WARPS_K * 16),
        has_queries_(COPY_WARPS == 0 || row_ < C::BLOCK_Q),
        head_(head),
        query0_(query0),
        key_count_(C::CAUSAL ? min_of(C::LK, query0 + C::BLOCK_Q) : C::LK),
        tiles_(smem, thread_, head, query0, ceil_div(key_count_, C::BLOCK_K)) {}

  // Before the dependent-launch wait; all threads.
  template <class Q, class K, class V>
  __device__ __forceinline__ void prepare(const Q& queries, const K& keys, const V& values) const {
    tiles_.prepare(queries, keys, values);
  }

  // Starts the copies of the queries and of the first tiles of keys and values.
  template <class Q, class K, class V>
  __device__ __forceinline__ void start(const Q& queries, const K& keys, const V& values) const {
    tiles_.start(queries, keys, values);
  }

  // The loop over the keys. No warp uses the tiles any more when all have left it.
  template <class K, class V>
  __device__ __forceinline__ void run(Warp& state, const K& keys, const V& values,
                                      const Mask& mask) const {
    state.lane = thread_ % 32;
    MaskTile<C, Mask, Warp::KEYS> tile_mask;
#pragma unroll 1
    for (int tile = 0; tile < tiles_.count(); ++tile) {
      const int slot = tile % C::STAGES;
      const int key = part_ * Warp::KEYS;
      const int key0 = tile * C::BLOCK_K + key;
      if constexpr (Mask::PRESENT) {
        if (has_queries_) tile_mask.load(mask, state.lane, head_, query0_ + row_, key0, tile == 0);
      }
      tiles_.await_keys(tile);
      if (tile == 0 && has_queries_) state.load_queries(tiles_.queries(), row_);
      tiles_.ask_ahead(keys, values, tile);
      // The last tile may hold no key for this warp.
      const bool any = has_queries_ && key0 < key_count_;
      float scores[Warp::KEYS / 8][4] = {};  // (16, KEYS)
      if (any) {
        state.multiply_keys(scores, tiles_.keys(slot), key);
        tiles_.leave_keys(keys, values, tile);
        state.mask_scores(scores, tile_mask, query0_ + row_, key0);
        state.rescale(scores);
      }
      tiles_.await_values();
      if (any) state.multiply_values(scores, tiles_.values(slot), key);
      tiles_.leave_values(keys, values, tile);
    }
  }

  // Brings the parts of each query together; all threads.
  __device__ __forceinline__ void merge(const Warp& state) const {
    if (has_queries_) parts_.stage(state, part_, row_);
    parts_.settle(thread_);
  }

  // The result of query `query0 + r` from column c on, after `merge`.
  template <int VECTOR>
  __device__ __forceinline__ Vec<float, VECTOR> merged(int r, int c) const {
    return parts_.template merged<VECTOR>(r, c);
  }

 private:
  const PartsMerge<Warp, C::BLOCK_Q, C::WARPS_K, THREADS> parts_;
  const int thread_, part_, row_;
  const bool has_queries_;
  const int head_, query0_, key_count_;
  const Tiles<C, Warp, THREADS> tiles_;
};

template <class C, class Q, class K, class V, class Mask, class Functor>
__device__ __forceinline__ void attention(const Q& queries, const K& keys, const V& values,
                                          const Mask& mask, const Functor& functor) {
  using Block = AttentionBlock<C, Mask, C::COPY_WARPS>;
  extern __shared__ __align__(1024) unsigned char smem[];
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);
  const int head = block_along<C, 1>(), query0 = block_along<C, 0>() * C::BLOCK_Q;
  // The parts are staged over the ring.
  const Block block(smem, reinterpret_cast<float*>(smem),
                    reinterpret_cast<float*>(smem + C::SHARES_AT), head, query0);

  block.prepare(queries, keys, values);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  block.start(queries, keys, values);
  const int thread = threadIdx.x;
  fill_row_values<C::BLOCK_Q, Block::THREADS>(functor, row_values, thread, head * C::LQ + query0,
                                              (head + 1) * C::LQ);
  typename Block::Warp state;
  block.run(state, keys, values, mask);
  EpilogueTile<C::BLOCK_Q, C::DV, Block::THREADS, 64, Functor> tile(
      functor, thread, 0, head * C::LQ + query0, 0, (head + 1) * C::LQ, C::DV);
  tile.fetch();
  ptx::cp_async_wait<0>();
  __syncthreads();  // the ring becomes the staging buffer
  block.merge(state);
  tile.run(row_values, [&](int r, int c) { return block.template merged<Functor::VECTOR>(r, c); });
}

}  // namespace gtco
