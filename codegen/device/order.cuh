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

}  // namespace gtco
