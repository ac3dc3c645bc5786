// Two products back to back, Y = first(A B^T) and Z = second(Y D^T), on wgmma (CUTLASS's B2B GEMM):
// a row of Y is as long as K of the second product, and never comes back from memory.
//
// Blocks stay and walk over tiles of 128 rows, 64 of each of two warpgroups. These make 64 columns
// of Y at a time from all of A's K, and multiply them at once, from the registers in which the
// first product leaves them, by the second's weights, whose sums they keep. One warp fills a ring
// with the weights of both, part by part of Y's columns, and the tiles of A.
//
// An image that the first epilogue reads at every row and column, such as a residual, is copied
// ahead in squares of 64 x 64, by a warp for each warpgroup. Where Y is stored, it goes to memory
// through such a square: a lane of the product has two columns, and one that stores has eight.
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// 64 x 64 elements of 16 bits: rows of 128 bytes, swizzled as the copy engine does it, so that
// neither eight lanes of two columns of eight rows nor of eight of one meet a bank twice.
template <class T>
struct Square {
  static constexpr int SIDE = 64, BYTES = SIDE * SIDE * 2;
  static_assert(sizeof(T) == 2, "rows of 128 bytes");
  unsigned char* base;
  int row0, col0;  // of its first element

  __device__ __forceinline__ T* at(int row, int col) const {
    const int r = row - row0, c = col - col0;
    return reinterpret_cast<T*>(base + r * 128 + (c / 8 ^ r % 8) * 16) + c % 8;
  }
  template <int V>
  __device__ __forceinline__ Packed<T, V> load(int row, int col) const {
    static_assert(8 % V == 0, "within a chunk");
    return load_packed<V>(at(row, col));
  }
};

struct NoImage {};    // the first epilogue reads none
struct NotStored {};  // nobody else reads Y

// Config: Element, ROWS, K (of A), MIDDLE (columns of Y), COLUMNS, BLOCK_N (COLUMNS, padded),
// A_TILES (1 or 2), STAGES, SQUARES (of a warpgroup), WIDTH (of the second epilogue's lanes, 2, 4
// or 8), BLOCKS, RING_AT, SQUARES_AT, ROW_VALUES_AT and BARRIERS_AT (bytes). 384 threads. `first`
// returns Y, `store` stores it; Image is a tensor map of squares, if there is one.
template <class C, class First, class Store, class Second, class Image = NoImage>
__device__ __forceinline__ void gemm_back_to_back(const ptx::TensorMap& a_map,
                                                  const ptx::TensorMap& b_map,
                                                  const ptx::TensorMap& d_map, const First& first,
                                                  const Store& store, const Second& second,
                                                  const Image& image = {}) {
  using Element = typename C::Element;
  static_assert(sizeof(Element) == 2, "registers of the first product are operands of the second");
  constexpr int ATOM_K = 64, PART = 64;  // columns of 128 bytes
  constexpr int GROUPS = 2, GROUP_M = 64, BLOCK_M = GROUPS * GROUP_M;
  constexpr int ATOMS = ceil_div(C::K, ATOM_K), PARTS = ceil_div(C::MIDDLE, PART);
  constexpr int TILES = ceil_div(C::ROWS, BLOCK_M);
  constexpr int A_ATOM = BLOCK_M * 128, A_BYTES = ATOMS * A_ATOM;
  constexpr int B_ATOM = PART * 128, B_BYTES = ATOMS * B_ATOM, D_BYTES = C::BLOCK_N * 128;
  constexpr int STAGE_BYTES = B_BYTES + D_BYTES;
  constexpr bool COPIED = !is_same<Image, NoImage>, STORES = !is_same<Store, NotStored>;
  constexpr int PRODUCER = GROUPS * 4, GATHERER = PRODUCER + 1 + GROUPS;  // warps
  constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
  static_assert(Second::ROW_VALUES == 0, "no row of Z is prepared for");
  static_assert(C::WIDTH == 2 || C::COLUMNS % (4 * C::WIDTH) == 0, "parts of D are whole");

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 a_tiles = ptx::shared_address(smem);  // (A_TILES, ATOMS, BLOCK_M, ATOM_K)
  const u32 ring = a_tiles + C::RING_AT;  // (STAGES, (ATOMS, PART, ATOM_K) and (BLOCK_N, PART))
  const u32 a_full = ptx::shared_address(smem + C::BARRIERS_AT), a_empty = a_full + 8 * C::A_TILES;
  const u32 b_full = a_empty + 8 * C::A_TILES, b_empty = b_full + 8 * C::STAGES;
  const u32 d_full = b_empty + 8 * C::STAGES, d_empty = d_full + 8 * C::STAGES;
  const u32 rows_full = d_empty + 8 * C::STAGES, rows_empty = rows_full + 16;
  const u32 square_full = rows_empty + 16, square_empty = square_full + 8 * GROUPS * C::SQUARES;
  unsigned char* squares = smem + C::SQUARES_AT;  // (GROUPS, SQUARES)
  auto* row_values =                              // (2, BLOCK_M)
      reinterpret_cast<typename First::Row*>(smem + C::ROW_VALUES_AT);

  const int warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const auto first_row = [](auto tile) {
    return in_order<1, decltype(tile)>(tile, TILES) * BLOCK_M;
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::A_TILES; ++i) {
      ptx::mbarrier_init(a_full + 8 * i, 1);
      ptx::mbarrier_init(a_empty + 8 * i, GROUPS * 4);
    }
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbarrier_init(b_full + 8 * s, 1);
      ptx::mbarrier_init(b_empty + 8 * s, GROUPS * 4);
      ptx::mbarrier_init(d_full + 8 * s, 1);
      ptx::mbarrier_init(d_empty + 8 * s, GROUPS * 4);
    }
    for (int i = 0; i < 2; ++i) {
      // All lanes, whose own stores and loads racecheck would not find in a warp's one arrival.
      ptx::mbarrier_init(rows_full + 8 * i, 32);
      ptx::mbarrier_init(rows_empty + 8 * i, GROUPS * 128);
    }
    if constexpr (COPIED) {
      for (int i = 0; i < GROUPS * C::SQUARES; ++i) {
        ptx::mbarrier_init(square_full + 8 * i, 1);
        ptx::mbarrier_init(square_empty + 8 * i, 4);
      }
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp >= PRODUCER) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp > PRODUCER) {
      ptx::griddepcontrol_wait();
      if (warp < GATHERER) {
        if constexpr (COPIED) {
          if (lane > 0) return;
          const int group = warp - PRODUCER - 1;
          RingPlace<C::SQUARES> to{0, 0};
#pragma unroll 1
          for (int tile = blockIdx.x; tile < TILES; tile += C::BLOCKS) {
#pragma unroll 1
            for (int part = 0; part < PARTS; ++part, to.advance()) {
              const int slot = group * C::SQUARES + to.slot;
              ptx::mbarrier_wait(square_empty + 8 * slot, to.phase ^ 1);
              ptx::mbarrier_arrive_expect_tx(square_full + 8 * slot, Square<Element>::BYTES);
              ptx::cp_async_bulk_tensor(
                  ptx::shared_address(squares + slot * Square<Element>::BYTES), image, part * PART,
                  first_row(tile) + group * GROUP_M, 0, square_full + 8 * slot);
            }
          }
        }
        return;
      }
      if constexpr (First::ROW_VALUES > 0) {
#pragma unroll 1
        for (int round = 0; blockIdx.x + round * C::BLOCKS < TILES; ++round) {
          const int row0 = first_row(blockIdx.x + round * C::BLOCKS);
          ptx::mbarrier_wait(rows_empty + 8 * (round % 2), round / 2 % 2 ^ 1);
#pragma unroll 1
          for (int r = lane; r < BLOCK_M; r += 32)
            if (row0 + r < C::ROWS)
              row_values[round % 2 * BLOCK_M + r] = first.template row_values<4>(row0 + r, true);
          ptx::mbarrier_arrive(rows_full + 8 * (round % 2));
        }
      }
      return;
    }
    const auto copy_weights = [&](int s, int part) {
      const u32 to = ring + s * STAGE_BYTES;
      ptx::mbarrier_arrive_expect_tx(b_full + 8 * s, B_BYTES);
#pragma unroll
      for (int atom = 0; atom < ATOMS; ++atom)
        ptx::cp_async_bulk_tensor(to + atom * B_ATOM, b_map, atom * ATOM_K, part * PART, 0,
                                  b_full + 8 * s);
    };
    const auto copy_more_weights = [&](int s, int part) {
      const u32 to = ring + s * STAGE_BYTES + B_BYTES;
      ptx::mbarrier_arrive_expect_tx(d_full + 8 * s, D_BYTES);
      if constexpr (C::WIDTH > 2) {
        ptx::cp_async_bulk_tensor(to, d_map, part * PART, 0, 0, 0, 0, d_full + 8 * s);
      } else {
        ptx::cp_async_bulk_tensor(to, d_map, part * PART, 0, 0, d_full + 8 * s);
      }
    };
    RingPlace<C::A_TILES> to_a{0, 0};
    const auto copy_a = [&](int tile) {
      if (tile >= TILES) return;
      const int row0 = first_row(tile);
      ptx::mbarrier_wait(a_empty + 8 * to_a.slot, to_a.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(a_full + 8 * to_a.slot, A_BYTES);
#pragma unroll
      for (int atom = 0; atom < ATOMS; ++atom)
        ptx::cp_async_bulk_tensor(a_tiles + to_a.slot * A_BYTES + atom * A_ATOM, a_map,
                                  atom * ATOM_K, row0, 0, a_full + 8 * to_a.slot);
      to_a.advance();
    };
    // The first weights, which nothing in the launch chain writes, need not wait for the kernel
    // before.
    constexpr int AHEAD = min_of(C::STAGES, PARTS);
    if (lane == 0) {
      ptx::prefetch_tensormap(a_map);
#pragma unroll 1
      for (int part = 0; part < AHEAD; ++part) {
        copy_weights(part, part);
        copy_more_weights(part, part);
      }
    }
    __syncwarp();  // so that no lane's wait holds these copies up
    ptx::griddepcontrol_wait();
    if (lane > 0) return;
    copy_a(blockIdx.x);
    RingPlace<C::STAGES> to{AHEAD % C::STAGES, AHEAD == C::STAGES};
    int begin = AHEAD;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < TILES; tile += C::BLOCKS) {
      if constexpr (C::A_TILES == 2) copy_a(tile + C::BLOCKS);
#pragma unroll 1
      for (int part = begin; part < PARTS; ++part, to.advance()) {
        ptx::mbarrier_wait(b_empty + 8 * to.slot, to.phase ^ 1);
        copy_weights(to.slot, part);
        ptx::mbarrier_wait(d_empty + 8 * to.slot, to.phase ^ 1);
        copy_more_weights(to.slot, part);
      }
      begin = 0;
      if constexpr (C::A_TILES == 1) copy_a(tile + C::BLOCKS);
    }
    ptx::griddepcontrol_launch_dependents();
    return;
  }

  ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
  ptx::griddepcontrol_wait();
  const int group = warp / 4, in_group = warp % 4 * 16, in_tile = group * GROUP_M + in_group;
  const auto release = [&](u32 barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  constexpr int INPUT_ROWS = First::INPUTS_BY_ROW ? 2 : 1;
  using Inputs = typename First::template Inputs<2>;
  RingPlace<C::STAGES> from{0, 0};
  RingPlace<C::A_TILES> from_a{0, 0};
  RingPlace<max_of(1, C::SQUARES)> square{0, 0};
#pragma unroll 1
  for (int round = 0; blockIdx.x + round * C::BLOCKS < TILES; ++round, from_a.advance()) {
    const int tile_row = first_row(blockIdx.x + round * C::BLOCKS);
    const int row0 = tile_row + in_tile, row = row0 + lane / 4;  // the warp's, the lane's first
    const u32 a_tile = a_tiles + from_a.slot * A_BYTES + group * GROUP_M * 128;
    const auto* rows = row_values + round % 2 * BLOCK_M + in_tile + lane / 4;
    float sums[C::BLOCK_N / 2];
    u32 operand[4][4];  // a product reads it until it is waited for, behind the last part too
    ptx::mbarrier_wait(a_full + 8 * from_a.slot, from_a.phase);
    if constexpr (First::ROW_VALUES > 0)
      ptx::mbarrier_wait(rows_full + 8 * (round % 2), round / 2 % 2);
    int last = 0;  // slot of the weights that are multiplied
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part, from.advance()) {
      const int col = part * PART + lane % 4 * 2;
      const auto has_column = [&](int i) {
        return C::MIDDLE % PART == 0 || col + 8 * i < C::MIDDLE;
      };
      const auto active = [&](int half, int i) {
        return row + 8 * half < C::ROWS && has_column(i);
      };
      Inputs inputs[INPUT_ROWS][8];
#pragma unroll
      for (int half = 0; half < INPUT_ROWS; ++half)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          // For a row that is not, those of the last: a load that waits for no condition.
          inputs[half][i] = first.template inputs<2>(min_of(row + 8 * half, C::ROWS - 1),
                                                     col + 8 * i, has_column(i));
      const u32 b_part = ring + from.slot * STAGE_BYTES, d_part = b_part + B_BYTES;
      float y[PART / 2];
      ptx::mbarrier_wait(b_full + 8 * from.slot, from.phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int atom = 0; atom < ATOMS; ++atom)
#pragma unroll
        for (int k = 0; k < 128; k += 32)
          ptx::Wgmma<Element, PART>::mma(y, ptx::wgmma_descriptor(a_tile, atom * A_ATOM + k),
                                         ptx::wgmma_descriptor(b_part, atom * B_ATOM + k),
                                         atom + k > 0);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>(y);
      release(b_empty + 8 * from.slot);
      if (part > 0) release(d_empty + 8 * last);
      if (part == PARTS - 1) release(a_empty + 8 * from_a.slot);
      last = from.slot;

      const int slot = group * C::SQUARES + square.slot;
      const Square<Element> here{squares + slot * Square<Element>::BYTES,
                                 tile_row + group * GROUP_M, part * PART};
      if constexpr (COPIED) ptx::mbarrier_wait(square_full + 8 * slot, square.phase);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        typename First::Row values{};
        if constexpr (First::ROW_VALUES > 0) {
          if (row + 8 * half < C::ROWS) values = rows[8 * half];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int r = row + 8 * half, c = col + 8 * i;
          const bool on = active(half, i);
          const auto sum = map<2>([&](int j) { return y[i * 4 + half * 2 + j]; });
          const auto made = [&] {
            const Inputs& in = inputs[half % INPUT_ROWS][i];
            if constexpr (COPIED) {
              return first.template operator()<2>(r, c, values, on, in, sum, StatsOfLanes{}, here);
            } else {
              return first.template operator()<2>(r, c, values, on, in, sum);
            }
          }();
          // What is not there is multiplied by zeros, and must be finite.
          const u32 both = on ? ptx::cvt_pack<Element>(made[0], made[1]) : 0u;
          operand[i / 2][i % 2 * 2 + half] = both;
          if constexpr (STORES) *reinterpret_cast<u32*>(here.at(r, c)) = both;
        }
      }
      if constexpr (STORES) {
        __syncwarp();  // a warp has 16 rows of its own
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row0 + lane / 8 + 4 * i, c = part * PART + lane % 8 * 8;
          store.template operator()<8>(r, c, {}, r < C::ROWS && c < C::MIDDLE, {},
                                       unpack<8>(here.template load<8>(r, c)));
        }
      }
      if constexpr (COPIED && STORES) ptx::fence_proxy_async();  // before the next square comes
      if constexpr (COPIED || STORES) __syncwarp();              // all lanes have read
      if constexpr (COPIED) {
        release(square_empty + 8 * slot);
        square.advance();
      }

      ptx::mbarrier_wait(d_full + 8 * last, from.phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        ptx::WgmmaFromRegisters<Element, C::BLOCK_N, true>::mma(
            sums, operand[k], ptx::wgmma_descriptor(d_part, k * 32), part + k > 0);
      ptx::wgmma_commit_group();
    }
    if constexpr (First::ROW_VALUES > 0) ptx::mbarrier_arrive(rows_empty + 8 * (round % 2));

    constexpr int COLUMNS = Second::ROW_STATS ? STATS_CHUNK : 32;
    const auto part_at = [&](int part) {
      return FragmentEpilogue<C::WIDTH, COLUMNS, C::COLUMNS % C::BLOCK_N == 0, Second>(
          second, RowRange{row0, C::ROWS}, part * COLUMNS, C::COLUMNS);
    };
    auto next = part_at(0).fetch();
    ptx::wgmma_wait_group<0>(sums);
    release(d_empty + 8 * last);
#pragma unroll
    for (int part = 0; part < C::BLOCK_N / COLUMNS; ++part) {
      const auto now = next;
      if (part + 1 < C::BLOCK_N / COLUMNS) next = part_at(part + 1).fetch();
      part_at(part).run(nullptr, now, sums + part * COLUMNS / 2);
    }
  }
}
#endif

}  // namespace gtco
