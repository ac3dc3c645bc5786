// y = linear(merge_heads(softmax(q k^T scale + mask) v), w): attention and its output projection in
// one kernel, a cluster for BLOCK_Q queries of all heads of a batch item.
//
// Block `rank` of the cluster does head `rank` as attention.cuh does, sends its tile of results to
// every peer through distributed shared memory, and then makes its share of the projection's
// columns for all BLOCK_Q rows on mma.sync. Its rows of the weights come by TMA, when they are
// constants before the dependent-launch wait, on a barrier of their own: nobody waits for them
// before the products.
#pragma once

#include "attention.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// Config: what attention.cuh takes; HEADS (of a batch item, blocks of the cluster), COLUMNS (of the
// projection), W_CONSTANT, COLUMN_WARPS (which share the columns of a block); INBOX_AT, RING_AT,
// PARTS_AT and BARRIERS_AT (bytes).
//
// Shared memory: the weights; the results of the peers, where nothing else was ever written; the
// loop's tiles, over them the staging of the merge, and over that the block's own result.
template <class C, class Q, class K, class V, class Mask, class Functor>
__device__ __forceinline__ void attention_projection(const Q& queries, const K& keys,
                                                     const V& values, const Mask& mask,
                                                     const ptx::TensorMap& weights,
                                                     const Functor& functor) {
  using Block = AttentionBlock<C, Mask>;
  using Element = typename C::Element;
  using Rows = typename Block::ValueRows;
  static_assert(C::DV % 16 == 0, "mma takes K in steps of 16, each of one head");
  static_assert(C::HEADS >= 2 && C::COLUMNS % (16 * C::HEADS) == 0, "a share of columns a block");
  constexpr int WIDTH = C::COLUMNS / C::HEADS;  // columns of a block
  constexpr int STEPS = C::HEADS * C::DV / 16;  // of K
  constexpr int ATOM_K = 64;                    // elements of a 128-byte swizzle row
  constexpr int ATOMS = ceil_div(STEPS * 16, ATOM_K);
  using WeightRows = ChunkedRows<ATOM_K>;               // the 128-byte swizzle, too
  constexpr int RESULT = C::BLOCK_Q * Rows::PITCH * 8;  // elements of a head's tile
  constexpr int THREADS = Block::THREADS;

  // Warps share the rows by 32 or 16, then the columns, then K.
  constexpr int ROW_TILES = C::BLOCK_Q % 32 == 0 ? 2 : 1;
  constexpr int ROW_WARPS = C::BLOCK_Q / 16 / ROW_TILES;
  constexpr int PARTS = THREADS / 32 / ROW_WARPS / C::COLUMN_WARPS;
  constexpr int PART_STEPS = ceil_div(STEPS, PARTS);
  constexpr int WARP_COLUMNS = WIDTH / C::COLUMN_WARPS;
  constexpr int PART_LD = WIDTH + 8;  // rows of a fragment meet different banks
  static_assert(PARTS * ROW_WARPS * C::COLUMN_WARPS * 32 == THREADS, "warps are shared evenly");
  static_assert(WARP_COLUMNS % 16 == 0, "a warp takes columns in steps of 16");

  extern __shared__ __align__(1024) unsigned char smem[];
  const Element* weight_tile = reinterpret_cast<Element*>(smem);          // (ATOMS, WIDTH, ATOM_K)
  const Element* inbox = reinterpret_cast<Element*>(smem + C::INBOX_AT);  // (HEADS - 1, RESULT)
  Element* own = reinterpret_cast<Element*>(smem + C::RING_AT);           // (BLOCK_Q, DV)
  float* parts = reinterpret_cast<float*>(smem + C::PARTS_AT);  // (PARTS, BLOCK_Q, PART_LD)
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);
  const u32 weights_full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 inbox_full = weights_full + 8;

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = blockIdx.x, batch = blockIdx.z, query0 = blockIdx.y * C::BLOCK_Q;
  const int row0 = batch * C::LQ + query0, row_count = (batch + 1) * C::LQ;
  const Block block(smem + C::RING_AT, reinterpret_cast<float*>(smem + C::RING_AT),
                    reinterpret_cast<float*>(smem + C::SHARES_AT), batch * C::HEADS + rank, query0);

  const auto copy_weights = [&]() {
#pragma unroll 1
    for (int atom = 0; atom < ATOMS; ++atom)
      ptx::cp_async_bulk_tensor(ptx::shared_address(weight_tile + atom * WIDTH * ATOM_K), weights,
                                atom * ATOM_K, rank * WIDTH, 0, weights_full);
  };
  if (thread == 0) {
    ptx::prefetch_tensormap(weights);
    ptx::mbarrier_init(weights_full, 1);
    ptx::mbarrier_init(inbox_full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(weights_full, ATOMS * WIDTH * 128);
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

  const int part = warp % PARTS, row = warp / (PARTS * C::COLUMN_WARPS) * ROW_TILES * 16;
  const int column = warp / PARTS % C::COLUMN_WARPS * WARP_COLUMNS;
  float acc[ROW_TILES][WARP_COLUMNS / 8][4] = {};  // (ROW_TILES * 16, WARP_COLUMNS)
  ptx::mbarrier_wait(weights_full, 0);
  ptx::mbarrier_wait(inbox_full, 0);
  ptx::barrier_cluster_arrive_relaxed();  // what the peers sent has left them
  const int last = min_of(STEPS, (part + 1) * PART_STEPS);
#pragma unroll 4
  for (int step = part * PART_STEPS; step < last; ++step) {
    const int head = step * 16 / C::DV, chunk = step * 2 % (C::DV / 8);
    const Element* result = head == rank ? own : inbox + (head < rank ? head : head - 1) * RESULT;
    const Element* atom = weight_tile + step * 16 / ATOM_K * (WIDTH * ATOM_K);
    u32 a[ROW_TILES][4];  // (16, 16) each
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
      ptx::ldmatrix_x4(a[i], ptx::shared_address(result + Rows::offset(row + i * 16 + lane % 16,
                                                                       chunk + lane / 16)));
#pragma unroll
    for (int n = 0; n < WARP_COLUMNS / 16; ++n) {
      u32 b[4];  // (16 columns, 16): columns 0-7 k 0-7, columns 0-7 k 8-15, columns 8-15 k 0-7, ...
      const int at = WeightRows::offset(column + n * 16 + lane / 16 * 8 + lane % 8,
                                        step * 2 % (ATOM_K / 8) + lane / 8 % 2);
      ptx::ldmatrix_x4(b, ptx::shared_address(atom + at));
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        ptx::mma_m16n8k16<Element>(acc[i][n * 2], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[i][n * 2 + 1], a[i], b[2], b[3]);
      }
    }
  }
  __syncthreads();  // the results become the staging buffer, but for the own one: peers read it
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + lane / 4 + half * 8;
      float* to = parts + (part * C::BLOCK_Q + r) * PART_LD + column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < WARP_COLUMNS / 8; ++n)
        store<2>(to + n * 8, Vec<float, 2>{{acc[i][n][half * 2], acc[i][n][half * 2 + 1]}});
    }
  }
  __syncthreads();
  constexpr int VECTOR = Functor::VECTOR;
  tile.run(row_values, [&](int r, int c) {
    Vec<float, VECTOR> sum{};
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {  // always in this order: the same bits
      const auto part_sum = load<VECTOR>(parts + (p * C::BLOCK_Q + r) * PART_LD + c);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum[i] += part_sum[i];
    }
    return sum;
  });
  ptx::barrier_cluster_wait();  // nobody leaves while a peer takes its result
}
#endif

}  // namespace gtco
