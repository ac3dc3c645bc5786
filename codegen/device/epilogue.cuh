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

  // The same, where they are what another tile of these columns has fetched.
  __device__ __forceinline__ void share(const EpilogueTile& other) {
    static_assert(!Functor::INPUTS_BY_ROW, "rows have inputs of their own");
    if constexpr (FETCH) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) inputs_[slot] = other.inputs_[slot];
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

// Rows that follow one another, ahead of `end`.
struct RowRange {
  int first, end;

  __device__ __forceinline__ RowRange from(int r) const { return {first + r, end}; }
  __device__ __forceinline__ int at(int r) const { return first + r; }
  __device__ __forceinline__ bool has(int r) const { return first + r < end; }
  __device__ __forceinline__ int some(int r) const { return min_of(first + r, end - 1); }
  __device__ __forceinline__ int box() const { return first / 16; }
};

// The epilogue of 16 rows x COLUMNS columns of a wgmma accumulator, by the warp that has them: lane
// (g, t) has, of rows g and g + 8, the WIDTH columns from t WIDTH on of every 4 WIDTH. Two are how
// wgmma numbers columns; more, where its other operand came in an order of rows that makes them.
// INSIDE says that no column lies beyond the last. Rows say where row r of the 16 lies among the
// results (`at`), whether there is one (`has`), which to read instead of one that is not (`some`),
// and which rows they are `from` one on: a lane's first is added once. Where the functor has means
// or moments of them, all 16 are results or none, and rows say which `box` they are.
template <int WIDTH, int COLUMNS, bool INSIDE, class Functor, class Rows = RowRange>
class FragmentEpilogue {
  static constexpr int V = min_of(WIDTH, Functor::VECTOR), CALLS = WIDTH / V;
  static constexpr int GROUPS = COLUMNS / (4 * WIDTH);
  static constexpr int ROWS = Functor::INPUTS_BY_ROW ? 2 : 1;  // that have inputs of their own
  using Inputs = typename Functor::template Inputs<V>;
  static_assert(COLUMNS % (4 * WIDTH) == 0, "whole groups of columns");

 public:
  struct Fetched {  // what the functor reads from device memory
    Inputs at[ROWS][GROUPS * CALLS];
  };

  __device__ __forceinline__ FragmentEpilogue(const Functor& functor, const Rows& rows, int col0,
                                              int column_end)
      : functor_(functor),
        rows_(rows.from(threadIdx.x % 32 / 4)),
        col_(col0 + threadIdx.x % 4 * WIDTH),
        column_end_(column_end) {}

  __device__ __forceinline__ Fetched fetch() const {
    Fetched result;
#pragma unroll
    for (int half = 0; half < ROWS; ++half)
#pragma unroll
      for (int i = 0; i < GROUPS * CALLS; ++i)
        // For a row that is not, those of another: a load that waits for no condition.
        result.at[half][i] =
            functor_.template inputs<V>(rows_.some(8 * half), column(i), active_column(i));
    return result;
  }

  // `rows` are the values of the 16 rows, `acc` the accumulators, as wgmma numbers them; `copied`
  // is what else the functor reads, if anything.
  template <class... Copied>
  __device__ __forceinline__ void run(const typename Functor::Row* rows, const Fetched& fetched,
                                      const float* acc, const Copied&... copied) const {
    constexpr bool BOXES = HasBoxMeans<Functor>::value;  // of the 16 rows
    constexpr bool MOMENTS = HasBoxMoments<Functor>::value > 0;
    float sums[BOXES ? GROUPS * WIDTH : 1] = {};
    float values_of[MOMENTS ? 2 : 1][MOMENTS ? GROUPS * WIDTH : 1];
    float* means = nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      typename Functor::Row values{};
      if constexpr (Functor::ROW_VALUES > 0) {
        if (active_row(half)) values = rows[threadIdx.x % 32 / 4 + 8 * half];
      }
      float held[16];
#pragma unroll
      for (int i = 0; i < GROUPS * CALLS; ++i) {
        const int first = i / CALLS * WIDTH + i % CALLS * V;  // of what the lane has of the row
        const auto call = [&](auto stats) {
          functor_.template operator()<V>(
              rows_.at(8 * half), column(i), values, active_row(half) && active_column(i),
              fetched.at[half % ROWS][i],
              map<V>([&](int j) { return acc[(first + j) / 2 * 4 + half * 2 + (first + j) % 2]; }),
              stats, copied...);
        };
        if constexpr (BOXES) {
          call(SumsOfBox{sums + first, means});
        } else if constexpr (MOMENTS) {
          call(ValuesOfBox{values_of[half] + first, means});
        } else {
          call(StatsOfFragment<WIDTH>{held, first % 16, active_row(half)});
        }
      }
    }
    if constexpr (BOXES) store_means(sums, means);
    if constexpr (MOMENTS) store_moments(values_of, means);
  }

 private:
  // Of boxes of 16 rows and BOX_COLUMNS columns, which as many lanes side by side hold as are
  // needed; in planes as of `put_moments`.
  __device__ __forceinline__ void store_moments(const float (&values)[2][GROUPS * WIDTH],
                                                float* moments) const {
    constexpr int BOX = max_of(1, HasBoxMoments<Functor>::value), LANES_OF_ALL = 4;
    constexpr int LANES = max_of(1, min_of(LANES_OF_ALL, BOX / WIDTH)), OWN = BOX / LANES;
    constexpr int HELD = GROUPS * WIDTH / OWN;  // boxes that a lane has a part of
    static_assert(COLUMNS % BOX == 0 && GROUPS * WIDTH % OWN == 0, "boxes are whole");
    const int lane = threadIdx.x % 32, leader = lane % 4 / LANES * LANES;
    SumsApart sums[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      sums[i] = {__shfl_xor_sync(~0u, values[0][i * OWN], lane ^ leader), 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < 2 * OWN; ++j) {
        const float apart = values[j / OWN][i * OWN + j % OWN] - sums[i].origin;
        sums[i].total += apart;
        sums[i].squares = fmaf(apart, apart, sums[i].squares);
      }
    }
    bool first;
    const int own = add_over_rows(sums, first) * OWN;
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) sums[0].add(sums[0].from(apart));
    const int col = col_ + own / WIDTH * 4 * WIDTH + own % WIDTH;
    if (first && lane % LANES == 0 && active_row(0) && (INSIDE || col < column_end_))
      put_moments<Functor::BOXES>(moments, rows_.box() * (column_end_ / BOX) + col / BOX,
                                  sums[0].moments(16.0f * BOX));
  }
  // Of boxes of 16 rows, of which all columns lie side by side in `means`.
  __device__ __forceinline__ void store_means(float (&sums)[GROUPS * WIDTH], float* means) const {
    const int first = sum_over_rows(sums);
#pragma unroll
    for (int i = 0; i < GROUPS * WIDTH / 8; ++i) {
      const int own = first + i, col = col_ + own / WIDTH * 4 * WIDTH + own % WIDTH;
      if (active_row(0) && (INSIDE || col < column_end_))
        means[rows_.box() * column_end_ + col] = sums[i] / 16;
    }
  }
  __device__ __forceinline__ int column(int i) const {
    return col_ + i / CALLS * 4 * WIDTH + i % CALLS * V;
  }
  __device__ __forceinline__ bool active_row(int half) const { return rows_.has(8 * half); }
  __device__ __forceinline__ bool active_column(int i) const {
    return INSIDE || column(i) < column_end_;
  }

  const Functor& functor_;
  const Rows rows_;
  const int col_, column_end_;
};

// The same where wgmma's rows are the tile's columns: 8 rows x 16 columns, of which lane (g, t) has
// rows 2 t and 2 t + 1 and columns 2 g and 2 g + 1, or with WIDTH 1 g and g + 8, as wgmma numbers
// them.
template <int WIDTH, bool INSIDE, class Functor>
class TransposedEpilogue {
  static constexpr int V = min_of(WIDTH, Functor::VECTOR), CALLS = 2 / V;
  static constexpr int ROWS = Functor::INPUTS_BY_ROW ? 2 : 1;  // that have inputs of their own
  using Inputs = typename Functor::template Inputs<V>;

 public:
  struct Fetched {  // what the functor reads from device memory
    Inputs at[ROWS][CALLS];
  };

  __device__ __forceinline__ TransposedEpilogue(const Functor& functor, int row0, int col0,
                                                int row_end, int column_end)
      : functor_(functor),
        row_(row0 + threadIdx.x % 4 * 2),
        col_(col0 + threadIdx.x % 32 / 4 * WIDTH),
        row_end_(row_end),
        column_end_(column_end) {}

  __device__ __forceinline__ Fetched fetch() const {
    Fetched result;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int call = 0; call < CALLS; ++call)
        // For a row beyond the last, those of the last: a load that waits for no condition.
        result.at[i][call] = functor_.template inputs<V>(min_of(row_ + i, row_end_ - 1),
                                                         column(call), active_column(call));
    return result;
  }

  // `rows` are the values of the 8 rows, `acc` four accumulators. `moments` of the thread's two
  // rows and `stats` are written where the functor has statistics.
  __device__ __forceinline__ void run(const typename Functor::Row* rows, const Fetched& fetched,
                                      const float* acc, Moments* moments, float*& stats) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool active = row_ + i < row_end_;
      typename Functor::Row values{};
      if constexpr (Functor::ROW_VALUES > 0) {
        if (active) values = rows[threadIdx.x % 4 * 2 + i];
      }
      float held[2];
#pragma unroll
      for (int call = 0; call < CALLS; ++call)
        functor_.template operator()<V>(
            row_ + i, column(call), values, active && active_column(call),
            fetched.at[i % ROWS][call], map<V>([&](int j) { return acc[(call * V + j) * 2 + i]; }),
            StatsOfTransposed<WIDTH>{held, call * V, moments[i], stats});
    }
  }

 private:
  __device__ __forceinline__ int column(int call) const {
    return col_ + call * (WIDTH == 1 ? 8 : V);
  }
  __device__ __forceinline__ bool active_column(int call) const {
    return INSIDE || column(call) < column_end_;
  }

  const Functor& functor_;
  const int row_, col_, row_end_, column_end_;
};

}  // namespace gtco
