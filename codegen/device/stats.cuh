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

// Stores a functor's statistics where neighbouring lanes hold neighbouring vectors of a row, and a
// chunk's first vector lies in a lane that is a multiple of 64 / V. Called by all 32 lanes; the
// first of a chunk stores.
struct StatsOfLanes {
  template <int COLUMNS, int V>
  __device__ __forceinline__ void store(float* stats, int row, int col, const Vec<float, V>& values,
                                        bool active) const {
    static_assert(V >= 2 && STATS_CHUNK % V == 0, "64 / V lanes of one warp hold a chunk");
    constexpr int LANES = STATS_CHUNK / V;
    const int chunk = col / STATS_CHUNK;
    const int count = min_of(STATS_CHUNK, COLUMNS - chunk * STATS_CHUNK);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) sum += active ? values[i] : 0.0f;
    const float mean = lanes_sum<LANES>(sum) / count;
    float m2 = 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) m2 += active ? (values[i] - mean) * (values[i] - mean) : 0.0f;
    m2 = lanes_sum<LANES>(m2);
    if (active && col % STATS_CHUNK == 0) {
      constexpr int CHUNKS = ceil_div(COLUMNS, STATS_CHUNK);
      gtco::store<2>(stats + (row * CHUNKS + chunk) * 2, Vec<float, 2>{{mean, m2}});
    }
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

}  // namespace gtco
