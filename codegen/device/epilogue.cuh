// The epilogue of a tile: accumulators staged in shared memory as (row, column) are handed, vector
// by vector, to a functor that sees only logical positions. The functor of a group stores its
// outputs and, where the group has them, row statistics.
#pragma once

#include "stats.cuh"

namespace gtco {

// Starts to bring the constants that the epilogue reads by column alone; needs no earlier kernel.
template <int COLUMNS, class Functor>
__device__ __forceinline__ void prefetch_columns(const Functor& functor, int thread, int col0,
                                                 int column_count) {
  const int col = col0 + thread * Functor::VECTOR;
  if (thread < COLUMNS / Functor::VECTOR && col < column_count) functor.prefetch(col);
}

// Row values of a tile, one row a thread, kept in shared memory. `rows` has ROWS entries.
template <int ROWS, int THREADS, class Functor>
__device__ __forceinline__ void fill_row_values(const Functor& functor, typename Functor::Row* rows,
                                                int thread, int row0, int row_count) {
  if constexpr (Functor::ROW_VALUES > 0) {
#pragma unroll 1
    for (int r = thread; r < ROWS; r += THREADS) {
      if (row0 + r < row_count) rows[r] = functor.row_values(row0 + r, true);
    }
  }
}

// Runs `functor` over rows [first_row, first_row + ROWS) of a staged tile, by THREADS threads.
// `accumulators(r, c)` gives V accumulators of tile row r from column c. All lanes of a warp stay
// together, so that the functor may reduce over lanes.
template <int ROWS, int COLUMNS, int THREADS, class Functor, class Accumulators>
__device__ __forceinline__ void run_epilogue(const Functor& functor,
                                             const typename Functor::Row* row_values, int thread,
                                             int first_row, int row0, int col0, int row_count,
                                             int column_count, Accumulators accumulators) {
  constexpr int V = Functor::VECTOR;
  static_assert(COLUMNS % V == 0, "a vector does not cross the tile's edge");
  constexpr int VECTORS = COLUMNS / V;
  constexpr int STEPS = ceil_div(ROWS * VECTORS, THREADS);
#pragma unroll 2
  for (int step = 0; step < STEPS; ++step) {
    const int item = thread + step * THREADS;
    const int r = first_row + item / VECTORS;
    const int c = item % VECTORS * V;
    const bool active = item < ROWS * VECTORS && row0 + r < row_count && col0 + c < column_count;
    typename Functor::Row row{};
    if constexpr (Functor::ROW_VALUES > 0) {
      if (active) row = row_values[r];
    }
    const Vec<float, V> acc = active ? accumulators(r, c) : map<V>([](int) { return 0.0f; });
    functor.template operator()<V>(row0 + r, col0 + c, row, active, acc);
  }
}

}  // namespace gtco
