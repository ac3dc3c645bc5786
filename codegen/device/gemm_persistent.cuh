// D[rows, columns] = A[rows, K] B[columns, K]^T on wgmma by blocks that stay: as many as there are
// multiprocessors, each of which walks over tiles of D. One warp fills a ring of mbarriers by TMA
// and runs on across tiles, so that the next tile's loads begin during an epilogue; the others of
// its warpgroup gather the row values, a tile ahead.
//
// Two consumer warpgroups take tiles in turn: while one multiplies, the other runs its epilogue.
// COOPERATIVE gives each of two or three a part of the rows of every tile instead: larger tiles
// draw less from L2, but nothing multiplies during an epilogue.
//
// The epilogue works on the accumulators where wgmma leaves them, so that it waits for no shared
// memory and no barrier. With WIDTH 8 or 4, the copy engine brings B's rows in an order in which so
// many columns side by side are one thread's: of 4 WIDTH rows, WIDTH t + 2 j + e comes as
// 8 j + 2 t + e.
//
// With LINES, a tile has all columns and a warp's rows go through shared memory into whole lines,
// in which lanes read and write them side by side: where columns are few or odd, a lane would store
// four or eight bytes of a row for itself.
//
// Where a tile has all columns and they find room, a block keeps B (KEPT_AT): tile by tile all
// multiprocessors would read the same few lines of L2 again.
//
// With Windows, a row of A is a window of an image (windows.cuh), which the copy engine gathers.
//
// With an Image, the epilogue reads it from shared memory (copied.cuh), where one more warp for
// each warpgroup that takes tiles in turn, or for all that share them, keeps parts of it ahead.
#pragma once

#include "copied.cuh"
#include "epilogue.cuh"
#include "order.cuh"
#include "promotion.cuh"
#include "ring.cuh"
#include "wgmma_sides.cuh"
#include "windows.cuh"

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
  tile = in_order(tile, C::BATCH * DOWN * ACROSS);
  const int batch = tile / (DOWN * ACROSS), in_batch = tile % (DOWN * ACROSS);
  const int group = in_batch / (C::GROUP * ACROSS), in_group = in_batch % (C::GROUP * ACROSS);
  const int height = LAST != 0 && group == DOWN / C::GROUP ? max_of(1, LAST) : C::GROUP;
  return {(group * C::GROUP + in_group % height) * C::BLOCK_M, in_group / height * C::BLOCK_N,
          batch};
}

// Keeps a ring of an image's parts filled, tile by tile of those whose epilogues read it.
template <class C, int PART, int TILES, class OfImage>
__device__ __forceinline__ void copy_image(const OfImage& image, int ring, u32 parts, u32 full,
                                           u32 empty) {
  using Part = CopiedPart<typename OfImage::T, C::BLOCK_M, PART>;
  RingPlace<OfImage::SLOTS> to{0, 0};
#pragma unroll 1
  for (int tile = blockIdx.x + ring * C::BLOCKS; tile < TILES; tile += OfImage::RINGS * C::BLOCKS) {
    const TilePlace at = tile_place<C>(tile);
#pragma unroll 1
    for (int col = 0; col < C::BLOCK_N; col += PART, to.advance()) {
      const int slot = ring * OfImage::SLOTS + to.slot;
      ptx::mbarrier_wait(empty + 8 * slot, to.phase ^ 1);
      Part::copy(parts + slot * Part::BYTES, *image.map, at.row0, at.col0 + col, full + 8 * slot);
    }
  }
}

// Columns of what a warp has in shared memory at a time: `static constexpr int LINES = 72;` in C.
template <class C, class = void>
struct LinesOf : Constant<int, 0> {};
template <class C>
struct LinesOf<C, decltype(static_cast<void>(C::LINES))> : Constant<int, C::LINES> {};

// Where B stays in shared memory: `static constexpr int KEPT_AT = 40960;` in C; -1 where it does
// not.
template <class C, class = void>
struct KeptAt : Constant<int, -1> {};
template <class C>
struct KeptAt<C, decltype(static_cast<void>(C::KEPT_AT))> : Constant<int, C::KEPT_AT> {};

// What a warp has in lines: 16 rows of floats, LD apart, so that fragments meet no bank twice.
template <int COLUMNS>
struct WarpLines {
  static_assert(COLUMNS % 8 == 0, "whole columns of fragments");
  static constexpr int LD = COLUMNS % 16 == 0 ? COLUMNS + 8 : COLUMNS;
  float* base;

  // Columns [0, COLUMNS) of an accumulator, as wgmma numbers them.
  __device__ __forceinline__ void put(const float* acc) const {
    float* const to = base + threadIdx.x % 32 / 4 * LD + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store<2>(to + half * 8 * LD + i * 8,
                 Vec<float, 2>{{acc[i * 4 + half * 2], acc[i * 4 + half * 2 + 1]}});
  }
  template <int V>
  __device__ __forceinline__ Vec<float, V> get(int r, int c) const {
    return load<V>(base + r * LD + c);
  }
};

// Config: Element, BATCH, ROWS, COLUMNS, K, BLOCK_M, BLOCK_N, CONSUMERS (warpgroups), COOPERATIVE,
// STAGES, A_CONSTANT, B_CONSTANT, ATOMS (of 128 bytes of K a stage), WIDTH (2, 4 or 8), GROUP,
// BLOCKS, ROW_VALUES_AT and BARRIERS_AT (bytes), and LINES, LINES_AT and KEPT_AT where it has them.
// 128 threads a consumer and 128 more.
template <class C, class Windows = PlainRows, class Functor, class OfImage = NoImage>
__device__ __forceinline__ void gemm_persistent(const ptx::TensorMap& a_map,
                                                const ptx::TensorMap& b_map, const Functor& functor,
                                                const MoreMaps<pieces_of<Windows> - 1>& more = {},
                                                const OfImage& image = {}) {
  constexpr bool GATHERS = !is_same<Windows, PlainRows>;
  using Element = typename C::Element;
  constexpr int ATOM_K = 128 / sizeof(Element);  // one 128-byte swizzle row
  constexpr int K_STEP = 32;                     // bytes of K that one wgmma takes
  constexpr int A_BYTES = C::BLOCK_M * 128, B_BYTES = C::BLOCK_N * 128;  // of an atom
  constexpr bool KEEPS_B = KeptAt<C>::value >= 0;
  constexpr int STAGE_BYTES = C::ATOMS * (A_BYTES + (KEEPS_B ? 0 : B_BYTES));
  constexpr int STEPS = steps_of_k<Windows, ATOM_K, C::ATOMS>(C::K);  // of a tile
  constexpr int TILES = C::BATCH * ceil_div(C::ROWS, C::BLOCK_M) * ceil_div(C::COLUMNS, C::BLOCK_N);
  // A warpgroup's rows.
  constexpr int GROUP_M = C::COOPERATIVE ? C::BLOCK_M / C::CONSUMERS : C::BLOCK_M;
  constexpr int PRODUCTS = GROUP_M / 64;
  static_assert(GROUP_M == 64 || GROUP_M == 128, "a warpgroup multiplies 64 or 128 rows");
  constexpr int PART = Functor::ROW_STATS ? STATS_CHUNK : 32;  // columns of the epilogue at a time
  constexpr bool PROMOTED = is_promoted<Element, C::ATOMS>(STEPS);
  constexpr bool APART = PROMOTED || !is_same<sum_t<Element>, float>;
  using B = NSide<Element, C::BLOCK_N, is_by_rows<C>>;
  static_assert(C::BLOCK_N % PART == 0, "parts are whole");
  constexpr int LINE = LinesOf<C>::value;
  constexpr bool LINES = LINE > 0;
  static_assert(!LINES || (C::WIDTH == 2 && OfImage::SLOTS == 0 && !Functor::ROW_STATS),
                "lines are made of columns as wgmma has them, and hold nothing else");
  static_assert(!LINES || (C::COLUMNS <= C::BLOCK_N && C::COLUMNS % max_of(1, LINE) == 0),
                "a tile has all columns, in whole lines");
  static_assert(C::WIDTH == 2 || C::WIDTH == 4 || C::WIDTH == 8, "as wgmma has columns, or wider");
  static_assert(C::WIDTH == 2 || (C::BATCH == 1 && C::COLUMNS % (4 * C::WIDTH) == 0),
                "what is reordered of B is whole");
  static_assert(C::BLOCKS <= TILES, "every block has a tile");
  static_assert(!KEEPS_B || (C::BATCH == 1 && C::COLUMNS <= C::BLOCK_N), "B is the same for all");
  static_assert(C::COOPERATIVE || C::CONSUMERS == 2, "two take tiles in turn");
  // Of 65536 a multiprocessor, that all threads begin with in even parts.
  constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = C::CONSUMERS == 2 ? 240 : 160;
  static_assert(PRODUCER_REGISTERS + C::CONSUMERS * CONSUMER_REGISTERS <=
                    (C::CONSUMERS + 1) * (512 / (C::CONSUMERS + 1) / 8 * 8),
                "what is given was taken");
  static_assert(!GATHERS || C::BATCH == 1, "windows are rows of one product");
  constexpr int PRODUCER = C::CONSUMERS * 4;                      // the warp
  constexpr int READERS = C::COOPERATIVE ? C::CONSUMERS * 4 : 4;  // warps that work on a tile
  constexpr bool COPIES = OfImage::SLOTS > 0;
  constexpr int RINGS = OfImage::RINGS;
  static_assert(!COPIES || RINGS == (C::COOPERATIVE ? 1 : 2), "whoever takes a tile has a ring");
  static_assert(!COPIES || C::BATCH == 1, "an image's rows are those of one product");
  constexpr int GATHERER = PRODUCER + 1 + RINGS;             // the first warp of row values
  constexpr int GATHERERS = 32 * (PRODUCER + 4 - GATHERER);  // threads

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 ring = ptx::shared_address(smem);  // (STAGES, ATOMS x A_BYTES and ATOMS x B_BYTES)
  const u32 kept = ring + KeptAt<C>::value;    // (STEPS, ATOMS x B_BYTES)
  const u32 full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 empty = full + 8 * C::STAGES;
  const u32 turn = empty + 8 * C::STAGES;                        // of each warpgroup
  const u32 rows_full = turn + 16, rows_empty = rows_full + 16;  // of every second tile
  const u32 begun = rows_empty + 16;  // the first tile's operands are asked for
  const u32 image_full = begun + 8, image_empty = image_full + 8 * RINGS * OfImage::SLOTS;
  const u32 kept_full = image_empty + 8 * RINGS * OfImage::SLOTS;
  auto* row_values =  // (2, BLOCK_M)
      reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);

  const int warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, READERS);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(turn + 8 * i, 4);
      // All lanes, whose own stores and loads racecheck would not find in a warp's one arrival.
      ptx::mbarrier_init(rows_full + 8 * i, GATHERERS);
      ptx::mbarrier_init(rows_empty + 8 * i, READERS * 32);
    }
    if constexpr (COPIES) ptx::mbarrier_init(begun, 1);
    if constexpr (KEEPS_B) ptx::mbarrier_init(kept_full, 1);
    for (int i = 0; i < RINGS * OfImage::SLOTS; ++i) {
      ptx::mbarrier_init(image_full + 8 * i, 1);
      ptx::mbarrier_init(image_empty + 8 * i, READERS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp >= PRODUCER) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp > PRODUCER) {
      ptx::griddepcontrol_wait();
      if constexpr (COPIES) {
        if (warp < GATHERER) {
          const int ring = warp - PRODUCER - 1;
          if (lane > 0) return;
          ptx::mbarrier_wait(begun, 0);
          copy_image<C, PART, TILES>(image, ring, ptx::shared_address(smem + OfImage::AT),
                                     image_full, image_empty);
          return;
        }
      }
      if constexpr (Functor::ROW_VALUES > 0) {
#pragma unroll 1
        for (int round = 0; blockIdx.x + round * C::BLOCKS < TILES; ++round) {
          const TilePlace at = tile_place<C>(blockIdx.x + round * C::BLOCKS);
          ptx::mbarrier_wait(rows_empty + 8 * (round % 2), round / 2 % 2 ^ 1);
#pragma unroll 1
          for (int r = threadIdx.x - GATHERER * 32; r < C::BLOCK_M; r += GATHERERS)
            if (at.row0 + r < C::ROWS)
              row_values[round % 2 * C::BLOCK_M + r] =
                  functor.template row_values<4>(at.batch * C::ROWS + at.row0 + r, true);
          ptx::mbarrier_arrive(rows_full + 8 * (round % 2));
        }
      }
      return;
    }
    struct Source {
      TilePlace at;
      CopyOfWindows<Windows, ATOM_K> windows;
    };
    const auto source_of = [](int tile) {
      const TilePlace at = tile_place<C>(tile);
      return Source{at, CopyOfWindows<Windows, ATOM_K>(at.row0)};
    };
    const auto copy_a = [&](int s, const Source& source, int step) {
#pragma unroll
      for (int atom = 0; atom < C::ATOMS; ++atom) {
        const u32 to = ring + s * STAGE_BYTES + atom * A_BYTES;
        const int i = step * C::ATOMS + atom;
        if constexpr (GATHERS) {
          source.windows.copy(to, a_map, more, i, full + 8 * s);
        } else {
          ptx::cp_async_bulk_tensor(to, a_map, i * ATOM_K, source.at.row0, source.at.batch,
                                    full + 8 * s);
        }
      }
    };
    const auto copy_b = [&](int s, const Source& source, int step) {
      const TilePlace& at = source.at;
#pragma unroll
      for (int atom = 0; atom < C::ATOMS; ++atom) {
        const u32 to = (KEEPS_B ? kept + step * C::ATOMS * B_BYTES
                                : ring + s * STAGE_BYTES + C::ATOMS * A_BYTES) +
                       atom * B_BYTES;
        const u32 counts = KEEPS_B ? kept_full : full + 8 * s;
        int k = (step * C::ATOMS + atom) * ATOM_K;
        if constexpr (GATHERS) k = source.windows.k(step * C::ATOMS + atom);
        if constexpr (C::WIDTH > 2) {
          ptx::cp_async_bulk_tensor(to, b_map, k, 0, 0, 0, at.col0 / (4 * C::WIDTH), counts);
        } else {
          B::copy(to, b_map, k, at.col0, at.batch, counts);
        }
      }
    };
    // The first tile's weights need not wait for the kernel before.
    constexpr int AHEAD = min_of(C::STAGES, STEPS);
    const Source first = source_of(blockIdx.x);
    const auto copy_all_of_b = [&] {
#pragma unroll 1
      for (int step = 0; step < STEPS; ++step) copy_b(0, first, step);
    };
    if (lane == 0) {
      ptx::prefetch_tensormap(a_map);
      ptx::prefetch_tensormap(b_map);
      if constexpr (KEEPS_B) {
        ptx::mbarrier_arrive_expect_tx(kept_full, STEPS * C::ATOMS * B_BYTES);
        if constexpr (C::B_CONSTANT) copy_all_of_b();
      }
#pragma unroll 1
      for (int step = 0; step < AHEAD; ++step) {
        ptx::mbarrier_arrive_expect_tx(full + 8 * step, STAGE_BYTES);
        if constexpr (C::A_CONSTANT) copy_a(step, first, step);
        if constexpr (C::B_CONSTANT && !KEEPS_B) copy_b(step, first, step);
      }
    }
    __syncwarp();  // so that no lane's wait holds these copies up
    ptx::griddepcontrol_wait();
    if (lane > 0) return;
    if constexpr (KEEPS_B && !C::B_CONSTANT) copy_all_of_b();
#pragma unroll 1
    for (int step = 0; step < AHEAD; ++step) {
      if constexpr (!C::A_CONSTANT) copy_a(step, first, step);
      if constexpr (!C::B_CONSTANT && !KEEPS_B) copy_b(step, first, step);
    }
    if constexpr (COPIES) ptx::mbarrier_arrive(begun);  // products wait for these first
    RingPlace<C::STAGES> to{AHEAD % C::STAGES, AHEAD == C::STAGES};
    int begin = AHEAD;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < TILES; tile += C::BLOCKS) {
      const Source source = source_of(tile);
#pragma unroll 1
      for (int step = begin; step < STEPS; ++step, to.advance()) {
        // The slots' first round waits for a phase before the first, which is over.
        ptx::mbarrier_wait(empty + 8 * to.slot, to.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full + 8 * to.slot, STAGE_BYTES);
        copy_a(to.slot, source, step);
        if constexpr (!KEEPS_B) copy_b(to.slot, source, step);
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
  const auto release = [&](int s) {
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
  };

  // `round` counts this block's tiles; a warpgroup takes every second one, or a part of each.
  RingPlace<C::STAGES> from{0, 0};
  RingPlace<max_of(1, OfImage::SLOTS)> part_of_image{0, 0};
  if constexpr (KEEPS_B) ptx::mbarrier_wait(kept_full, 0);
  if (!C::COOPERATIVE && group == 1) from.template skip<STEPS>();
#pragma unroll 1
  for (int round = C::COOPERATIVE ? 0 : group;; round += C::COOPERATIVE ? 1 : 2) {
    const int tile = blockIdx.x + round * C::BLOCKS;
    if (tile >= TILES) break;
    const TilePlace at = tile_place<C>(tile);
    // Of the warp's first product; the others' are 64 further each.
    const int in_tile = (C::COOPERATIVE ? group * GROUP_M : 0) + warp % 4 * 16;
    const int row0 = at.batch * C::ROWS + at.row0 + in_tile, row_end = (at.batch + 1) * C::ROWS;
    float acc[PRODUCTS][C::BLOCK_N / 2];
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
      for (int i = 0; i < C::BLOCK_N / 2; ++i) acc[m][i] = 0.0f;
    const auto part_at = [&](int part) {
      return FragmentEpilogue<C::WIDTH, PART, C::COLUMNS % C::BLOCK_N == 0, Functor>(
          functor, RowRange{row0 + part % PRODUCTS * 64, row_end}, at.col0 + part / PRODUCTS * PART,
          C::COLUMNS);
    };
    // What a part reads comes during the one before, or the products, if registers are left.
    typename decltype(part_at(0))::Fetched next;
    constexpr int FREE = CONSUMER_REGISTERS - PRODUCTS * C::BLOCK_N / (PROMOTED ? 1 : 2) - 44;
    constexpr bool FETCH_AHEAD = !LINES && FREE * 4 >= static_cast<int>(sizeof(next));
    if constexpr (FETCH_AHEAD) next = part_at(0).fetch();
    const auto line_at = [&](int line) {
      return EpilogueTile<16, max_of(8, LINE), 32, FREE * 4, Functor>(
          functor, lane, 0, row0 + line % PRODUCTS * 64, line / PRODUCTS * LINE, row_end,
          C::COLUMNS);
    };
    auto first_line = line_at(0);
    if constexpr (LINES) first_line.fetch();
    // Its turn also says that every copy ahead of its own has come: the parity of a slot's barrier
    // could not tell the phase that it waits for from the one before the last.
    if (!C::COOPERATIVE && round > 0) ptx::mbarrier_wait(turn + 8 * group, (round - 1) / 2 & 1);

    // Where sums are promoted or integers.
    sum_t<Element> of_interval[PRODUCTS][C::BLOCK_N / 2] = {};
    auto& sums = sums_of<APART>(of_interval, acc);
    int last = 0;  // slot
#pragma unroll 1
    for (int begin = 0, end; begin < STEPS; begin = end) {
      end = PROMOTED ? min_of(begin + PROMOTED_STEPS<C::ATOMS>, STEPS) : STEPS;
#pragma unroll 1
      for (int step = begin; step < end; ++step, from.advance()) {
        const int s = from.slot;
        ptx::mbarrier_wait(full + 8 * s, from.phase);
        const u32 a_tile =  // (ATOMS, GROUP_M, ATOM_K)
            ring + s * STAGE_BYTES + (C::COOPERATIVE ? group * GROUP_M * 128 : 0);
        const u32 b_tile =  // (ATOMS, BLOCK_N, ATOM_K)
            KEEPS_B ? kept + step * C::ATOMS * B_BYTES
                    : ring + s * STAGE_BYTES + C::ATOMS * A_BYTES;
        ptx::wgmma_fence();
#pragma unroll
        for (int atom = 0; atom < C::ATOMS; ++atom)
#pragma unroll
          for (int k = 0; k < 128; k += K_STEP)
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m)
              B::mma(sums[m], ptx::wgmma_descriptor(a_tile, atom * A_BYTES + m * 64 * 128 + k),
                     b_tile, atom, k, !PROMOTED || atom + k > 0 || step > begin);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (step > begin) release(last);  // its products are done, this step's not
        last = s;
      }
      if constexpr (APART) {
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(of_interval[m]);
        if (end < STEPS) release(last);
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
          for (int i = 0; i < C::BLOCK_N / 2; ++i)
            acc[m][i] += static_cast<float>(of_interval[m][i]);
      }
    }
    if constexpr (!C::COOPERATIVE) from.template skip<STEPS>();  // the other's
    // The other's products follow these without a gap.
    if (!C::COOPERATIVE && tile + C::BLOCKS < TILES && lane == 0)
      ptx::mbarrier_arrive(turn + 8 * (1 - group));
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m) ptx::wgmma_wait_group<0>(acc[m]);
    release(last);

    constexpr int PARTS = PRODUCTS * C::BLOCK_N / PART;
    if constexpr (Functor::ROW_VALUES > 0)
      ptx::mbarrier_wait(rows_full + 8 * (round % 2), round / 2 % 2);
    if constexpr (LINES) {
      const WarpLines<LINE> held{reinterpret_cast<float*>(smem + C::LINES_AT) +
                                 warp * 16 * WarpLines<LINE>::LD};
      const auto finish = [&](int line, auto& now) {
        held.put(acc[line % PRODUCTS] + line / PRODUCTS * LINE / 2);
        __syncwarp();
        now.run(row_values + round % 2 * C::BLOCK_M + in_tile + line % PRODUCTS * 64,
                [&](int r, int c) { return held.template get<Functor::VECTOR>(r, c); });
        __syncwarp();  // all lanes have read
      };
      finish(0, first_line);
#pragma unroll
      for (int line = 1; line < PRODUCTS * (C::COLUMNS / LINE); ++line) {
        auto now = line_at(line);
        if constexpr (C::COLUMNS == LINE && !Functor::INPUTS_BY_ROW) {
          now.share(first_line);
        } else {
          now.fetch();
        }
        finish(line, now);
      }
    }
#pragma unroll
    for (int part = 0; part < (LINES ? 0 : PARTS); ++part) {
      const auto now = FETCH_AHEAD ? next : part_at(part).fetch();
      if (FETCH_AHEAD && part + 1 < PARTS) next = part_at(part + 1).fetch();
      const auto* rows = row_values + round % 2 * C::BLOCK_M + in_tile + part % PRODUCTS * 64;
      const float* results = acc[part % PRODUCTS] + part / PRODUCTS * PART / 2;
      if constexpr (COPIES) {
        using Part = CopiedPart<typename OfImage::T, C::BLOCK_M, PART>;
        const int slot = (C::COOPERATIVE ? 0 : group * OfImage::SLOTS) + part_of_image.slot;
        if (part % PRODUCTS == 0) ptx::mbarrier_wait(image_full + 8 * slot, part_of_image.phase);
        part_at(part).run(rows, now, results,
                          Part{smem + OfImage::AT + slot * Part::BYTES, at.row0,
                               at.col0 + part / PRODUCTS * PART});
        if (part % PRODUCTS == PRODUCTS - 1) {
          __syncwarp();  // all lanes have read
          if (lane == 0) ptx::mbarrier_arrive(image_empty + 8 * slot);
          part_of_image.advance();
        }
      } else {
        part_at(part).run(rows, now, results);
      }
    }
    if constexpr (Functor::ROW_VALUES > 0) ptx::mbarrier_arrive(rows_empty + 8 * (round % 2));
  }
}
#endif

}  // namespace gtco
