// Pointwise kernels: each thread keeps VECTORS vectors of V columns in registers, and the group's
// body turns loads into stores, one line a node.
//
// Config: ROWS, COLUMNS, V (divides COLUMNS), VECTORS, THREADS.
#pragma once

#include "order.cuh"
#include "stats.cuh"

namespace gtco {

template <class T, int V>
__device__ T element_of(const Vec<T, V>&);

// What a load lambda f(row, col, active) -> Vec<T, V> gives an element of.
template <class F>
using loaded_t = decltype(element_of((*static_cast<F*>(nullptr))(0, 0, true)));

template <class C, class T, int N>
__device__ __forceinline__ Vec<C, N> vec_cast(const Vec<T, N>& values) {
  return map<N>([&](int i) { return static_cast<C>(values[i]); });
}

// A thread's N points of the iteration space (ROWS, COLUMNS).
template <class C>
class PointTile {
 public:
  static constexpr int V = C::V;
  static constexpr int N = C::V * C::VECTORS;
  static_assert(C::COLUMNS % V == 0, "a vector does not cross a row's end");

  __device__ __forceinline__ PointTile()
      : first_(in_order(blockIdx.x, gridDim.x) * (C::THREADS * C::VECTORS) + threadIdx.x) {}

  // f(row, col, active) for each vector; f gives a Vec<T, V>, zeros where not active.
  template <class F>
  __device__ __forceinline__ Vec<loaded_t<F>, N> vectors(F f) const {
    Vec<loaded_t<F>, N> r;  // (VECTORS, V)
#pragma unroll
    for (int s = 0; s < C::VECTORS; ++s) {
      const auto part = f(row(s), col(s), active(s));
#pragma unroll
      for (int i = 0; i < V; ++i) r[s * V + i] = part[i];
    }
    return r;
  }

  // f(row, col, active, vector) for each vector of `values`.
  template <class T, class F>
  __device__ __forceinline__ void store(const Vec<T, N>& values, F f) const {
#pragma unroll
    for (int s = 0; s < C::VECTORS; ++s)
      f(row(s), col(s), active(s), map<V>([&](int i) { return values[s * V + i]; }));
  }

 private:
  static constexpr int ROW_VECTORS = C::COLUMNS / V;

  // All vectors of a thread lie in one column, so that what differs by columns alone is loaded once
  // and stays in few registers; and each thread has all of them.
  static constexpr bool ONE_COLUMN = C::THREADS % ROW_VECTORS == 0;
  static constexpr bool EVEN = C::ROWS * ROW_VECTORS % (C::THREADS * C::VECTORS) == 0;

  // Neighbouring threads hold neighbouring vectors, so that every access coalesces.
  __device__ __forceinline__ int item(int s) const { return first_ + s * C::THREADS; }
  __device__ __forceinline__ int row(int s) const {
    if constexpr (ONE_COLUMN) return first_ / ROW_VECTORS + s * (C::THREADS / ROW_VECTORS);
    return item(s) / ROW_VECTORS;
  }
  __device__ __forceinline__ int col(int s) const {
    if constexpr (ONE_COLUMN) return first_ % ROW_VECTORS * V;
    return item(s) % ROW_VECTORS * V;
  }
  __device__ __forceinline__ bool active(int s) const {
    return EVEN || item(s) < C::ROWS * ROW_VECTORS;
  }

  int first_;
};

// Mean and 1/sqrt(var + eps) of each group of channels of the images that a block has points of,
// merged by the block from those of the CHUNKS parts of an image, which have COUNT elements of a
// group each: f32[IMAGES, CHUNKS, GROUPS, 2]. Lies in shared memory, [SPAN, GROUPS].
template <class C, int IMAGES, int CHUNKS, int GROUPS, int COUNT>
class GroupMoments {
 public:
  __device__ __forceinline__ GroupMoments(const float* stats, float eps)
      : first_(static_cast<int>(in_order(blockIdx.x, gridDim.x) * POINTS / IMAGE_POINTS)) {
    extern __shared__ __align__(1024) unsigned char smem[];
    moments_ = reinterpret_cast<RowMoments*>(smem);
    // Lanes side by side have groups side by side, which lie so in memory.
    constexpr int NEAR = 32 / PARTS;
    const int part = threadIdx.x % 32 / NEAR;
    const int own = threadIdx.x / 32 * NEAR + threadIdx.x % NEAR;
    constexpr float WHOLE = static_cast<float>(CHUNKS) * COUNT;
#pragma unroll 1
    for (int start = 0; start < SPAN * GROUPS; start += C::THREADS / PARTS) {
      const int unit = start + own, image = first_ + unit / GROUPS;
      const bool on = unit < SPAN * GROUPS && image < IMAGES;
      const float* from = stats + (on ? (image * CHUNKS * GROUPS + unit % GROUPS) * 2 : 0);
      // In one pass, against the first part's mean: what cancels is of the size of the spread.
      const float origin = from[0];
      float total = 0.0f, squares = 0.0f;
#pragma unroll 8
      for (int chunk = part; chunk < CHUNKS; chunk += PARTS) {
        const Vec<float, 2> each = load<2>(from + chunk * (GROUPS * 2));
        const float apart = each[0] - origin;
        total += apart;
        squares += each[1] + apart * apart * COUNT;
      }
      total = lanes_sum<32, NEAR>(total) / CHUNKS;
      squares = lanes_sum<32, NEAR>(squares) - total * total * WHOLE;
      if (on && part == 0)
        moments_[unit] = {origin + total, rsqrtf(ptx::max_nan(squares, 0.0f) / WHOLE + eps)};
    }
    __syncthreads();
  }

  // Those of group `at` of all images.
  __device__ __forceinline__ RowMoments at(int at) const { return moments_[at - first_ * GROUPS]; }

 private:
  static constexpr int IMAGE_POINTS = CHUNKS * COUNT * GROUPS;
  static constexpr int POINTS = C::THREADS * C::VECTORS * C::V;  // of a block
  static constexpr int SPAN = min_of(IMAGES, (POINTS + IMAGE_POINTS - 2) / IMAGE_POINTS + 1);
  static constexpr int lanes() {  // that share a group: as many as there are threads for
    int lanes = 1;
    while (lanes < 32 && 2 * lanes <= CHUNKS && 2 * lanes * SPAN * GROUPS <= C::THREADS) lanes *= 2;
    return lanes;
  }
  static constexpr int PARTS = lanes();

  int first_;
  RowMoments* moments_;
};

template <class C, class Body>
__device__ __forceinline__ void elementwise(const Body& body) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  PointTile<C> tile;
  body(tile);
}

}  // namespace gtco
