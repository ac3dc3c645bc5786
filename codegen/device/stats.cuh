// Row statistics: mean and sum of squared deviations (M2) per chunk of 64 columns, f32[rows,
// chunks, 2], and their merging by Chan, Golub and LeVeque (1979). No atomics, no memset: the same
// inputs give the same bits.
#pragma once

#include "vector.cuh"

namespace gtco {

inline constexpr int STATS_CHUNK = 64;

struct RowMoments {
  float mean;
  float rstd;
};

// Statistics of one row from its chunks. `stats` points at the row's first chunk. All chunks are
// loaded at once, or AT_ONCE of them, for threads of few registers.
template <int COLUMNS, int AT_ONCE = 0>
__device__ __forceinline__ RowMoments merge_row_stats(const float* stats, float eps) {
  constexpr int CHUNKS = ceil_div(COLUMNS, STATS_CHUNK);
  const auto size = [](int i) { return min_of(STATS_CHUNK, COLUMNS - i * STATS_CHUNK); };
  if constexpr (AT_ONCE > 0 && AT_ONCE < CHUNKS) {
    // In one pass, against the first chunk's mean: what cancels is of the size of the spread,
    // however large the mean.
    const float origin = stats[0];
    float total = 0.0f, squares = 0.0f;
#pragma unroll 1
    for (int first = 0; first < CHUNKS; first += AT_ONCE) {
      Vec<float, 2> chunks[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        chunks[i] = load<2>(stats + 2 * (first + i), first + i < CHUNKS);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float apart = chunks[i][0] - origin;
        const int count = max_of(0, size(first + i));
        total += apart * count;
        squares += chunks[i][1] + apart * apart * count;
      }
    }
    const float apart = total / COLUMNS;
    return {origin + apart, rsqrtf(ptx::max_nan(squares - total * apart, 0.0f) / COLUMNS + eps)};
  }
  float means[CHUNKS], m2[CHUNKS];
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const Vec<float, 2> chunk = load<2>(stats + 2 * i);
    means[i] = chunk[0];
    m2[i] = chunk[1];
    total += means[i] * size(i);
  }
  const float mean = total / COLUMNS;
  float spread = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const float apart = means[i] - mean;
    spread += m2[i] + apart * apart * size(i);
  }
  return {mean, rsqrtf(spread / COLUMNS + eps)};
}

// Stores the statistics of one row's chunk, of which a thread has `values` from column `col` on.
// `sum` adds up what the lanes that have all of it give; the first of them stores.
template <int COLUMNS, int V, class Sum>
__device__ __forceinline__ void store_chunk(float* stats, int row, int col,
                                            const Vec<float, V>& values, bool active, Sum sum) {
  const int chunk = col / STATS_CHUNK;
  const int count = min_of(STATS_CHUNK, COLUMNS - chunk * STATS_CHUNK);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) total += active ? values[i] : 0.0f;
  const float mean = sum(total) / count;
  float m2 = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) m2 += active ? (values[i] - mean) * (values[i] - mean) : 0.0f;
  m2 = sum(m2);
  if (active && col % STATS_CHUNK == 0) {
    constexpr int CHUNKS = ceil_div(COLUMNS, STATS_CHUNK);
    gtco::store<2>(stats + (row * CHUNKS + chunk) * 2, Vec<float, 2>{{mean, m2}});
  }
}

// Stores a functor's statistics where neighbouring lanes hold neighbouring vectors of a row, and a
// chunk's first vector lies in a lane that is a multiple of 64 / V. Called by all 32 lanes; the
// first of a chunk stores.
struct StatsOfLanes {
  template <int COLUMNS, int V>
  __device__ __forceinline__ void store(float* stats, int row, int col, const Vec<float, V>& values,
                                        bool active) const {
    static_assert(V >= 2 && STATS_CHUNK % V == 0, "64 / V lanes of one warp hold a chunk");
    const auto sum = [](float x) { return lanes_sum<STATS_CHUNK / V>(x); };
    store_chunk<COLUMNS>(stats, row, col, values, active, sum);
  }
};

// Whether a functor has means of boxes: `static constexpr bool BOX_MEANS = true;` in F.
template <class F, class = void>
struct HasBoxMeans : Constant<bool, false> {};
template <class F>
struct HasBoxMeans<F, decltype(static_cast<void>(F::BOX_MEANS))> : Constant<bool, F::BOX_MEANS> {};

// What a functor hands in of each vector of V columns, added to a thread's `sums` of a box. `to`
// becomes where the means of all boxes belong.
struct SumsOfBox {
  float* sums;
  float*& to;

  template <int V>
  __device__ __forceinline__ void add(float* means, const Vec<float, V>& values,
                                      bool active) const {
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] += active ? values[i] : 0.0f;
    to = means;
  }
};

// Sums over the eight lanes, four apart, that have rows of the same N columns: each lane comes to
// hold N / 8 of them, from the one on that is returned. A step halves what a lane has to add.
template <int N>
__device__ __forceinline__ int sum_over_rows(float (&sums)[N]) {
  static_assert(N % 8 == 0, "each of eight lanes holds as many");
  const int lane = threadIdx.x % 32;
  int first = 0;
#pragma unroll
  for (int apart = 16, left = N / 2; apart >= 4; apart /= 2, left /= 2) {
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float given = upper ? sums[i] : sums[i + left];
      sums[i] = (upper ? sums[i + left] : sums[i]) + __shfl_xor_sync(~0u, given, apart);
    }
    first += upper ? left : 0;
  }
  return first;
}

// Columns of a box of which a functor has moments, and how many boxes there are:
// `static constexpr int BOX_COLUMNS = 4, BOXES = 512;` in F; 0 where it has none.
template <class F, class = void>
struct HasBoxMoments : Constant<int, 0> {};
template <class F>
struct HasBoxMoments<F, decltype(static_cast<void>(F::BOX_COLUMNS))>
    : Constant<int, F::BOX_COLUMNS> {};

// What a functor hands in of each vector of V columns, kept in `values`.
struct ValuesOfBox {
  float* values;
  float*& to;

  template <int V>
  __device__ __forceinline__ void add(float* moments, const Vec<float, V>& from, bool) const {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = from[i];
    to = moments;
  }
};

// Which vector of which row thread `item` has where threads come in the order of chunks: first
// those of the whole chunks of all rows, 64 / V each, then those of the narrower chunk in which
// each row ends, as many as hold it, rounded up to a power of two. So the threads of a chunk are
// neighbours in one warp, and few are idle: those have a row that is none of `rows`, and the last
// vector's column.
template <int COLUMNS, int V>
struct ChunkPlace {
  static constexpr int LANES = STATS_CHUNK / V, FIRST = COLUMNS / STATS_CHUNK * STATS_CHUNK;
  static constexpr int WHOLE = FIRST / V;  // threads of a row's whole chunks
  static constexpr int LAST = power_of_two((COLUMNS - FIRST) / V);  // of its narrower one
  int row, col;

  __device__ __forceinline__ ChunkPlace(int item, int rows) {
    static_assert(V >= 2 && LANES <= 32 && COLUMNS % V == 0, "a chunk is vectors of one warp");
    const int rest = item - rows * WHOLE;
    row = rest < 0 ? item / max_of(1, WHOLE) : rest / max_of(1, LAST);
    col = rest < 0 ? item % max_of(1, WHOLE) * V : FIRST + rest % max_of(1, LAST) * V;
    if (col >= COLUMNS) row = rows, col = COLUMNS - V;
  }
};

// The same where lanes hold vectors in the order of chunks.
struct StatsOfChunks {
  template <int COLUMNS, int V>
  __device__ __forceinline__ void store(float* stats, int row, int col, const Vec<float, V>& values,
                                        bool active) const {
    using Place = ChunkPlace<COLUMNS, V>;
    const int lanes = col < Place::FIRST ? Place::LANES : Place::LAST;
    const auto sum = [&](float x) {
#pragma unroll
      for (int offset = Place::LANES / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(~0u, x, offset);  // all 32, whatever they have
        x += offset < lanes ? other : 0.0f;
      }
      return x;
    };
    store_chunk<COLUMNS>(stats, row, col, values, active, sum);
  }
};

// The same where four neighbouring lanes hold a row as wgmma leaves it: lane t has the WIDTH
// columns from t WIDTH on of every 4 WIDTH, 16 of a chunk, which it hands in from the left to the
// right.
template <int WIDTH>
struct StatsOfFragment {
  float (&held)[16];
  const int first;  // of the 16
  const bool active_row;

  template <int COLUMNS, int V>
  __device__ __forceinline__ void store(float* stats, int row, int col, const Vec<float, V>& values,
                                        bool) const {
#pragma unroll
    for (int i = 0; i < V; ++i) held[first + i] = values[i];
    if (first + V < 16) return;
    const int lane = threadIdx.x % 4, chunk = col / STATS_CHUNK;
    const int count = min_of(STATS_CHUNK, COLUMNS - chunk * STATS_CHUNK);
    const auto counts = [&](int i) {
      return COLUMNS % STATS_CHUNK == 0 || i / WIDTH * 4 * WIDTH + lane * WIDTH + i % WIDTH < count;
    };
    float sum = 0.0f, m2 = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += counts(i) ? held[i] : 0.0f;
    const float mean = lanes_sum<4>(sum) / count;
#pragma unroll
    for (int i = 0; i < 16; ++i) m2 += counts(i) ? (held[i] - mean) * (held[i] - mean) : 0.0f;
    m2 = lanes_sum<4>(m2);
    if (active_row && lane == 0 && count > 0) {
      constexpr int CHUNKS = ceil_div(COLUMNS, STATS_CHUNK);
      gtco::store<2>(stats + (row * CHUNKS + chunk) * 2, Vec<float, 2>{{mean, m2}});
    }
  }
};

// Mean and sum of squared deviations of some columns of a row.
struct Moments {
  float mean, m2;
};

// Stores those of result `at`: f32[results, 2], or with PLANE results f32[2, PLANE], means first.
template <int PLANE>
__device__ __forceinline__ void put_moments(float* stats, int at, const Moments& moments) {
  if constexpr (PLANE > 0) {
    stats[at] = moments.mean;
    stats[PLANE + at] = moments.m2;
  } else {
    gtco::store<2>(stats + at * 2, Vec<float, 2>{{moments.mean, moments.m2}});
  }
}

// What an element adds to a sum of squared deviations beside its own distance.
template <class T>
__device__ __forceinline__ Moments as_moments(T x) {
  return {float(x), 0.0f};
}
template <>
__device__ __forceinline__ Moments as_moments(Moments x) {
  return x;
}

// Of the columns of both, of which there are `here` and `there`.
__device__ __forceinline__ Moments merged(const Moments& a, float here, const Moments& b,
                                          float there) {
  const float apart = b.mean - a.mean;
  const float share = here + there > 0.0f ? there / (here + there) : 0.0f;
  return {a.mean + apart * share, a.m2 + b.m2 + apart * apart * here * share};
}

// Sums of how far some numbers are from `origin`, and of the squares of that: what cancels is of
// the size of their spread, as long as the origin is one of them.
struct SumsApart {
  float origin, total, squares;

  __device__ __forceinline__ void add(const SumsApart& other) {
    total += other.total;
    squares += other.squares;
  }
  __device__ __forceinline__ SumsApart from(int apart) const {
    return {origin, __shfl_xor_sync(~0u, total, apart), __shfl_xor_sync(~0u, squares, apart)};
  }
  __device__ __forceinline__ Moments moments(float count) const {
    const float mean = total / count;
    return {origin + mean, ptx::max_nan(squares - total * mean, 0.0f)};
  }
};

// Over the eight lanes, four apart, that have rows of the same N groups of columns, which know one
// origin for each, N at most eight: a lane comes to hold one of them, whose number is returned. Of
// lanes that hold the same, `first` is the one that counts. A step halves what a lane has to add,
// until it is one.
template <int N>
__device__ __forceinline__ int add_over_rows(SumsApart (&sums)[N], bool& first) {
  const int lane = threadIdx.x % 32;
  int begin = 0, left = N;
  first = true;
#pragma unroll
  for (int apart = 16; apart >= 4; apart /= 2) {
    const bool upper = (lane & apart) != 0;
    if (left == 1) {
      sums[0].add(sums[0].from(apart));
      first = first && !upper;
      continue;
    }
    left /= 2;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const SumsApart low = sums[i], high = sums[i + left];
      const SumsApart given = {0.0f, upper ? low.total : high.total,
                               upper ? low.squares : high.squares};
      sums[i] = {upper ? high.origin : low.origin, upper ? high.total : low.total,
                 upper ? high.squares : low.squares};
      sums[i].add(given.from(apart));
    }
    begin += upper ? left : 0;
  }
  return begin;
}

// The same where eight lanes, four apart, hold 16 columns of a row, two each: 2 g and 2 g + 1, or
// with WIDTH 1 g and g + 8. Those of the two go to `moments`, for `merge_lanes`; `to` becomes where
// those of whole chunks belong.
template <int WIDTH>
struct StatsOfTransposed {
  float (&held)[2];
  const int first;  // of the two
  Moments& moments;
  float*& to;

  template <int COLUMNS, int V>
  __device__ __forceinline__ void store(float* stats, int, int col, const Vec<float, V>& values,
                                        bool) const {
    static_assert(WIDTH == 1 || COLUMNS % 16 == 0, "both of a pair lie inside");
#pragma unroll
    for (int i = 0; i < V; ++i) held[first + i] = values[i];
    to = stats;
    if (first + V < 2) return;
    const float apart = held[1] - held[0];
    moments = {0.5f * (held[0] + held[1]), 0.5f * apart * apart};
    if (COLUMNS % 16 != 0 && col >= COLUMNS) moments = {held[0], 0.0f};
  }
};

// Statistics of a warp's 16 columns from `col` on of ROWS rows, from those of eight lanes' pairs:
// `store(i, moments)` is called by the lane that comes to hold row i. A step brings two lanes
// together and leaves each half of the rows.
template <int COLUMNS, int ROWS, class Store>
__device__ __forceinline__ void merge_lanes(const Moments (&rows)[ROWS], int col, Store store) {
  const int lane = threadIdx.x % 32 / 4;
#pragma unroll
  for (int first = 0; first < ROWS; first += 8) {
    Moments held[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) held[i] = first + i < ROWS ? rows[first + i] : Moments{0.0f, 0.0f};
    float count = 2.0f;
    if constexpr (COLUMNS % 16 != 0)
      count = (col + lane < COLUMNS ? 1.0f : 0.0f) + (col + lane + 8 < COLUMNS ? 1.0f : 0.0f);
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) {
      const bool upper = (lane & apart) != 0;
      float there = count;
      if constexpr (COLUMNS % 16 != 0) there = __shfl_xor_sync(~0u, count, apart * 4);
#pragma unroll
      for (int i = 0; i < apart; ++i) {
        const Moments given = upper ? held[i] : held[i + apart];
        const Moments kept = upper ? held[i + apart] : held[i];
        const Moments taken = {__shfl_xor_sync(~0u, given.mean, apart * 4),
                               __shfl_xor_sync(~0u, given.m2, apart * 4)};
        held[i] = merged(kept, count, taken, there);
      }
      count += there;
    }
    if (first + lane < ROWS) store(first + lane, held[0]);
  }
}

// Keeps a functor's statistics of N results of each thread, two columns of each, for
// `merge_results`.
template <int N>
struct StatsOfResults {
  Moments (&held)[N];
  const int result;
  float*& to;

  template <int COLUMNS, int V>
  __device__ __forceinline__ void store(float* stats, int, int, const Vec<float, V>& values,
                                        bool) const {
    static_assert(V == 2, "two columns");
    const float apart = values[1] - values[0];
    held[result] = {0.5f * (values[0] + values[1]), 0.5f * apart * apart};
    to = stats;
  }
};

// Statistics of N results whose chunk LANES neighbouring lanes hold, each with `count` columns, two
// where it is WHOLE: `store(i, moments)` is called by the lane that comes to hold result i. A step
// brings two lanes together and leaves each half of the results, so that one takes two shuffles;
// taken one after the other each takes ten.
template <int LANES, bool WHOLE, int N, class Store>
__device__ __forceinline__ void merge_results(const Moments (&results)[N], float count,
                                              Store store) {
  constexpr int PADDED = power_of_two(N), KEPT = max_of(1, PADDED / LANES);
  constexpr int SPREAD = max_of(1, LANES / PADDED);  // lanes that come to hold the same
  const int lane = threadIdx.x % LANES;
  Moments held[PADDED];
#pragma unroll
  for (int i = 0; i < PADDED; ++i)
    held[i] = i < N && (WHOLE || count > 0.0f) ? results[i] : Moments{0.0f, 0.0f};
  if constexpr (WHOLE) count = 2.0f;
  int left = PADDED;
#pragma unroll
  for (int apart = LANES / 2; apart > 0; apart /= 2) {
    const bool upper = left > 1 && (lane & apart) != 0;
    float there = count;
    if constexpr (!WHOLE) there = __shfl_xor_sync(~0u, count, apart);
    const int half = left > 1 ? left / 2 : 0;  // of one result, each lane has a part
    left = max_of(1, left / 2);
#pragma unroll
    for (int i = 0; i < left; ++i) {
      // By value, so that no address is chosen and the results stay in registers.
      const Moments low = held[i], high = held[i + half];
      const bool gives_low = upper || half == 0;
      const Moments given = {gives_low ? low.mean : high.mean, gives_low ? low.m2 : high.m2};
      const Moments kept = {upper ? high.mean : low.mean, upper ? high.m2 : low.m2};
      const Moments taken = {__shfl_xor_sync(~0u, given.mean, apart),
                             __shfl_xor_sync(~0u, given.m2, apart)};
      held[i] = merged(kept, count, taken, there);
    }
    count += there;
  }
  if (lane % SPREAD != 0) return;
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int result = lane / SPREAD * KEPT + i;
    if (result < N) store(result, held[i]);
  }
}

// Statistics of one row's chunk at `col` from those of its four parts of 16 columns, stored where
// `stats` has those of this row.
template <int COLUMNS>
__device__ __forceinline__ void merge_chunk(const float* moments, float* stats, int row, int col) {
  constexpr int CHUNKS = ceil_div(COLUMNS, STATS_CHUNK);
  const auto count = [&](int i) {  // of part i's columns
    if constexpr (COLUMNS % STATS_CHUNK == 0) return 16.0f;
    return static_cast<float>(max_of(0, min_of(16, COLUMNS - col - 16 * i)));
  };
  Moments parts[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Vec<float, 2> part = load<2>(moments + 2 * i);
    parts[i] = {part[0], part[1]};
  }
  const Moments left = merged(parts[0], count(0), parts[1], count(1));
  const Moments right = merged(parts[2], count(2), parts[3], count(3));
  const Moments all = merged(left, count(0) + count(1), right, count(2) + count(3));
  gtco::store<2>(stats + (row * CHUNKS + col / STATS_CHUNK) * 2, Vec<float, 2>{{all.mean, all.m2}});
}

}  // namespace gtco
