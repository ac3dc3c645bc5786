// Pointwise kernels: each thread keeps VECTORS vectors of V columns in registers, and the group's
// body turns loads into stores, one line a node.
//
// Config: ROWS, COLUMNS, V (divides COLUMNS), VECTORS, THREADS.
#pragma once

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
      : first_(blockIdx.x * (C::THREADS * C::VECTORS) + threadIdx.x) {}

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

  // Neighbouring threads hold neighbouring vectors, so that every access coalesces.
  __device__ __forceinline__ int item(int s) const { return first_ + s * C::THREADS; }
  __device__ __forceinline__ int row(int s) const { return item(s) / ROW_VECTORS; }
  __device__ __forceinline__ int col(int s) const { return item(s) % ROW_VECTORS * V; }
  __device__ __forceinline__ bool active(int s) const { return item(s) < C::ROWS * ROW_VECTORS; }

  int first_;
};

template <class C, class Body>
__device__ __forceinline__ void elementwise(const Body& body) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  PointTile<C> tile;
  body(tile);
}

}  // namespace gtco
