// y = linear(merge_heads(softmax(q k^T scale + mask) v), w): attention and its output projection in
// one kernel, a cluster for BLOCK_Q queries of all heads of a batch item.
//
// Block `rank` of the cluster does head `rank` as attention.cuh does, sends its tile of results to
// every peer through distributed shared memory, and then makes its share of the projection's
// columns for all BLOCK_Q rows, on wgmma where its operands lie as that wants them. Its rows of the
// weights come by TMA, when they are constants before the dependent-launch wait, on a barrier of
// their own: nobody waits for them before the products.
#pragma once

#include "attention.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// Config: what attention.cuh takes; HEADS (of a batch item, blocks of the cluster), COLUMNS (of the
// projection), W_CONSTANT, WGMMA, COLUMN_WARPS (which share the columns of a block on mma.sync);
// INBOX_AT, RING_AT, PARTS_AT and BARRIERS_AT (bytes).

// A block's share of the projection: (BLOCK_Q, WIDTH) from K in ATOMS of 64, 128 bytes a row.
template <class C>
struct ProjectionShare {
  using Element = typename C::Element;
  using Rows = ChunkedRows<C::DV>;     // of a head's results
  using WeightRows = ChunkedRows<64>;  // the 128-byte swizzle, too
  static_assert(C::DV % 16 == 0, "mma takes K in steps of 16, each of one head");
  static_assert(C::HEADS >= 2 && C::COLUMNS % (16 * C::HEADS) == 0, "a share of columns a block");
  static constexpr int THREADS = C::BLOCK_Q / 16 * C::WARPS_K * 32;
  static constexpr int WIDTH = C::COLUMNS / C::HEADS;
  static constexpr int STEPS = C::HEADS * C::DV / 16;
  static constexpr int ATOMS = ceil_div(STEPS, 4);
  static constexpr int RESULT = C::BLOCK_Q * Rows::PITCH * 8;  // elements

  // On mma.sync warps share the rows by 32 or 16, then the columns, then K.
  static constexpr int ROW_TILES = C::BLOCK_Q % 32 == 0 ? 2 : 1;
  static constexpr int ROW_WARPS = C::BLOCK_Q / 16 / ROW_TILES;
  static constexpr int WARP_COLUMNS = WIDTH / C::COLUMN_WARPS;
  static constexpr int PARTS = C::WGMMA ? 1 : THREADS / 32 / ROW_WARPS / C::COLUMN_WARPS;
  static constexpr int LD = WIDTH + (C::WGMMA ? 4 : 8);  // a fragment's rows meet different banks
};

// parts[0] = results weights^T, the columns on wgmma's M side: a warpgroup for 64 of them.
template <class C, class ResultOf>
__device__ __forceinline__ void project_with_wgmma(const typename C::Element* weights,
                                                   const ResultOf& result_of, float* parts) {
  using Share = ProjectionShare<C>;
  static_assert(C::DV == 64 && Share::WIDTH % 64 == 0, "both operands in rows of 128 bytes");
  constexpr int GROUPS = Share::THREADS / 128, TILES = Share::WIDTH / 64;
  constexpr int EACH = ceil_div(TILES, GROUPS);  // tiles of a warpgroup
  static_assert(GROUPS > 0, "wgmma takes a whole warpgroup");
  const int warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32, group = warp / 4;
  float acc[EACH][C::BLOCK_Q / 2];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int tile = group + i * GROUPS;
    if (group >= GROUPS || tile >= TILES) continue;
#pragma unroll
    for (int j = 0; j < C::BLOCK_Q / 2; ++j) acc[i][j] = 0.0f;
#pragma unroll 1
    for (int head = 0; head < C::HEADS; ++head) {
      const u32 p_tile = ptx::shared_address(weights + (head * Share::WIDTH + tile * 64) * 64);
      const u32 q_tile = ptx::shared_address(result_of(head));  // (BLOCK_Q, 64)
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 128; k += 32)
        ptx::Wgmma<typename C::Element, C::BLOCK_Q>::mma(acc[i], ptx::wgmma_descriptor(p_tile, k),
                                                         ptx::wgmma_descriptor(q_tile, k), 1);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
    }
    ptx::wgmma_wait_group<0>(acc[i]);
  }
  __syncthreads();  // nobody reads the peers' results any more
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int tile = group + i * GROUPS;
    if (group >= GROUPS || tile >= TILES) continue;
    float* to = parts + tile * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < C::BLOCK_Q / 2; ++j)
      to[(j / 4 * 8 + lane % 4 * 2 + j % 2) * Share::LD + j / 2 % 2 * 8] = acc[i][j];
  }
}

// The sum of parts[0 .. PARTS) = results weights^T, each of a part of K.
template <class C, class ResultOf>
__device__ __forceinline__ void project_with_mma(const typename C::Element* weights,
                                                 const ResultOf& result_of, float* parts) {
  using Share = ProjectionShare<C>;
  using Element = typename C::Element;
  constexpr int PARTS = Share::PARTS, ROW_TILES = Share::ROW_TILES;
  constexpr int WARP_COLUMNS = Share::WARP_COLUMNS;
  static_assert(PARTS * Share::ROW_WARPS * C::COLUMN_WARPS * 32 == Share::THREADS,
                "warps are shared evenly");
  static_assert(WARP_COLUMNS % 16 == 0, "a warp takes columns in steps of 16");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp % PARTS, row = warp / (PARTS * C::COLUMN_WARPS) * ROW_TILES * 16;
  const int column = warp / PARTS % C::COLUMN_WARPS * WARP_COLUMNS;
  constexpr int PART_STEPS = ceil_div(Share::STEPS, PARTS);
  const int last = min_of(Share::STEPS, (part + 1) * PART_STEPS);
  float acc[ROW_TILES][WARP_COLUMNS / 8][4] = {};  // (ROW_TILES * 16, WARP_COLUMNS)
#pragma unroll 4
  for (int step = part * PART_STEPS; step < last; ++step) {
    const Element* result = result_of(step * 16 / C::DV);
    const Element* atom = weights + step / 4 * (Share::WIDTH * 64);
    u32 a[ROW_TILES][4];  // (16, 16) each
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      const int chunk = step * 2 % (C::DV / 8) + lane / 16;
      ptx::ldmatrix_x4(
          a[i], ptx::shared_address(result + Share::Rows::offset(row + i * 16 + lane % 16, chunk)));
    }
#pragma unroll
    for (int n = 0; n < WARP_COLUMNS / 16; ++n) {
      u32 b[4];  // (16 columns, 16): columns 0-7 k 0-7, columns 0-7 k 8-15, columns 8-15 k 0-7, ...
      const int at = Share::WeightRows::offset(column + n * 16 + lane / 16 * 8 + lane % 8,
                                               step * 2 % 8 + lane / 8 % 2);
      ptx::ldmatrix_x4(b, ptx::shared_address(atom + at));
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        ptx::mma_m16n8k16<Element>(acc[i][n * 2], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[i][n * 2 + 1], a[i], b[2], b[3]);
      }
    }
  }
  __syncthreads();  // nobody reads the peers' results any more
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + lane / 4 + half * 8;
      float* to = parts + (part * C::BLOCK_Q + r) * Share::LD + column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < WARP_COLUMNS / 8; ++n)
        store<2>(to + n * 8, Vec<float, 2>{{acc[i][n][half * 2], acc[i][n][half * 2 + 1]}});
    }
  }
}

// Shared memory: the weights; the results of the peers, where nothing else was ever written; the
// loop's tiles, over them the staging of the merge, and over that the block's own result, which
// peers read to the end.
template <class C, class Q, class K, class V, class Mask, class Functor>
__device__ __forceinline__ void attention_projection(const Q& queries, const K& keys,
                                                     const V& values, const Mask& mask,
                                                     const ptx::TensorMap& weights,
                                                     const Functor& functor) {
  using Block = AttentionBlock<C, Mask>;
  using Share = ProjectionShare<C>;
  using Element = typename C::Element;
  using Rows = typename Share::Rows;
  constexpr int WIDTH = Share::WIDTH, RESULT = Share::RESULT, THREADS = Share::THREADS;

  extern __shared__ __align__(1024) unsigned char smem[];
  const Element* weight_tile = reinterpret_cast<Element*>(smem);          // (ATOMS, WIDTH, 64)
  const Element* inbox = reinterpret_cast<Element*>(smem + C::INBOX_AT);  // (HEADS - 1, RESULT)
  Element* own = reinterpret_cast<Element*>(smem + C::RING_AT);           // (BLOCK_Q, DV)
  float* parts = reinterpret_cast<float*>(smem + C::PARTS_AT);            // (PARTS, BLOCK_Q, LD)
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);
  const u32 weights_full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 inbox_full = weights_full + 8;

  const int thread = threadIdx.x;
  const int rank = blockIdx.x, batch = blockIdx.z, query0 = blockIdx.y * C::BLOCK_Q;
  const int row0 = batch * C::LQ + query0, row_count = (batch + 1) * C::LQ;
  const Block block(smem + C::RING_AT, reinterpret_cast<float*>(smem + C::RING_AT),
                    reinterpret_cast<float*>(smem + C::SHARES_AT), batch * C::HEADS + rank, query0);

  const auto copy_weights = [&]() {
#pragma unroll 1
    for (int atom = 0; atom < Share::ATOMS; ++atom)
      ptx::cp_async_bulk_tensor(ptx::shared_address(weight_tile + atom * WIDTH * 64), weights,
                                atom * 64, rank * WIDTH, 0, weights_full);
  };
  if (thread == 0) {
    ptx::prefetch_tensormap(weights);
    ptx::mbarrier_init(weights_full, 1);
    ptx::mbarrier_init(inbox_full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(weights_full, Share::ATOMS * WIDTH * 128);
    ptx::mbarrier_arrive_expect_tx(inbox_full, (C::HEADS - 1) * RESULT * 2);
    if constexpr (C::W_CONSTANT) copy_weights();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();  // peers may count on the inbox
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (!C::W_CONSTANT && thread == 0) copy_weights();
  __syncwarp();
  block.start(queries, keys, values);
  fill_row_values<C::BLOCK_Q, THREADS>(functor, row_values, thread, row0, row_count);

  typename Block::Warp state;
  block.run(state, keys, values, mask);
  EpilogueTile<C::BLOCK_Q, WIDTH, THREADS, 64, Functor> tile(functor, thread, 0, row0, rank * WIDTH,
                                                             row_count, C::COLUMNS);
  tile.fetch();
  ptx::cp_async_wait<0>();
  __syncthreads();  // the ring becomes the staging buffer
  block.merge(state);

  // The block's own result, rounded as it would be stored, over the staged parts that it is of.
  constexpr int VECTORS = C::BLOCK_Q * C::DV / 8;
  constexpr int TAKEN = ceil_div(VECTORS, THREADS);
  Vec<float, 8> taken[TAKEN];
#pragma unroll
  for (int i = 0; i < TAKEN; ++i) {
    const int item = thread + i * THREADS;
    if (item < VECTORS)
      taken[i] = block.template merged<8>(item / (C::DV / 8), item % (C::DV / 8) * 8);
  }
  __syncthreads();  // the staged parts are used up
#pragma unroll
  for (int i = 0; i < TAKEN; ++i) {
    const int item = thread + i * THREADS;
    if (item < VECTORS)
      store<8>(own + Rows::offset(item / (C::DV / 8), item % (C::DV / 8)), taken[i]);
  }
  ptx::fence_proxy_async();  // the copy engine reads them
  __syncthreads();
  ptx::barrier_cluster_wait();  // every block's inbox can take copies
  if (thread < C::HEADS && thread != rank) {
    const int slot = rank < thread ? rank : rank - 1;  // in the inbox of block `thread`
    ptx::cp_async_bulk_to_cluster(ptx::mapa(ptx::shared_address(inbox + slot * RESULT), thread),
                                  ptx::shared_address(own), RESULT * 2,
                                  ptx::mapa(inbox_full, thread));
  }
  __syncwarp();

  ptx::mbarrier_wait(weights_full, 0);
  ptx::mbarrier_wait(inbox_full, 0);
  ptx::barrier_cluster_arrive_relaxed();  // what the peers sent has left them
  const auto result_of = [&](int head) -> const Element* {
    return head == rank ? own : inbox + (head < rank ? head : head - 1) * RESULT;
  };
  if constexpr (C::WGMMA) {
    project_with_wgmma<C>(weight_tile, result_of, parts);
  } else {
    project_with_mma<C>(weight_tile, result_of, parts);
  }
  __syncthreads();
  constexpr int VECTOR = Functor::VECTOR;
  tile.run(row_values, [&](int r, int c) {
    Vec<float, VECTOR> sum{};
#pragma unroll
    for (int p = 0; p < Share::PARTS; ++p) {  // always in this order: the same bits
      const auto part_sum = load<VECTOR>(parts + (p * C::BLOCK_Q + r) * Share::LD + c);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum[i] += part_sum[i];
    }
    return sum;
  });
  ptx::barrier_cluster_wait();  // nobody leaves while a peer takes its result
}
#endif

}  // namespace gtco
