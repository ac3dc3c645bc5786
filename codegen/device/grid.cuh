// Which block of its grid a kernel's is: CUDA launches grids that are long along x alone.
#pragma once

#include "types.cuh"

namespace gtco {

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
