// D[rows, columns] = A[rows, K] B[columns, K]^T on wgmma, fed by TMA through a ring of mbarriers
// (one consumer warpgroup per 64 rows of P; one more whose first warp produces, while its others
// gather the row values, and which shares the epilogue).
//
// wgmma's M side is called P and its N side Q. With SWAP, P are the columns (output channels) and Q
// the rows (tokens), so that 197 rows waste little of the tile. A cluster is one of two things:
// SPLIT blocks that share a tile's K range and add their partial tiles through distributed shared
// memory, or MULTICAST blocks that are neighbours along P and bring each other's Q tiles.
#pragma once

#include "epilogue.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// When the kernel behind this one may begin, a knob of the plan: once the producer has asked for
// its last tile, so that the loads of both share the way into shared memory for less long; else
// with the warps that gather the row values, at once. The first of a block's threads counts (PTX
// 9.7.13.13).
#ifdef GTCO_LATE_TRIGGER
constexpr bool LATE_TRIGGER = true;
#else
constexpr bool LATE_TRIGGER = false;
#endif

// Config: Element, ROWS, COLUMNS, K, SWAP, BLOCK_P, BLOCK_Q, STAGES, SPLIT, MULTICAST, P_CONSTANT,
// Q_CONSTANT, ATOMS (of 128 bytes of K a stage), DEPTH (1: a stage's products are issued before the
// last one's are awaited), REGISTERS (a thread's), STAGE_LD, ROW_VALUES_AT, INBOX_AT and
// BARRIERS_AT (bytes).
template <class C, class Functor>
__device__ __forceinline__ void gemm_wgmma(const ptx::TensorMap& p_map, const ptx::TensorMap& q_map,
                                           const Functor& functor) {
  using Element = typename C::Element;
  constexpr int ATOM_K = 128 / sizeof(Element);  // one 128-byte swizzle row
  constexpr int BLOCK_K = C::ATOMS * ATOM_K;
  constexpr int K_STEP = 32;  // bytes of K that one wgmma takes
  constexpr int P_BYTES = C::BLOCK_P * 128, Q_BYTES = C::BLOCK_Q * 128;  // of an atom
  constexpr int STAGE_BYTES = C::ATOMS * (P_BYTES + Q_BYTES);
  constexpr int CONSUMERS = C::BLOCK_P / 64;
  constexpr int THREADS = CONSUMERS * 128, ALL_THREADS = THREADS + 128;
  static_assert(C::BLOCK_P % 64 == 0, "a consumer warpgroup computes 64 rows of P");
  static_assert(C::SPLIT == 1 || C::MULTICAST == 1, "a cluster splits K or shares Q, not both");
  constexpr bool CLUSTER = C::SPLIT > 1 || C::MULTICAST > 1;
  static_assert(C::BLOCK_Q % 8 == 0 && C::BLOCK_Q <= 256, "wgmma's N is a multiple of 8 up to 256");
  constexpr int ALL_STEPS = ceil_div(C::K, BLOCK_K);
  constexpr int SPLIT_STEPS = ceil_div(ALL_STEPS, C::SPLIT);
  constexpr int TILE_ROWS = C::SWAP ? C::BLOCK_Q : C::BLOCK_P;
  constexpr int TILE_COLUMNS = C::SWAP ? C::BLOCK_P : C::BLOCK_Q;
  constexpr int SLICE = ceil_div(TILE_ROWS, C::SPLIT);  // rows that a block finishes
  constexpr int SLICE_BYTES = SLICE * C::STAGE_LD * 4;

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 ring = ptx::shared_address(smem);  // (STAGES, ATOMS x P_BYTES and ATOMS x Q_BYTES)
  const u32 full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 empty = full + 8 * C::STAGES;
  float* staged = reinterpret_cast<float*>(smem);  // (TILE_ROWS, STAGE_LD), after the loop
  float* inbox = reinterpret_cast<float*>(smem + C::INBOX_AT);  // (SPLIT - 1, SLICE, STAGE_LD)
  const u32 inbox_at = ptx::shared_address(inbox), inbox_full = empty + 8 * C::STAGES;
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = blockIdx.x % (C::SPLIT * C::MULTICAST);  // in the cluster
  const int p0 = blockIdx.x / C::SPLIT * C::BLOCK_P, q0 = blockIdx.y * C::BLOCK_Q;
  const int batch = blockIdx.z;
  const int first = C::SPLIT > 1 ? rank * SPLIT_STEPS : 0;
  // Even parts have a constant here: ptxas 13.0 takes this minimum for smaller where it is equal.
  const int steps = SPLIT_STEPS * C::SPLIT == ALL_STEPS
                        ? SPLIT_STEPS
                        : max_of(0, min_of(SPLIT_STEPS, ALL_STEPS - first));
  const int row0 = C::SWAP ? q0 : p0, col0 = C::SWAP ? p0 : q0;

  constexpr int FREE = C::REGISTERS - C::BLOCK_Q / 2 - 48;  // beside the loop's
  EpilogueTile<SLICE, TILE_COLUMNS, ALL_THREADS, min_of(64, FREE) * 4, Functor> tile(
      functor, thread, C::SPLIT > 1 ? rank * SLICE : 0, batch * C::ROWS + row0, col0,
      min_of((batch + 1) * C::ROWS, batch * C::ROWS + row0 + TILE_ROWS), C::COLUMNS);

  if (thread == 0) {
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, CONSUMERS * 4 * C::MULTICAST);
    }
    if constexpr (C::SPLIT > 1) ptx::mbarrier_init(inbox_full, 1);
    ptx::fence_mbarrier_init();
    if constexpr (C::SPLIT > 1)
      ptx::mbarrier_arrive_expect_tx(inbox_full, (C::SPLIT - 1) * SLICE_BYTES);
  }
  // A peer's copies count on this block's barriers: multicast at once, partial tiles at the end.
  if constexpr (CLUSTER) ptx::barrier_cluster_arrive_relaxed();
  if constexpr (C::MULTICAST > 1) {
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }

  float acc[C::BLOCK_Q / 2];  // of a consumer
#pragma unroll
  for (int i = 0; i < C::BLOCK_Q / 2; ++i) acc[i] = 0.0f;
  const int group = warp / 4;
  const auto consume = [&]() {
    const auto release = [&](int s) {  // to every block whose producer fills this slot
      if constexpr (C::MULTICAST > 1) {
        if (lane < C::MULTICAST) ptx::mbarrier_arrive_cluster(ptx::mapa(empty + 8 * s, lane));
      } else {
        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
      }
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int s = step % C::STAGES;
      ptx::mbarrier_wait(full + 8 * s, step / C::STAGES & 1);
      const u32 p_tile = ring + s * STAGE_BYTES + group * 64 * 128;    // (ATOMS, 64, ATOM_K)
      const u32 q_tile = ring + s * STAGE_BYTES + C::ATOMS * P_BYTES;  // (ATOMS, BLOCK_Q, ATOM_K)
      ptx::wgmma_fence();
#pragma unroll
      for (int atom = 0; atom < C::ATOMS; ++atom)
#pragma unroll
        for (int k = 0; k < 128; k += K_STEP)
          ptx::Wgmma<Element, C::BLOCK_Q>::mma(
              acc, ptx::wgmma_descriptor(p_tile + atom * P_BYTES + k),
              ptx::wgmma_descriptor(q_tile + atom * Q_BYTES + k), 1);
      ptx::wgmma_commit_group();
      // At depth 0 the slot goes back before the next is awaited; at depth 1 the tensor cores never
      // wait for this warpgroup's turn, and each slot is held for a step longer.
      if constexpr (C::DEPTH == 0) {
        ptx::wgmma_wait_group<0>(acc);
        release(s);
      } else {
        ptx::wgmma_wait_group<1>();
        if (step > 0) release((step - 1) % C::STAGES);
      }
    }
    if constexpr (C::DEPTH > 0) ptx::wgmma_wait_group<0>(acc);
  };
  const auto stage = [&]() {
    const int p = group * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < C::BLOCK_Q / 8; ++j) {
      const int q = j * 8 + lane % 4 * 2;
      if constexpr (C::SWAP) {
        staged[q * C::STAGE_LD + p] = acc[j * 4];
        staged[(q + 1) * C::STAGE_LD + p] = acc[j * 4 + 1];
        staged[q * C::STAGE_LD + p + 8] = acc[j * 4 + 2];
        staged[(q + 1) * C::STAGE_LD + p + 8] = acc[j * 4 + 3];
      } else {
        *reinterpret_cast<float2*>(staged + p * C::STAGE_LD + q) =
            make_float2(acc[j * 4], acc[j * 4 + 1]);
        *reinterpret_cast<float2*>(staged + (p + 8) * C::STAGE_LD + q) =
            make_float2(acc[j * 4 + 2], acc[j * 4 + 3]);
      }
    }
    if constexpr (C::SPLIT > 1) ptx::fence_proxy_async();  // the copy engine reads them
  };

  if (warp >= CONSUMERS * 4) {
    if (warp > CONSUMERS * 4) {
      ptx::griddepcontrol_wait();
      tile.fetch();
      fill_row_values<TILE_ROWS, 96>(functor, row_values, thread - THREADS - 32,
                                     batch * C::ROWS + row0, (batch + 1) * C::ROWS);
    } else if (lane == 0) {  // the producer
      const auto copy_p = [&](int step) {
        const int s = step % C::STAGES;
#pragma unroll
        for (int atom = 0; atom < C::ATOMS; ++atom)
          ptx::cp_async_bulk_tensor(ring + s * STAGE_BYTES + atom * P_BYTES, p_map,
                                    (first + step) * BLOCK_K + atom * ATOM_K, p0, batch,
                                    full + 8 * s);
      };
      const auto copy_q = [&](int step) {
        const int s = step % C::STAGES;
        if (C::MULTICAST > 1 && step % C::MULTICAST != rank) return;  // blocks take turns
#pragma unroll
        for (int atom = 0; atom < C::ATOMS; ++atom) {
          const u32 to = ring + s * STAGE_BYTES + C::ATOMS * P_BYTES + atom * Q_BYTES;
          const int k = (first + step) * BLOCK_K + atom * ATOM_K;
          if constexpr (C::MULTICAST > 1) {
            ptx::cp_async_bulk_tensor_multicast(to, q_map, k, q0, batch, full + 8 * s,
                                                (1 << C::MULTICAST) - 1);
          } else {
            ptx::cp_async_bulk_tensor(to, q_map, k, q0, batch, full + 8 * s);
          }
        }
      };
      ptx::prefetch_tensormap(p_map);
      ptx::prefetch_tensormap(q_map);
      const int ahead = min_of(C::STAGES, steps);
      for (int step = 0; step < ahead; ++step) {
        ptx::mbarrier_arrive_expect_tx(full + 8 * step, STAGE_BYTES);
        if constexpr (C::P_CONSTANT) copy_p(step);  // weights need not wait for the kernel before
        if constexpr (C::Q_CONSTANT) copy_q(step);
      }
      ptx::griddepcontrol_wait();
      for (int step = 0; step < ahead; ++step) {
        if constexpr (!C::P_CONSTANT) copy_p(step);
        if constexpr (!C::Q_CONSTANT) copy_q(step);
      }
#pragma unroll 1
      for (int step = C::STAGES; step < steps; ++step) {
        const int s = step % C::STAGES;
        ptx::mbarrier_wait(empty + 8 * s, (step / C::STAGES - 1) & 1);
        ptx::mbarrier_arrive_expect_tx(full + 8 * s, STAGE_BYTES);
        copy_p(step);
        copy_q(step);
      }
      if constexpr (LATE_TRIGGER) ptx::griddepcontrol_launch_dependents();
    } else {
      ptx::griddepcontrol_wait();
    }
    __syncwarp();
    if (warp == CONSUMERS * 4) tile.fetch();
  } else {
    ptx::griddepcontrol_wait();
    tile.fetch();
    consume();
  }
  if constexpr (!LATE_TRIGGER) ptx::griddepcontrol_launch_dependents();

  __syncthreads();  // the ring becomes the staging buffer
  if (warp < CONSUMERS * 4) stage();
  __syncthreads();
  constexpr int V = Functor::VECTOR;
  if constexpr (C::SPLIT > 1) {
    ptx::barrier_cluster_wait();  // every block's inbox can take copies
    if (thread < C::SPLIT && thread != rank) {
      const int slot = rank < thread ? rank : rank - 1;  // in the inbox of block `thread`
      ptx::cp_async_bulk_to_cluster(ptx::mapa(inbox_at + slot * SLICE_BYTES, thread),
                                    ring + thread * SLICE_BYTES, SLICE_BYTES,
                                    ptx::mapa(inbox_full, thread));
    }
    __syncwarp();
    ptx::mbarrier_wait(inbox_full, 0);
    ptx::barrier_cluster_arrive_relaxed();  // what the peers sent has left them
    tile.run(row_values, [&](int r, int c) {
      Vec<float, V> sum = map<V>([](int) { return 0.0f; });
#pragma unroll
      for (int peer = 0; peer < C::SPLIT; ++peer) {  // always in this order: the same bits
        const int slot = peer < rank ? peer : peer - 1;
        const float* from = peer == rank ? staged + r * C::STAGE_LD
                                         : inbox + (slot * SLICE + r - rank * SLICE) * C::STAGE_LD;
        const Vec<float, V> part = load<V>(from + c);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += part[i];
      }
      return sum;
    });
  } else {
    tile.run(row_values, [&](int r, int c) { return load<V>(staged + r * C::STAGE_LD + c); });
    if constexpr (C::MULTICAST > 1) ptx::barrier_cluster_arrive_relaxed();
  }
  // Nobody leaves while a peer takes its tile or counts on its barriers.
  if constexpr (CLUSTER) ptx::barrier_cluster_wait();
}
#endif

}  // namespace gtco
