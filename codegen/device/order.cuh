// In which order a kernel takes what it walks over, a knob of its launch: from the first to the
// last, or from the last to the first. What the kernel before has touched last lies in L2, and the
// larger it is the less of what that touched first.
#pragma once

#include "ptx.cuh"

namespace gtco {

#ifdef GTCO_BACKWARD
constexpr bool BACKWARD = true;
#else
constexpr bool BACKWARD = false;
#endif

// Which of `count` comes as number `i`. TOGETHER neighbours each, such as the blocks of a cluster,
// keep their order; they divide `count`.
template <int TOGETHER = 1, class T>
__device__ __forceinline__ T in_order(T i, T count) {
  if constexpr (BACKWARD) {
    const T rank = i % static_cast<T>(TOGETHER);
    return count - static_cast<T>(TOGETHER) - (i - rank) + rank;
  } else {
    return i;
  }
}

template <class C, class = void>
struct LongAxis : Constant<int, 0> {};
template <class C>
struct LongAxis<C, decltype(static_cast<void>(C::LONG_AXIS))> : Constant<int, C::LONG_AXIS> {};

// Where a kernel finds its blocks along AXIS of 0 to 2, x to z. Of a grid that is longer along one
// of these than CUDA launches, the configuration says LONG_AXIS: that and x are exchanged.
template <class C, int AXIS>
inline constexpr int launched_axis =
    AXIS == LongAxis<C>::value ? 0 : (AXIS == 0 ? LongAxis<C>::value : AXIS);

// Which block along AXIS this is.
template <class C, int AXIS>
__device__ __forceinline__ unsigned block_along() {
  constexpr int AT = launched_axis<C, AXIS>;
  return AT == 0 ? blockIdx.x : (AT == 1 ? blockIdx.y : blockIdx.z);
}

// Of how many.
template <class C, int AXIS>
__device__ __forceinline__ unsigned blocks_along() {
  constexpr int AT = launched_axis<C, AXIS>;
  return AT == 0 ? gridDim.x : (AT == 1 ? gridDim.y : gridDim.z);
}

}  // namespace gtco
