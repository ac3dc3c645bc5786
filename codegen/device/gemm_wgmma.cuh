// D[rows, columns] = A[rows, K] B[columns, K]^T on wgmma, fed by TMA through a ring of mbarriers
// (one consumer warpgroup per 64 rows of P; one more whose first warp produces, while its others
// gather the row values).
//
// wgmma's M side is called P and its N side Q. With SWAP, P are the columns (output channels) and Q
// the rows (tokens), so that 197 rows waste little of the tile. A cluster is one of two things:
// MULTICAST blocks that are neighbours along P and bring each other's Q tiles, or CLUSTER_Q
// neighbours along Q of SPLIT blocks each. Those SPLIT share a tile's K range and send each other
// their partial sums of the parts that each finishes: beside the ring, or over it once all of them
// are done with theirs. The neighbours exchange nothing: they read the same tiles of P from one
// place of the chip, which asks the rest of it for them once.
//
// With Windows, a row of A is a window of an image (windows.cuh), which the copy engine gathers, or
// lies in pieces, each with a map of its own: `more` are those behind the first.
//
// The epilogue works on the accumulators where wgmma leaves them, so that only partial sums and
// statistics go through shared memory. Where columns are P, the copy engine brings their rows of
// weights in an order in which a thread has two columns side by side (WIDTH 2); where they are Q,
// in one in which it has four or eight (as of gemm_persistent).
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
#include "promotion.cuh"
#include "ring.cuh"
#include "wgmma_exact.cuh"
#include "wgmma_sides.cuh"
#include "windows.cuh"

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

// Config: Element, ROWS, COLUMNS, K, SWAP, BLOCK_P, BLOCK_Q, STAGES, SPLIT, MULTICAST, CLUSTER_Q,
// P_CONSTANT, Q_CONSTANT, ATOMS (of 128 bytes of K a stage), DEPTH (1: a stage's products are
// issued before the last one's are awaited), WIDTH (columns side by side that a thread has: 1, 2,
// 4 or 8), REGISTERS (a thread's), ROW_VALUES_AT, STATS_AT, INBOX_AT and BARRIERS_AT (bytes), and
// EXACT where products of floats are as good as fp32's, BY_ROWS where Q lies in rows of K and
// P_BY_ROWS where P does, SHARED where all products of the batch have one A.
template <class C, class Windows = PlainRows, class Functor>
__device__ __forceinline__ void gemm_wgmma(const ptx::TensorMap& p_map, const ptx::TensorMap& q_map,
                                           const Functor& functor,
                                           const MoreMaps<pieces_of<Windows> - 1>& more = {}) {
  constexpr bool GATHERS = !is_same<Windows, PlainRows>;
  using Element = typename C::Element;
  constexpr int ATOM_K = 128 / sizeof(Element);  // one 128-byte swizzle row
  constexpr int BLOCK_K = C::ATOMS * ATOM_K;
  constexpr int K_STEP = 32;  // bytes of K that one wgmma takes
  constexpr int P_BYTES = C::BLOCK_P * 128, Q_BYTES = C::BLOCK_Q * 128;  // of an atom
  constexpr int STAGE_BYTES = C::ATOMS * (P_BYTES + Q_BYTES);
  constexpr int CONSUMERS = C::BLOCK_P / 64;
  constexpr int THREADS = CONSUMERS * 128;
  static_assert(C::BLOCK_P % 64 == 0, "a consumer warpgroup computes 64 rows of P");
  static_assert(C::SPLIT * C::CLUSTER_Q == 1 || C::MULTICAST == 1, "shares Q, and nothing else");
  constexpr bool INBOX_OVER_RING = C::SPLIT > 1 && C::INBOX_AT < C::ROW_VALUES_AT;
  constexpr bool MEETS_EARLY = (C::SPLIT > 1 && !INBOX_OVER_RING) || C::MULTICAST > 1;
  static_assert(C::BLOCK_Q % 8 == 0 && C::BLOCK_Q <= 256, "wgmma's N is a multiple of 8 up to 256");
  constexpr int ALL_STEPS = steps_of_k<Windows, ATOM_K, C::ATOMS>(C::K);
  using Q = NSide<Element, C::BLOCK_Q, is_by_rows<C>>;
  static_assert(!is_by_rows<C> || C::MULTICAST == 1, "a copy of rows of K goes to one block");
  static_assert(!is_p_by_rows<C> || is_exact<C>, "only registers turn rows of K");
  constexpr int SPLIT_STEPS = ceil_div(ALL_STEPS, C::SPLIT);
  constexpr bool PROMOTED = is_promoted<Element, C::ATOMS>(SPLIT_STEPS);
  constexpr bool APART = PROMOTED || !is_same<sum_t<Element>, float>;
  constexpr int TILE_ROWS = C::SWAP ? C::BLOCK_Q : C::BLOCK_P;
  constexpr int TILE_COLUMNS = C::SWAP ? C::BLOCK_P : C::BLOCK_Q;
  // The epilogue is done in parts of Q, of which a block finishes MOST or one less.
  constexpr int PART = C::SWAP ? 8 : Functor::ROW_STATS ? STATS_CHUNK : 4 * C::WIDTH;
  constexpr int PARTS = C::BLOCK_Q / PART, MOST = ceil_div(PARTS, C::SPLIT);
  constexpr int PART_BYTES = PART / 2 * THREADS * 4;  // of accumulators
  // No column that a block works on lies beyond the last.
  constexpr bool INSIDE = C::COLUMNS % TILE_COLUMNS == 0 && (C::SWAP || PARTS % C::SPLIT == 0);
  static_assert(C::BLOCK_Q % PART == 0, "parts are whole");
  static_assert(!C::SWAP || C::WIDTH == 1 || (C::WIDTH == 2 && C::COLUMNS % 16 == 0), "pairs");
  static_assert(C::SWAP || C::WIDTH == 2 || C::MULTICAST == 1, "a copy that reorders goes to one");
  constexpr int PITCH = C::BLOCK_P / 8;  // moments of a row: two for every 16 columns

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 ring = ptx::shared_address(smem);  // (STAGES, ATOMS x P_BYTES and ATOMS x Q_BYTES)
  const u32 full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 empty = full + 8 * C::STAGES;
  // (SPLIT - 1, MOST, PART / 8, THREADS, 4)
  float* inbox = reinterpret_cast<float*>(smem + C::INBOX_AT);
  const u32 inbox_at = ptx::shared_address(inbox), inbox_full = empty + 8 * C::STAGES;
  float* moments = reinterpret_cast<float*>(smem + C::STATS_AT);  // (MOST x 8, PITCH)
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);

  const int thread = threadIdx.x, warp = ptx::uniform(thread / 32), lane = thread % 32;
  const auto block = in_order<C::SPLIT * C::MULTICAST * C::CLUSTER_Q>(blockIdx.x, gridDim.x);
  const int rank = block % (C::SPLIT * C::MULTICAST);  // of those that share a tile
  const int neighbour = C::CLUSTER_Q > 1 ? block / C::SPLIT % C::CLUSTER_Q : 0;
  const int p0 = block / (C::SPLIT * C::CLUSTER_Q) * C::BLOCK_P;
  const int q0 =
      in_order(blockIdx.y, gridDim.y) * (C::CLUSTER_Q * C::BLOCK_Q) + neighbour * C::BLOCK_Q;
  const int batch = in_order(blockIdx.z, gridDim.z);
  const int batch_of_a = IsShared<C>::value ? 0 : batch;
  const int p_batch = C::SWAP ? batch : batch_of_a, q_batch = C::SWAP ? batch_of_a : batch;
  constexpr bool GROUPED = IsGrouped<C>::value;
  const int top = GROUPED ? 0 : batch * C::ROWS, left = GROUPED ? batch * C::COLUMNS : 0;
  const int first = C::SPLIT > 1 ? rank * SPLIT_STEPS : 0;
  // Even parts have a constant here: ptxas 13.0 takes this minimum for smaller where it is equal.
  const int steps = SPLIT_STEPS * C::SPLIT == ALL_STEPS
                        ? SPLIT_STEPS
                        : max_of(0, min_of(SPLIT_STEPS, ALL_STEPS - first));
  const int row0 = C::SWAP ? q0 : p0, col0 = C::SWAP ? p0 : q0;
  const auto first_part = [](int of) { return of * PARTS / C::SPLIT; };
  const int part0 = C::SPLIT > 1 ? first_part(rank) : 0;  // the first that this block finishes
  const int parts = C::SPLIT > 1 ? first_part(rank + 1) - part0 : PARTS;

  if (thread == 0) {
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, CONSUMERS * 4 * C::MULTICAST);
    }
    if constexpr (C::SPLIT > 1) ptx::mbarrier_init(inbox_full, 1);
    if constexpr (is_exact<C>) ptx::mbarrier_init(inbox_full + 8, CONSUMERS * 4);
    ptx::fence_mbarrier_init();
    if constexpr (C::SPLIT > 1)
      ptx::mbarrier_arrive_expect_tx(inbox_full, (C::SPLIT - 1) * parts * PART_BYTES);
  }
  // A peer's copies count on this block's barriers: multicast at once, partial sums at the end.
  if constexpr (MEETS_EARLY) ptx::barrier_cluster_arrive_relaxed();
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
    if constexpr (is_exact<C>) {
      multiply_exactly<C>(acc, smem, full, inbox_full + 8, steps, thread, release);
      return;
    }
    sum_t<Element> of_interval[C::BLOCK_Q / 2] = {};  // where sums are promoted or integers
    auto& sums = sums_of<APART>(of_interval, acc);
    RingPlace<C::STAGES> from{0, 0};
    int last = 0;  // slot
#pragma unroll 1
    for (int begin = 0, end; begin < steps; begin = end) {
      end = PROMOTED ? min_of(begin + PROMOTED_STEPS<C::ATOMS>, steps) : steps;
#pragma unroll 1
      for (int step = begin; step < end; ++step, from.advance()) {
        const int s = from.slot;
        ptx::mbarrier_wait(full + 8 * s, from.phase);
        const u32 p_tile = ring + s * STAGE_BYTES + group * 64 * 128;    // (ATOMS, 64, ATOM_K)
        const u32 q_tile = ring + s * STAGE_BYTES + C::ATOMS * P_BYTES;  // (ATOMS, BLOCK_Q, ATOM_K)
        ptx::wgmma_fence();
#pragma unroll
        for (int atom = 0; atom < C::ATOMS; ++atom)
#pragma unroll
          for (int k = 0; k < 128; k += K_STEP)
            Q::mma(sums, ptx::wgmma_descriptor(p_tile, atom * P_BYTES + k), q_tile, atom, k,
                   !PROMOTED || atom + k > 0 || step > begin);
        ptx::wgmma_commit_group();
        // At depth 0 the slot goes back before the next is awaited; at depth 1 the tensor cores
        // never wait for this warpgroup's turn, and each slot is held for a step longer.
        if constexpr (C::DEPTH == 0) {
          ptx::wgmma_wait_group<0>(sums);
          release(s);
        } else {
          ptx::wgmma_wait_group<1>();
          if (step > begin) release(last);
          last = s;
        }
      }
      if constexpr (APART) {
        if constexpr (C::DEPTH > 0) {
          ptx::wgmma_wait_group<0>(of_interval);
          if (end < steps || C::MULTICAST > 1) release(last);
        }
#pragma unroll
        for (int i = 0; i < C::BLOCK_Q / 2; ++i) acc[i] += static_cast<float>(of_interval[i]);
      }
    }
    if constexpr (C::DEPTH > 0) ptx::wgmma_wait_group<0>(acc);
    // Peers' producers wait for it before they leave.
    if constexpr (C::MULTICAST > 1 && C::DEPTH > 0 && !APART) release(last);
  };
  // What this warp does of the part at slot `i` of those that this block finishes.
  const auto epilogue = [&](int i) {
    const int p = group * 64 + warp % 4 * 16, q = (part0 + i) * PART;
    const int row_end = top + C::ROWS, column_end = left + C::COLUMNS;
    if constexpr (C::SWAP) {
      return TransposedEpilogue<C::WIDTH, INSIDE, Functor>(functor, top + row0 + q, left + col0 + p,
                                                           row_end, column_end);
    } else {
      return FragmentEpilogue<C::WIDTH, PART, INSIDE, Functor>(
          functor, RowRange{top + row0 + p, row_end}, left + col0 + q, column_end);
    }
  };
  // Where columns are P, the inputs of all parts are the same unless they differ by rows.
  constexpr int FETCHES = C::SWAP && !Functor::INPUTS_BY_ROW ? 1 : MOST;
  using Fetched = typename decltype(epilogue(0))::Fetched;
  constexpr int SUMS = PROMOTED ? C::BLOCK_Q : C::BLOCK_Q / 2;
  constexpr int LOOP = is_exact<C> ? C::BLOCK_Q * 3 / 2 + 84 : SUMS + 48;
  constexpr int FREE = C::REGISTERS - LOOP;  // registers beside the loop's
  // Parts whose inputs are on their way ahead of their turn, the first ahead of the products: as
  // many as registers are left for. Loads do not pass the stores of the parts before.
  constexpr int AHEAD =
      min_of(FETCHES, max_of(0, min_of(64, FREE)) * 4 / static_cast<int>(sizeof(Fetched)));
  Fetched fetched[max_of(1, AHEAD)];

  if (warp >= CONSUMERS * 4) {
    if (warp > CONSUMERS * 4) {
      ptx::griddepcontrol_wait();
      constexpr int ROWS = C::SWAP ? MOST * PART : TILE_ROWS;  // that this block finishes
      const int row = C::SWAP ? part0 * PART : 0;
      fill_row_values<ROWS, 96>(functor, row_values + row, thread - THREADS - 32, top + row0 + row,
                                top + C::ROWS);
    } else if (lane == 0) {  // the producer
      const CopyOfWindows<Windows, ATOM_K> windows(C::SWAP ? q0 : p0, GROUPED ? batch : 0);
      const auto k_of = [&](int step, int atom) {
        if constexpr (GATHERS) {
          return windows.k((first + step) * C::ATOMS + atom);
        } else {
          return (first + step) * BLOCK_K + atom * ATOM_K;
        }
      };
      const auto copy_p = [&](int s, int step) {
#pragma unroll
        for (int atom = 0; atom < C::ATOMS; ++atom) {
          const u32 to = ring + s * STAGE_BYTES + atom * P_BYTES;
          const int k = k_of(step, atom);
          if constexpr (GATHERS && !C::SWAP) {
            windows.copy(to, p_map, more, (first + step) * C::ATOMS + atom, full + 8 * s);
          } else if constexpr (is_p_by_rows<C>) {
            copy_rows_of_k<Element, C::BLOCK_P>(to, p_map, k, p0, p_batch, full + 8 * s);
          } else if constexpr (C::SWAP && C::WIDTH == 2) {
            ptx::cp_async_bulk_tensor(to, p_map, k, 0, 0, p0 / 16, p_batch, full + 8 * s);
          } else {
            ptx::cp_async_bulk_tensor(to, p_map, k, p0, p_batch, full + 8 * s);
          }
        }
      };
      const auto copy_q = [&](int s, int step) {
        if (C::MULTICAST > 1 && step % C::MULTICAST != rank) return;  // blocks take turns
#pragma unroll
        for (int atom = 0; atom < C::ATOMS; ++atom) {
          const u32 to = ring + s * STAGE_BYTES + C::ATOMS * P_BYTES + atom * Q_BYTES;
          const int k = k_of(step, atom);
          if constexpr (GATHERS && C::SWAP) {
            windows.template copy<C::MULTICAST>(to, q_map, more, (first + step) * C::ATOMS + atom,
                                                full + 8 * s);
          } else if constexpr (C::MULTICAST > 1) {
            ptx::cp_async_bulk_tensor_multicast(to, q_map, k, q0, q_batch, full + 8 * s,
                                                (1 << C::MULTICAST) - 1);
          } else if constexpr (!C::SWAP && C::WIDTH > 2) {
            ptx::cp_async_bulk_tensor(to, q_map, k, 0, 0, 0, q0 / (4 * C::WIDTH), full + 8 * s);
          } else {
            Q::copy(to, q_map, k, q0, q_batch, full + 8 * s);
          }
        }
      };
      ptx::prefetch_tensormap(p_map);
      ptx::prefetch_tensormap(q_map);
      const int ahead = min_of(C::STAGES, steps);
      for (int step = 0; step < ahead; ++step) {
        ptx::mbarrier_arrive_expect_tx(full + 8 * step, STAGE_BYTES);
        // Weights need not wait for the kernel before.
        if constexpr (C::P_CONSTANT) copy_p(step, step);
        if constexpr (C::Q_CONSTANT) copy_q(step, step);
      }
      ptx::griddepcontrol_wait();
      for (int step = 0; step < ahead; ++step) {
        if constexpr (!C::P_CONSTANT) copy_p(step, step);
        if constexpr (!C::Q_CONSTANT) copy_q(step, step);
      }
      RingPlace<C::STAGES> to{0, 0};
#pragma unroll 1
      for (int step = C::STAGES; step < steps; ++step, to.advance()) {
        ptx::mbarrier_wait(empty + 8 * to.slot, to.phase);
        ptx::mbarrier_arrive_expect_tx(full + 8 * to.slot, STAGE_BYTES);
        copy_p(to.slot, step);
        copy_q(to.slot, step);
      }
      if constexpr (LATE_TRIGGER) ptx::griddepcontrol_launch_dependents();
      // A block stays until every peer has given back its last slots: an arrival on a barrier of a
      // block that has ended is a fault, and a relaxed meeting of the cluster orders none.
      if constexpr (C::MULTICAST > 1) {
#pragma unroll 1
        for (int i = 0; i < ahead; ++i, to.advance())
          ptx::mbarrier_wait(empty + 8 * to.slot, to.phase);
      }
    } else {
      ptx::griddepcontrol_wait();
    }
    __syncwarp();
  } else {
    ptx::griddepcontrol_wait();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetched[i] = epilogue(i).fetch();
    consume();
  }
  if constexpr (!LATE_TRIGGER) ptx::griddepcontrol_launch_dependents();

  if constexpr (Functor::ROW_VALUES > 0) __syncthreads();        // they are there
  if constexpr (INBOX_OVER_RING) ptx::barrier_cluster_arrive();  // done with its ring
  if constexpr (C::SPLIT > 1) ptx::barrier_cluster_wait();       // every block's inbox takes sums
  constexpr bool MOMENTS = Functor::ROW_STATS && C::SWAP;
  Moments pairs[MOMENTS ? MOST : 1][2] = {};  // of the thread's two columns, for each of its rows
  float* stats = nullptr;
  if (warp < CONSUMERS * 4) {
    const auto finish = [&](int i, const float* sums) {
      Fetched& next = fetched[i % max_of(1, AHEAD)];
      const Fetched inputs = AHEAD > 0 ? next : epilogue(i).fetch();
      if (AHEAD > 0 && FETCHES > 1 && i + AHEAD < MOST) next = epilogue(i + AHEAD).fetch();
      if constexpr (C::SWAP) {
        epilogue(i).run(row_values + (part0 + i) * PART, inputs, sums, pairs[MOMENTS ? i : 0],
                        stats);
      } else {
        epilogue(i).run(row_values + group * 64 + warp % 4 * 16, inputs, sums);
      }
    };
    if constexpr (C::SPLIT > 1) {
      constexpr int FOURS = PART / 8;  // of a thread's accumulators of a part
      float mine[MOST * PART / 2] = {};
#pragma unroll
      for (int owner = 0; owner < C::SPLIT; ++owner) {
        const int slot = rank < owner ? rank : rank - 1;  // in the inbox of block `owner`
        const int peer = neighbour * C::SPLIT + owner;    // in the cluster
        const u32 to = ptx::mapa(inbox_at + (slot * MOST * FOURS * THREADS + thread) * 16, peer);
        const u32 counts = ptx::mapa(inbox_full, peer);
#pragma unroll
        for (int i = 0; i < (first_part(owner + 1) - first_part(owner)) * FOURS; ++i) {
          const float* from = acc + first_part(owner) * PART / 2 + i * 4;
          if (owner == rank) {
#pragma unroll
            for (int j = 0; j < 4; ++j) mine[i * 4 + j] = from[j];
          } else {
            ptx::st_async(to + i * THREADS * 16, {from[0], from[1], from[2], from[3]}, counts);
          }
        }
      }
      ptx::mbarrier_wait(inbox_full, 0);
#pragma unroll
      for (int i = 0; i < MOST; ++i) {
        if (PARTS % C::SPLIT != 0 && i + 1 == MOST && i >= parts) break;  // a block with one less
        float* const sums = mine + i * PART / 2;
#pragma unroll
        for (int slot = 0; slot < C::SPLIT - 1; ++slot)  // always in this order: the same bits
#pragma unroll
          for (int j = 0; j < FOURS; ++j) {
            const int at = (slot * MOST + i) * FOURS + j;
            const Vec<float, 4> part = load<4>(inbox + (at * THREADS + thread) * 4);
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[j * 4 + k] += part[k];
          }
        finish(i, sums);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PARTS; ++i) finish(i, acc + i * PART / 2);
    }
  }
  if constexpr (MOMENTS) {  // over the lanes of a warp, then over the warps that share a chunk
    const int col = col0 + group * 64;
    if (warp < CONSUMERS * 4)
      merge_lanes<C::COLUMNS>(reinterpret_cast<const Moments(&)[MOST * 2]>(pairs),
                              col + warp % 4 * 16, [&](int i, const Moments& of) {
                                const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
                                store<2>(moments + row * PITCH + warp * 2,
                                         Vec<float, 2>{{of.mean, of.m2}});
                              });
    __syncthreads();  // of all warps
    if (warp < CONSUMERS * 4) {
#pragma unroll 1
      for (int i = thread % 128; i < parts * 8; i += 128)
        if (row0 + part0 * 8 + i < C::ROWS && col < C::COLUMNS)
          merge_chunk<C::COLUMNS>(moments + i * PITCH + group * 8, stats,
                                  top + row0 + part0 * 8 + i, col);
    }
  }
}
#endif

}  // namespace gtco
