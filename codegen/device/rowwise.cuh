// Kernels that reduce whole rows: a row lives in the registers of LANES x WARPS_PER_ROW threads, in
// the compute type, and the group's body reduces it any number of times, one line a node.
//
// Config: ROWS, COLUMNS, V, LANES (threads of a warp that share a row), WARPS_PER_ROW, ROW_WARPS
// (how many such sets of warps a block has), ROWS_FIRST (neighbouring lanes hold neighbouring rows
// instead of neighbouring columns: for rows that are contiguous in memory where columns are not).
#pragma once

#include "elementwise.cuh"

namespace gtco {

template <class T>
__device__ __forceinline__ T lowest() {
  if constexpr (is_same<T, float> || is_same<T, double>) {
    return -math::infinity();
  } else if constexpr (T(-1) > T(0)) {  // unsigned or bool
    return T(0);
  } else {
    return static_cast<T>(1ull << (8 * sizeof(T) - 1));
  }
}

// A number that is larger where x is; equal for both zeros, the largest for NaN.
__device__ __forceinline__ u32 order_of(float x) {
  if (x != x) return ~0u;
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int offset) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_xor_sync(~0u, static_cast<int>(x), offset));
  } else {
    return __shfl_xor_sync(~0u, x, offset);
  }
}

// A thread's N elements of one row of the iteration space (ROWS, COLUMNS).
template <class C>
class RowTile {
 public:
  static constexpr int V = C::V;
  static constexpr int PARTS = C::LANES * C::WARPS_PER_ROW;  // threads of a row
  static constexpr int STEPS = ceil_div(C::COLUMNS, PARTS* V);
  static constexpr int N = STEPS * V;
  static constexpr int WARP_ROWS = 32 / C::LANES;
  static constexpr int BLOCK_ROWS = C::ROW_WARPS * WARP_ROWS;
  static constexpr int SMEM_BYTES =
      C::WARPS_PER_ROW == 1 ? 0 : 2 * 8 * C::WARPS_PER_ROW * BLOCK_ROWS;
  static_assert(C::LANES >= 1 && 32 % C::LANES == 0, "the lanes of a row divide a warp");

  __device__ __forceinline__ explicit RowTile(unsigned char* smem)
      : smem_(smem), block_(in_order(blockIdx.x, gridDim.x)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = C::ROWS_FIRST ? lane % WARP_ROWS : lane / C::LANES;
    const int warp_part = C::ROWS_FIRST ? lane / WARP_ROWS : lane % C::LANES;
    block_row_ = warp / C::WARPS_PER_ROW * WARP_ROWS + warp_row;
    row_warp_ = warp % C::WARPS_PER_ROW;
    part_ = row_warp_ * C::LANES + warp_part;
  }

  __device__ __forceinline__ int row() const { return block_ * BLOCK_ROWS + block_row_; }
  __device__ __forceinline__ bool active() const { return row() < C::ROWS; }
  // The one thread of a row that stores its row values.
  __device__ __forceinline__ bool leads() const { return part_ == 0 && active(); }

  // f(row, col, active) for each vector; f gives a Vec<T, V>, zeros where not active.
  template <class F>
  __device__ __forceinline__ Vec<loaded_t<F>, N> vectors(F f) const {
    Vec<loaded_t<F>, N> r;  // (STEPS, V)
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const auto part = f(row(), col(s), active(s));
#pragma unroll
      for (int i = 0; i < V; ++i) r[s * V + i] = part[i];
    }
    return r;
  }

  // f(row, col, active, vector) for each vector of `values`.
  template <class T, class F>
  __device__ __forceinline__ void store(const Vec<T, N>& values, F f) const {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      f(row(), col(s), active(s), map<V>([&](int i) { return values[s * V + i]; }));
  }

  template <class T>
  __device__ __forceinline__ T sum(const Vec<T, N>& x) {
    T r = T(0);
#pragma unroll
    for (int i = 0; i < N; ++i) r += inside(i) ? x[i] : T(0);
    return across(r, [](T a, T b) { return a + b; });
  }

  template <class T>
  __device__ __forceinline__ T mean(const Vec<T, N>& x) {
    return sum(x) / T(C::COLUMNS);
  }

  template <class T>
  __device__ __forceinline__ T amax(const Vec<T, N>& x) {
    T r = lowest<T>();
#pragma unroll
    for (int i = 0; i < N; ++i) r = inside(i) ? math::max_nan(r, x[i]) : r;
    return across(r, [](T a, T b) { return math::max_nan(a, b); });
  }

  // The column of the largest element, the first of equal ones; NaN is larger than all.
  __device__ __forceinline__ i64 argmax(const Vec<float, N>& x) {
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const u64 key = u64(order_of(x[i])) << 32 | ~static_cast<u32>(col(i / V) + i % V);
      best = inside(i) && key > best ? key : best;
    }
    best = across(best, [](u64 a, u64 b) { return a > b ? a : b; });
    return static_cast<i64>(~static_cast<u32>(best));
  }

  template <class T>
  __device__ __forceinline__ Vec<T, N> softmax(const Vec<T, N>& x) {
    const T top = amax(x);
    const auto powers = map<N>([&](int i) { return math::exp(x[i] - top); });
    const T scale = T(1) / sum(powers);
    return map<N>([&](int i) { return powers[i] * scale; });
  }

  // The sums of each element and all before it.
  template <class T>
  __device__ __forceinline__ Vec<T, N> cumsum(const Vec<T, N>& x) {
    return scan(x, T(0), [](T a, T b) { return a + b; });
  }

  // The products of each element and all before it.
  template <class T>
  __device__ __forceinline__ Vec<T, N> cumprod(const Vec<T, N>& x) {
    return scan(x, T(1), [](T a, T b) { return a * b; });
  }

  // Sum of the squares of `apart`, the row's distances from its mean.
  template <class T>
  __device__ __forceinline__ T spread(const Vec<T, N>& apart) {
    return sum(map<N>([&](int i) { return apart[i] * apart[i]; }));
  }

  // (x - mean) / sqrt(var + eps): the mean first, then the spread around it.
  template <class T>
  __device__ __forceinline__ Vec<T, N> normalize(const Vec<T, N>& x, T eps) {
    const T centre = mean(x);
    const auto apart = map<N>([&](int i) { return x[i] - centre; });
    const T m2 = spread(apart);
    const T rstd = math::rsqrt(m2 / T(C::COLUMNS) + eps);
    return map<N>([&](int i) { return apart[i] * rstd; });
  }

  // Mean and sum of squared deviations of each row, as of `put_moments`.
  template <int PLANE = 0, class T>
  __device__ __forceinline__ void store_moments(float* stats, const Vec<T, N>& x) {
    const T centre = mean(x);
    const T m2 = spread(map<N>([&](int i) { return x[i] - centre; }));
    if (leads()) put_moments<PLANE>(stats, row(), {float(centre), float(m2)});
  }

  // The same of rows of which each element is the mean of `count` and one of their `m2s`.
  __device__ __forceinline__ void merge_moments(float* stats, const Vec<float, N>& means,
                                                const Vec<float, N>& m2s, float count) {
    const float centre = mean(means);
    const float between = spread(map<N>([&](int i) { return means[i] - centre; }));
    const float within = sum(m2s);
    if (leads()) put_moments<0>(stats, row(), {centre, fmaf(count, between, within)});
  }

  // Statistics per chunk of 64 columns of what is stored as Ts; f32[ROWS, chunks, 2].
  template <class Stored, class T>
  __device__ __forceinline__ void store_row_stats(float* stats, const Vec<T, N>& x) const {
    static_assert(!C::ROWS_FIRST && V >= 2, "neighbouring lanes hold a chunk");
    static_assert(C::LANES * V >= STATS_CHUNK, "a chunk lies in one warp and one step");
    constexpr int CHUNK_LANES = STATS_CHUNK / V, CHUNKS = ceil_div(C::COLUMNS, STATS_CHUNK);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int chunk = col(s) / STATS_CHUNK;
      const int count = min_of(STATS_CHUNK, C::COLUMNS - chunk * STATS_CHUNK);
      const auto values = map<V>([&](int i) { return float(round_to<Stored>(x[s * V + i])); });
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < V; ++i) total += inside(s * V + i) ? values[i] : 0.0f;
      const float mean = lanes_sum<CHUNK_LANES>(total) / count;
      float m2 = 0.0f;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float apart = values[i] - mean;
        m2 += inside(s * V + i) ? apart * apart : 0.0f;
      }
      m2 = lanes_sum<CHUNK_LANES>(m2);
      if (active(s) && col(s) % STATS_CHUNK == 0)
        gtco::store<2>(stats + (row() * CHUNKS + chunk) * 2, Vec<float, 2>{{mean, m2}});
    }
  }

 private:
  __device__ __forceinline__ int col(int s) const { return (s * PARTS + part_) * V; }
  __device__ __forceinline__ bool active(int s) const {
    return active() && (C::COLUMNS % (PARTS * V) == 0 || col(s) < C::COLUMNS);
  }
  // Whether element i of this thread lies within the row.
  __device__ __forceinline__ bool inside(int i) const {
    return C::COLUMNS % (PARTS * V) == 0 || col(i / V) + i % V < C::COLUMNS;
  }

  // Combines `x` of all threads of a row; each gets the same bits.
  template <class T, class F>
  __device__ __forceinline__ T across(T x, F combine) {
    constexpr int STRIDE = C::ROWS_FIRST ? WARP_ROWS : 1;
#pragma unroll
    for (int offset = C::LANES / 2; offset > 0; offset /= 2)
      x = combine(x, shuffle_xor(x, offset * STRIDE));
    if constexpr (C::WARPS_PER_ROW > 1) {
      static_assert(sizeof(T) <= 8, "a slot has 8 bytes");
      // Two sets of slots in turn: a slot is written again only after a later barrier.
      T* slots =
          reinterpret_cast<T*>(smem_ + turn_ * (SMEM_BYTES / 2));  // (WARPS_PER_ROW, BLOCK_ROWS)
      turn_ ^= 1;
      if (part_ % C::LANES == 0) slots[row_warp_ * BLOCK_ROWS + block_row_] = x;
      __syncthreads();
      x = slots[block_row_];
#pragma unroll
      for (int w = 1; w < C::WARPS_PER_ROW; ++w) x = combine(x, slots[w * BLOCK_ROWS + block_row_]);
    }
    return x;
  }

  // Each element combined with all before it; `none` combined with anything changes nothing. What
  // lies behind the row, zeros or not, reaches no element of it.
  template <class T, class F>
  __device__ __forceinline__ Vec<T, N> scan(const Vec<T, N>& x, T none, F combine) {
    Vec<T, N> r;
    T before = none;  // of earlier steps
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      T total = none;
#pragma unroll
      for (int i = s * V; i < (s + 1) * V; ++i) r[i] = total = combine(total, x[i]);
      const T ahead = earlier(total, before, none, combine);
#pragma unroll
      for (int i = s * V; i < (s + 1) * V; ++i) r[i] = combine(ahead, r[i]);
    }
    return r;
  }

  // `before` and `total` of the threads of a row ahead of this one, combined; that of all its
  // threads is combined with `before`.
  template <class T, class F>
  __device__ __forceinline__ T earlier(T total, T& before, T none, F combine) {
    constexpr int STRIDE = C::ROWS_FIRST ? WARP_ROWS : 1;
    T ahead = none;
#pragma unroll
    for (int offset = 1; offset < C::LANES; offset *= 2) {
      const T other = shuffle_xor(total, offset * STRIDE);
      if (part_ % C::LANES & offset) ahead = combine(ahead, other);
      total = combine(total, other);
    }
    if constexpr (C::WARPS_PER_ROW > 1) {
      T* slots =
          reinterpret_cast<T*>(smem_ + turn_ * (SMEM_BYTES / 2));  // (WARPS_PER_ROW, BLOCK_ROWS)
      turn_ ^= 1;
      if (part_ % C::LANES == 0) slots[row_warp_ * BLOCK_ROWS + block_row_] = total;
      __syncthreads();
      total = none;
#pragma unroll
      for (int w = 0; w < C::WARPS_PER_ROW; ++w) {
        if (w == row_warp_) ahead = combine(ahead, total);
        total = combine(total, slots[w * BLOCK_ROWS + block_row_]);
      }
    }
    const T from = before;
    before = combine(before, total);
    return combine(from, ahead);
  }

  unsigned char* smem_;
  int turn_ = 0;
  const u32 block_;
  int block_row_, row_warp_, part_;
};

template <class C, class Body>
__device__ __forceinline__ void rowwise(const Body& body) {
  extern __shared__ __align__(1024) unsigned char smem[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  RowTile<C> tile(smem);
  body(tile);
}

}  // namespace gtco
