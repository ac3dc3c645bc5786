// A piece of a concat that another kernel has stored, copied by the blocks that have nothing else
// to do.
//
// Config: ROWS, COLUMNS, V (columns of one access), THREADS. From and To have `at(row, col)`.
#pragma once

#include "order.cuh"
#include "vector.cuh"

namespace gtco {

template <class C, class From, class To>
__device__ __forceinline__ void copy_piece(const From& from, const To& to, int block) {
  static_assert(C::COLUMNS % C::V == 0, "a vector does not cross a row's end");
  constexpr int VECTORS = C::COLUMNS / C::V;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int blocks = ceil_div(C::ROWS * VECTORS, C::THREADS);
  const int item = in_order(block, blocks) * C::THREADS + threadIdx.x;
  const int row = item / VECTORS, col = item % VECTORS * C::V;
  if (row >= C::ROWS) return;
  const auto vector = load_packed<C::V>(from.at(row, col));
  *reinterpret_cast<decltype(load_packed<C::V>(to.base))*>(to.at(row, col)) = vector;
}

}  // namespace gtco
