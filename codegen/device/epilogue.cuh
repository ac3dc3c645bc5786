// The epilogue of a tile: accumulators staged in shared memory as (row, column) are handed, vector
// by vector, to a functor that sees only logical positions. The functor of a group says what it
// reads there (`inputs`), stores its outputs and, where the group has them, row statistics.
#pragma once

#include "stats.cuh"

namespace gtco {

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

// The part of a tile's epilogue that one of THREADS threads does: rows [first_row, first_row +
// ROWS) of the tile at (row0, col0), a vector of columns a step. What the functor reads from device
// memory is fetched ahead of the accumulators where it fits FETCH_BYTES of registers. Where nothing
// has to stay in registers, UNROLLED steps are written out.
template <int ROWS, int COLUMNS, int THREADS, int FETCH_BYTES, class Functor, int UNROLLED = 4>
class EpilogueTile {
  static constexpr int V = Functor::VECTOR;
  static_assert(COLUMNS % V == 0, "a vector does not cross the tile's edge");
  static constexpr int VECTORS = COLUMNS / V;
  static constexpr int STEPS = ceil_div(ROWS * VECTORS, THREADS);
  using Inputs = typename Functor::template Inputs<V>;
  static constexpr bool ONE_COLUMN = THREADS % VECTORS == 0;  // for all steps of a thread
  static constexpr int SLOTS = ONE_COLUMN && !Functor::INPUTS_BY_ROW ? 1 : STEPS;
  static constexpr bool FETCH = SLOTS * static_cast<int>(sizeof(Inputs)) <= FETCH_BYTES;

 public:
  __device__ __forceinline__ EpilogueTile(const Functor& functor, int thread, int first_row,
                                          int row0, int col0, int row_count, int column_count)
      : functor_(functor),
        thread_(thread),
        first_row_(first_row),
        row0_(row0),
        col0_(col0),
        row_count_(row_count),
        column_count_(column_count) {}

  // Not before the dependent-launch wait.
  __device__ __forceinline__ void fetch() {
    if constexpr (FETCH) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) inputs_[slot] = inputs(slot);
    }
  }

  // `accumulators(r, c)` gives V accumulators of tile row r from column c. All lanes of a warp stay
  // together, so that the functor may reduce over lanes.
  template <class Accumulators>
  __device__ __forceinline__ void run(const typename Functor::Row* row_values,
                                      Accumulators accumulators) {
    constexpr int UNROLL = FETCH && SLOTS > 1 ? STEPS : min_of(STEPS, UNROLLED);
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int r = row(step), c = column(step);
      const bool on = active(step);
      typename Functor::Row values{};
      if constexpr (Functor::ROW_VALUES > 0) {
        if (on) values = row_values[r];
      }
      const Vec<float, V> acc = on ? accumulators(r, c) : map<V>([](int) { return 0.0f; });
      if constexpr (FETCH) {
        functor_.template operator()<V>(row0_ + r, col0_ + c, values, on,
                                        inputs_[SLOTS == 1 ? 0 : step], acc);
      } else {
        functor_.template operator()<V>(row0_ + r, col0_ + c, values, on, inputs(step), acc);
      }
    }
  }

 private:
  __device__ __forceinline__ int row(int step) const {
    if constexpr (ONE_COLUMN) return first_row_ + thread_ / VECTORS + step * (THREADS / VECTORS);
    return first_row_ + (thread_ + step * THREADS) / VECTORS;
  }
  __device__ __forceinline__ int column(int step) const {
    if constexpr (ONE_COLUMN) return thread_ % VECTORS * V;
    return (thread_ + step * THREADS) % VECTORS * V;
  }
  __device__ __forceinline__ bool active(int step) const {
    return thread_ + step * THREADS < ROWS * VECTORS && row0_ + row(step) < row_count_ &&
           col0_ + column(step) < column_count_;
  }
  __device__ __forceinline__ Inputs inputs(int step) const {
    return functor_.template inputs<V>(row0_ + row(step), col0_ + column(step), active(step));
  }

  const Functor& functor_;
  const int thread_, first_row_, row0_, col0_, row_count_, column_count_;
  Inputs inputs_[FETCH ? SLOTS : 1];
};

}  // namespace gtco
