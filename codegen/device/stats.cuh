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

// Statistics of one row from its chunks. `stats` points at the row's first chunk.
template <int COLUMNS>
__device__ __forceinline__ RowMoments merge_row_stats(const float* stats, float eps) {
  constexpr int CHUNKS = ceil_div(COLUMNS, STATS_CHUNK);
  float means[CHUNKS], m2[CHUNKS];
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const Vec<float, 2> chunk = load<2>(stats + 2 * i);
    means[i] = chunk[0];
    m2[i] = chunk[1];
    total += means[i] * min_of(STATS_CHUNK, COLUMNS - i * STATS_CHUNK);
  }
  const float mean = total / COLUMNS;
  float spread = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const float apart = means[i] - mean;
    spread += m2[i] + apart * apart * min_of(STATS_CHUNK, COLUMNS - i * STATS_CHUNK);
  }
  return {mean, rsqrtf(spread / COLUMNS + eps)};
}

// Called by all 32 lanes: neighbouring lanes hold neighbouring vectors of one row, and a chunk's
// first vector lies in a lane that is a multiple of 64 / V. The first lane of a chunk stores.
template <int COLUMNS, int V>
__device__ __forceinline__ void store_row_stats(float* stats, int row, int col,
                                                const Vec<float, V>& values, bool active) {
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
    store<2>(stats + (row * CHUNKS + chunk) * 2, Vec<float, 2>{{mean, m2}});
  }
}

}  // namespace gtco
