// D[rows, columns] = A[rows, K] B[columns, K]^T on mma.sync with cp.async, any strided operands.
//
// An operand is a struct with a constexpr VECTOR (elements a copy may take), K_MAJOR (whether the
// vector runs along K), CONSTANT (nothing in the launch chain writes it) and `at(batch, row, k)`;
// the `at` of a window struct (windows.cuh) also says what lies outside of the image. Where places
// take more than a product each, it says that row and k are APART: an element lies at
// `row_place(batch, row) + k_place(k)`, or where a window's first pixel and the tap say; of several
// pieces, at the base of `piece_of` the channel and its pitch times that place or row. Windows
// whose neighbours SHARES_SECTORS of memory with them are worth a place in L1. Tiles lie in shared
// memory in 16-byte chunks, XOR-swizzled so that ldmatrix meets no bank twice.
#pragma once

#include "epilogue.cuh"
#include "grid.cuh"
#include "mma.cuh"
#include "order.cuh"
#include "windows.cuh"

namespace gtco {

// Where element (row, k) of a tile lies, in elements, of which E make a chunk. K-major tiles are
// (ROWS, BLOCK_K), the others (BLOCK_K, ROWS).
template <bool K_MAJOR, int ROWS, int BLOCK_K, int E>
__device__ __forceinline__ int tile_offset(int row, int k) {
  if constexpr (K_MAJOR) {
    constexpr int CHUNKS = BLOCK_K / E;
    constexpr int SHIFT = CHUNKS >= 8 ? 0 : (CHUNKS == 4 ? 1 : 2);
    const int chunk = (k / E) ^ ((row >> SHIFT) & min_of(CHUNKS - 1, 7));
    return row * BLOCK_K + chunk * E + k % E;
  } else {
    static_assert(K_MAJOR || ROWS % 64 == 0, "a row of chunks spans all banks");
    // ldmatrix reads a chunk of each of eight k; of 32 bits, lanes read two of each of four.
    const int turn = E == 8 ? k & 7 : (k & 3) * 2;
    return k * ROWS + ((row / E) ^ turn) * E + row % E;
  }
}

// Starts the copy of tile (ROWS, BLOCK_K) at (row0, k0); zeros beyond row_count and K. Elements of
// two bytes that no copy takes together come through registers, a chunk a time: a thread reads all
// of several before it stores the first, so that it waits for memory once.
template <class Element, int ROWS, int BLOCK_K, int K, int THREADS, class Operand>
__device__ __forceinline__ void copy_tile(Element* tile, const Operand& operand, int batch,
                                          int row0, int k0, int row_count, int thread) {
  constexpr int V = Operand::VECTOR, E = 16 / sizeof(Element);
  constexpr bool GATHERS = V * sizeof(Element) < 4;
  constexpr int EACH = GATHERS ? E : V, ITEMS = ROWS * BLOCK_K / EACH;
  constexpr int STEPS = ceil_div(ITEMS, THREADS);
  const auto row_of = [](int item) {
    return Operand::K_MAJOR ? item / (BLOCK_K / EACH) : item % (ROWS / EACH) * EACH;
  };
  const auto k_of = [](int item) {
    return Operand::K_MAJOR ? item % (BLOCK_K / EACH) * EACH : item / (ROWS / EACH);
  };
  const auto place = [&](int r, int k, bool& valid) -> const Element* {
    valid = row0 + r < row_count && k0 + k < K;
    if constexpr (is_windows<Operand>) {
      const Element* at = operand.at(batch, row0 + r, k0 + k, valid);
      return valid ? at : operand.base;
    } else {
      return valid ? operand.at(batch, row0 + r, k0 + k) : operand.base;
    }
  };
  const auto to = [&](int item) {
    return tile + tile_offset<Operand::K_MAJOR, ROWS, BLOCK_K, E>(row_of(item), k_of(item));
  };
  if constexpr (GATHERS) {
    constexpr int AHEAD = min_of(4, STEPS);
    using Chunk = Packed<Element, E>;
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AHEAD) {
      Chunk read[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int item = min_of(thread + (step + i) * THREADS, ITEMS - 1);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          bool valid;
          const Element* from = place(row_of(item) + (Operand::K_MAJOR ? 0 : e),
                                      k_of(item) + (Operand::K_MAJOR ? e : 0), valid);
          const Element element = *from;
          reinterpret_cast<Element*>(&read[i])[e] = valid ? element : Element{0};
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int item = thread + (step + i) * THREADS;
        if (item < ITEMS) *reinterpret_cast<Chunk*>(to(item)) = read[i];
      }
    }
  } else {
#pragma unroll 4
    for (int step = 0; step < STEPS; ++step) {
      const int item = thread + step * THREADS;
      if (ITEMS % THREADS != 0 && item >= ITEMS) break;
      bool valid;
      const Element* from = place(row_of(item), k_of(item), valid);
      ptx::cp_async<V * sizeof(Element)>(ptx::shared_address(to(item)), from, valid);
    }
  }
}

template <class T, class = void>
struct IsApart : Constant<bool, false> {};
template <class T>
struct IsApart<T, decltype(static_cast<void>(T::APART))> : Constant<bool, T::APART> {};

template <class T, class = void>
struct SharesSectors : Constant<bool, false> {};
template <class T>
struct SharesSectors<T, decltype(static_cast<void>(T::SHARES_SECTORS))>
    : Constant<bool, T::SHARES_SECTORS> {};

// The copies of a thread in tiles (ROWS, BLOCK_K) of one operand. Their k is the same in all of a
// tile, and their rows in all tiles: what rows have in a place is computed ahead of the first, and
// what k has once a tile.
template <class Element, int ROWS, int BLOCK_K, int K, int THREADS, class Operand>
class TileCopies {
  static constexpr int V = Operand::VECTOR, CHUNKS = BLOCK_K / V;
  static constexpr int COPIES = ceil_div(ROWS * CHUNKS, THREADS);
  static constexpr bool WINDOWS = is_windows<Operand>, JOINED = pieces_of<Operand> > 1;

  static constexpr bool fits() {
    if constexpr (WINDOWS)
      if (TapBits<Operand>::COUNT > 32) return false;
    const bool even = THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0;
    return Operand::K_MAJOR && V * sizeof(Element) >= 4 && even && COPIES <= 8;
  }
  static constexpr bool APART = IsApart<Operand>::value && fits();
  static constexpr int BYTES = V * sizeof(Element);
  static constexpr bool KEPT = BYTES < 16 || SharesSectors<Operand>::value;

 public:
  __device__ __forceinline__ TileCopies(const Operand& operand, int batch, int row0, int row_count,
                                        int thread)
      : operand_(operand), batch_(batch), row0_(row0), row_count_(row_count), thread_(thread) {
    if constexpr (APART) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int row = row0 + row_of(i);
        if constexpr (WINDOWS) {
          Pixel first = first_pixel<Operand>(row);
          first.channel = batch * Operand::CHANNELS;
          places_[i] = Operand::place(first);
          inside_[i] = row < row_count ? TapBits<Operand>::of_window(row) : 0;
        } else {
          places_[i] = Operand::row_place(batch, row);
          inside_[i] = row < row_count;
        }
      }
    }
  }

  // Starts the copy of the tile at k0.
  __device__ __forceinline__ void start(Element* tile, int k0) const {
    if constexpr (APART) {
      const int in_tile = thread_ % CHUNKS * V, k = k0 + in_tile;
      const Element* base = operand_.base;
      u32 needed = 1;
      const int here = min_of(k, K - V);  // that there is
      int k_place = 0, pitch = 1, channel = here;
      if constexpr (WINDOWS) {
        const Pixel tap = tap_of<Operand>(here);
        k_place = Operand::place(tap) - Operand::place(Pixel{});
        needed = TapBits<Operand>::of_tap(here);
        channel = tap.channel;
      } else {
        k_place = Operand::k_place(k);
      }
      if constexpr (JOINED) {
        const auto piece = operand_.piece_of(channel);
        base = piece.base;
        pitch = piece.pitch;
      }
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const bool valid = k < K && (inside_[i] & needed) == needed;
        const Element* from = base + (valid ? (places_[i] + k_place) * pitch : 0);
        Element* to =
            tile + tile_offset<true, ROWS, BLOCK_K, 16 / sizeof(Element)>(row_of(i), in_tile);
        ptx::cp_async<BYTES, KEPT>(ptx::shared_address(to), from, valid);
      }
    } else {
      copy_tile<Element, ROWS, BLOCK_K, K, THREADS>(tile, operand_, batch_, row0_, k0, row_count_,
                                                    thread_);
    }
  }

 private:
  __device__ __forceinline__ int row_of(int copy) const {
    return thread_ / CHUNKS + copy * (THREADS / CHUNKS);
  }

  const Operand& operand_;
  const int batch_, row0_, row_count_, thread_;
  int places_[APART ? COPIES : 1];
  u32 inside_[APART ? COPIES : 1];
};

// Leaves a fragment as it is.
struct Unscaled {
  __device__ __forceinline__ void operator()(u32 (&)[4]) const {}
};

// Fragments of 16 rows x 32 bytes of k, in the order (first row, chunk of k) of `at(j)`: mma's A
// has (0, 0), (8, 0), (0, 1), (8, 1), and two of its B (0, 0), (0, 1), (8, 0), (8, 1). A matrix of
// ldmatrix is 8 rows x 16 bytes; of 32-bit elements it turns none, so lanes read those one by one.
// `scaled` multiplies them.
template <class Mma, bool K_MAJOR, int ROWS, int BLOCK_K, bool IS_A, class Element,
          class Scaled = Unscaled>
__device__ __forceinline__ void load_fragments(u32 (&parts)[Mma::PARTS][4], const Element* tile,
                                               int row, int k, int lane,
                                               const Scaled& scaled = {}) {
  u32(&r)[4] = parts[0];
  constexpr int E = 16 / sizeof(Element);
  const auto first_row = [](int j) { return (IS_A ? j & 1 : j >> 1) * 8; };
  const auto first_k = [](int j) { return (IS_A ? j >> 1 : j & 1) * E; };
  const auto at = [&](int rr, int kk) {
    return tile + tile_offset<K_MAJOR, ROWS, BLOCK_K, E>(row + rr, k + kk);
  };
  if constexpr (!K_MAJOR && sizeof(Element) == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      r[j] = __float_as_uint(*at(first_row(j) + lane / 4, first_k(j) + lane % 4));
  } else {
    const int j = lane / 8, i = lane % 8;
    const u32 address =
        ptx::shared_address(at(first_row(j) + (K_MAJOR ? i : 0), first_k(j) + (K_MAJOR ? 0 : i)));
    if constexpr (K_MAJOR) {
      ptx::ldmatrix_x4(r, address);
    } else {
      ptx::ldmatrix_x4_trans(r, address);
    }
  }
  scaled(r);
  Mma::split(parts);
}

// A's fragment at `k`, whose rows have the factors of rows `of[0]` and, the lower eight, `of[1]` of
// a tile (ROWS, BLOCK_K): times those.
template <int ROWS, int BLOCK_K, class Element>
__device__ __forceinline__ void scale_fragment(u32 (&r)[4], const Element* tile, const int (&of)[2],
                                               int k, int lane) {
  constexpr int E = 16 / sizeof(Element), REGISTER = 4 / sizeof(Element);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = k + (j >> 1) * E + lane % 4 * REGISTER;
    const int row = ROWS > 1 ? of[j & 1] : 0;
    const Element* factors = tile + tile_offset<true, ROWS, BLOCK_K, E>(row, at);
    r[j] = ptx::multiply<Element>(r[j], *reinterpret_cast<const u32*>(factors));
  }
}

// Of a GEMM whose A is multiplied as it is.
struct NoScale {};

// Config: Element, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES, and EXACT where
// products of floats are as good as fp32's. M and N are those of one product of the batch.
// With a Scale, an operand (GROUPS, K), GROUP_ROWS rows of A each are multiplied by one of its
// rows, of which a tile meets SCALE_ROWS at most.
template <class C, class A, class B, class Functor, class Scale = NoScale>
__device__ __forceinline__ void gemm_mma(const A& a, const B& b, const Functor& functor,
                                         const Scale& scale = {}) {
  using Element = typename C::Element;
  using Mma = gtco::Mma<Element, is_exact<C>>;
  static_assert(C::BLOCK_K % Mma::K == 0, "mma takes k in steps");
  constexpr bool SCALES = !is_same<Scale, NoScale>;
  constexpr int THREADS = C::WARPS_M * C::WARPS_N * 32;
  constexpr int WARP_M = C::BLOCK_M / C::WARPS_M, WARP_N = C::BLOCK_N / C::WARPS_N;
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a warp's tile is made of 16 x 16 pieces");
  constexpr int MI = WARP_M / 16, NI = WARP_N / 8;
  constexpr int STEPS = ceil_div(C::K, C::BLOCK_K);
  constexpr int SLOTS = min_of(C::STAGES, STEPS);  // of the rings
  constexpr bool LONG = C::K > 1024;               // 128 roundings of an exact sum and more
  // The assembler loads what is unrolled ahead; in two parts all would be more than it has room
  // for.
  constexpr int UNROLLED = is_exact<C> ? Mma::K : C::BLOCK_K;
  constexpr int A_TILE = C::BLOCK_M * C::BLOCK_K, B_TILE = C::BLOCK_N * C::BLOCK_K;

  extern __shared__ __align__(1024) unsigned char smem[];
  Element* a_ring = reinterpret_cast<Element*>(smem);  // (SLOTS, BLOCK_M, BLOCK_K)
  Element* b_ring = a_ring + SLOTS * A_TILE;           // (SLOTS, BLOCK_N, BLOCK_K)
  float* staged = reinterpret_cast<float*>(smem);      // (BLOCK_M, STAGE_LD), after the loop
  auto* row_values = reinterpret_cast<typename Functor::Row*>(smem + C::ROW_VALUES_AT);

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_m = warp / C::WARPS_N * WARP_M, warp_n = warp % C::WARPS_N * WARP_N;
  const int m0 = in_order(block_along<C, 1>(), blocks_along<C, 1>()) * C::BLOCK_M;
  const int n0 = in_order(block_along<C, 0>(), blocks_along<C, 0>()) * C::BLOCK_N;
  const int batch = in_order(block_along<C, 2>(), blocks_along<C, 2>());
  // Where this product's results begin.
  const int first_row = IsGrouped<C>::value ? 0 : batch * C::M;
  const int first_column = IsGrouped<C>::value ? batch * C::N : 0;

  Element* scale_ring = b_ring + SLOTS * B_TILE;  // (SLOTS, SCALE_ROWS, BLOCK_K)
  const TileCopies<Element, C::BLOCK_M, C::BLOCK_K, C::K, THREADS, A> a_copies(a, batch, m0, C::M,
                                                                               thread);
  const TileCopies<Element, C::BLOCK_N, C::BLOCK_K, C::K, THREADS, B> b_copies(b, batch, n0, C::N,
                                                                               thread);
  const auto copy_a = [&](int step) {
    if (step < STEPS) {
      a_copies.start(a_ring + step % C::STAGES * A_TILE, step * C::BLOCK_K);
      if constexpr (SCALES)
        copy_tile<Element, C::SCALE_ROWS, C::BLOCK_K, C::K, THREADS>(
            scale_ring + step % C::STAGES * C::SCALE_ROWS * C::BLOCK_K, scale, 0,
            m0 / C::GROUP_ROWS, step * C::BLOCK_K, C::GROUPS, thread);
    }
  };
  const auto copy_b = [&](int step) {
    if (step < STEPS) b_copies.start(b_ring + step % C::STAGES * B_TILE, step * C::BLOCK_K);
  };

  ptx::griddepcontrol_launch_dependents();
  if constexpr (B::CONSTANT) {  // weights need not wait for the kernel before
#pragma unroll
    for (int s = 0; s < C::STAGES - 1; ++s) copy_b(s);
  }
  ptx::griddepcontrol_wait();
#pragma unroll
  for (int s = 0; s < C::STAGES - 1; ++s) {
    if constexpr (!B::CONSTANT) copy_b(s);
    copy_a(s);
    ptx::cp_async_commit();
  }
  fill_row_values<C::BLOCK_M, THREADS>(functor, row_values, thread, first_row + m0,
                                       first_row + C::M);

  int factors[MI][2];  // which row of the tile of factors is that of the fragments' rows
  if constexpr (SCALES) {
#pragma unroll
    for (int i = 0; i < 2 * MI; ++i) {
      const int row = m0 + warp_m + i * 8 + lane / 4;
      factors[i / 2][i % 2] = min_of(row / C::GROUP_ROWS - m0 / C::GROUP_ROWS, C::SCALE_ROWS - 1);
    }
  }
  typename Mma::Sum acc[MI][NI][Mma::PARTS][4] = {};
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    ptx::cp_async_wait<C::STAGES - 2>();
    __syncthreads();
    copy_b(step + C::STAGES - 1);
    copy_a(step + C::STAGES - 1);
    ptx::cp_async_commit();
    const Element* a_tile = a_ring + step % C::STAGES * A_TILE;  // (BLOCK_M, BLOCK_K)
    const Element* b_tile = b_ring + step % C::STAGES * B_TILE;  // (BLOCK_N, BLOCK_K)
#pragma unroll 1
    for (int first = 0; first < C::BLOCK_K; first += UNROLLED)
#pragma unroll
      for (int k = first; k < first + UNROLLED; k += Mma::K) {
        u32 af[MI][Mma::PARTS][4], bf[NI / 2][Mma::PARTS][4];
#pragma unroll
        for (int i = 0; i < MI; ++i)
          load_fragments<Mma, A::K_MAJOR, C::BLOCK_M, C::BLOCK_K, true>(
              af[i], a_tile, warp_m + i * 16, k, lane, [&](u32(&r)[4]) {
                if constexpr (SCALES)
                  scale_fragment<C::SCALE_ROWS, C::BLOCK_K>(
                      r, scale_ring + step % C::STAGES * C::SCALE_ROWS * C::BLOCK_K, factors[i], k,
                      lane);
              });
#pragma unroll
        for (int j = 0; j < NI / 2; ++j)
          load_fragments<Mma, B::K_MAJOR, C::BLOCK_N, C::BLOCK_K, false>(bf[j], b_tile,
                                                                         warp_n + j * 16, k, lane);
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
          for (int j = 0; j < NI; ++j)
            Mma::template mma<LONG>(acc[i][j], af[i], bf[j / 2], j % 2 * 2);
      }
  }
  EpilogueTile<C::BLOCK_M, C::BLOCK_N, THREADS, 64, Functor> tile(
      functor, thread, 0, first_row + m0, first_column + n0, first_row + C::M, first_column + C::N);
  tile.fetch();
  ptx::cp_async_wait<0>();
  __syncthreads();  // the ring becomes the staging buffer

#pragma unroll
  for (int i = 0; i < MI; ++i)
#pragma unroll
    for (int j = 0; j < NI; ++j) {
      float* at =
          staged + (warp_m + i * 16 + lane / 4) * C::STAGE_LD + warp_n + j * 8 + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) at[e / 2 * 8 * C::STAGE_LD + e % 2] = Mma::total(acc[i][j], e);
    }
  __syncthreads();
  constexpr int V = Functor::VECTOR;
  tile.run(row_values, [&](int r, int c) { return load<V>(staged + r * C::STAGE_LD + c); });
}

}  // namespace gtco
